"""A worker process that does as a well-behaved model would, so that clients can be judged.

    tools on offer, a user speaks last   one call, its arguments made from the schema
    a format is asked for                the smallest value that fits the schema
    anything else                        a sentence; stop strings and limits hold

Numbers that the user names are the numbers in the arguments.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmd.backend.protocol import Generate, Started

from ..daemon.scripted_worker import ScriptedWorker, send

JOKE = {"setup": "Why?", "punchline": "Because."}  # what LangChain asks for without a schema
SENTENCE = "Hello! I am a model that answers every question with these very words. Goodbye."


class ObligingWorker(ScriptedWorker):
    async def answer(self, request: Generate) -> None:
        messages = request.messages or []
        prompt_ids = list(range(1, 12 + len(messages)))
        send(Started(request.id, prompt_ids, 7, 100, 2048))
        await self.play(request, deltas_of(request, messages), len(prompt_ids))


def deltas_of(request: Generate, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    last = messages[-1] if messages else {"role": "user", "content": request.prompt or ""}
    said = str(last.get("content", ""))
    if request.tools and (last["role"] == "user" or request.must_call):
        function = request.tools[0]["function"]
        arguments = value_of(function.get("parameters") or {"type": "object"}, said, {})
        call = {"id": f"call_{request.id:0>8}", "name": function["name"], "arguments": arguments}
        return [{"tool_calls": [call]}]
    if request.format is not None:
        schema: dict[str, Any] = {} if request.format == "json" else request.format
        value = value_of(schema, said, schema.get("$defs", {})) or JOKE
        return pieces(json.dumps(value), [], None)
    return pieces(SENTENCE, request.stop, request.max_tokens)


def pieces(text: str, stop: Sequence[str], max_tokens: int | None) -> list[dict[str, Any]]:
    """The text in words, up to a stop string or the limit."""
    ends = [text.find(one) for one in stop if one in text]
    words = re.findall(r"\s*\S+", text[: min(ends, default=len(text))])
    is_cut = max_tokens is not None and len(words) > max_tokens
    found: list[dict[str, Any]] = [{"text": word} for word in words[:max_tokens]]
    return [*found, {"finished": {"reason": "length"}}] if is_cut else found


def value_of(schema: Mapping[str, Any], said: str, definitions: Mapping[str, Any]) -> Any:
    """A value that fits, with every property that there is."""
    if "$ref" in schema:
        return value_of(definitions[schema["$ref"].rpartition("/")[2]], said, definitions)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return value_of(schema[key][0], said, definitions)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    definitions = schema.get("$defs", definitions)
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: value_of(part, said, definitions) for name, part in properties.items()}
    if kind == "array":
        return [value_of(schema.get("items", {"type": "string"}), said, definitions)]
    numbers = re.findall(r"-?\d+", said)
    foreign = re.findall(r"[^\x00-\x7f]+", said)
    number = int(numbers[0]) if numbers else 1
    return {"integer": number, "number": float(number), "boolean": True, "null": None}.get(
        kind, foreign[0] if foreign else "cats"
    )


if __name__ == "__main__":
    asyncio.run(ObligingWorker().serve())
