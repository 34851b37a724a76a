"""What a load on devices decides before anything is loaded, and what a worker imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmd.backend import assembly, protocol
from llmd.backend.engine.engine import EngineRequest
from llmd.backend.kernels import packed
from llmd.backend.models.checkpoint import UnsupportedModel, open_checkpoint
from llmd.backend.protocol import DevicePart, Load, ModelFile, SamplingParams
from llmd.backend.runner import gpu_open
from llmd.backend.runner.gpu_weights import stored_packed
from llmd.backend.runner.model_runner import NoMemory

from .gpu_streams import run

A, B = torch.device("cuda:0"), torch.device("cuda:1")


def test_the_blocks_are_as_many_as_the_tightest_device_holds() -> None:
    bytes_of_a_block = {A: 1000, B: 3000}
    assert gpu_open.plan_blocks(bytes_of_a_block, {A: 10**9, B: 40_000}, 4_000, 0, 10**6) == 10
    assert gpu_open.plan_blocks(bytes_of_a_block, {A: 10**9, B: 10**9}, 0, 0, 77) == 77
    assert gpu_open.plan_blocks(bytes_of_a_block, {A: 10**9, B: 10**9}, 0, 40_000, 77) == 10


def test_a_device_without_layers_limits_nothing() -> None:
    assert gpu_open.plan_blocks({A: 1000, B: 0}, {A: 10**9, B: 0}, 0, 5_000, 77) == 5


def test_no_room_for_the_cache_is_said_with_both_sizes() -> None:
    with pytest.raises(NoMemory, match=r"needs 2000 bytes at least.*cuda:0 has 3000 bytes free"):
        gpu_open.plan_blocks({A: 1000}, {A: 3000}, 2500, 0, 50)


def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"cuda:7 is not there: torch .* sees \d+ GPUs"):
        gpu_open.refuse_missing(torch.device("cuda:7"))
    with pytest.raises(UnsupportedModel, match="cannot live on mps"):
        gpu_open.refuse_missing(torch.device("mps"))
    gpu_open.refuse_missing(torch.device("cpu:1"))


def test_the_dtype_is_the_devices() -> None:
    cpus = [torch.device("cpu"), torch.device("cpu:1")]
    assert gpu_open.choose_dtype("auto", cpus) == torch.float32
    assert gpu_open.choose_dtype("bfloat16", cpus) == torch.bfloat16
    with pytest.raises(UnsupportedModel, match="int3 is not supported; auto, bfloat16"):
        gpu_open.choose_dtype("int3", cpus)


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_a_ggufs_bytes_are_packed_without_loss(smollm2_gguf: Path, part: str) -> None:
    """Repacked as they lie in the file, rows unpermuted, they mean what the reader says."""
    checkpoint = open_checkpoint([ModelFile("model.gguf", "weights", str(smollm2_gguf))])
    name = f"model.layers.3.{part}.weight"
    found = stored_packed(checkpoint, name, torch.device("cpu"))
    assert found is not None and found.bits == 4
    assert torch.equal(packed.dequantize(found), checkpoint.tensor(name, torch.float32))


SERVE = """
import io, sys
from llmd.backend.worker import serve
out = io.BytesIO()
line = sys.stdin.buffer.read()
code = serve(io.BufferedReader(io.BytesIO(line)), out)
print(out.getvalue().decode().splitlines()[-1][:300], file=sys.stderr)
unwanted = ("triton", "cuda")
print(*sorted(m for m in sys.modules if "gpu_" in m or m.split(".")[0] in unwanted))
sys.exit(code)
"""


def serve(load: Load) -> subprocess.CompletedProcess[str]:
    """A worker that loads and ends at once; prints what it imported for GPUs."""
    return subprocess.run(
        [sys.executable, "-c", SERVE],
        input=protocol.encode(load).decode(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def load_of(gguf: Path, parts: list[DevicePart], dtype: str = "float32") -> Load:
    file = ModelFile("model.gguf", "weights", str(gguf))
    return Load(name="tiny", digest="d", files=[file], parts=parts, dtype=dtype)


def test_without_a_gpu_a_worker_imports_nothing_of_all_this(smollm2_gguf: Path) -> None:
    done = serve(load_of(smollm2_gguf, [DevicePart("cpu", -1)], "auto"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_a_load_split_over_two_devices_says_the_same(smollm2_gguf: Path) -> None:
    """From the message to the tokens, on the real model: the CPU stands in for both devices."""
    split = load_model(load_of(smollm2_gguf, [DevicePart("cpu:0", 10), DevicePart("cpu:1", -1)]))
    assert split.ready.details["layers"] == ["cpu:0"] * 10 + ["cpu:1"] * 20
    assert "torch kernels: Triton does not run on cpu" in split.ready.details["kernels"]["cpu:0"]
    assert split.ready.weights_vram_bytes == 0
    told = continued(split)
    del split
    assert told == continued(load_model(load_of(smollm2_gguf, [])))


def load_model(load: Load) -> assembly.Model:
    return assembly.load_model(load, lambda fraction, stage: None)


def continued(model: assembly.Model) -> tuple[int, ...]:
    """Twelve greedy tokens."""
    prompt = tuple(model.tokenizer.encode("The capital of France is"))
    greedy = SamplingParams(temperature=0.0)
    request = EngineRequest("a", prompt, len(prompt), max_tokens=12, sampling=greedy)
    return run(model.engine, [request])["a"]


def test_a_worker_says_which_gpu_is_missing(smollm2_gguf: Path) -> None:
    done = serve(load_of(smollm2_gguf, [DevicePart("cuda:7", -1)]))
    assert done.returncode == 1
    assert "cuda:7 is not there" in done.stderr
