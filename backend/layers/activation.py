"""The nonlinearities of gated MLPs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel, 2016)."""
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": gelu_tanh,
}


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float = 1.702) -> Tensor:
    """gpt-oss': (up + 1) · gate · sigmoid(alpha · gate), both clamped before."""
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * (alpha * gate).sigmoid()
