"""The ways in which models spell a tool call, each as a function from text to calls.

Every function takes the text between a call's opening and closing marks, and the tools on offer by
name. It returns the calls, or None if the text is not one; it never raises, whatever a model wrote.
Where values come without types, the tool's JSON schema decides what they are.

Repairs are those that cannot change a meaning: trailing commas, one list around one call, arguments
given as JSON text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .pieces import ToolCall

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the arguments
Calls = list[ToolCall] | None

_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_NAME_KEYS = ("name", "tool_name", "function")
_MAX_BITS = 63  # what every JSON reader takes for an integer


class _NotPlain(ValueError):
    """A value that JSON has no word for."""


def json_calls(body: str, tools: Tools) -> Calls:
    """{"name": ..., "arguments": {...}}, or a list of such, or several in a row."""
    values = _json_values(body)
    if not values:
        return None
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return _all_or_none(_call_of(item) for item in items)


def tagged_calls(body: str, tools: Tools) -> Calls:
    """What stands between <tool_call> tags: JSON, <function=...>, or a name and <arg_key>s."""
    inner = body.strip()
    if inner.startswith(("{", "[")):
        return json_calls(inner, tools)
    if "<function=" in inner:
        return function_tag_calls(inner, tools)
    return arg_key_calls(inner, tools)


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.S)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.S
)


def function_tag_calls(body: str, tools: Tools) -> Calls:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>, or an object in it."""
    calls: list[ToolCall | None] = []
    for function in _FUNCTION.finditer(body):
        name = function[1].strip().strip("\"'")
        if function[2].lstrip().startswith("{"):
            calls.extend(_named_json(name, function[2]) or [None])
            continue
        pairs = [(p[1].strip(), _untrimmed(p[2])) for p in _PARAMETER.finditer(function[2])]
        calls.append(_typed_call(name, pairs, tools))
    return _all_or_none(calls)


def function_body_calls(body: str, tools: Tools) -> Calls:
    """The same without its first word, which opened the call."""
    return function_tag_calls("<function=" + body, tools)


_ARG_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)


def arg_key_calls(body: str, tools: Tools) -> Calls:
    """NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"""
    name = body.partition("<arg_key>")[0].strip()
    if not re.fullmatch(r"[\w.:/-]+", name):
        return None
    pairs = [(pair[1].strip(), pair[2]) for pair in _ARG_PAIR.finditer(body)]
    if not pairs and name not in tools:
        return None  # one word without arguments may be anything
    return _all_or_none([_typed_call(name, pairs, tools)])


_INVOKE_NAME = re.compile(r"\s*name=[\"']?([^\"'>]+)[\"']?[^>]*>", re.S)
_INVOKE_PARAMETER = re.compile(
    r"<[^<>/\s]*param(?:eter)?\s+name=[\"']?([^\"'>]+?)[\"']?(?:\s+string=\"(true|false)\")?\s*>"
    r"(.*?)</[^<>\s]*param(?:eter)?>",
    re.S,
)


def invoke_calls(body: str, tools: Tools) -> Calls:
    """name="NAME"> and <parameter name="KEY">VALUE</parameter>s, as after `<invoke`."""
    head = _INVOKE_NAME.match(body)
    if head is None:
        return None
    name, schema = head[1].strip(), tools.get(head[1].strip(), {})
    arguments: dict[str, Any] = {}
    for key, is_string, value in _INVOKE_PARAMETER.findall(body):
        if is_string == "true":
            arguments[key] = value
        elif is_string == "false":
            arguments[key] = _json_or_text(value)
        else:
            arguments[key] = coerced(_untrimmed(value), _property(schema, key))
    return _all_or_none([_checked_call(name, arguments)])


def keyed_calls(body: str, tools: Tools) -> Calls:
    """[{NAME: {...}}]: the name is the key."""
    values = _json_values(body)
    items = values[0] if values and len(values) == 1 and isinstance(values[0], list) else values
    pairs = [item for item in items or [] if isinstance(item, dict)]
    if not pairs or len(pairs) != len(items or []):
        return None
    return _all_or_none([_checked_call(name, pair[name]) for pair in pairs for name in pair])


_MISTRAL_NAME = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")


def mistral_calls(body: str, tools: Tools) -> Calls:
    """[{"name": ..., "arguments": ...}], or NAME[ARGS]{...} with or without [CALL_ID]."""
    head = _MISTRAL_NAME.match(body)
    if head is None:
        return json_calls(body, tools)
    return _named_json(head[1], body[head.end() :])


def mistral_start(body: str) -> int | None:
    """Where the bracketed part begins; None while that is unknown."""
    blank = len(body) - len(body.lstrip())
    if body[blank : blank + 1] in ("[", "{"):
        return blank
    brace = body.find("{")
    return None if brace < 0 else brace


def deepseek_calls(body: str, tools: Tools) -> Calls:
    """NAME<sep>{...}, or function<sep>NAME and the arguments in a fenced block."""
    left, sep, right = body.partition("<｜tool▁sep｜>")
    if not sep:
        return None
    if left.strip() == "function":
        name, _, right = right.lstrip().partition("\n")
        right = right.strip().removeprefix("```json").removesuffix("```")
    else:
        name = left
    return _named_json(name.strip(), right)


_KIMI_INDEX = re.compile(r":\d+$")


def kimi_calls(body: str, tools: Tools) -> Calls:
    """functions.NAME:0<|tool_call_argument_begin|>{...}"""
    name, sep, arguments = body.partition("<|tool_call_argument_begin|>")
    if not sep:
        return None
    return _named_json(_KIMI_INDEX.sub("", name.strip()).removeprefix("functions."), arguments)


def pythonic_calls(body: str, tools: Tools) -> Calls:
    """[f(a=1), g()], or the calls one a line."""
    text = body.strip()
    if not text.startswith("["):
        text = "[" + ",".join(line for line in text.splitlines() if line.strip()) + "]"
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return _all_or_none(_python_call(node) for node in tree.elts)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def bare_calls(body: str, tools: Tools) -> Calls:
    """JSON or Python calls without marks around them; only tools on offer count."""
    is_python = re.match(r"\s*\[\s*[A-Za-z_]", body) is not None
    calls = pythonic_calls(body, tools) if is_python else json_calls(body, tools)
    return calls if calls and all(call.name in tools for call in calls) else None


_FIRST_KEY = re.compile(r"\s*\[?\s*\{\s*\"((?:[^\"\\]|\\.)*)\"\s*:")
_BEFORE_KEY = re.compile(r"\s*\[?\s*(?:\{\s*(?:\"(?:[^\"\\]|\\.)*(?:\"\s*)?)?)?")
_FIRST_NAME = re.compile(r"\s*\[\s*([A-Za-z_][\w.]*)(\(?)")


def may_be_bare_call(body: str, tools: Tools) -> bool:
    """Whether more text could still make it one: a JSON answer is let go at its first key."""
    key = _FIRST_KEY.match(body)
    if key is not None:
        return key[1] in (*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id")
    if _BEFORE_KEY.fullmatch(body) is not None:
        return True
    name = _FIRST_NAME.match(body)
    if name is None:
        return False
    if name[2]:
        return name[1] in tools
    return name.end() == len(body) and any(tool.startswith(name[1]) for tool in tools)


_GEMMA_CALL = re.compile(r"\s*call:([\w.:/-]+?)\s*(\{.*)\Z", re.S)


def gemma_calls(body: str, tools: Tools) -> Calls:
    """call:NAME{key:<|"|>text<|"|>,n:1} (or <escape> for the quotes)."""
    head = _GEMMA_CALL.match(body)
    if head is None:
        return None
    reader = _GemmaReader(head[2])
    try:
        arguments = reader.value()
    except (ValueError, IndexError, RecursionError):
        return None
    if reader.rest().strip() or not isinstance(arguments, dict):
        return None
    return _all_or_none([_checked_call(head[1], arguments)])


def coerced(text: str, schema: Mapping[str, Any]) -> Any:
    """An untyped value as its schema has it; text that does not fit stays text."""
    types = _types(schema)
    if text.strip() == "null" and (not types or "null" in types or "string" not in types):
        return None
    if not types or types <= {"string", "null"}:
        return text
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        value = _plain(_literal(word))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)
    return value if _json_type(value) & types else text


class Brackets:
    """Finds where a bracketed text ends, fed in pieces. Quotes of both kinds are respected."""

    __slots__ = ("_depth", "_escaped", "_quote")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def in_string(self) -> bool:
        return bool(self._quote)

    def feed(self, text: str) -> int | None:
        """The index just after the closing bracket, if it is in this text."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                if character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "{[(":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


# --------------------------------------------------------------------------- from values to calls


def _call_of(item: Any) -> ToolCall | None:
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict):
        return None
    name = next((item[key] for key in _NAME_KEYS if isinstance(item.get(key), str)), None)
    arguments: Any = next((item[key] for key in _ARGUMENT_KEYS if key in item), None)
    return None if name is None else _checked_call(name, arguments)


def _named_json(name: str, text: str) -> Calls:
    values = _json_values(text)
    if values is None or len(values) > 1:
        return None
    return _all_or_none([_checked_call(name, values[0] if values else {})])


def _typed_call(name: str, pairs: list[tuple[str, str]], tools: Tools) -> ToolCall | None:
    schema = tools.get(name, {})
    return _checked_call(name, {key: coerced(text, _property(schema, key)) for key, text in pairs})


def _checked_call(name: str, arguments: Any) -> ToolCall | None:
    if isinstance(arguments, str):
        values = _json_values(arguments)
        arguments = values[0] if values else ({} if not arguments.strip() else None)
    if arguments is None:
        arguments = {}
    if isinstance(arguments, list) and len(arguments) == 1:
        arguments = arguments[0]
    if not name.strip() or not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(str(_plain(name.strip())), _plain(arguments))
    except _NotPlain:
        return None


def _all_or_none(calls: Iterator[ToolCall | None] | list[ToolCall | None]) -> Calls:
    found = list(calls)
    complete = [call for call in found if call is not None]
    return complete if complete and len(complete) == len(found) else None


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    if any(keyword.arg is None for keyword in node.keywords):
        return None
    name = ast.unparse(node.func)
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
    return _checked_call(name, arguments)


def _python_value(node: ast.expr) -> Any:
    """A literal; the words of JSON count as well. Raises ValueError for all else."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_python_value(key) for key in node.keys if key is not None]
        return {str(k): _python_value(v) for k, v in zip(keys, node.values, strict=True)}
    return ast.literal_eval(node)


# --------------------------------------------------------------------------- values


_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(\s*[}\]])', re.S)


def _json_values(text: str) -> list[Any] | None:
    """The JSON values that stand in a row, apart by space, `,` or `;`. None: not JSON alone."""
    found = _values_in_row(text)
    if found is None and re.search(r",\s*[}\]]", text):
        found = _values_in_row(_TRAILING_COMMA.sub(lambda m: m[1] or m[2], text))
    return found


def _values_in_row(text: str) -> list[Any] | None:
    decoder = json.JSONDecoder(strict=False)
    values: list[Any] = []
    position = 0
    while True:
        while position < len(text) and (text[position].isspace() or text[position] in ",;"):
            position += 1
        if position == len(text):
            return values
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values.append(value)


def _json_or_text(text: str) -> Any:
    values = _json_values(text)
    return values[0] if values and len(values) == 1 else text


def _plain(value: Any) -> Any:
    """The value if JSON can carry it. Raises _NotPlain."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # a lone surrogate is no text
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else _as_float(value)
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise _NotPlain(str(value))
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(str(key))): _plain(item) for key, item in value.items()}
    raise _NotPlain(type(value).__name__)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise _NotPlain("an integer beyond all floats") from error


def _literal(text: str) -> Any:
    """JSON, or what Python prints for such a value: some templates write that."""
    try:
        return json.loads(text)
    except ValueError:
        if text[:1] not in ("{", "["):
            raise
    return ast.literal_eval(text)


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    stated = schema.get("type")
    types = {stated} if isinstance(stated, str) else set()
    if isinstance(stated, list):
        types = {item for item in stated if isinstance(item, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, Mapping):
                types |= _types(option)
    options = schema.get("enum")
    if not types and isinstance(options, list):
        types = {name for option in options for name in _json_type(option)}
    return types


def _json_type(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _untrimmed(value: str) -> str:
    """The one line break that templates put on each side of a value is not part of it."""
    return value.removeprefix("\n").removesuffix("\n")


class _GemmaReader:
    """Values as Gemma spells them: bare keys, and quotes that are tokens of their own."""

    _QUOTES = ('<|"|>', "<escape>", '"')
    _BARE = re.compile(r"[^,{}\[\]]+")
    _KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :]

    def value(self) -> Any:
        """The next value. Raises ValueError or IndexError where there is none."""
        self._skip_space()
        if self._text[self._at] == "{":
            return self._object()
        if self._text[self._at] == "[":
            return self._list()
        for quote in self._QUOTES:
            if self._text.startswith(quote, self._at):
                return self._quoted(quote)
        word = self._BARE.match(self._text, self._at)
        if word is None:
            raise ValueError("a value is missing")
        self._at = word.end()
        return _json_or_text(word[0].strip())

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._closes("}"):
            key = self._key()
            found[key] = self.value()
        return found

    def _list(self) -> list[Any]:
        found = []
        while not self._closes("]"):
            found.append(self.value())
        return found

    def _closes(self, bracket: str) -> bool:
        """Step over the opening bracket or a comma; true if the closing one came instead."""
        self._skip_space()
        if self._text[self._at] == bracket:
            self._at += 1
            return True
        if self._text[self._at] not in ",{[":
            raise ValueError("a comma is missing")
        self._at += 1
        self._skip_space()
        if self._text[self._at] != bracket:
            return False
        self._at += 1
        return True

    def _key(self) -> str:
        for quote in self._QUOTES:
            if self._text.startswith(quote, self._at):
                key = self._quoted(quote)
                self._skip_space()
                if self._text[self._at] != ":":
                    raise ValueError("a colon is missing")
                self._at += 1
                return key
        found = self._KEY.match(self._text, self._at)
        if found is None:
            raise ValueError("a key is missing")
        self._at = found.end()
        return found[1]

    def _quoted(self, quote: str) -> str:
        start = self._at + len(quote)
        end = self._text.index(quote, start)
        self._at = end + len(quote)
        return self._text[start:end]

    def _skip_space(self) -> None:
        while self._text[self._at].isspace():
            self._at += 1
