"""Which architectures llmd can run: the one list, readable without torch.

The registry refuses a download by it, `backend/models` finds the reader of a configuration by it.
A name leads to a family: a file of `backend/models/families`.
"""

from __future__ import annotations

# `model_type` of a config.json, or of the text_config inside it: family
SAFETENSORS: dict[str, str] = {
    "cohere2": "cohere",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "gemma4_text": "gemma4",
    "glm4": "glm",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "lfm2": "lfm2",
    "llama": "llama",
    "ministral3": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "phi3": "phi3",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_moe": "qwen",
    "qwen3_next": "qwen3_next",
    "smollm3": "smollm3",
}

# `general.architecture` of a GGUF: family
GGUF: dict[str, str] = {
    "cohere2": "cohere",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma4": "gemma4",
    "glm4": "glm",
    "gpt-oss": "gpt_oss",
    "granite": "granite",
    "lfm2": "lfm2",
    "llama": "llama",
    "mistral3": "llama",
    "olmo2": "olmo",
    "phi3": "phi3",
    "qwen2": "qwen",
    "qwen2moe": "qwen",
    "qwen3": "qwen",
    "qwen35": "qwen3_next",
    "qwen35moe": "qwen3_next",
    "qwen3moe": "qwen",
    "qwen3next": "qwen3_next",
    "smollm3": "smollm3",
}


def unsupported(architecture: str, supported: dict[str, str]) -> str:
    """The sentence that refuses an architecture; empty if it is supported."""
    if architecture in supported:
        return ""
    named = architecture or "(none given)"
    return f"architecture {named} is not supported; supported are {', '.join(sorted(supported))}"
