"""The conversation, on a pseudo-terminal, with a person's keys."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fake_daemon import FakeDaemon, endless

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")
DEADLINE_S = 30


class Terminal:
    """llmd on a pseudo-terminal. `expect` waits for words and forgets what came before them."""

    def __init__(self, arguments: list[str], environ: dict[str, str]) -> None:
        self._end, child_end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmd", *arguments],
            stdin=child_end,
            stdout=child_end,
            stderr=child_end,
            env={**environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
        )
        os.close(child_end)
        self._unread = ""

    def press(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def expect(self, words: str) -> str:
        """What was shown up to and with these words."""
        deadline = time.monotonic() + DEADLINE_S
        while words not in self._unread:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._end], [], [], max(left, 0))
            assert ready, f"{words!r} did not come; there is {self._unread[-500:]!r}"
            self._unread = ESCAPES.sub("", self._unread + self._read())
        shown, _, self._unread = self._unread.partition(words)
        return shown + words

    def _read(self) -> str:
        try:
            return os.read(self._end, 65536).decode("utf-8", "replace")
        except OSError as error:
            raise AssertionError(f"the program ended; there is {self._unread[-500:]!r}") from error

    def interrupt(self) -> None:
        """Ctrl+C, as the terminal's driver sends it while a program does not read keys."""
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(fake: FakeDaemon, tmp_path: Path) -> Iterator[Terminal]:
    fake.answers["POST /api/generate"] = {"done": True, "done_reason": "load"}
    fake.answers["POST /api/chat"] = [
        {"message": {"role": "assistant", "content": "Hel"}, "done": False},
        {"message": {"role": "assistant", "content": "lo."}, "done": True},
    ]
    terminal = Terminal(["run", "m"], fake.environ(tmp_path))
    try:
        terminal.expect(">>> ")
        yield terminal
    finally:
        terminal.close()


def messages(fake: FakeDaemon) -> list[dict[str, str]]:
    said: list[dict[str, str]] = fake.bodies("POST /api/chat")[-1]["messages"]
    return said


def test_a_conversation_is_sent_whole_and_ends_with_ctrl_d(
    fake: FakeDaemon, terminal: Terminal
) -> None:
    terminal.press("hi\r")
    terminal.expect("Hello.")
    terminal.expect(">>> ")
    terminal.press("again\r")
    terminal.expect("Hello.")
    terminal.expect(">>> ")
    assert messages(fake) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "again"},
    ]
    terminal.press("\x04")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_stops_the_answer_only(fake: FakeDaemon, terminal: Terminal) -> None:
    fake.answers["POST /api/chat"] = endless({"message": {"content": "na "}, "done": False})
    terminal.press("sing\r")
    terminal.expect("na na")
    terminal.interrupt()
    terminal.expect(">>> ")
    fake.answers["POST /api/chat"] = [{"message": {"content": "Fine."}, "done": True}]
    terminal.press("how are you?\r")
    terminal.expect("Fine.")
    roles = [message["role"] for message in messages(fake)]
    assert roles == ["user", "assistant", "user"]
    assert messages(fake)[1]["content"].startswith("na na")


def test_ctrl_c_on_an_empty_line_says_how_to_leave(terminal: Terminal) -> None:
    terminal.press("\x03")
    terminal.expect("Use Ctrl + d or /bye to exit.")
    terminal.expect(">>> ")
    terminal.press("/bye\r")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_three_quotes_hold_a_message_of_several_lines(fake: FakeDaemon, terminal: Terminal) -> None:
    terminal.press('"""one\r')
    terminal.expect("... ")
    terminal.press('two"""\r')
    terminal.expect("Hello.")
    assert messages(fake) == [{"role": "user", "content": "one\ntwo"}]


def test_commands_change_what_is_asked(fake: FakeDaemon, terminal: Terminal) -> None:
    for keys, reply in [
        ("/set system Be brief.", "Set system message."),
        ("/set parameter temperature 0.5", "Set parameter 'temperature' to '0.5'"),
        ("/set format json", "Set format to 'json' mode."),
        ("/set nothink", "Set 'nothink' mode."),
        ("/nonsense", "Unknown command '/nonsense'. Type /? for help"),
    ]:
        terminal.press(f"{keys}\r")
        terminal.expect(reply)
        terminal.expect(">>> ")
    terminal.press("hi\r")
    terminal.expect("Hello.")
    body = fake.bodies("POST /api/chat")[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["options"], body["format"], body["think"]) == (
        {"temperature": 0.5},
        "json",
        False,
    )
    terminal.expect(">>> ")
    terminal.press("/clear\r")
    terminal.expect("Cleared session context")
    terminal.expect(">>> ")
    terminal.press("hi\r")
    terminal.expect("Hello.")
    assert [message["role"] for message in messages(fake)] == ["system", "user"]


def test_what_was_typed_is_found_again_next_time(
    fake: FakeDaemon, terminal: Terminal, tmp_path: Path
) -> None:
    terminal.press("remember me\r")
    terminal.expect("Hello.")
    terminal.expect(">>> ")
    terminal.press("/bye\r")
    terminal.process.wait(DEADLINE_S)
    later = Terminal(["run", "m"], fake.environ(tmp_path))
    try:
        later.expect(">>> ")
        later.press("\x1b[A\x1b[A\r")  # up: /bye; up: the message
        later.expect("Hello.")
        assert messages(fake) == [{"role": "user", "content": "remember me"}]
    finally:
        later.close()
