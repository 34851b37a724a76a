"""Which architectures llmd can run: the one list, readable without torch.

The registry refuses a download by it, `backend/models` finds the reader of a configuration by it.
A name leads to a family: a file of `backend/models/families`.
"""

from __future__ import annotations

# `model_type` of a config.json, or of the text_config inside it: family
SAFETENSORS: dict[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
}

# `general.architecture` of a GGUF: family
GGUF: dict[str, str] = {
    "llama": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
}


def unsupported(architecture: str, supported: dict[str, str]) -> str:
    """The sentence that refuses an architecture; empty if it is supported."""
    if architecture in supported:
        return ""
    named = architecture or "(none given)"
    return f"architecture {named} is not supported; supported are {', '.join(sorted(supported))}"
