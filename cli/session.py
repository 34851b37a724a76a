"""A conversation's state and its /commands. No terminal here: text in, text out.

    Session: model, system, messages, options, ...      changed by `Commands.obey` and by the chat

Replies are the words that users of such chats know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .client import ApiError, Client
from .tables import list_table, show_text

Json = dict[str, Any]

HELP = """\
Available Commands:
  /set            Set session variables
  /show           Show model information
  /load <model>   Load a session or model
  /save <model>   Save your current session
  /clear          Clear session context
  /list           List installed models
  /bye            Exit
  /?, /help       Help for a command
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin and end a message of several lines."""

HELP_SET = """\
Available Commands:
  /set parameter NAME VALUE...   Set a parameter
  /set system TEXT               Set the system message
  /set history | nohistory       Keep what you type in the history file, or not
  /set wordwrap | nowordwrap     Break lines between words, or not
  /set format json | noformat    Ask for JSON, or not
  /set verbose | quiet           Show figures after each answer, or not
  /set think [LEVEL] | nothink   Let the model think, or not"""

HELP_SHOW = """\
Available Commands:
  /show info         Show details of this model
  /show license      Show the model's license
  /show modelfile    Show the Modelfile of this model
  /show parameters   Show the parameters of this model
  /show system       Show the system message
  /show template     Show the prompt template"""

HELP_SHORTCUTS = """\
Available keyboard shortcuts:
  Ctrl + a / e     Move to the beginning / end of the line
  Alt + b / f      Move back / forward by one word
  Ctrl + k / u     Delete what comes after / before the cursor
  Ctrl + w         Delete the word before the cursor
  Ctrl + j         Begin a new line
  Ctrl + g         Write the message in your editor
  Ctrl + l         Clear the screen
  Ctrl + c         Stop the answer, or clear the line
  Ctrl + d         Exit"""

_NAMES = ("set", "show", "load", "save", "clear", "list", "bye", "exit", "help", "?")
_SHOWABLE = ("info", "license", "modelfile", "parameters", "system", "template")


@dataclass(slots=True)
class Session:
    """What one conversation knows. Owner: the chat's loop."""

    model: str
    system: str = ""
    messages: list[Json] = field(default_factory=list)
    options: Json = field(default_factory=dict)
    format: Any = None
    think: bool | str | None = None
    keep_alive: str | None = None
    is_verbose: bool = False
    has_word_wrap: bool = True
    has_history: bool = True
    hides_thinking: bool = False
    is_over: bool = False

    def body(self) -> Json:
        """The request for the next answer: the whole conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        optional = {
            "options": self.options or None,
            "format": self.format,
            "think": self.think,
            "keep_alive": self.keep_alive,
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {"model": self.model, "messages": [*system, *self.messages], **given}


class Commands:
    """Obeys what begins with a slash."""

    def __init__(self, client: Client, session: Session, load: Callable[[str], None]) -> None:
        self._client = client
        self._session = session
        self._load = load  # switches to a model and loads it; raises ApiError

    def obey(self, line: str) -> str:
        """What to print. Raises ApiError, Unreachable."""
        word, _, rest = line[1:].partition(" ")
        matches = [name for name in _NAMES if word and name.startswith(word)]
        if not matches:
            return f"Unknown command '/{word}'. Type /? for help"
        command: Callable[[str], str] = {
            "set": self._set,
            "show": self._show,
            "load": self._load_model,
            "save": self._save,
            "clear": self._clear,
            "list": self._list,
            "bye": self._bye,
            "exit": self._bye,
            "help": self._help,
            "?": self._help,
        }[matches[0]]
        return command(rest.strip())

    def _help(self, about: str) -> str:
        pages = {"set": HELP_SET, "show": HELP_SHOW, "shortcuts": HELP_SHORTCUTS}
        return pages.get(about.removeprefix("/"), HELP)

    def _bye(self, _: str) -> str:
        self._session.is_over = True
        return ""

    def _clear(self, _: str) -> str:
        self._session.messages.clear()
        return "Cleared session context"

    def _list(self, _: str) -> str:
        models = self._client.get("/api/tags")["models"]
        return list_table(models, "", datetime.now().astimezone())

    def _load_model(self, name: str) -> str:
        if not name:
            return "Usage:\n  /load <modelname>"
        try:
            self._load(name)
        except ApiError as error:
            if error.status != 404:
                raise
            return f"Couldn't find model '{name}'"
        return ""

    def _save(self, name: str) -> str:
        if not name:
            return "Usage:\n  /save <modelname>"
        session = self._session
        body: Json = {"model": name, "from": session.model, "stream": False}
        if session.system:
            body["system"] = session.system
        if session.options:
            body["parameters"] = session.options
        if session.messages:
            body["messages"] = session.messages
        self._client.post("/api/create", body)
        return f"Created new model '{name}'"

    def _show(self, what: str) -> str:
        if what not in _SHOWABLE:
            return HELP_SHOW
        session = self._session
        answer = self._client.post("/api/show", {"model": session.model})
        if what == "info":
            return show_text(answer, verbose=False).rstrip()
        if what == "parameters":
            own = answer.get("parameters") or "No additional parameters were specified."
            mine = [f"{name:<30} {value}" for name, value in session.options.items()]
            return "\n".join([f"Model defined parameters:\n{own}", *_titled("User defined", mine)])
        if what == "system" and session.system:
            return session.system
        missing = f"No {what} was specified for this model."
        return str(answer.get(what) or missing)

    # --------------------------------------------------------------------- set

    def _set(self, line: str) -> str:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word == "parameter":
            return self._set_parameter(rest)
        if word == "system":
            self._session.system = rest.strip('"').strip() if rest[:3] == '"""' else rest
            return "Set system message."
        if word == "format":
            return self._set_format(rest)
        if word == "think":
            self._session.think = rest or True
            return f"Set 'think' mode to '{rest}'." if rest else "Set 'think' mode."
        return self._switch(word) or HELP_SET

    def _switch(self, word: str) -> str:
        session = self._session
        match word:
            case "verbose" | "quiet":
                session.is_verbose = word == "verbose"
            case "wordwrap" | "nowordwrap":
                session.has_word_wrap = word == "wordwrap"
            case "history" | "nohistory":
                session.has_history = word == "history"
            case "nothink":
                session.think = False
            case "noformat":
                session.format = None
                return "Disabled format."
            case _:
                return ""
        return f"Set '{word}' mode."

    def _set_format(self, text: str) -> str:
        if text != "json":
            return "Invalid or missing format. For 'json' mode use '/set format json'"
        self._session.format = "json"
        return "Set format to 'json' mode."

    def _set_parameter(self, rest: str) -> str:
        name, *values = rest.split()
        if not values:
            return "Usage:\n  /set parameter NAME VALUE..."
        self._session.options[name] = values if name == "stop" else parameter_value(values[0])
        return f"Set parameter '{name}' to '{', '.join(values)}'"


def parameter_value(text: str) -> Any:
    """A number or a truth where it looks like one; the daemon judges whether it fits."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _titled(title: str, lines: list[str]) -> list[str]:
    return [f"\n{title} parameters:", *lines] if lines else []
