"""Sizes, times, tables, word wrap, addresses: everything pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from llmd.cli import tables, units
from llmd.cli.address import Address, parse_address, read_address
from llmd.cli.answer import WordWrap, figures
from llmd.cli.main import with_think_value
from llmd.cli.session import parameter_value

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (98_362_432, "98 MB"),
        (4_661_211_424, "4.7 GB"),
        (2_000_000_000, "2 GB"),
        (12_900_000_000, "12 GB"),
        (3_500_000_000_000_000, "3500 TB"),
    ],
)
def test_sizes_are_decimal_and_short(size_bytes: int, text: str) -> None:
    assert units.size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "Less than a second"),
        (1.5, "1 second"),
        (59, "59 seconds"),
        (61, "About a minute"),
        (59 * 60, "59 minutes"),
        (3600, "About an hour"),
        (2 * 3600, "2 hours"),
        (47 * 3600, "47 hours"),
        (48 * 3600, "2 days"),
        (13 * 86400, "13 days"),
        (14 * 86400, "2 weeks"),
        (60 * 86400, "2 months"),
        (729 * 86400, "24 months"),
        (730 * 86400, "2 years"),
    ],
)
def test_spans_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert units.span_text(seconds) == text


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (None, "Never"),
        (datetime(1, 1, 1, tzinfo=UTC), "Never"),
        (NOW - timedelta(seconds=1), "Stopping..."),
        (NOW + timedelta(seconds=270), "4 minutes from now"),
        (NOW + timedelta(days=21 * 365), "Forever"),
    ],
)
def test_until_tells_when_a_model_leaves(moment: datetime | None, text: str) -> None:
    assert units.until_text(moment, NOW) == text


def test_a_time_with_nanoseconds_is_read() -> None:
    moment = units.parse_time("2026-03-01T12:00:00.123456789+02:00")
    assert moment == datetime(2026, 3, 1, 10, 0, 0, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size_bytes", "vram_bytes", "text"),
    [
        (100, 0, "100% CPU"),
        (100, 100, "100% GPU"),
        (100, 52, "48%/52% CPU/GPU"),
        (100, 101, "Unknown"),
        (0, 1, "Unknown"),
    ],
)
def test_the_processor_column_tells_the_split(size_bytes: int, vram_bytes: int, text: str) -> None:
    assert tables.processor_text(size_bytes, vram_bytes) == text


def test_the_kv_column_has_use_capacity_and_percent() -> None:
    assert tables.kv_text({"blocks_in_use": 12, "blocks_total": 48}) == "12 / 48 (25%)"
    assert tables.kv_text({}) == "-"


def test_show_has_the_sections_of_what_there_is() -> None:
    answer: dict[str, Any] = {
        "model_info": {"general.architecture": "llama", "llama.context_length": 8192},
        "details": {"parameter_size": "135M", "quantization_level": "Q4_1"},
        "capabilities": ["completion", "tools"],
        "parameters": 'stop                           "<|im_end|>"\ntemperature 0.5',
        "license": "\nApache\n\nVersion 2.0\nmore\n",
    }
    assert tables.show_text(answer, verbose=False) == (
        "  Model\n"
        "    architecture      llama\n"
        "    parameters        135M\n"
        "    context length    8192\n"
        "    quantization      Q4_1\n"
        "\n"
        "  Capabilities\n    completion\n    tools\n\n"
        '  Parameters\n    stop           "<|im_end|>"\n    temperature    0.5\n\n'
        "  License\n    Apache\n    Version 2.0\n    ...\n\n"
    )


def test_show_tells_how_a_loaded_model_is_computed() -> None:
    answer = {"runtime": {"kernels": {"cuda:0": "triton kernels: cuda:0 has Triton"}, "threads": 2}}
    assert tables.show_text(answer, verbose=True) == (
        "  Runtime\n"
        "    kernels    {'cuda:0': 'triton kernels: cuda:0 has Triton'}\n"
        "    threads    2\n\n"
    )
    assert tables.show_text(answer, verbose=False) == ""


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("example", Address("example", 11434)),
        ("example:80", Address("example", 80)),
        ("http://example", Address("example", 80)),
        ("https://example", Address("example", 443, "https")),
        ("https://example:8443/llm/", Address("example", 8443, "https", "/llm")),
        ("0.0.0.0", Address("127.0.0.1", 11434)),
        (":8080", Address("127.0.0.1", 8080)),
        ("[::]:99", Address("::1", 99)),
        ("fe80::1", Address("fe80::1", 11434)),
        ("example:99999", Address("example", 11434)),
    ],
)
def test_a_host_is_read_as_servers_and_clients_write_it(text: str, address: Address) -> None:
    assert parse_address(text) == address


def test_our_variable_goes_before_the_other() -> None:
    assert read_address({"LLMD_HOST": " 'a:1' ", "OLLAMA_HOST": "b:2"}) == Address("a", 1)
    assert read_address({"LLMD_HOST": "", "OLLAMA_HOST": "b:2"}) == Address("b", 2)


def screen_of(written: str) -> list[str]:
    """What a terminal would show: knows newline, cursor left and erase to the end of the line."""
    lines, column, rest = [""], 0, written
    while rest:
        if rest.startswith("\x1b["):
            number, letter = rest[2:].split("D", 1)[0], "D"
            if not number.isdigit():
                number, letter = "0", "K"
            rest = rest[len(f"\x1b[{number}{letter}") if letter == "D" else 3 :]
            column -= int(number)
            if letter == "K":
                lines[-1] = lines[-1][:column]
            continue
        if rest[0] == "\n":
            lines.append("")
            column = 0
        else:
            lines[-1] = lines[-1][:column] + rest[0]
            column += 1
        rest = rest[1:]
    return lines


@pytest.mark.parametrize("piece_length", [1, 3, 100])
def test_no_word_is_broken_however_the_text_arrives(piece_length: int) -> None:
    text = "the quick brown fox jumps over\nthe lazy dog"
    wrap = WordWrap(12)
    pieces = [text[at : at + piece_length] for at in range(0, len(text), piece_length)]
    shown = [line.rstrip() for line in screen_of("".join(map(wrap.feed, pieces)))]
    assert shown == ["the quick", "brown fox", "jumps over", "the lazy dog"]


def test_a_wide_letter_takes_two_columns() -> None:
    assert WordWrap(7).feed("ab 日本") == "ab 日本"
    assert WordWrap(6).feed("ab 日本") == "ab 日\x1b[2D\x1b[K\n日本"


def test_figures_leave_out_what_is_zero() -> None:
    final = {"total_duration": 1_500_000_000, "eval_count": 3, "eval_duration": 100_000_000}
    assert figures(final).splitlines() == [
        "total duration:       1.5s",
        "eval count:           3 token(s)",
        "eval duration:        100ms",
        "eval rate:            30.00 tokens/s",
    ]


def test_think_may_stand_alone() -> None:
    assert with_think_value(["run", "m", "--think"]) == ["run", "m", "--think=true"]
    assert with_think_value(["run", "--think=low", "--", "--think"]) == [
        "run",
        "--think=low",
        "--",
        "--think",
    ]


def test_a_parameter_is_a_number_where_it_looks_like_one() -> None:
    assert [parameter_value(text) for text in ("7", "0.5", "true", "abc")] == [7, 0.5, True, "abc"]


def test_a_model_on_its_way_in_is_shown_as_that() -> None:
    row = {"name": "m:latest", "digest": "ab" * 32, "size": 5, "size_vram": 0}
    loading = {"fraction": 0.42, "stage": "reading weights", "waiting": 1}
    shown = tables.ps_table([{**row, "loading": loading}], "", NOW)
    assert shown.rstrip().endswith("loading, 42 %")
