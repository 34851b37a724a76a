"""`pull`, `create`, `import`, `push` and `verify` against a real daemon application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd.cli import fetch
from llmd.cli.address import Address
from llmd.cli.client import ApiError, Client
from llmd.cli.errors import CommandFailed
from llmd.cli.verify import verify
from llmd.registry.names import ModelName
from llmd.registry.settings import PullSettings

from ..daemon.live import LiveDaemon, live_daemon, tiny_gguf


class Distant(Address):
    """The same daemon, as if on another machine."""

    @property
    def is_local(self) -> bool:
        return False


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("models")
    with live_daemon(root, names=["plain"], pull_settings=PullSettings(reserve_bytes=0)) as running:
        yield running


@pytest.fixture
def client(daemon: LiveDaemon) -> Client:
    return Client(Address(port=daemon.port))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user stands, with a model beside him."""
    (tmp_path / "my.gguf").write_bytes(tiny_gguf("my"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", ["my.gguf", "./my.gguf"])
def test_a_file_beside_us_is_pulled_by_its_path(client: Client, folder: Path, text: str) -> None:
    assert fetch.pull(client, text) == "my:latest"
    assert fetch.pull(client, str(folder / "my.gguf"), as_name="other:1") == "other:1"


def test_a_path_that_is_not_there_is_told_before_the_daemon_is_asked(
    client: Client, folder: Path
) -> None:
    with pytest.raises(CommandFailed, match=f"there is no file or folder {folder}/nope"):
        fetch.pull(client, "./nope")


@pytest.mark.parametrize(
    "text", ["smollm2", "org/repo:Q4_0", "https://example.org/m.gguf", "localhost:5000/a/b"]
)
def test_names_and_addresses_are_no_paths(folder: Path, text: str) -> None:
    assert not fetch.looks_like_path(text)


@pytest.mark.parametrize("is_distant", [False, True], ids=["here", "on another machine"])
def test_a_modelfile_becomes_a_model(
    daemon: LiveDaemon, folder: Path, capsys: pytest.CaptureFixture[str], is_distant: bool
) -> None:
    kind = Distant if is_distant else Address
    client = Client(kind(port=daemon.port))
    (folder / "Modelfile").write_text(
        "FROM ./my.gguf\nPARAMETER top_k 3\nSYSTEM Be brief.\nPARAMETER mirostat 1\n"
    )
    fetch.create(client, "made", "Modelfile", "")
    shown = client.post("/api/show", {"model": "made"})
    assert shown["system"] == "Be brief."
    assert "top_k" in shown["parameters"]
    assert "mirostat is deprecated" in capsys.readouterr().err
    (folder / "Child").write_text("FROM made\nPARAMETER top_k 7\n")
    fetch.create(client, "child", "Child", "")
    assert client.post("/api/show", {"model": "child"})["details"]["parent_model"] == "made:latest"


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("FRM x", ApiError, r"\(line 1\): command must be"),
        ("FROM ./nope.gguf", CommandFailed, "there is no file or folder"),
        ("FROM plain\nADAPTER ./nope.gguf", CommandFailed, "there is no file or folder"),
        ("FROM plain\nFROM ./my.gguf", CommandFailed, "must all be files"),
        ("FROM plain\nADAPTER ./my.gguf", ApiError, "is no adapter"),
    ],
)
def test_a_wrong_modelfile_is_told_in_one_sentence(
    client: Client, folder: Path, text: str, error: type[Exception], reason: str
) -> None:
    (folder / "Modelfile").write_text(text)
    with pytest.raises(error, match=reason):
        fetch.create(client, "wrong", "Modelfile", "")
    with pytest.raises(ApiError, match="not found"):
        client.post("/api/show", {"model": "wrong"})


def test_import_shows_then_takes_over(
    client: Client, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fresh.gguf").write_bytes(tiny_gguf("fresh"))
    fetch.import_models(client, "fresh.gguf", (), "", False, True)
    assert capsys.readouterr().out.split()[-2:] == ["folder", "found"]
    fetch.import_models(client, "fresh.gguf", (), "taken:1", False, False)
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "taken:1"
    with pytest.raises(ApiError, match="there is no file or folder"):
        fetch.import_models(client, "nowhere", (), "", False, False)


def test_verify_tells_what_is_damaged(
    daemon: LiveDaemon, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(client, "plain", False)
    assert capsys.readouterr().out == "plain:latest: intact\n"
    (file,) = daemon.store.get(ModelName.parse("plain")).files
    blob = daemon.store.blob_path(file.digest)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(CommandFailed, match="damaged: plain:latest"):
        verify(client, "plain", False)


def test_a_push_that_cannot_reach_its_registry_is_told(client: Client) -> None:
    client.post("/api/copy", {"source": "plain", "destination": "127.0.0.1:1/me/plain"})
    with pytest.raises(ApiError, match="cannot be reached"):
        fetch.push(client, "127.0.0.1:1/me/plain", True)
