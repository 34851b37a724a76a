"""Places that models come from and what the models folder costs, over HTTP."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmd.registry.settings import PullSettings

from ..registry import model_makers as make
from ..registry.hub_fixture import Faults, running_hub
from ..registry.ollama_fixture import usual_layers, write_store
from .live import LiveDaemon, live_daemon, tiny_gguf


@pytest.fixture
def own(tmp_path: Path) -> Iterator[LiveDaemon]:
    settings = PullSettings(reserve_bytes=0, backoff_s=0.001, max_failures=1)
    with live_daemon(tmp_path / "models", names=["plain"], pull_settings=settings) as running:
        yield running


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "their own.gguf"
    path.write_bytes(tiny_gguf("mine"))
    return path


def statuses(lines: list[dict[str, Any]]) -> list[str]:
    return [line.get("status", "error") for line in lines]


# ----------------------------------------------------------------------- local paths


def test_a_program_here_pulls_a_path_and_is_told_the_name(own: LiveDaemon, gguf: Path) -> None:
    lines = own.lines("/api/pull", {"model": str(gguf)})
    assert lines[-1] == {"status": "success", "model": "their-own:latest"}
    assert statuses(lines).count("success") == 1
    named = own.lines("/api/pull", {"model": str(gguf), "as": "me/mine:1"})
    assert named[-1]["model"] == "me/mine:1"
    assert own.post("/api/show", {"model": "me/mine:1"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"x-forwarded-for": "10.0.0.7"},
        {"forwarded": "for=10.0.0.7"},
        {"via": "1.1 proxy"},
    ],
    ids=lambda headers: next(iter(headers)),
)
@pytest.mark.parametrize("route", ["/api/pull", "/api/create", "/api/import"])
def test_a_page_or_a_proxy_may_name_no_path(
    own: LiveDaemon, gguf: Path, headers: dict[str, str], route: str
) -> None:
    bodies = {
        "/api/pull": {"model": str(gguf)},
        "/api/create": {"model": "x", "from": str(gguf)},
        "/api/import": {"path": str(gguf.parent)},
    }
    response = own.post(route, bodies[route], headers=headers)
    assert response.status_code == 403
    assert "only a program on the daemon's own machine" in response.json()["error"]
    assert [row["name"] for row in own.client.get("/api/tags").json()["models"]] == ["plain:latest"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: folder / "nope.gguf", "there is no file or folder"),
        (lambda folder: folder, "holds no model"),
    ],
)
def test_a_path_without_a_model_is_named(
    own: LiveDaemon, tmp_path: Path, make: Any, text: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    last = own.lines("/api/pull", {"model": str(make(empty))})[-1]
    assert text in last["error"]
    assert str(empty) in last["error"]


def test_a_file_that_is_no_whole_gguf_leaves_nothing(own: LiveDaemon, gguf: Path) -> None:
    before = sorted(path.name for path in own.store.blobs.iterdir())
    gguf.write_bytes(tiny_gguf("mine")[:60])
    last = own.lines("/api/pull", {"model": str(gguf)})[-1]
    assert "is truncated" in last["error"]
    assert sorted(path.name for path in own.store.blobs.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(own: LiveDaemon, gguf: Path) -> None:
    gguf.chmod(0)
    assert "Permission denied" in own.lines("/api/pull", {"model": str(gguf)})[-1]["error"]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("https://example.org/m.gguf#md5=1", "only sha256="),
        ("http://example.org/m.gguf", "insecure protocol http"),
        ("a b", "invalid model name"),
        ("org/repo@../up", "a branch or a commit"),
    ],
)
def test_a_wrong_address_is_refused_in_one_sentence(own: LiveDaemon, model: str, text: str) -> None:
    response = own.post("/api/pull", {"model": model})
    assert text in response.text
    assert "Traceback" not in response.text


# ---------------------------------------------------------------------- housekeeping


def test_disk_tells_who_holds_the_bytes(own: LiveDaemon, gguf: Path) -> None:
    own.post("/api/copy", {"source": "plain", "destination": "twin"})
    own.lines("/api/pull", {"model": str(gguf), "as": "linked"})
    rows = {row["name"]: row for row in own.client.get("/api/disk").json()["models"]}
    size = len(tiny_gguf("plain"))
    assert (rows["plain:latest"]["own"], rows["plain:latest"]["shared"]) == (0, size)
    assert rows["linked:latest"]["elsewhere"] == gguf.stat().st_size
    assert rows["linked:latest"]["problems"] == []


def test_prune_shows_and_removes_what_no_model_needs(own: LiveDaemon) -> None:
    left = own.store.blobs / f"sha256-{'ab' * 32}"
    left.write_bytes(b"left over")
    os.utime(left, (1, 1))
    shown = own.post("/api/prune", {"dry_run": True}).json()
    assert shown["files"] == [f"blobs/sha256-{'ab' * 32}"] and left.exists()
    gone = own.post("/api/prune", {}).json()
    assert (gone["files"], gone["dry_run"], left.exists()) == (shown["files"], False, False)
    own.store.check()


def test_verify_names_what_is_damaged_and_removes_it_if_asked(own: LiveDaemon) -> None:
    blob = next(own.store.blobs.iterdir())
    assert own.lines("/api/verify", {}) == [
        {"status": "intact", "model": "plain:latest"},
        {"status": "success", "models": 1, "problems": 0},
    ]
    content = blob.read_bytes()
    blob.chmod(0o644)
    blob.write_bytes(content[:-1] + b"x")
    damaged, success = own.lines("/api/verify", {"model": "plain"})
    assert damaged["status"] == "damaged" and "is damaged: want" in damaged["problem"]
    assert success["problems"] == 1 and blob.exists()
    own.lines("/api/verify", {"model": "plain", "repair": True})
    assert not blob.exists()
    assert own.post("/api/verify", {"model": "nope"}).status_code == 404


def test_models_of_another_tool_are_shown_then_taken_over(own: LiveDaemon, tmp_path: Path) -> None:
    theirs = write_store(tmp_path / "ollama", usual_layers())
    body = {"path": str(theirs)}
    (found, success) = own.lines("/api/import", {**body, "dry_run": True})
    assert (found["status"], found["model"], found["kind"]) == (
        "found",
        "tiny:1b",
        "Ollama store",
    )
    assert success == {"status": "success", "models": 1}
    assert own.post("/api/import", {**body, "names": ["other"]}).status_code == 404
    imported = own.lines("/api/import", {**body, "names": ["tiny:1b"]})[-2]
    assert imported["status"] == "imported"
    assert own.lines("/api/import", body)[0]["status"] == "exists"
    renamed = own.lines("/api/import", {**body, "as_name": "me/tiny"})[0]
    assert (renamed["status"], renamed["model"]) == ("imported", "me/tiny:latest")
    assert own.client.request("DELETE", "/api/delete", json={"model": "tiny:1b"}).is_success
    blobs = {path.name: path for path in (theirs / "blobs").iterdir()}
    assert len(blobs) == 7
    for name, path in blobs.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == name.removeprefix("sha256-")


# -------------------------------------------------------------------------- modelfiles


def test_a_modelfile_is_read_into_fields(own: LiveDaemon) -> None:
    text = 'FROM ./a.gguf\nFROM ./mmproj.gguf\nSYSTEM "Be brief."\nADAPTER ./lora.gguf\n'
    fields = own.post("/api/modelfile", {"modelfile": text}).json()
    assert fields["from"] == ["./a.gguf", "./mmproj.gguf"]
    assert (fields["system"], fields["adapters"]) == ("Be brief.", ["./lora.gguf"])
    wrong = own.post("/api/modelfile", {"modelfile": "FRM x"})
    assert wrong.status_code == 400 and "(line 1): command must be" in wrong.json()["error"]


# ------------------------------------------------------------------------ shared pulls


def test_three_who_want_one_model_share_one_download_and_one_may_leave(tmp_path: Path) -> None:
    content = make.tiny_gguf() + bytes(range(256)) * 8_000
    with running_hub({"m.gguf": content}, Faults(bytes_per_s=250_000)) as hub:
        settings = PullSettings(
            hub_endpoint=hub.endpoint, give_up_s=60, reserve_bytes=0, part_bytes=1 << 18
        )
        with live_daemon(tmp_path / "models", names=[], pull_settings=settings) as own:
            ends: list[str] = []

            def follow() -> None:
                lines = own.lines("/api/pull", {"model": "hf.co/o/r"})
                completed = [line["completed"] for line in lines if "completed" in line]
                assert completed == sorted(completed)
                ends.append(lines[-1]["status"])

            followers = [threading.Thread(target=follow) for _ in range(2)]
            with own.client.stream("POST", "/api/pull", json={"model": "hf.co/o/r"}) as leaving:
                lines = leaving.iter_lines()
                while "completed" not in next(lines):
                    pass
                for follower in followers:
                    follower.start()
                while "completed" not in next(lines):
                    pass
            hub.faults.bytes_per_s = 0
            for follower in followers:
                follower.join(60)
            assert ends == ["success", "success"]
            assert own.post("/api/show", {"model": "hf.co/o/r"}).status_code == 200
        assert hub.bytes_served <= 1.06 * len(content)


def test_terms_are_shown_first_to_those_who_have_not_accepted_them(tmp_path: Path) -> None:
    table = tmp_path / "aliases.toml"
    table.write_text(
        '[[model]]\nnames = ["tiny"]\nterms = "Be kind."\n[[model.source]]\nhub = "o/r"\n'
    )
    with running_hub({"m.gguf": make.tiny_gguf()}) as hub:
        settings = PullSettings(
            hub_endpoint=hub.endpoint, give_up_s=60, reserve_bytes=0, user_aliases=table
        )
        with live_daemon(tmp_path / "models", names=[], pull_settings=settings) as own:
            refused = own.post("/api/pull", {"model": "tiny", "accept_terms": False})
            assert "Be kind." in refused.json()["error"]
            assert "--accept-terms" in refused.json()["error"]
            assert hub.requests == []
            lines = own.lines("/api/pull", {"model": "tiny", "accept_terms": True})
            assert lines[0] == {"status": "Be kind."}
            again = own.lines("/api/pull", {"model": "tiny", "accept_terms": False})
            assert again[-1]["status"] == "success"
            assert own.post("/api/show", {"model": "tiny"}).json()["license"] == "Be kind."
