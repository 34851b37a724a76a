"""Every family gives transformers' logits, however its tokens came to be computed.

The checks are the columns and the cases the rows of docs/families.md, which
`python -m tests.backend.family_table` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmd.backend.models.config import UnsupportedModel, config_from_hf
from llmd.registry.formats import architectures

from .family_oracle import CASES, Case, Oracle, prompt_of

SHORT = prompt_of(5, 1)  # a window of 24 is crossed in decode
LONG = prompt_of(41, 2)  # ... and in prefill
OTHER = prompt_of(70, 3)


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    case: Case = request.param
    return Oracle(case, tmp_path_factory.mktemp("model"))


def alone(oracle: Oracle) -> None:
    oracle.run(oracle.engine(), [LONG])


def window_crossed_in_decode(oracle: Oracle) -> None:
    oracle.run(oracle.engine(), [SHORT])


def batched(oracle: Oracle) -> None:
    oracle.run(oracle.engine(), [LONG, SHORT, OTHER])


def chunks_of_1(oracle: Oracle) -> None:
    oracle.run(oracle.engine(prefill_chunk=1), [LONG, SHORT])


def chunks_of_7(oracle: Oracle) -> None:
    oracle.run(oracle.engine(prefill_chunk=7), [LONG, SHORT])


def chunks_of_16(oracle: Oracle) -> None:
    oracle.run(oracle.engine(prefill_chunk=16), [LONG, SHORT])


def from_the_prefix_cache(oracle: Oracle) -> None:
    engine = oracle.engine()
    oracle.run(engine, [OTHER])
    num_cached = oracle.run(engine, [(*OTHER[:66], 7, 8, 9), (*OTHER[:32], 5)])
    assert num_cached in (0, 66)  # a layer with a state may refuse the prefix


def preempted(oracle: Oracle) -> None:
    oracle.run(oracle.engine(), [LONG, SHORT], preempt_at=9)


CHECKS: list[Callable[[Oracle], None]] = [
    alone,
    window_crossed_in_decode,
    batched,
    chunks_of_1,
    chunks_of_7,
    chunks_of_16,
    from_the_prefix_cache,
    preempted,
]


# Every case runs two sequences in chunks in scripts/check, these cases run every check there: each
# kind of layer is among them. The rest is slow; `scripts/families` runs all.
THOROUGH = ("Gemma 3", "gpt-oss", "LFM2", "Gemma 4, layer inputs, shared keys")


def _pairs() -> list[Any]:
    return [
        pytest.param(
            case,
            check,
            id=f"{case}-{check.__name__}",
            marks=[] if check is chunks_of_7 or case.name in THOROUGH else [pytest.mark.slow],
        )
        for case in CASES
        for check in CHECKS
    ]


@pytest.mark.parametrize(("oracle", "check"), _pairs(), indirect=["oracle"])
def test_the_logits_are_those_of_transformers(
    oracle: Oracle, check: Callable[[Oracle], None]
) -> None:
    check(oracle)


def _gguf_cases() -> list[Any]:
    quick = ("Llama", "Gemma 3", "Qwen3.5")
    return [
        pytest.param(case, id=str(case), marks=[] if case.name in quick else [pytest.mark.slow])
        for case in CASES
        if case.gguf
    ]


@pytest.mark.parametrize("case", _gguf_cases())
def test_a_gguf_of_the_same_weights_gives_the_same_logits(case: Case, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "gguf"
    folder.mkdir()
    oracle = Oracle(case, source)
    oracle.use_gguf(folder)
    batched(oracle)


def test_the_kept_table_is_current() -> None:
    from .family_table import PAGE, render

    assert PAGE.read_text(encoding="utf-8") == render()


def test_every_architecture_of_config_json_has_a_case() -> None:
    missing = set(architectures.SAFETENSORS) - {case.model_type for case in CASES}
    assert missing == set()


@pytest.mark.parametrize("kind", ["su", "ntk", "xpos"])
def test_an_unknown_rope_scaling_is_refused_with_the_known_ones(kind: str) -> None:
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "rope_scaling": {"type": kind, "factor": 2.0},
    }
    with pytest.raises(UnsupportedModel, match=rf"{kind}.*dynamic, linear, llama3, longrope.*yarn"):
        config_from_hf(raw)
