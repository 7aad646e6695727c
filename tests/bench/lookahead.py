"""The counting predictors over 3.07 M selections: every reuse window, width and depth, after compilation.

On the published `code` trace (48 layers × 128 experts) where it is at hand, else on generated routes of as many
selections. The memory of one depth's co-activation table is that of as many selections over 92 layers × 896 experts.
"""

import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from pipeline.locality import REUSE_WINDOWS, trace_locality
from pipeline.lookahead import DEPTHS, WIDTH_FACTORS, lookahead_tables, score_plan
from pipeline.predictors import conditional, first_part, frequency, learned, previous_token
from replayer.trace import Trace
from tests.bench.policies import EXPERTS, peak_bytes, report, synthetic_routes
from tests.builders import make_trace

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces" / "qwen3-30b-code.npz"

LARGE_LAYERS, LARGE_EXPERTS, LARGE_TOP_K, LARGE_STEPS = 92, 896, 16, 2_086
MOST_TABLE_BYTES = 1 << 30


def main(samples: int) -> None:
    """Medians of so many repetitions of each, one after the other; the first round compiles and is not counted."""
    if PUBLISHED.is_file():
        routes, experts = np.load(PUBLISHED)["experts"].transpose(1, 0, 2), 128
    else:
        routes, experts = synthetic_routes(6_400) % EXPERTS, EXPERTS
    trace = make_trace(np.ascontiguousarray(routes), num_experts=experts)
    windows = f"windows {', '.join(map(str, REUSE_WINDOWS))}"
    works = {
        f"counting predictors, depths 1 to {DEPTHS[-1]}": lambda: count(trace),
        f"reuse in {windows}, with nulls": lambda: trace_locality(trace),
        "the learned one, a depth": lambda: learned(trace, depth=1, width=16, fit=first_part(trace, Fraction("0.6"))),
        "both tables, all predictors and nulls": lambda: lookahead_tables(trace),
    }
    wanted = {0: 1.0, 2: 5.0}
    for place, (said, work) in enumerate(works.items()):
        seconds = median_seconds(work, samples)
        limit = wanted.get(place)
        found = f"{seconds:.2f} s of {trace.expert_ids.size / 1e6:.2f} M selections"
        if limit is None:
            report(said, found)
        else:
            report(said, found, f"< {limit:.0f} s", reached=seconds < limit)
    bench_memory()


def bench_memory() -> None:
    """Peak of one depth's plan above what the process had with the trace in memory; the plan itself is in it."""
    trace = large_trace()
    fit = first_part(trace, Fraction("0.6"))
    # Compiles, on a trace of no size.
    small = make_trace(np.zeros((4, 2, 1), dtype=int), num_experts=2)
    conditional(small, depth=1, width=1, fit=first_part(small, Fraction("0.6")))
    for width in (LARGE_TOP_K, 4 * LARGE_TOP_K):
        peak = peak_bytes(lambda width=width: conditional(trace, depth=1, width=width, fit=fit))  # type: ignore[misc]
        report(
            f"one depth's table, {LARGE_LAYERS} layers × {LARGE_EXPERTS} experts, plan {width} wide",
            f"{peak / 2**20:,.0f} MiB above the trace, {trace.expert_ids.size / 1e6:.2f} M selections",
            f"≤ {MOST_TABLE_BYTES >> 20:,} MiB",
            reached=peak <= MOST_TABLE_BYTES,
        )


def large_trace() -> Trace:
    """Each of an event's experts is drawn from a part of its own of the layer, so no two are the same."""
    part = LARGE_EXPERTS // LARGE_TOP_K
    drawn = np.random.default_rng(0).integers(0, part, size=(LARGE_STEPS, LARGE_LAYERS, LARGE_TOP_K))
    return make_trace(drawn + part * np.arange(LARGE_TOP_K), num_experts=LARGE_EXPERTS)


def count(trace: Trace) -> None:
    """Plans and scores of the previous token, of frequencies and of tables at every depth and width."""
    fit = first_part(trace, Fraction("0.6"))
    scored = trace.event_step >= fit.steps
    widths = [factor * trace.top_k for factor in WIDTH_FACTORS]
    score_plan(trace, previous_token(trace), scored)
    for plan in (
        frequency(trace, width=widths[-1], fit=fit),
        *(conditional(trace, depth=depth, width=widths[-1], fit=fit) for depth in DEPTHS),
    ):
        for width in widths:
            score_plan(trace, plan, scored, width=width)


def median_seconds(work: Callable[[], object], samples: int) -> float:
    """The first is not counted."""
    seconds = []
    for sample in range(samples + 1):
        started = time.perf_counter()
        work()
        if sample:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
