"""Single kernels on the device: equal to their twins, and how fast beside what the card can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backend.kernels import packed, torch_ops
from ..backend.kernels.select import Kernels
from .gpu_clock import Clock


@dataclass(frozen=True)
class Sizes:
    """How large the measured cases are; the second set is for a dry run without a GPU."""

    copy_bytes: int = 2**30
    matmul: int = 8192
    decode_seqs: int = 64
    decode_length: int = 4096
    prefill_length: int = 4096
    outputs: int = 14336
    columns: int = 4096
    vocab_size: int = 128_256


DRY = Sizes(2**16, 64, 3, 64, 48, 96, 128, 300)


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


@dataclass(frozen=True)
class Pages:
    """Sequences in a paged cache of 8 heads of 128, in shuffled blocks of 16."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    starts: Tensor
    lens: Tensor

    @staticmethod
    def of(query_lens: list[int], kv_lens: list[int], device: torch.device) -> Pages:
        needed = [-(-length // 16) for length in kv_lens]
        order = torch.randperm(sum(needed), device=device).to(torch.int32)
        tables = torch.zeros(len(needed), max(needed), dtype=torch.int32, device=device)
        at = 0
        for row, count in enumerate(needed):
            tables[row, :count] = order[at : at + count]
            at += count
        keys = normal(at, 8, 16, 128, device=device)
        starts = torch.tensor([0, *query_lens], device=device).cumsum(0).to(torch.int32)
        lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        return Pages(keys, torch.randn_like(keys), tables, starts, lens)

    def attend(self, kernels: Kernels, query: Tensor, **settings: Any) -> Tensor:
        return kernels.paged_attention(
            query,
            self.keys,
            self.values,
            self.tables,
            self.starts,
            self.lens,
            0.09,
            **settings,
            max_query_len=int((self.starts[1:] - self.starts[:-1]).max()),
            max_seq_len=int(self.lens.max()),
        )


def weight_of(bits: int, outputs: int, columns: int, device: torch.device) -> packed.PackedWeight:
    kind = torch.int8 if bits == 8 else torch.uint8
    q = torch.randint(0, 1 << min(bits, 7), (outputs, columns), dtype=kind, device=device)
    scales = torch.rand(outputs, columns // 32, device=device) * 0.01
    return packed.pack(q, scales, scales * -4, bits=bits, group=32)


# -------------------------------------------------------------------------- correctness


def checks(kernels: Kernels, device: torch.device) -> Iterator[tuple[str, float]]:
    """For every kernel, its largest difference to the twin, relative to the largest value.

    The twins run on the same device, in the same dtypes; bf16 rounds at 2^-8.
    """
    for name, run in cases(device).items():
        torch.manual_seed(0)
        yield name, difference(lambda run=run: run(kernels), lambda run=run: run(torch_ops))


def difference(fast: Callable[[], Tensor], twin: Callable[[], Tensor]) -> float:
    """Both see the same random numbers."""
    state = torch.get_rng_state()
    actual = fast().float()
    torch.set_rng_state(state)
    expected = twin().float()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def cases(device: torch.device) -> dict[str, Callable[[Any], Tensor]]:
    """A call of each kernel, small; the full table of shapes is `scripts/kernels`."""
    torch.manual_seed(1)
    x = normal(5, 512, device=device)
    heads = normal(5, 16, 128, device=device)
    angles = torch.randn(5, 64, device=device)
    slots = torch.tensor([3, -1, 40, 17, 0], device=device)
    pages = Pages.of([1, 33, 1, 2], [700, 33, 1, 31], device)
    query = normal(37, 32, 128, device=device)
    stacked = [weight_of(4, 64, 512, device) for _ in range(3)]
    row_ids = torch.tensor([0, 2, 4, 1, 3, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=device)
    logits = torch.randn(4, 5000, device=device) * 3
    ints = torch.arange(4, device=device)

    def stored(ops: Any) -> Tensor:
        cache = torch.zeros(2, 4, 4, 16, 128, device=device, dtype=torch.bfloat16)
        q, k, v = heads[:, :8], heads[:, 8:12], heads[:, 12:]
        args = (q, k, v, angles.cos(), angles.sin(), cache[0], cache[1], slots)
        rotated = ops.rotary_store(*args, q_weight=x[0, :128], k_weight=x[1, :128])
        return torch.cat([rotated.flatten(), cache.flatten()])

    def masked(ops: Any) -> Tensor:
        scores = logits.clone()
        bits = torch.full((1, 157), 0x55555555, dtype=torch.int32, device=device)
        ops.apply_token_mask(scores, bits, torch.tensor([2], dtype=torch.int32, device=device))
        return scores.clamp(min=-100)

    def sampled(ops: Any) -> Tensor:
        column = torch.tensor([0.0, 1.0, 0.8, 1.5], device=device)
        top_k = torch.tensor([0, 0, 40, 0], dtype=torch.int32, device=device)
        top_p = torch.tensor([1.0, 1.0, 0.9, 0.5], device=device)
        drawn: Tensor = ops.sample(logits, column, top_k, top_p, column * 0.01, ints * 77, ints)
        return torch.nn.functional.one_hot(drawn, logits.shape[1])  # another id is all wrong

    table: dict[str, Callable[[Any], Tensor]] = {
        "rms_norm": lambda ops: ops.rms_norm(x, x[0], 1e-5, x)[0],
        "silu_mul": lambda ops: ops.silu_mul(x),
        "gelu_mul": lambda ops: ops.gelu_mul(x),
        "rotary_store": stored,
        "paged_attention": lambda ops: pages.attend(ops, query),
        "paged_attention, window, softcap": lambda ops: pages.attend(
            ops, query, window=20, softcap=30.0
        ),
        "paged_attention, sinks": lambda ops: pages.attend(ops, query, sinks=x[0, :32]),
        "expert_matmul": lambda ops: ops.expert_matmul(x, packed.stack(stacked), row_ids, starts),
        "apply_token_mask": masked,
        "sample": sampled,
    }
    for bits in (4, 5, 6, 8):
        weight = weight_of(bits, 96, 512, device)
        for rows in (1, 5):
            table[f"quantized_matmul, {bits} bits, {rows} rows"] = (
                lambda ops, weight=weight, rows=rows: ops.quantized_matmul(x[:rows], weight)
            )
    return table


# --------------------------------------------------------------------------------- speed


def copy_rate(clock: Clock, sizes: Sizes) -> float:
    """Bytes per second, read and written."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / clock.seconds(lambda: target.copy_(source))


def matmul_rate(clock: Clock, sizes: Sizes) -> float:
    """Operations per second of a bf16 product of squares."""
    a = normal(sizes.matmul, sizes.matmul, device=clock.device)
    return 2 * sizes.matmul**3 / clock.seconds(lambda: a @ a)


def decode_attention_rate(clock: Clock, kernels: Kernels, sizes: Sizes) -> float:
    """Bytes of keys and values per second: 32 query heads, 8 kv heads of 128."""
    count, length = sizes.decode_seqs, sizes.decode_length
    pages = Pages.of([1] * count, [length] * count, clock.device)
    query = normal(count, 32, 128, device=clock.device)
    return 2 * pages.keys.nbytes / clock.seconds(lambda: pages.attend(kernels, query))


def prefill_attention_rate(clock: Clock, kernels: Kernels, sizes: Sizes) -> float:
    """Operations per second of one causal prompt: half of the square is computed."""
    length = sizes.prefill_length
    pages = Pages.of([length], [length], clock.device)
    query = normal(length, 32, 128, device=clock.device)
    return 4 * 32 * 128 * length**2 / 2 / clock.seconds(lambda: pages.attend(kernels, query))


def product_rate(
    clock: Clock, kernels: Kernels, sizes: Sizes, bits: int, num_rows: int
) -> tuple[float, float]:
    """Bytes of packed weight per second, and operations per second."""
    weight = weight_of(bits, sizes.outputs, sizes.columns, clock.device)
    x = normal(num_rows, sizes.columns, device=clock.device)
    taken = clock.seconds(lambda: kernels.quantized_matmul(x, weight))
    return weight.size_bytes / taken, 2 * num_rows * sizes.outputs * sizes.columns / taken


def sampling_seconds(clock: Clock, kernels: Kernels, sizes: Sizes, num_rows: int) -> float:
    """Of one draw with top_k and top_p."""
    logits = torch.randn(num_rows, sizes.vocab_size, device=clock.device) * 3
    ones = torch.ones(num_rows, device=clock.device)
    ints = torch.arange(num_rows, device=clock.device)
    top_k = torch.full((num_rows,), 40, dtype=torch.int32, device=clock.device)
    return clock.seconds(
        lambda: kernels.sample(logits, ones, top_k, ones * 0.9, ones * 0, ints, ints)
    )
