"""Which tokens the grammars of a step's rows admit, worked out while the model computes the step.

    begin(rows) ──▶ a thread: one mask after the other ──▶ take(row), when its token is drawn
         └──────▶ the engine thread: the forward pass

A row's mask depends on the tokens that are known before the step, so it can be made beside the
forward pass; the library that makes it leaves Python's lock alone. A row has one mask in a step.

Owner: the model runner, on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .sampler import UnusableLogits

Allowed = NDArray[np.bool_]


class Matcher(Protocol):
    """Where a sequence stands in its grammar; text.grammar.Matcher and AnswerMatcher fit."""

    def mask(self, row: NDArray[np.int32]) -> None: ...


class TokenMasks:
    """The masks of one step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # All the mutable state. The thread is started by the first grammar and stays.
        self._thread: ThreadPoolExecutor | None = None
        self._masks: dict[int, Future[Allowed]] = {}

    def begin(self, matchers: Iterable[tuple[int, Matcher]]) -> None:
        """Start on these rows, of which each samples one token in this step."""
        self._masks = {row: self._submit(matcher) for row, matcher in matchers}

    def take(self, row: int) -> Allowed | None:
        """[vocab_size] bool; None for a row without a grammar.

        Raises UnusableLogits if the grammar cannot be followed any further.
        """
        mask = self._masks.pop(row, None)
        if mask is None:
            return None
        try:
            return mask.result()
        except Exception as error:  # the matchers' own kinds; the row fails, the step does not
            raise UnusableLogits(str(error)) from error

    def _submit(self, matcher: Matcher) -> Future[Allowed]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="token masks")
        return self._thread.submit(self._mask, matcher)

    def _mask(self, matcher: Matcher) -> Allowed:
        words = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        matcher.mask(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(bool)
