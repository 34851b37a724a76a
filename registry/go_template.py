"""Prompt templates in Go's language, translated to Jinja, which is all that the worker speaks.

    text ──lex──▶ pieces (text, {{action}}) ──parse──▶ nodes ──write──▶ Jinja text

Literal text becomes string expressions, so that no whitespace rule of the Jinja environment can
touch it; Go's own trim markers are applied while lexing. Go variables live in one namespace object,
since an assignment inside a Jinja loop would otherwise be forgotten at its end.

Two kinds of templates:
  - those that use `.Messages` see all messages at once;
  - older ones are a macro over (.System, .Prompt, .Response), called once for each turn; in the
    last turn what follows `.Response` is left out, for the model writes it.

Raises BadRequest("template error: ...") where the text is no Go template, and Unsupported where it
is one with a part that has no translation; the model's own template is then used.

Source: text/template of the Go project; the variables as written down in issue 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import BadRequest, Unsupported

MAX_DEPTH = 60  # of nested blocks and parentheses; real templates have six

_ACTION = re.compile(r"\{\{(-\s)?(.*?)(\s-)?\}\}", re.DOTALL)
_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"(?:[^\"\\\n]|\\.)*\"|`[^`]*`)|(?P<number>-?\d+(?:\.\d+)?)"
    r"|(?P<chain>\$?(?:\.?[A-Za-z_]\w*)(?:\.[A-Za-z_]\w*)*|\$|\.)|(?P<mark>:=|[()|,=]))"
)
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_ROOT = {
    "Messages": "messages",
    "Tools": "(tools or [])",
    "System": "go_system",
    "Prompt": "go_prompt",
    "Response": "go_response",
    "Suffix": "''",
    "Think": "(enable_thinking|default(false))",
    "IsThinkSet": "(enable_thinking is defined)",
    "ThinkLevel": "(reasoning_effort|default(''))",
}
_SYSTEM = (
    "{% set go_system = messages|selectattr('role','equalto','system')"
    "|map(attribute='content')|join('\\n\\n') %}"
)
_TURNS = (
    "{% set t = namespace(s='', p='', r='') %}"
    "{% for m in messages %}"
    "{% if (m.role == 'system' and (t.p or t.r)) or (m.role == 'user' and t.r) %}"
    "{{ go_turn(t.s, t.p, t.r, false) }}"
    "{% set t.s = '' %}{% set t.p = '' %}{% set t.r = '' %}{% endif %}"
    "{% if m.role == 'system' %}{% set t.s = (t.s + '\\n\\n' if t.s else '') + m.content %}"
    "{% elif m.role == 'assistant' %}{% set t.r = (t.r + '\\n\\n' if t.r else '') + m.content %}"
    "{% else %}{% set t.p = (t.p + '\\n\\n' if t.p else '') + m.content %}{% endif %}"
    "{% endfor %}{{ go_turn(t.s, t.p, t.r, true) }}"
)


def to_jinja(text: str) -> str:
    """The Jinja template that renders what this Go template renders."""
    nodes, end = _Parser(_lex(text)).block(0)
    if end is not None:
        raise BadRequest(f"template error: unexpected {{{{{end}}}}}")
    writer = _Writer()
    if re.search(r"\.Messages\b", text):
        body = writer.write(nodes, "")
        return f"{{% set v = namespace() %}}{_SYSTEM}{body}"
    body = writer.write_turn(nodes)
    macro = "{% macro go_turn(go_system, go_prompt, go_response, is_last) %}"
    return f"{macro}{{% set v = namespace() %}}{body}{{% endmacro %}}{_TURNS}"


# ------------------------------------------------------------------ lexing


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Action:
    tokens: tuple[str, ...]

    @property
    def keyword(self) -> str:
        return self.tokens[0] if self.tokens else ""


def _lex(text: str) -> list[_Text | _Action]:
    pieces: list[_Text | _Action] = []
    position, trims_left = 0, False
    for match in _ACTION.finditer(text):
        literal = text[position : match.start()]
        literal = literal.lstrip() if trims_left else literal
        literal = literal.rstrip() if match[1] else literal
        position, trims_left = match.end(), bool(match[3])
        if literal:
            pieces.append(_Text(literal))
        content = match[2].strip()
        if not content.startswith("/*"):
            pieces.append(_Action(_tokens(content)))
    rest = text[position:]
    if "{{" in rest:
        raise BadRequest("template error: an action is not closed")
    rest = rest.lstrip() if trims_left else rest
    return [*pieces, _Text(rest)] if rest else pieces


def _tokens(content: str) -> tuple[str, ...]:
    tokens: list[str] = []
    position = 0
    while position < len(content):
        match = _TOKEN.match(content, position)
        if match is None:
            if not content[position:].strip():
                break
            raise BadRequest(f"template error: cannot read {content[position:][:40]!r}")
        token = match[match.lastgroup or 0]
        is_field = bool(tokens) and tokens[-1] == ")" and token.startswith(".")
        if is_field and not content[match.start()].isspace():
            token = "\0" + token  # a field of what stands in parentheses, not another argument
        tokens.append(token)
        position = match.end()
    return tuple(tokens)


# ------------------------------------------------------------------ parsing


@dataclass(slots=True)
class _Print:
    tokens: tuple[str, ...]


@dataclass(slots=True)
class _Assign:
    name: str
    tokens: tuple[str, ...]


@dataclass(slots=True)
class _Block:
    """if, with or range. `branches` are (condition, body); an else has no condition."""

    kind: str
    branches: list[tuple[tuple[str, ...], list[_Node]]] = field(default_factory=list)


@dataclass(slots=True)
class _Jump:
    kind: str  # break, continue


_Node = _Text | _Print | _Assign | _Block | _Jump


class _Parser:
    """Nodes out of pieces, by recursive descent."""

    def __init__(self, pieces: Sequence[_Text | _Action]) -> None:
        self._pieces = pieces
        self._at = 0

    def block(self, depth: int) -> tuple[list[_Node], str | None]:
        """Nodes up to an `end` or `else`, which is returned with its own words, or to the end."""
        if depth > MAX_DEPTH:
            raise BadRequest("template error: blocks are nested too deeply")
        nodes: list[_Node] = []
        while self._at < len(self._pieces):
            piece = self._pieces[self._at]
            self._at += 1
            if isinstance(piece, _Text):
                nodes.append(piece)
                continue
            keyword = piece.keyword
            if keyword in ("end", "else"):
                self._at -= 1
                return nodes, keyword
            nodes += self._node(piece, depth)
        return nodes, None

    def _node(self, action: _Action, depth: int) -> list[_Node]:
        match action.keyword:
            case "":
                raise BadRequest("template error: missing value for command")
            case "if" | "with" | "range":
                return [self._block_of(action, depth)]
            case "define" | "template" | "block":
                raise Unsupported(f"Go templates with {{{{{action.keyword}}}}} are not translated")
            case "break" | "continue":
                return [_Jump(action.keyword)]
        if len(action.tokens) > 1 and action.tokens[1] in (":=", "="):
            return [_Assign(action.tokens[0], action.tokens[2:])]
        return [_Print(action.tokens)]

    def _block_of(self, action: _Action, depth: int) -> _Block:
        block = _Block(action.keyword)
        condition = action.tokens[1:]
        if not condition:
            raise BadRequest(f"template error: missing value for {action.keyword}")
        while True:
            body, end = self.block(depth + 1)
            block.branches.append((condition, body))
            if end is None:
                raise BadRequest(f"template error: {{{{{action.keyword}}}}} has no end")
            closing = self._pieces[self._at]
            assert isinstance(closing, _Action)
            self._at += 1
            if end == "end":
                return block
            if not condition:
                raise BadRequest("template error: a second else")
            condition = closing.tokens[1:]
            if condition:
                if condition[0] != action.keyword or action.keyword == "range":
                    raise BadRequest(f"template error: unexpected else {condition[0]}")
                condition = condition[1:]
                if not condition:
                    raise BadRequest("template error: missing value for else if")


# ------------------------------------------------------------------ writing


class _Writer:
    """Jinja out of nodes. `dot` is the expression that Go's dot stands for; "" is the root."""

    def __init__(self) -> None:
        self._num_scopes = 0

    def write(self, nodes: Sequence[_Node], dot: str) -> str:
        return "".join(self._node(node, dot) for node in nodes)

    def write_turn(self, nodes: Sequence[_Node]) -> str:
        """The body of the macro of old templates: what follows `.Response` is for past turns."""
        for index, node in enumerate(nodes):
            if isinstance(node, _Print) and node.tokens == (".Response",):
                before, after = (
                    self.write(nodes[: index + 1], ""),
                    self.write(nodes[index + 1 :], ""),
                )
                return f"{before}{{% if not is_last %}}{after}{{% endif %}}"
        written = self.write(nodes, "")
        is_used = "go_response" in written
        return written if is_used else written + "{{ go_response }}"

    def _node(self, node: _Node, dot: str) -> str:
        match node:
            case _Text(text):
                return f"{{{{ {json.dumps(text)} }}}}"
            case _Print(tokens):
                value = _Expression(tokens, dot).whole()
                return f"{{% set v.out = {value} %}}" + (
                    "{{ v.out if v.out is string or v.out is number else "
                    "('' if v.out is undefined or v.out is none else v.out|tojson) }}"
                )
            case _Assign(name, tokens):
                return f"{{% set {_variable(name)} = {_Expression(tokens, dot).whole()} %}}"
            case _Jump(kind):
                return f"{{% {kind} %}}"
        return self._range(node, dot) if node.kind == "range" else self._if(node, dot)

    def _if(self, block: _Block, dot: str) -> str:
        """`if` and `with`; the latter moves the dot."""
        written, opened = "", 0
        for number, (condition, body) in enumerate(block.branches):
            if not condition:
                written += "{% else %}" + self.write(body, dot)
                continue
            written += "{% else %}" if number else ""
            inner, name = dot, None
            if len(condition) > 2 and condition[1] == ":=":
                name, condition = condition[0], condition[2:]
            test = _Expression(condition, dot).whole()
            if block.kind == "with" or name:
                scope = _variable(name) if name else f"v.{self._scope()}"
                written += f"{{% set {scope} = {test} %}}"
                test, inner = scope, scope if block.kind == "with" else dot
            written += f"{{% if {test} %}}" + self.write(body, inner)
            opened += 1
        return written + "{% endif %}" * opened

    def _range(self, block: _Block, dot: str) -> str:
        tokens, body = block.branches[0]
        names: tuple[str, ...] = ()
        if ":=" in tokens:
            split = tokens.index(":=")
            names = tuple(token for token in tokens[:split] if token != ",")
            tokens = tokens[split + 1 :]
        item = self._scope()
        items = _Expression(tokens, dot).whole()
        written = f"{{% for {item} in ({items} or []) %}}"
        if len(names) > 1:
            written += f"{{% set {_variable(names[0])} = loop.index0 %}}"
        if names:
            written += f"{{% set {_variable(names[-1])} = {item} %}}"
        written += self.write(body, item)
        if len(block.branches) > 1:
            written += "{% else %}" + self.write(block.branches[1][1], dot)
        return written + "{% endfor %}"

    def _scope(self) -> str:
        self._num_scopes += 1
        return f"d{self._num_scopes}"


class _Expression:
    """One pipeline: commands joined by |, each a word with its arguments."""

    def __init__(self, tokens: Sequence[str], dot: str) -> None:
        self._tokens = tokens
        self._dot = dot
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        value = self._pipeline()
        if self._at < len(self._tokens):
            raise BadRequest(f"template error: unexpected {self._tokens[self._at]!r}")
        return value

    def _pipeline(self) -> str:
        value = self._command(())
        while self._peek() == "|":
            self._at += 1
            value = self._command((value,))
        return value

    def _command(self, piped: tuple[str, ...]) -> str:
        word = self._peek()
        if word is None or word in ("|", ")"):
            raise BadRequest("template error: missing value for command")
        is_function = re.fullmatch(r"[A-Za-z_]\w*", word) and word not in ("true", "false", "nil")
        if not is_function:
            value = self._operand()
            if piped or self._peek() not in (None, "|", ")"):
                raise BadRequest(f"template error: {word!r} takes no arguments")
            return value
        self._at += 1
        arguments = []
        while self._peek() not in (None, "|", ")"):
            arguments.append(self._operand())
        return _call(word, [*arguments, *piped])

    def _operand(self) -> str:
        token = self._peek()
        assert token is not None, "the caller has looked"
        self._at += 1
        if token == "(":
            value = self._parenthesis()
        elif token[0] in '"`':
            value = _string(token)
        elif token[0].isdigit() or token[0] == "-":
            value = token
        elif token in ("true", "false", "nil"):
            value = {"nil": "none"}.get(token, token)
        elif token[0] in ".$":
            value = self._chain(token)
        else:
            value = _call(token, [])
        while (following := self._peek()) is not None and following.startswith("\0"):
            self._at += 1
            value = _fields(f"({value})", following[2:].split("."))
        return value

    def _parenthesis(self) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise BadRequest("template error: parentheses are nested too deeply")
        value = self._pipeline()
        if self._peek() != ")":
            raise BadRequest("template error: a parenthesis is not closed")
        self._at += 1
        self._depth -= 1
        return f"({value})"

    def _chain(self, token: str) -> str:
        head, *fields = token.split(".")
        if head in ("", "$"):
            if head == "" and self._dot:
                return _fields(self._dot, [name for name in fields if name])
            names = [name for name in fields if name]
            if not names:
                raise Unsupported("Go templates that print all of their data are not translated")
            if names[0] not in _ROOT:
                raise Unsupported(f"the template variable .{names[0]} is not known")
            return _fields(_ROOT[names[0]], names[1:])
        return _fields(_variable(head), fields)

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None


def _call(name: str, arguments: list[str]) -> str:
    match name, arguments:
        case ("eq", [first, *others]) if others:
            return "(" + " or ".join(f"{first} == {other}" for other in others) + ")"
        case (("ne" | "lt" | "le" | "gt" | "ge"), [left, right]):
            return f"({left} {_COMPARE[name]} {right})"
        case (("and" | "or"), [_, *_]):
            return "(" + f" {name} ".join(arguments) + ")"
        case ("not", [value]):
            return f"(not {value})"
        case ("len", [value]):
            return f"({value} or [])|length"
        case ("index", [value, *keys]) if keys:
            return value + "".join(f"[{key}]" for key in keys)
        case ("slice", [value]):
            return value
        case ("slice", [value, start]):
            return f"{value}[{start}:]"
        case ("slice", [value, start, end]):
            return f"{value}[{start}:{end}]"
        case ("json", [value]):
            return f"({value})|tojson"
        case ("print", values):
            return " ~ ".join(values) if values else "''"
        case ("currentDate", []):
            return "strftime_now('%Y-%m-%d')"
        case ("printf", [form, *values]):
            plain = form.replace("%v", "%s").replace("%q", '\\"%s\\"')
            return f"({plain}|format({', '.join(values)}))"
    raise Unsupported(f"the template function {name} with {len(arguments)} arguments is not known")


def _fields(value: str, names: Sequence[str]) -> str:
    for name in names:
        if name == "ToolName":
            value = f"({value}.tool_name or {value}.name)"
        else:
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            value = f"{value}[{snake!r}]"
    return value


def _variable(name: str) -> str:
    if not re.fullmatch(r"\$[A-Za-z_]\w*", name):
        raise BadRequest(f"template error: {name!r} is no variable")
    return f"v.go_{name[1:]}"


def _string(token: str) -> str:
    if token.startswith("`"):
        return json.dumps(token[1:-1])
    try:
        return json.dumps(json.loads(token))
    except ValueError:
        raise BadRequest(f"template error: bad string {token[:40]}") from None
