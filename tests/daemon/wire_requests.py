"""What the golden wire samples ask, route by route: see test_wire_samples.py."""

from __future__ import annotations

import json
from typing import Any

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_a1b2c3d4", "name": "add", "arguments": {"a": 1}}


def script(*deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation that the scripted worker answers with these; slow enough not to be merged."""
    steps = [{"sleep_s": 0.05, **delta} for delta in deltas]
    return [{"role": "user", "content": "SCRIPT " + json.dumps(steps)}]


FULL = script({"thinking": "Hm."}, {"text": "A"}, {"text": " b"}, {"tool_calls": [CALL]})
CUT = script({"text": "A"}, {"finished": {"reason": "length"}})
BROKEN = script({"text": "A"}, {"finished": {"reason": "error", "error": "no luck"}})
LOGPROB = {"token_id": 1, "token": "A", "logprob": -0.5, "bytes": [65], "top": []}

DIGEST_OF_X = "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
BAD_FILE = {"model": "mine", "files": {"../x": DIGEST_OF_X}}
HTTP_IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}

# Name of the sample, method, path, and the bodies that are sent one after the other.
REQUESTS: list[tuple[str, str, str, list[Any]]] = [
    ("root", "GET", "/", [None]),
    ("version", "GET", "/api/version", [None]),
    ("status", "GET", "/api/status", [None]),
    ("unknown-path", "GET", "/nope", [None]),
    ("wrong-verb", "GET", "/api/generate", [None]),
    (
        "generate",
        "POST",
        "/api/generate",
        [
            {"model": "plain", "prompt": "hi", "stream": False},
            {"model": "plain", "prompt": script({"text": "A"}, {"text": " b"})[0]["content"]},
            {"model": "plain", "prompt": CUT[0]["content"]},
            {"model": "plain", "prompt": BROKEN[0]["content"]},
            {"model": "plain", "prompt": "hi", "raw": True, "stream": False},
            {"model": "plain", "prompt": "hi", "_debug_render_only": True},
            {"model": "plain"},
            {"model": "plain", "keep_alive": 0},
            {"model": "plain", "prompt": "FAIL too_long the prompt is too long"},
            {},
            {"model": "x", "prompt": "hi"},
            {"model": "plain", "prompt": "hi", "options": {"temperature": "hot"}},
        ],
    ),
    (
        "chat",
        "POST",
        "/api/chat",
        [
            {"model": "thinker", "messages": USER, "stream": False},
            {"model": "thinker", "messages": FULL, "tools": [TOOL]},
            {"model": "thinker", "messages": FULL, "tools": [TOOL], "stream": False},
            {
                "model": "plain",
                "messages": script({"text": "A", "logprobs": [LOGPROB]}),
                "logprobs": True,
            },
            {"model": "plain", "messages": CUT},
            {"model": "plain", "messages": BROKEN},
            {"model": "plain", "messages": []},
            {"model": "plain", "messages": [], "keep_alive": 0},
            {"model": "plain", "messages": USER, "tools": [TOOL]},
            {},
        ],
    ),
    (
        "embed",
        "POST",
        "/api/embed",
        [
            {"model": "embedder", "input": "hi"},
            {"model": "embedder", "input": ["a", "bc"], "dimensions": 2},
            {"model": "embedder", "input": []},
            {"model": "embedder", "input": 5},
            {"model": "x", "input": "hi"},
        ],
    ),
    (
        "embeddings",
        "POST",
        "/api/embeddings",
        [{"model": "embedder", "prompt": "hi"}, {"model": "embedder", "prompt": ""}, {}],
    ),
    (
        "openai-chat",
        "POST",
        "/v1/chat/completions",
        [
            {"model": "plain", "messages": USER},
            {"model": "thinker", "messages": FULL, "tools": [TOOL]},
            {
                "model": "thinker",
                "messages": FULL,
                "tools": [TOOL],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            {"model": "plain", "messages": CUT, "stream": True},
            {"model": "plain", "messages": BROKEN, "stream": True},
            {"model": "plain"},
            {"model": "x", "messages": USER},
        ],
    ),
    (
        "openai-completions",
        "POST",
        "/v1/completions",
        [
            {"model": "plain", "prompt": "hi"},
            {
                "model": "plain",
                "prompt": script({"text": "A"})[0]["content"],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            {"model": "plain", "prompt": {}},
        ],
    ),
    (
        "openai-embeddings",
        "POST",
        "/v1/embeddings",
        [
            {"model": "embedder", "input": "hi"},
            {"model": "embedder", "input": ["hi"], "encoding_format": "base64"},
            {"model": "embedder", "input": "hi", "encoding_format": "hex"},
        ],
    ),
    ("openai-models", "GET", "/v1/models", [None]),
    ("openai-model", "GET", "/v1/models/plain", [None]),
    ("openai-no-model", "GET", "/v1/models/x", [None]),
    (
        "responses",
        "POST",
        "/v1/responses",
        [
            {"model": "plain", "input": "hi"},
            {
                "model": "thinker",
                "input": FULL[0]["content"],
                "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
                "stream": True,
            },
            {"model": "plain", "input": CUT[0]["content"], "stream": True},
            {"model": "plain", "input": BROKEN[0]["content"], "stream": True},
            {"model": "plain", "input": [{"type": "odd"}]},
        ],
    ),
    (
        "anthropic",
        "POST",
        "/v1/messages",
        [
            {"model": "plain", "max_tokens": 9, "messages": USER},
            {
                "model": "thinker",
                "max_tokens": 9,
                "messages": FULL,
                "tools": [{"name": "add", "input_schema": {"type": "object"}}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
                "stream": True,
            },
            {"model": "plain", "max_tokens": 9, "messages": CUT, "stream": True},
            {"model": "plain", "max_tokens": 9, "messages": BROKEN, "stream": True},
            {"model": "plain", "messages": USER},
            {"model": "x", "max_tokens": 9, "messages": USER},
        ],
    ),
    (
        "anthropic-count",
        "POST",
        "/v1/messages/count_tokens",
        [{"model": "plain", "messages": USER}, {"model": "plain"}],
    ),
    ("tokenize", "POST", "/tokenize", [{"model": "plain", "prompt": "hi there"}, {}]),
    ("detokenize", "POST", "/detokenize", [{"model": "plain", "tokens": [2, 5]}]),
    ("show", "POST", "/api/show", [{"model": "plain"}, {}, {"model": "x"}]),
    ("tags", "GET", "/api/tags", [None]),
    ("pull", "POST", "/api/pull", [{"model": "new"}, {"model": "new", "stream": False}, {}]),
    ("pull-unknown", "POST", "/api/pull", [{"model": "unknown"}]),
    ("push", "POST", "/api/push", [{}]),
    ("create", "POST", "/api/create", [{"model": "mine"}, {"model": "mine", "from": "plain"}]),
    (
        "copy",
        "POST",
        "/api/copy",
        [
            {"source": "plain", "destination": "twin"},
            {"source": "x", "destination": "y"},
            {"source": "plain", "destination": ""},
        ],
    ),
    ("delete", "DELETE", "/api/delete", [{"model": "twin"}, {"model": "x"}, {"model": "a b"}]),
    ("blob-bad-digest", "POST", "/api/blobs/sha256:0", ["x"]),
    ("blob-mismatch", "POST", "/api/blobs/sha256:" + "0" * 64, ["x"]),
    ("me", "POST", "/api/me", [None]),
    ("signout", "POST", "/api/signout", [None]),
    # What the contract's other routes say.
    ("root-head", "HEAD", "/", [None]),
    ("version-head", "HEAD", "/api/version", [None]),
    ("tags-head", "HEAD", "/api/tags", [None]),
    ("status-head", "HEAD", "/api/status", [None]),
    ("openai-models-head", "HEAD", "/v1/models", [None]),
    ("openai-model-head", "HEAD", "/v1/models/plain", [None]),
    ("ps", "GET", "/api/ps", [None]),
    ("ps-head", "HEAD", "/api/ps", [None]),
    ("health", "GET", "/health", [None]),
    ("health-head", "HEAD", "/health", [None]),
    ("metrics", "GET", "/metrics", [None]),
    ("metrics-head", "HEAD", "/metrics", [None]),
    ("user-keys", "DELETE", "/api/user/keys/abc", [None]),
    ("web-search", "POST", "/api/experimental/web_search", [{"query": "x"}]),
    ("web-fetch", "POST", "/api/experimental/web_fetch", [{"url": "x"}]),
    ("recommendations", "GET", "/api/experimental/model-recommendations", [None]),
    (
        "modelfile",
        "POST",
        "/api/modelfile",
        [{"modelfile": 'FROM plain\nSYSTEM "Be brief."\nPARAMETER top_k 5'}, {}],
    ),
    ("blob-head-bad-digest", "HEAD", "/api/blobs/sha256:0", [None]),
    ("blob-head-absent", "HEAD", "/api/blobs/sha256:" + "0" * 64, [None]),
    ("blob-stored", "POST", f"/api/blobs/{DIGEST_OF_X}", ["x", "x"]),
    ("blob-head-present", "HEAD", f"/api/blobs/{DIGEST_OF_X}", [None]),
    ("audio", "POST", "/v1/audio/transcriptions", ["x"]),
    ("openapi", "GET", "/openapi.json", [None]),
    # What llmd adds to them.
    ("disk", "GET", "/api/disk", [None]),
    ("prune", "POST", "/api/prune", [{"dry_run": True}]),
    ("verify", "POST", "/api/verify", [{"model": "plain"}, {"model": "x"}]),
    ("import", "POST", "/api/import", [{"path": "/nowhere/at/all"}, {"names": "x"}]),
    ("devices", "GET", "/api/devices", [None]),
    ("devices-head", "HEAD", "/api/devices", [None]),
    ("requests", "GET", "/api/requests", [None]),
    ("requests-head", "HEAD", "/api/requests", [None]),
    ("cancel", "POST", "/api/cancel", [{}, {"id": "none"}]),
    ("history", "GET", "/api/history", [None]),
    ("history-head", "HEAD", "/api/history", [None]),
    ("shutdown", "POST", "/api/shutdown", [None]),
    # The contract's table of errors, and the order of the checks: the first thing wrong decides.
    (
        "generate-errors",
        "POST",
        "/api/generate",
        [
            "",
            "{",
            {"model": "a b"},
            {"model": "plain", "prompt": "a", "raw": True, "system": "s"},
            {"model": "embedder", "prompt": "a"},
            {"model": "plain", "prompt": "a", "suffix": "b"},
            {"model": "plain", "prompt": "a", "images": ["AA=="]},
            {"model": "plain", "prompt": "a", "think": True},
            {"model": "plain", "prompt": "a", "think": "extreme"},
            {"model": "plain", "prompt": "a", "think": 3},
            {"model": "plain", "top_logprobs": 21},
            {"model": "plain", "keep_alive": "300"},
            {"model": "plain", "prompt": "a", "format": "yaml"},
            {"model": "plain", "prompt": "a", "options": {"stop": "x"}},
            {"model": "x:cloud", "prompt": "a"},
            {"model": "x:cloud:local"},
            {"model": 5},
            {"model": "a b", "top_logprobs": 21},
            {"model": "x", "raw": True, "system": "s"},
            {"model": "plain", "prompt": "a", "raw": True, "system": "s", "think": True},
            {"model": "embedder", "prompt": "a", "think": True, "options": {"top_k": "x"}},
            {"model": "embedder", "prompt": "a", "suffix": "s", "options": {"top_k": "x"}},
        ],
    ),
    (
        "chat-errors",
        "POST",
        "/api/chat",
        [
            "",
            {"model": "x", "messages": USER},
            {"model": "embedder", "messages": USER},
            {"model": "plain", "messages": [{"role": "user", "content": ["a"]}]},
            {"model": "plain", "messages": USER, "think": True},
            {"model": "plain", "messages": USER, "tools": [TOOL], "options": {"top_k": "x"}},
        ],
    ),
    (
        "embed-errors",
        "POST",
        "/api/embed",
        [
            "",
            {},
            {"model": "embedder", "input": ["a", 5]},
            {"model": "embedder", "input": "too long", "truncate": False},
        ],
    ),
    ("embeddings-errors", "POST", "/api/embeddings", ["", {"model": "x", "prompt": "a"}]),
    ("create-errors", "POST", "/api/create", ["", {"model": "a b", "from": "plain"}, BAD_FILE]),
    ("copy-errors", "POST", "/api/copy", ["", {"source": "a b", "destination": "c"}]),
    ("show-errors", "POST", "/api/show", ["", {"model": "a b"}]),
    ("pull-errors", "POST", "/api/pull", ["", {"model": "a b"}, {"model": "offline"}]),
    ("push-errors", "POST", "/api/push", ["", {"model": "x"}, {"model": "plain"}]),
    ("delete-errors", "DELETE", "/api/delete", ["", {}]),
    (
        "openai-chat-errors",
        "POST",
        "/v1/chat/completions",
        [
            "",
            {"messages": USER},
            {"model": "plain", "messages": [{"role": "user", "content": [HTTP_IMAGE]}]},
            {"model": "embedder", "messages": USER},
            {"model": "plain", "messages": USER, "tool_choice": "some"},
            {"model": "plain", "messages": USER, "reasoning_effort": "odd"},
            {"model": "plain", "messages": USER, "n": 0},
        ],
    ),
    ("openai-completions-errors", "POST", "/v1/completions", ["", {"model": "x", "prompt": "a"}]),
    ("openai-embeddings-errors", "POST", "/v1/embeddings", ["", {"model": "embedder"}]),
    ("responses-errors", "POST", "/v1/responses", ["", {"model": "x", "input": "a"}]),
    (
        "anthropic-errors",
        "POST",
        "/v1/messages",
        [
            "",
            {"max_tokens": 9, "messages": USER},
            {"model": "plain", "max_tokens": 0, "messages": USER},
            {"model": "plain", "max_tokens": 9},
        ],
    ),
]

# The same for headers: who may not ask at all, whatever the route.
REFUSALS: list[tuple[str, str, str, dict[str, str]]] = [
    ("host-native", "GET", "/api/tags", {"Host": "evil.com"}),
    ("host-openai", "GET", "/v1/models", {"Host": "evil.com"}),
    ("host-anthropic", "POST", "/v1/messages", {"Host": "evil.com"}),
    ("origin-native", "POST", "/api/chat", {"Origin": "https://evil.com"}),
    ("origin-openai", "POST", "/v1/chat/completions", {"Origin": "https://evil.com"}),
    ("origin-anthropic", "POST", "/v1/messages", {"Origin": "https://evil.com"}),
    ("origin-allowed", "GET", "/api/version", {"Origin": "http://localhost:3000"}),
    (
        "preflight",
        "OPTIONS",
        "/api/chat",
        {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"},
    ),
]
