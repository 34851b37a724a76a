"""Which ways of quantising safetensors llmd can read: the one list, readable without torch.

The registry may refuse a download by it; `backend/models/quantized.py` reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .safetensors import TensorInfo

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


# Ends of names of what stands beside packed weights: scales, zero points, tables.
_BESIDE = (
    *(".scales", ".biases", ".qzeros", "g_idx", "_scales", "_scale", "_scale_inv", "_shape"),
    *("_zero_point", "absmax", "quant_map", "__nf4", "__fp4", ".SCB", ".weight_format"),
)
_PACKED = (".qweight", ".weight_packed", "_blocks", ".weight")
_WORD_BITS = {"I32": 32, "U32": 32, "U8": 8}


def num_weights(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    """How many weights the tensors are, several of which may lie in one word."""
    count = 0
    for name, tensor in tensors.items():
        if not method_of(config):
            count += tensor.num_elements
        elif not name.endswith(_BESIDE):
            word = _WORD_BITS.get(tensor.dtype, 0) if name.endswith(_PACKED) else 0
            bits = _bits_of(config, name.removesuffix(".weight")) if word else 0
            count += tensor.num_elements * max(word // bits, 1) if bits else tensor.num_elements
    return count


def _bits_of(config: Mapping[str, Any], stem: str) -> int:
    """Of one weight: the module's own, else the model's; 4 where none are told."""
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, Mapping):
        return 4
    own = settings.get(stem)
    found = [own.get("bits")] if isinstance(own, Mapping) else []
    found += [settings.get("bits"), settings.get("w_bit")]
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found.append(weights.get("num_bits") if isinstance(weights, Mapping) else None)
    return next((bits for bits in found if type(bits) is int and 1 <= bits <= 32), 4)
