"""What a model is, told from the headers of its files: architecture, size, window, capabilities.

Blocking, but brief: headers only, whatever the size of the weights. Raises BadModelFile or
Unsupported with one sentence about the file that is to blame.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .errors import BadModelFile, Unsupported
from .formats import gguf, safetensors
from .formats.errors import FormatError
from .formats.quantization import method_of, num_weights

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
MAX_ITEMS = 4096  # of a list in a GGUF header: one value per layer, but no vocabulary
MAX_JSON_BYTES = 64 << 20
EMBEDDING_FAMILIES = frozenset({"bert", "nomic-bert", "jina-bert-v2", "modern-bert", "t5encoder"})
DTYPE_LABELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}

_ROLES = {
    "config.json": "config",
    "params.json": "config",
    "generation_config.json": "generation_config",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "special_tokens_map.json": "tokenizer",
    "added_tokens.json": "tokenizer",
    "tokenizer.model": "tokenizer",
    "tekken.json": "tokenizer",
    "vocab.json": "tokenizer",
    "vocab.txt": "tokenizer",
    "merges.txt": "tokenizer",
    "chat_template.jinja": "chat_template",
    "chat_template.json": "chat_template",
    "preprocessor_config.json": "processor",
    "processor_config.json": "processor",
    "modules.json": "other",
    "sentence_bert_config.json": "other",
    "config_sentence_transformers.json": "other",
}


@dataclass(frozen=True, slots=True)
class Details:
    """The descriptive fields of a Manifest."""

    format: str
    architecture: str
    family: str
    parameter_count: int
    quantization: str
    context_length: int
    embedding_length: int
    capabilities: tuple[str, ...]
    license: str | None = None


def role_of(name: str) -> str | None:
    """What a file of a model folder is for; None if it is none of a model's files."""
    path = PurePosixPath(name)
    base = path.name
    if len(path.parts) > 1:
        is_module = path.parts[0][:2] in ("1_", "2_", "3_") and len(path.parts) == 2
        if path.parts[0].startswith("adapter-") and len(path.parts) == 2:
            return "adapter" if base in ADAPTER_FILES else None
        is_template = path.parts[0] == "additional_chat_templates" and base.endswith(".jinja")
        if is_module and base in ("config.json", "model.safetensors"):
            return "other"
        return "chat_template" if is_template else None
    if base.endswith(".safetensors"):
        return "adapter" if base.startswith("adapter_") else "weights"
    if base.endswith(".safetensors.index.json"):
        return "shard_index"
    if base.endswith(".gguf"):
        return "projector" if "mmproj" in base.lower() else "weights"
    if base == "adapter_config.json":
        return "adapter"
    return _ROLES.get(base)


def inspect_model(files: Mapping[str, tuple[str, Path]]) -> Details:
    """Read the headers of a model's files: name -> (role, where it lies)."""
    weights = [(name, path) for name, (role, path) in sorted(files.items()) if role == "weights"]
    if not weights:
        raise Unsupported("the model has no weights in GGUF or safetensors form")
    try:
        if weights[0][0].lower().endswith(".gguf") or gguf.is_gguf(weights[0][1]):
            return _inspect_gguf(weights, {role for role, _ in files.values()})
        return _inspect_safetensors(files, weights)
    except FormatError as error:
        raise BadModelFile(str(error)) from None
    except OSError as error:
        raise BadModelFile(f"{error.filename} cannot be read: {error.strerror}") from None


def _inspect_gguf(weights: Sequence[tuple[str, Path]], roles: set[str]) -> Details:
    headers = [gguf.read_header(path, name, MAX_ITEMS) for name, path in weights]
    first = headers[0]
    if not first.architecture:
        raise BadModelFile(f"{weights[0][0]} does not say its architecture")
    arch, metadata = first.architecture, first.metadata
    is_embedding = arch in EMBEDDING_FAMILIES or f"{arch}.pooling_type" in metadata
    template = metadata.get("tokenizer.chat_template")
    capabilities = _capabilities(template if isinstance(template, str) else "", is_embedding)
    if any(f"tokenizer.ggml.{key}_token_id" in metadata for key in ("fim_pre", "prefix")):
        capabilities.append("insert")
    if "projector" in roles:
        capabilities.append("vision")
    license_name = metadata.get("general.license")
    return Details(
        format="gguf",
        architecture=arch,
        family=arch,
        parameter_count=sum(header.num_parameters for header in headers),
        quantization=_gguf_quantization(first),
        context_length=_count(metadata.get(f"{arch}.context_length")),
        embedding_length=_count(metadata.get(f"{arch}.embedding_length")),
        capabilities=tuple(capabilities),
        license=license_name if isinstance(license_name, str) else None,
    )


def _gguf_quantization(header: gguf.GGUFHeader) -> str:
    """The maker's word; without it, the type that most weights have."""
    named = gguf.FILE_TYPES.get(_count(header.metadata.get("general.file_type"), default=-1))
    if named is not None:
        return named
    counts: dict[str, int] = {}
    for tensor in header.tensors.values():
        counts[tensor.type] = counts.get(tensor.type, 0) + tensor.num_elements
    return max(counts, key=lambda name: counts[name], default="unknown")


def _inspect_safetensors(
    files: Mapping[str, tuple[str, Path]], weights: Sequence[tuple[str, Path]]
) -> Details:
    if "config.json" not in files:
        raise Unsupported("a safetensors model needs its config.json beside the weights")
    config = read_json_object(files["config.json"][1], "config.json")
    headers = [safetensors.read_header(path, name) for name, path in weights]
    _check_shards(files)
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    architectures = config.get("architectures")
    model_type = str(config.get("model_type") or "")
    named = architectures[0] if isinstance(architectures, list) and architectures else model_type
    if not named:
        raise BadModelFile("config.json does not say the architecture")
    is_embedding = "modules.json" in files or model_type in EMBEDDING_FAMILIES
    return Details(
        format="safetensors",
        architecture=str(named),
        family=model_type or str(named),
        parameter_count=sum(num_weights(config, header.tensors) for header in headers),
        quantization=_safetensors_quantization(config, text, headers),
        context_length=_count(text.get("max_position_embeddings")),
        embedding_length=_count(text.get("hidden_size")),
        capabilities=tuple(_capabilities(_template_of(files), is_embedding)),
    )


def _check_shards(files: Mapping[str, tuple[str, Path]]) -> None:
    """Every shard that the index names must be there."""
    for name, (role, path) in files.items():
        if role != "shard_index":
            continue
        weight_map = read_json_object(path, name).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadModelFile(f"{name} has no weight_map")
        missing = sorted({str(shard) for shard in weight_map.values()} - set(files))
        if missing:
            raise BadModelFile(f"{name} names {missing[0]}, which is missing")


def _safetensors_quantization(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    headers: Sequence[safetensors.SafetensorsHeader],
) -> str:
    if (method := method_of(config)) == "mlx":
        settings = config.get("quantization") or config.get("quantization_config")
        return f"MLX {_count(settings.get('bits'))}-bit" if isinstance(settings, dict) else "MLX"
    if method:
        return method.upper()
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype")
    if isinstance(dtype, str) and dtype in DTYPE_LABELS:
        return DTYPE_LABELS[dtype]
    tensors = [tensor for header in headers for tensor in header.tensors.values()]
    largest = max(tensors, key=lambda tensor: tensor.size_bytes, default=None)
    return largest.dtype if largest is not None else "unknown"


def _template_of(files: Mapping[str, tuple[str, Path]]) -> str:
    """The chat template's text, wherever the folder keeps it; "" if there is none."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"][1].read_text(encoding="utf-8", errors="replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in files:
            template = read_json_object(files[name][1], name).get("chat_template")
            if template:
                return template if isinstance(template, str) else json.dumps(template)
    return ""


def _capabilities(template: str, is_embedding: bool) -> list[str]:
    if is_embedding:
        return ["embedding"]
    found = ["completion"]
    if "tools" in template:
        found.append("tools")
    if any(word in template for word in ("<think>", "enable_thinking", "reasoning_content")):
        found.append("thinking")
    return found


def with_template(capabilities: tuple[str, ...], template: str) -> tuple[str, ...]:
    """The capabilities of a model whose own template is replaced by this Jinja text."""
    if "completion" not in capabilities:
        return capabilities
    kept = [name for name in capabilities if name not in ("completion", "tools", "thinking")]
    return (*_capabilities(template, is_embedding=False), *kept)


def read_json_object(path: Path, name: str) -> dict[str, Any]:
    """Raises BadModelFile, with this name, if the file is too large, or no JSON object."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadModelFile(f"{name} is larger than {MAX_JSON_BYTES} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise BadModelFile(f"{name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadModelFile(f"{name} is no JSON") from None
    if not isinstance(content, dict):
        raise BadModelFile(f"{name} is no JSON object")
    return content


def _count(value: object, default: int = 0) -> int:
    """A number out of metadata that may be anything; of a list (one per layer) the largest."""
    if isinstance(value, list):
        return max((_count(item) for item in value), default=default)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and isinstance(value, int) and value >= 0 else default
