"""Byte sizes as people write them: `256GB`, `64GiB`, `4G` (= GiB), `1048576`."""

import re
from fractions import Fraction

_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_UNITS = {"": 1, "b": 1, **_DECIMAL, **_BINARY}
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", re.ASCII)
# No exponents: 1e-99999999 is three bytes of text and a number of a hundred million digits.
_FRACTION = re.compile(r"[0-9]{0,9}\.?[0-9]{1,30}|[0-9]{1,9}/[0-9]{1,9}", re.ASCII)

MAX_BYTES = 2**61
"""Largest size that is read; sums of a few stay within 64 bits."""


def parse_bytes(text: str) -> int:
    """The size in bytes; GB is decimal, GiB and a bare G are binary.

    Raises:
        ValueError: `text` is no size, or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"{text[:40]!r} is no size; write bytes or a number with KB, MB, GB, TB, KiB, MiB, GiB, TiB, K…T"
        )
    size = Fraction(match.group(1)) * unit
    if size > MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is more than {MAX_BYTES // 2**60} EiB")
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes, not a whole number")
    return int(size)


def parse_fraction(text: str) -> Fraction:
    """A decimal or a ratio of whole numbers, exact, so that floor(f × steps) is what a person expects.

    Raises:
        ValueError: `text` is neither.
    """
    if not _FRACTION.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no fraction; write a decimal such as 0.6")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"{text[:40]!r} divides by zero") from None


def format_bytes(size_bytes: int) -> str:
    """A size for people, with its unit: `1.50 GiB`, `812 bytes`."""
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} bytes"
