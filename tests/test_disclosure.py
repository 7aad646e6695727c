"""The reporting block: every number recomputed the slow way, and every answer turns when what it rests on turns."""

import csv
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer.disclosure import (
    PUBLISHED,
    Conformance,
    Stated,
    belady_gap,
    best_causal,
    conformance,
    conformance_answer,
    conformance_trace,
    is_causal,
    miss_bytes_per_step,
    miss_bytes_per_token,
    position_bands,
    pressure,
    reporting_block,
    reporting_text,
    seen_beforehand,
)
from replayer.simulate import Capacity, Window, prepare, simulate
from schemas.columns import SEMANTICS
from schemas.trace import TraceMetadata
from tests import oracles
from tests.builders import make_trace
from tests.strategies import routing_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
ITEMS = [
    *(f"A{number}" for number in range(1, 5)),
    *(f"B{number}" for number in range(1, 9)),
    *(f"C{number}" for number in range(1, 8)),
    *(f"D{number}" for number in range(1, 5)),
]

# Derived numbers

events = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 4)), max_size=12)


@given(events=events)
def test_pressure_is_counted_event_by_event(events):
    """Each event spelt out as often as it is counted; exact fractions, the ⌈0.95 n⌉-th smallest for p95."""
    spelt = [Fraction(size, capacity) for size, capacity, count in events for _ in range(count)]
    found = pressure(*([event[place] for event in events] for place in range(3)))
    assert found.events == len(spelt)
    assert found.events_above == sum(ratio > 1 for ratio in spelt)
    if not spelt:
        assert (found.mean, found.p95, found.share_above) == (None, None, None)
        return
    assert found.mean == pytest.approx(float(sum(spelt) / len(spelt)))
    assert found.p95 == pytest.approx(float(sorted(spelt)[math.ceil(Fraction(95, 100) * len(spelt)) - 1]))
    assert found.share_above == found.events_above / len(spelt)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40), capacity=st.integers(1, 50))
def test_one_capacity_is_that_capacity_for_every_event(sizes, capacity):
    assert (
        pressure(sizes, capacity)
        == pressure(sizes, [capacity] * len(sizes))
        == pressure(sizes, capacity, [1] * len(sizes))
    )


@pytest.mark.parametrize(("num_events", "rank"), [(1, 1), (19, 19), (20, 19), (21, 20), (100, 95), (101, 96)])
def test_p95_is_the_nearest_rank(num_events, rank):
    assert pressure(range(1, num_events + 1), 1).p95 == rank


def test_a_cache_that_holds_nothing_has_no_ratio_and_every_event_is_above_it():
    found = pressure([8, 8, 4], 0)
    assert (found.mean, found.p95, found.share_above) == (None, None, 1.0)


def test_r_of_exactly_one_is_not_above_one():
    assert pressure([8, 8], 8).share_above == 0.0
    assert pressure([8, 9], 8).share_above == 0.5


counts = st.integers(0, 1000)


@given(causal=counts, bypass=counts, forced=counts)
def test_the_gap_is_split_without_remainder(causal, bypass, forced):
    found = belady_gap(causal, bypass, forced)
    assert found.admission_misses + found.victim_misses == found.saved_misses == causal - bypass
    assert found.gap == (None if causal == 0 else (causal - bypass) / causal)
    if causal == bypass:
        assert (found.admission_share, found.victim_share) == (None, None)
    else:
        assert found.admission_share + found.victim_share == pytest.approx(1)
        assert found.admission_share == (forced - bypass) / (causal - bypass)


def test_without_forced_admission_the_gap_stands_and_its_split_is_null():
    found = belady_gap(10, 6)
    assert found.gap == 0.4
    assert (found.admission_misses, found.victim_misses) == (None, None)
    assert (found.admission_share, found.victim_share) == (None, None)


def test_the_published_gap_and_split_come_out():
    """2608.07911 Tables 12 and 14, held-out, B = 8: 18.01 and 9.93 % missed, gap 44.85 %, admission 15.69 %."""
    found = belady_gap(1801, 993, 993 + round(0.1569 * (1801 - 993)))
    assert found.gap == pytest.approx(0.4485, abs=5e-4)
    assert found.victim_share == pytest.approx(0.8431, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(trace=routing_traces(), capacity=st.integers(0, 4), semantics=st.sampled_from(["event_atomic", "sequential"]))
def test_with_equal_sizes_belady_never_misses_more_than_the_best_that_does_not_know(trace, capacity, semantics):
    """Where all that is replayed is scored: Belady is the optimum of the whole replay, not of a part of it."""
    names = ["lru", "lfu_gated", "static", "belady_bypass", "belady_forced"]
    rows = list(
        simulate(
            prepare(trace, Window(phase="all")),
            names=names,
            scope="layer",
            semantics=[semantics],
            capacities=[Capacity(experts=capacity)],
            fit="same",
        )
    )
    best = best_causal(rows)
    misses = {row["policy"]: row["misses"] for row in rows}
    assert best["policy"] in ("lru", "lfu_gated")
    assert best["misses"] == min(misses["lru"], misses["lfu_gated"])
    found = belady_gap(best["misses"], misses["belady_bypass"], misses["belady_forced"])
    assert found.gap is None or 0 <= found.gap <= 1
    assert semantics == "event_atomic" or found.admission_misses >= 0


@given(data=st.data(), num_steps=st.integers(0, 30), num_bands=st.integers(1, 5))
def test_bands_part_the_scored_steps_evenly_and_keep_their_counts(data, num_steps, num_bands):
    accesses = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num_steps, max_size=num_steps)), dtype=np.int64)
    hits = np.array([data.draw(st.integers(0, int(number))) for number in accesses], dtype=np.int64)
    bands = position_bands(accesses, hits, num_bands)
    assert (sum(band.accesses for band in bands), sum(band.hits for band in bands)) == (accesses.sum(), hits.sum())
    lengths = [sum(accesses[band.step_begin : band.step_end] > 0) for band in bands]
    assert len(bands) == min(num_bands, np.count_nonzero(accesses))
    assert not lengths or max(lengths) - min(lengths) <= 1
    assert [band.step_begin for band in bands] == sorted(band.step_begin for band in bands)
    for band in bands:
        assert band.hit_rate == hits[band.step_begin : band.step_end].sum() / band.accesses


# The conformance trace


def test_our_lru_counts_the_conformance_trace_as_published():
    """2608.07911 §2.5: 30 accesses, 12 hits, 18 misses."""
    assert conformance() == PUBLISHED == Conformance(30, 12, 18, 12)


def test_the_conformance_trace_by_the_slow_oracle_too():
    trace = conformance_trace()
    sets = trace.expert_ids.reshape(5, 3, 2)
    hits = 0
    for layer in range(3):
        events_of_layer = [event.tolist() for event in sets[:, layer]]
        hits += sum(oracles.lru(events_of_layer, size=dict.fromkeys(range(4), 1), capacity=2))
    assert hits == PUBLISHED.hits


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"public router dumps are not at {TRACES}")
def test_the_conformance_trace_is_the_published_file():
    """shijiuzhang/moe-cache-eval, event-atomic-toy-trace-v1."""
    trace = conformance_trace()
    with (TRACES / "toy-events.csv").open() as file:
        published = [
            (int(row["scheduler_step"]), int(row["layer"]), sorted(map(int, row["requested_experts"].split())))
            for row in csv.DictReader(file)
        ]
    ours = zip(trace.event_step.tolist(), trace.event_layer.tolist(), trace.expert_ids.tolist(), strict=True)
    assert [tuple(event) for event in ours] == published


def test_the_conformance_answer_turns_with_the_counts():
    other = Conformance(30, 10, 20, 12)
    assert (
        "12 hits, 18 misses, 12 of them compulsory, as published"
        in conformance_answer("random", {"event_atomic": PUBLISHED, "sequential": other}).text
    )
    same = conformance_answer("router", {"event_atomic": PUBLISHED, "sequential": PUBLISHED}).text
    assert "does not tell the semantics apart" in same
    wrong = conformance_answer("router", {"event_atomic": other, "sequential": PUBLISHED}).text
    assert "10 hits, 20 misses, 12 of them compulsory, NOT as published (12 and 18)" in wrong
    assert "tell the semantics apart" not in wrong


# The block


def metadata(**changes) -> TraceMetadata:
    """Three layers of 8 experts, top 2, one request, 10 steps of decode; sizes unknown."""
    trace = make_trace(np.tile(np.array([0, 1]), (10, 3, 1)), phases=["decode"] * 10, num_experts=8)
    counts = trace.metadata.counts.model_copy(update=changes.pop("counts", {}))
    return trace.metadata.model_copy(update={"counts": counts, **changes})


def row(policy: str = "lru", misses: int = 40, **changes) -> dict:
    """100 accesses of 120 selections in four scored steps after six warm ones; 2 experts per layer."""
    return {
        "trace_id": "tiny", "policy": policy, "scope": "layer", "semantics": "event_atomic", "access_order": "router",
        "dedup": "union", "capacity_experts_total": 6, "capacity_bytes": None, "step_begin": 0, "step_end": 10,
        "phase": "decode", "warm_fraction": 0.6, "warm_steps": 6, "warm_pass": False, "fit": None, "seed": None,
        "scored_steps": 4, "scored_accepted_tokens": 4, "selections": 120, "accesses": 100, "hits": 100 - misses,
        "misses": misses, "miss_bytes": None, "preload_bytes": None, **changes,
    }  # fmt: skip


def unions(*sizes: int) -> np.ndarray:
    """Scored events of the three layers by union size, alike in each."""
    return np.tile(np.bincount(sizes, minlength=9), (3, 1))


def answers(rows: list[dict] | None = None, of: TraceMetadata | None = None, **given_too) -> dict[str, str]:
    block = reporting_block(of or metadata(), rows or [row()], **given_too)
    assert [line["item"] for line in block] == ITEMS
    assert all(line["known"] == ("unknown" not in line["answer"]) for line in block)
    assert {line["item"][0] + line["topic"] for line in block} == {"Aexecution", "Bworkload", "Cregime", "Doracle"}
    assert "\n".join(reporting_text(block)).count("\n  ") == len(ITEMS)
    return {line["item"]: line["answer"] for line in block}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {item for item in ITEMS if before[item] != after[item]}


def test_what_nobody_said_is_unknown_and_what_cannot_apply_says_why():
    found = answers()
    assert [item for item, answer in found.items() if answer == "unknown"] == ["B1", "B2", "B5", "B7"]
    assert {item for item, answer in found.items() if answer.startswith("not applicable: ")} == {
        "B4", "B6", "B8", "C6", "D2",
    }  # fmt: skip
    assert {item for item, answer in found.items() if "unknown" in answer} == {"B1", "B2", "B5", "B7", "C1", "C7", "D1"}


@pytest.mark.parametrize(
    ("stated", "items", "text"),
    [
        ({"templates_per_category": 3}, {"B1"}, "templates per category 3; distinct prompt heads unknown"),
        ({"distinct_prompt_heads": 24}, {"B1"}, "distinct prompt heads 24"),
        ({"distinct_final_lines": 16}, {"B1"}, "distinct final lines 16"),
        ({"chat_template_applied": True}, {"B2"}, "yes"),
        ({"chat_template_applied": False}, {"B2"}, "no"),
        ({"shared_prefix_steps": 4}, {"B3"}, "they reach beyond the 4 steps"),
        ({"shared_prefix_steps": 10}, {"B3"}, "they do not reach beyond the 10 steps"),
        ({"position_locked": True}, {"B4"}, "yes"),
        ({"token_agreement": (0.01, 0.2)}, {"B5"}, "1.0 % in the mean, 20.0 % at the 95th"),
        ({"unique_sequences": (11, 12)}, {"B5"}, "11 of 12 sequences unique"),
        ({"expert_jaccard": (0.144, 0.077)}, {"B6"}, "Jaccard 0.144 within a category, 0.077 across"),
        ({"matched_pair_control": "same records both ways"}, {"B8"}, "same records both ways"),
        ({"service_discipline": "continuous batching"}, {"C5", "D4"}, "continuous batching"),
        ({"bandwidth_bytes_per_s": 2.0**30}, {"D1"}, "bandwidth budget assumed: 1.00 GiB/s"),
    ],
)
def test_each_thing_the_user_states_answers_its_own_item(stated, items, text):
    batched = metadata(counts={"requests": 2})
    before = answers(of=batched)
    after = answers(of=batched, stated=Stated(**stated))
    assert changed(before, after) == items
    assert all(text in after[item] for item in items)


def test_every_fact_of_stated_is_asked_for_above():
    (mark,) = test_each_thing_the_user_states_answers_its_own_item.pytestmark
    assert {name for stated, _, _ in mark.args[1] for name in stated} == set(Stated.__dataclass_fields__)


@pytest.mark.parametrize(
    ("changes", "item", "text"),
    [
        ({"semantics": "sequential"}, "A1", "sequential: a single access;"),
        ({"semantics": "token_clock"}, "A1", "ticks once a step"),
        ({"dedup": "none"}, "A1", "every selection"),
        ({"semantics": "sequential"}, "A2", "can be evicted before its turn and is then counted as a miss"),
        ({"semantics": "token_clock"}, "A2", "can be evicted before its turn"),
        ({"access_order": "ascending"}, "A3", "ascending expert ids"),
        ({"access_order": "random", "seed": 7}, "A3", "random, seed 7"),
        ({"access_order": "random", "seed": 7}, "A4", "random order"),
        ({"phase": "all"}, "B3", "of every phase"),
        ({"phase": "unknown"}, "B3", "whether they are decode steps: unknown"),
        ({"scored_steps": 3}, "B3", "3 steps scored of 10 replayed and 10 recorded"),
        ({"scope": "global"}, "C2", "6 experts in one cache (25.0 % of all): no quotas"),
        ({"capacity_experts_total": 9}, "C2", "3 experts per layer (37.5 % of all): equal quotas, no remainder"),
        ({"capacity_experts_total": None, "capacity_bytes": 100}, "C2", "the remainder of 1 bytes to the lowest layer"),
        ({"quota_fit": "first:0.6"}, "C2", "layers' shares fitted on first:0.6"),
        ({"misses": 60}, "C3", "misses ÷ accesses 60.0 %, misses ÷ selections 50.0 %"),
        ({"accesses": 120}, "C4", "accesses ÷ selections 100.0 %"),
        ({"dedup": "none"}, "C4", "yes: every selection is an access"),
        ({"step_end": 8}, "D4", "steps 0 to 7"),
        ({"scored_accepted_tokens": None}, "D1", "accepted tokens unknown"),
    ],
)
def test_the_contract_decides_the_answers(changes, item, text):
    assert text not in answers()[item]
    assert text in answers([row(**changes)])[item]


def test_immediate_retention_is_not_claimed_of_event_atomic_replay():
    assert "evicted before its turn" not in answers()["A2"]
    assert answers()["A2"].startswith("event_atomic: at the end of the event")
    both = answers([row(), row(semantics="sequential")])["A2"]
    assert "at the end of the event" in both
    assert "evicted before its turn" in both


@pytest.mark.parametrize(
    ("changes", "item", "text"),
    [
        ({"model": None}, "D4", "model unknown"),
        ({"counts": {"requests": 2}}, "B4", "unknown"),
        ({"counts": {"requests": 2}}, "B6", "unknown"),
        ({"counts": {"requests": 2}}, "C5", "2 requests, discipline unknown"),
        ({"counts": {"steps": 400}}, "B3", "400 recorded"),
        ({"pass_boundaries": "assumed_per_token"}, "B3", "one assumed per token position"),
        ({"experts_per_layer": [8, 16, 32]}, "C7", "8–32 experts per layer, 2 per token, 3 layers"),
    ],
)
def test_the_trace_decides_the_answers(changes, item, text):
    assert text not in answers()[item]
    assert text in answers(of=metadata(**changes))[item]


def test_c1_and_c7_give_the_unions_the_capacities_and_their_ratio():
    found = answers(unions=unions(2, 2, 3, 3, 4))
    assert "2.80 experts in the mean, 4 at the 95th percentile, 4 at most" in found["C1"]
    assert "2 experts per layer (25.0 % of all): r = union ÷ capacity of its cache 1.400 in the mean" in found["C1"]
    assert "2.000 at the 95th percentile, above 1 in 60.0 % of 15 events" in found["C1"]
    assert "2 experts per layer (25.0 % of all) 1.400" in found["C7"]
    wider = answers([row(capacity_experts_total=12)], unions=unions(2, 2, 3, 3, 4))
    assert "0.700 in the mean" in wider["C1"]
    assert "above 1 in 0.0 % of 15 events" in wider["C1"]


def test_c1_names_every_capacity_once():
    rows = [
        row(policy, semantics=semantics, capacity_experts_total=total)
        for total in (6, 12)
        for semantics in ("event_atomic", "sequential")
        for policy in ("lru", "belady_bypass")
    ]
    assert answers(rows, unions=unions(2))["C1"].count("r = union") == 2


def test_c1_takes_the_ratio_of_the_row_where_layers_have_shares_of_their_own():
    shares = {"quota_fit": "first:0.6"}
    assert "r unknown" in answers([row(**shares)], unions=unions(2))["C1"]
    counted = {"pressure_mean": 1.25, "pressure_p95": 2.0, "events_above_capacity": 3, "scored_events": 12}
    found = answers([row(**shares, **counted)], unions=unions(2))["C1"]
    assert "6 experts over a cache per layer (25.0 % of all): r = union ÷ capacity of its cache 1.250" in found
    assert "above 1 in 25.0 % of 12 events" in found


def test_c1_of_one_cache_adds_what_a_whole_step_asks_for():
    found = answers([row(scope="global", capacity_experts_total=50)], unions=unions(2, 2, 3, 3, 4))["C1"]
    assert "0.056 in the mean" in found
    assert "a whole step: 25.0 accesses, 0.500 of the cache" in found


def test_c1_in_bytes_counts_the_whole_experts_of_each_layers_quota():
    """100 bytes over three layers are 34, 33 and 33: 3 experts of 10 bytes each, or 1 of 20 in the last layer."""
    in_bytes = {"capacity_experts_total": None, "capacity_bytes": 100}
    assert "r unknown" in answers([row(**in_bytes)], unions=unions(3))["C1"]
    assert "1.000 in the mean" in answers([row(**in_bytes)], unions=unions(3), expert_bytes=10)["C1"]
    by_layer = metadata(expert_bytes=[10, 10, 20])
    found = answers([row(**in_bytes)], by_layer, unions=unions(3))["C1"]
    assert f"{5 / 3:.3f} in the mean, 3.000 at the 95th percentile, above 1 in 33.3 %" in found
    unequal = metadata(expert_bytes=[[10, 10, 10, 10, 10, 10, 10, 20]] * 3)
    assert "r unknown" in answers([row(**in_bytes)], unequal, unions=unions(3))["C1"]


def test_the_remainder_of_a_capacity_in_bytes_is_the_lowest_layers():
    """89 bytes over three layers of experts of 31 bytes: 29 + 2 = 31 hold one expert in the lowest layer, else none."""
    row_in_bytes = row(capacity_experts_total=None, capacity_bytes=89)
    only_lowest = np.zeros((3, 9), dtype=np.int64)
    only_lowest[0, 1] = 5
    assert "1.000 in the mean" in answers([row_in_bytes], unions=only_lowest, expert_bytes=31)["C1"]
    assert "no r, since a cache holds nothing" in answers([row_in_bytes], unions=unions(1), expert_bytes=31)["C1"]


def test_c6_says_what_a_table_was_fitted_on_and_what_it_had_seen():
    def c6(fit: str, **changes) -> str:
        return answers([row("static", fit=fit, **changes)])["C6"]

    assert "first 60.0 % of the replayed steps, none of them scored" in c6("first:0.6")
    assert "first 80.0 % of the replayed steps, 2 of them scored afterwards" in c6("first:0.8")
    assert "fitted on the steps it is scored on, a diagnostic" in c6("same")
    assert "fitted on other.parquet:first:0.5, another trace" in c6("other.parquet:first:0.5")
    assert "preloaded (expert sizes unknown), counted apart and never as misses" in c6("same")
    assert "preloaded (60 bytes)" in c6("same", preload_bytes=60)
    assert "most accessed of each layer" in c6("same")
    assert "most accessed over all (layer, expert)" in c6("same", scope="global")
    assert "pinned_lru (50.0 % of each capacity)" in answers([row("pinned_lru", fit="same", pinned_fraction=0.5)])["C6"]


@given(warm=st.integers(0, 10), tenths=st.integers(1, 10))
def test_steps_seen_beforehand_are_counted_step_by_step(warm, tenths):
    fitted = set(range(tenths))
    scored = set(range(warm, 10))
    assert seen_beforehand(row(warm_steps=warm), f"first:{tenths / 10}") == len(fitted & scored)
    assert seen_beforehand(row(warm_steps=warm), "same") == len(scored)
    assert seen_beforehand(row(warm_steps=warm), "other.parquet:first:0.9") == 0


def test_who_saw_the_scored_steps_is_no_causal_policy():
    assert is_causal(row("lru"))
    assert is_causal(row("static", fit="first:0.6"))
    assert not is_causal(row("static", fit="first:0.7"))
    assert not is_causal(row("static", fit="same"))
    assert not is_causal(row("belady_forced"))
    assert not is_causal(row("lru", admission="same:top:2"))
    assert is_causal(row("lru", admission="first:0.6:top:2"))
    assert not is_causal(row("lru", quota_fit="same"))


def test_d1_gives_bytes_per_accepted_token_and_what_a_bandwidth_allows():
    sized = row(miss_bytes=4096)
    assert (miss_bytes_per_step(sized), miss_bytes_per_token(sized)) == (1024, 1024)
    found = answers([sized], stated=Stated(bandwidth_bytes_per_s=10_240))["D1"]
    assert "lru: 1.00 KiB missed per accepted token, at most 10.00 tokens/s" in found
    assert "bandwidth budget unknown" in answers([sized])["D1"]
    two = row(miss_bytes=4096, scored_accepted_tokens=8)
    assert (miss_bytes_per_step(two), miss_bytes_per_token(two)) == (1024, 512)
    assert "512 bytes missed per accepted token" in answers([two])["D1"]
    assert "10.00 experts missed per accepted token" in answers()["D1"]
    assert miss_bytes_per_token(row()) is None
    unsaid = row(miss_bytes=4096)
    del unsaid["scored_accepted_tokens"]
    assert miss_bytes_per_token(unsaid) is None
    assert "1.00 KiB missed per step" in answers([unsaid])["D1"]


def gap_rows(**misses: int) -> list[dict]:
    return [row(policy, count) for policy, count in misses.items()]


def test_d2_is_the_gap_of_the_best_policy_that_does_not_know_and_its_split():
    rows = gap_rows(lru=40, lfu_gated=50, belady_bypass=20, belady_forced=25)
    assert (
        "gap 50.0 % (20 of the 40 misses of lru); admission share 25.0 % (5 ÷ 20), victim share 75.0 % (15 ÷ 20)"
        in (answers(rows)["D2"])
    )
    turned = gap_rows(lru=60, lfu_gated=50, belady_bypass=20, belady_forced=25)
    assert "gap 60.0 % (30 of the 50 misses of lfu_gated)" in answers(turned)["D2"]
    leaky = [*rows, row("static", 1, fit="same")]
    assert answers(leaky)["D2"] == answers(rows)["D2"]


def test_d2_says_what_it_lacks():
    assert "its split unknown, since belady_forced was not simulated" in answers(gap_rows(lru=4, belady_bypass=2))["D2"]
    assert "gap unknown, since belady_bypass was not" in answers(gap_rows(lru=4, belady_forced=2))["D2"]
    assert "gap unknown, since a policy that does not know" in answers(gap_rows(belady_bypass=2))["D2"]
    assert "gap — (0 of the 0 misses of lru)" in answers(gap_rows(lru=0, belady_bypass=0, belady_forced=0))["D2"]


def test_d2_keeps_contracts_apart():
    rows = gap_rows(lru=40, belady_bypass=20, belady_forced=25)
    rows += [{**one, "semantics": "sequential", "misses": one["misses"] * 2} for one in rows]
    found = answers(rows)["D2"]
    assert "event_atomic, 2 experts per layer (25.0 % of all): gap 50.0 % (20 of" in found
    assert "sequential, 2 experts per layer (25.0 % of all): gap 50.0 % (40 of" in found


@pytest.mark.parametrize(
    ("changes", "is_part"),
    [
        ({"warm_steps": 0}, False),
        ({"warm_steps": 0, "phase": "all"}, False),
        ({"warm_steps": 0, "phase": "prefill"}, True),
        ({"warm_steps": 6}, True),
        ({"warm_steps": 0, "warm_pass": True}, True),
    ],
)
def test_d2_says_where_belady_was_the_optimum_of_more_than_what_is_scored(changes, is_part):
    rows = [{**one, **changes} for one in gap_rows(lru=40, belady_bypass=20, belady_forced=25)]
    assert ("over the whole replay, of which these counts are a part" in answers(rows)["D2"]) == is_part


def test_with_unequal_sizes_belady_is_called_a_reference():
    rows = [
        {**one, "capacity_experts_total": None, "capacity_bytes": 60}
        for one in gap_rows(lru=40, belady_bypass=20, belady_forced=25)
    ]
    assert "a reference and no bound" in answers(rows, metadata(expert_bytes=[10, 10, 20]))["D2"]
    assert "a reference and no bound" not in answers(rows, metadata(expert_bytes=[10, 10, 10]))["D2"]


def test_b7_gives_the_hit_rate_by_band():
    accesses = np.array([0, 0, 10, 10, 10, 10], dtype=np.int64)
    hits = np.array([0, 0, 5, 5, 6, 8], dtype=np.int64)
    found = answers(bands=("lru", position_bands(accesses, hits, 2)))["B7"]
    assert "hit rate of lru by band of scored steps: 2–3 50.0 %, 4–5 70.0 %; 20.0 points" in found


def test_a_name_that_holds_the_word_is_still_known():
    named = metadata(trace_id="unknown-0123", model="unknown moe")
    block = reporting_block(named, [row(trace_id="unknown-0123")])
    assert next(line["known"] for line in block if line["item"] == "D4")


def test_rows_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="no result"):
        reporting_block(metadata(), [])
    with pytest.raises(ValueError, match="they differ in step_end"):
        reporting_block(metadata(), [row(), row(step_end=9)])
    with pytest.raises(ValueError, match="rows of trace tiny, but metadata of other"):
        reporting_block(metadata(trace_id="other"), [row()])


@settings(max_examples=25, deadline=None)
@given(trace=routing_traces(known_sizes=True), capacity=st.integers(0, 5), in_bytes=st.booleans())
def test_real_rows_are_answered_and_their_own_pressure_agrees(trace, capacity, in_bytes):
    """Events are counted here by hand, as sets; where the rows bring a ratio of their own, both must say the same."""
    asked = Capacity(bytes=capacity) if in_bytes else Capacity(experts=capacity)
    rows = list(
        simulate(
            prepare(trace, Window()),
            names=["lru", "static", "belady_bypass", "belady_forced"],
            scope="layer",
            semantics=[semantics for semantics in SEMANTICS if semantics != "token_clock"],
            capacities=[asked],
        )
    )
    counted = np.zeros((len(trace.metadata.moe_layer_ids), max(trace.metadata.experts_per_layer) + 1), dtype=np.int64)
    warmup = 2
    for event, layer in enumerate(trace.event_layer):
        of_event = trace.expert_ids[trace.event_first_row[event] : trace.event_first_row[event + 1]]
        phase = trace.event_phase[event]
        is_scored = phase != warmup if rows[0]["phase"] == "all" else phase == 1
        counted[layer, len(set(of_event.ravel().tolist()))] += is_scored
    assert (counted.sum(axis=0) @ np.arange(counted.shape[1])) == rows[0]["accesses"]
    assert len(reporting_block(trace.metadata, rows, unions=counted)) == len(ITEMS)
    if rows[0].get("pressure_mean") is not None:
        found = pressure(np.tile(np.arange(counted.shape[1]), len(counted)), capacity, counted.ravel())
        assert rows[0]["pressure_mean"] == pytest.approx(found.mean)
        assert rows[0]["pressure_p95"] == pytest.approx(found.p95)
        assert (rows[0]["events_above_capacity"], rows[0]["scored_events"]) == (found.events_above, found.events)
