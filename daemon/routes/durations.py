"""Durations and times as the native API writes them.

A `keep_alive` is a number of seconds or a text like "1h30m", "-1m", "0"; below zero means forever.
The texts of the errors are those that clients know (issue 2).
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta

from ..errors import BadRequest

FOREVER_S = math.inf
_MAX_S = (2**63 - 1) / 1e9  # what 64 bits of nanoseconds hold: some 292 years
_FOREVER_SHOWN = timedelta(days=290 * 365)  # clients take more than 20 years as "Forever"

_UNIT_S = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,  # the micro sign
    "μs": 1e-6,  # the Greek letter
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)([^\d.]*)")


class DurationInvalid(BadRequest):
    """The text is no duration."""


def parse_duration(text: str) -> float:
    """Seconds of "1h30m", "-1m", "0", "1.5s". Raises DurationInvalid."""
    quoted = json.dumps(text, ensure_ascii=False)
    sign = -1.0 if text.startswith("-") else 1.0
    rest = text[1:] if text[:1] in ("+", "-") else text
    if rest == "0":
        return 0.0
    if not rest:
        raise DurationInvalid(f"time: invalid duration {quoted}")
    total = 0.0
    while rest:
        part = _PART.match(rest)
        if part is None:
            raise DurationInvalid(f"time: invalid duration {quoted}")
        number, unit = part.groups()
        if not unit:
            raise DurationInvalid(f"time: missing unit in duration {quoted}")
        if unit not in _UNIT_S:
            raise DurationInvalid(f"time: unknown unit {json.dumps(unit)} in duration {quoted}")
        total += float(number) * _UNIT_S[unit]
        rest = rest[part.end() :]
    if total > _MAX_S:
        raise DurationInvalid(f"time: invalid duration {quoted}")
    return sign * total


def parse_keep_alive_s(value: object) -> float | None:
    """Seconds; FOREVER_S for anything below zero; None: leave it as it is. Raises BadRequest."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRequest('keep_alive must be a number of seconds or a duration such as "5m"')
    seconds = parse_duration(value) if isinstance(value, str) else value
    if seconds < 0 or seconds > _MAX_S:
        return FOREVER_S
    return float(seconds)


def local_text(moment: datetime) -> str:
    """A moment in local time with its offset: `modified_at`, `expires_at`."""
    return moment.astimezone().isoformat()


def expiry_text(expires_at: datetime | None) -> str:
    """`expires_at` of a loaded model; None, forever, is a time that clients know as such."""
    return local_text(expires_at or datetime.now(UTC) + _FOREVER_SHOWN)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
