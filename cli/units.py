"""Sizes, times and durations as people read them. Pure: `now` comes in."""

from __future__ import annotations

from datetime import datetime, timedelta

_UNITS = ("B", "KB", "MB", "GB", "TB")
_NEVER_YEAR = 1  # the zero time of the wire format
_FOREVER = timedelta(days=20 * 365)


def size_text(size_bytes: int) -> str:
    """Decimal units: `4.7 GB`, `12 GB`, `2 GB`."""
    value, unit = float(size_bytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if value >= 10 or value == int(value):
        return f"{int(value)} {_UNITS[unit]}"
    return f"{value:.1f} {_UNITS[unit]}".replace(".0 ", " ")


def count_text(count: float) -> str:
    """`134.5M`, `1.7B`: numbers of parameters."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}".replace(".0", "")
    return str(int(count))


def span_text(seconds: float) -> str:
    """`About a minute`, `3 hours`, `2 weeks`."""
    if seconds < 1:
        return "Less than a second"
    if seconds < 2:
        return "1 second"
    if seconds < 60:
        return f"{int(seconds)} seconds"
    minutes = int(seconds / 60)
    if minutes == 1:
        return "About a minute"
    if minutes < 60:
        return f"{minutes} minutes"
    hours = int(seconds / 3600 + 0.5)
    if hours == 1:
        return "About an hour"
    if hours < 48:
        return f"{hours} hours"
    days = hours // 24
    if days < 14:
        return f"{days} days"
    if days < 60:
        return f"{days // 7} weeks"
    if days < 2 * 365:
        return f"{days // 30} months"
    return f"{days // 365} years"


def age_text(moment: datetime, now: datetime) -> str:
    """`3 hours ago`, `4 minutes from now`."""
    seconds = (now - moment).total_seconds()
    return f"{span_text(seconds)} ago" if seconds >= 0 else f"{span_text(-seconds)} from now"


def until_text(expires_at: datetime | None, now: datetime) -> str:
    """When a loaded model leaves."""
    if expires_at is None or expires_at.year <= _NEVER_YEAR:
        return "Never"
    if expires_at <= now:
        return "Stopping..."
    if expires_at - now > _FOREVER:
        return "Forever"
    return age_text(expires_at, now)


def parse_time(text: str | None) -> datetime | None:
    """RFC 3339; None if there is none or it can't be read."""
    try:
        return datetime.fromisoformat(text or "").astimezone()
    except (ValueError, OverflowError):
        return None


def duration_text(nanoseconds: int) -> str:
    """`1m2.5s`, `350.2ms`, as `--verbose` shows them."""
    seconds = nanoseconds / 1e9
    if seconds < 1e-3:
        return f"{nanoseconds / 1e3:g}µs"
    if seconds < 1:
        return f"{nanoseconds / 1e6:.6g}ms"
    if seconds < 60:
        return f"{seconds:.6g}s"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}h{minutes}m{rest:.3g}s" if hours else f"{minutes}m{rest:.4g}s"
