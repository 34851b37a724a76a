"""Compile every kernel ahead of time, without a GPU, and see what it takes of one.

    python -m tests.gpu.aot [report.md]

The kernels' own wrappers are called with small CPU tensors of the shapes and dtypes that count, and
their launches recorded instead of run: so what is compiled are the shipped configurations, with the
specialisations that Triton itself would choose (16 divides a pointer or a stride; a 1 is constant).
Registers and shared memory come from the machine code, spills from the assembler's own report.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from llmd.backend.kernels import (
    activation,
    mask,
    matmul,
    moe,
    norm,
    packed,
    paged_attention,
    rotary,
    sampling,
    store_kv,
)
from llmd.backend.kernels.tiles import Tuned, candidates

NOT_TUNED = Tuned()
TARGETS = (80, 89, 90, 100, 120)
# What one block may have: CUDA C++ Programming Guide, "Compute Capabilities", bytes.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
POINTERS = {
    torch.float32: "*fp32",
    FP16: "*fp16",
    BF16: "*bf16",
    FP8: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with what it was called with."""

    kernel: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes."""

    case: str
    kernel: str
    target: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int

    @property
    def problem(self) -> str:
        """Why it is not good enough; empty if it is."""
        if self.spill_bytes > 0:
            return f"{self.spill_bytes} bytes spilled"
        if self.shared_bytes > SHARED_MEMORY[self.target]:
            return f"{self.shared_bytes} bytes of shared memory"
        return ""


@contextmanager
def recorded(target: int) -> Iterator[list[Launch]]:
    """Launches inside are recorded and not run; configurations are those for the target."""
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(self, args, keywords))

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(paged_attention, "capability_of", lambda device: target),
    ):
        yield launches


def compile_for(launch: Launch, target: int, case: str = "") -> Usage:
    """Compile for sm_<target>."""
    options = {
        name: value
        for name, value in launch.keywords.items()
        if name in ("num_warps", "num_stages")
    }
    named = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    named |= {name: v for name, v in launch.keywords.items() if name not in options}
    constants = {p.name for p in launch.kernel.params if p.is_constexpr}
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(launch.kernel.arg_names):
        value = named[name]
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constexprs[(index,)] = value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, spilled = resources(compiled.asm["ptx"], target)
    return Usage(
        case,
        compiled.metadata.name,
        target,
        registers,
        spilled,
        compiled.metadata.shared,
        compiled.metadata.num_warps,
    )


def resources(ptx: str, target: int) -> tuple[int, int]:
    """(registers per thread, bytes spilled per thread), by the assembler in Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newest = tools / "ptxas-blackwell"  # also assembles for older machines
    tool = newest if newest.exists() else tools / "ptxas"
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        name = f"--gpu-name=sm_{target}{'a' if target >= 90 else ''}"
        command = [str(tool), "-v", name, file.name, "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    assert used and spilled, text
    return int(used[1]), int(spilled[1])


def attention(
    head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype, **settings: Any
) -> None:
    """A prefill beside a decode: both launches and the merge."""
    cache = torch.empty(4, 2, 16, head_dim, dtype=cache_dtype)
    paged_attention.paged_attention(
        torch.empty(32, 2 * group, head_dim, dtype=dtype),
        cache,
        cache,
        torch.zeros(2, 16, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        0.5,
        max_query_len=32,
        max_seq_len=2048,
        **settings,
    )


def quantized(
    num_rows: int,
    bits: int,
    group: int,
    has_offsets: bool,
    dtype: torch.dtype,
    tuned: Tuned = NOT_TUNED,
) -> None:
    weight = replace(random_weight((), bits, group, has_offsets), tuned=tuned)
    matmul.quantized_matmul(torch.empty(num_rows, 4096, dtype=dtype), weight)


def experts(num_pairs: int, form: str) -> None:
    if form == "dense":
        weight = packed.dense(torch.empty(4, 64, 4096, dtype=BF16))
    else:
        weight = random_weight((4,), 4, 32, has_offsets=form != "fp4", is_fp4=form == "fp4")
    moe.expert_matmul(
        torch.empty(8, 4096, dtype=BF16),
        weight,
        torch.zeros(num_pairs, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int32),
        torch.empty(4, 64, dtype=BF16),
    )


def random_weight(
    experts: tuple[int, ...], bits: int, group: int, has_offsets: bool, is_fp4: bool = False
) -> packed.PackedWeight:
    q = torch.zeros(*experts, 64, 4096, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.zeros(*experts, 64, 4096 // group, dtype=torch.uint8 if is_fp4 else FP16)
    offsets = scales if has_offsets else None
    return packed.pack(q, scales, offsets, bits=bits, group=group, is_fp4=is_fp4)


def elementwise() -> None:
    """One of each of the small kernels, in their richest form."""
    x = torch.empty(4, 4096, dtype=BF16)
    norm.rms_norm(x, x[0], 1e-5, x)
    activation.silu_mul(x)
    activation.gelu_mul(x)
    logits = torch.empty(4, 128_256)
    rows = torch.zeros(4, dtype=torch.int32)
    mask.apply_token_mask(logits, torch.zeros(4, 4008, dtype=torch.int32), rows)
    column, wide = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    sampling.sample(logits, column, rows, column, column, wide, wide)
    heads = torch.empty(4, 8, 128, dtype=BF16)
    angles = torch.empty(4, 64)
    cache = torch.empty(4, 8, 16, 128, dtype=BF16)
    store_kv.store_kv(heads, heads, cache, cache, wide)
    rotary.rotary_store(
        heads, heads, heads, angles, angles, cache, cache, wide, q_weight=x[0], k_weight=x[0]
    )
    rotary.rotary(heads, heads, angles, angles, interleaved=True)


def fp8_writes() -> None:
    heads = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4, 8, 16, 128).to(FP8)
    store_kv.store_kv(heads, heads, cache, cache, torch.zeros(4, dtype=torch.int64), 0.5, 0.5)


def cases() -> dict[str, Callable[[], None]]:
    """All that is compiled, by name. Those with "attention" or "product" must not spill."""
    table: dict[str, Callable[[], None]] = {"elementwise": elementwise, "fp8 writes": fp8_writes}
    sinks = torch.empty(8, dtype=BF16)
    for head_dim in (64, 80, 96, 128, 256):
        table[f"attention D={head_dim} G=4 bf16"] = partial(attention, head_dim, 4, BF16, BF16)
    table |= {
        "attention D=128 G=1 fp16": partial(attention, 128, 1, FP16, FP16),
        "attention D=128 G=7 bf16": partial(attention, 128, 7, BF16, BF16),
        "attention D=128 G=8 bf16": partial(attention, 128, 8, BF16, BF16),
        "attention D=64 G=4 fp32": partial(attention, 64, 4, torch.float32, torch.float32),
        "attention D=128 G=4 bf16, window, softcap, sinks": partial(
            attention, 128, 4, BF16, BF16, window=4096, softcap=30.0, sinks=sinks
        ),
        "attention D=256 G=4 bf16, window, softcap": partial(
            attention, 256, 4, BF16, BF16, window=4096, softcap=30.0
        ),
        "attention D=128 G=4 bf16, fp8 cache": partial(attention, 128, 4, BF16, FP8, key_scale=0.5),
    }
    forms = {
        "4 bits (Q4_0)": (4, 32, False),
        "4 bits and offsets (Q4_1, Q4_K)": (4, 32, True),
        "4 bits and offsets, groups of 128 (AWQ, GPTQ)": (4, 128, True),
        "5 bits and offsets (Q5_K)": (5, 32, True),
        "6 bits, groups of 16 (Q6_K)": (6, 16, False),
        "8 bits (Q8_0)": (8, 32, False),
    }
    for name, (bits, group, has_offsets) in forms.items():
        for num_rows in (1, 512):
            table[f"product {num_rows} rows, {name}"] = partial(
                quantized, num_rows, bits, group, has_offsets, BF16
            )
    for name in ("4 bits and offsets (Q4_1, Q4_K)", "5 bits and offsets (Q5_K)"):
        bits, group, has_offsets = forms[name]
        for num_rows in (1, 512):
            for place in range(1, len(candidates(num_rows))):
                table[f"product {num_rows} rows, {name}, tile {place}"] = partial(
                    quantized, num_rows, bits, group, has_offsets, BF16, Tuned(place, place)
                )
    table["product 1 rows, 4 bits, fp16"] = partial(quantized, 1, 4, 32, True, FP16)
    for num_pairs in (8, 512):
        table[f"expert product {num_pairs} pairs, MXFP4"] = partial(experts, num_pairs, "fp4")
        table[f"expert product {num_pairs} pairs, Q4_K"] = partial(experts, num_pairs, "offsets")
        table[f"expert product {num_pairs} pairs, bf16"] = partial(experts, num_pairs, "dense")
    return table


def compile_case(case: str, target: int) -> list[Usage]:
    """Every kernel that the case launches. e4m3 is unknown to the machines before sm_89."""
    if "fp8" in case and target < 89:
        return []
    with recorded(target) as launches:
        cases()[case]()
    return [compile_for(launch, target, case) for launch in launches]


def report(usages: list[Usage]) -> str:
    """The table as Markdown."""
    lines = [
        "# The kernels, compiled ahead of time",
        "",
        "`scripts/kernels` writes this page: every Triton kernel in its shipped configurations,",
        f"compiled by triton {triton.__version__} without a GPU. Registers are per thread; shared",
        "memory is bytes per block. fp8 needs sm_89 or later.",
        "",
        "| case | kernel | warps | " + " | ".join(f"sm_{t}" for t in TARGETS) + " |",
        "|---|---|---|" + "---|" * len(TARGETS),
    ]
    found: dict[tuple[str, str, int], dict[int, str]] = {}
    for u in usages:
        spilled = f" **{u.spill_bytes} spilled**" if u.spill_bytes else ""
        cell = f"{u.registers} reg, {u.shared_bytes} B{spilled}"
        found.setdefault((u.case, u.kernel, u.num_warps), {})[u.target] = cell
    for (case, kernel, warps), cells in found.items():
        columns = " | ".join(cells.get(target, "–") for target in TARGETS)
        lines.append(f"| {case} | {kernel.removesuffix('_kernel')} | {warps} | {columns} |")
    problems = [u for u in usages if u.problem]
    lines += ["", f"{len(usages)} compilations, {len(problems)} with a problem."]
    lines += [f"- {u.case}, {u.kernel}, sm_{u.target}: {u.problem}" for u in problems]
    return "\n".join(lines) + "\n"


def main() -> int:
    usages = []
    for case in cases():
        for target in TARGETS:
            usages += compile_case(case, target)
        print(case, flush=True)
    text = report(usages)
    for path in sys.argv[1:]:
        Path(path).write_text(text, encoding="utf-8")
    print(text.splitlines()[-1])
    return int(any(usage.problem for usage in usages))


if __name__ == "__main__":
    sys.exit(main())
