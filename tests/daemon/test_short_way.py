"""What a Listener writes at once reads the same as what goes the long way, on every route."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from llmd.backend.protocol import Delta, ToolCall
from llmd.daemon import http_server
from llmd.daemon.listener import Listener
from llmd.daemon.metrics import ModelFigures
from llmd.daemon.moment import Moment

from .live import LiveDaemon

TEXTS = ["He", "llo %s %b %% ", ' "quoted\\" ', "\x00\x1f", "wör", "ld 👋\n", "\u2028{}"]
SCRIPT = "SCRIPT " + json.dumps([{"text": text, "sleep_s": 0.02} for text in TEXTS])
MESSAGES = [{"role": "user", "content": SCRIPT}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/api/generate", {"prompt": SCRIPT}),
    ("/api/chat", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"prompt": SCRIPT, "stream": True}),
    ("/v1/responses", {"input": MESSAGES, "stream": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99, "stream": True}),
]
# What differs from one answer to the next.
RANDOM = re.compile(
    r"[0-9a-f]{24}"
    r'|(?<="created_at":)("[^"]*"|\d+)|(?<="created":)\d+|(?<="completed_at":)\d+'
    r'|(?<="sequence_number":)\d+|(?<="total_duration":)\d+|(?<="load_duration":)\d+'
)
TEXT = re.compile(r'"(response|content|text|delta)":("(?:[^"\\]|\\.)*")')


def pieces_of(daemon: LiveDaemon, path: str, body: dict[str, Any]) -> tuple[list[str], str]:
    """The kinds of pieces that an answer is made of, in order, and all that it says."""
    answer = daemon.post(path, {"model": "plain", **body})
    assert answer.status_code == 200, answer.text
    pieces = re.split("\n+", answer.text.removesuffix("\n"))
    said = "".join(json.loads(text) for piece in pieces for _, text in TEXT.findall(piece))
    kinds = [TEXT.sub(r'"\1":TEXT', RANDOM.sub("RANDOM", piece)) for piece in pieces]
    return list(dict.fromkeys(kinds)), said


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
def test_a_piece_looks_the_same_whichever_way_it_went(
    daemon: LiveDaemon, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    put = http_server.Wire.put
    taken: list[bytes] = []

    def watched(wire: http_server.Wire, piece: bytes) -> bool:
        is_taken = put(wire, piece)
        if is_taken:
            taken.append(piece)
        return is_taken

    monkeypatch.setattr(http_server.Wire, "put", watched)
    short = pieces_of(daemon, path, body)
    assert taken, "nothing went the short way"
    monkeypatch.setattr(http_server.Wire, "put", lambda wire, piece: False)
    long = pieces_of(daemon, path, body)
    assert short == long
    assert long[1].startswith("".join(TEXTS))


def test_the_events_of_a_response_are_numbered_in_order_by_either_way(daemon: LiveDaemon) -> None:
    body = {"model": "plain", "input": MESSAGES, "stream": True}
    events = [event for _, event in daemon.events("/v1/responses", body)]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "".join(TEXTS)


def test_each_way_counts_alike() -> None:
    figures = ModelFigures()
    listener = Listener()
    listener.begin(figures, Moment().monotonic)
    call = ToolCall("call_1", "look", {})
    listener.count(Delta("g", thinking="hm", token_ids=[1, 2]), Moment().monotonic)
    listener.count(Delta("g", text="wörd", token_ids=[3]), Moment().monotonic)
    listener.count(Delta("g", tool_calls=(call,), token_ids=[]), Moment().monotonic)
    assert not listener.take(Delta("g", text="not told"), Moment())
    counts = (listener.num_thinking, listener.num_text, listener.num_calls, listener.token_ids)
    assert counts == (2, 4, 1, [1, 2, 3])
    assert figures.ttft_s.buckets()[-1] == ("+Inf", 1.0)
    assert figures.inter_token_s.buckets()[-1] == ("+Inf", 1.0)
