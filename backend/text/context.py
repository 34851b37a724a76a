"""What to leave out of a prompt that does not fit: one rule for every route.

A conversation loses its oldest messages, but never a system message, the last question or the last
message. A single prompt that is still too long keeps its first `num_keep` tokens and its newest
ones. Both say how much went, because nothing is cut silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_ROLES = ("system", "developer")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A conversation after cutting."""

    messages: list[Mapping[str, Any]]
    num_dropped: int


def fit_messages(messages: Messages, size_of: Callable[[Messages], int], limit: int) -> Fitted:
    """Drop the fewest oldest units so that `size_of` what is left is at most `limit` tokens.

    By bisection, since each call of `size_of` renders and encodes: about log2(len(messages)) calls.
    If nothing that may be left out helps, the shortest form is returned and its last message is too
    long by itself; then see `fit_tokens`. What `size_of` raises for a conversation passes through.
    """
    units = _droppable_units(messages)
    if not units or size_of(messages) <= limit:
        return Fitted(list(messages), 0)
    fewest, most = 1, len(units)
    while fewest < most:
        middle = (fewest + most) // 2
        if size_of(_without(messages, units[:middle])) <= limit:
            most = middle
        else:
            fewest = middle + 1
    kept = _without(messages, units[:fewest])
    return Fitted(kept, len(messages) - len(kept))


def fit_tokens(token_ids: Sequence[int], limit: int, num_keep: int) -> list[int]:
    """The first `num_keep` tokens and the newest of the rest, `limit` in all.

    The newest token always stays: a `num_keep` that leaves no room for one is taken as less.
    """
    assert limit > 0, "a prompt needs room for one token"
    if len(token_ids) <= limit:
        return list(token_ids)
    num_head = min(max(num_keep, 0), limit - 1)
    num_tail = limit - num_head
    return [*token_ids[:num_head], *token_ids[len(token_ids) - num_tail :]]


def _droppable_units(messages: Messages) -> list[list[int]]:
    """Positions that go together, oldest first.

    A unit is a user's message with all that answers it; after the last user's message, which stays,
    it is one answer with the tool results that belong to it. So what is left starts with a user's
    message, as most templates demand, and no tool result stands without its call.
    """
    roles = [str(message.get("role")) for message in messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    units: list[list[int]] = []
    for index, role in enumerate(roles):
        if role in KEPT_ROLES or index == last_user:
            continue
        opens = role == "user" if index < last_user else role != "tool"
        if opens or not units or units[-1][-1] < last_user < index:
            units.append([])
        units[-1].append(index)
    holds_last = bool(units) and units[-1][-1] == len(messages) - 1
    return units[:-1] if holds_last else units


def _without(messages: Messages, dropped: Sequence[Sequence[int]]) -> list[Mapping[str, Any]]:
    gone = {index for unit in dropped for index in unit}
    return [message for index, message in enumerate(messages) if index not in gone]
