"""The conversation on a terminal: line editing, history, /commands, answers that can be stopped.

    read a message ──/command──▶ Commands.obey ──▶ print what it says
         │text
         ▼
    /api/chat with all messages so far ──▶ print ──▶ remember the answer
                       Ctrl+C ends the answer, and what has come of it is remembered

The conversation lives here, not in the daemon: each request carries it whole, and the daemon's
prefix cache makes that cheap.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .address import is_on
from .answer import AnswerPrinter, figures
from .client import ApiError, Client, Unreachable
from .loading import loading_spinner
from .run import RunOptions, common_fields, stream_answer
from .session import Commands, Session

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT = ">>> "
CONTINUATION = "... "
HINT = "Send a message (/? for help)"
CONTINUATION_HINT = "Press Enter to send"
LEAVE_HINT = "\nUse Ctrl + d or /bye to exit."
_QUOTES = '"""'
Json = dict[str, Any]


def chat(client: Client, model: str, facts: Json, options: RunOptions) -> None:
    """Until the user leaves. Raises ApiError if the model can't be loaded, Unreachable."""
    fields = common_fields(options)
    session = Session(
        model,
        format=fields.get("format"),
        think=fields.get("think"),
        keep_alive=options.keep_alive,
        is_verbose=options.verbose,
        has_word_wrap=options.word_wrap,
        hides_thinking=options.hide_thinking,
        has_history=not is_on(os.environ, "NOHISTORY"),
    )
    _load(client, session, model)
    for message in facts.get("messages", ()):
        _print_earlier(message)
    Chat(client, session).loop()


def _load(client: Client, session: Session, model: str) -> None:
    session.model = model
    body: Json = {"model": model, "stream": False}
    if session.keep_alive is not None:
        body["keep_alive"] = session.keep_alive
    with loading_spinner(client, model, f"loading {model}"):
        client.post("/api/generate", body)


def _print_earlier(message: Json) -> None:
    text = str(message.get("content", ""))
    print(f"{PROMPT}{text}" if message.get("role") == "user" else f"{text}\n")


class Chat:
    """The loop between person and model."""

    def __init__(self, client: Client, session: Session) -> None:
        self._client = client
        self._session = session
        self._commands = Commands(client, session, self._switch_model)
        self._prompts = _Prompts(session)

    def loop(self) -> None:
        while not self._session.is_over:
            try:
                text = self._prompts.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                print(LEAVE_HINT)
                continue
            try:
                self._take(text)
            except (ApiError, Unreachable) as error:
                print(f"Error: {error}", file=sys.stderr)

    def _take(self, text: str) -> None:
        if text.startswith("/") and not _is_path(text):
            reply = self._commands.obey(text)
            if reply:
                print(reply)
        elif text.strip():
            self._ask(text)

    def _ask(self, text: str) -> None:
        session = self._session
        session.messages.append({"role": "user", "content": text})
        printer = AnswerPrinter(wrap=session.has_word_wrap, hide_thinking=session.hides_thinking)
        try:
            stream_answer(self._client, "/api/chat", session.body(), printer)
        except KeyboardInterrupt:
            printer.end()
        except (ApiError, Unreachable):
            session.messages.pop()  # the next message is not to carry one that failed
            raise
        answer: Json = {"role": "assistant", "content": printer.text}
        if printer.thinking:
            answer["thinking"] = printer.thinking
        session.messages.append(answer)
        print("\n")
        if session.is_verbose and printer.final:
            print(figures(printer.final) + "\n")

    def _switch_model(self, name: str) -> None:
        print(f"Loading model '{name}'")
        _load(self._client, self._session, name)
        self._session.messages.clear()


def _is_path(text: str) -> bool:
    """A message that begins with a file's path is no command."""
    return "/" in text[1:].split(" ", 1)[0] and Path(text.split(" ", 1)[0]).exists()


class _Prompts:
    """Reads one message, with prompt_toolkit."""

    def __init__(self, session: Session) -> None:
        self._lines = _prompt_session(session)

    def read(self) -> str:
        """Raises EOFError for Ctrl+D; KeyboardInterrupt for Ctrl+C on an empty line."""
        text = self._line(PROMPT, HINT)
        head, quotes, rest = text.partition(_QUOTES)
        if not quotes or head.strip() not in ("", "/set system"):
            return text
        while _QUOTES not in rest:
            rest += "\n" + self._line(CONTINUATION, CONTINUATION_HINT)
        return head + rest.partition(_QUOTES)[0].strip("\n")

    def _line(self, prompt: str, hint: str) -> str:
        from prompt_toolkit.formatted_text import FormattedText

        return self._lines.prompt(prompt, placeholder=FormattedText([("fg:ansibrightblack", hint)]))


def _prompt_session(session: Session) -> PromptSession[str]:
    from prompt_toolkit import PromptSession

    editor = os.environ.get("LLMD_EDITOR") or os.environ.get("OLLAMA_EDITOR")
    if editor:
        os.environ["VISUAL"] = editor  # what prompt_toolkit asks first
    return PromptSession(
        history=_history(session),
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=CONTINUATION,
        enable_open_in_editor=True,
        tempfile_suffix=".md",
    )


def _history(session: Session) -> FileHistory:
    """Arrow keys walk through it; it is written to disk unless the user does not want that."""
    from prompt_toolkit.history import FileHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            if session.has_history:
                super().store_string(string)

    path = history_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return History(path)


def history_path() -> Path:
    from platformdirs import user_data_path

    return user_data_path("llmd", appauthor=False) / "history"


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-g")
    def _edit(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    @keys.add("c-c")
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys
