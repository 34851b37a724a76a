"""Masks made beside the forward pass: each row gets its own, and a bad row fails alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from llmd.backend.runner.sampler import UnusableLogits
from llmd.backend.runner.token_masks import TokenMasks


class Admits:
    """A matcher that admits these ids, once it may."""

    def __init__(self, *token_ids: int, gate: threading.Event | None = None) -> None:
        self._token_ids = token_ids
        self._gate = gate

    def mask(self, row: NDArray[np.int32]) -> None:
        assert self._gate is None or self._gate.wait(30)
        for token_id in self._token_ids:
            row.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))


class Refuses:
    def mask(self, row: NDArray[np.int32]) -> None:
        raise ValueError("too deep")


def test_the_caller_goes_on_while_the_masks_are_made() -> None:
    gate = threading.Event()
    masks = TokenMasks(70)
    masks.begin([(3, Admits(0, 69, gate=gate)), (5, Admits(31))])
    gate.set()  # would never be reached if `begin` waited
    found = [masks.take(row) for row in (5, 4, 3)]
    assert [None if mask is None else np.flatnonzero(mask).tolist() for mask in found] == [
        [31],
        None,
        [0, 69],
    ]


def test_a_grammar_that_cannot_be_followed_fails_its_row_alone() -> None:
    masks = TokenMasks(64)
    masks.begin([(1, Refuses()), (2, Admits(7))])
    with pytest.raises(UnusableLogits, match="too deep"):
        masks.take(1)
    mask = masks.take(2)
    assert mask is not None and np.flatnonzero(mask).tolist() == [7]
