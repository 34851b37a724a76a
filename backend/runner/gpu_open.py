"""From a Load to a runner on its devices: weights first, then the KV cache in what is left.

    parts ──layer_map──▶ devices ──GpuDecoder──▶ weights ──free memory──▶ blocks ──graphs──▶ ready

Imported only for a Load with a part that is not plainly "cpu"; without a GPU it costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from ..kernels.select import choose
from ..models.checkpoint import Checkpoint, UnsupportedModel
from ..models.config import ModelConfig
from ..protocol import Load
from .gpu_cache import GpuCache
from .gpu_graphs import CudaCapture
from .gpu_layer_map import layer_map
from .gpu_memory import FixedMemory
from .gpu_model import GpuDecoder, why_not_on_devices
from .gpu_profile import Profile, ProfileFile, meaning_of
from .gpu_runner import GpuRunner
from .gpu_tuning import device_seconds, tune, widest_step
from .model_runner import NoMemory

__all__ = ["open_gpu_runner", "why_not_on_devices"]

log = logging.getLogger("llmd.runner")

BLOCK_SIZE = 16  # tokens
DEFAULT_BATCH_TOKENS = 8192  # of one step, as in assembly
DEFAULT_KV_SHARE = 0.9  # of what is free on a device after the weights and the working memory
DEFAULT_CONTEXTS = 32  # ... but no more than this many full contexts could use
LOGIT_ROWS = 256  # whose logits, in fp32 and twice, a step holds at once

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def open_gpu_runner(
    checkpoint: Checkpoint, load: Load, progress: Callable[[float, str], None]
) -> GpuRunner:
    """Load the weights, reserve the KV cache, capture the first graphs.

    Raises UnsupportedModel, BadModel, and NoMemory.
    """
    config = checkpoint.config
    try:
        devices = layer_map(load.parts, config.num_layers)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error
    for device in dict.fromkeys(devices):
        refuse_missing(device)
        choice = choose(device)
        is_slow = device.type == "cuda" and choice.name == "torch"
        log.log(logging.WARNING if is_slow else logging.INFO, "%s: %s", device, choice)
    dtype = choose_dtype(load.dtype, devices)
    try:
        decoder = GpuDecoder(
            checkpoint,
            dtype,
            devices,
            progress=lambda share: progress(0.9 * share, "reading weights"),
        )
    except torch.OutOfMemoryError as error:
        raise NoMemory(f"the weights do not fit: {error}") from error
    trained = config.context_length
    context_length = min(load.context_length or trained, trained)
    batch_tokens = load.max_batch_tokens or DEFAULT_BATCH_TOKENS
    progress(0.9, "measuring")
    working = profiled(decoder, load, batch_tokens)
    num_blocks = plan_blocks(
        block_bytes_by_device(config, devices, dtype),
        {device: free_bytes(device) for device in set(devices)},
        working,
        load.kv_budget_bytes,
        DEFAULT_CONTEXTS * -(-context_length // BLOCK_SIZE),
    )
    cache = GpuCache(config.layers, devices, dtype, num_blocks, BLOCK_SIZE)
    runner = GpuRunner(
        decoder,
        cache,
        max_num_seqs=load.max_num_seqs,
        context_length=context_length,
        capture=CudaCapture() if can_capture(devices) else None,
    )
    runner.details |= {"format": checkpoint.format, "quantization": checkpoint.quantization}
    progress(0.95, "capturing graphs")
    runner.prepare()
    return runner


def can_capture(devices: Sequence[torch.device]) -> bool:
    """Graphs are CUDA's; and the torch form of a kernel asks the device for lengths, which a graph
    cannot."""
    return all(d.type == "cuda" and choose(d).name == "triton" for d in set(devices))


def profiled(decoder: GpuDecoder, load: Load, batch_tokens: int) -> int:
    """Tune the products; the bytes that a step works with. Measured, or as an earlier start did.

    Only where graphs can be captured too; else the bound that the sizes give.
    """
    bound = working_bytes(decoder.config, batch_tokens, decoder.dtype)
    devices = decoder.devices
    if not can_capture(devices):
        return bound
    folder = Path(load.cache_dir) / "gpu-profiles" if load.cache_dir else None
    file = ProfileFile(folder, meaning_of(devices, load.digest, decoder.dtype, batch_tokens))
    known = file.read()
    tiles = tune(
        decoder.products, decoder.dtype, {} if known is None else known.tiles, device_seconds
    )
    if known is not None:
        return known.working_bytes
    measured = measured_bytes(decoder, batch_tokens, bound)
    file.write(Profile(measured, tiles))
    return measured


def measured_bytes(decoder: GpuDecoder, batch_tokens: int, bound: int) -> int:
    """The peak of the widest step, and a tenth more; the bound where that step has no room."""
    devices = decoder.devices
    num_blocks = -(-batch_tokens // BLOCK_SIZE)
    layers = decoder.config.layers
    try:
        cache = GpuCache(layers, devices, decoder.dtype, num_blocks, BLOCK_SIZE, FixedMemory)
        before = {device: torch.cuda.memory_allocated(device) for device in set(devices)}
        for device in before:
            torch.cuda.reset_peak_memory_stats(device)
        widest_step(GpuRunner(decoder, cache, max_num_seqs=1), batch_tokens)
        peaks = [torch.cuda.max_memory_allocated(d) - held for d, held in before.items()]
    except torch.OutOfMemoryError:
        return bound
    logits = 2 * LOGIT_ROWS * decoder.config.vocab_size * 4
    return int(max(peaks) * 1.1) + logits


def refuse_missing(device: torch.device) -> None:
    """Raises UnsupportedModel, and says what there is, for a device that is not here."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise UnsupportedModel(f"layers cannot live on {device}; cpu and cuda:N are known")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UnsupportedModel(
            f"{device} is not there: torch {torch.__version__} sees {count} GPUs; load on the CPU, "
            "or install a build of torch for the GPU"
        )


def choose_dtype(name: str, devices: Sequence[torch.device]) -> torch.dtype:
    """ "auto": bfloat16, float16 on a GPU that has none, float32 where only CPUs take part."""
    if name != "auto":
        if name not in _DTYPES:
            raise UnsupportedModel(f"dtype {name} is not supported; auto, {', '.join(_DTYPES)} are")
        return _DTYPES[name]
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return torch.float32
    is_old = any(torch.cuda.get_device_capability(device)[0] < 8 for device in set(gpus))
    return torch.float16 if is_old else torch.bfloat16


def block_bytes_by_device(
    config: ModelConfig, devices: Sequence[torch.device], dtype: torch.dtype
) -> dict[torch.device, int]:
    """What one block takes on each device."""
    sizes = dict.fromkeys(devices, 0)
    for layer, device in zip(config.layers, devices, strict=True):
        sizes[device] += 2 * BLOCK_SIZE * layer.num_kv_heads * layer.head_dim * dtype.itemsize
    return sizes


def working_bytes(config: ModelConfig, batch_tokens: int, dtype: torch.dtype) -> int:
    """An upper bound of what one step allocates and gives back: the widest rows of a layer, and the
    logits with their copy for the sampler."""
    widest = max(
        config.hidden_size * 4 + 3 * config.intermediate_size,
        (config.num_heads * 3 + config.num_kv_heads * 2) * config.head_dim + config.hidden_size * 2,
    )
    if config.experts is not None:
        experts = config.experts
        widest += experts.num_active * (3 * experts.intermediate_size + 2 * config.hidden_size)
    return batch_tokens * widest * dtype.itemsize + 2 * LOGIT_ROWS * config.vocab_size * 4


def free_bytes(device: torch.device) -> int:
    """Memory that could be had now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)
    return int(psutil.virtual_memory().available // 2)


def plan_blocks(
    block_bytes: dict[torch.device, int],
    free: dict[torch.device, int],
    working: int,
    budget_bytes: int,
    most_useful: int,
) -> int:
    """How many blocks to map: as the budget says, within what each device has left.

    Raises NoMemory if two blocks do not fit.
    """
    limits = [
        int((free[device] - working) * DEFAULT_KV_SHARE) // size
        for device, size in block_bytes.items()
        if size
    ]
    total = sum(block_bytes.values())
    wanted = budget_bytes // total if budget_bytes else most_useful
    num_blocks = min([wanted, *limits])
    if num_blocks < 2:
        raise NoMemory(
            f"the KV cache needs {2 * total} bytes at least, beside {working} to compute with; "
            + ", ".join(f"{device} has {size} bytes free" for device, size in free.items())
            + "; unload other models, or let fewer layers live there"
        )
    return num_blocks
