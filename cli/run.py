"""`llmd run`: one answer, or a conversation.

show ──404──▶ pull ──▶ show
  │
  ├─ an embedding model ──▶ the vector, as one line of JSON
  ├─ a prompt (arguments, stdin or both) ──▶ one answer
  ├─ a prompt that is empty ──▶ the model is loaded, nothing is printed
  └─ none, on a terminal ──▶ chat.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from .answer import AnswerPrinter, figures
from .client import ApiError, Client
from .errors import CommandFailed
from .fetch import looks_like_path, pull
from .loading import loading_spinner
from .render import Spinner

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The flags of `llmd run`, as they were given."""

    keep_alive: str | None = None
    verbose: bool = False
    insecure: bool = False
    word_wrap: bool = True
    format: str | None = None
    think: str | None = None
    hide_thinking: bool = False
    truncate: bool | None = None
    dimensions: int | None = None


def run(client: Client, model: str, words: Sequence[str] | None, options: RunOptions) -> None:
    """Raises ApiError, Unreachable, CommandFailed."""
    model, facts = show_or_pull(client, model, options.insecure)
    prompt = read_prompt(words)
    capabilities = facts.get("capabilities", ())
    if "embedding" in capabilities and "completion" not in capabilities:
        embed(client, model, prompt or "", options)
    elif prompt is None:
        from .chat import chat

        chat(client, model, facts, options)
    elif not prompt:
        load(client, model, options)
    else:
        generate(client, model, prompt, options)


def read_prompt(words: Sequence[str] | None) -> str | None:
    """stdin, then the arguments. None: nothing was given, and there is a person at a terminal."""
    parts = []
    has_input = sys.stdin is not None and not sys.stdin.isatty()
    if has_input:
        parts.append(sys.stdin.read().rstrip("\r\n"))
    parts += words or ()
    if words or has_input or not sys.stdout.isatty():
        return " ".join(part for part in parts if part)
    return None


def show_or_pull(client: Client, model: str, insecure: bool = False) -> tuple[str, Json]:
    """Its name here and what /api/show knows of it; it is pulled first if it is not here."""
    is_place = looks_like_path(model) or "://" in model
    if not is_place:
        try:
            return model, client.post("/api/show", {"model": model})
        except ApiError as error:
            if error.status != 404:
                raise
    pulled = pull(client, model, insecure)
    name = pulled if is_place else model
    return name, client.post("/api/show", {"model": name})


def load(client: Client, model: str, options: RunOptions) -> None:
    """Load the model without asking it anything."""
    with loading_spinner(client, model, f"loading {model}"):
        client.post("/api/generate", {"model": model, "stream": False, **common_fields(options)})


def generate(client: Client, model: str, prompt: str, options: RunOptions) -> None:
    """One answer on stdout. Ctrl+C ends the answer, which is no failure."""
    body = {"model": model, "prompt": prompt, **common_fields(options)}
    printer = AnswerPrinter(wrap=options.word_wrap, hide_thinking=options.hide_thinking)
    try:
        stream_answer(client, "/api/generate", body, printer)
    except KeyboardInterrupt:
        printer.end()
        sys.stdout.write("\n")
        return
    sys.stdout.write("\n\n")
    sys.stdout.flush()
    if options.verbose:
        print(figures(printer.final), file=sys.stderr)


def stream_answer(client: Client, path: str, body: Json, printer: AnswerPrinter) -> None:
    """Print the answer as it comes, behind a spinner while there is none."""
    with (
        closing(client.stream(path, body)) as lines,
        loading_spinner(client, body["model"], f"waiting for {body['model']}") as spinner,
    ):
        for line in lines:
            spinner.stop()
            printer.take(line)
    printer.end()


def common_fields(options: RunOptions) -> Json:
    """The flags as fields of a request's body."""
    fields: Json = {}
    if options.keep_alive is not None:
        fields["keep_alive"] = options.keep_alive
    if options.think is not None:
        fields["think"] = think_value(options.think)
    if options.format is not None:
        fields["format"] = format_value(options.format)
    return fields


def think_value(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


def format_value(text: str) -> Any:
    """ "json", or the JSON of a schema. Raises CommandFailed."""
    if text in ("", "json"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandFailed(f"--format wants json or a JSON schema: {error}") from error


def embed(client: Client, model: str, text: str, options: RunOptions) -> None:
    """The vector of a text, as one line of JSON."""
    if not text:
        raise CommandFailed(
            "embedding models require input text; give it as an argument or pipe it to stdin: "
            f'llmd run {model} "some text"'
        )
    body: Json = {"model": model, "input": text}
    if options.keep_alive is not None:
        body["keep_alive"] = options.keep_alive
    if options.truncate is not None:
        body["truncate"] = options.truncate
    if options.dimensions:
        body["dimensions"] = options.dimensions
    with Spinner(f"waiting for {model}"):
        answer = client.post("/api/embed", body)
    print(json.dumps(answer["embeddings"][0], separators=(",", ":")))
