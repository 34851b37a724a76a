"""`ps -v`, `--watch` and `--history`, `devices`, `cancel`: what the daemon is doing, as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from .client import Client
from .tables import ps_table, table
from .units import age_text, parse_time, size_text

WATCH_S = 1.0
_ID_SHOWN = 8
Json = dict[str, Any]


def devices_text(devices: Sequence[Json]) -> str:
    rows = [
        (
            device["id"],
            device["name"],
            size_text(device["total_bytes"]),
            size_text(device["free_bytes"]),
        )
        for device in devices
    ]
    return table(("DEVICE", "NAME", "MEMORY", "FREE"), rows)


def requests_text(requests: Sequence[Json]) -> str:
    rows = [
        (
            request["id"][:_ID_SHOWN],
            request["model"],
            f"{request['seconds']:.0f} s",
            str(request["prompt_tokens"]),
            str(request["output_tokens"]),
        )
        for request in requests
    ]
    return table(("REQUEST", "MODEL", "SINCE", "PROMPT", "ANSWER"), rows)


def history_text(history: Sequence[Json], now: datetime) -> str:
    rows = []
    for entry in history:
        moment = parse_time(entry["at"])
        age = age_text(moment, now) if moment else ""
        rows.append((age, entry["model"], entry["event"], entry["reason"]))
    return table(("WHEN", "MODEL", "EVENT", "WHY"), rows)


def memory_text(models: Sequence[Json]) -> str:
    """What `ps` has no column for."""
    rows = []
    for model in models:
        kv = model.get("kv") or {}
        rows.append(
            (
                model["name"],
                str(model.get("pid", "-")),
                ", ".join(model.get("devices") or ()),
                size_text(model.get("resident_bytes", 0)),
                f"{size_text(kv.get('bytes', 0))} of {size_text(kv.get('budget_bytes', 0))}",
                size_text(kv.get("saved_bytes", 0)),
                f"{model.get('running', 0)} / {model.get('waiting', 0)}",
                f"{model.get('tokens_per_s', 0):.1f}",
            )
        )
    header = (
        "NAME", "PID", "DEVICES", "RESIDENT", "KV MEMORY", "ON DISK", "RUN / WAIT", "TOKENS/S",
    )  # fmt: skip
    return table(header, rows)


def ps_text(client: Client, prefix: str, is_verbose: bool, now: datetime) -> str:
    models = [
        model for model in client.get("/api/ps")["models"] if model["name"].startswith(prefix)
    ]
    text = ps_table(models, prefix, now)
    if not is_verbose:
        return text
    requests = [
        request
        for request in client.get("/api/requests")["requests"]
        if request["model"].startswith(prefix)
    ]
    loaded = [model for model in models if "loading" not in model]
    return "\n\n".join((text, memory_text(loaded), requests_text(requests)))


def watch(text: Callable[[], str]) -> None:
    """Show it again each second, on a terminal in place, until Ctrl+C."""
    is_screen = sys.stdout.isatty()
    while True:
        shown = text()
        print(f"\x1b[H\x1b[2J{shown}" if is_screen else f"{shown}\n", flush=True)
        time.sleep(WATCH_S)
