"""A spinner that says how far a model's load is, as long as it is loading."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from .client import ApiError, Client, Unreachable
from .render import Spinner

POLL_S = 0.3
TIMEOUT_S = 2.0


@contextlib.contextmanager
def loading_spinner(client: Client, model: str, text: str) -> Iterator[Spinner]:
    """`text` while the model is not loading: `waiting for smollm2`. Where stderr is no terminal
    nothing is shown and nothing is asked."""
    with Spinner(text) as spinner:
        watcher = threading.Thread(target=_watch, args=(client, model, text, spinner), daemon=True)
        if sys.stderr.isatty():
            watcher.start()
        yield spinner


def _watch(client: Client, model: str, text: str, spinner: Spinner) -> None:
    while True:
        time.sleep(POLL_S)
        if not spinner.is_turning:
            return
        try:
            models = client.get("/api/ps", TIMEOUT_S)["models"]
        except (ApiError, Unreachable):
            return  # the request itself tells what is wrong
        spinner.say(load_text(models, model) or text)


def load_text(models: list[dict[str, Any]], model: str) -> str:
    """`loading smollm2: 40 %, reading weights`; "" if it is not loading."""
    for row in models:
        if "loading" in row and row["name"] in (model, f"{model}:latest"):
            load = row["loading"]
            return f"loading {model}: {round(100 * load['fraction'])} %, {load['stage']}"
    return ""
