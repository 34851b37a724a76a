"""A model's weights by their canonical names, whatever the container.

Canonical are the names and shapes that Hugging Face gives a Llama. A GGUF's names are mapped, and
what its converter changed is undone: llama.cpp stores the rows of q and k for RoPE over adjacent
pairs where the family has `gguf_permutes_qk` (its `permute` in convert_hf_to_gguf.py).

Files are mapped, not read: a tensor costs memory when it is asked for, and a page that was read
belongs to the system's cache.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...registry.formats import gguf, safetensors
from ...registry.formats.errors import FormatError
from ..protocol import ModelFile
from .config import BadModel, ModelConfig, UnsupportedModel, config_from_gguf, config_from_hf
from .dequantize import SUPPORTED_TYPES, QuantBlocks, dequantize, quant_blocks

__all__ = ["BadModel", "Checkpoint", "QuantBlocks", "UnsupportedModel", "open_checkpoint"]


class Checkpoint(Protocol):
    """What the decoder asks of a container."""

    config: ModelConfig
    format: str  # "gguf", "safetensors"
    quantization: str  # "Q4_1", "BF16"
    metadata: Mapping[str, Any]  # of a GGUF; empty for safetensors

    def has(self, name: str) -> bool:
        """The canonical name exists."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fresh tensor of this dtype. Raises BadModel if the name is missing."""
        ...

    def blocks(self, name: str) -> QuantBlocks | None:
        """The matrix as the integers that are stored, if they are of a kind to compute with."""
        ...

    def rope_factors(self) -> list[float] | None:
        """What each rotary frequency is divided by, where the file spells it out."""
        ...


def open_checkpoint(files: Sequence[ModelFile]) -> Checkpoint:
    """Raises BadModel or UnsupportedModel with one sentence; nothing is read but headers."""
    weights = sorted((file for file in files if file.role == "weights"), key=lambda f: f.name)
    if not weights:
        raise BadModel("the model has no weights file")
    try:
        if weights[0].name.endswith(".gguf") or _magic(weights[0]) == gguf.MAGIC:
            return _GGUFCheckpoint([Path(file.path) for file in weights])
        return _SafetensorsCheckpoint(files, weights)
    except FormatError as error:
        raise BadModel(str(error)) from error
    except OSError as error:
        raise BadModel(f"{weights[0].name} can't be read: {error.strerror}") from error


def _magic(file: ModelFile) -> bytes:
    with Path(file.path).open("rb") as opened:
        return opened.read(4)


def _bytes_of(path: Path, offset: int, size: int) -> Tensor:
    """A mapped range as uint8. Copy-on-write: torch wants writable memory, nobody writes."""
    mapped = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(size,))
    return torch.from_numpy(mapped)


class _GGUFCheckpoint:
    """GGUF, one file or several parts."""

    format = "gguf"

    def __init__(self, paths: list[Path]) -> None:
        headers = [gguf.read_header(path) for path in paths]
        first = headers[0]
        self.metadata = first.metadata
        self._tensors = {
            name: (path, tensor)
            for path, header in zip(paths, headers, strict=True)
            for name, tensor in header.tensors.items()
        }
        self._check_parts(first.metadata, len(paths))
        self.config = config_from_gguf(first.metadata, frozenset(self._tensors))
        self.quantization = _largest_type(first)
        self._check_types()

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = _gguf_name(name)
        return self._unpermuted(name, self._stored(stored, dtype))

    def blocks(self, name: str) -> QuantBlocks | None:
        stored = _gguf_name(name)
        if stored not in self._tensors:
            raise BadModel(f"the GGUF has no tensor {stored}")
        path, info = self._tensors[stored]
        found = quant_blocks(
            _bytes_of(path, info.offset, info.size_bytes), info.type, info.shape[0]
        )
        return found and found.rows(lambda rows: self._unpermuted(name, rows))

    def rope_factors(self) -> list[float] | None:
        # llama.cpp's way to carry Llama 3's frequency scaling
        if "rope_freqs.weight" not in self._tensors:
            return None
        return [float(factor) for factor in self._stored("rope_freqs.weight", torch.float32)]

    def _stored(self, stored: str, dtype: torch.dtype) -> Tensor:
        if stored not in self._tensors:
            raise BadModel(f"the GGUF has no tensor {stored}")
        path, info = self._tensors[stored]
        block_bytes = next(b for n, _, b in gguf.TENSOR_TYPES.values() if n == info.type)
        raw = _bytes_of(path, info.offset, info.size_bytes)
        tensor = dequantize(raw, info.type, block_bytes, dtype).reshape(info.shape)
        return tensor.clone() if info.type in ("F32", "F16", "BF16") else tensor

    def _unpermuted(self, name: str, tensor: Tensor) -> Tensor:
        config = self.config
        if not config.family.gguf_permutes_qk:
            return tensor
        heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
        if ".q_proj." not in name and ".k_proj." not in name:
            return tensor
        paired = tensor.reshape(heads, config.head_dim // 2, 2, *tensor.shape[1:])
        return paired.transpose(1, 2).reshape(tensor.shape)

    def _check_parts(self, metadata: Mapping[str, Any], found: int) -> None:
        wanted = int(metadata.get("split.count", 1) or 1)
        if wanted != found:
            raise BadModel(f"the GGUF is split in {wanted} files, {found} of them are here")

    def _check_types(self) -> None:
        for name, (_, info) in self._tensors.items():
            if info.type not in SUPPORTED_TYPES:
                raise UnsupportedModel(
                    f"tensor {name} is of type {info.type}, which is not supported; supported are "
                    f"{', '.join(SUPPORTED_TYPES)}"
                )


def _largest_type(header: gguf.GGUFHeader) -> str:
    """The type that holds most of the weights' bytes."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.type] += tensor.size_bytes
    return sizes.most_common(1)[0][0]


_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def _gguf_name(name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return _GGUF_TOP[name]
    layer, part, kind = match.groups()
    return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"


_SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class _SafetensorsCheckpoint:
    """A Hugging Face folder: config.json and one or more safetensors files."""

    format = "safetensors"

    def __init__(self, files: Sequence[ModelFile], weights: Sequence[ModelFile]) -> None:
        self.config = config_from_hf(_read_config(files))
        self.metadata: Mapping[str, Any] = {}
        self._tensors = {
            name: (Path(file.path), info)
            for file in weights
            for name, info in safetensors.read_header(Path(file.path)).tensors.items()
        }
        for name, (_, info) in self._tensors.items():
            if info.dtype not in _SAFETENSORS_DTYPES:
                raise UnsupportedModel(
                    f"tensor {name} is of dtype {info.dtype}, which is not supported; supported "
                    f"are {', '.join(_SAFETENSORS_DTYPES)}"
                )
        _, largest = max(self._tensors.values(), key=lambda entry: entry[1].size_bytes)
        self.quantization = largest.dtype

    def blocks(self, name: str) -> QuantBlocks | None:
        return None

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._tensors:
            raise BadModel(f"the safetensors files have no tensor {name}")
        path, info = self._tensors[name]
        raw = _bytes_of(path, info.offset, info.size_bytes)
        stored = raw.view(_SAFETENSORS_DTYPES[info.dtype])
        return stored.to(dtype, copy=True).reshape(info.shape)

    def rope_factors(self) -> list[float] | None:
        return None  # config.json has the rule instead


def _read_config(files: Sequence[ModelFile]) -> dict[str, Any]:
    for file in files:
        if file.name == "config.json":
            try:
                raw = json.loads(Path(file.path).read_text(encoding="utf-8"))
            except ValueError as error:
                raise BadModel(f"config.json is not JSON: {error}") from error
            if isinstance(raw, dict):
                return raw
            raise BadModel("config.json is not a JSON object")
    raise BadModel("the model has safetensors but no config.json")
