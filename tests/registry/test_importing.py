"""Models of other tools are taken over without a copy, and nothing of theirs is touched."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from llmd.registry.errors import BadModelFile, ModelNotFound, Unsupported
from llmd.registry.importing import discover, take_over
from llmd.registry.names import ModelName
from llmd.registry.places import default_places
from llmd.registry.pull import pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import running_hub
from .ollama_fixture import GO_TEMPLATE, usual_layers, write_store

BIG = make.tiny_gguf() + b"\0" * (4 << 20)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def write_hub_cache(cache: Path, files: dict[str, bytes], owner_repo: str = "org--repo.v1") -> Path:
    """As huggingface_hub 2 lays it out: snapshot -> blobs/<etag> -> shared blobs."""
    repo = cache / f"models--{owner_repo}"
    commit = "c" * 40
    snapshot = repo / "snapshots" / commit
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        shared = cache / "blobs" / digest[:2] / f"xet-{digest[:20]}"
        blob = repo / "blobs" / digest
        pointer = snapshot / name
        for path in (shared, blob, pointer):
            path.parent.mkdir(parents=True, exist_ok=True)
        shared.write_bytes(content)
        blob.symlink_to(os.path.relpath(shared, blob.parent))
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / ("d" * 40)).mkdir()  # a newer one, which main does not point to
    return cache


def tree_of(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file with its size, time and mode."""
    return {
        str(path.relative_to(root)): (found.st_size, found.st_mtime_ns, found.st_mode)
        for path in sorted(root.rglob("*"))
        if (found := path.lstat()) and not path.is_dir()
    }


def disk_use(*roots: Path) -> int:
    """Bytes on the disk, each inode once."""
    inodes = {}
    for root in roots:
        for path in root.rglob("*"):
            found = path.lstat()
            inodes[found.st_ino] = found.st_blocks * 512
    return sum(inodes.values())


@pytest.mark.parametrize("kind", ["ollama", "hub", "lmstudio", "folder"])
def test_a_model_of_another_tool_is_taken_over_with_no_copy_and_nothing_is_touched(
    store: ModelStore, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "theirs"
    match kind:
        case "ollama":
            write_store(place, [("model", BIG), *usual_layers()[1:]])
            name = "tiny:1b"
        case "hub":
            write_hub_cache(place, {"m-Q4_0.gguf": BIG, "README.md": b"x"})
            name = "hf.co/org/repo.v1:Q4_0"
        case "lmstudio":
            (place / "The.Pub" / "Repo-GGUF").mkdir(parents=True)
            (place / "The.Pub" / "Repo-GGUF" / "m-Q4_0.gguf").write_bytes(BIG)
            name = "The-Pub/Repo-GGUF:latest"
        case _:
            place.mkdir()
            (place / "m.gguf").write_bytes(BIG)
            name = "theirs:latest"
    before, used = tree_of(place), disk_use(tmp_path)
    (found,) = discover(place)
    manifest = take_over(store, found)
    assert manifest.name.display == name
    assert store.path_of(manifest.files_of("weights")[0]).read_bytes() == BIG
    assert disk_use(tmp_path) - used < 0.01 * len(BIG)
    store.check()
    assert store.verify(manifest) == ()
    store.delete(manifest.name)
    store.collect(now=4e9)
    assert tree_of(place) == before
    assert list(store.blobs.iterdir()) == []


def test_an_ollama_models_settings_come_along(store: ModelStore, tmp_path: Path) -> None:
    write_store(tmp_path / "o", usual_layers())
    (found,) = discover(tmp_path / "o")
    manifest = take_over(store, found, ModelName.parse("mine"))
    assert manifest.name.display == "mine:latest"
    assert manifest.go_template == GO_TEMPLATE
    assert manifest.system == "You are tiny."
    assert manifest.params["stop"] == ["</s>"]
    assert manifest.license == "Licence one\n\nLicence two"


def test_a_model_that_cannot_run_is_listed_with_its_reason(
    store: ModelStore, tmp_path: Path
) -> None:
    root = write_store(tmp_path / "o", usual_layers())
    write_store(root, [("tensor", b"x")], "tensors/latest")
    write_store(root, [("model", b"gone")], "gone/latest")
    next((root / "blobs").glob(f"*{hashlib.sha256(b'gone').hexdigest()}")).unlink()
    (root / "manifests" / "registry.ollama.ai" / "library" / "bad").mkdir()
    (root / "manifests" / "registry.ollama.ai" / "library" / "bad" / "x").write_bytes(b"{")
    problems = {found.name.model: found.problem for found in discover(root)}
    assert problems["tiny"] == ""
    assert "one blob per tensor" in problems["tensors"]
    assert "is missing" in problems["gone"]
    assert "cannot be read" in problems["bad"]
    bad = next(found for found in discover(root) if found.name.model == "tensors")
    with pytest.raises(Unsupported, match="cannot be imported"):
        take_over(store, bad)
    assert store.list() == []


def test_every_quantization_of_a_cached_repository_is_a_model(tmp_path: Path) -> None:
    files = {
        "m-Q4_K_M.gguf": b"GGUF1",
        "m-Q8_0-00001-of-00002.gguf": b"GGUF2",
        "m-Q8_0-00002-of-00002.gguf": b"GGUF3",
        "mmproj-F16.gguf": b"GGUF4",
    }
    found = discover(write_hub_cache(tmp_path / "hub", files))
    assert {model.name.tag: len(model.files) for model in found} == {"Q4_K_M": 1, "Q8_0": 2}


def test_a_cached_safetensors_repository_is_one_model(store: ModelStore, tmp_path: Path) -> None:
    folder = make.write_safetensors_folder(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    (found,) = discover(write_hub_cache(tmp_path / "home" / "hub", files).parent)
    manifest = take_over(store, found)
    assert manifest.name.display == "hf.co/org/repo.v1:latest"
    assert {file.name for file in manifest.files} == set(files)


def test_a_blob_that_was_changed_after_the_import_is_noticed(
    store: ModelStore, tmp_path: Path
) -> None:
    write_store(tmp_path / "o", usual_layers())
    (found,) = discover(tmp_path / "o")
    manifest = take_over(store, found)
    _, path = next(iter(found.files.values()))
    with path.open("r+b") as file:
        file.write(b"XXXX")
    os.utime(path, ns=(5, 5))
    with pytest.raises(BadModelFile, match="was changed"):
        store.path_of(manifest.files[0])
    (problem,) = store.verify(manifest)
    assert "is damaged" in problem


def test_a_place_without_models_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model of a known kind"):
        discover(tmp_path)
    with pytest.raises(ModelNotFound, match="no file or folder"):
        discover(tmp_path / "nowhere")


def test_the_places_of_other_tools_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / ".lmstudio" / "models").mkdir(parents=True)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "o"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    found = [place for place in default_places() if place.is_relative_to(tmp_path)]
    assert found == [tmp_path / "o", tmp_path / ".lmstudio" / "models"]


@pytest.mark.parametrize("kind", ["ollama", "hub"])
@pytest.mark.parametrize("is_damaged", [False, True], ids=["sound", "damaged"])
def test_what_another_tool_has_is_shared_with_it_and_not_fetched(
    store: ModelStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_damaged: bool,
) -> None:
    place = tmp_path / "theirs"
    digest = hashlib.sha256(BIG).hexdigest()
    blobs = place / ("blobs" if kind == "ollama" else "models--other--repo/blobs")
    blobs.mkdir(parents=True)
    name = f"sha256-{digest}" if kind == "ollama" else digest
    (blobs / name).write_bytes(BIG[:-1] + b"x" if is_damaged else BIG)
    monkeypatch.setenv("OLLAMA_MODELS" if kind == "ollama" else "HF_HUB_CACHE", str(place))
    before, used = tree_of(place), disk_use(tmp_path)
    with running_hub({"m.gguf": BIG}) as hub:
        settings = PullSettings(hub_endpoint=hub.endpoint, give_up_s=60, reserve_bytes=0)
        manifest = asyncio.run(pull(store, "hf.co/org/repo", settings=settings))
        assert hub.bytes_served == (len(BIG) if is_damaged else 0)
    assert store.path_of(manifest.files[0]).read_bytes() == BIG
    if not is_damaged:
        assert disk_use(tmp_path) - used < 0.01 * len(BIG)
    store.delete(manifest.name)
    assert tree_of(place) == before
