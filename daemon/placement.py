"""Will a model fit, and who has to leave first? Pure: sizes in, names out.

Sizes are bytes. What is loaded counts with what its worker really allocated; what is to be loaded
counts with an estimate, or with what it took the last time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WORKER_BYTES = 350_000_000  # interpreter, torch and buffers of one worker, measured at rest
KV_FLOOR_BYTES = 256_000_000  # a load is refused when not even this much would be left for KV


@dataclass(frozen=True, slots=True)
class Resident:
    """One loaded or loading model."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a load.

    `evict` names idle models, in order, whose leaving makes room. `must_wait`: it would fit if a
    busy model were gone. Neither: it never fits, `needed` and `available` say why.
    """

    fits: bool
    evict: tuple[str, ...] = ()
    must_wait: bool = False
    needed_bytes: int = 0
    available_bytes: int = 0


def estimate_bytes(weights_bytes: int, num_parameters: int, dtype_bytes: int) -> int:
    """Before the first load: the weights as they lie in memory, the worker, some KV."""
    weights = num_parameters * dtype_bytes if num_parameters else weights_bytes
    return int(weights * 1.25) + WORKER_BYTES + KV_FLOOR_BYTES


def place(
    needed_bytes: int,
    limit_bytes: int,
    residents: Sequence[Resident],
    idle: Sequence[str],
    max_models: int = 0,
) -> Verdict:
    """Whether `needed_bytes` more fit under `limit_bytes`.

    `idle` are the keys that may be evicted, the first to go first. `max_models` 0: any number.
    """
    used = sum(resident.size_bytes for resident in residents)
    count = len(residents)
    sizes = {resident.key: resident.size_bytes for resident in residents}
    evict: list[str] = []
    candidates = [key for key in idle if key in sizes]
    while used + needed_bytes > limit_bytes or (max_models and count >= max_models):
        if not candidates:
            break
        key = candidates.pop(0)
        evict.append(key)
        used -= sizes[key]
        count -= 1
    else:
        return Verdict(True, tuple(evict))
    return Verdict(
        False,
        must_wait=count > 0 and needed_bytes <= limit_bytes,
        needed_bytes=needed_bytes,
        available_bytes=limit_bytes,
    )
