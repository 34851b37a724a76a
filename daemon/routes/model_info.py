"""What /api/show tells about an installed model: read from the headers of its files.

`model_info` has the keys of a GGUF header, because clients read them: `<arch>.context_length` to
size their prompts, above all. For safetensors the same keys are derived from config.json.

Runs in a thread: a vocabulary of 100,000 strings takes tens of milliseconds to parse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...registry.formats import gguf, safetensors
from ...registry.formats.errors import FormatError
from ...registry.manifest import Manifest
from ...registry.names import ModelName
from ...registry.store import ModelStore

SHORT_ARRAY = 5  # longer ones are shown empty unless asked for
_HIDDEN = ("general.name", "tokenizer.chat_template")

# config.json of the hub, as GGUF calls it.
_CONFIG_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the model's files say of themselves."""

    info: dict[str, Any] = field(default_factory=dict)
    template: str = ""
    tensors: list[dict[str, Any]] = field(default_factory=list)


def read_facts(store: ModelStore, manifest: Manifest, verbose: bool) -> FileFacts:
    """Blocking. A file that cannot be read costs its part of the answer, not the answer."""
    weights = [(file, store.path_of(file)) for file in manifest.files_of("weights")]
    facts = FileFacts()
    try:
        if weights and manifest.format == "gguf":
            facts = _of_gguf(weights[0][1], verbose)
        elif manifest.format == "safetensors":
            facts = _of_safetensors(store, manifest, [path for _, path in weights], verbose)
    except FormatError as error:
        facts = FileFacts({"general.unreadable": str(error)})
    info = {
        "general.architecture": manifest.family or manifest.architecture,
        "general.parameter_count": manifest.parameter_count,
        **facts.info,
    }
    family = info["general.architecture"]
    info.setdefault(f"{family}.context_length", manifest.context_length)
    info.setdefault(f"{family}.embedding_length", manifest.embedding_length)
    return FileFacts(info, facts.template, facts.tensors)


def _of_gguf(path: Path, verbose: bool) -> FileFacts:
    header = gguf.read_header(path, max_items=gguf.MAX_ITEMS if verbose else SHORT_ARRAY)
    info = {
        key: _shortened(value, verbose)
        for key, value in header.metadata.items()
        if key not in _HIDDEN
    }
    template = header.metadata.get("tokenizer.chat_template", "")
    tensors = [
        {"name": name, "type": tensor.type, "shape": list(reversed(tensor.shape))}
        for name, tensor in header.tensors.items()
    ]
    return FileFacts(
        info, template if isinstance(template, str) else "", tensors if verbose else []
    )


def _of_safetensors(
    store: ModelStore, manifest: Manifest, weights: list[Path], verbose: bool
) -> FileFacts:
    configs = {
        file.base_name: _json_file(store.path_of(file))
        for file in manifest.files
        if file.base_name in ("config.json", "tokenizer_config.json")
    }
    config = configs.get("config.json", {})
    family = manifest.family or str(config.get("model_type", "unknown"))
    info: dict[str, Any] = {"general.architecture": family}
    for key, name in _CONFIG_KEYS.items():
        if config.get(key) is not None:
            info[f"{family}.{name}"] = config[key]
    tensors = []
    if verbose:
        for path in weights:
            tensors += [
                {"name": name, "type": tensor.dtype, "shape": list(tensor.shape)}
                for name, tensor in safetensors.read_header(path).tensors.items()
            ]
    template = configs.get("tokenizer_config.json", {}).get("chat_template", "")
    for file in manifest.files_of("chat_template"):
        template = store.path_of(file).read_text(encoding="utf-8", errors="replace")
    return FileFacts(info, template if isinstance(template, str) else "", tensors)


def _json_file(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _shortened(value: Any, verbose: bool) -> Any:
    return [] if isinstance(value, list) and len(value) > SHORT_ARRAY and not verbose else value


def parameters_text(params: Mapping[str, Any]) -> str:
    """One line per value; a list repeats its name; texts stand in double quotes."""
    lines = []
    for name, value in params.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            shown = json.dumps(item, ensure_ascii=False) if isinstance(item, str) else str(item)
            lines.append(f"{name:<30} {shown}")
    return "\n".join(lines)


def modelfile_text(
    manifest: Manifest, name: ModelName, path: Path | None, template: str, system: str
) -> str:
    """A Modelfile that would make this model again."""
    lines = [
        '# Modelfile generated by "llmd show"',
        "# To build a new Modelfile based on this, replace FROM with:",
        f"# FROM {name.display}",
        "",
        f"FROM {path or name.display}",
    ]
    if template:
        lines.append(f"TEMPLATE {_quoted(template)}")
    if system:
        lines.append(f"SYSTEM {_quoted(system)}")
    for key, value in manifest.params.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            shown = json.dumps(item, ensure_ascii=False) if isinstance(item, str) else item
            lines.append(f"PARAMETER {key} {shown}")
    lines += [
        f"MESSAGE {message['role']} {_quoted(str(message['content']))}"
        for message in manifest.messages
    ]
    if manifest.license:
        lines.append(f"LICENSE {_quoted(manifest.license)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    if "\n" in text or '"' in text:
        return f'"""{text}"""'
    return f'"{text}"'
