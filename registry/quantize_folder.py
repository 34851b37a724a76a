"""A safetensors model of full-precision weights made into one of fewer bits. A program.

    python -m llmd.registry.quantize_folder TARGET LEVEL SHARD...

The names stay, and so do tokenizer and configuration, but for one entry of config.json that
`settings_at` makes. In place of a matrix stand three tensors, in the layout of MLX:

    stem.weight  uint32 [N, K · bits / 32]   codes q, the first input in the lowest bits
    stem.scales  stem.biases  float16 [N, K / 32]      w = q · scale + bias

    Q8_0    8 bits, bias -128 · scale        Q4_0    4 bits, bias -8 · scale
    Q4_K_S  4 bits, scale and bias searched; Q4_K_M  the same, and 8 bits for what needs more

Embeddings and the output matrix have 8 bits at every level. Norms, routers, convolutions, and
tensors that are no matrices (experts in one tensor) stay as they are. F32, F16 and BF16 change the
numbers alone. All shards become one file, which is written once from front to back.

Source: MLX's description of affine quantisation; issue 4.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BadModelFile, Unsupported
from .formats import safetensors
from .formats.errors import FormatError
from .formats.safetensors import TensorInfo
from .quantize import raw_chunks

GROUP = 32
PLAIN = {"F32": 4, "F16": 2, "BF16": 2}
CHUNK_WEIGHTS = 1 << 17
_KEPT = re.compile(r"norm|router|\.gate\.weight|conv|position|token_type|rotary|lora")
_AT_THE_ENDS = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b")
_NEEDS_MORE = re.compile(r"v_proj|down_proj|\bw2\b")
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the result. `bits` 0: the numbers stay, as `dtype`."""

    source: Path
    tensor: TensorInfo
    dtype: str
    bits: int = 0

    @property
    def stem(self) -> str:
        return self.tensor.name.removesuffix(".weight")

    def entries(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Name, dtype, shape and bytes of what is written, in order."""
        if not self.bits:
            size = self.tensor.num_elements * PLAIN.get(self.dtype, 0) or self.tensor.size_bytes
            return [(self.tensor.name, self.dtype, self.tensor.shape, size)]
        rows, columns = self.tensor.shape
        words, groups = columns * self.bits // 32, columns // GROUP
        return [
            (f"{self.stem}.weight", "U32", (rows, words), rows * words * 4),
            (f"{self.stem}.scales", "F16", (rows, groups), rows * groups * 2),
            (f"{self.stem}.biases", "F16", (rows, groups), rows * groups * 2),
        ]


def parts_at(shards: Sequence[Path], level: str) -> list[Part]:
    """What the result holds. Raises BadModelFile, or Unsupported if it is quantized already."""
    found: list[tuple[Path, TensorInfo]] = []
    for path in shards:
        try:
            found += [(path, tensor) for tensor in safetensors.read_header(path).tensors.values()]
        except FormatError as error:
            raise BadModelFile(str(error)) from None
    wrong = {tensor.dtype for _, tensor in found if len(tensor.shape) > 1} - PLAIN.keys()
    if wrong:
        raise Unsupported(
            "quantization is only supported for F16, BF16 and F32 models; this one has tensors of "
            f"type {', '.join(sorted(wrong))}"
        )
    names = (_LAYER.search(tensor.name) for _, tensor in found)
    num_layers = 1 + max((int(match[1]) for match in names if match), default=0)
    return [_part(path, tensor, level, num_layers) for path, tensor in found]


def _part(path: Path, tensor: TensorInfo, level: str, num_layers: int) -> Part:
    is_matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    if level in PLAIN:
        is_number = tensor.dtype in PLAIN and len(tensor.shape) > 1
        return Part(path, tensor, level if is_number else tensor.dtype)
    if not is_matrix or _KEPT.search(tensor.name) or tensor.shape[1] % GROUP:
        return Part(path, tensor, tensor.dtype)
    has_eight = level == "Q8_0" or _AT_THE_ENDS.search(tensor.name) is not None
    if level == "Q4_K_M" and _NEEDS_MORE.search(tensor.name):
        has_eight = has_eight or _has_more_bits(tensor.name, num_layers)
    return Part(path, tensor, "U32", 8 if has_eight else 4)


def _has_more_bits(name: str, num_layers: int) -> bool:
    """The first and the last eighth of the layers, and every third in between."""
    match = _LAYER.search(name)
    if match is None:
        return False
    layer, eighth = int(match[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def size_of(parts: Sequence[Part]) -> int:
    """Bytes of all tensors."""
    return sum(size for part in parts for _, _, _, size in part.entries())


def settings_at(config: Mapping[str, Any], parts: Sequence[Part], level: str) -> dict[str, Any]:
    """The config.json that belongs to these parts."""
    if level in PLAIN:
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
        return {**config, **dict.fromkeys(keys, names[level])}
    usual = 8 if level == "Q8_0" else 4
    settings: dict[str, Any] = {"group_size": GROUP, "bits": usual, "mode": "affine"}
    for part in parts:
        if part.bits and part.bits != usual:
            settings[part.stem] = {"group_size": GROUP, "bits": part.bits}
    return {**config, "quantization": settings}


# ------------------------------------------------------------------------ the program


def main(arguments: list[str]) -> int:
    """One JSON line for each step of progress, or for what went wrong."""
    target, level, shards = Path(arguments[0]), arguments[1], [Path(p) for p in arguments[2:]]
    parts = parts_at(shards, level)
    total = size_of(parts)
    try:
        with target.open("wb") as file:
            _write(file, parts, level, total)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        print(json.dumps({"no_space": total, "free": free, "why": str(error)}), flush=True)
        return 1
    return 0


def _write(file: BinaryIO, parts: Sequence[Part], level: str, total: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in (entry for part in parts for entry in part.entries()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    done, told = 0, -1
    for part in parts:
        for chunk in _chunks(part, level):
            file.write(chunk)
            done += len(chunk)
            if done * 200 // max(total, 1) > told:
                told = done * 200 // max(total, 1)
                print(json.dumps({"completed": done, "total": total}), flush=True)


def _chunks(part: Part, level: str) -> Iterator[bytes]:
    """The bytes of a part's tensors, one after the other."""
    from .block_quants import AFFINE, as_numbers, floats_of

    if part.dtype == part.tensor.dtype:
        yield from _raw(part, CHUNK_WEIGHTS)
        return
    if not part.bits:
        for raw in _raw(part, CHUNK_WEIGHTS):
            yield as_numbers(floats_of(raw, part.tensor.dtype), part.dtype)
        return
    function = AFFINE[8 if part.bits == 8 else 4, level.startswith("Q4_K")]
    scales, biases = bytearray(), bytearray()
    columns = part.tensor.shape[1]
    for raw in _raw(part, max(CHUNK_WEIGHTS // columns, 1) * columns):
        weights = floats_of(raw, part.tensor.dtype).reshape(-1, GROUP)
        words, scale, bias = function(weights)
        scales += scale.tobytes()
        biases += bias.tobytes()
        yield words.tobytes()
    yield bytes(scales)
    yield bytes(biases)


def _raw(part: Part, num_weights: int) -> Iterator[bytes]:
    size = PLAIN.get(part.tensor.dtype, 1)
    return raw_chunks(part.source, part.tensor, num_weights * size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
