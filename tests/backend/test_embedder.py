"""Texts to vectors: slices, order, cutting, cancelling; all-MiniLM against transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from llmd.backend.embedder import MAX_BATCH_TOKENS, Embedder, NoEmbedder
from llmd.backend.embedding_model import load_embedder
from llmd.backend.models.config import BadModel, UnsupportedModel
from llmd.backend.models.container import open_container
from llmd.backend.prompt import RequestRefused
from llmd.backend.protocol import Embed, Embedded, Failed, Load, ModelFile
from llmd.backend.text.tokenizer import load_tokenizer

from .. import model_files


class Letters:
    """A token for each character, nothing around a text."""

    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        return list(map(ord, text))


class SumNetwork:
    """One state for a text: the sum of its ids and its length. `layers` slices a batch takes."""

    def __init__(self, layers: int = 3) -> None:
        self.batches: list[int] = []  # tokens of each
        self._layers = layers

    def run(self, texts: Sequence[Sequence[int]]) -> Generator[None, None, list[Tensor]]:
        self.batches.append(sum(map(len, texts)))
        for _ in range(self._layers):
            yield
        return [torch.tensor([[float(sum(ids)), float(len(ids))]]) for ids in texts]


def first_state(states: Tensor, dimensions: int) -> Tensor:
    return torch.nn.functional.normalize(states[0], dim=0)


def embedder(network: SumNetwork, clock: Callable[[], float] = lambda: 0.0) -> Embedder:
    return Embedder(network, first_state, Letters(), 2000, clock)


def drained(embedder: Embedder) -> list[Embedded | Failed]:
    done: list[Embedded | Failed] = []
    while embedder.has_work:
        done += embedder.step()
    return done


def test_texts_of_all_jobs_share_batches_and_come_back_in_order() -> None:
    network = SumNetwork()
    subject = embedder(network)
    texts = [["a" * n for n in range(1, 40)], ["b"], []]
    for number, each in enumerate(texts):
        subject.add(subject.prepare(Embed(str(number), each)))
    answers = {event.id: event for event in drained(subject)}
    assert list(answers) == ["2", "0", "1"]  # the empty one needs no batch
    for number, each in enumerate(texts):
        found = answers[str(number)]
        assert isinstance(found, Embedded)
        assert [round(v[0] / v[1]) for v in found.vectors] == [ord(text[0]) for text in each]
        assert found.num_prompt_tokens == sum(map(len, each))
    assert network.batches == [sum(range(1, 40)) + 1]


def test_a_batch_holds_so_many_tokens_and_a_longer_text_goes_alone() -> None:
    network = SumNetwork()
    subject = embedder(network)
    lengths = [400, 400, 400, 1500, 10]
    subject.add(subject.prepare(Embed("x", ["a" * length for length in lengths])))
    assert isinstance(drained(subject)[0], Embedded)
    assert network.batches == [800, 400, 1500, 10]
    assert MAX_BATCH_TOKENS == 1024


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    subject = embedder(SumNetwork())
    subject.add(subject.prepare(Embed("large", ["abcdefgh" * 10] * 100)))
    subject.add(subject.prepare(Embed("small", ["ab", "c"])))
    assert [event.id for event in subject.step()] == ["small"]
    assert [event.id for event in drained(subject)] == ["large"]


def test_a_step_ends_between_two_layers_when_its_time_is_over() -> None:
    ticks = itertools.count()
    subject = embedder(SumNetwork(layers=5), lambda: float(next(ticks)))
    subject.add(subject.prepare(Embed("x", ["abc"])))
    steps = [subject.step() for _ in range(6)]
    assert [len(events) for events in steps] == [0, 0, 0, 0, 0, 1]
    assert not subject.has_work


def test_a_cancelled_job_is_forgotten_and_the_others_go_on() -> None:
    ticks = itertools.count()
    subject = embedder(SumNetwork(), lambda: float(next(ticks)))
    for id in ("x", "y"):
        subject.add(subject.prepare(Embed(id, ["abc", "de"])))
    assert subject.step() == []  # a layer took a second, and so the step is over
    assert subject.cancel("x")
    assert not subject.cancel("x")
    assert [event.id for event in drained(subject)] == ["y"]


def test_a_text_that_is_too_long_is_cut_or_refused_by_its_index() -> None:
    subject = embedder(SumNetwork())
    cut = subject.prepare(Embed("x", ["ab" * 3000, "c"]))
    assert [len(ids) for ids in cut.texts] == [2000, 1]
    narrow = subject.prepare(Embed("x", ["abcdef"], num_ctx=4))
    assert len(narrow.texts[0]) == 4
    with pytest.raises(RequestRefused, match=r"input 1 has 2001 tokens, 2000 fit") as refused:
        subject.prepare(Embed("x", ["a", "b" * 2001], truncate=False))
    assert refused.value.code == "too_long"
    with pytest.raises(RequestRefused, match="input 1 has no token"):
        subject.prepare(Embed("x", ["a", ""]))


def test_a_vector_without_numbers_is_named_by_its_index() -> None:
    def poisoned(states: Tensor, dimensions: int) -> Tensor:
        return torch.tensor([math.nan, 1.0]) if states[0, 1] == 3 else first_state(states, 0)

    subject = Embedder(SumNetwork(), poisoned, Letters(), 100)
    subject.add(subject.prepare(Embed("x", ["a", "bb", "ccc"])))
    (failed,) = drained(subject)
    assert isinstance(failed, Failed)
    assert failed.message == "embedding contains NaN or Inf values (input 2)"


def test_a_network_that_fails_ends_the_jobs_of_its_batch_alone() -> None:
    class Broken(SumNetwork):
        def run(self, texts: Sequence[Sequence[int]]) -> Generator[None, None, list[Tensor]]:
            if len(texts[0]) > MAX_BATCH_TOKENS:
                raise MemoryError("no room")
            return super().run(texts)

    subject = embedder(Broken())
    for id, length in (("x", 1500), ("y", 3)):
        subject.add(subject.prepare(Embed(id, ["a" * length])))
    failed, answered = drained(subject)
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code, failed.message) == ("x", "internal", "MemoryError: no room")
    assert isinstance(answered, Embedded)
    assert answered.id == "y"


def test_a_model_that_makes_text_refuses() -> None:
    with pytest.raises(RequestRefused, match="smollm2 does not support embeddings"):
        NoEmbedder("smollm2").prepare(Embed("x", ["a"]))


# ------------------------------------------------------------------- the real all-MiniLM


@pytest.fixture(scope="module")
def minilm() -> Path:
    return model_files.all_minilm()


def files_of(folder: Path) -> list[ModelFile]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [
        ModelFile(name, "weights" if name == "model.safetensors" else "other", str(folder / name))
        for name in names
    ]


def real_embedder(files: list[ModelFile]) -> Embedder:
    load = Load("all-minilm", "digest", files, num_threads=1)
    tokenizer = load_tokenizer(files)
    found, ready = load_embedder(load, open_container(files), tokenizer, lambda share, stage: None)
    assert ready.capabilities == ["embedding"]
    assert (ready.context_length, ready.trained_context_length) == (256, 512)
    return found


def vectors_of(embedder: Embedder, request: Embed) -> Tensor:
    embedder.add(embedder.prepare(request))
    (answer,) = drained(embedder)
    assert isinstance(answer, Embedded)
    return torch.tensor(answer.vectors)


WORDS = (
    "the old harbour Schiffe naïve café 東京 данные [SEP] 42 3.14 hello, world! don't "
    "UPPER case emoji 🦜 longword" + "s" * 120 + " co-operate tab\there été zażółć"
).split(" ")


def sentences(count: int) -> list[str]:
    picked = torch.Generator().manual_seed(7)
    lengths = torch.randint(1, 60, (count,), generator=picked).tolist()
    return [
        " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=picked).tolist())
        for n in lengths
    ]


@pytest.mark.real_model
def test_vectors_of_200_texts_equal_those_of_transformers(minilm: Path) -> None:
    subject, texts = real_embedder(files_of(minilm)), [*sentences(199), ""]
    found = vectors_of(subject, Embed("x", texts))
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm)
    for text, vector in zip(texts, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            states = model.eval()(**inputs).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
        assert torch.dot(vector, wanted) >= 0.9999, text
        assert abs(vector.norm() - 1) < 1e-5
    alone = [vectors_of(subject, Embed("y", [text]))[0] for text in texts[:40]]
    assert torch.equal(torch.stack(alone), found[:40])


@pytest.mark.real_model
def test_fewer_dimensions_are_the_first_ones_at_length_one(minilm: Path) -> None:
    subject = real_embedder(files_of(minilm))
    whole = vectors_of(subject, Embed("x", ["hello"]))[0]
    short = vectors_of(subject, Embed("x", ["hello"], dimensions=64))[0]
    assert torch.allclose(short, torch.nn.functional.normalize(whole[:64], dim=0), atol=1e-6)
    assert torch.equal(vectors_of(subject, Embed("x", ["hello"], dimensions=9999))[0], whole)


@pytest.mark.real_model
def test_how_states_are_pooled_is_read_from_the_folder(minilm: Path, tmp_path: Path) -> None:
    def with_file(name: str, text: str) -> Embedder:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        kept = [file for file in files_of(minilm) if file.name != name]
        return real_embedder([*kept, ModelFile(name, "other", str(tmp_path / name))])

    mean = vectors_of(real_embedder(files_of(minilm)), Embed("x", ["hello there"]))[0]
    cls = with_file("1_Pooling/config.json", '{"pooling_mode_cls_token": true}')
    found = vectors_of(cls, Embed("x", ["hello there"]))[0]
    assert torch.dot(mean, found) < 0.99
    with pytest.raises(UnsupportedModel, match="pooling_mode_max_tokens is not supported"):
        with_file("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}')
    with pytest.raises(UnsupportedModel, match="names LSTM, which is not supported"):
        with_file("modules.json", '[{"type": "sentence_transformers.models.LSTM", "path": "1"}]')
    with pytest.raises(BadModel, match=r"2_Dense/model\.safetensors is not among"):
        with_file("modules.json", '[{"type": "x.models.Dense", "path": "2_Dense"}]')
