"""Messages as templates expect them: plain, complete, and in milder forms where one refuses.

Clients differ: arguments come as an object or as JSON text, tools with and without their wrapper,
text as a string or in parts, reasoning under three names. Templates differ too, and mostly fail on
what their author's client did not send. So every message is brought to the one form that nearly all
templates take.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Cleaned = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_SYSTEM_ROLES = ("system", "developer")
_SHORT_ID_LENGTH = 9  # what Mistral's templates demand of a tool call's id


def clean(messages: Sequence[Mapping[str, Any]], template_source: str) -> list[Cleaned]:
    """New messages; the given ones are not touched."""
    knows_developer = "developer" in template_source
    wants_short_ids = "length 9" in template_source or "length == 9" in template_source
    names: dict[str, str] = {}  # of the tools called, by the call's id
    unanswered: list[str] = []
    cleaned = []
    for number, message in enumerate(messages):
        result = {key: value for key, value in _plain(message).items() if value is not None}
        role = str(result.get("role", "user"))
        result["role"] = "system" if role == "developer" and not knows_developer else role
        result["content"] = _flat(result.get("content", ""))
        _spread_reasoning(result)
        if result.get("tool_calls"):
            result["tool_calls"] = [
                _clean_call(call, f"{number:04d}{index:05d}", wants_short_ids)
                for index, call in enumerate(_dicts(result["tool_calls"]))
            ]
            names.update((call["id"], call["function"]["name"]) for call in result["tool_calls"])
            unanswered = [call["id"] for call in result["tool_calls"]]
        else:
            result.pop("tool_calls", None)
        if role == "tool":
            _complete_result(result, names, unanswered, wants_short_ids)
        cleaned.append(result)
    return cleaned


def clean_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Cleaned]:
    """Each wrapped as a "function", with a description and parameters."""
    cleaned = []
    for tool in tools or ():
        plain = _plain(tool)
        if "function" not in plain and "name" in plain:
            plain = {"type": "function", "function": plain}
        plain.setdefault("type", "function")
        function = plain.get("function")
        if isinstance(function, dict):
            function = {key: value for key, value in function.items() if value is not None}
            function.setdefault("description", "")
            function.setdefault("parameters", {"type": "object", "properties": {}})
            plain["function"] = function
        cleaned.append(plain)
    return cleaned


def forms(messages: Sequence[Cleaned]) -> Iterator[list[Cleaned]]:
    """The conversation as it is, then with what templates most often refuse put right.

    Some take one system message, first; some none at all; some only roles that take turns.
    """
    original = list(messages)
    yield original
    seen = [original]
    one_system = _system_first(original)
    no_system = _system_in_user(one_system)
    for form in (one_system, no_system, _taking_turns(one_system), _taking_turns(no_system)):
        if form not in seen:
            seen.append(form)
            yield form


def with_text_parts(message: Mapping[str, Any]) -> Cleaned:
    """The message with its text as a list of one part."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    return dict(message)


def _system_first(messages: Sequence[Cleaned]) -> list[Cleaned]:
    system = [message for message in messages if message["role"] in _SYSTEM_ROLES]
    others = [message for message in messages if message["role"] not in _SYSTEM_ROLES]
    if not system:
        return others
    text = "\n\n".join(_text_of(message["content"]) for message in system)
    return [{**system[0], "content": text}, *others]


def _system_in_user(messages: Sequence[Cleaned]) -> list[Cleaned]:
    """`messages` as `_system_first` leaves them."""
    if not messages or messages[0]["role"] not in _SYSTEM_ROLES:
        return list(messages)
    system, rest = messages[0], list(messages[1:])
    first_user = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if first_user is None:
        return [{**system, "role": "user"}, *rest]
    rest[first_user] = _joined(system, rest[first_user], "user")
    return rest


def _taking_turns(messages: Sequence[Cleaned]) -> list[Cleaned]:
    turns: list[Cleaned] = []
    for message in messages:
        last = turns[-1] if turns else None
        is_plain = "tool_calls" not in message and message["role"] in ("user", "assistant")
        if last and is_plain and last["role"] == message["role"] and "tool_calls" not in last:
            turns[-1] = _joined(last, message, message["role"])
        else:
            turns.append(message)
    return turns


def _joined(first: Cleaned, second: Cleaned, role: str) -> Cleaned:
    texts = [_text_of(message["content"]) for message in (first, second)]
    if isinstance(second["content"], list):
        content: Any = [{"type": "text", "text": texts[0]}, *second["content"]]
    else:
        content = "\n\n".join(text for text in texts if text)
    return {**second, "role": role, "content": content}


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(
        str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part
    )


def _flat(content: Any) -> Any:
    """Parts that are all text become one string; others (images) stay parts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    texts = [
        part if isinstance(part, str) else part.get("text")
        for part in content
        if isinstance(part, str | dict)
    ]
    all_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "\n".join(map(str, texts)) if all_text else content


def _spread_reasoning(message: Cleaned) -> None:
    reasoning = next((message[n] for n in _REASONING_NAMES if message.get(n)), None)
    for name in _REASONING_NAMES:
        if reasoning is None:
            message.pop(name, None)
        else:
            message[name] = reasoning


def _clean_call(call: Mapping[str, Any], fallback_id: str, wants_short_id: bool) -> Cleaned:
    function = dict(
        call.get("function") or {k: call[k] for k in ("name", "arguments") if k in call}
    )
    function["name"] = str(function.get("name", ""))
    function["arguments"] = _as_object(function.get("arguments"))
    call_id = str(call.get("id") or fallback_id)
    if wants_short_id:
        call_id = _short_id(call_id)
    return {**call, "id": call_id, "type": "function", "function": function}


def _complete_result(
    message: Cleaned, names: Mapping[str, str], unanswered: list[str], wants_short_id: bool
) -> None:
    """A result names the call that it answers and the tool; what is missing is taken in order."""
    name = message.get("tool_name") or message.get("name")
    call_id = message.get("tool_call_id")
    if call_id is not None:
        call_id = _short_id(str(call_id)) if wants_short_id else str(call_id)
    else:
        call_id = next((i for i in unanswered if name in (None, names.get(i))), None)
    if call_id in unanswered:
        unanswered.remove(call_id)
    if call_id is not None:
        message["tool_call_id"] = call_id
        name = name or names.get(call_id)
    if name is not None:
        message["name"] = message["tool_name"] = name


def _short_id(call_id: str) -> str:
    """The id itself if it is short and plain, else nine characters that stand for it."""
    if len(call_id) == _SHORT_ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID_LENGTH]


def _as_object(arguments: Any) -> Any:
    """Arguments as the object that templates want; what is no JSON object stays as it came."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _dicts(values: Any) -> list[Mapping[str, Any]]:
    return [v for v in values if isinstance(v, Mapping)] if isinstance(values, list | tuple) else []


def _plain(value: Any) -> Any:
    """Plain JSON values only, copied: a template must not reach live objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
