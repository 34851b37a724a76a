"""The Triton kernels, in a process where Triton's interpreter is on from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU_TESTS = Path(__file__).parent.parent / "gpu"

pytest.importorskip("triton")


def run_kernel_tests(file: str = "", **environment: str) -> None:
    """tests/gpu in its own process; see its conftest."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    settings = {**inherited, "LLMD_KERNEL_TESTS": "1", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command.append(str(GPU_TESTS / file))
    result = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.timeout(480)
def test_every_kernel_equals_its_twin_in_the_interpreter() -> None:
    run_kernel_tests(TRITON_INTERPRET="1")


@pytest.mark.timeout(480)
def test_every_kernel_compiles_without_a_gpu() -> None:
    run_kernel_tests("test_aot.py")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_equals_its_twin_on_the_device() -> None:
    run_kernel_tests()
