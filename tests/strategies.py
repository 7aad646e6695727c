"""Generators of small inputs for property tests: the only place that draws them.

Traces are valid by construction and small, with repeats likely: each layer draws few distinct rows and every event
picks from them.
"""

from typing import Any

from hypothesis import strategies as st

from replayer.simulate import Capacity
from replayer.trace import Trace
from schemas.columns import PHASES
from tests.builders import make_trace

MAX_SIZE_BYTES = 4


@st.composite
def routing_traces(
    draw: st.DrawFn,
    *,
    max_rows: int = 3,
    all_phases: bool = True,
    layers_may_rest: bool = True,
    known_sizes: bool = False,
) -> Trace:
    """Traces of 1–3 layers of 2–6 experts and 1–8 steps, at least one of them no warm-up; sizes unknown to unequal.

    With `layers_may_rest` the last of several layers has no event in some steps.
    """
    num_layers = draw(st.integers(1, 3))
    num_experts = draw(st.lists(st.integers(2, 6), min_size=num_layers, max_size=num_layers))
    top_k = draw(st.integers(1, min(num_experts)))
    rows_to_pick = [draw(st.lists(_rows(count, top_k), min_size=1, max_size=4)) for count in num_experts]
    num_steps = draw(st.integers(1, 8))
    steps = [
        [
            draw(_events(rows_to_pick[layer], max_rows, may_be_empty=layers_may_rest and 0 < layer == num_layers - 1))
            for layer in range(num_layers)
        ]
        for _ in range(num_steps)
    ]
    phases = None
    if all_phases:
        phases = draw(st.lists(st.sampled_from(PHASES), min_size=num_steps, max_size=num_steps))
        if set(phases) == {"warmup"}:
            phases[-1] = "unknown"
    layer_ids = sorted(draw(st.sets(st.integers(0, 9), min_size=num_layers, max_size=num_layers)))
    return make_trace(
        steps,
        phases=phases,
        layer_ids=layer_ids,
        num_experts=num_experts,
        expert_bytes=draw(_sizes(num_experts, known=known_sizes)),
    )


def single_row_traces() -> st.SearchStrategy[Trace]:
    """Rectangular traces of one token per step: one row of k distinct experts for every layer in every step."""
    return routing_traces(max_rows=1, all_phases=False, layers_may_rest=False)


def _rows(num_experts: int, top_k: int) -> st.SearchStrategy[list[int]]:
    return st.permutations(range(num_experts)).map(lambda order: order[:top_k])


def _events(rows: list[list[int]], max_rows: int, *, may_be_empty: bool) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.sampled_from(rows), min_size=0 if may_be_empty else 1, max_size=max_rows)


def _sizes(num_experts: list[int], *, known: bool) -> st.SearchStrategy[Any]:
    size = st.integers(1, MAX_SIZE_BYTES)
    per_expert = st.tuples(*[st.lists(size, min_size=count, max_size=count) for count in num_experts]).map(list)
    sizes = [size, st.lists(size, min_size=len(num_experts), max_size=len(num_experts)), per_expert]
    return st.one_of(*sizes) if known else st.one_of(st.none(), *sizes)


def capacities(trace: Trace) -> st.SearchStrategy[Capacity]:
    """Capacities from nothing to more than everything; in bytes too where the sizes are known."""
    in_experts = st.integers(0, trace.num_objects + 1).map(lambda experts: Capacity(experts=experts))
    if trace.metadata.expert_bytes is None:
        return in_experts
    in_bytes = st.integers(0, trace.num_objects * MAX_SIZE_BYTES + 1).map(lambda size: Capacity(bytes=size))
    return st.one_of(in_experts, in_bytes)


def access_lists() -> st.SearchStrategy[list[int]]:
    """Up to nine accesses to at most four experts, for oracles that try every choice."""
    return st.lists(st.integers(0, 3), min_size=1, max_size=9)


def event_lists() -> st.SearchStrategy[list[list[int]]]:
    """Up to five events of at most four distinct experts, for oracles that try every choice."""
    return st.lists(st.permutations(range(4)).flatmap(_some_of), min_size=1, max_size=5)


def _some_of(order: list[int]) -> st.SearchStrategy[list[int]]:
    return st.integers(1, len(order)).map(lambda count: order[:count])
