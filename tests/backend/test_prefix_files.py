"""Prefix blocks on disk: kept within a budget, found again, and never believed when damaged."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from llmd.backend.runner.prefix_files import HEADER_BYTES, PrefixFiles

BLOCK = 1000
MEANING = b"model, bfloat16, rope 10000"


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes([number % 251]) * BLOCK)


def files(folder: Path, meaning: bytes = MEANING, blocks: int = 10) -> PrefixFiles:
    return PrefixFiles(folder, meaning, blocks * (BLOCK + HEADER_BYTES))


def paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_one_life_saved_the_next_one_reads(tmp_path: Path) -> None:
    first = files(tmp_path)
    assert all(first.save(key(number), block(number)) for number in range(5))
    second = files(tmp_path)
    for number in range(5):
        assert key(number) in second
        assert second.read(key(number), BLOCK) == block(number)
    assert second.read(key(7), BLOCK) is None
    assert second.num_bytes == 5 * (BLOCK + HEADER_BYTES)


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    first = files(tmp_path)
    for number in range(3):
        first.save(key(number), block(number))
        os.utime(paths(tmp_path)[-1], (number, number))
    second = files(tmp_path, blocks=3)
    assert second.read(key(0), BLOCK) is not None  # its file is the newest now
    third = files(tmp_path, blocks=3)
    third.save(key(3), block(3))
    third.save(key(4), block(4))
    assert [number for number in range(5) if key(number) in third] == [0, 3, 4]
    assert len(paths(tmp_path)) == 3


def test_another_meaning_finds_nothing_and_takes_the_place(tmp_path: Path) -> None:
    files(tmp_path).save(key(1), block(1))
    other = files(tmp_path, b"model, float32, rope 10000")
    assert key(1) not in other
    assert paths(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "renamed", "longer"])
def test_a_damaged_file_is_as_good_as_absent(tmp_path: Path, damage: str) -> None:
    files(tmp_path).save(key(1), block(1))
    (path,) = paths(tmp_path)
    raw = bytearray(path.read_bytes())
    wanted = key(1)
    if damage == "cut":
        path.write_bytes(raw[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        raw[-500] ^= 4
        path.write_bytes(raw)
    elif damage == "longer":
        path.write_bytes(raw + b"x")
    else:
        wanted = key(2)
        path.rename(path.with_name(wanted.hex()))
    damaged = files(tmp_path)
    assert damaged.read(wanted, BLOCK) is None
    assert paths(tmp_path) == []
    assert damaged.save(wanted, block(1)), "it can be saved again"
    assert damaged.read(wanted, BLOCK) == block(1)


def test_a_write_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    first = files(tmp_path)
    first.save(key(1), block(1))
    paths(tmp_path)[0].with_name("abc.part").write_bytes(b"half")
    files(tmp_path)
    assert len(paths(tmp_path)) == 1


def test_keys_of_a_second_group_of_layers_are_longer(tmp_path: Path) -> None:
    first = files(tmp_path)
    first.save(key(1), block(1))
    first.save(key(1) + b"\1", block(2))
    second = files(tmp_path)
    assert second.read(key(1), BLOCK) == block(1)
    assert second.read(key(1) + b"\1", BLOCK) == block(2)


def test_nobody_else_may_read_what_was_said(tmp_path: Path) -> None:
    files(tmp_path).save(key(1), block(1))
    (path,) = paths(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_used_holds_nothing_and_fails_nobody(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    none = files(blocked)
    assert not none.save(key(1), block(1))
    assert none.read(key(1), BLOCK) is None


def test_a_block_larger_than_the_budget_is_not_taken(tmp_path: Path) -> None:
    assert not files(tmp_path, blocks=0).save(key(1), block(1))
    assert paths(tmp_path) == []
