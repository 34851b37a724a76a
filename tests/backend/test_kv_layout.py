"""Layers in groups: which, how much is lost, and that the real runner says the same with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmd.backend.engine.batch import BlockGroups
from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.models.config import ModelConfig
from llmd.backend.protocol import Load, SamplingParams
from llmd.backend.runner.kv_layout import MAX_WASTE, layout_of
from llmd.backend.runner.model_runner import ModelRunner

from .test_compiled_decoder import Checkpoint

WINDOW = 40


def config_of(num_layers: int, every: int, window: int = WINDOW) -> ModelConfig:
    """Each `every`-th layer sees everything; 0: none does."""
    config = Checkpoint(num_hidden_layers=num_layers).config
    layers = [
        replace(layer, window=None if every and (index + 1) % every == 0 else window)
        for index, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


@pytest.mark.parametrize(
    ("num_layers", "every", "groups"),
    [
        (18, 6, (1, 5)),  # gemma-3 270m
        (26, 6, (1, 6)),  # 1b: four full, 22 windowed
        (34, 6, (1, 6)),  # 4b
        (24, 2, (1, 1)),  # gpt-oss
        (32, 0, (0, 1)),  # mistral 7b v0.1
        (30, 1, (1, 0)),  # no windows
    ],
)
def test_layers_are_dealt_into_few_groups_with_little_lost(
    num_layers: int, every: int, groups: tuple[int, int]
) -> None:
    config = config_of(num_layers, every)
    layout = layout_of(config, context_length=8192)
    assert (layout.groups.num_full, layout.groups.num_windowed) == groups
    assert layout.groups.window == (WINDOW if groups[1] else 0)
    needed = sum(2 * layer.num_kv_heads * layer.head_dim for layer in config.layers)
    assert 1 - needed / (layout.groups.num_groups * layout.width) <= MAX_WASTE
    places = {(place.group, place.offset) for place in layout.places}
    assert len(places) == num_layers, "no two layers at one place"


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert layout_of(config_of(6, 3), context_length=WINDOW).groups == BlockGroups()
    assert layout_of(config_of(6, 3), context_length=WINDOW + 1).groups.num_windowed > 0


def test_a_layer_that_reads_anothers_keys_is_where_they_are() -> None:
    config = config_of(6, 3)
    layers = list(config.layers)
    layers[5] = replace(layers[5], shares_kv_of=2)
    layout = layout_of(replace(config, layers=tuple(layers)), 8192)
    assert layout.places[5] == layout.places[2]


class Mixed(Checkpoint):
    """Four layers, every second of which sees 40 tokens; or none, as they were."""

    def __init__(self, every: int) -> None:
        super().__init__(num_hidden_layers=4)
        self.config = config_of(4, every)


def texts(
    every: int,
    has_groups: bool,
    monkeypatch: pytest.MonkeyPatch,
    preempt_at: tuple[int, ...] = (),
) -> tuple[dict[str, list[int]], Engine]:
    if not has_groups:
        monkeypatch.setattr(
            "llmd.backend.runner.model_runner.layout_of", lambda config, _: layout_of(config, 0)
        )
    load = Load("mixed", "mixed", [], dtype="float32", num_threads=1, context_length=512)
    runner = ModelRunner(Mixed(every), load, lambda share, stage: None)
    assert (runner.groups.num_windowed > 0) == has_groups
    config = SchedulerConfig(
        runner.num_blocks,
        runner.block_size,
        max_batch_tokens=64,
        groups=runner.groups,
    )
    engine = Engine(Scheduler(config), runner)
    generator = torch.Generator().manual_seed(5)
    for index in range(4):
        prompt = torch.randint(0, 96, (30 + 50 * index,), generator=generator).tolist()
        sampling = SamplingParams(temperature=0.8)
        engine.add(EngineRequest(f"s{index}", tuple(prompt), len(prompt), 40, sampling, index))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason != "error", output.error
            found.setdefault(output.id, []).extend(output.token_ids)
        if engine.stats().steps in preempt_at:
            for id in found:
                engine.force_preempt(id)
        engine.check()
    return found, engine


@pytest.mark.parametrize("every", [2, 0], ids=["mixed", "only-windows"])
def test_the_real_runner_says_the_same_with_groups(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_groups, engine = texts(every, True, monkeypatch)
    assert engine.stats().blocks_left_behind > 0
    without, _ = texts(every, False, monkeypatch)
    assert with_groups == without


def test_and_after_preemptions_from_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed, _ = texts(2, True, monkeypatch)
    disturbed, engine = texts(2, True, monkeypatch, preempt_at=(15, 30))
    assert disturbed == undisturbed
    assert engine.stats().preemptions >= 6
