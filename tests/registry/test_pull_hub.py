"""Pulling from a hub that fails in every known way. Real sockets, the hub's own client as judge."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmd.registry.download import Downloader
from llmd.registry.errors import (
    AccessDenied,
    DigestMismatch,
    ModelNotFound,
    NotEnoughSpace,
    SourceUnavailable,
    Unsupported,
)
from llmd.registry.pull import PullProgress, pull
from llmd.registry.settings import PullSettings
from llmd.registry.sources.hub import RepoFile, choose_files, gguf_groups, match_quant
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import Faults, Hub, running_hub

REPO = "hf.co/org/repo"
PART = 128 << 10
WEIGHTS = "model.gguf"


def big_gguf(size: int = 1 << 20) -> bytes:
    """A GGUF whose data is random, so that a byte in the wrong place is noticed."""
    return make.tiny_gguf() + random.Random(5).randbytes(size)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub({WEIGHTS: big_gguf(), "README.md": b"hello"}) as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def settings(hub: Hub, **changes: object) -> PullSettings:
    quick = PullSettings(
        hub_endpoint=hub.endpoint,
        hub_token="hf_secret",
        part_bytes=PART,
        backoff_s=0.001,
        max_backoff_s=0.01,
        stall_s=10.0,
        reserve_bytes=0,
    )
    return replace(quick, **changes)  # type: ignore[arg-type]


def run_pull(
    store: ModelStore, hub: Hub, name: str = REPO, **changes: object
) -> tuple[bytes, list[PullProgress]]:
    """The weights that were stored, and what was reported."""
    seen: list[PullProgress] = []
    manifest = asyncio.run(
        pull(store, name, settings=settings(hub, **changes), on_progress=seen.append)
    )
    (weights,) = manifest.files_of("weights")
    return store.path_of(weights).read_bytes(), seen


def assert_progress_never_falls(seen: list[PullProgress]) -> None:
    by_digest: dict[str, int] = {}
    for line in seen:
        if line.digest is not None and line.completed is not None:
            assert line.completed >= by_digest.get(line.digest, 0)
            by_digest[line.digest] = line.completed
            assert line.total is not None and line.completed <= line.total
    overall = [line.overall_completed for line in seen if line.overall_completed is not None]
    assert overall == sorted(overall)


def test_the_hubs_own_client_accepts_the_fixture(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        "org/repo", endpoint=hub.endpoint, cache_dir=tmp_path / "cache", token=False
    )
    assert (Path(folder) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert (Path(folder) / "README.md").read_bytes() == b"hello"


def test_a_gguf_repository_is_pulled_and_described(store: ModelStore, hub: Hub) -> None:
    content, seen = run_pull(store, hub)
    assert content == hub.files[WEIGHTS]
    (manifest,) = store.list()
    assert manifest.name.display == f"{REPO}:latest"
    assert (manifest.format, manifest.family, manifest.quantization) == ("gguf", "llama", "Q4_0")
    assert manifest.context_length == 2048
    assert manifest.capabilities == ("completion",)
    assert manifest.files[0].digest == hub.sha256(WEIGHTS)
    statuses = [line.status for line in seen]
    assert statuses[0] == "pulling manifest"
    assert statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"] or (
        statuses[-2:] == ["writing manifest", "success"]
    )
    assert f"pulling {hub.sha256(WEIGHTS)[:12]}" in statuses
    assert seen[-1].source is not None and "Hugging Face hub" in seen[-1].source
    assert_progress_never_falls(seen)
    assert list(store.partial.iterdir()) == []
    store.check()


def test_the_token_goes_to_the_hub_and_to_no_other_host(store: ModelStore, hub: Hub) -> None:
    run_pull(store, hub)
    assert {had for kind, had in hub.authorized if kind == "hub"} == {True}
    assert {had for kind, had in hub.authorized if kind == "content"} == {False}


def test_a_safetensors_repository_brings_all_its_files_and_no_others(
    store: ModelStore, tmp_path: Path
) -> None:
    folder = make.write_safetensors_folder(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    noise = {"pytorch_model.bin": b"pickle", "README.md": b"x", "original/model.safetensors": b"x"}
    with running_hub(files | noise) as hub:
        asyncio.run(pull(store, REPO, settings=settings(hub)))
    (manifest,) = store.list()
    assert {file.name for file in manifest.files} == set(files)
    assert manifest.architecture == "LlamaForCausalLM"
    assert manifest.quantization == "BF16"
    assert manifest.parameter_count == 32
    assert manifest.capabilities == ("completion", "tools")
    store.check()


def test_a_second_pull_fetches_no_byte_again(store: ModelStore, hub: Hub) -> None:
    run_pull(store, hub)
    served = hub.bytes_served
    run_pull(store, hub)
    assert hub.bytes_served == served


@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop_after=50_000),
        Faults(ignore_range=True),
        Faults(ignore_range=True, drop_after=600_000, drops=2),
        Faults(busy=3),
        Faults(unavailable=3),
        Faults(stall=2),
        Faults(flip_byte=1),
        Faults(strict_range=True, drop_after=100_000, busy=2, unavailable=1),
    ],
    ids=["drops", "no ranges", "no ranges, drops", "429", "503", "stalls", "flip", "all"],
)
def test_a_pull_survives(store: ModelStore, hub: Hub, faults: Faults) -> None:
    """And fetches nothing twice, unless the server left no choice."""
    busy, unavailable = faults.busy, faults.unavailable
    hub.faults = replace(faults, busy=0, unavailable=0)
    stall_s = 0.3 if faults.stall else 10.0
    metadata_first = settings(hub, stall_s=stall_s)  # the look-up itself is not what is tested here

    async def main() -> list[PullProgress]:
        seen: list[PullProgress] = []

        def on_progress(line: PullProgress) -> None:
            if len(seen) == 1:
                hub.faults.busy, hub.faults.unavailable = busy, unavailable
            seen.append(line)

        await pull(store, REPO, settings=metadata_first, on_progress=on_progress)
        return seen

    seen = asyncio.run(main())
    (manifest,) = store.list()
    assert store.path_of(manifest.files[0]).read_bytes() == hub.files[WEIGHTS]
    assert_progress_never_falls(seen)
    store.check()
    if faults.drop_after and not faults.ignore_range:
        assert hub.bytes_served <= 1.06 * len(hub.files[WEIGHTS])


def test_a_byte_that_is_flipped_every_time_is_a_digest_mismatch(
    store: ModelStore, hub: Hub
) -> None:
    hub.faults.flip_byte = 10**9
    with pytest.raises(DigestMismatch, match=r"digest mismatch, model\.gguf must be downloaded"):
        run_pull(store, hub)
    assert store.list() == []
    assert list(store.blobs.iterdir()) == []
    assert list(store.partial.iterdir()) == []


@pytest.mark.parametrize(
    "faults", [Faults(etag="b" * 64), Faults(wrong_range=True)], ids=["etag", "range"]
)
def test_content_of_another_file_is_never_taken(
    store: ModelStore, hub: Hub, faults: Faults
) -> None:
    hub.faults = faults
    with pytest.raises(SourceUnavailable):
        run_pull(store, hub, max_failures=2)
    assert store.list() == []


def test_a_source_that_gives_out_is_named_and_its_parts_are_kept(
    store: ModelStore, hub: Hub
) -> None:
    hub.faults = Faults(quota=100_000)
    with pytest.raises(SourceUnavailable, match=r"stopped serving model\.gguf"):
        run_pull(store, hub, max_failures=3, stall_s=0.1)
    served = hub.bytes_served
    assert len(list(store.partial.glob("*.data"))) == 1
    hub.faults = Faults()
    content, _ = run_pull(store, hub)
    assert content == hub.files[WEIGHTS]
    assert hub.bytes_served <= len(content) + served


@pytest.mark.parametrize(
    ("status", "code", "error", "text"),
    [
        (401, "GatedRepo", AccessDenied, "accept its terms at"),
        (403, "GatedRepo", AccessDenied, "is gated"),
        (401, "RepoNotFound", ModelNotFound, "or is private"),
        (404, "RepoNotFound", ModelNotFound, "pull model manifest: file does not exist"),
    ],
)
def test_a_refusal_says_what_to_do(
    store: ModelStore, hub: Hub, status: int, code: str, error: type[Exception], text: str
) -> None:
    hub.faults = Faults(deny=status, error_code=code)
    token = None if status == 401 else "hf_secret"
    with pytest.raises(error, match=text):
        run_pull(store, hub, hub_token=token)
    assert store.list() == []


def test_an_unknown_quantization_is_named_with_those_that_are_there(
    store: ModelStore, hub: Hub
) -> None:
    with pytest.raises(ModelNotFound, match="neither a quantization nor a revision 'Q9'; it has m"):
        run_pull(store, hub, REPO + ":Q9")


def test_a_broken_model_from_a_source_is_refused_and_not_stored(store: ModelStore) -> None:
    with running_hub({WEIGHTS: big_gguf()[:1000]}) as hub:
        from llmd.registry.errors import BadModelFile

        with pytest.raises(BadModelFile, match=r"served an unusable model: model\.gguf"):
            run_pull(store, hub)
    assert store.list() == []


def test_a_full_disk_is_named_before_the_first_byte(store: ModelStore, hub: Hub) -> None:
    with pytest.raises(NotEnoughSpace) as caught:
        run_pull(store, hub, reserve_bytes=1 << 60)
    assert caught.value.needed > 1 << 60
    assert 0 < caught.value.free < 1 << 60
    assert hub.bytes_served == 0


def test_a_cancelled_pull_keeps_its_parts_and_goes_on_where_it_was(
    store: ModelStore, hub: Hub
) -> None:
    hub.faults.bytes_per_s = 300_000

    async def main() -> int:
        arrived = asyncio.Event()

        def on_progress(line: PullProgress) -> None:
            if line.digest is not None and (line.completed or 0) > 400_000:
                arrived.set()

        task = asyncio.create_task(
            pull(store, REPO, settings=settings(hub), on_progress=on_progress)
        )
        await asyncio.wait_for(arrived.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return hub.bytes_served

    asyncio.run(main())
    assert store.list() == []
    hub.faults.bytes_per_s = 0
    content, seen = run_pull(store, hub)
    assert content == hub.files[WEIGHTS]
    first = next(line.completed for line in seen if line.digest is not None)
    assert first is not None and first >= 400_000
    assert_progress_never_falls(seen)


def test_a_journal_of_another_content_is_not_continued(store: ModelStore, hub: Hub) -> None:
    stem = store.partial_path(hub.sha256(WEIGHTS))
    size = len(hub.files[WEIGHTS])
    stem.with_name(stem.name + ".data").write_bytes(b"\1" * size)
    journals: tuple[object, ...] = (
        {"size": size, "part_bytes": PART, "validator": "x", "filled": [PART] * 9},
        {"size": size, "part_bytes": PART, "validator": hub.sha256(WEIGHTS), "filled": [-1]},
        [],
    )
    for journal in journals:
        stem.with_name(stem.name + ".json").write_text(json.dumps(journal))
        content, _ = run_pull(store, hub)
        assert content == hub.files[WEIGHTS]
        store.delete(store.list()[0].name)
        stem.with_name(stem.name + ".data").write_bytes(b"\1" * size)


def test_two_pulls_of_one_file_share_one_download_and_one_may_leave(
    store: ModelStore, hub: Hub
) -> None:
    hub.faults.bytes_per_s = 400_000

    async def main() -> None:
        downloader = Downloader(store, settings(hub))
        arrived = asyncio.Event()

        def on_progress(line: PullProgress) -> None:
            if (line.completed or 0) > 200_000:
                arrived.set()

        names = (REPO, REPO + ":model", REPO + ":main")
        tasks = [
            asyncio.create_task(pull(store, name, downloader=downloader, on_progress=on_progress))
            for name in names
        ]
        await asyncio.wait_for(arrived.wait(), 20)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await asyncio.gather(*tasks[1:])
        assert repr(downloader) == "<Downloader 0 running>"

    asyncio.run(main())
    assert len(store.list()) == 2
    assert hub.bytes_served <= 1.02 * len(hub.files[WEIGHTS])
    store.check()


def test_the_bandwidth_cap_holds(store: ModelStore, hub: Hub) -> None:
    import time

    start = time.monotonic()
    run_pull(store, hub, rate_limit=1 << 20)
    assert time.monotonic() - start > 0.6


def test_without_permission_a_private_address_is_refused(store: ModelStore, hub: Hub) -> None:
    from llmd.registry.web import Session

    with (
        pytest.raises(SourceUnavailable, match="an address of this machine"),
        Session(PullSettings()) as session,
    ):
        session.get(hub.endpoint + "/x", {})
    assert hub.requests == []


def repo_file(path: str, size: int = 10) -> RepoFile:
    return RepoFile(path, size, None, hashlib.sha1(path.encode()).hexdigest())


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_0.gguf"], ["m-Q4_K_M.gguf"]),
        (["m.Q5_0.gguf", "m.Q6_K.gguf"], ["m.Q5_0.gguf"]),
        (["a-Q8_0-00002-of-00002.gguf", "a-Q8_0-00001-of-00002.gguf"], None),
        (["m-Q8_0.gguf", "mmproj-F16.gguf"], ["m-Q8_0.gguf"]),
        (["model.safetensors", "m-Q8_0.gguf", "config.json"], ["model.safetensors", "config.json"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
    ],
)
def test_the_files_of_a_repository_are_chosen(paths: list[str], chosen: list[str] | None) -> None:
    found = [file.path for file in choose_files("r", [repo_file(path) for path in paths])]
    assert found == (sorted(paths) if chosen is None else chosen)


def test_a_repository_of_pickles_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="only as pickles"):
        choose_files("r", [repo_file("pytorch_model.bin"), repo_file("config.json")])
    with pytest.raises(Unsupported, match="no weights"):
        choose_files("r", [repo_file("README.md")])


def test_a_quantization_is_a_whole_word_of_the_file_name() -> None:
    groups = gguf_groups([repo_file("m-Q4_K_M.gguf"), repo_file("m-IQ4_K.gguf")])
    assert match_quant(groups, "q4_k_m") == [repo_file("m-Q4_K_M.gguf")]
    assert match_quant(groups, "Q4_K") is None
    assert match_quant(groups, "m-iq4_k.GGUF") == [repo_file("m-IQ4_K.gguf")]
