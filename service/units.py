"""How quantities are written for people: bytes in binary units, counts with separators, seconds."""

from __future__ import annotations

_STEPS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
UNKNOWN = "unknown"


def format_bytes(num_bytes: int | None) -> str:
    """Bytes with two decimals in the largest binary unit that keeps them above one: `15.89 GiB`; None is `unknown`."""
    if num_bytes is None:
        return UNKNOWN
    sign = "−" if num_bytes < 0 else ""
    size = abs(num_bytes)
    for step, unit in _STEPS:
        if size >= step:
            return f"{sign}{size / step:,.2f} {unit}"
    return f"{sign}{size} B"


def format_delta(num_bytes: int | None) -> str:
    """A difference in bytes with its sign: `+1.20 GiB`, `−64.00 KiB`, `no change`; None is `unknown`."""
    if num_bytes is None:
        return UNKNOWN
    if num_bytes == 0:
        return "no change"
    return ("+" if num_bytes > 0 else "−") + format_bytes(abs(num_bytes))


def format_share(share: float | None) -> str:
    """A part of a whole (0 to 1) in percent: `16.2 %`; what is there but too little to show is `<0.1 %`, and `0.0 %` is nothing."""
    if share is None:
        return UNKNOWN
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def format_count(count: int | None) -> str:
    """A whole number with thousands separators; None is `unknown`."""
    return UNKNOWN if count is None else f"{count:,}"


def format_parameters(count: int | None) -> str:
    """A parameter count in the field's decimal units: `671.03 B`, `15.71 B`, `43.5 M`."""
    if count is None:
        return UNKNOWN
    for step, unit, digits in ((10**9, "B", 2), (10**6, "M", 1), (10**3, "K", 1)):
        if count >= step:
            return f"{count / step:,.{digits}f} {unit}"
    return str(count)


def format_seconds(seconds: float | None) -> str:
    """Seconds with one decimal, milliseconds below one, microseconds below that; None is `unknown`."""
    if seconds is None:
        return UNKNOWN
    if 0 < seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
