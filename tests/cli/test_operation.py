"""`ps -v`, `--history`, `devices`, `cancel`, `stop`: what they ask for and what they print."""

from __future__ import annotations

from pathlib import Path

from llmd.cli.loading import load_text

from .fake_daemon import DIGEST, FakeDaemon, Refusal, llmd

MODEL = {
    "name": "m:latest",
    "digest": DIGEST,
    "size": 154_000_000,
    "size_vram": 77_000_000,
    "context_length": 8192,
    "expires_at": "2400-01-01T00:00:00Z",
    "pid": 321,
    "devices": ["cuda:0", "cpu"],
    "resident_bytes": 450_000_000,
    "running": 2,
    "waiting": 1,
    "tokens_per_s": 31.26,
    "kv": {
        "blocks_in_use": 5,
        "blocks_total": 50,
        "bytes": 40_000_000,
        "budget_bytes": 2_000_000_000,
        "saved_bytes": 9_000_000,
    },
}


def test_ps_v_shows_memory_and_requests(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["GET /api/ps"] = {"models": [MODEL]}
    request = {"id": "0123456789abcdef", "model": "m:latest", "client": "", "seconds": 12.4}
    fake.answers["GET /api/requests"] = {
        "requests": [{**request, "prompt_tokens": 30, "output_tokens": 7}]
    }
    lines = llmd("ps", "-v", environ=fake.environ(tmp_path)).stdout.splitlines()
    assert "50%/50% CPU/GPU" in lines[1]
    assert " ".join(lines[4].split()) == (
        "m:latest 321 cuda:0, cpu 450 MB 40 MB of 2 GB 9 MB 2 / 1 31.3"
    )
    assert lines[7].split() == ["01234567", "m:latest", "12", "s", "30", "7"]


def test_ps_history_says_why(fake: FakeDaemon, tmp_path: Path) -> None:
    entry = {"at": "2020-01-01T00:00:00Z", "model": "m:latest", "event": "unloaded"}
    fake.answers["GET /api/history"] = {"history": [{**entry, "reason": "keep_alive is over"}]}
    header, row = llmd("ps", "--history", environ=fake.environ(tmp_path)).stdout.splitlines()
    assert header.split() == ["WHEN", "MODEL", "EVENT", "WHY"]
    assert row.endswith("m:latest    unloaded    keep_alive is over")


def test_devices_are_listed(fake: FakeDaemon, tmp_path: Path) -> None:
    device = {"id": "cuda:0", "kind": "cuda", "name": "Card", "total_bytes": 24 * 10**9}
    fake.answers["GET /api/devices"] = {"devices": [{**device, "free_bytes": 20 * 10**9}]}
    _, row = llmd("devices", environ=fake.environ(tmp_path)).stdout.splitlines()
    assert row.split() == ["cuda:0", "Card", "24", "GB", "20", "GB"]


def test_cancel_tells_the_whole_id_or_why_not(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/cancel"] = lambda body: (
        {"cancelled": "0123456789"} if body["id"] == "0123" else Refusal(404, "no request")
    )
    assert llmd("cancel", "0123", environ=fake.environ(tmp_path)).stdout == "cancelled 0123456789\n"
    wrong = llmd("cancel", "x", environ=fake.environ(tmp_path))
    assert (wrong.returncode, wrong.stderr) == (1, "Error: no request\n")


def test_stop_without_a_name_ends_the_daemon_and_waits_for_it(
    fake: FakeDaemon, tmp_path: Path
) -> None:
    def shutdown(body: object) -> dict[str, str]:
        fake.answers["GET /api/version"] = Refusal(503, "ending")
        return {"status": "stopping"}

    fake.answers["POST /api/shutdown"] = shutdown
    environ = {**fake.environ(tmp_path), "LLMD_API_KEY": "secret"}
    assert llmd("stop", environ=environ).stdout == "stopped\n"
    assert "Bearer secret" in fake.keys
    nobody = {**environ, "LLMD_HOST": "127.0.0.1:9"}
    result = llmd("stop", environ=nobody)
    assert (result.returncode, result.stdout) == (0, "no daemon is running\n")


def test_a_load_is_told_in_percent() -> None:
    row = {"name": "m:latest", "loading": {"fraction": 0.42, "stage": "reading weights"}}
    assert load_text([row], "m") == "loading m: 42 %, reading weights"
    assert load_text([row], "other") == ""
    assert load_text([{"name": "m:latest"}], "m") == ""
