"""`replayer simulate` and `replayer curve` as their users meet them: documents, tables, and one line per wrong call."""

import json
from pathlib import Path

import numpy as np
import pytest

from replayer import cli, streams
from replayer import trace as trace_module
from replayer.simulate import Capacity, Window, prepare, simulate
from replayer.trace import Trace, read_trace
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests.builders import make_trace, write_trace

STEPS, LAYERS, EXPERTS = 60, 2, 8


def routed(path: Path, seed: int, *, num_experts: int = EXPERTS, **known) -> Path:
    """Writes a trace of two popular experts a step on every layer, which ones depends on the seed."""
    generator = np.random.default_rng(seed)
    weights = generator.permutation(np.geomspace(1, 0.1, num_experts))
    drawn = np.argsort(generator.random((STEPS, LAYERS, num_experts)) ** (1 / weights), axis=-1)[..., -2:]
    return write_trace(make_trace(drawn, num_experts=num_experts, trace_id=path.stem, **known), path)


@pytest.fixture
def traces(tmp_path) -> dict[str, Path]:
    """Two traces of one model, one whose experts have sizes, and one of another model."""
    return {
        "a": routed(tmp_path / "a.parquet", 0),
        "b": routed(tmp_path / "b.parquet", 1),
        "sized": routed(tmp_path / "sized.parquet", 2, expert_bytes=10),
        "other": routed(tmp_path / "other.parquet", 3, num_experts=9),
    }


def replayer(capsys, *arguments: object) -> tuple[int, str, str]:
    try:
        status = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def document(capsys, *arguments: object) -> dict:
    status, out, err = replayer(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def rows_of(found: dict) -> list[dict]:
    """The rows of a document, checked against the table."""
    table = TABLES["hit_rate"]
    rows = [{name: value for name, value in row.items() if not name.startswith("by_")} for row in found["results"]]
    assert all(set(row) == set(table.column_names) for row in rows)
    validate_table(table.frame(rows), table)
    return rows


def hits_of(trace: Trace, **window) -> int:
    """Hits of an event-atomic LRU of three experts a layer."""
    (row,) = simulate(
        prepare(trace, Window(**window)),
        names=["lru"],
        scope="layer",
        semantics=["event_atomic"],
        capacities=[Capacity(experts=3)],
    )
    return row["hits"]


def test_a_document_holds_the_rows_of_simulate(capsys, traces):
    found = document(
        capsys, "simulate", traces["sized"], "--policy", "lru,arc", "--capacity-experts", "2,3", "--warm-fraction", ".5"
    )
    assert set(found) == {"trace_id", "results"}
    wanted = simulate(
        prepare(read_trace(traces["sized"]), Window(warm_fraction=0.5)),
        names=["lru", "arc"],
        scope="layer",
        semantics=["event_atomic"],
        capacities=[Capacity(experts=2), Capacity(experts=3)],
    )
    assert rows_of(found) == list(wanted)


def test_choices_reach_the_rows(capsys, traces):
    said = ["--policy", "pinned_lru,two_list", "--fit", "first:0.5", "--pinned-fraction", "0.25"]
    said += ["--admit", "first:0.5:top:4", "--quota-fit", "same", "--folios-per-expert", "2", "--capacity-experts", "4"]
    pinned, two_list = rows_of(document(capsys, "simulate", traces["a"], *said))
    assert (pinned["fit"], pinned["pinned_fraction"], pinned["folios_per_expert"]) == ("first:0.5", 0.25, None)
    assert (two_list["fit"], two_list["pinned_fraction"], two_list["folios_per_expert"]) == (None, None, 2)
    assert {(row["admission"], row["quota_fit"]) for row in (pinned, two_list)} == {("first:0.5:top:4", "same")}


def test_merged_streams_are_one_batch_beside_its_streams_alone(capsys, traces):
    found = document(capsys, "simulate", traces["a"], "--merge", traces["b"], "--capacity-experts", "3")
    (row,), batch = rows_of(found), found["batch"]
    alone = [read_trace(traces[name]) for name in "ab"]
    merged = streams.merged(alone)
    assert row["trace_id"] == found["trace_id"] == merged.metadata.trace_id
    assert row["hits"] == hits_of(merged)
    assert (batch["streams"], batch["stream_accesses"]) == (["a", "b"], [STEPS * LAYERS * 2] * 2)
    assert batch["merged_accesses"] == row["accesses"]
    assert batch["dedup_factor"] == 2 * STEPS * LAYERS * 2 / row["accesses"]
    (point,) = batch["results"]
    misses = [STEPS * LAYERS * 2 - hits_of(one) for one in alone]
    assert (point["stream_misses"], point["merged_misses"]) == (misses, row["misses"])
    assert point["per_token_miss_ratio"] == pytest.approx(row["misses"] / sum(misses))


def test_streams_alone_are_scored_as_their_batch_is(capsys, tmp_path):
    phases = ["prefill"] * 30 + ["decode"] * 30
    mixed, decoded = (
        routed(tmp_path / f"{name}.parquet", seed, phases=said)
        for seed, (name, said) in enumerate([("mixed", phases), ("decoded", ["decode"] * 60)])
    )
    found = document(capsys, "simulate", mixed, "--merge", decoded, "--capacity-experts", "3", "--phase", "decode")
    by_default = document(capsys, "simulate", mixed, "--merge", decoded, "--capacity-experts", "3")
    assert by_default == found
    assert found["batch"]["stream_accesses"] == [30 * LAYERS * 2, 60 * LAYERS * 2]


def test_a_switch_says_how_long_it_hurts(capsys, traces):
    found = document(capsys, "simulate", traces["a"], "--switch", traces["b"], "--capacity-experts", "3")
    (row,), (recovery,) = rows_of(found), found["recovery"]
    assert row["accesses"] == 2 * STEPS * LAYERS * 2
    assert (recovery["switch_step"], recovery["compared_accesses"]) == (STEPS, STEPS * LAYERS * 2)
    alone = hits_of(read_trace(traces["b"]), warm_pass=True)
    mixed = streams.switched(*(read_trace(traces[name]) for name in "ab")).trace
    assert recovery["extra_misses"] == alone - (hits_of(mixed) - hits_of(read_trace(traces["a"])))


def test_warm_steps_beyond_the_switch_are_not_compared(capsys, traces):
    said = ["--capacity-experts", EXPERTS, "--warm-fraction", "0.75"]
    found = document(capsys, "simulate", traces["a"], "--switch", traces["b"], *said)
    # A cache of all experts is full by then: nothing is missed, with a switch or without.
    (recovery,) = found["recovery"]
    assert (recovery["compared_accesses"], recovery["extra_misses"]) == (30 * LAYERS * 2, 0)


def test_tenants_take_turns(capsys, traces):
    found = document(capsys, "simulate", traces["a"], "--interleave", traces["b"], "--capacity-experts", "3")
    (row,) = rows_of(found)
    mixture = streams.interleaved([read_trace(traces[name]) for name in "ab"]).trace
    assert (row["trace_id"], row["hits"]) == (mixture.metadata.trace_id, hits_of(mixture))


def test_intervals_and_nulls_stand_beside_each_result(capsys, traces):
    said = ["--policy", "lru,sieve", "--capacity-experts", "3", "--intervals", "--nulls", "--against", "sieve"]
    lru, sieve = rows_of(document(capsys, "simulate", traces["a"], *said))
    assert (lru["reference_policy"], sieve["reference_policy"]) == ("sieve", None)
    assert lru["over_reference"] == lru["hit_rate"] - sieve["hit_rate"]
    for row in (lru, sieve):
        assert row["hit_rate_low"] <= row["hit_rate"] <= row["hit_rate_high"]
    assert lru["shuffled_hits"] == hits_of(streams.shuffled(read_trace(traces["a"])))
    status, out, err = replayer(capsys, "simulate", traces["a"], *said)
    assert (status, err) == (0, "")
    head = out.splitlines()[1]
    assert all(named in head for named in ("95 % interval", "over sieve", "shuffled"))
    assert f"{lru['hit_rate_low']:.4f} to {lru['hit_rate_high']:.4f}" in out


def test_results_break_down_by_layer_phase_and_step(capsys, traces):
    found = document(capsys, "simulate", traces["a"], "--capacity-experts", "3", "--by", "layer,phase,step")
    (row,), (broken,) = rows_of(found), found["results"]
    assert [one["layer_id"] for one in broken["by_layer"]] == [0, 1]
    assert [one["phase"] for one in broken["by_phase"]] == ["unknown"]
    assert [one["step"] for one in broken["by_step"]] == list(range(STEPS))
    assert set(broken["by_layer"][0]) == {"layer_id", *TABLES["hit_rate_layer"].measures}
    for part in ("by_layer", "by_phase", "by_step"):
        assert sum(one["hits"] for one in broken[part]) == row["hits"]


def test_the_reporting_block_is_printed_item_by_item(capsys, traces):
    said = [traces["a"], "--policy", "lru,belady_bypass", "--capacity-experts", "3", "--reporting-block"]
    found = document(capsys, "simulate", *said)
    table = TABLES["reporting_block"]
    block = [{"trace_id": "a", **item} for item in found["reporting_block"]]
    validate_table(table.frame(block), table)
    status, out, _ = replayer(capsys, "simulate", *said)
    assert status == 0
    assert all(item["item"] in out for item in block)


def test_a_global_lru_under_the_floor_is_pointed_out(capsys, traces):
    said = ["simulate", traces["a"], "--scope", "global", "--capacity-experts", "2,4", "--json"]
    status, out, err = replayer(capsys, *said)
    assert status == 0
    assert json.loads(out)["cycle_floor_experts"] == 2
    assert json.loads(out)["results"][0]["hits"] == 0
    assert len(err.splitlines()) == 1
    assert "a global LRU of 2 experts is under the cycle of 2" in err


def test_no_floor_is_pointed_out_where_an_event_hits_what_it_names_twice(capsys, tmp_path):
    path = write_trace(make_trace([[[[0], [0]], [[0], [0]]]] * 3), tmp_path / "twice.parquet")
    said = ["simulate", path, "--scope", "global", "--capacity-experts", "1", "--dedup", "none"]
    found = document(capsys, *said, "--semantics", "sequential")
    assert (found["cycle_floor_experts"], found["results"][0]["hits"]) == (1, 6)
    assert "can find nothing" in replayer(capsys, *said, "--semantics", "event_atomic")[2]


@pytest.mark.parametrize(
    "said",
    [
        ["--policy", "lru,static", "--semantics", "event_atomic,sequential"],
        ["--semantics", "token_clock"],
        ["--merge", "{b}"],
        ["--switch", "{b}"],
        ["--interleave", "{b}"],
        ["--warm-pass"],
        ["--warm-fraction", "0.25"],
    ],
)
def test_text_has_a_line_for_every_result(capsys, traces, said):
    filled = [part.format(**traces) for part in said]
    status, out, err = replayer(capsys, "simulate", traces["a"], "--capacity-experts", "3", *filled)
    assert (status, err) == (0, "")
    found = document(capsys, "simulate", traces["a"], "--capacity-experts", "3", *filled)
    for row in found["results"]:
        assert [row["policy"], row["semantics"], f"{row['hits']:,}"] == [
            field
            for line in out.splitlines()
            if line.startswith(f"{row['policy']:<14} {row['semantics']:<13} ")
            for field in (line.split()[0], line.split()[1], line.split()[4])
        ]
    if "batch" in found:
        assert f"batch of 2: dedup {found['batch']['dedup_factor']:.3f}" in out
    if "recovery" in found:
        assert f"after the switch at step {STEPS}, lru event_atomic" in out


def test_a_curve_holds_lru_and_static_at_every_capacity(capsys, traces):
    said = ["--scope", "global", "--semantics", "event_atomic,sequential", "--fit", "first:0.5"]
    found = document(capsys, "curve", traces["a"], *said)
    assert (found["accesses"], found["cycle_floor_experts"]) == (STEPS * LAYERS * 2, 2)
    names = [(one["policy"], one["semantics"], one["fit"]) for one in found["curves"]]
    assert names == [("lru", "event_atomic", None), ("lru", "sequential", None), ("static", None, "first:0.5")]
    everything = [str(experts) for experts in range(LAYERS * EXPERTS + 1)]
    asked = ["--policy", "lru,static", "--scope", "global", "--fit", "first:0.5"]
    asked += ["--semantics", "event_atomic,sequential", "--capacity-experts", ",".join(everything)]
    status, out, _ = replayer(capsys, "simulate", traces["a"], *asked, "--json")
    assert status == 0
    rows = json.loads(out)["results"]
    for curve in found["curves"]:
        mine = [
            row
            for row in rows
            if row["policy"] == curve["policy"] and row["semantics"] == (curve["semantics"] or "sequential")
        ]
        assert curve["capacity_experts_total"] == [row["capacity_experts_total"] for row in mine]
        assert curve["hits"] == [row["hits"] for row in mine]
        assert curve["compulsory_misses"] == [row["compulsory_misses"] for row in mine]
    status, out, err = replayer(capsys, "curve", traces["a"], *said)
    assert (status, err) == (0, "")
    assert "scope global, 240 accesses scored" in out


ERRORS = [
    (["simulate", "missing.parquet", "--capacity-experts", "3"], 1, "missing.parquet"),
    (["simulate", "{a}", "--capacity-experts", "3", "--merge", "missing.parquet"], 1, "missing.parquet"),
    (["simulate", "{a}", "--capacity-experts", "3", "--folios-per-expert", "0"], 2, "--folios-per-expert 0"),
    (["simulate", "{a}", "--capacity-experts", "3", "--switch", "{b}", "--steps", "0:50"], 2, "on both sides"),
    (["simulate", "{a}", "--capacity-experts", "3", "--switch", "{b}", "--steps", "70:90"], 2, "on both sides"),
    (["simulate", "{a}", "--capacity-experts", "3", "--merge", "{other}"], 2, "are not of one model"),
    (["simulate", "{a}", "--capacity-experts", "3", "--switch", "{other}"], 2, "are not of one model"),
    (["simulate", "{a}", "--capacity-experts", "3", "--interleave", "{other}"], 2, "are not of one model"),
    (["simulate", "{a}", "--capacity-experts", "3", "--merge", "{b}", "--switch", "{b}"], 2, "not allowed with"),
    (["simulate", "{a}", "--capacity", "1KiB"], 2, "no expert sizes"),
    (["simulate", "{sized}", "--capacity", "1KiB", "--expert-bytes", "10"], 2, "has its own expert sizes"),
    (["simulate", "{a}", "--capacity-experts", "3", "--policy", "sieve", "--semantics", "token_clock"], 2, "lru alone"),
    (["simulate", "{a}", "--capacity-experts", "3", "--admit", "same:top:0"], 2, "above 0"),
    (["simulate", "{a}", "--capacity-experts", "3", "--admit", "hot.csv"], 2, "wanted FIT:top:N"),
    (["simulate", "{a}", "--capacity-experts", "3", "--quota-fit", "{other}"], 2, "a table fits one model only"),
    (["simulate", "{a}", "--capacity-experts", "3", "--quota-fit", "first:0"], 2, "wanted same, first:F"),
    (["simulate", "{a}", "--capacity-experts", "3", "--by", "expert"], 2, "'expert'"),
    (["simulate", "{a}", "--capacity-experts", "3", "--pinned-fraction", "1"], 2, "from 0 to below 1"),
    (["simulate", "{a}", "--capacity-experts", "3", "--against", "best"], 2, "best"),
    (["curve", "missing.parquet"], 1, "missing.parquet"),
    (["curve", "{a}", "--semantics", "token_clock"], 2, "'token_clock'"),
    (["curve", "{a}", "--fit", "first:2"], 2, "wanted same, first:F"),
    (["curve", "{a}", "--fit", "{other}"], 2, "a table fits one model only"),
    (["curve", "{a}", "--phase", "decode"], 2, "no event of phase decode"),
]


@pytest.mark.parametrize(("arguments", "status", "named"), ERRORS, ids=[" ".join(case[0])[:70] for case in ERRORS])
def test_a_wrong_call_is_one_line_and_its_exit_code(capsys, traces, arguments, status, named):
    found, out, err = replayer(capsys, *[argument.format(**traces) for argument in arguments])
    assert (found, out) == (status, "")
    assert len(err.splitlines()) == 1, err
    assert named in err


def test_a_trace_too_large_for_memory_is_read_in_parts_unless_it_is_to_be_shuffled(capsys, traces, monkeypatch):
    said = ["simulate", traces["a"], "--policy", "lru,belady_forced", "--capacity-experts", "3"]
    in_memory = {kind: document(capsys, *said, *kind)["results"] for kind in ((), ("--nulls",))}
    monkeypatch.setattr(trace_module, "READ_BYTES", 0)
    streamed = document(capsys, *said)["results"]
    assert streamed == in_memory[()]
    assert document(capsys, *said, "--nulls")["results"] == in_memory["--nulls",]


@pytest.mark.parametrize("command", ["simulate", "curve", "sweep"])
def test_every_command_explains_itself(capsys, command):
    status, out, _ = replayer(capsys, command, "--help")
    assert status == 0
    assert f"usage: replayer {command}" in out
    assert "example" in out
