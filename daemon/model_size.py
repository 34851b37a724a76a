"""How many layers a model has, read from the header of its first file. Placement divides by it."""

from __future__ import annotations

import json
from typing import Any

from ..registry.formats import gguf
from ..registry.formats.errors import FormatError
from ..registry.manifest import Manifest
from ..registry.store import ModelStore

USUAL = 32  # for a header that does not say it


def num_layers_of(store: ModelStore, manifest: Manifest) -> int:
    """Blocking, some milliseconds. Never fails: a wrong guess costs a worse placement."""
    try:
        if manifest.format == "gguf":
            path = store.path_of(manifest.files_of("weights")[0])
            metadata = gguf.read_header(path, max_items=0).metadata  # without its vocabulary
            return _positive(metadata.get(f"{metadata.get('general.architecture')}.block_count"))
        (config,) = [file for file in manifest.files if file.name == "config.json"]
        fields = json.loads(store.path_of(config).read_text(encoding="utf-8"))
        return _positive({**fields, **fields.get("text_config", {})}.get("num_hidden_layers"))
    except (FormatError, OSError, ValueError, IndexError, AttributeError):
        return USUAL


def _positive(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else USUAL
