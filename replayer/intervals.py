"""How far a hit rate could lie off by chance: per-step counts in, 95 % intervals out, by a block bootstrap over steps.

Neighbouring steps read neighbouring text, so their hits are correlated and steps drawn one by one would promise too
narrow an interval. Drawn are circular blocks of consecutive steps: Politis and Romano 1992, "A circular
block-resampling procedure for stationary data", after Künsch 1989, "The jackknife and the bootstrap for general
stationary observations". Counting hits belongs to `simulate`; spreads of repeated measurements do not belong here.

What is not promised: an interval speaks of the text that the trace is a stretch of, not of other text, models or
machines, and a trend over the whole trace is taken for chance. With few blocks it is too narrow: on two-state chains of
known mean (500 series each, autocorrelation .5 to .9 a step) it held the mean in 92 to 95 % of cases with fifty blocks
or more, in 83 to 93 % with twelve to fifty, in 77 % with ten.

Letters: S steps, B blocks of a replicate.
"""

import math
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

REPLICATES = 1_000
LEVEL = 0.95
FEWEST_BLOCKS = 2
"""Whole blocks that a series must hold to have an interval at all."""

_STARTS_AT_ONCE = 2**18  # drawn together, whatever the replicates and steps: 2 MiB
_BOUND = 2.0  # an autocorrelation below _BOUND · √(log10 S ÷ S) counts as none

Counts = npt.NDArray[np.integer[Any]]


class Interval(NamedTuple):
    """From `low` to `high`, found by `replicates` draws of blocks of `block_steps` consecutive steps."""

    low: float
    high: float
    block_steps: int
    replicates: int


def hit_rate_interval(
    hits: Counts,
    accesses: Counts,
    *,
    block_steps: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Interval | None:
    """The interval of Σ hits ÷ Σ accesses from the (S,) counts of the scored steps, in their order.

    `block_steps` null is `automatic_block_steps`. Null where the steps are fewer than two blocks or access nothing.
    """
    return _interval([(hits, accesses)], block_steps, replicates, seed)


def difference_interval(
    first_hits: Counts,
    first_accesses: Counts,
    second_hits: Counts,
    second_accesses: Counts,
    *,
    block_steps: int | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Interval | None:
    """The interval of the first hit rate minus the second, over the same S steps.

    Paired: each replicate draws the same blocks for both, so what makes a stretch of text easy for both cancels.
    Null as in `hit_rate_interval`.
    """
    return _interval([(first_hits, first_accesses), (second_hits, second_accesses)], block_steps, replicates, seed)


def automatic_block_steps(deviations: npt.NDArray[np.float64]) -> int:
    """Steps of a block for a series (S,) whose mean is asked for.

    The larger of ⌈S^(1/3)⌉ and the choice of Politis and White 2004, "Automatic block-length selection for the
    dependent bootstrap", §3.2 for the circular bootstrap (the correction of Patton, Politis and White 2009 leaves it as
    it is), at most ⌈min(3 √S, S ÷ 3)⌉; lags beyond ⌈√S⌉ + 5 are not looked at. Their choice alone is often a single
    step where S is small and a correlation hides in the noise.
    """
    steps = len(deviations)
    if not steps:
        return 1
    centred = deviations - deviations.mean()
    patience = max(5, math.ceil(math.sqrt(math.log10(steps))))
    longest = min(math.ceil(math.sqrt(steps)) + patience, steps - 1)
    size = 1 << (2 * steps - 1).bit_length()  # twice the steps, so that no lag wraps round
    covariance = np.fft.irfft(np.abs(np.fft.rfft(centred, size)) ** 2, size)[: longest + 1] / steps
    thumb = math.ceil(steps ** (1 / 3) - 1e-9)  # cube roots of cubes come out a hair above
    if covariance[0] <= 0:
        return thumb
    is_noise = np.abs(covariance[1:]) < _BOUND * math.sqrt(math.log10(steps) / steps) * covariance[0]
    last = next((lag for lag in range(longest) if is_noise[lag : lag + patience].all()), longest)
    reach = min(2 * max(last, 1), longest)
    lags = np.arange(1, reach + 1)
    weight = np.minimum(1.0, 2 * (1 - lags / reach))  # the flat-top window
    slope = 2 * float((weight * lags) @ covariance[1 : reach + 1])
    spectrum = float(covariance[0]) + 2 * float(weight @ covariance[1 : reach + 1])
    if spectrum <= 0:
        return thumb
    chosen = math.ceil((1.5 * (slope / spectrum) ** 2 * steps) ** (1 / 3))
    return max(thumb, min(chosen, math.ceil(min(3 * math.sqrt(steps), steps / 3))))


def _interval(
    rates: list[tuple[Counts, Counts]], block_steps: int | None, replicates: int, seed: int
) -> Interval | None:
    """The interval of the first rate, or of the first minus the second."""
    if len({len(counts) for pair in rates for counts in pair}) != 1:
        raise ValueError(f"counts of {[len(counts) for pair in rates for counts in pair]} steps, wanted equally many")
    if replicates < 1 or (block_steps is not None and block_steps < 1):
        raise ValueError(f"{replicates} replicates of blocks of {block_steps} steps, wanted at least 1 of either")
    steps = len(rates[0][0])
    if not all(accesses.any() for _, accesses in rates):
        return None
    if block_steps is None:
        deviations = [_deviations(hits, accesses) for hits, accesses in rates]
        block_steps = automatic_block_steps(deviations[0] if len(rates) == 1 else deviations[0] - deviations[1])
    if steps // block_steps < FEWEST_BLOCKS:
        return None
    drawn = [np.empty(replicates), np.empty(replicates)][: len(rates)]
    columns = [_wrapped_sums(counts, block_steps) for pair in rates for counts in pair]
    generator = np.random.default_rng(seed)
    num_blocks = -(-steps // block_steps)
    at_once = max(1, _STARTS_AT_ONCE // num_blocks)
    for begin in range(0, replicates, at_once):
        end = min(begin + at_once, replicates)
        starts = generator.integers(steps, size=(end - begin, num_blocks), dtype=np.int64)  # (replicates, B)
        sums = [resampled_sums(column, starts, block_steps) for column in columns]
        for values, hits, accesses in zip(drawn, sums[::2], sums[1::2], strict=True):
            values[begin:end] = np.divide(hits, accesses, out=np.full(end - begin, np.nan), where=accesses > 0)
    difference = drawn[0] if len(rates) == 1 else drawn[0] - drawn[1]
    # A replicate may draw only steps without an access: it has no rate, and none is made up for it.
    difference = difference[~np.isnan(difference)]
    if not len(difference):
        return None
    low, high = np.quantile(difference, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high), block_steps, replicates)


def _deviations(hits: Counts, accesses: Counts) -> npt.NDArray[np.float64]:
    """(S,) what each step adds to the error of the ratio, to first order: (hits − rate × accesses) ÷ mean accesses."""
    return (hits - hits.sum() / accesses.sum() * accesses) / accesses.mean()


def _wrapped_sums(counts: Counts, block_steps: int) -> npt.NDArray[np.int64]:
    """(S + block_steps + 1,) sums of everything before a step, the series going on with its own beginning."""
    sums = np.zeros(len(counts) + block_steps + 1, dtype=np.int64)
    np.cumsum(np.concatenate([counts, counts[:block_steps]]), dtype=np.int64, out=sums[1:])
    return sums


@numba.njit(cache=True, nogil=True)
def resampled_sums(sums, starts, block_steps):  # type: ignore[no-untyped-def]
    """(replicates,) sums over the blocks that begin at `starts` (replicates, B), the last cut so that S steps add up.

    `sums` are those of `_wrapped_sums`.
    """
    steps = len(sums) - block_steps - 1
    replicates, num_blocks = starts.shape
    last_steps = steps - (num_blocks - 1) * block_steps
    drawn = np.empty(replicates, dtype=np.int64)
    for replicate in range(replicates):
        total = 0
        for block in range(num_blocks - 1):
            start = starts[replicate, block]
            total += sums[start + block_steps] - sums[start]
        start = starts[replicate, num_blocks - 1]
        drawn[replicate] = total + sums[start + last_steps] - sums[start]
    return drawn
