"""A pull whose process is killed at random points, and how fast a pull is when left alone."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from llmd.registry.pull import pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Faults, Hub, running_hub

PULLER = """
import asyncio, sys
from pathlib import Path
from llmd.registry.pull import PullSettings, pull
from llmd.registry.store import ModelStore

def show(line):
    if line.digest:
        gap_s = sorted(gaps)[int(0.99 * len(gaps))]
    print(json.dumps({"curl_s": curl_s, "pull_s": pull_s, "gap_s": gap_s, "rss": most - before}))
    assert curl_s / pull_s >= 0.6
    assert gap_s < 0.05
    assert most - before < 64 << 20


def test_a_full_disk_in_the_middle_is_named_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    from llmd.registry.errors import NotEnoughSpace

    content = make.tiny_gguf() + random.Random(1).randbytes(1 << 20)
    store = ModelStore(tmp_path / "m")
    real = os.pwrite
    written = 0

    def write(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 500_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    with running_hub({"m.gguf": content}) as hub:
        settings = PullSettings(hub_endpoint=hub.endpoint, part_bytes=64 << 10, reserve_bytes=0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            with pytest.raises(NotEnoughSpace, match="not enough disk space in"):
                asyncio.run(pull(store, "hf.co/o/r", settings=settings))
        before = hub.bytes_served
        manifest = asyncio.run(pull(store, "hf.co/o/r", settings=replace(settings)))
        assert hub.bytes_served - before < 0.8 * len(content)
    assert store.path_of(manifest.files[0]).read_bytes() == content
