"""Plans delivered in real replays: what is read ahead, what becomes of hints, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer import replay as supervisor
from replayer.advice import hints_of
from replayer.loop import DROPPED, SUBMITTED
from replayer.plan import BEFORE_ALL, Plan, write_plan
from replayer.pool import Pool
from replayer.request import UnusableReplay, check_request
from replayer.trace import Trace
from tests.builders import make_trace, write_trace
from tests.command_lines import replayer
from tests.replays import KIB, MIB, failed, needs_memory_groups, pool_for, proof, replayed, request, routing, tampered

EXPERT_BYTES = 64 * KIB
STEPS, LAYERS, EXPERTS = 60, 4, 64
DELIVERIES = ["advice", "blocking", "uring"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """240 events of 4 accesses, on 256 experts of four layers."""
    return make_trace(routing(STEPS, layers=LAYERS, experts=EXPERTS), layer_ids=[1, 2, 5, 9], num_experts=EXPERTS)


@pytest.fixture(scope="module")
def pool(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    """16 MiB in four files."""
    return pool_for(trace, tmp_path_factory.mktemp("advice") / "pool", EXPERT_BYTES)


def plan_of(trace: Trace, lead: int, targets: range | None = None, after: int | None = None) -> Plan:
    """Names all that each of the events needs, `lead` events before it, or after the event `after`."""
    events = len(trace.event_layer)
    chosen = range(lead, events) if targets is None else targets
    rows = [trace.expert_ids[trace.event_first_row[event] : trace.event_first_row[event + 1]] for event in chosen]
    ids = [np.unique(one) for one in rows]
    covered = np.zeros(events, dtype=bool)
    covered[list(chosen)] = True
    lengths = np.zeros(events, dtype=np.int64)
    lengths[list(chosen)] = [len(one) for one in ids]
    issued = np.full(events, BEFORE_ALL, dtype=np.int64)
    issued[list(chosen)] = [event - lead if after is None else after for event in chosen]
    return Plan(covered, issued, np.concatenate([[0], np.cumsum(lengths)]), np.concatenate(ids).astype(np.uint16))


@pytest.fixture(scope="module")
def next_event(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan file: all that an event needs, known once the event before it is done."""
    file = tmp_path_factory.mktemp("plan") / "next.parquet"
    write_plan(file, plan_of(trace, 1), trace)
    return str(file)


# Which hints there are


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, np.ndarray, list[tuple[int, int, list[int]]]]:
    """A plan for the 12 events of `tiny`, a choice of them, and (event, issued after, ids) of each row."""
    rows = []
    for event in range(12):
        if draw(st.booleans()):
            after = draw(st.integers(BEFORE_ALL, event - 1))
            rows.append((event, after, draw(st.lists(st.integers(0, 5), max_size=4, unique=True))))
    chosen = np.array(sorted(draw(st.sets(st.integers(0, 11), min_size=1))), dtype=np.int64)
    covered, issued, lengths = np.zeros(12, dtype=bool), np.full(12, -1, dtype=np.int64), np.zeros(12, dtype=np.int64)
    for event, after, ids in rows:
        covered[event], issued[event], lengths[event] = True, after, len(ids)
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.array([one for *_, ids in rows for one in ids], dtype=np.uint16)
    return Plan(covered, issued, first, ids), chosen, rows


@given(drawn=plans())
@settings(max_examples=200, deadline=None)
def test_hints_are_those_of_the_replayed_events_after_the_last_replayed_one_they_follow(drawn: Any) -> None:
    plan, chosen, rows = drawn
    tiny = make_trace(routing(4, layers=3, experts=6, k=2), layer_ids=[0, 4, 6], num_experts=6)
    found = hints_of(plan, tiny, chosen)
    expected: list[tuple[int, int, list[int]]] = []
    for place in range(len(chosen) + 1):
        # Place 0 is before all, place p after the p-th replayed event; later ones first look at what they follow.
        for event, after, ids in rows:
            follows = sum(1 for one in chosen if one <= after)
            if event in chosen and ids and follows == place:
                layer = event % 3
                expected.append((place, list(chosen).index(event), [6 * layer + one for one in ids]))
    said = [
        (place, int(found.event[hint]), found.hint_objects[slice(*found.hint_first_object[hint : hint + 2])].tolist())
        for place in range(len(chosen) + 1)
        for hint in range(found.place_first_hint[place], found.place_first_hint[place + 1])
    ]
    assert said == expected
    assert found.place_first_hint[-1] == len(expected)


# What is read ahead


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_without_a_limit_what_is_read_ahead_is_what_was_missing(
    delivery: str, trace: Trace, pool: Pool, tmp_path: Path
) -> None:
    """One hint before the first event, for an event late in the pass: it is delivered long before it is needed."""
    late = STEPS * LAYERS - 1
    write_plan(tmp_path / "plan", plan_of(trace, 1, range(late, late + 1), after=BEFORE_ALL), trace)
    run = replayed(trace, pool, plan=str(tmp_path / "plan"), delivery=delivery, warm_pass=False)
    assert not failed(run)
    (delivered,) = run.delivery
    assert delivered["hints"] == delivered["hints_submitted"] == delivered["hints_completed"] == 1
    assert delivered["named_accesses"] == delivered["named_hits"] == 4
    # Demand threads may have come first for some of it.
    assert 0 <= delivered["hinted_read_bytes"] <= delivered["hinted_missing_bytes"] <= 4 * EXPERT_BYTES


@pytest.mark.parametrize("hint_slots", [None, 4])
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_hints_add_up_within_a_wall(
    delivery: str, hint_slots: int | None, trace: Trace, pool: Pool, next_event: str
) -> None:
    needs_memory_groups()
    run = replayed(
        trace, pool, plan=next_event, delivery=delivery, hint_slots=hint_slots, mechanism="cgroup",
        capacity_bytes=4 * MIB,
    )  # fmt: skip
    assert not failed(run)
    (delivered,) = run.delivery
    assert delivered["hints"] == delivered["hints_submitted"] == STEPS * LAYERS - 1
    parts = ("completed", "overwritten", "dropped", "in_flight")
    assert sum(delivered[f"hints_{part}"] for part in parts) == STEPS * LAYERS - 1
    assert delivered["hints_dropped" if hint_slots is None else "hints_overwritten"] == 0
    assert delivered["hints_completed"] > 0
    assert delivered["named_accesses"] == 4 * (STEPS * LAYERS - 1)


def test_a_slot_is_overwritten_and_a_queue_drops_where_the_worker_is_late(
    trace: Trace, pool: Pool, tmp_path: Path
) -> None:
    """All hints at once, before the first event: the worker has one in its hands and one waiting."""
    write_plan(tmp_path / "plan", plan_of(trace, 1, range(1, STEPS * LAYERS), after=BEFORE_ALL), trace)
    asked = {"plan": str(tmp_path / "plan"), "delivery": "blocking", "warm_pass": False}
    (slot,) = replayed(trace, pool, **asked).delivery
    (queue,) = replayed(trace, pool, hint_slots=1, **asked).delivery
    (long,) = replayed(trace, pool, hint_slots=STEPS * LAYERS, **asked).delivery
    assert slot["hints_overwritten"] > 0
    assert queue["hints_dropped"] > 0
    assert (long["hints_dropped"], long["hints_overwritten"]) == (0, 0)
    assert long["hints_completed"] + long["hints_in_flight"] == STEPS * LAYERS - 1


def test_the_kernel_cuts_advice_at_its_readahead_and_pieces_are_not_cut(tmp_path: Path) -> None:
    big = 24 * MIB
    few = make_trace(np.array([[[0, 1]], [[2, 3]], [[0, 1]]]), layer_ids=[0], num_experts=4)
    pool = pool_for(few, tmp_path / "pool", big)
    write_plan(tmp_path / "plan", plan_of(few, 1, range(1, 2), after=BEFORE_ALL), few)
    asked = {"plan": str(tmp_path / "plan"), "delivery": "advice", "warm_pass": False, "steps": (0, 3), "threads": 1}
    cut = replayed(few, pool, split="none", **asked)
    whole = replayed(few, pool, split="auto", **asked)
    limit = whole.machine["read_ahead_bytes"]
    if limit is None or limit >= big:
        pytest.skip(f"readahead of {limit} bytes here cuts nothing")
    assert not failed(cut)
    assert not failed(whole)
    assert cut.delivery[0]["piece_bytes"] is None
    assert whole.delivery[0]["piece_bytes"] == limit
    assert whole.delivery[0]["hinted_read_bytes"] == whole.delivery[0]["hinted_missing_bytes"] == 2 * big
    assert cut.delivery[0]["hinted_read_bytes"] < cut.delivery[0]["hinted_missing_bytes"] == 2 * big


def test_a_plan_counts_by_what_it_says(trace: Trace, pool: Pool, tmp_path: Path) -> None:
    hashes = []
    for name, lead in (("a", 1), ("b", 1), ("c", 2)):
        write_plan(tmp_path / name, plan_of(trace, lead), trace)
        run = replayed(trace, pool, plan=str(tmp_path / name), delivery="advice", warm_pass=False, steps=(0, 5))
        hashes.append((run.run["condition_hash"], run.delivery[0]["plan_hash"]))
    assert hashes[0] == hashes[1]
    assert hashes[0][0] != hashes[2][0]
    assert hashes[0][1] != hashes[2][1]


# Faults that the proofs find


def test_hints_that_are_not_handed_over_are_missed(
    trace: Trace, pool: Pool, next_event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(arrays: dict[str, Any]) -> None:
        arrays["hints_place_first_hint"][-20:] = arrays["hints_place_first_hint"][-20]

    tampered(monkeypatch, lose)
    run = replayed(trace, pool, plan=next_event, delivery="advice", warm_pass=False)
    assert failed(run) == {"hints handed over"}


@pytest.mark.parametrize("slot", [SUBMITTED, DROPPED])
def test_a_hint_too_many_breaks_the_sum(
    slot: int, trace: Trace, pool: Pool, next_event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = supervisor.account

    def miscounted(recording: Any) -> Any:
        recording.arrays["hints_mailbox"][slot] += 1
        return honest(recording)

    monkeypatch.setattr(supervisor, "account", miscounted)
    run = replayed(trace, pool, plan=next_event, delivery="advice", warm_pass=False)
    assert failed(run) == {"hints add up"} | ({"hints handed over"} if slot == SUBMITTED else set())


def test_a_worker_that_reads_nothing_it_says_breaks_the_device_identity(
    trace: Trace, pool: Pool, next_event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages the worker read that it never saw missing: the device delivers more than anybody accounts for."""
    honest = supervisor.account

    def blind(recording: Any) -> Any:
        recording.arrays["hints_hint_missing_pages"][:] = 0
        return honest(recording)

    monkeypatch.setattr(supervisor, "account", blind)
    late = plan_of(trace, 1, range(STEPS * LAYERS - 40, STEPS * LAYERS), after=BEFORE_ALL)
    write_plan(Path(next_event).parent / "late", late, trace)
    run = replayed(
        trace, pool, plan=str(Path(next_event).parent / "late"), delivery="blocking", hint_slots=64, warm_pass=False
    )
    assert "device bytes" in failed(run)


def test_an_error_of_the_kernel_is_told(
    trace: Trace, pool: Pool, next_event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = supervisor._Child.expect

    def with_error(self: Any, kind: str, **named: Any) -> dict[str, Any]:
        report = honest(self, kind, **named)
        return {**report, "delivery_error": 5} if kind == "done" else report

    monkeypatch.setattr(supervisor._Child, "expect", with_error)
    run = replayed(trace, pool, plan=next_event, delivery="blocking", warm_pass=False)
    assert failed(run) == {"hints delivered"}
    assert proof(run, "hints delivered")["found"] == "Input/output error"


# What does not go together


def test_a_plan_without_a_hint_for_the_replayed_steps_is_refused(trace: Trace, pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "late.parquet"
    write_plan(file, plan_of(trace, 1, range(40 * LAYERS, 50 * LAYERS)), trace)
    asked = {"plan": str(file), "delivery": "advice", "warm_pass": False}
    said = r"names experts for steps 40 to 49, replayed are 0 to 19, for which it has no hint; add --steps 40:50"
    with pytest.raises(UnusableReplay, match=said):
        replayed(trace, pool, steps=(0, 20), **asked)
    with pytest.raises(UnusableReplay, match=r"replayed are 50 to 59, .* add --steps 40:50"):
        replayed(trace, pool, steps=(50, None), **asked)
    # Some of the steps are enough: the run says for how many events it had hints.
    run = replayed(trace, pool, steps=(38, 42), **asked)
    (delivered,) = run.delivery
    assert (delivered["hints"], run.run["events"]) == (2 * LAYERS, 4 * LAYERS)
    silent = plan_of(trace, 1, range(40, 41))
    nothing = Plan(silent.covered, silent.issued_after, np.zeros_like(silent.first_id), np.zeros(0, np.uint16))
    write_plan(file, nothing, trace)
    with pytest.raises(UnusableReplay, match="it names no expert for any step, so there is nothing to deliver"):
        replayed(trace, pool, **asked)


def test_a_plan_that_is_none_is_one_line(
    trace: Trace, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(trace, tmp_path / "tiny.parquet")
    (tmp_path / "bad").write_bytes(b"PAR1")
    words = ["replay", tmp_path / "tiny.parquet", "--pool", pool.folder, "--delivery", "advice", "--device", "none"]
    for plan, exits, said in (
        (tmp_path / "bad", 1, "no Parquet file of a lookahead plan"), (tmp_path, 1, "Is a directory; name a file"),
        ("", 2, "--plan '', wanted the file"), (tmp_path / "nope", 1, f"{tmp_path / 'nope'}: No such file or dir"),
        (tmp_path / "tiny.parquet", 1, "no column issued_after_event_id"), ("/dev/null", 1, "no Parquet file"),
    ):  # fmt: skip
        status, out, complaint = replayer(capsys, *words, "--plan", plan)
        assert (status, out, complaint.count("\n")) == (exits, "", 1), complaint
        assert said in complaint


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"plan": "p"}, "--plan without --delivery"
    yield {"delivery": "advice"}, "--delivery advice without --plan"
    yield {"split": "none"}, "--split or --hint-slots without --delivery"
    yield {"hint_slots": 2}, "--split or --hint-slots without --delivery"
    told = {"plan": "p", "delivery": "blocking"}
    yield {**told, "owner": "restream"}, "owner restream, which reads nothing through the page cache"
    yield {**told, "hint_slots": 0}, "--hint-slots 0, wanted 1 to"
    yield {**told, "split": 512}, "--split 512, wanted at least 4,096 bytes"


@pytest.mark.parametrize(("asked", "said"), refused())
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UnusableReplay, match=said):
        check_request(request(**asked))
