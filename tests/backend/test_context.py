"""What is left out of a prompt that does not fit."""

from __future__ import annotations

import random

from llmd.backend.text.context import Messages, fit_messages, fit_tokens


def message(role: str, size: int, mark: str = "") -> dict[str, object]:
    return {"role": role, "content": "x" * size, "mark": mark}


def size_of(messages: Messages) -> int:
    return sum(len(str(m["content"])) for m in messages)


def marks(messages: Messages) -> str:
    return "".join(str(m["mark"]) for m in messages)


def test_what_fits_is_left_alone() -> None:
    messages = [message("user", 5, "a")]
    assert fit_messages(messages, size_of, 5).messages == messages


def test_the_oldest_exchanges_go_and_the_system_message_stays() -> None:
    messages = [
        message("system", 10, "s"),
        message("user", 10, "a"),
        message("assistant", 10, "b"),
        message("user", 10, "c"),
        message("assistant", 10, "d"),
        message("user", 10, "e"),
    ]
    fitted = fit_messages(messages, size_of, 45)
    assert (marks(fitted.messages), fitted.num_dropped) == ("scde", 2)
    fitted = fit_messages(messages, size_of, 5)
    assert (marks(fitted.messages), fitted.num_dropped) == ("se", 4)


def test_a_tool_result_goes_with_its_call_and_the_question_stays() -> None:
    messages = [
        message("user", 10, "q"),
        message("assistant", 10, "a"),
        message("tool", 10, "1"),
        message("tool", 10, "2"),
        message("assistant", 10, "b"),
        message("tool", 10, "3"),
    ]
    fitted = fit_messages(messages, size_of, 55)
    assert (marks(fitted.messages), fitted.num_dropped) == ("qb3", 3)


def test_no_fewer_messages_would_do_and_few_renderings_are_needed() -> None:
    rng = random.Random(7)
    for _ in range(200):
        roles = [rng.choice(["user", "assistant", "user", "tool", "system"]) for _ in range(30)]
        messages = [message(role, rng.randrange(1, 20)) for role in roles]
        calls = 0

        def counted(kept: Messages) -> int:
            nonlocal calls
            calls += 1
            return size_of(kept)

        limit = rng.randrange(1, size_of(messages) + 20)
        fitted = fit_messages(messages, counted, limit)
        assert calls <= 7
        assert len(fitted.messages) + fitted.num_dropped == len(messages)
        assert fitted.messages[-1] is messages[-1]
        assert [m for m in messages if m["role"] == "system" and m not in fitted.messages] == []
        smaller = fit_messages(messages, size_of, limit - 1)
        assert smaller.num_dropped >= fitted.num_dropped


def test_a_single_long_prompt_keeps_its_head_and_its_newest_tail() -> None:
    assert fit_tokens(range(10), 6, 2) == [0, 1, 6, 7, 8, 9]
    assert fit_tokens(range(10), 6, 0) == [4, 5, 6, 7, 8, 9]
    assert fit_tokens(range(10), 3, 100) == [0, 1, 9]
    assert fit_tokens(range(10), 1, 4) == [9]
    assert fit_tokens(range(3), 5, 1) == [0, 1, 2]
