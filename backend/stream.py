"""From token ids to what a client reads: one Stream per running sequence.

    engine ──ids──▶ Detokenizer ──text──▶ ResponseParser ──content, thinking, calls──▶ Delta
                        │ a stop string was completed
                        └──▶ the worker finishes the sequence in the step that completed it

Owner: the worker's engine thread. A Stream never raises over what a model wrote.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from .engine.batch import Logprobs
from .protocol import Delta, Finished, TokenLogprob, ToolCall
from .text.detokenizer import Detokenizer, Released
from .text.response_parser import Content, Piece, ResponseParser, Thinking
from .text.tokenizer import Tokenizer

_CALL_ID_LETTERS = string.ascii_lowercase + string.digits


@dataclass(slots=True)
class _Pieces:
    """The parts of one delta while they are collected."""

    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Content):
            self.text.append(piece.text)
        elif isinstance(piece, Thinking):
            self.thinking.append(piece.text)
        else:
            self.tool_calls.append(ToolCall(_call_id(), piece.name, piece.arguments))


class Stream:
    """The text side of one sequence.

    `parser` None passes the text on as it is. `prompt_ids` prime the detokenizer, so that the first
    piece has the spacing it has in context; none of them appears in the output.
    """

    def __init__(
        self,
        id: str,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        parser: ResponseParser | None,
        wants_logprobs: bool,
    ) -> None:
        self.id = id
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, stop)
        self._parser = parser
        self._wants_logprobs = wants_logprobs
        # Ids, and logprobs beside them, whose text the detokenizer still holds back.
        self._held_ids: list[int] = []
        self._held_logprobs: list[TokenLogprob] = []

    def push(
        self, ids: Sequence[int], logprobs: Sequence[Logprobs] = ()
    ) -> tuple[Delta, str | None]:
        """The delta that these ids release, and the stop string that they completed, if any."""
        self._hold(ids, logprobs)
        released = self._detokenizer.push(ids)
        return self._delta(released, self._pieces(released.text)), released.stop

    def finish(
        self,
        ids: Sequence[int],
        logprobs: Sequence[Logprobs],
        stop_token: int | None,
        finished: Finished,
    ) -> Delta:
        """The final delta: what was held back, and why the sequence ended.

        `ids` may end in `stop_token`, whose text is not shown. A stop string that the last ids
        complete wins over the engine's reason.
        """
        self._hold(ids, logprobs)
        shown = ids[:-1] if stop_token is not None and ids and ids[-1] == stop_token else ids
        released = self._detokenizer.push(shown)
        text = released.text
        if released.stop is None:
            text += self._detokenizer.flush().text
        elif finished.reason != "abort":
            finished = _stopped_by(finished, released.stop)
        pieces = self._pieces(text, is_last=True)
        return self._delta(None, pieces, finished)

    def stop(self, finished: Finished) -> Delta:
        """The final delta of a stream whose stop string was found by `push`."""
        return self._delta(None, self._pieces("", is_last=True), finished)

    def _hold(self, ids: Sequence[int], logprobs: Sequence[Logprobs]) -> None:
        self._held_ids.extend(ids)
        if self._wants_logprobs:
            for token_id, entry in zip(ids, logprobs, strict=False):
                self._held_logprobs.append(self._token_logprob(token_id, entry))

    def _pieces(self, text: str, is_last: bool = False) -> _Pieces:
        pieces = _Pieces()
        if self._parser is None:
            pieces.text.append(text)
            return pieces
        for piece in self._parser.push(text) if text else ():
            pieces.add(piece)
        for piece in self._parser.finish() if is_last else ():
            pieces.add(piece)
        return pieces

    def _delta(
        self, released: Released | None, pieces: _Pieces, finished: Finished | None = None
    ) -> Delta:
        count = len(self._held_ids) if released is None else released.num_ids
        ids, self._held_ids = self._held_ids[:count], self._held_ids[count:]
        # Logprobs of tokens that an earlier worker drew are not known, so there may be fewer.
        surplus = len(self._held_logprobs) - len(self._held_ids)
        logprobs = self._held_logprobs[: max(surplus, 0)]
        self._held_logprobs = self._held_logprobs[len(logprobs) :]
        return Delta(
            id=self.id,
            text="".join(pieces.text),
            thinking="".join(pieces.thinking),
            tool_calls=tuple(pieces.tool_calls),
            token_ids=ids,
            logprobs=tuple(logprobs),
            finished=finished,
        )

    def _token_logprob(self, token_id: int, entry: Logprobs) -> TokenLogprob:
        top = [
            self._named(other, value) for other, value in zip(entry.top_ids, entry.top, strict=True)
        ]
        chosen = self._named(token_id, entry.chosen)
        return TokenLogprob(token_id, chosen.token, entry.chosen, chosen.bytes, top)

    def _named(self, token_id: int, logprob: float) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id, raw.decode("utf-8", "replace"), logprob, list(raw))


def is_silent(delta: Delta) -> bool:
    """Nothing in it for anyone: such a delta is not sent."""
    return not (
        delta.text
        or delta.thinking
        or delta.tool_calls
        or delta.token_ids
        or delta.logprobs
        or delta.finished
    )


def _stopped_by(finished: Finished, stop: str) -> Finished:
    return msgspec.structs.replace(finished, reason="stop", stop_reason=stop)


def _call_id() -> str:
    return "call_" + "".join(secrets.choice(_CALL_ID_LETTERS) for _ in range(8))
