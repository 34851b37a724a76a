"""Installed and loaded models over HTTP, pulls, and the daemon's own routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .live import LiveDaemon, live_daemon


def test_the_root_says_what_clients_look_for(daemon: LiveDaemon) -> None:
    assert daemon.client.get("/").text == "Ollama is running"
    assert daemon.client.head("/").status_code == 200
    version = daemon.client.get("/api/version").json()
    assert version == {"version": "0.33.0", "llmd_version": "0.0.test"}
    assert daemon.client.head("/api/version").status_code == 200


def test_an_empty_store_lists_nothing(tmp_path: Path) -> None:
    with live_daemon(tmp_path, names=[]) as empty:
        assert empty.client.get("/api/tags").json() == {"models": []}
        assert empty.client.get("/api/ps").json() == {"models": []}
        assert empty.client.get("/v1/models").json() == {"object": "list", "data": []}


def test_tags_have_every_field_and_the_newest_first(daemon: LiveDaemon) -> None:
    models = daemon.client.get("/api/tags").json()["models"]
    times = [model["modified_at"] for model in models]
    assert times == sorted(times, reverse=True)
    caller = next(model for model in models if model["name"] == "caller:latest")
    assert len(caller.pop("digest")) == 64
    assert caller.pop("modified_at").startswith("2026-11-30T12:00:")
    assert caller.pop("size") > 100
    assert caller == {
        "name": "caller:latest",
        "model": "caller:latest",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "135M",
            "quantization_level": "Q4_1",
            "context_length": 2048,
            "embedding_length": 8,
        },
        "capabilities": ["completion", "tools"],
    }


def test_show_tells_all(daemon: LiveDaemon) -> None:
    shown = daemon.post("/api/show", {"name": "caller"}).json()
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 135_000_000,
        "llama.context_length": 2048,
        "llama.embedding_length": 8,
        "tokenizer.ggml.tokens": [],
    }
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["system"] == "You are a caller."
    assert shown["template"] == "{{ messages }}"
    assert shown["parameters"].split("\n") == [
        "temperature                    0.5",
        'stop                           "<end>"',
    ]
    assert "# FROM caller:latest" in shown["modelfile"]
    assert "PARAMETER temperature 0.5" in shown["modelfile"]
    verbose = daemon.post("/api/show", {"model": "caller", "verbose": True}).json()
    assert verbose["model_info"]["tokenizer.ggml.tokens"] == ["a", "b", "c", "d", "e", "f", "g"]


def test_copilot_is_shown_the_name_it_asked_for(daemon: LiveDaemon) -> None:
    agent = {"user-agent": "GitHubCopilotChat/1.0"}
    shown = daemon.post("/api/show", {"model": "caller"}, headers=agent).json()
    assert shown["model_info"]["general.basename"] == "caller"


def test_ps_shows_the_kv_cache(daemon: LiveDaemon) -> None:
    daemon.post("/api/generate", {"model": "plain", "keep_alive": "10m"})
    rows = daemon.client.get("/api/ps").json()["models"]
    row = next(row for row in rows if row["name"] == "plain:latest")
    assert row["context_length"] == 2048
    assert row["size"] > row["size_vram"] == 0
    assert row["devices"] == ["cpu"]
    assert (row["running"], row["waiting"]) == (0, 0)
    assert set(row["kv"]) >= {
        "blocks_total",
        "blocks_in_use",
        "blocks_cached",
        "blocks_free",
        "bytes",
    }
    assert row["kv"]["bytes_per_token"] == 3 * 4096 // 16, "a block of each group"


def test_a_copy_has_the_same_id_and_can_be_deleted(tmp_path: Path) -> None:
    with live_daemon(tmp_path, names=["plain"]) as own:
        copied = own.post("/api/copy", {"source": "plain", "destination": "me/other:1"})
        assert (copied.status_code, copied.content) == (200, b"")
        models = {
            row["name"]: row["digest"] for row in own.client.get("/api/tags").json()["models"]
        }
        assert models["me/other:1"] == models["plain:latest"]
        own.post("/api/generate", {"model": "plain"})
        gone = own.client.request("DELETE", "/api/delete", json={"model": "plain"})
        assert (gone.status_code, gone.content) == (200, b"")
        assert [row["name"] for row in own.client.get("/api/tags").json()["models"]] == [
            "me/other:1"
        ]
        assert own.client.get("/api/ps").json() == {"models": []}


def test_a_pull_tells_its_progress(daemon: LiveDaemon) -> None:
    digest = "ab" * 32
    part = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": 100}

    def overall(completed: int) -> dict[str, Any]:
        return {"source": "a test", "overall": {"total": 200, "completed": completed}}

    success = {"status": "success", "model": "new:latest"}
    assert daemon.lines("/api/pull", {"name": "new"}) == [
        {"status": "pulling manifest"},
        {**part, **overall(0)},
        {**part, "completed": 60, **overall(60)},
        {**part, "completed": 100, **overall(100)},
        {"status": "verifying sha256 digest"},
        {"status": "writing manifest"},
        success,
    ]
    assert daemon.post("/api/pull", {"model": "new", "stream": False}).json() == success


def test_a_pull_that_fails_ends_in_an_error_line(daemon: LiveDaemon) -> None:
    assert daemon.lines("/api/pull", {"model": "unknown"})[-1] == {
        "error": "pull model manifest: file does not exist: no source has it"
    }
    assert daemon.lines("/api/pull", {"model": "offline"})[-1] == {
        "error": "pull model manifest: hf.co cannot be reached"
    }
    whole = daemon.post("/api/pull", {"model": "unknown", "stream": False})
    assert whole.status_code == 500
    assert whole.json() == {"error": "pull model manifest: file does not exist: no source has it"}


def test_the_cloud_is_off(daemon: LiveDaemon) -> None:
    assert daemon.client.get("/api/status").json() == {
        "cloud": {"disabled": True, "source": "config"}
    }
    assert daemon.post("/api/signout", {}).status_code == 200
    recommended = daemon.client.get("/api/experimental/model-recommendations")
    assert recommended.json() == {"recommendations": []}


def test_the_figures_are_there_for_prometheus(daemon: LiveDaemon) -> None:
    slowly = 'SCRIPT [{"text": "a"}, {"sleep_s": 0.03, "text": "b"}]'
    daemon.post("/api/generate", {"model": "plain", "prompt": slowly, "stream": False})
    page = daemon.client.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    model = '{model="plain:latest"}'
    assert float(figures[f"llmd_kv_blocks_cached{model}"]) == 7
    assert float(figures[f"llmd_generated_tokens_total{model}"]) > 0
    assert float(figures[f"llmd_time_to_first_token_seconds_count{model}"]) > 0
    assert float(figures[f"llmd_inter_token_seconds_count{model}"]) > 0
    assert float(figures['llmd_http_requests_total{route="/api/generate",status="200"}']) > 0
    assert daemon.client.get("/health").json()["status"] == "ok"


def test_v1_models_takes_names_with_slashes(tmp_path: Path) -> None:
    with live_daemon(tmp_path, names=["plain"]) as own:
        own.post("/api/copy", {"source": "plain", "destination": "me/other:1"})
        model = own.client.get("/v1/models/me/other:1").json()
        assert (model["id"], model["object"], model["owned_by"]) == ("me/other:1", "model", "me")
        missing = own.client.get("/v1/models/nope")
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"
