"""The GPU runner's logic, which needs no GPU: rows, index vectors, graph sizes, layer maps."""

from __future__ import annotations

import random

import pytest
import torch

from llmd.backend.engine.engine import Engine
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.protocol import DevicePart, Load, SamplingParams
from llmd.backend.runner.gpu_graphs import SIZES, bucket_for, rerun
from llmd.backend.runner.gpu_inputs import FEED_BACK, Piece, RowState
from llmd.backend.runner.gpu_layer_map import layer_map
from llmd.backend.runner.model_runner import ModelRunner

from .gpu_streams import make_engine, make_runner, requests, run
from .tiny_checkpoint import TinyCheckpoint

CPU = torch.device("cpu")


def test_inputs_are_gathered_from_rows() -> None:
    state = RowState(max_rows=4, max_blocks=5, block_size=4, device=CPU)
    state.start(2)
    state.extend(2, (9, 7))
    state.start(0)
    state.extend(0, (3,))
    state.feed_back(torch.tensor([2]), torch.tensor([55]))
    inputs = state.gather([Piece(2, 5, [FEED_BACK], 1), Piece(0, 0, [11, 12, 13], 0)])
    assert inputs.token_ids.tolist() == [55, 11, 12, 13]
    assert inputs.positions.tolist() == [5, 0, 1, 2]
    assert inputs.slot_mapping.tolist() == [7 * 4 + 1, 12, 13, 14]
    assert inputs.block_tables.tolist() == [[9, 7], [3, 0]]
    assert inputs.query_start.tolist() == [0, 1, 4]
    assert inputs.seq_lens.tolist() == [6, 3]
    assert inputs.logit_rows.tolist() == [0]
    assert not inputs.is_decode


def test_a_row_that_is_given_away_forgets_its_table() -> None:
    state = RowState(max_rows=2, max_blocks=5, block_size=4, device=CPU)
    state.extend(1, (8, 9))
    state.gather([Piece(1, 0, [1] * 5, 1)])
    state.start(1)
    state.extend(1, (4,))
    assert state.gather([Piece(1, 0, [1], 1)]).block_tables.tolist() == [[4]]


def test_graph_sizes_waste_at_most_a_third() -> None:
    assert bucket_for(257) is None
    for num_seqs in range(1, 257):
        size = bucket_for(num_seqs)
        assert size is not None and size in SIZES
        assert num_seqs <= size
        assert num_seqs < 5 or (size - num_seqs) / size <= 3 / 8


def test_layers_are_mapped_to_devices() -> None:
    parts = [DevicePart("cuda:0", 2), DevicePart("cuda:1", 1), DevicePart("cpu", -1)]
    assert [str(d) for d in layer_map(parts, 5)] == ["cuda:0", "cuda:0", "cuda:1", "cpu", "cpu"]
    assert layer_map([], 2) == (CPU, CPU)
    with pytest.raises(ValueError, match="3 layers, the model has 5"):
        layer_map(parts[:2], 5)


@pytest.fixture(scope="module")
def checkpoint() -> TinyCheckpoint:
    return TinyCheckpoint(qk_norm=True)


@pytest.fixture(scope="module")
def alone(checkpoint: TinyCheckpoint) -> dict[str, tuple[int, ...]]:
    """Each request in an engine of its own."""
    streams: dict[str, tuple[int, ...]] = {}
    for request in requests():
        streams |= run(make_engine(make_runner(checkpoint)), [request])
    return streams


def test_together_chunked_and_cached_are_as_alone(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(make_runner(checkpoint), prefill_chunk=7)
    assert run(engine, requests()) == alone
    assert run(engine, requests()) == alone  # now from the prefix cache
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_preempted_is_as_undisturbed(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]], seed: int
) -> None:
    chance = random.Random(seed)

    def disturb(engine: Engine, step: int) -> None:
        if chance.random() < 0.4:
            engine.force_preempt(str(chance.randrange(4)))

    assert run(make_engine(make_runner(checkpoint)), requests(), disturb) == alone


def test_captured_steps_are_as_eager_ones(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]]
) -> None:
    """The stand-in for a graph runs the same padded, static tensors."""
    runner = make_runner(checkpoint, capture=rerun)
    assert run(make_engine(runner), requests()) == alone
    assert "[4]" in repr(runner._graphs)


def test_two_devices_give_the_tokens_of_one(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]]
) -> None:
    """The CPU counts as two: cpu and cpu:0 are different devices to torch."""
    parts = [DevicePart("cpu", 1), DevicePart("cpu:0", 1)]
    assert run(make_engine(make_runner(checkpoint, parts=parts)), requests()) == alone


def test_greedy_tokens_are_those_of_the_cpu_runner(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]]
) -> None:
    """Another decoder, another attention, another sampler; the noise of the two differs."""
    load = Load(name="tiny", digest="", files=[], dtype="float32", kv_budget_bytes=2**20)
    runner = ModelRunner(checkpoint, load, lambda share, stage: None)
    config = SchedulerConfig(num_blocks=runner.num_blocks, block_size=runner.block_size)
    greedy = [request for request in requests() if request.sampling.temperature == 0]
    streams = run(Engine(Scheduler(config), runner), greedy)
    assert streams == {request.id: alone[request.id] for request in greedy}


@pytest.mark.parametrize("seed", range(6))
def test_random_comings_and_goings_change_no_stream(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]], seed: int
) -> None:
    """Sequences are added late, cancelled and preempted at random; graphs are in use."""
    chance = random.Random(seed)
    engine = make_engine(make_runner(checkpoint, capture=rerun), chance.choice((0, 5, 16)))
    late = requests()
    chance.shuffle(late)
    cancelled: set[str] = set()

    def disturb(engine: Engine, step: int) -> None:
        if late and chance.random() < 0.5:
            engine.add(late.pop())
        victim = str(chance.randrange(4))
        if chance.random() < 0.1 and engine.cancel(victim) is not None:
            cancelled.add(victim)
        if chance.random() < 0.3:
            engine.force_preempt(str(chance.randrange(4)))

    streams = run(engine, [late.pop()], disturb)
    while late:
        streams |= run(engine, [late.pop()], disturb)
    for request_id, stream in streams.items():
        whole = alone[request_id]
        assert stream == (whole[: len(stream)] if request_id in cancelled else whole)
    assert streams.keys() | cancelled == alone.keys()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_stay_so(bits: int) -> None:
    """Kept as integers they are read as the same numbers as when they are made dense."""
    packed = make_runner(TinyCheckpoint(bits=bits))
    assert packed.weights_bytes < make_runner(TinyCheckpoint()).weights_bytes / 1.5
    assert run(make_engine(packed), requests())


def test_host_adjustments_hold() -> None:
    forbidden = dict.fromkeys(range(50), -1000000000.0)
    sampling = SamplingParams(
        temperature=1.0, logit_bias=forbidden, repeat_penalty=1.3, typical_p=0.9, num_logprobs=2
    )
    (request,) = requests(1)
    request = type(request)(
        id="a",
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=8,
        sampling=sampling,
        seed=3,
    )
    (stream,) = run(make_engine(make_runner(TinyCheckpoint())), [request]).values()
    assert len(stream) == 8 and min(stream) >= 50
