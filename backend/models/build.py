"""Which form of the decoder a model gets on the CPU.

dtype "auto", the kernels compile and pass their self-test ──▶ CompiledDecoder
a dtype by name, or any reason against                     ──▶ Decoder, in torch
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..kernels.cpu_launch import Launcher, self_test
from ..resident import give_back
from .adapters import named_adapters
from .checkpoint import Checkpoint
from .compiled_decoder import CompiledDecoder, why_not_compiled
from .decoder import Decoder

log = logging.getLogger("llmd.models")

AnyDecoder = Decoder | CompiledDecoder


def build_decoder(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    num_threads: int,
    progress: Callable[[float, str], None],
    fallback_dtype: torch.dtype,
) -> tuple[AnyDecoder, str]:
    """The decoder and, for people, which kernels it runs and why. `dtype` None is "auto".

    `progress(share, stage)`. Raises BadModel and UnsupportedModel.
    """
    if dtype is None:
        reason = why_not_compiled(checkpoint.config)
        if named_adapters(checkpoint):
            reason = "adapters by request"
        if not reason:
            progress(0.0, "preparing kernels")
            launcher = Launcher(num_threads)
            reason = self_test(launcher)
            if not reason:
                give_back()  # the compiler's code need not lie in memory beside the weights
                loaded = lambda share: progress(share, "reading weights")  # noqa: E731
                return CompiledDecoder(checkpoint, launcher, loaded), "compiled"
            log.warning("compiled kernels are not used: %s", reason)
        dtype = fallback_dtype
    else:
        reason = "a dtype was asked for by name"
    decoder = Decoder(checkpoint, dtype, lambda share: progress(share, "reading weights"))
    return decoder, f"torch ({reason})"
