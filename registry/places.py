"""Where other tools keep their models on this machine, and whether one of them has a file already.

A Hugging Face cache and an Ollama store name large files by their sha256, so that a pull can find
in them what it would otherwise fetch: never a byte twice.
"""

from __future__ import annotations

import os
from pathlib import Path


def default_places() -> list[Path]:
    """Where other tools keep their models on this machine; those that exist."""
    home = Path.home()
    environment = [os.environ.get(name, "") for name in ("OLLAMA_MODELS", "HF_HUB_CACHE")]
    hf_home = os.environ.get("HF_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    candidates = [
        *(Path(value) for value in environment if value),
        *([Path(hf_home) / "hub"] if hf_home else []),
        home / ".ollama" / "models",
        Path("/usr/share/ollama/.ollama/models"),
        cache / "huggingface" / "hub",
        home / ".lmstudio" / "models",
        cache / "lm-studio" / "models",
    ]
    return [path for path in dict.fromkeys(candidates) if path.is_dir()]


def find_blob(digest: str, size: int) -> Path | None:
    """A file of another tool that should have this sha256, by its name and size."""
    for place in default_places():
        try:
            candidates = [place / "blobs" / f"sha256-{digest}"]
            candidates += place.glob(f"models--*/blobs/{digest}")
            for candidate in candidates:
                if candidate.is_file() and candidate.stat().st_size == size:
                    return candidate.resolve()
        except OSError:
            continue  # another user's, which we may not look into
    return None
