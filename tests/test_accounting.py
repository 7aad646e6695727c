"""The arithmetic between what a run left behind and its rows; whole runs are in test_replay and test_proofs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.accounting import median_of, percentile_99_of, sum_of_read_bytes, text_of

VALUES = st.lists(st.integers(-(2**40), 2**40), max_size=400)


@given(VALUES)
def test_median_is_a_value_that_half_of_them_do_not_exceed(values: list[int]) -> None:
    median = median_of(np.array(values, dtype=np.int64))
    if not values:
        assert median is None
        return
    assert median in values
    assert 2 * sum(value <= median for value in values) >= len(values)
    assert 2 * sum(value < median for value in values) < len(values)


@given(VALUES)
def test_percentile_99_is_a_value_that_99_of_100_do_not_exceed(values: list[int]) -> None:
    percentile = percentile_99_of(np.array(values, dtype=np.int64))
    if not values:
        assert percentile is None
        return
    assert percentile in values
    assert 100 * sum(value <= percentile for value in values) >= 99 * len(values)
    assert 100 * sum(value < percentile for value in values) < 99 * len(values)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_device_bytes_are_summed_over_the_demand_threads_alone(as_bytes: bool) -> None:
    texts = {f"thread_io {number}": f"rchar: 9\nread_bytes: {10**number}\n" for number in range(4)}
    given_texts = {name: text.encode() if as_bytes else text for name, text in texts.items()}
    assert sum_of_read_bytes(given_texts, [f"thread_io {number}" for number in range(3)]) == 111


@pytest.mark.parametrize("missing", [None, "", "rchar: 9\n", "read_bytes: 1"])
def test_one_thread_that_is_not_counted_leaves_the_sum_unknown(missing: str | None) -> None:
    """Also a line that was cut off."""
    both = ["thread_io 0", "thread_io 1"]
    assert sum_of_read_bytes({"thread_io 0": "read_bytes: 5\n", "thread_io 1": missing}, both) is None
    assert sum_of_read_bytes({"thread_io 0": "read_bytes: 5\n"}, both) is None


def test_text_that_a_snapshot_does_not_have_is_null() -> None:
    assert text_of(None, "io") is None
    assert text_of({"text": {"io": None}}, "io") is None
    assert text_of({"text": {}}, "io") is None
    assert text_of({"text": {"io": "a\n"}}, "io") == b"a\n"
