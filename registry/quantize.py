"""A GGUF of full-precision weights made into one of fewer bits. A program, and its caller's side.

    quantize(source, target, "Q4_K_M", on_progress)   starts the program below and follows it
    python -m llmd.registry.quantize SOURCE TARGET LEVEL

A program of its own, since it keeps a core busy for minutes, which the daemon's event loop must not
feel, and numpy's memory goes back to the system with it.

Which tensor gets which type follows the habits of the GGUF world: matrices only; norms, router
weights and small tables stay; at Q4_K_M the output matrix and half of the value and down
projections get six bits; a row that is no whole number of 256 falls back to blocks of 32.

Source: the mixtures as described by the ggml project's quantization tool.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from .errors import BadModelFile, BadRequest, NotEnoughSpace, Unsupported
from .formats import gguf
from .formats.errors import FormatError
from .formats.gguf import GGUFHeader, TensorInfo
from .formats.gguf_write import TensorOut, uint_pair, write_gguf

# Level: (type of most matrices, general.file_type).
LEVELS = {
    "F32": ("F32", 0),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "Q8_0": ("Q8_0", 7),
    "Q4_0": ("Q4_0", 2),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_K_M": ("Q4_K", 15),
}
OTHER_NAMES = {"Q4_K": "Q4_K_M"}
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}
CHUNK_WEIGHTS = 1 << 17  # what a core's cache holds ten times
_KEPT = re.compile(r"norm|ffn_gate_inp|ssm_conv|_embd_norm|position_embd|token_types|rope_freqs")
_LAYER = re.compile(r"blk\.(\d+)\.")


def checked_level(text: str) -> str:
    """The level in its usual spelling. Raises BadRequest."""
    level = OTHER_NAMES.get(text.upper(), text.upper())
    if level not in LEVELS:
        known = ", ".join([*LEVELS, *OTHER_NAMES])
        raise BadRequest(f"unsupported quantization type {text}; supported are {known}")
    return level


def check_source(header: GGUFHeader, name: str) -> None:
    """Raises Unsupported for a model that is quantized already."""
    wrong = {tensor.type for tensor in header.tensors.values()} - PLAIN.keys()
    if wrong:
        raise Unsupported(
            f"quantization is only supported for F16, BF16 and F32 models; {name} has tensors "
            f"of type {', '.join(sorted(wrong))}"
        )


def types_at(header: GGUFHeader, level: str) -> dict[str, str]:
    """The type of every tensor at this level."""
    num_layers = 1 + max(
        (int(match[1]) for name in header.tensors if (match := _LAYER.match(name))), default=0
    )
    is_tied = "output.weight" not in header.tensors
    return {
        name: _type_of(tensor, level, num_layers, is_tied)
        for name, tensor in header.tensors.items()
    }


def _type_of(tensor: TensorInfo, level: str, num_layers: int, is_tied: bool) -> str:
    usual, _ = LEVELS[level]
    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith("weight")
    if not is_matrix or _KEPT.search(tensor.name):
        return tensor.type
    if usual == "Q4_K":
        if tensor.name == "output.weight" or (is_tied and tensor.name == "token_embd.weight"):
            usual = "Q6_K"
        elif level == "Q4_K_M" and re.search(r"attn_v|ffn_down", tensor.name):
            usual = "Q6_K" if _has_more_bits(tensor.name, num_layers) else usual
    row = tensor.shape[-1]
    if usual.endswith("_K") and row % 256:
        usual = "Q5_0" if usual == "Q4_K" else "Q8_0"
    return tensor.type if usual not in PLAIN and row % 32 else usual


def _has_more_bits(name: str, num_layers: int) -> bool:
    """The first and the last eighth of the layers, and every third in between."""
    match = _LAYER.match(name)
    if match is None:
        return False
    layer, eighth = int(match[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def size_at(header: GGUFHeader, level: str) -> int:
    """Bytes of all tensors at this level."""
    types = types_at(header, level)
    return sum(
        TensorOut(tensor.name, tensor.shape, types[tensor.name], tuple).size_bytes
        for tensor in header.tensors.values()
    )


# ------------------------------------------------------------------- the caller's side


def quantize(
    source: Path, target: Path, level: str, on_progress: Callable[[int, int], None]
) -> None:
    """Blocking. Told the bytes written and their sum. Raises a RegistryError."""
    follow("quantize", [str(source), str(target), level], target, on_progress)


def follow(
    program: str, arguments: Sequence[str], target: Path, on_progress: Callable[[int, int], None]
) -> None:
    """Run a program of this package that writes `target` and tells its progress as JSON lines."""
    command = [sys.executable, "-P", "-m", f"{__package__}.{program}", *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        for line in process.stdout:
            told: dict[str, Any] = json.loads(line)
            if "no_space" in told:
                raise NotEnoughSpace(told["no_space"], told["free"], str(target.parent))
            if "error" in told:
                raise BadModelFile(told["error"])
            on_progress(told["completed"], told["total"])
        if process.wait() != 0:
            last = process.stderr.read().strip().splitlines()[-1:]
            raise BadModelFile(f"quantizing failed: {''.join(last) or process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


# ------------------------------------------------------------------------ the program


def main(arguments: list[str]) -> int:
    """One JSON line for each step of progress, or for what went wrong."""
    source, target, level = Path(arguments[0]), Path(arguments[1]), arguments[2]
    header = gguf.read_header(source, max_items=0)
    total = size_at(header, level)
    told = -1

    def on_written(completed: int) -> None:
        nonlocal told
        if completed * 200 // max(total, 1) > told:
            told = completed * 200 // max(total, 1)
            print(json.dumps({"completed": completed, "total": total}), flush=True)

    try:
        with target.open("wb") as file:
            write_gguf(file, _pairs(source, level), _tensors(source, header, level), on_written)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        print(json.dumps({"no_space": total, "free": free, "why": str(error)}), flush=True)
        return 1
    return 0


def _pairs(source: Path, level: str) -> list[tuple[str, bytes]]:
    changed = {"general.file_type", "general.quantization_version"}
    kept = [pair for pair in gguf.read_pairs(source) if pair[0] not in changed]
    return [
        *kept,
        uint_pair("general.file_type", LEVELS[level][1]),
        uint_pair("general.quantization_version", 2),
    ]


def _tensors(source: Path, header: GGUFHeader, level: str) -> list[TensorOut]:
    types = types_at(header, level)

    def out(tensor: TensorInfo) -> TensorOut:
        type_name = types[tensor.name]
        return TensorOut(
            tensor.name, tensor.shape, type_name, lambda: _chunks(source, tensor, type_name)
        )

    return [out(tensor) for tensor in header.tensors.values()]


def _chunks(source: Path, tensor: TensorInfo, type_name: str) -> Iterable[bytes]:
    """The tensor's bytes in its new type, some rows at a time."""
    from .block_quants import QUANTIZERS, as_numbers, floats_of

    for raw in raw_chunks(source, tensor, CHUNK_WEIGHTS * PLAIN[tensor.type]):
        if type_name == tensor.type:
            yield raw
            continue
        weights = floats_of(raw, tensor.type)
        if type_name in QUANTIZERS:
            block, function = QUANTIZERS[type_name]
            yield function(weights.reshape(-1, block)).tobytes()
        else:
            yield as_numbers(weights, type_name)


class Stored(Protocol):
    """Where a tensor lies in its file."""

    @property
    def offset(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


def raw_chunks(source: Path, tensor: Stored, chunk_bytes: int) -> Iterator[bytes]:
    """Its bytes, at most so many at a time. Raises FormatError if the file ends early, OSError."""
    left = tensor.size_bytes
    with source.open("rb") as file:
        file.seek(tensor.offset)
        while left:
            raw = file.read(min(left, chunk_bytes))
            if not raw:
                raise FormatError(f"{source.name} became shorter while it was read")
            left -= len(raw)
            yield raw


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
