"""The GPU's decoder reads every flag of a family as the CPU's does: the same tokens come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmd.backend.engine.engine import Engine
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.config import LayerConfig, UnsupportedModel
from llmd.backend.protocol import Load
from llmd.backend.runner.gpu_model import why_not_on_devices
from llmd.backend.runner.model_runner import ModelRunner

from .gpu_streams import make_engine, make_runner, requests, run
from .tiny_checkpoint import VARIANTS, TinyCheckpoint


def on_the_cpu(checkpoint: TinyCheckpoint) -> dict[str, tuple[int, ...]]:
    """The streams by another decoder, another attention, another sampler."""
    load = Load(name="tiny", digest="", files=[], dtype="float32", kv_budget_bytes=2**20)
    runner = ModelRunner(checkpoint, load, lambda share, stage: None)
    config = SchedulerConfig(
        num_blocks=runner.num_blocks, block_size=runner.block_size, groups=runner.groups
    )
    return run(Engine(Scheduler(config), runner), requests())


@pytest.mark.parametrize("variant", ["", *VARIANTS])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_family_gives_the_tokens_of_the_cpu(variant: str, bits: int) -> None:
    checkpoint = TinyCheckpoint(variant=variant, bits=bits)
    streams = run(make_engine(make_runner(checkpoint), prefill_chunk=9), requests())
    assert streams == on_the_cpu(checkpoint)


def test_a_variant_changes_what_is_said() -> None:
    """Else the comparison above would compare nothing."""
    plain = run(make_engine(make_runner(TinyCheckpoint())), requests())
    for variant in VARIANTS:
        other = run(make_engine(make_runner(TinyCheckpoint(variant=variant))), requests())
        assert other != plain, variant


def test_layers_that_are_not_known_are_refused() -> None:
    state = LayerConfig(num_kv_heads=2, head_dim=16, rope=None, kind="mamba")
    config = replace(TinyCheckpoint().config, layers=(state,))
    assert why_not_on_devices(config) == "mamba layers"
    shared = replace(state, kind="attention", shares_kv_of=0)
    assert "share" in why_not_on_devices(replace(config, layers=(shared,)))
    checkpoint = TinyCheckpoint()
    checkpoint.config = config
    with pytest.raises(UnsupportedModel, match="mamba layers run on the CPU alone so far"):
        make_runner(checkpoint)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_stay_quantised(bits: int) -> None:
    dense = make_runner(TinyCheckpoint(variant="gpt-oss"))
    packed = make_runner(TinyCheckpoint(variant="gpt-oss", bits=bits))
    assert packed.weights_bytes < dense.weights_bytes * 0.75
    assert torch.is_tensor(packed.pages.layers[0].keys)
