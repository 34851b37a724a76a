"""A disk that is really full: a small tmpfs, where the system lets us mount one."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from llmd.registry.create import BlobUpload, CreateRequest, create
from llmd.registry.errors import DiskRefuses, NotEnoughSpace
from llmd.registry.names import ModelName
from llmd.registry.pull import PullProgress, pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Faults, Hub, running_hub

DISK_BYTES = 16 << 20
CONTENT = make.tiny_gguf() + random.Random(7).randbytes(9 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted folder of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub({"m.gguf": CONTENT}, Faults(bytes_per_s=2_000_000)) as running:
        yield running


def settings_for(hub: Hub) -> PullSettings:
    return PullSettings(
        hub_endpoint=hub.endpoint, give_up_s=60, reserve_bytes=0, part_bytes=1 << 20
    )


def test_a_disk_that_is_too_small_is_told_before_the_first_byte(disk: Path, hub: Hub) -> None:
    (disk / "other").write_bytes(bytes(8 << 20))
    with pytest.raises(NotEnoughSpace) as caught:
        asyncio.run(pull(ModelStore(disk / "m"), "hf.co/o/r", settings=settings_for(hub)))
    assert caught.value.needed == len(CONTENT)
    assert 0 < caught.value.free < 9 << 20
    assert "9.4 MB needed, 8." in str(caught.value)
    assert hub.bytes_served == 0


def test_a_disk_that_fills_up_keeps_what_came_and_goes_on_when_there_is_room(
    disk: Path, hub: Hub
) -> None:
    store, other = ModelStore(disk / "m"), disk / "other"

    def fill_up(line: PullProgress) -> None:
        if (line.completed or 0) > 1 << 20 and not other.exists():
            left = os.statvfs(disk)
            with suppress(OSError), other.open("wb") as file:  # the pull takes room meanwhile
                file.write(bytes(max(0, left.f_bavail * left.f_frsize - (2 << 20))))

    with pytest.raises(NotEnoughSpace, match=r"MB needed, .* free") as caught:
        asyncio.run(pull(store, "hf.co/o/r", settings=settings_for(hub), on_progress=fill_up))
    assert caught.value.free < 3 << 20
    assert store.list() == []
    served = hub.bytes_served
    other.unlink()
    hub.faults.bytes_per_s = 0
    manifest = asyncio.run(pull(store, "hf.co/o/r", settings=settings_for(hub)))
    assert store.path_of(manifest.files[0]).read_bytes() == CONTENT
    assert hub.bytes_served - served < len(CONTENT) - (1 << 20)
    store.check()


def test_an_upload_or_a_copy_that_does_not_fit_leaves_nothing(disk: Path) -> None:
    store = ModelStore(disk / "m")
    name = ModelName.parse("mine")
    made = create(store, CreateRequest(name, files={"m.gguf": upload(store, make.tiny_gguf())}))
    with (disk / "other").open("wb") as file:
        left = os.statvfs(disk)
        file.write(bytes(left.f_bavail * left.f_frsize))
    with pytest.raises(NotEnoughSpace, match="not enough disk space in"):
        upload(store, random.Random(1).randbytes(1 << 20))
    with pytest.raises(NotEnoughSpace):
        create(store, CreateRequest(ModelName.parse("other"), "mine", system="x" * 5000))
    assert store.list() == [made]
    assert list(store.temp.iterdir()) == []
    (disk / "other").unlink()
    store.check()


def upload(store: ModelStore, content: bytes) -> str:
    import hashlib

    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with BlobUpload(store, digest) as blob:
        blob.write(content)
        blob.finish()
    return digest


def test_a_disk_that_may_not_be_written_is_told_in_one_sentence(disk: Path, hub: Hub) -> None:
    store = ModelStore(disk / "m")
    hub.faults.bytes_per_s = 0
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(DiskRefuses, match="Read-only file system"):
        asyncio.run(pull(store, "hf.co/o/r", settings=replace(settings_for(hub), max_failures=0)))
