"""These tests run the Triton kernels; without a GPU, in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is declared, so that the switch must be set before the
kernels are imported and holds for the whole process. Therefore these tests run in a process of
their own (tests/backend/test_kernels_triton.py starts it, and so does scripts/kernels), and are not
collected beside others.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("LLMD_KERNEL_TESTS") else ["test_*.py"]
