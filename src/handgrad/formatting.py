"""Format numbers for messages, tables and reports. Memory is in decimal units: 1 MB is 1,000,000 bytes."""

import math
from pathlib import PurePath


def plural(n: float, noun: str, plural_noun: str | None = None) -> str:
    """A count with its noun: 1 step, 2,000 steps, 0.5 epochs"""
    count = f"{n:,}" if isinstance(n, int) else f"{n:g}"
    return f"{count} {noun if n == 1 else plural_noun or noun + 's'}"


def public_path(path: str | PurePath) -> str:
    """A path in something that others will read: as given, but of an absolute one only the last part"""
    return PurePath(path).name if PurePath(path).is_absolute() else str(path)


def number(x: float) -> str:
    """At most three significant digits: 0.00391, 0.1, 1, 12,300, 5e-5"""
    if x == 0 or not 1e-4 <= abs(x) < 1e6:
        mantissa, _, exponent = f"{x:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else mantissa
    places = max(0, 2 - _magnitude(x))
    text = f"{x:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(n: float) -> str:
    """A number of bytes: 512 B, 1.5 kB, 498 MB, 1.17 GB"""
    if n < 1000:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        n /= 1000
        if n < 999.5 or unit == "TB":
            break
    return f"{n:,.{max(0, 2 - _magnitude(n))}f} {unit}"


def duration(x: float) -> str:
    """A duration in seconds: 36 ms, 1.14 s, 16.4 s, 17 min, 2.1 h, 605 days"""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if x >= 2 * length:
            return f"{number(float(f'{x / length:.2g}') if x < 100 * length else round(x / length))} {unit}"
    if x < 0.9995:
        x, unit = 1000 * x, "ms"
    else:
        unit = "s"
    return f"{x:,.{min(2, max(0, 2 - _magnitude(x)))}f} {unit}"


def loss(x: float) -> str:
    """Four decimals: 1.4014"""
    return f"{x:.4f}"


def count(x: float) -> str:
    """Rounded to an integer: 12,346"""
    return f"{x:,.0f}"


def flop(n: float) -> str:
    """Floating-point operations: 129 MFLOP, 1.31 GFLOP"""
    n, unit = (n / 1e9, "GFLOP") if n >= 999.5e6 else (n / 1e6, "MFLOP")
    return f"{n:,.{max(0, 2 - _magnitude(n))}f} {unit}"


def clock(x: float) -> str:
    """A duration as a clock shows it: 0:07, 12:30, 1:02:03"""
    minutes, rest = divmod(round(x), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def percent(fraction: float) -> str:
    """A fraction as a percentage: 45 %, 0.19 %"""
    return f"{number(100 * fraction)} %" if abs(fraction) < 0.0995 else f"{100 * fraction:.0f} %"


def _magnitude(x: float) -> int:
    """Decimal exponent after rounding to three digits: 0 for 3.7, 2 for 498, −3 for 0.0039."""
    return int(f"{abs(x):.2e}".partition("e")[2]) if x else 0


def typeset(x: float) -> str:
    """Three significant digits as in a formula: 0.0039, −7, 12,300, 1.50·10⁻⁷"""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else str(x)
    if x < 0:
        return f"−{typeset(-x)}"
    if 1e-3 <= x < 1e5:
        return f"{x:.3g}" if x < 1000 else f"{x:,.0f}"
    mantissa, exponent = f"{x:.2e}".split("e")
    return f"{mantissa}·10" + "".join("⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".index(c)] for c in str(int(exponent)))


def subscript(i: int) -> str:
    """₀, ₁₂"""
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(c)] for c in str(i))
