"""Which ways of quantising safetensors llmd can read: the one list, readable without torch.

The registry may refuse a download by it; `backend/models/quantized.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mlx", "mxfp4")


def method_of(config: Mapping[str, Any]) -> str:
    """The `quant_method` of a config.json; "" if it is not quantised."""
    settings = config.get("quantization_config")
    if isinstance(settings, Mapping):
        if "quant_method" in settings:
            return str(settings["quant_method"])
        # MLX writes its settings under both names, and names no method
        return "mlx" if {"bits", "group_size"} <= settings.keys() else "unknown"
    return "mlx" if isinstance(config.get("quantization"), Mapping) else ""


def unsupported(config: Mapping[str, Any]) -> str:
    """The sentence that refuses the quantisation; empty if it is supported, or there is none."""
    method = method_of(config)
    if not method or method in METHODS:
        return ""
    return (
        f"safetensors quantised by {method} are not supported; supported are {', '.join(METHODS)}, "
        "and bf16, f16 and f32"
    )
