"""From logits on a device to token ids on the host, without waiting in between.

    logits ──host's adjustments, masks──▶ sample, one kernel for all rows ──▶ ids on the device
                                                   └── copy on its way ──▶ PendingStep.result

Penalties, biases, early stop ids and typical_p are applied on the host by the CPU sampler's own
functions, to the rows that ask for them; the draw itself is one kernel for all, whose noise is that
of the CPU. So a seed means one thing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..engine.batch import Batch, Logprobs, RowStart, StepResult
from ..kernels.select import Kernels
from ..protocol import SamplingParams
from .sampler import UnusableLogits, adjusted, candidates, logprobs_of

MIN_TEMPERATURE = 1e-6  # below it fp32 scores would overflow; the best token wins long before
UNUSABLE = "the model's logits are not finite for this sequence"


class Row:
    """One sequence between steps, as the host sees it."""

    def __init__(self, start: RowStart) -> None:
        self.token_ids = array("q", start.token_ids)  # what the host knows
        self.num_prompt_tokens = start.num_prompt_tokens
        self.sampling = start.sampling
        self.seed = _signed(start.seed)
        self.stop_ids = start.stop_ids
        self.matcher = None if start.grammar is None else start.grammar.matcher()
        self.error = ""  # why nothing more can be drawn
        if self.matcher is not None:  # outputs of an earlier life are part of the form
            self.matcher.accept(start.token_ids[start.num_prompt_tokens :])

    def needs_host(self, num_known: int) -> bool:
        """The logits are adjusted on the host, before a draw after so many tokens."""
        s = self.sampling
        has_penalties = s.repeat_last_n != 0 and (
            s.repeat_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        )
        is_young = num_known - self.num_prompt_tokens < s.min_tokens and bool(self.stop_ids)
        return has_penalties or bool(s.logit_bias) or is_young or self.is_cut

    @property
    def is_cut(self) -> bool:
        """The filters run on the host, typical_p among them."""
        return self.sampling.typical_p < 1 and self.sampling.temperature > 0

    def append(self, token_ids: Sequence[int]) -> None:
        """Tokens were drawn."""
        self.token_ids.extend(token_ids)
        if self.matcher is None or self.error:
            return
        try:
            self.matcher.accept(token_ids)
        except Exception as error:  # the matchers' own kinds; the row fails, the step does not
            self.error = str(error)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn: after `num_known` tokens of the row, the last ones of them drafts."""

    row: Row
    drafts: tuple[int, ...]
    num_known: int

    @property
    def waits(self) -> bool:
        """The host must know all tokens before it."""
        return self.row.matcher is not None or self.row.needs_host(self.num_known)


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The numbers, when they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def draw(kernels: Kernels, logits: Tensor, draws: Sequence[Draw], errors: dict[int, str]) -> Tensor:
    """int64 [2, len(draws)], on the device: the ids, and whether the logits were usable.

    `errors` gets, by the place in `draws`, what the host found.
    """
    scores = logits
    for index, wanted in enumerate(draws):
        if wanted.row.needs_host(wanted.num_known):
            if scores is logits:
                scores = logits.clone()
            try:
                scores[index] = _on_host(wanted, logits[index])
            except UnusableLogits as error:
                errors[index] = str(error)
    _mask(kernels, scores, draws, errors)
    settings = [wanted.row.sampling for wanted in draws]
    floats = _sent(
        [
            [_temperature(s) for s in settings],
            [1.0 if wanted.row.is_cut else wanted.row.sampling.top_p for wanted in draws],
            [s.min_p for s in settings],
        ],
        torch.float32,
        logits.device,
    )
    ints = _sent(
        [
            [wanted.row.seed for wanted in draws],
            [wanted.num_known for wanted in draws],
            [s.top_k for s in settings],
        ],
        torch.int64,
        logits.device,
    )
    drawn = kernels.sample(
        scores,
        floats[0],
        ints[2].to(torch.int32),
        floats[1],
        floats[2],
        ints[0],
        ints[1],
        has_filters=any(
            s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in settings
        ),
    )
    usable = torch.isfinite(scores.amax(dim=-1))  # NaN wherever there is one
    return torch.stack([drawn, usable.to(torch.int64)])


def _on_host(wanted: Draw, logits: Tensor) -> Tensor:
    """The logits with penalties, biases and, with typical_p, all filters applied."""
    row = wanted.row
    known = array("q", [*row.token_ids, *wanted.drafts])
    scores = adjusted(
        logits.cpu().numpy(), row.sampling, known, row.num_prompt_tokens, row.stop_ids, None
    )
    if row.is_cut:
        kept = candidates(scores, row.sampling)
        cut = np.full_like(scores, -np.inf)
        cut[kept] = scores[kept]
        scores = cut
    return torch.from_numpy(np.ascontiguousarray(scores)).to(logits.device)


def _mask(kernels: Kernels, scores: Tensor, draws: Sequence[Draw], errors: dict[int, str]) -> None:
    """Forbid what the grammars do not admit."""
    matchers = [(index, d.row, d.row.matcher) for index, d in enumerate(draws)]
    forms = [(index, row, matcher) for index, row, matcher in matchers if matcher is not None]
    if not forms:
        return
    words = np.zeros((len(forms), -(-scores.shape[1] // 32)), dtype=np.int32)
    for place, (index, row, matcher) in enumerate(forms):
        try:
            matcher.mask(words[place])
        except Exception as error:  # as in Row.append
            errors.setdefault(index, row.error or str(error))
            words[place] = -1
    rows = [index for index, _, _ in forms]
    kernels.apply_token_mask(
        scores,
        torch.from_numpy(words).to(scores.device),
        torch.tensor(rows, dtype=torch.int32).to(scores.device),
    )


def _temperature(sampling: SamplingParams) -> float:
    return max(sampling.temperature, MIN_TEMPERATURE) if sampling.temperature > 0 else 0.0


def _sent(
    numbers: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    host = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def _signed(seed: int) -> int:
    """The seed's low 64 bits as torch holds them."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - 2**64 if low >= 2**63 else low


class PendingStep:
    """A step whose draws are on their way. Rows learn their tokens when the result is asked for,
    by whoever asks first: the engine, or the next step's draw."""

    def __init__(
        self,
        batch: Batch,
        rows: Sequence[Row],
        drawn: Tensor | None,
        raw: Tensor | None,
        raw_places: dict[int, int],
        errors: dict[int, str],
    ) -> None:
        self._batch = batch
        self._rows = rows
        self._drawn = None if drawn is None else HostCopy(drawn)
        self._raw = None if raw is None else HostCopy(raw)
        self._raw_places = raw_places  # draw to row of `raw`, where logprobs are wanted
        self._errors = errors  # by draw
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for it; see engine.batch."""
        if self._result is None:
            self._result = self._finish()
        return self._result

    def _finish(self) -> StepResult:
        drawn, usable = ([], []) if self._drawn is None else self._drawn.wait().tolist()
        ids: list[tuple[int, ...]] = []
        logprobs: list[tuple[Logprobs, ...]] = []
        errors: dict[int, str] = {}
        at = 0
        for chunk, row in zip(self._batch.chunks, self._rows, strict=True):
            accepted: list[int] = []
            entries: list[Logprobs] = []
            count = 1 + len(chunk.draft_ids) if chunk.samples else 0
            for depth in range(count):
                problem = self._errors.get(at + depth, "" if usable[at + depth] else UNUSABLE)
                if problem:
                    errors[chunk.row] = problem
                    break
                token_id = drawn[at + depth]
                accepted.append(token_id)
                if row.sampling.num_logprobs >= 0:
                    entries.append(self._logprobs(at + depth, token_id, row.sampling.num_logprobs))
                if depth >= len(chunk.draft_ids) or chunk.draft_ids[depth] != token_id:
                    break
            row.append(accepted)
            ids.append(tuple(accepted))
            logprobs.append(tuple(entries))
            at += count
        return StepResult(
            self._batch.step, tuple(ids), tuple(logprobs) if any(logprobs) else (), errors
        )

    def _logprobs(self, draw_index: int, token_id: int, num_top: int) -> Logprobs:
        assert self._raw is not None
        scores = self._raw.wait()[self._raw_places[draw_index]].numpy()
        return logprobs_of(scores, token_id, num_top)
