"""What a model's answer is made of, once its markup is understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """A part of what comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. `arguments` are plain JSON values."""

    name: str
    arguments: dict[str, Any]


Piece = Content | Thinking | ToolCall
