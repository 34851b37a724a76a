"""The real model as transformers reads it, and as the engine does: for the tests of the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from .truth import (
    PROMPTS,
    TruthEngine,
    continued_by_transformers,
    gguf_files,
    save_for_transformers,
    tokenizer_of,
)


@pytest.fixture(scope="module")
def folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    save_for_transformers(smollm2_gguf, folder)
    return folder


@pytest.fixture(scope="module")
def prompts(smollm2_gguf: Path) -> list[list[int]]:
    tokenizer = tokenizer_of(smollm2_gguf)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return continued_by_transformers(folder, prompts)


@pytest.fixture(scope="module")
def truth(smollm2_gguf: Path) -> TruthEngine:
    return TruthEngine.load(gguf_files(smollm2_gguf), tokenizer_of(smollm2_gguf), "float32")
