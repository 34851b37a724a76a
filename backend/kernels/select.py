"""Which form of the kernels runs: decided here, once, for a device.

    device has Triton, Triton imports ──▶ "triton"
    anything else (CPU, MPS, no Triton) ──▶ "torch": the twins of reference.py

Nothing of Triton is imported until a device calls for it; on a CPU it never is. The choice and its
reason are words that the worker logs and `show --verbose` prints.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor


class Kernels(Protocol):
    """The operations of `reference`, `sampling_reference` and `packed`, under the same names."""

    def store_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def paged_attention(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def rms_norm(self, *args: Any, **kwargs: Any) -> Any: ...
    def rotary(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]: ...
    def rotary_store(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def gelu_mul(self, gate_up: Tensor) -> Tensor: ...
    def apply_token_mask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None: ...
    def quantized_matmul(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def expert_matmul(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def sample(self, *args: Any, **kwargs: Any) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, and why, for the log."""

    name: str  # "triton" or "torch"
    reason: str

    def __str__(self) -> str:
        return f"{self.name} kernels: {self.reason}"


def choose(device: torch.device, triton_problem: str | None = None) -> Choice:
    """The form for this device. `triton_problem`: why Triton can't be used, empty if it can; None
    tries to import it."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return Choice("triton", "TRITON_INTERPRET=1, the interpreter")
    if device.type != "cuda":  # ROCm builds of torch call their devices cuda too
        return Choice("torch", f"Triton does not run on {device.type}")
    problem = _problem_of_triton() if triton_problem is None else triton_problem
    if not problem:
        return Choice("triton", f"{device} has Triton")
    return Choice(
        "torch",
        f"{device} is a GPU, but Triton {problem}, and it is many times slower so; "
        "`pip install triton` mends it",
    )


def _problem_of_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "is not installed"
    try:
        importlib.import_module("triton")
    except Exception as error:  # of a build that does not fit this machine: anything
        return f"cannot be imported ({type(error).__name__}: {error})"
    return ""


def load(choice: Choice) -> Kernels:
    """The operations of that form. Imports Triton only for the form that needs it."""
    name = "triton_ops" if choice.name == "triton" else "torch_ops"
    module: ModuleType = importlib.import_module(f".{name}", __package__)
    kernels: Kernels = module
    return kernels
