"""Small files in the real formats, made in a moment; nothing here asserts."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmd.registry.manifest import Manifest, ManifestFile
from llmd.registry.names import ModelName
from llmd.registry.store import ModelStore

JINJA = "{% for m in messages %}{{ m.content }}{% endfor %}"
Tensor = tuple[str, Sequence[int], int]  # name, dims fastest first, type id


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """One metadata value, type tag included."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    inner = [value(part) for part in item]
    type_id = inner[0][:4] if inner else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9)
        + type_id
        + struct.pack("<Q", len(inner))
        + b"".join(part[4:] for part in inner)
    )


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[Tensor] = (), data: int = 0) -> bytes:
    """A GGUF whose data is that many zero bytes; tensors stand every 4096 bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    for place, (name, dims, type_id) in enumerate(tensors):
        head += string(name) + struct.pack("<I", len(dims))
        head += b"".join(struct.pack("<Q", dim) for dim in dims)
        head += struct.pack("<IQ", type_id, place * 4096)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


LLAMA_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 2,
    "general.license": "apache-2.0",
    "llama.context_length": 2048,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.chat_template": JINJA,
}


def tiny_gguf(metadata: Mapping[str, Any] | None = None) -> bytes:
    tensors: list[Tensor] = [
        ("token_embd.weight", [32, 3], 0),
        ("blk.0.ffn_up.weight", [32, 64], 2),
    ]
    return gguf_bytes({**LLAMA_METADATA, **(metadata or {})}, tensors, 8192)


def safetensors_bytes(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> bytes:
    """name: (dtype, shape, bytes)."""
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * offset


def tiny_safetensors() -> bytes:
    return safetensors_bytes({"model.embed_tokens.weight": ("BF16", [4, 8], 64)})


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def write_safetensors_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "model.safetensors").write_bytes(tiny_safetensors())
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": JINJA + "{% if tools %}{{ tools }}{% endif %}"})
    )
    return folder


def stored_model(store: ModelStore, name: str, content: bytes = b"weights") -> Manifest:
    """A model of one blob, in the store."""
    digest = store.add_bytes(content)
    return store.put(
        Manifest(
            name=ModelName.parse(name),
            modified=datetime(2026, 1, 1, tzinfo=UTC),
            format="gguf",
            architecture="llama",
            family="llama",
            parameter_count=1_700_000_000,
            quantization="Q4_0",
            context_length=2048,
            embedding_length=32,
            capabilities=("completion",),
            files=(ManifestFile("model.gguf", "weights", digest, len(content)),),
        )
    )
