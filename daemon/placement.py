"""Where a model goes, and who has to leave first. Pure: sizes in, device parts and names out.

    place: the best that free memory allows, then the same after the least recently used idle model
    has left, then after two of them, …

    best    one GPU that holds everything, the fullest such one (best fit)
            all layers spread over several GPUs
            as many layers as fit on GPUs, the last ones on the CPU
            the CPU
    A model that a GPU can hold waits for idle models to leave rather than go to the CPU.

Sizes are bytes. What is loaded counts with what its worker really has; what is to be loaded counts
with an estimate, or with what it took the last time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..backend.protocol import DevicePart
from .devices import Device

WORKER_BYTES = 350_000_000  # interpreter, torch and buffers of one worker, measured at rest
KV_FLOOR_BYTES = 256_000_000  # a load is refused when not even this much would be left for KV
GPU_CONTEXT_BYTES = 600_000_000  # a CUDA context, kernels and work buffers, on each card used
PACKED = 1.7  # bytes in memory for each byte of a quantised file, measured on small models
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the person asked for."""

    num_gpu: int | None = None  # layers on GPUs; 0: none, None or more than there are: all
    main_gpu: int | None = None  # the card to prefer
    require_gpu: bool = False  # rather fail than leave a layer on the CPU
    spread: bool = False  # over all cards, also when one would do
    gpu_overhead_bytes: int = 0  # of each card, left alone


NO_WISH = Wish()


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes. On the CPU `weights_bytes` may differ: formats are kept or unpacked."""

    weights_bytes: int
    num_layers: int = 1
    host_bytes: int = 0  # all of it, where it is on the CPU alone
    kv_floor_bytes: int = KV_FLOOR_BYTES

    @property
    def layer_bytes(self) -> int:
        """Of weights and KV, for one layer; what lies beside the layers counts with them."""
        return -(-(self.weights_bytes + self.kv_floor_bytes) // max(self.num_layers, 1))


@dataclass(frozen=True, slots=True)
class Resident:
    """One loaded or loading model."""

    key: str
    size_bytes: int  # of the machine's memory
    on_devices: Mapping[str, int] = field(default_factory=dict)  # of each GPU's


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a load.

    `evict` names idle models, in order, whose leaving makes room. `must_wait`: it would fit if a
    busy model were gone. Neither: it never fits, `needed` and `available` say why.
    """

    fits: bool
    evict: tuple[str, ...] = ()
    parts: tuple[DevicePart, ...] = ()  # empty: all on the CPU
    must_wait: bool = False
    needed_bytes: int = 0
    available_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What is free: of the machine's memory, and of each GPU's, in order."""

    host_bytes: int
    gpus: tuple[Device, ...] = ()

    def without(self, resident: Resident) -> Room:
        """After this model has left."""
        gpus = tuple(
            Device(
                gpu.id,
                gpu.name,
                gpu.total_bytes,
                gpu.free_bytes + resident.on_devices.get(gpu.id, 0),
                gpu.kind,
                gpu.uuid,
            )
            for gpu in self.gpus
        )
        return Room(self.host_bytes + resident.size_bytes, gpus)


def estimate_bytes(weights_bytes: int, num_parameters: int, dtype_bytes: int) -> int:
    """Before the first load: the weights as they lie in memory, the worker, some KV.

    `dtype_bytes` 0: the numbers are kept as they are stored, and packed; embeddings are unpacked.
    """
    weights = weights_bytes * PACKED
    if dtype_bytes:
        weights = (num_parameters * dtype_bytes or weights_bytes) * 1.25
    return int(weights) + WORKER_BYTES + KV_FLOOR_BYTES


def place(
    need: Need,
    room: Room,
    residents: Sequence[Resident],
    idle: Sequence[str],
    max_models: int = 0,
    wish: Wish = NO_WISH,
) -> Verdict:
    """Where the model goes. `idle` are the keys that may be evicted, the first to go first;
    `max_models` 0: any number."""
    by_key = {resident.key: resident for resident in residents}
    candidates = [key for key in idle if key in by_key]
    fallback: Verdict | None = None
    for count in range(len(candidates) + 1):
        evict = tuple(candidates[:count])
        if count:
            room = room.without(by_key[evict[-1]])
        if max_models and len(residents) - count >= max_models:
            continue
        parts = parts_for(need, room, wish)
        if parts is None:
            continue
        verdict = Verdict(True, evict, parts)
        if _is_best(parts, room, wish):
            return verdict
        fallback = fallback or verdict
    if fallback is not None:
        return fallback
    everything = room
    for key, resident in by_key.items():
        if key not in candidates:
            everything = everything.without(resident)
    waits = bool(residents) and parts_for(need, everything, wish) is not None
    return Verdict(
        False,
        must_wait=waits,
        needed_bytes=need.host_bytes,
        available_bytes=everything.host_bytes,
    )


def _is_best(parts: tuple[DevicePart, ...], room: Room, wish: Wish) -> bool:
    """More room would not make it better: nothing is on the CPU that need not be."""
    wants_cpu = not room.gpus or wish.num_gpu == 0
    return wants_cpu or (bool(parts) and all(part.device != CPU for part in parts))


def parts_for(need: Need, room: Room, wish: Wish = NO_WISH) -> tuple[DevicePart, ...] | None:
    """The layers of each device, in the model's order; () is the CPU alone, None is nowhere."""
    wanted = need.num_layers if wish.num_gpu is None else min(wish.num_gpu, need.num_layers)
    fits_cpu = need.host_bytes <= room.host_bytes
    if not room.gpus or wanted <= 0:
        return () if fits_cpu and not wish.require_gpu else None
    counts = _gpu_layers(need, room.gpus, wanted, wish)
    num_placed = sum(counts.values())
    if num_placed < need.num_layers and wish.require_gpu:
        return None
    rest = need.num_layers - num_placed
    host = WORKER_BYTES + rest * need.layer_bytes
    if not num_placed:
        return () if fits_cpu else None
    if host > room.host_bytes:
        return None
    parts = [
        DevicePart(gpu.id, counts[gpu.id], _free(gpu, wish)) for gpu in room.gpus if counts[gpu.id]
    ]
    if rest:
        parts.append(DevicePart(CPU, rest, rest * need.layer_bytes))
    return tuple(parts)


def _gpu_layers(need: Need, gpus: Sequence[Device], wanted: int, wish: Wish) -> dict[str, int]:
    """How many layers each GPU gets."""
    fits = {
        gpu.id: min(max(_free(gpu, wish), 0) // max(need.layer_bytes, 1), wanted) for gpu in gpus
    }
    counts = dict.fromkeys(fits, 0)
    if not wish.spread:
        whole = [gpu for gpu in gpus if fits[gpu.id] >= wanted]
        if whole:
            counts[_preferred(whole, gpus, wish).id] = wanted
            return counts
    # Most free memory first, so that few cards are used, or evenly over all if that was asked.
    left = wanted
    order = sorted(gpus, key=lambda gpu: (-fits[gpu.id], gpu.id))
    for number, gpu in enumerate(order):
        share = -(-left // (len(order) - number)) if wish.spread else left
        counts[gpu.id] = min(fits[gpu.id], share)
        left -= counts[gpu.id]
    for gpu in order:  # what an even share left over
        more = min(fits[gpu.id] - counts[gpu.id], left)
        counts[gpu.id] += more
        left -= more
    return counts


def _preferred(whole: Sequence[Device], gpus: Sequence[Device], wish: Wish) -> Device:
    """The main GPU if it can hold all; else the one that is left with least."""
    if wish.main_gpu is not None and 0 <= wish.main_gpu < len(gpus):
        main = gpus[wish.main_gpu]
        if main in whole:
            return main
    return min(whole, key=lambda gpu: (gpu.free_bytes, gpu.id))


def _free(gpu: Device, wish: Wish) -> int:
    return gpu.free_bytes - wish.gpu_overhead_bytes - GPU_CONTEXT_BYTES
