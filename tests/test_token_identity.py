"""Balanced pairs of decodes: their order, what voids one, and what the sentence is made of."""

from dataclasses import replace

import pytest

from replayer.token_identity import Arm, summary, time_ratio, turns, void

FIRST = Arm(
    run_id="one", owner="page_cache", token_sha256="aa", tokens=8, degenerate=False, bytes_valid=True, time_valid=True,
    warm_up_ns=None, prefill_ns=5, decode_ns=100, decode_wait_ns=20, device_bytes=0,
)  # fmt: skip
SECOND = replace(FIRST, run_id="two", owner="restream", decode_ns=110)


@pytest.mark.parametrize("seed", range(4))
def test_each_prompt_has_a_pair_in_either_order_and_one_that_is_drawn(seed: int) -> None:
    order = list(turns(3, seed))
    assert len(order) == 18
    for prompt in range(3):
        pairs = [[turn.arm for turn in order if (turn.prompt, turn.pair) == (prompt, pair)] for pair in range(3)]
        assert pairs[:2] == [[0, 1], [1, 0]]
        assert sorted(pairs[2]) == [0, 1]
    assert order == list(turns(3, seed))
    drawn = {tuple(turn.arm for turn in turns(1, other) if turn.pair == 2) for other in range(20)}
    assert drawn == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({}, None),
        ({"token_sha256": "bb"}, "the tokens differ"),
        ({"bytes_valid": False}, "bytes of two are not valid"),
    ],
)
def test_a_pair_whose_tokens_differ_or_bytes_are_not_valid_is_void(second: dict[str, object], why: str | None) -> None:
    other = replace(SECOND, **second)
    assert void(FIRST, other) == why
    assert (time_ratio(FIRST, other) is None) == (why is not None)


def test_degenerate_output_and_invalid_times_give_no_ratio() -> None:
    assert void(replace(FIRST, degenerate=True), replace(SECOND, degenerate=True)) == "one token repeats"
    assert void(FIRST, replace(SECOND, time_valid=False)) is None
    assert time_ratio(FIRST, replace(SECOND, time_valid=False)) is None


def test_the_summary_takes_the_median_of_each_prompts_ratios_and_flips_with_them() -> None:
    slower = [replace(SECOND, decode_ns=ns) for ns in (105, 120, 110)]
    (row,) = summary([(0, FIRST, one) for one in slower])
    assert (row["time_ratio_low"], row["time_ratio_median"], row["time_ratio_high"]) == (1.05, 1.1, 1.2)
    (flipped,) = summary([(0, one, FIRST) for one in slower])
    assert flipped["time_ratio_median"] < 1
    (mixed,) = summary([(0, FIRST, slower[0]), (0, FIRST, replace(SECOND, token_sha256="bb"))])
    assert (mixed["pairs"], mixed["identical_pairs"], mixed["timed_pairs"]) == (2, 1, 1)
    (none,) = summary([(0, FIRST, replace(SECOND, time_valid=False))])
    assert none["time_ratio_median"] is None
