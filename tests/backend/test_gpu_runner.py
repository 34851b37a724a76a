"""The GPU runner's logic, which needs no GPU: rows, index vectors, graph sizes, layer maps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmd.backend.engine.batch import Logprobs
from llmd.backend.engine.engine import Engine, EngineRequest
from llmd.backend.engine.scheduler import Scheduler, SchedulerConfig
from llmd.backend.protocol import DevicePart, Load, SamplingParams
from llmd.backend.runner.gpu_graphs import SIZES, StepGraphs, bucket_for, length_for, rerun
from llmd.backend.runner.gpu_inputs import FEED_BACK, Piece, RowState, StepTensors
from llmd.backend.runner.gpu_layer_map import layer_map
from llmd.backend.runner.model_runner import ModelRunner

from .gpu_streams import assert_formed, formed, make_engine, make_runner, requests, run
from .tiny_checkpoint import TinyCheckpoint
from .vocabularies import byte_level

CPU = torch.device("cpu")


def test_inputs_are_gathered_from_rows() -> None:
    state = RowState(max_rows=4, max_blocks=5, block_size=4, device=CPU)
    state.start(2)
    state.extend(2, (9, 7))
    state.start(0)
    state.extend(0, (3,))
    state.feed_back([2], [1], torch.tensor([44, 55]))
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


def test_a_graph_is_as_long_as_its_sequences_ask() -> None:
    assert [length_for(n, 131_072) for n in (1, 2048, 2049, 9000)] == [2048, 2048, 8192, 32_768]
    assert length_for(100_000, 131_072) == 131_072
    assert length_for(10, 512) == 512


def test_graphs_of_two_lengths_give_what_an_eager_step_gives() -> None:
    """Slots and tables of the padding do not count; the tokens of the sequences do."""
    seen: list[tuple[int, int, int]] = []

    def forward(inputs: StepTensors) -> torch.Tensor:
        seen.append((inputs.num_seqs, inputs.block_tables.shape[1], inputs.max_seq_len))
        return inputs.token_ids[:, None].float() + inputs.seq_lens[:, None]

    graphs = StepGraphs(forward, rerun, max_blocks=1024, block_size=16)
    state = RowState(max_rows=8, max_blocks=1024, block_size=16, device=CPU)
    for row, length in enumerate((3000, 10, 11)):
        state.start(row)
        state.extend(row, range(-(-length // 16)))
    three = [Piece(0, 2999, [7], 1), Piece(1, 9, [8], 1), Piece(2, 10, [9], 1)]
    assert graphs.run(state.gather(three)).flatten().tolist() == [3007, 18, 20]  # type: ignore[union-attr]
    assert graphs.run(state.gather(three[1:])).flatten().tolist() == [18, 20]  # type: ignore[union-attr]
    assert graphs.sizes == ((2, 2048), (4, 8192))
    assert {(size, width, length) for size, width, length in seen} == {
        (4, 512, 8192),
        (2, 128, 2048),
    }


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
    assert "StepGraphs [(1, 256), (4, 256)]" in repr(runner)


def test_two_devices_give_the_tokens_of_one(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]]
) -> None:
    """The CPU counts as two: cpu and cpu:0 are different devices to torch."""
    parts = [DevicePart("cpu", 1), DevicePart("cpu:0", 1)]
    assert run(make_engine(make_runner(checkpoint, parts=parts)), requests()) == alone


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_random_comings_and_goings_change_no_stream(
    checkpoint: TinyCheckpoint, alone: dict[str, tuple[int, ...]], seed: int, depth: int
) -> None:
    """Sequences are added late, cancelled and preempted at random, and the pool is small enough to
    preempt by itself; graphs are in use; a step is planned while the last one runs, or not."""
    chance = random.Random(seed)
    runner = make_runner(checkpoint, capture=rerun, num_blocks=chance.choice((5, 9, 40)))
    engine = make_engine(runner, chance.choice((0, 5, 16)), depth)
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


def awkward() -> list[EngineRequest]:
    """Draws that want the host: penalties, biases, early stop ids, typical_p, logprobs, a form."""
    forbidden = dict.fromkeys(range(50), -1000000000.0)
    settings = [
        SamplingParams(temperature=1.0, logit_bias=forbidden, repeat_penalty=1.3, typical_p=0.9),
        SamplingParams(temperature=0.0, repeat_penalty=2.0, repeat_last_n=-1, num_logprobs=2),
        SamplingParams(temperature=1.5, min_tokens=4, frequency_penalty=0.5),
        SamplingParams(temperature=0.7, top_k=5, num_logprobs=0),
    ]
    grammars = [None, None, None, EvenOnly()]
    return [
        replace(request, sampling=sampling, grammar=grammar, max_tokens=8, stop_ids=stop_ids)
        for request, sampling, grammar, stop_ids in zip(
            requests(),
            settings,
            grammars,
            [frozenset[int](), frozenset({90}), frozenset(range(60)), frozenset({3})],
            strict=True,
        )
    ]


class EvenOnly:
    """A form: only even tokens, and never the same twice in a row."""

    def matcher(self) -> EvenOnlyMatcher:
        return EvenOnlyMatcher()


class EvenOnlyMatcher:
    def __init__(self) -> None:
        self.last = -1

    def mask(self, words: NDArray[np.int32]) -> None:
        words[:] = 0x55555555
        if self.last >= 0:
            words[self.last // 32] &= ~np.int32(1 << (self.last % 32))

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id % 2 == 0 and token_id != self.last, "not admitted"
            self.last = token_id


@pytest.mark.parametrize("depth", [1, 2])
def test_draws_that_want_the_host_are_those_of_the_cpu(
    checkpoint: TinyCheckpoint, depth: int
) -> None:
    load = Load(name="tiny", digest="", files=[], dtype="float32", kv_budget_bytes=2**20)
    cpu = ModelRunner(checkpoint, load, lambda share, stage: None)
    config = SchedulerConfig(num_blocks=cpu.num_blocks, block_size=cpu.block_size)
    expected = run(Engine(Scheduler(config), cpu), awkward())
    streams = run(make_engine(make_runner(checkpoint), depth=depth), awkward())
    assert streams == expected
    assert min(streams["2"][:4]) >= 60
    assert min(streams["0"]) >= 50
    assert all(token_id % 2 == 0 for token_id in streams["3"])


def test_logprobs_are_told_with_the_tokens(checkpoint: TinyCheckpoint) -> None:
    engine = make_engine(make_runner(checkpoint))
    for request in awkward():
        engine.add(request)
    told: dict[str, list[Logprobs]] = {}
    while engine.has_work:
        for output in engine.step():
            assert len(output.logprobs) in (0, len(output.token_ids))
            told.setdefault(output.id, []).extend(output.logprobs)
    assert [len(told[id]) for id in "0123"] == [0, len(told["1"]), 0, 8]
    assert all(len(entry.top) == 2 and entry.top[0] >= entry.top[1] for entry in told["1"])
    assert all(entry.top == () and entry.chosen < 0 for entry in told["3"])


def test_unusable_logits_end_their_sequence_alone(checkpoint: TinyCheckpoint) -> None:
    runner = make_runner(checkpoint)
    engine = make_engine(runner)
    good, other = requests(2)
    bad = replace(other, token_ids=(5, 6, 7))  # no block is shared
    for request in (good, bad):
        engine.add(request)
    engine.step()
    # What the second has in the cache turns to NaN; the first has blocks of its own.
    runner._state.gather([Piece(1, 0, [1], 0)])
    block = int(runner._state._tables[1, 0])
    for layer in runner.pages.layers:
        layer.values[block] = float("nan")
    ended: dict[str, str] = {}
    tokens = 0
    while engine.has_work:
        for output in engine.step():
            tokens += len(output.token_ids) if output.id == good.id else 0
            if output.finish_reason:
                ended[output.id] = output.error or output.finish_reason
    assert ended == {"0": "length", "1": "the model's logits are not finite for this sequence"}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_captured", [False, True])
def test_forms_hold_and_are_those_of_the_cpu(depth: int, is_captured: bool) -> None:
    """Real grammars beside free text, in chunks, one of them preempted while it is half done."""
    tokenizer = byte_level()
    checkpoint = TinyCheckpoint(vocab_size=tokenizer.vocab_size)
    load = Load(name="tiny", digest="", files=[], dtype="float32", kv_budget_bytes=2**20)
    cpu = ModelRunner(checkpoint, load, lambda share, stage: None)
    config = SchedulerConfig(num_blocks=cpu.num_blocks, block_size=cpu.block_size)
    expected = run(Engine(Scheduler(config), cpu), formed(tokenizer))

    def preempt(engine: Engine, step: int) -> None:
        if step in (5, 8):
            engine.force_preempt("0")
            engine.force_preempt("1")

    runner = make_runner(checkpoint, capture=rerun if is_captured else None)
    engine = make_engine(runner, prefill_chunk=9, depth=depth)
    streams = run(engine, formed(tokenizer), preempt)
    assert_formed(tokenizer, streams)
    assert streams == expected
    assert engine.stats().preemptions > 0


def test_a_form_that_breaks_ends_its_own_sequence() -> None:
    """The others of the batch go on, and nothing that is no form is said."""

    class Broken:
        def matcher(self) -> Broken:
            return self

        def mask(self, words: NDArray[np.int32]) -> None:
            raise RuntimeError("the grammar has no way on")

        def accept(self, token_ids: Sequence[int]) -> None:
            pass

    free, broken = requests(2)
    engine = make_engine(make_runner(TinyCheckpoint()))
    engine.add(free)
    engine.add(replace(broken, grammar=Broken()))
    said: dict[str, int] = {}
    errors: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            said[output.id] = said.get(output.id, 0) + len(output.token_ids)
            if output.error:
                errors[output.id] = output.error
    assert errors == {"1": "the grammar has no way on"}
    assert said == {"0": free.max_tokens, "1": 0}
