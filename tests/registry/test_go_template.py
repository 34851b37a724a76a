"""Go prompt templates render the same after their translation to Jinja."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmd.registry.errors import BadRequest, Unsupported
from llmd.registry.go_template import to_jinja


def render(text: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """As the worker renders: block trimming on, loop controls loaded."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.from_string(to_jinja(text)).render(messages=messages, **kwargs)


def chat(*pairs: str) -> list[dict[str, Any]]:
    """ "u:hello" -> a user's message."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


CHATML_OLD = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
)
CHATML_NEW = """{{- if .Messages }}
{{- if or .System .Tools }}<|im_start|>system
{{ .System }}
{{- if .Tools }}

# Tools
{{- range .Tools }}
{"type": "function", "function": {{ .Function }}}
{{- end }}
{{- end }}<|im_end|>
{{ end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "user" }}<|im_start|>user
{{ .Content }}<|im_end|>
{{ else if eq .Role "assistant" }}<|im_start|>assistant
{{ if .Content }}{{ .Content }}
{{- else if .ToolCalls }}<tool_call>
{{ range .ToolCalls }}{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}
{{ end }}</tool_call>
{{- end }}{{ if not $last }}<|im_end|>
{{ end }}
{{- else if eq .Role "tool" }}<|im_start|>user
<tool_response>
{{ .Content }}
</tool_response><|im_end|>
{{ end }}
{{- if and (ne .Role "assistant") $last }}<|im_start|>assistant
{{ end }}
{{- end }}
{{- end }}"""


def test_an_old_template_is_rendered_turn_by_turn_and_open_at_the_end() -> None:
    assert render(CHATML_OLD, chat("s:Be.", "u:Hi", "a:Yo", "u:Bye")) == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(CHATML_OLD, chat("u:Hi", "a:I am")).endswith("<|im_start|>assistant\nI am")
    assert render("{{ .System }}|{{ .Prompt }}>", chat("u:Hi", "a:x", "u:y")) == "|Hi>x|y>"


def test_a_template_over_messages_is_rendered_at_once() -> None:
    assert render(CHATML_NEW, chat("s:Be.", "u:Hi", "a:Yo", "u:Bye")) == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_and_calls_print_as_json() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [*chat("u:go"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = render(CHATML_NEW, [*messages, *chat("t:42")], tools=tools)
    assert '{"type": "function", "function": {"name": "f", "parameters": {}}}' in text
    assert '{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ range .Messages }}a{{- /* comment */ -}}  b {{ end }}", "ab ab "),
        ("x  {{- range .Messages -}}  y  {{- end -}}  z", "xyyz"),
        ("{{ range $m := .Messages }}{{ $m.Role }};{{ end }}", "user;assistant;"),
        ('{{ $n := "0" }}{{ range .Messages }}{{ $n = .Content }}{{ end }}{{ $n }}', "two"),
        ("{{ with .Messages }}{{ len . }}{{ end }}", "2"),
        ("{{ with .Tools }}{{ .Messages }}{{ else }}none{{ end }}", "none"),
        ("{{ (index .Messages 0).Content }}{{ len .Messages }}", "one2"),
        ('{{ if (eq (index .Messages 1).Role "user" "assistant") }}yes{{ end }}', "yes"),
        ("{{ range .Tools }}x{{ else }}no tools{{ end }}{{ len .Messages }}", "no tools2"),
        ("{{ range .Messages }}{{ .Content }}{{ break }}{{ end }}", "one"),
        ('{{ printf "%s-%d" (index .Messages 0).Role 3 }}', "user-3"),
        ("{{ .Messages | len }}{{ `raw\\n` }}", "2raw\\n"),
        ('{{ "a\\n{%b%}" }}{% c %}{{ len .Messages }}{# d #}', "a\n{%b%}{% c %}2{# d #}"),
        ("{{ if not .IsThinkSet }}unset{{ end }}{{ len .Messages }}", "unset2"),
    ],
)
def test_the_parts_of_the_language(text: str, expected: str) -> None:
    assert render(text, chat("u:one", "a:two")) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("{{ if .System }}", "{{ end }}", "{{ .System", "{{ }}", "{{ if }}x{{ end }}"),
        *(
            "{{ else }}",
            "{{ (.System }}",
            "{{ .System ) }}",
            '{{ "a\\qb" }}',
            "{{ .System .Prompt }}",
        ),
        *("{{ & }}", "{{ x := 3 }}", "{{ range .Messages }}{{ else if .X }}{{ end }}"),
        "{{ if .System }}" * 100 + "{{ end }}" * 100,
        "{{ " + "(" * 100 + ".System" + ")" * 100 + " }}",
    ],
)
def test_what_is_no_template_is_an_error_that_begins_as_clients_expect(text: str) -> None:
    with pytest.raises(BadRequest, match=r"^template error: "):
        to_jinja(text)


@pytest.mark.parametrize(
    "text", ['{{ template "x" }}', "{{ .Secret }}", "{{ frobnicate .System }}", "{{ . }}"]
)
def test_what_has_no_translation_says_so(text: str) -> None:
    with pytest.raises(Unsupported):
        to_jinja(text)


def test_mutated_templates_raise_nothing_but_the_documented_errors() -> None:
    rng = random.Random(4)
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    translated = 0
    for _ in range(500):
        text = list(rng.choice([CHATML_OLD, CHATML_NEW]))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 4)] = rng.choice(
                ["", "{{", "}}", ".", "$", '"', " | ", "("]
            )
        try:
            environment.parse(to_jinja("".join(text)))
            translated += 1
        except (BadRequest, Unsupported):
            continue
    assert 25 < translated < 475
