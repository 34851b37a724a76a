"""The program against a loopback daemon: what it asks, prints, and exits with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from .fake_daemon import DIGEST, FakeDaemon, Refusal, endless, llmd


def test_list_prints_a_table(fake: FakeDaemon, tmp_path: Path) -> None:
    hours_ago = (datetime.now(UTC) - timedelta(hours=3)).isoformat()
    model = {"name": "m:latest", "digest": DIGEST, "size": 4_700_000_000, "modified_at": hours_ago}
    fake.answers["GET /api/tags"] = {"models": [model, {**model, "name": "other:1b"}]}
    result = llmd("list", "M", environ=fake.environ(tmp_path))
    assert result.stdout.splitlines() == [
        "NAME        ID              SIZE      MODIFIED",
        "m:latest    0123456789ab    4.7 GB    3 hours ago",
    ]
    assert (result.returncode, result.stderr) == (0, "")


def test_ps_shows_how_full_the_cache_is(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["GET /api/ps"] = {
        "models": [
            {
                "name": "m:latest",
                "digest": DIGEST,
                "size": 154_000_000,
                "size_vram": 0,
                "context_length": 8192,
                "expires_at": "2400-01-01T00:00:00Z",
                "kv": {"blocks_in_use": 5, "blocks_cached": 1, "blocks_total": 50},
            }
        ]
    }
    header, row = llmd("ps", environ=fake.environ(tmp_path)).stdout.splitlines()
    assert header.split() == ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "KV", "UNTIL"]
    assert row.index("5 / 50 (10%)") == header.index("KV")
    assert row.endswith("    Forever")


def test_run_prints_the_answer_and_two_newlines(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = [
        {"response": "Pa", "done": False},
        {"response": "ris", "done": False},
        {"response": "", "done": True, "eval_count": 2, "eval_duration": 1_000_000_000},
    ]
    result = llmd("run", "m", "capital", "of France?", "--verbose", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stdout) == (0, "Paris\n\n")
    assert "eval rate:            2.00 tokens/s" in result.stderr
    assert fake.bodies("POST /api/generate") == [{"model": "m", "prompt": "capital of France?"}]


def test_what_is_piped_in_goes_before_the_words(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = [{"response": "ok", "done": True}]
    llmd("run", "m", "Summarise:", environ=fake.environ(tmp_path), stdin="a long\ntext\n")
    assert fake.bodies("POST /api/generate")[0]["prompt"] == "a long\ntext Summarise:"


def test_flags_become_fields(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = [{"response": "{}", "done": True}]
    flags = ["--think", "--format", '{"type":"object"}', "--keepalive", "5m"]
    assert llmd("run", *flags, "m", "hi", environ=fake.environ(tmp_path)).returncode == 0
    assert fake.bodies("POST /api/generate") == [
        {
            "model": "m",
            "prompt": "hi",
            "think": True,
            "format": {"type": "object"},
            "keep_alive": "5m",
        }
    ]


def test_an_empty_prompt_only_loads_the_model(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = {"done": True, "done_reason": "load"}
    result = llmd("run", "m", "", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stdout) == (0, "")
    assert fake.bodies("POST /api/generate") == [{"model": "m", "stream": False}]


def test_thinking_is_set_apart_or_hidden(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = [
        {"response": "", "thinking": "Hm.", "done": False},
        {"response": "Yes.", "done": True},
    ]
    shown = llmd("run", "m", "hi", environ=fake.environ(tmp_path))
    assert shown.stdout == "Thinking...\nHm.\n...done thinking.\n\nYes.\n\n"
    hidden = llmd("run", "m", "hi", "--hidethinking", environ=fake.environ(tmp_path))
    assert hidden.stdout == "Yes.\n\n"


def test_a_model_that_is_missing_is_pulled_first(fake: FakeDaemon, tmp_path: Path) -> None:
    shown: list[object] = [Refusal(404, "model 'm' not found"), {"capabilities": ["completion"]}]
    fake.answers["POST /api/show"] = lambda _: shown.pop(0)
    fake.answers["POST /api/pull"] = [
        {"status": "pulling manifest", "source": "the shelf"},
        {"status": "pulling 0123", "digest": "a", "total": 1000, "completed": 100},
        {"status": "pulling 0123", "digest": "a", "total": 1000, "completed": 1000},
        {"status": "success"},
    ]
    fake.answers["POST /api/generate"] = [{"response": "Hi", "done": True}]
    result = llmd("run", "m", "hi", environ=fake.environ(tmp_path))
    assert result.stdout == "Hi\n\n"
    assert result.stderr.splitlines() == [
        "m comes from the shelf",
        "pulling manifest",
        "pulling m: 10% 100 B/1 KB",
        "pulling m: 100% 1 KB/1 KB",
        "success",
    ]


def test_an_embedding_model_prints_its_vector(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/show"] = {"capabilities": ["embedding"]}
    fake.answers["POST /api/embed"] = {"embeddings": [[0.5, -1.0]]}
    assert llmd("run", "e", "words", environ=fake.environ(tmp_path)).stdout == "[0.5,-1.0]\n"
    without = llmd("run", "e", environ=fake.environ(tmp_path))
    assert without.returncode == 1
    assert without.stderr.startswith("Error: embedding models require input text")


def test_an_error_in_the_middle_of_an_answer_is_an_error(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = [{"response": "Par"}, {"error": "the worker ended"}]
    result = llmd("run", "m", "hi", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stdout) == (1, "Par")
    assert result.stderr == "Error: the worker ended\n"


def test_ctrl_c_ends_the_answer_and_is_no_failure(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = endless({"response": "na ", "done": False})
    child = subprocess.Popen(
        [sys.executable, "-m", "llmd", "run", "m", "sing"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=fake.environ(tmp_path),
    )
    assert child.stdout is not None
    assert child.stdout.read(3) == b"na "
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert (child.returncode, errors) == (0, b"")


def test_rm_says_what_it_removed_and_stops_at_the_first_error(
    fake: FakeDaemon, tmp_path: Path
) -> None:
    fake.answers["DELETE /api/delete"] = lambda body: (
        {} if body["model"] == "a" else Refusal(404, f"model '{body['model']}' not found")
    )
    result = llmd("rm", "a", "b", "c", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stdout) == (1, "deleted 'a'\n")
    assert result.stderr == "Error: model 'b' not found\n"
    assert len(fake.bodies("DELETE /api/delete")) == 2


def test_stop_is_silent_and_knows_what_it_cannot_find(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = lambda body: (
        {"done": True} if body["model"] == "m" else Refusal(404, "model 'x' not found")
    )
    result = llmd("stop", "m", environ=fake.environ(tmp_path))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert fake.bodies("POST /api/generate")[0]["keep_alive"] == 0
    missing = llmd("stop", "x", environ=fake.environ(tmp_path))
    assert (missing.returncode, missing.stderr) == (
        1,
        'Error: couldn\'t find model "x" to stop\n',
    )


def test_cp_tells_both_names(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/copy"] = {}
    result = llmd("cp", "a", "b", environ=fake.environ(tmp_path))
    assert result.stdout == "copied 'a' to 'b'\n"


def test_show_takes_one_kind_of_detail_only(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/show"] = {"template": "{{ x }}", "capabilities": []}
    environ = fake.environ(tmp_path)
    assert llmd("show", "m", "--template", environ=environ).stdout == "{{ x }}\n"
    both = llmd("show", "m", "--template", "--system", environ=environ)
    assert both.returncode == 1
    assert both.stderr.startswith("Error: only one of '--license', '--modelfile',")


@pytest.mark.parametrize("words", [["run"], ["bogus"], ["cp", "a"], ["list", "--nonsense"]])
def test_a_wrong_command_line_exits_with_one(
    words: list[str], fake: FakeDaemon, tmp_path: Path
) -> None:
    result = llmd(*words, environ=fake.environ(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_without_a_command_help_is_shown(tmp_path: Path, fake: FakeDaemon) -> None:
    result = llmd(environ=fake.environ(tmp_path))
    assert result.returncode == 0
    assert "Commands:" in result.stdout


def test_the_version_is_the_daemons_and_tells_the_difference(
    fake: FakeDaemon, tmp_path: Path
) -> None:
    result = llmd("--version", environ=fake.environ(tmp_path))
    first, second = result.stdout.splitlines()
    assert first == "llmd version is 9.9.9"
    assert second.startswith("Warning: client version is ")


@pytest.mark.alone
def test_the_version_is_told_without_a_daemon_and_quickly(fake: FakeDaemon, tmp_path: Path) -> None:
    environ = {**fake.environ(tmp_path), "LLMD_HOST": "127.0.0.1:9"}
    result = llmd("--version", environ=environ)
    assert (result.returncode, result.stdout[:16]) == (0, "llmd version is ")
    before = os.times()
    llmd("--version", environ=environ)
    after = os.times()
    used_s = (after.children_user + after.children_system) - (
        before.children_user + before.children_system
    )
    assert used_s < 0.3  # processor time: the clock would measure the machine's other work too


def test_a_program_that_is_not_llmd_is_not_talked_to(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["GET /api/version"] = Refusal(404, "no such page")
    result = llmd("list", environ=fake.environ(tmp_path))
    assert result.returncode == 1
    assert "is taken by a program that is not llmd" in result.stderr


def test_no_daemon_and_no_autostart_is_one_sentence(fake: FakeDaemon, tmp_path: Path) -> None:
    result = llmd("list", environ={**fake.environ(tmp_path), "LLMD_HOST": "127.0.0.1:9"})
    assert result.returncode == 1
    assert result.stderr.startswith("Error: could not connect to llmd at http://127.0.0.1:9;")
    assert "llmd serve" in result.stderr


def test_a_pipe_that_closes_early_is_no_traceback(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["POST /api/generate"] = endless({"response": "na " * 1000, "done": False})
    child = subprocess.Popen(
        [sys.executable, "-m", "llmd", "run", "m", "sing"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=fake.environ(tmp_path),
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    deadline = time.monotonic() + 20
    assert child.wait(timeout=deadline - time.monotonic()) == 1
    assert child.stderr.read() == b""
    child.stderr.close()


def test_the_key_is_sent(fake: FakeDaemon, tmp_path: Path) -> None:
    fake.answers["GET /api/tags"] = {"models": []}
    environ = {**fake.environ(tmp_path), "LLMD_API_KEY": "secret"}
    assert llmd("list", environ=environ).stdout == "NAME    ID    SIZE    MODIFIED\n"
    assert fake.keys[-1] == "Bearer secret"
