"""What a start measures is kept, used by the next one, and not believed on another machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llmd.backend.kernels import packed
from llmd.backend.kernels.select import load
from llmd.backend.kernels.tiles import FEW_ROWS, MANY_ROWS, Tuned, candidates, fastest
from llmd.backend.runner.gpu_profile import Profile, ProfileFile, meaning_of
from llmd.backend.runner.gpu_tuning import FEW, MANY, tune, widest_step
from llmd.backend.runner.gpu_weights import Projection

from .gpu_streams import TORCH, make_engine, make_runner, requests, run
from .tiny_checkpoint import TinyCheckpoint

MEANING = {"model": "abc", "driver": "580.1"}


def test_a_profile_is_read_back(tmp_path: Path) -> None:
    profile = Profile(12_345, {"64x64, 4 bits, 1 rows": 2})
    ProfileFile(tmp_path / "new", MEANING).write(profile)
    assert ProfileFile(tmp_path / "new", dict(reversed(MEANING.items()))).read() == profile
    assert not list((tmp_path / "new").glob("tmp*")), "a half-written file stayed"


@pytest.mark.parametrize("change", [{"driver": "581.0"}, {"model": "abd"}, {"card": "another"}])
def test_another_machine_or_model_measures_anew(tmp_path: Path, change: dict[str, str]) -> None:
    ProfileFile(tmp_path, MEANING).write(Profile(1))
    assert ProfileFile(tmp_path, MEANING | change).read() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"tiles": 3, "working_bytes": 1}', "null"])
def test_a_damaged_profile_is_not_believed(tmp_path: Path, content: str) -> None:
    file = ProfileFile(tmp_path, MEANING)
    file.write(Profile(1))
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert file.read() is None
    file.write(Profile(2))
    assert file.read() == Profile(2)


def test_nowhere_to_keep_it_is_no_failure(tmp_path: Path) -> None:
    ProfileFile(None, MEANING).write(Profile(1))
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    ProfileFile(blocked, MEANING).write(Profile(1))
    assert ProfileFile(blocked, MEANING).read() is None


def test_the_meaning_names_what_a_measurement_depends_on() -> None:
    cpu = torch.device("cpu")
    meaning = meaning_of([cpu, cpu], "digest", torch.bfloat16, 8192)
    assert {"model", "dtype", "batch_tokens", "layers", "torch", "triton", "driver"} <= set(meaning)
    assert meaning["layers"] == "cpu,cpu"


def products() -> list[Projection]:
    """Two kinds of weights, the first one twice."""
    kernels = load(TORCH)
    made = []
    for outputs in (32, 32, 64):
        q = torch.zeros(outputs, 64, dtype=torch.uint8)
        weight = packed.pack(q, torch.ones(outputs, 2), None, bits=4, group=32)
        made.append(Projection(kernels, weight, None))
    return [*made, Projection(kernels, torch.zeros(3, 64), None)]


def test_each_kind_of_weight_is_measured_once_and_all_get_its_tile() -> None:
    made = products()
    asked: list[tuple[int, Tuned]] = []

    def seconds(run: Callable[[], object]) -> float:
        run()
        weight = made[0].weight
        assert isinstance(weight, packed.PackedWeight)
        asked.append((len(asked), weight.tuned))
        return {0: 1.0, 1: 0.99, 2: 0.5, 3: 0.7}[weight.tuned.few]

    found = tune(made[:2], torch.bfloat16, {}, seconds)
    assert len(asked) == len(FEW_ROWS) + len(MANY_ROWS)
    assert set(found.values()) == {2}
    for product in made[:2]:
        assert isinstance(product.weight, packed.PackedWeight)
        assert product.weight.tuned == Tuned(2, 2)
        assert product.weight.tuned.tile(FEW) == FEW_ROWS[2]
        assert product.weight.tuned.tile(MANY) == MANY_ROWS[2]


def test_what_is_known_is_not_measured_again() -> None:
    made = products()
    found = tune(made, torch.bfloat16, {}, lambda run: 1.0)
    assert len(found) == 4 and set(found.values()) == {0}

    def never(run: Callable[[], object]) -> float:
        raise AssertionError("measured again")

    assert tune(products(), torch.bfloat16, found, never) == found


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert fastest(3, [1.0, 0.98, 1.1].__getitem__) == 0
    assert fastest(3, [1.0, 0.98, 0.9].__getitem__) == 2


def test_a_tile_that_is_gone_is_the_first() -> None:
    assert Tuned(99, 99).tile(1) == candidates(1)[0]


def test_the_widest_step_leaves_the_runner_as_it_was() -> None:
    runner = make_runner(TinyCheckpoint())
    widest_step(runner, 200)
    fresh = make_runner(TinyCheckpoint())
    assert run(make_engine(runner), requests()) == run(make_engine(fresh), requests())
