"""Several workers of one model, each wholly on a GPU of its own. Pure.

The first worker of a model is loaded as everything is. Further ones, up to `LLMD_REPLICAS`, come
only when all there are have much to do, and only where a GPU is free for it: nothing is evicted and
nobody waits for a replica. A request goes to the ready worker with the fewest requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .devices import Device
from .entry import Entry
from .placement import CPU, Verdict
from .worker_process import State

BUSY_LEASES = 16  # of one worker; with fewer, another card would be half idle
LOOK_PERIOD_S = 5.0  # between two looks for a free card


def least_busy(entries: Iterable[Entry]) -> Entry | None:
    """Of those that can serve now."""
    ready = [
        entry
        for entry in entries
        if entry.worker is not None and not entry.is_leaving and entry.worker.state is State.READY
    ]
    return min(ready, key=lambda entry: (entry.num_leases, entry.number), default=None)


def wants_another(entries: Sequence[Entry], most: int) -> bool:
    """Whether all of a model's workers are ready, on GPUs, and busy, and there may be one more."""
    return 0 < len(entries) < most and all(
        entry.worker is not None
        and not entry.is_leaving
        and entry.on_devices
        and entry.num_leases >= BUSY_LEASES
        for entry in entries
    )


def free_number(entries: Iterable[Entry]) -> int:
    """The lowest that no worker of the model has."""
    taken = {entry.number for entry in entries}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def untaken(gpus: Iterable[Device], others: Iterable[Entry]) -> tuple[Device, ...]:
    """The GPUs on which no other worker of the model is."""
    taken = {device for other in others for device in other.on_devices}
    return tuple(gpu for gpu in gpus if gpu.id not in taken)


def is_for_a_replica(verdict: Verdict) -> bool:
    """It fits as it is, on one card."""
    is_whole = len(verdict.parts) == 1 and verdict.parts[0].device != CPU
    return verdict.fits and not verdict.evict and is_whole
