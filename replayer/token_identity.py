"""Two owners of the experts under the same prompts, in balanced pairs: do the tokens agree, and which decodes faster.

After arXiv 2608.12103, §12: per prompt three pairs, the first owner first, the second first, and in an order that a
seed draws; a pair whose tokens differ says nothing about time. Who decodes does not belong here.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

PAIRS = 3
"""Of each prompt."""


class Turn(NamedTuple):
    """One decode that is due: `arm` 0 is the first owner, 1 the second."""

    prompt: int
    pair: int
    place: int
    arm: int


@dataclass(frozen=True)
class Arm:
    """What one decode of a pair left. bytes_valid, time_valid: of its run."""

    run_id: str
    owner: str
    token_sha256: str
    tokens: int
    degenerate: bool
    bytes_valid: bool
    time_valid: bool
    warm_up_ns: int | None
    prefill_ns: int
    decode_ns: int
    decode_wait_ns: int
    device_bytes: int | None


def turns(prompts: int, seed: int) -> Iterator[Turn]:
    """Every decode of the experiment, in order."""
    draw = random.Random(seed)  # noqa: S311 - an order, no secret
    for prompt in range(prompts):
        for pair in range(PAIRS):
            arms = [(0, 1), (1, 0), draw.sample((0, 1), 2)][pair]
            for place, arm in enumerate(arms):
                yield Turn(prompt, pair, place, arm)


def void(first: Arm, second: Arm) -> str | None:
    """Why a pair says nothing; null where it does."""
    if first.token_sha256 != second.token_sha256:
        return "the tokens differ"
    if first.degenerate:
        return "one token repeats"
    wrong = [arm for arm in (first, second) if not arm.bytes_valid]
    return f"bytes of {wrong[0].run_id} are not valid" if wrong else None


def time_ratio(first: Arm, second: Arm) -> float | None:
    """Decode time of the second owner ÷ that of the first, above 1 where the first is faster; null where it is void."""
    if void(first, second) is not None or not (first.time_valid and second.time_valid):
        return None
    return second.decode_ns / first.decode_ns


def summary(pairs: Sequence[tuple[int, Arm, Arm]]) -> list[dict[str, Any]]:
    """Per prompt: pairs, those whose tokens agree, those with times, and the median of their ratios with its range."""
    rows = []
    for prompt in sorted({prompt for prompt, _, _ in pairs}):
        own = [(first, second) for number, first, second in pairs if number == prompt]
        ratios = [ratio for first, second in own if (ratio := time_ratio(first, second)) is not None]
        rows.append(
            {
                "prompt": prompt,
                "pairs": len(own),
                "identical_pairs": sum(first.token_sha256 == second.token_sha256 for first, second in own),
                "timed_pairs": len(ratios),
                "time_ratio_median": median(ratios) if ratios else None,
                "time_ratio_low": min(ratios, default=None),
                "time_ratio_high": max(ratios, default=None),
            }
        )
    return rows
