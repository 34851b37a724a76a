"""The models folder: what is visible, what is shared, what is removed, what survives a crash."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from llmd.registry.errors import (
    BadModelFile,
    DigestMismatch,
    ModelNotFound,
    StoreDamaged,
    Unsupported,
)
from llmd.registry.manifest import Manifest, ManifestFile, is_safe_file_name, show_count
from llmd.registry.names import ModelName
from llmd.registry.store import GRACE_S, ModelStore, hash_file

from .model_makers import stored_model

LATER = 4e9  # seconds since 1970; far past any grace period


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_a_model_comes_back_as_it_was_put(store: ModelStore) -> None:
    put = stored_model(store, "Me/Mine:Q4")
    rich = store.put(
        replace(
            put, template="{{ x }}", system="Be ü.", params={"stop": ["</s>"]}, messages=({"a": 1},)
        )
    )
    assert store.get(ModelName.parse("me/mine:q4")) == rich
    assert store.list() == [rich]
    assert rich.parameter_size == "1.7B"
    assert ModelStore(store.root).list() == [rich]
    store.check()


def test_a_name_keeps_its_first_spelling(store: ModelStore) -> None:
    stored_model(store, "Llama3")
    assert stored_model(store, "LLAMA3").name.display == "Llama3:latest"
    assert len(store.list()) == 1


def test_the_models_id_depends_on_content_and_settings_alone(store: ModelStore) -> None:
    one = stored_model(store, "one")
    two = replace(one.renamed(ModelName.parse("two")), modified=datetime.now(UTC), source="x")
    assert two.digest == one.digest
    assert replace(one, system="Be brief.").digest != one.digest
    assert stored_model(store, "three", b"other").digest != one.digest


def test_an_unknown_model_is_named(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="model 'nope:latest' not found"):
        store.get(ModelName.parse("nope"))
    with pytest.raises(ModelNotFound):
        store.delete(ModelName.parse("nope"))


def test_a_shared_blob_stays_until_the_last_model_goes(store: ModelStore) -> None:
    digest = stored_model(store, "a").files[0].digest
    store.copy(ModelName.parse("a"), ModelName.parse("team/b:x"))
    store.delete(ModelName.parse("a"))
    assert store.has_blob(digest)
    store.check()
    store.delete(ModelName.parse("team/b:x"))
    assert not store.has_blob(digest)
    assert list(store.manifests.iterdir()) == []


def test_replacing_a_model_removes_what_only_the_old_one_used(store: ModelStore) -> None:
    old = stored_model(store, "a", b"old").files[0].digest
    new = stored_model(store, "a", b"new").files[0].digest
    assert not store.has_blob(old)
    assert store.has_blob(new)


def test_a_pinned_blob_outlives_the_deletion_of_its_model(store: ModelStore) -> None:
    digest = stored_model(store, "a").files[0].digest
    with store.pinned() as pin:
        pin(digest)
        store.delete(ModelName.parse("a"))
        assert store.has_blob(digest)
        assert store.collect(now=LATER).paths == ()
    assert len(store.collect(now=LATER).paths) == 1


def test_a_model_without_its_files_is_not_put(store: ModelStore) -> None:
    manifest = stored_model(store, "a")
    lost = ManifestFile("x.gguf", "weights", "0" * 64, 5)
    with pytest.raises(BadModelFile, match=r"x\.gguf is gone"):
        store.put(replace(manifest, files=(lost,), name=ModelName.parse("b")))
    assert [found.name.model for found in store.list()] == ["a"]


def test_content_that_is_not_the_promised_one_is_deleted(store: ModelStore) -> None:
    with store.temp_folder() as folder:
        path = folder / "weights"
        path.write_bytes(b"flipped")
        with pytest.raises(DigestMismatch, match="digest mismatch, weights must be downloaded"):
            store.add_blob(path, "0" * 64)
        assert not path.exists()
    assert list(store.blobs.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink"])
def test_a_crash_while_a_model_is_replaced_leaves_the_old_or_the_new(
    store: ModelStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th system call of the replacement fails, for every n."""
    old = stored_model(store, "a", b"old")

    class Crash(BaseException):
        pass

    for fatal in range(1, 20):
        calls = 0

        def crash(*args: object, real: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == fatal:  # noqa: B023 - called within this round only
                raise Crash
            assert callable(real)
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            owner: object = os if call == "fsync" else Path
            real = getattr(owner, call)
            patch.setattr(owner, call, lambda *a, _r=real, **k: crash(*a, real=_r, **k))
            with contextlib.suppress(Crash):
                stored_model(store, "a", b"new")
            finished = calls < fatal
        fresh = ModelStore(store.root)
        fresh.check()
        (found,) = fresh.list()
        assert fresh.path_of(found.files[0]).read_bytes() in (b"old", b"new")
        fresh.collect(now=LATER)
        fresh.check()
        if finished:
            break
        stored_model(fresh, "a", b"old")
    assert finished
    assert found.digest != old.digest


def test_collection_removes_only_what_nobody_needs(store: ModelStore) -> None:
    stored_model(store, "a")
    orphan = store.blob_path(store.add_bytes(b"orphan"))
    old, young = store.partial / "old", store.partial / "young"
    for path, age in ((old, 8 * 86400), (young, 86400)):
        path.write_bytes(b"half")
        os.utime(path, (LATER - age, LATER - age))
    (store.temp / "left").mkdir()
    (store.temp / "left" / "x").write_bytes(b"x")
    planned = store.collect(now=LATER, dry_run=True)
    assert orphan.exists()
    assert set(store.collect(now=LATER).paths) == set(planned.paths)
    assert set(planned.paths) == {orphan, old, store.temp / "left"}
    assert young.exists()
    assert not orphan.exists()
    store.check()


def test_a_young_orphan_is_left_to_the_pull_that_made_it(store: ModelStore) -> None:
    orphan = store.blob_path(store.add_bytes(b"orphan"))
    made = orphan.stat().st_mtime
    assert store.collect(now=made + GRACE_S - 10).paths == ()


def test_nothing_is_collected_while_a_manifest_cannot_be_read(store: ModelStore) -> None:
    stored_model(store, "good")
    stored_model(store, "bad", b"precious")
    orphan = store.blob_path(store.add_bytes(b"orphan"))
    broken = next(store.manifests.glob("*/*/bad/*.json"))
    broken.write_text('{"schema": 1, "name": "')
    with pytest.raises(StoreDamaged, match="bad/latest"):
        store.collect(now=LATER)
    store.delete(ModelName.parse("good"))
    assert orphan.exists()
    assert len(list(store.blobs.iterdir())) == 3
    assert store.list() == []
    stored_model(store, "bad", b"precious")
    store.check()


@pytest.mark.parametrize(
    "damage",
    [
        {"files": [{"name": "../../x", "role": "weights", "digest": "0" * 64, "size": 1}]},
        {"schema": 99},
        {"name": "../x"},
        {"files": [{"name": "x", "role": "weights", "digest": "../x", "size": 1}]},
    ],
)
def test_a_hostile_manifest_is_refused(store: ModelStore, damage: dict[str, object]) -> None:
    text = json.dumps(json.loads(stored_model(store, "a").to_json()) | damage)
    with pytest.raises(StoreDamaged):
        Manifest.from_json(text, "here")


def test_a_changed_external_file_is_noticed(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"mine")
    found = path.stat()
    file = ManifestFile(
        "mine.gguf", "weights", hash_file(path), 4, "external", str(path), found.st_mtime_ns
    )
    assert store.path_of(file) == path
    os.utime(path, ns=(0, found.st_mtime_ns + 1))
    with pytest.raises(BadModelFile, match="was changed after it was taken in"):
        store.path_of(file)
    path.write_bytes(b"longer than before")
    with pytest.raises(BadModelFile, match="has 18 bytes, 4 were expected"):
        store.path_of(file)
    path.unlink()
    with pytest.raises(BadModelFile, match="is gone"):
        store.path_of(file)


def test_deleting_a_model_leaves_external_and_linked_files_where_they_are(
    store: ModelStore, tmp_path: Path
) -> None:
    manifest = stored_model(store, "a")
    outside, linked = tmp_path / "outside", tmp_path / "linked"
    outside.write_bytes(b"outside")
    linked.write_bytes(b"linked")
    assert store.share_blob(linked, hash_file(linked)) in ("link", "blob")
    files = (
        ManifestFile("o", "weights", hash_file(outside), 7, "external", str(outside)),
        ManifestFile("l", "other", hash_file(linked), 6, "link"),
    )
    store.put(replace(manifest, files=files))
    store.check()
    store.delete(manifest.name)
    assert outside.read_bytes() == b"outside"
    assert linked.read_bytes() == b"linked"
    assert list(store.blobs.iterdir()) == []


def test_a_model_whose_manifest_is_damaged_is_told_and_can_be_removed(store: ModelStore) -> None:
    stored_model(store, "good")
    stored_model(store, "bad", b"other")
    path = next(store.manifests.rglob("bad/latest.json"))
    path.write_text("{")
    assert [str(path) in problem for problem in store.damaged()] == [True]
    assert store.delete(ModelName.parse("bad")) is None
    assert store.damaged() == ()
    assert [model.name.display for model in store.list()] == ["good:latest"]
    store.check()


def test_verify_names_the_damaged_file(store: ModelStore) -> None:
    manifest = stored_model(store, "a", b"weights")
    assert store.verify(manifest) == ()
    path = store.path_of(manifest.files[0])
    path.chmod(0o644)
    path.write_bytes(b"weightz")
    (problem,) = store.verify(manifest)
    assert problem.startswith("model.gguf is damaged")


def test_a_folder_of_a_newer_llmd_is_left_alone(store: ModelStore) -> None:
    (store.root / "version").write_text('{"layout": 2}')
    with pytest.raises(Unsupported, match="layout 2"):
        ModelStore(store.root)


def test_only_clean_relative_paths_are_file_names() -> None:
    good = ["a", "a/b.json", "1_Pooling/config.json", "..a"]
    bad = ["", "/a", "a/../b", "..", "a//b", "a\\b", "C:x", "a\0", "./a", "x" * 501, "a/"]
    assert [name for name in good if not is_safe_file_name(name)] == []
    assert [name for name in bad if is_safe_file_name(name)] == []


def test_counts_are_shown_as_the_field_writes_them() -> None:
    counts = [0, 999, 22_700_000, 134_515_008, 1_710_000_000, 8_030_000_000]
    assert [show_count(count) for count in counts] == ["0", "999", "23M", "135M", "1.7B", "8.0B"]
