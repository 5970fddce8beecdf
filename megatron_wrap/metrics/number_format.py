"""Formats numbers, including nan and infinity, as short text for the console line."""

import math


def whole(value: float) -> str:
    """A number without decimals: `12`."""
    return f"{value:.0f}"


def counted(count: float, noun: str) -> str:
    """A count with its noun, in the plural unless the count is 1: `1 epoch`, `1.50 epochs`, `2,000 entries`."""
    if count != 1:
        hisses = noun.endswith(("s", "x", "sh", "tch"))  # batches, but epochs
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}{'es' if hisses else 's'}"
    return f"{count:,.{0 if count % 1 == 0 else 2}f} {noun}"


def four_decimals(value: float) -> str:
    """A number with four decimals: `5.1234`; very large and small values as `1.5000e-7`."""
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value):
        return f"{value:.4f}"
    return scientific(value, 4)


def short(value: float, digits: int) -> str:
    """Integers without decimals, others with `digits` significant digits, very large and small values as `1.2e-5`."""
    if not math.isfinite(value) or isinstance(value, int):
        return str(value)
    if 1e-3 <= abs(value) < 1e5 or value == 0:
        return whole(value) if value.is_integer() else significant(value, digits)
    return scientific(value, digits - 1)


def significant(value: float, digits: int) -> str:
    """A number with `digits` significant digits and without an exponent: `0.562`, `71.3`, `1234`."""
    if not math.isfinite(value) or value == 0:
        return whole(value)
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded value: 9.999 becomes 10.0
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def scientific(value: float, decimals: int) -> str:
    """A number in scientific notation: `3.0e-4`, the exponent without padding."""
    if not math.isfinite(value) or value == 0:
        return whole(value)
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def with_prefix(value: float) -> str:
    """Three significant digits and the prefix k, M or G: `12.3k`."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{significant(value / size, 3)}{prefix}"
    return significant(value, 3)


def duration(seconds: float) -> str:
    """A duration: `512 ms` below a second, else `12.3 s`."""
    return f"{significant(seconds * 1000, 3)} ms" if seconds < 0.9995 else f"{significant(seconds, 3)} s"
