"""The kernels compile for every supported GPU, without one, and what counts does not spill."""

from __future__ import annotations

import itertools
import os

import pytest

from .shapes import IS_FULL

if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("the interpreter replaces what would be compiled", allow_module_level=True)

from . import aot

# One compilation of each kind; scripts/kernels has all on all targets.
COMPACT = [
    ("elementwise", 90),
    ("attention D=128 G=4 bf16", 80),
    ("attention D=128 G=4 bf16", 90),
    ("attention D=256 G=4 bf16, window, softcap", 80),
    ("product 1 rows, 4 bits and offsets (Q4_1, Q4_K)", 80),
    ("product 1 rows, 4 bits and offsets (Q4_1, Q4_K)", 90),
    ("product 512 rows, 6 bits, groups of 16 (Q6_K)", 90),
    ("expert product 8 pairs, MXFP4", 80),
]
TABLE = list(itertools.product(aot.cases(), aot.TARGETS)) if IS_FULL else COMPACT


@pytest.mark.parametrize(("case", "target"), TABLE)
def test_a_kernel_compiles_fits_and_does_not_spill(case: str, target: int) -> None:
    problems = [
        (usage.kernel, usage.problem) for usage in aot.compile_case(case, target) if usage.problem
    ]
    assert problems == []


def test_a_spill_would_be_seen() -> None:
    usage = aot.Usage("case", "kernel", 90, 255, 48, 1024, 4)
    assert usage.problem == "48 bytes spilled"


def test_too_much_shared_memory_would_be_seen() -> None:
    usage = aot.Usage("case", "kernel", 89, 255, 0, 120_000, 4)
    assert usage.problem == "120000 bytes of shared memory"
