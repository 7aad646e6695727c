"""Sizes as people write them: which units are read, which are refused, and how sizes are printed."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.quantities import MAX_BYTES, format_bytes, parse_bytes, parse_fraction


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1048576", 2**20),
        ("812B", 812),
        ("812 b", 812),
        ("256KB", 256 * 10**3),
        ("256KiB", 256 * 2**10),
        ("5MB", 5 * 10**6),
        ("256GB", 256 * 10**9),
        ("64GiB", 64 * 2**30),
        ("64gib", 64 * 2**30),
        ("4G", 4 * 2**30),
        ("4k", 4 * 2**10),
        ("7m", 7 * 2**20),
        ("2T", 2 * 2**40),
        ("2TB", 2 * 10**12),
        ("2TiB", 2 * 2**40),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("  12 MiB ", 12 * 2**20),
    ],
)
def test_gb_is_decimal_and_gib_and_a_bare_g_are_binary(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "-1GB", "+1", "1e9", "1,000", "1.GB", ".5GB", "12 parsecs", "1 G B", "nan", "٣GB", "1_000"]
)
def test_what_is_no_size_is_refused_with_the_units_that_are(text):
    with pytest.raises(ValueError, match=r"is no size; write bytes or a number with KB, MB, GB") as refused:
        parse_bytes(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(("text", "found"), [("1.5", "1.5 bytes"), ("0.3KiB", "307.2 bytes")])
def test_a_size_of_no_whole_number_of_bytes_is_refused(text, found):
    with pytest.raises(ValueError, match=found):
        parse_bytes(text)


@given(st.integers(0, MAX_BYTES))
def test_a_bare_number_is_bytes_exactly_at_any_size(size_bytes):
    assert parse_bytes(str(size_bytes)) == size_bytes


@pytest.mark.parametrize("text", [str(MAX_BYTES + 1), "9" * 5000, "3000000TiB"])
def test_a_size_beyond_what_sums_can_hold_is_refused_in_one_short_line(text):
    with pytest.raises(ValueError, match=r"EiB|no size") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["1e-99999999", "1e9", "nan", "", "1/0", "-0.5", "9" * 5000, "0.5.5"])
def test_what_is_no_plain_fraction_is_refused_at_once(text):
    with pytest.raises(ValueError, match=r"fraction|zero"):
        parse_fraction(text)


def test_a_fraction_is_exact():
    assert parse_fraction("0.6") == Fraction(3, 5) == parse_fraction("3/5")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (812, "812 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (5 * 2**40, "5.00 TiB"),
    ],
)
def test_sizes_are_printed_with_their_unit(size_bytes, text):
    assert format_bytes(size_bytes) == text
