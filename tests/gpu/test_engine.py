"""The whole engine on the Triton kernels gives the tokens of the torch path."""

from __future__ import annotations

from typing import Any

import pytest

from llmd.backend.engine.engine import Engine

from ..backend.gpu_streams import TORCH, TRITON, make_engine, make_runner, requests, run
from ..backend.tiny_checkpoint import VARIANTS, TinyCheckpoint
from .shapes import DEVICE, IS_FULL

if DEVICE != "cpu":
    pytest.skip("these streams are compared on the CPU", allow_module_level=True)

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8 bits": {"bits": 8},
    "4 bits and qk-norm": {"bits": 4, "qk_norm": True},
} | {variant: {"variant": variant} for variant in VARIANTS}
COUNT, MAX_TOKENS, LENGTHS, CHUNK = (4, 6, (40, 3, 17, 33), 24) if IS_FULL else (2, 3, (17, 2), 9)


@pytest.mark.parametrize("name", MODELS if IS_FULL else ["4 bits and qk-norm"])
def test_mixed_chunked_preempted_and_cached_tokens_are_those_of_torch(name: str) -> None:
    checkpoint = TinyCheckpoint(**MODELS[name])
    wanted = requests(COUNT, MAX_TOKENS, LENGTHS)
    expected = run(make_engine(make_runner(checkpoint, TORCH)), wanted)

    def preempt(engine: Engine, step: int) -> None:
        if step == 3:
            assert engine.force_preempt("0")

    engine = make_engine(make_runner(checkpoint, TRITON), prefill_chunk=CHUNK)
    assert run(engine, wanted, preempt) == expected
    cached = engine.stats().cached_tokens
    assert run(engine, wanted[:1]) == {"0": expected["0"]}
    assert engine.stats().cached_tokens > cached
    assert engine.stats().preemptions == 1
