"""The `options` of the native API: one table, one set of type rules.

A request's options go before those of the model (its PARAMETERs), and these before the defaults.
Integers take any JSON number and drop the fraction; floats take any number; null is "not given".
A wrong type is an error that names the option; an unknown option is ignored, because clients send
what other servers and older releases knew.

Sources: the option table and its error texts are issue 2's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...backend.protocol import SamplingParams
from ..errors import BadRequest
from ..placement import Wish

MIN_NUM_CTX = 4
MAX_WINDOWS = 10  # an answer without a limit ends after this many windows
_INT_LIMIT = 2**53  # what a JSON number holds exactly; no option means more
_DEFAULTS = SamplingParams()


def _int(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f'option "{key}" must be of type integer')
    return int(max(-_INT_LIMIT, min(value, _INT_LIMIT)))


def _float(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f'option "{key}" must be of type float32')
    return float(max(-3.4e38, min(value, 3.4e38)))


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f'option "{key}" must be of type boolean')
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest(f'option "{key}" must be of type string')
    return value


def _strings(key: str, value: object) -> list[str]:
    if not isinstance(value, list):
        raise BadRequest(f'option "{key}" must be of type array')
    if not all(isinstance(item, str) for item in value):
        raise BadRequest(f'option "{key}" must be of an array of strings')
    return [item for item in value if item]  # an empty one would match everywhere


OPTION_TYPES: dict[str, Callable[[str, object], Any]] = {
    "num_ctx": _int,
    "num_batch": _int,
    "num_gpu": _int,
    "main_gpu": _int,
    "require_gpu": _bool,
    "use_mmap": _bool,
    "num_thread": _int,
    "priority": _int,
    "draft_num_predict": _int,
    "num_predict": _int,
    "num_keep": _int,
    "seed": _int,
    "temperature": _float,
    "top_k": _int,
    "top_p": _float,
    "min_p": _float,
    "typical_p": _float,
    "repeat_last_n": _int,
    "repeat_penalty": _float,
    "presence_penalty": _float,
    "frequency_penalty": _float,
    "stop": _strings,
    "adapter": _text,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options; what is not in `values` was not given."""

    values: Mapping[str, Any]

    @classmethod
    def parse(cls, *layers: Mapping[str, Any] | None) -> Options:
        """The later layers go before the earlier ones. Raises BadRequest."""
        values: dict[str, Any] = {}
        for layer in layers:
            for key, value in (layer or {}).items():
                check = OPTION_TYPES.get(key)
                if check is not None and value is not None:
                    values[key] = check(key, value)
        return cls(values)

    @property
    def num_ctx(self) -> int | None:
        num_ctx: int = self.values.get("num_ctx", 0)
        return max(num_ctx, MIN_NUM_CTX) if num_ctx > 0 else None

    @property
    def priority(self) -> int:
        """Lower runs first."""
        priority: int = self.values.get("priority", 0)
        return priority

    @property
    def adapter(self) -> str:
        """One of those that the model brings for requests; "" is none."""
        adapter: str = self.values.get("adapter", "")
        return adapter

    @property
    def wish(self) -> Wish:
        """Where the model should go, if this request loads it."""
        num_gpu, main_gpu = self.values.get("num_gpu", -1), self.values.get("main_gpu", -1)
        return Wish(
            num_gpu=num_gpu if num_gpu >= 0 else None,
            main_gpu=main_gpu if main_gpu >= 0 else None,
            require_gpu=bool(self.values.get("require_gpu", False)),
        )

    @property
    def num_keep(self) -> int:
        num_keep: int = self.values.get("num_keep", 4)
        return max(0, num_keep)

    @property
    def stop(self) -> list[str]:
        stop: list[str] = self.values.get("stop", [])
        return stop

    def max_tokens(self, window: int, may_shift: bool) -> int | None:
        """`num_predict`; without one, up to ten windows, or to the end of the only one."""
        wanted: int = self.values.get("num_predict", -1)
        limit = MAX_WINDOWS * window
        if wanted >= 0:
            return min(wanted, limit)
        return limit if may_shift else None

    def sampling(self, num_logprobs: int = -1) -> SamplingParams:
        """What the sampler gets; values without meaning become the nearest that has one."""
        get = self.values.get
        seed: int = get("seed", -1)
        penalty = get("repeat_penalty", _DEFAULTS.repeat_penalty)
        return SamplingParams(
            temperature=max(0.0, get("temperature", _DEFAULTS.temperature)),
            top_k=max(0, get("top_k", _DEFAULTS.top_k)),
            top_p=min(1.0, max(0.0, get("top_p", _DEFAULTS.top_p))),
            min_p=min(1.0, max(0.0, get("min_p", _DEFAULTS.min_p))),
            typical_p=min(1.0, max(0.0, get("typical_p", _DEFAULTS.typical_p))),
            repeat_last_n=max(-1, get("repeat_last_n", _DEFAULTS.repeat_last_n)),
            repeat_penalty=penalty if penalty > 0 else 1.0,
            presence_penalty=get("presence_penalty", _DEFAULTS.presence_penalty),
            frequency_penalty=get("frequency_penalty", _DEFAULTS.frequency_penalty),
            seed=seed if seed >= 0 else None,
            num_logprobs=num_logprobs,
        )
