"""The whole engine on the Triton kernels gives the tokens of the torch path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmd.backend.engine.engine import Engine
from llmd.backend.text.grammar import GrammarCompiler

from ..backend.gpu_streams import (
    TORCH,
    TRITON,
    assert_formed,
    formed,
    make_engine,
    make_runner,
    requests,
    run,
)
from ..backend.tiny_checkpoint import VARIANTS, TinyCheckpoint
from ..backend.vocabularies import byte_level
from .shapes import DEVICE, IS_FULL

if DEVICE != "cpu":
    pytest.skip("these streams are compared on the CPU", allow_module_level=True)

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"bits": 8},
    "4 bits and qk-norm": {"bits": 4, "qk_norm": True},
} | {variant: {"variant": variant} for variant in VARIANTS}
COUNT, MAX_TOKENS, LENGTHS, CHUNK = (4, 6, (40, 3, 17, 33), 24) if IS_FULL else (2, 2, (17, 2), 9)
PREEMPTED_AT = 3 if IS_FULL else 2  # a step


@pytest.mark.parametrize("name", MODELS if IS_FULL else ["4 bits and qk-norm"])
def test_mixed_chunked_preempted_and_cached_tokens_are_those_of_torch(name: str) -> None:
    """One of the requests owes a form, of a grammar over a vocabulary of bytes."""
    tokenizer = byte_level()
    checkpoint = TinyCheckpoint(**MODELS[name], vocab_size=tokenizer.vocab_size)
    wanted = requests(COUNT, MAX_TOKENS, LENGTHS)
    grammar = GrammarCompiler(tokenizer).compile({"regex": "[ab]{9}"})
    wanted[1] = replace(wanted[1], grammar=grammar)
    expected = run(make_engine(make_runner(checkpoint, TORCH)), wanted)

    def preempt(engine: Engine, step: int) -> None:
        if step == PREEMPTED_AT:
            assert engine.force_preempt("0")

    engine = make_engine(make_runner(checkpoint, TRITON), prefill_chunk=CHUNK)
    assert run(engine, wanted, preempt) == expected
    cached = engine.stats().cached_tokens
    assert run(engine, [replace(wanted[0], max_tokens=1)]) == {"0": expected["0"][:1]}
    assert set(tokenizer.decode([*expected["1"]])) <= {"a", "b"}
    assert engine.stats().cached_tokens > cached
    assert engine.stats().preemptions == 1


@pytest.mark.skipif(not IS_FULL, reason="the short form above has a grammar too")
def test_forms_hold_to_their_ends_beside_free_text() -> None:
    """Real grammars over a real vocabulary; the masks are applied by the kernel."""
    tokenizer = byte_level()
    checkpoint = TinyCheckpoint(vocab_size=tokenizer.vocab_size)
    wanted = formed(tokenizer)
    streams = run(make_engine(make_runner(checkpoint, TRITON)), wanted)
    assert_formed(tokenizer, streams)
    assert streams == run(make_engine(make_runner(checkpoint, TORCH)), wanted)
