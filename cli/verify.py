"""`llmd verify`: which models are as they were when they came, and how to mend the others."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from .client import Client
from .errors import CommandFailed
from .fetch import pull
from .render import Spinner


def verify(client: Client, model: str, repair: bool) -> None:
    """Raises CommandFailed if anything is damaged and was not mended."""
    damaged: dict[str, list[str]] = {}
    body = {"model": model, "repair": repair}
    with closing(client.stream("/api/verify", body)) as lines, Spinner("hashing") as spinner:
        for line in lines:
            _take(line, damaged, spinner)
    if not damaged:
        return
    if not repair:
        names = " ".join(damaged)
        raise CommandFailed(f"damaged: {names}; mend with `llmd verify --repair` or import again")
    for name in damaged:
        pull(client, name, accept_terms=True)  # they were accepted when it came first


def _take(line: dict[str, Any], damaged: dict[str, list[str]], spinner: Spinner) -> None:
    name = str(line.get("model", ""))
    match line.get("status"):
        case "verifying":
            spinner.say(f"hashing {name}: {100 * line['completed'] // line['total']}%")
        case "intact":
            spinner.print(f"{name}: intact")
        case "damaged":
            damaged.setdefault(name, []).append(line["problem"])
            spinner.print(f"{name}: {line['problem']}")
