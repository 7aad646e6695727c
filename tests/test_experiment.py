"""Experiments: what a file asks for, in which order and how often it is run, and what is said of the runs."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayer import experiment, experiment_cli
from replayer.experiment import (
    Condition,
    Given,
    GivenTrace,
    UnusableExperiment,
    blocks,
    find,
    read_description,
    remaining,
    resolve,
    run_block,
    shipped,
)
from replayer.experiment_findings import (
    METRICS,
    Design,
    Evidence,
    Member,
    compare,
    condition_rows,
    counts,
    effect_rows,
    is_finished,
    paragraph,
    wall_difference,
)
from replayer.plan import Plan, write_plan
from replayer.replay_cli import read_marked_runs
from replayer.trace import read_trace
from schemas.documents import ExperimentOutcome
from schemas.files import DataFolder
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests.builders import make_trace, write_trace
from tests.command_lines import replayer
from tests.replays import ENVIRONMENT, KIB, WAIT_S, command_line, needs_memory_groups, pool_for, routing, until
from tests.table_rows import ROWS

GIB = 2**30
TRACES = [
    GivenTrace(f"data/traces/{name}.parquet", f"{name}-1", 300, 64, 1024) for name in ("code", "math", "docs", "x")
]
HERE = Given(
    traces=TRACES,
    pools=[("pool-a", 10**9), ("pool-b", 10**9)],
    machine_id="machine-1",
    memory_bytes=24 * GIB,
    available_bytes=20 * GIB,
)
PLANNED = dataclasses.replace(
    HERE, plans={"oracle": ("plans/oracle.parquet", "0" * 64), "fitted": ("plans/fitted.parquet", "f" * 64)}
)
FILE = """
name = "mine"
question = "Is this one faster?"
finding = "comparison"

[common]
mechanism = "cgroup"
capacity = "50%"

[[condition]]
label = "cache"
baseline = true

[[condition]]
owner = ["restream", "uncached"]
"""


def resolved(text: str = FILE, given: Given = HERE, **options: Any) -> experiment.Experiment:
    return resolve(text, "mine.toml", given, **options)


def conditions(number: int) -> list[Condition]:
    return [Condition(f"c{place}", "arm", "", place == 0, False, ()) for place in range(number)]


# What a file asks for


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_experiment_is_sound_named_as_its_file_and_repeats_at_least_five_times(name):
    found = resolve(find(name).read_text(), name, PLANNED if name == "lookahead" else HERE)
    assert found.name == name
    assert found.repeats >= 5
    assert len(found.conditions) >= 2
    for one in found.conditions:
        for part in one.parts:
            assert part.request.mechanism == "cgroup"


def test_the_experiments_of_the_study_are_shipped():
    assert set(shipped()) == {
        "capacity-response", "equal-memory", "off-domain", "admission", "admission-ab", "batch-4", "two-tenants",
        "lookahead",
    }  # fmt: skip


def test_plans_are_named_in_the_file_and_given_by_the_call():
    asked = 'plan = "oracle"\ndelivery = "advice"\nsplit = ["none", "2MiB"]'
    text = FILE.replace('owner = ["restream", "uncached"]', asked)
    oracle = dataclasses.replace(HERE, plans={"oracle": ("plans/oracle.parquet", "0" * 64)})
    found = resolved(text, oracle)
    requests = [part.request for one in found.conditions for part in one.parts]
    assert [one.plan for one in requests] == [None, "plans/oracle.parquet", "plans/oracle.parquet"]
    assert [one.split for one in requests] == ["auto", "none", 2**21]
    # The id is that of the plan's content, wherever it lies.
    moved = dataclasses.replace(HERE, plans={"oracle": ("elsewhere", "0" * 64)})
    other = dataclasses.replace(HERE, plans={"oracle": ("plans/oracle.parquet", "1" * 64)})
    assert resolved(text, moved).experiment_id == found.experiment_id
    assert resolved(text, other).experiment_id != found.experiment_id
    with pytest.raises(UnusableExperiment, match=r"plan 'oracle', but the call gives none; add --plan oracle=FILE"):
        resolved(text, dataclasses.replace(HERE, plans={}))
    with pytest.raises(UnusableExperiment, match=r"key split: wanted auto, none or a size, found 'half'"):
        resolved(text.replace('"none"', '"half"'), oracle)


def test_a_plan_that_no_condition_names_is_refused():
    with pytest.raises(UnusableExperiment, match=r"--plan fitted=, but no condition of mine.toml has .* leave it out"):
        resolved(FILE, PLANNED)
    text = FILE.replace('owner = ["restream", "uncached"]', 'plan = "oracle"\ndelivery = "advice"')
    with pytest.raises(UnusableExperiment, match=r"--plan fitted=, but no condition .* so named; wanted oracle$"):
        resolved(text, PLANNED)


@pytest.mark.parametrize(
    ("spans", "sizes", "steps"),
    [
        ({"oracle": (0, 500), "fitted": (300, 500)}, "fit_machine", (300, 360)),
        ({"oracle": (0, 500), "fitted": (300, 320)}, "fit_machine", (300, 320)),
        ({"oracle": (0, 500), "fitted": (300, 500)}, "as_published", (300, 500)),
    ],
)
def test_all_conditions_replay_steps_that_every_plan_speaks_of(spans, sizes, steps):
    given = dataclasses.replace(PLANNED, plan_steps=lambda name, _: spans[name])
    given = dataclasses.replace(
        given, traces=[dataclasses.replace(given.traces[0], steps=500)], pools=[("a", 1_446_456_066_048)],
        available_bytes=500 * 10**9,
    )  # fmt: skip
    found = resolve(find("lookahead").read_text(), "lookahead", given, sizes=sizes)
    assert {part.request.steps for one in found.conditions for part in one.parts} == {steps}


def test_plans_that_have_no_step_in_common_or_name_nothing_are_refused():
    text = find("lookahead").read_text()
    apart = {"oracle": (0, 100), "fitted": (300, 500)}
    given = dataclasses.replace(PLANNED, plan_steps=lambda name, _: apart[name])
    with pytest.raises(UnusableExperiment, match=r"no step in common \(fitted 300 to 499, oracle 0 to 99\)"):
        resolve(text, "lookahead", given)
    given = dataclasses.replace(PLANNED, plan_steps=lambda *_: None)
    with pytest.raises(UnusableExperiment, match="plan 'oracle' names no expert for any step"):
        resolve(text, "lookahead", given)


def test_lists_are_combined_and_label_what_they_vary():
    text = FILE.replace('capacity = "50%"', 'capacity = ["50%", "100MB"]\ntrace = [0, 1]')
    found = resolved(text)
    assert [one.label for one in found.conditions[:4]] == [
        "cache, 50%, trace 0", "cache, 50%, trace 1", "cache, 100MB, trace 0", "cache, 100MB, trace 1",
    ]  # fmt: skip
    assert len(found.conditions) == 12
    assert found.conditions[4].label == "restream, 50%, trace 0"
    (part,) = found.conditions[5].parts
    assert (part.streams, part.request.owner, part.request.capacity_bytes) == ((1,), "restream", 5 * 10**8)
    assert {one.group for one in found.conditions} == {
        "50%, trace 0", "50%, trace 1", "100MB, trace 0", "100MB, trace 1",
    }  # fmt: skip


def test_a_size_is_bytes_a_share_of_the_pool_or_their_sum():
    for size, expected in (('"25%"', 25 * 10**7), ('"1MiB"', 2**20), ("4096", 4096), ('"50% + 1kB"', 5 * 10**8 + 1000)):
        text = FILE.replace('capacity = "50%"', f"wall = {size}")
        assert resolved(text).conditions[0].parts[0].request.wall_bytes == expected


def test_steps_tables_and_admissions_are_made_concrete():
    text = FILE.replace('owner = ["restream", "uncached"]', 'owner = "arena"\nfit = "@1:first:0.5"\nat_most_steps = 20')
    request = resolved(text).conditions[1].parts[0].request
    assert request.fit == "data/traces/math.parquet:first:0.5"
    assert request.steps == (0, 20)
    text = FILE.replace(
        'owner = ["restream", "uncached"]', 'owner = "page_cache_admission"\nadmit = "@2:top:25%"\nsteps = "290:"'
    ).replace('capacity = "50%"', 'capacity = "50%"\nat_most_steps = 20')
    request = resolved(text).conditions[1].parts[0].request
    assert request.admit == "data/traces/docs.parquet:top:256"
    assert request.steps == (290, 300)
    assert "at_most_steps" not in resolved(text).definition


def test_traces_are_named_by_place_or_by_the_beginning_of_their_id_and_streams_are_one_condition():
    text = FILE.replace('label = "cache"', 'label = "cache"\ntrace = "math"').replace(
        'owner = ["restream", "uncached"]', 'streams = [0, 1, "docs"]\nlabel = "batch"'
    )
    found = resolved(text)
    assert [one.parts[0].streams for one in found.conditions] == [(1,), (0, 1, 2)]
    with pytest.raises(UnusableExperiment, match="trace 'd2', wanted the beginning of exactly one of code-1, math-1"):
        resolved(text.replace('"docs"', '"d2"'))
    with pytest.raises(UnusableExperiment, match=r"trace 4 \(from 0\), but the call names 4"):
        resolved(text.replace('"docs"', "4"))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("name =", "nome =", "mine.toml: key name is missing"),
        ("name =", "nome =", "mine.toml: key nome is unknown, wanted one of name, question, finding"),
        ('"comparison"', '"proof"', "key finding: wanted 'comparison', 'response' or 'tenants', found 'proof'"),
        ('mechanism = "cgroup"', "mechanism = 3", "'cache': key mechanism: wanted 'cgroup', 'balloon', 'boot'"),
        ("baseline = true", 'baseline = true\nspeed = "fast"', "'cache': key speed is unknown, wanted one of label"),
        ("baseline = true", "threads = 1.5\nbaseline = true", "key threads: wanted integer, found 1.5"),
        ("baseline = true", "wall = 1.5\nbaseline = true", "key wall: wanted string or integer, found 1.5"),
        ("baseline = true", "threads = 0\nbaseline = true", "key threads: wanted greater than or equal to 1, found 0"),
        ("baseline = true", "", "mine.toml: 0 of 3 conditions have baseline = true, wanted one that the others"),
        ('"50%"', '"half"', "key capacity: wanted a size, a share of the pool or their sum, such as 512MiB"),
        ('["restream", "uncached"]', "[]", "condition 2: key owner: wanted a value or a list of values"),
        ('["restream", "uncached"]', '"restream"\nlabel = "cache"', "two conditions are called 'cache'"),
        ('owner = ["restream", "uncached"]', "pool = 2", "pool 2 (from 0), but the call names 2; give --pool once"),
        ('owner = ["restream", "uncached"]', 'tenants = ["me"]', "wanted different names of [[tenant]]"),
        ('finding = "comparison"', 'finding = "comparison"\norder = "pairs"', "wants two conditions, found 3"),
        ("[common]", "[common", "mine.toml: no TOML: "),
        ("[common]", '[common]\n_said = "k"', "key _said is unknown, wanted one of"),
        ("baseline = true", "baseline = true\ntrace = 0\nstreams = [0, 1]", "trace and streams; say one of them"),
        ('finding = "comparison"', 'finding = "tenants"', "finding tenants, but no condition has two tenants"),
        ('"50%"', '"90GiB"', "wants 90.00 GiB of memory, but this machine has 20.00 GiB available; add --fit-machine"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_file_key_wanted_and_found(before, after, said):
    with pytest.raises(UnusableExperiment) as raised:
        resolved(FILE.replace(before, after, 1))
    assert said in str(raised.value)


def test_every_fault_has_a_line_of_its_own():
    with pytest.raises(UnusableExperiment) as raised:
        resolved(FILE.replace("baseline = true", 'speed = 1\nthreads = "x"'))
    assert len(str(raised.value).splitlines()) == 2


def test_a_response_needs_different_capacities_and_no_baseline():
    text = FILE.replace('"comparison"', '"response"')
    with pytest.raises(UnusableExperiment, match="finding response wants different capacities"):
        resolved(text)
    ok = re.sub(r"(?s)\[\[condition\]\].*", '[[condition]]\ncapacity = ["50%", "10%"]\n', text)
    assert [one.label for one in resolved(ok).conditions] == ["50%", "10%"]


def test_combinations_are_counted_before_they_are_made():
    numbers = ", ".join(str(number) for number in range(3000))
    with pytest.raises(UnusableExperiment, match=r"9000000 combinations of its lists, wanted at most 1000"):
        resolved(FILE.replace("[common]", f"[common]\nseed = [{numbers}]\nat_most_steps = [{numbers}]", 1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "byte 0xff at 0 is no UTF-8"),
        (b"#" * (2**20 + 1), "more than 1,048,576 bytes"),
        (None, "no regular file"),
    ],
)
def test_a_file_that_is_no_text_is_one_line(tmp_path, content, said):
    path = tmp_path / "mine.toml"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(UnusableExperiment, match=said) as raised:
        read_description(path)
    assert len(str(raised.value).splitlines()) == 1


def test_an_unknown_experiment_lists_what_there_is():
    with pytest.raises(UnusableExperiment, match=r"--experiment 'fast', wanted one of admission, .* ends in \.toml"):
        find("fast")
    assert find("a/b.toml") == Path("a/b.toml")


def test_fitting_the_machine_scales_shares_alike_and_leaves_the_readers_room():
    large = dataclasses.replace(HERE, pools=[("pool-a", 100 * GIB)])
    text = FILE.replace('capacity = "50%"', 'wall = ["50% + 64MiB", "25% + 64MiB"]')
    found = resolved(text, large, sizes="fit_machine")
    sizes = [one.parts[0].request.wall_bytes for one in found.conditions[:2]]
    assert sizes[0] <= 8 * GIB < sizes[0] + 2
    assert abs((sizes[0] - 2**26) - 2 * (sizes[1] - 2**26)) <= 2
    small = dataclasses.replace(large, memory_bytes=4 * GIB, available_bytes=3 * GIB)
    assert resolved(text, small, sizes="fit_machine").conditions[0].parts[0].request.wall_bytes <= 2 * GIB
    # What fits stays as it is written.
    assert resolved(text, sizes="fit_machine").conditions == resolved(text).conditions


def test_what_two_tenants_want_together_has_to_fit():
    large = dataclasses.replace(HERE, pools=[("pool-a", 100 * GIB), ("pool-b", 100 * GIB)])
    found = resolve(find("two-tenants").read_text(), "t", large, sizes="fit_machine")
    pair = next(one for one in found.conditions if one.shares_wall)
    assert 7.9 * GIB < sum(part.request.capacity_bytes for part in pair.parts) <= 8 * GIB


def test_as_published_takes_the_studys_sizes_and_all_steps_where_pool_and_machine_are_large_enough():
    text = find("equal-memory").read_text()
    study = dataclasses.replace(HERE, pools=[("pool-a", 1_446_456_066_048)], available_bytes=480 * 10**9)
    found = resolve(text, "equal-memory.toml", study, sizes="as_published")
    assert {one.parts[0].request.wall_bytes for one in found.conditions} == {
        256 * 10**9 + 6 * GIB, 128 * 10**9 + 6 * GIB,
    }  # fmt: skip
    assert {one.parts[0].request.steps for one in found.conditions} == {(None, None)}
    with pytest.raises(UnusableExperiment, match=r"has 20\.00 GiB available; use a machine with more memory"):
        resolve(text, "e", dataclasses.replace(study, available_bytes=20 * GIB), sizes="as_published")
    with pytest.raises(UnusableExperiment, match=r"to a pool of 953\.67 MiB, which would fit whole"):
        resolve(text, "e", dataclasses.replace(study, pools=HERE.pools), sizes="as_published")
    with pytest.raises(UnusableExperiment, match=r"size '50%' has no counterpart in \[published\] of mine"):
        resolved(sizes="as_published")


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_experiment_has_the_studys_sizes(name):
    study = dataclasses.replace(
        PLANNED if name == "lookahead" else HERE,
        pools=[("a", 1_446_456_066_048), ("b", 1_446_456_066_048)],
        available_bytes=500 * 10**9,
    )
    assert resolve(find(name).read_text(), name, study, sizes="as_published").sizes == "as_published"


def test_the_id_covers_conditions_traces_pools_seed_and_machine_but_not_repetitions_or_paths():
    same = [
        resolved(repeats=9),
        resolved(FILE.replace("Is this one", "Is that one")),
        resolved(given=dataclasses.replace(HERE, available_bytes=19 * GIB)),
        resolved(given=dataclasses.replace(HERE, traces=[dataclasses.replace(TRACES[0], path="x"), *TRACES[1:]])),
    ]
    assert {one.experiment_id for one in same} == {resolved().experiment_id}
    others = [
        resolved(seed=1),
        resolved(FILE.replace("50%", "49%")),
        resolved(FILE.replace('"mine"', '"thine"')),
        resolved(given=dataclasses.replace(HERE, machine_id="machine-2")),
        resolved(given=dataclasses.replace(HERE, traces=TRACES[::-1])),
        resolved(given=dataclasses.replace(HERE, pools=HERE.pools[::-1])),
        resolved(given=dataclasses.replace(HERE, replayer_version="2")),
    ]
    assert len({one.experiment_id for one in [resolved(), *others]}) == 8
    assert re.fullmatch(r"mine-[0-9a-f]{12}", resolved().experiment_id)


def test_where_a_trace_lies_does_not_change_the_id_of_a_table_that_is_fitted_on_it():
    text = FILE.replace('["restream", "uncached"]', '"arena"\nfit = "@1"')
    moved = [dataclasses.replace(trace, path=f"/elsewhere/{trace.trace_id}") for trace in TRACES]
    assert resolved(text).experiment_id == resolved(text, dataclasses.replace(HERE, traces=moved)).experiment_id


# The order of runs


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_every_block_holds_each_condition_once_and_neighbours_differ(number, repeats, seed):
    planned = blocks(conditions(number), repeats, seed, "random")
    assert planned == blocks(conditions(number), repeats, seed, "random")
    assert [sorted(cell.condition for cell in block) for block in planned] == [
        sorted(one.label for one in conditions(number))
    ] * repeats
    assert all(cell.repetition == place for place, block in enumerate(planned) for cell in block)
    if number > 1:
        row = [cell.condition for block in planned for cell in block]
        assert all(one != other for one, other in itertools.pairwise(row))


@given(st.integers(2, 6), st.integers(1, 10), st.integers(0, 2**31 - 1), st.data())
def test_going_on_keeps_the_order_of_a_run_without_a_break(number, repeats, seed, data):
    planned = blocks(conditions(number), repeats, seed, "random")
    row = [cell for block in planned for cell in block]
    done = set(row[: data.draw(st.integers(0, len(row)))])
    left = [cell for block in remaining(planned, done) for cell in block]
    assert left == row[len(done) :]
    # More repetitions begin with the same ones.
    assert blocks(conditions(number), repeats + 3, seed, "random")[:repeats] == planned


def test_the_seed_decides_the_order():
    orders = {str(blocks(conditions(4), 5, seed, "random")) for seed in range(20)}
    assert len(orders) == 20


@given(st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_of_a_pair_either_is_first_equally_often_and_every_third_is_drawn(repeats, seed):
    pair = [dataclasses.replace(one, group=group) for group in ("g", "h") for one in conditions(2)]
    pair = [dataclasses.replace(one, label=one.label + one.group) for one in pair]
    planned = blocks(pair, repeats, seed, "pairs")
    for group in "gh":
        orders = [[cell.condition for cell in block if cell.condition.endswith(group)] for block in planned]
        assert all(order == [f"c0{group}", f"c1{group}"] for order in orders[::3])
        assert all(order == [f"c1{group}", f"c0{group}"] for order in orders[1::3])
        assert all(sorted(order) == [f"c0{group}", f"c1{group}"] for order in orders)
    for block in planned:
        # Both of a pair follow one another.
        assert {cell.condition[-1] for cell in block[:2]} in ({"g"}, {"h"})
    drawn = {str(blocks(conditions(2), 3, seed, "pairs")[2]) for seed in range(20)}
    assert len(drawn) == 2


def test_what_does_not_count_is_tried_again_after_its_block_and_not_for_ever():
    block = blocks(conditions(3), 1, 0, "random")[0]
    first, second, third = block
    tried = []

    def attempt(cell, earlier):
        tried.append((cell, earlier))
        return cell != second and not (cell == third and earlier == 0)

    assert run_block(block, attempt) == [second]
    assert tried == [(first, 0), (second, 0), (third, 0), (second, 1), (third, 1), (second, 2)]


# What is said of the runs


def run(condition: str, repetition: int, **values: Any) -> dict[str, Any]:
    """A run of replay_run with its columns of experiment_run."""
    position = values.pop("position", repetition)
    return {
        **ROWS["replay_run"],
        **ROWS["experiment_run"],
        "run_id": f"{condition}-{repetition}-{values.get('tenant')}-{values.get('attempt', 0)}",
        "condition": condition,
        "repetition": repetition,
        "position": position,
        "arena_bytes": None,
        **values,
    }


def evidence(
    values: dict[str, list[float]], *, metric: str = "device_bytes", design: Design | None = None, **same: Any
):
    members = tuple(Member(name, name, is_baseline=place == 0) for place, name in enumerate(values))
    design = design or Design("comparison", (metric,), "random", max(map(len, values.values())), members)
    return Evidence.of(
        design,
        [
            run(name, place, **{metric: value}, **same)
            for name, row in values.items()
            for place, value in enumerate(row)
        ],
    )


def test_an_effect_outside_the_spread_is_told_and_one_inside_is_none():
    steady = [100, 101, 99, 100, 102]
    clear = evidence({"cache": steady, "arena": [50, 51, 49, 50, 50]})
    said = paragraph(clear)
    assert "arena against cache: bytes from the device 0.500 times" in said
    assert "outside the spread of a condition against itself (0.961 to 1.041)" in said
    assert "no effect" not in said
    noisy = evidence({"cache": [100, 60, 140, 100, 90], "arena": [50, 90, 70, 110, 80]})
    assert "no effect on bytes from the device" in paragraph(noisy)
    # The other one's spread counts as much.
    unsteady = evidence({"cache": steady, "arena": [50, 120, 90, 80, 60]})
    assert "no effect on bytes from the device" in paragraph(unsteady)


def test_a_condition_against_itself_has_no_effect():
    found = compare({0: (5, 1), 1: (5, 1)}, {0: (5, 1), 1: (5, 1)})
    assert found.effect == 1
    assert found.outside_spread is False


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 10**6), min_size=2, max_size=8),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=8),
)
def test_the_effect_is_the_median_of_ratios_of_the_same_repetition(over, under):
    both = min(len(over), len(under))
    found = compare(
        {place: (value, 1.0) for place, value in enumerate(over)},
        {place: (value, 1.0) for place, value in enumerate(under)},
    )
    ratios = sorted(over[place] / under[place] for place in range(both))
    assert found.effect == ratios[(both - 1) // 2]
    assert (found.effect_low, found.effect_high) == (ratios[0], ratios[-1])
    low = min(min(over) / max(over), min(under) / max(under))
    assert found.self_low == pytest.approx(low)
    assert found.self_high == pytest.approx(1 / low)
    assert found.outside_spread == (not found.self_low <= found.effect <= found.self_high)


def test_one_repetition_tells_nothing_and_a_ratio_to_nothing_is_none():
    assert "of too few repetitions to tell from chance" in paragraph(evidence({"cache": [100], "arena": [50]}))
    said = paragraph(evidence({"cache": [0, 0], "arena": [50, 60]}))
    assert "no ratio of bytes from the device, of which the baseline has 0" in said
    assert compare({}, {}).effect is None


def test_runs_that_are_not_valid_or_not_complete_count_nowhere_and_are_told():
    good = evidence({"cache": [100, 101], "arena": [50, 51]})
    assert is_finished(good)
    assert "4 of 4 repetitions are complete and bytes_valid in all 4 runs" in paragraph(good)
    bad = [*good.runs[:3], {**good.runs[3], "bytes_valid": False, "bytes_reasons": "pages were resident"}]
    spoiled = Evidence.of(good.design, bad)
    assert not is_finished(spoiled)
    assert "3 of 4 repetitions are complete; the experiment is not finished" in paragraph(spoiled)
    assert "1 more were not valid and count nowhere (pages were resident)" in paragraph(spoiled)
    again = Evidence.of(good.design, [*bad, {**good.runs[3], "run_id": "again", "attempt": 1}])
    assert is_finished(again)
    stopped = Evidence.of(good.design, [*good.runs[:3], {**good.runs[3], "status": "interrupted"}])
    assert not is_finished(stopped)


def test_no_repetition_counts_twice_and_none_without_all_its_tenants():
    good = evidence({"cache": [100, 101], "arena": [50, 51]})
    twice = [*good.runs, {**good.runs[0], "run_id": "again", "attempt": 1, "device_bytes": 7}]
    assert counts(good.design, twice) == good.counted
    pair = Design("tenants", ("device_bytes",), "random", 1, (Member("both", tenants=("a", "b")), Member("alone")))
    one = run("both", 0, tenant="a")
    assert counts(pair, [one]) == {}
    assert len(counts(pair, [one, run("both", 0, tenant="b")])[("both", 0)]) == 2
    assert counts(pair, [one, run("both", 0, tenant="b", attempt=1)]) == {}


def test_times_are_taken_from_runs_whose_times_are_valid():
    found = evidence({"cache": [100, 101, 99], "arena": [50, 51, 52]}, metric="step_median_ns")
    busy = [{**one, "time_valid": one["condition"] != "arena"} for one in found.runs]
    said = paragraph(Evidence.of(found.design, busy))
    assert "no ratio of the median step time, valid in no repetition of both" in said
    assert "times of 3 of these are not valid and left out of times" in said


def test_content_that_differs_voids_the_rest():
    found = evidence({"cache": [100, 101], "arena": [50, 51]})
    assert "All runs of one trace and pool consumed the same content" in paragraph(found)
    other = [*found.runs[:3], {**found.runs[3], "consumed_digest": "f" * 16}]
    assert "consumed DIFFERENT content (tiny): nothing above holds" in paragraph(Evidence.of(found.design, other))
    elsewhere = [*found.runs[:3], {**found.runs[3], "consumed_digest": "f" * 16, "pool_id": "pool-2"}]
    assert "the same content" in paragraph(Evidence.of(found.design, elsewhere))


def response(device: dict[int, list[float]], **same: Any) -> Evidence:
    members = tuple(Member(f"{capacity}") for capacity in device)
    design = Design("response", ("device_bytes",), "random", max(map(len, device.values())), members)
    rows = [
        run(f"{capacity}", place, capacity_bytes=capacity, device_bytes=value, resident_median_bytes=capacity, **same)
        for capacity, values in device.items()
        for place, value in enumerate(values)
    ]
    return Evidence.of(design, rows)


def test_a_response_deviates_from_the_inverse_capacity_line_through_the_largest_capacity():
    # The published device bytes per iteration, in 100 MB: 5.3, 9.8, 17.4 and 33.6 GB (arXiv 2608.12103, Table 2).
    found = response({448: [53, 53], 256: [98, 98], 128: [174, 174], 64: [336, 336]})
    deviations = [
        row["inverse_capacity_deviation"] for row in effect_rows("e", found) if row["metric"] == "device_bytes"
    ]
    # It prints +5.0, -6.7 and -9.7 %, of device bytes with more digits than the table has.
    assert deviations == pytest.approx([0.057, -0.062, -0.094], abs=0.001)
    said = paragraph(found)
    assert "device bytes deviate by +5.7 % at 256 (+5.7 % by what was held), -6.2 % at 128" in said
    assert "Every smaller capacity costs more, outside the spread" in said
    assert "DRAM is a smooth sizing knob here." in said


def test_a_response_that_turns_or_drowns_in_noise_is_no_smooth_knob():
    turned = paragraph(response({448: [53, 53], 256: [98, 98], 128: [80, 80]}))
    assert "Not monotone in the capacity: bytes from the device" in turned
    assert "DRAM is no smooth sizing knob here." in turned
    noisy = paragraph(response({448: [53, 53], 256: [98, 98], 128: [80, 120, 100]}))
    assert "inside the spread of a capacity against itself: bytes from the device from 256 to 128" in noisy
    assert "That DRAM is a smooth sizing knob here is not shown." in noisy
    rows = effect_rows("e", response({448: [53, 53], 256: [98, 98], 128: [80, 80]}))
    assert {row["monotone"] for row in rows if row["metric"] == "device_bytes"} == {False}


def test_a_response_without_enough_repetitions_shows_nothing():
    said = paragraph(response({448: [53], 256: [98]}))
    assert "of too few valid repetitions to tell: bytes from the device from 448 to 256" in said
    assert "is not shown" in said


def test_equal_walls_are_stated_and_a_difference_is_not_hidden():
    members = (Member("cache", is_baseline=True, has_wall=True), Member("arena", has_wall=True))
    design = Design("comparison", ("device_bytes",), "random", 2, members)
    equal = evidence({"cache": [100, 101], "arena": [50, 51]}, design=design)
    assert "All walls are equal: 1.46 KiB." in paragraph(equal)
    assert wall_difference(equal) == 0
    unequal = Evidence.of(design, [{**equal.runs[0], "wall_bytes": 1515}, *equal.runs[1:]])
    assert "Walls differ by up to 0.990 %" in paragraph(unequal)
    assert wall_difference(unequal) == pytest.approx(15 / 1515)
    assert wall_difference(evidence({"cache": [100], "arena": [50]})) is None


def tenants(first: list[int], second: list[int]) -> Evidence:
    names = ("first", "second")
    members = (
        Member("two walls", is_baseline=True, tenants=names),
        Member("one wall", tenants=names, shares_wall=True),
    )
    design = Design("tenants", ("device_bytes",), "random", len(first), members)
    rows = []
    for place in range(len(first)):
        for tenant, held in zip(names, (first[place], second[place]), strict=True):
            rows.append(run("two walls", place, tenant=tenant, resident_median_bytes=1000 + place))
            rows.append(run("one wall", place, tenant=tenant, resident_median_bytes=held))
    return Evidence.of(design, rows)


def test_who_evicts_whom_follows_the_residency():
    said = paragraph(tenants([1500, 1510, 1490], [500, 490, 510]))
    assert (
        "In one wall against two walls, first holds 1.500 times, second holds 0.500 times: first evicts second." in said
    )
    said = paragraph(tenants([500, 490, 510], [1500, 1510, 1490]))
    assert "second evicts first." in said
    said = paragraph(tenants([1001, 1000, 1002], [1000, 1001, 1002]))
    assert "nobody evicts another beyond the spread of a condition against itself" in said
    said = paragraph(tenants([1001, 1000, 1002], [500, 501, 502]))
    assert "second loses memory, and nobody gains any outside the spread" in said
    assert "one wall, tenant first against two walls: " in said


def test_several_baselines_stand_for_the_sum_of_what_they_counted():
    members = (
        Member("alone, 0", "alone", is_baseline=True),
        Member("alone, 1", "alone", is_baseline=True),
        Member("batch", "batch"),
    )
    design = Design("comparison", ("device_bytes_per_selection",), "random", 2, members)
    rows = [
        run(name, place, device_bytes=device, selections=selections)
        for place in range(2)
        for name, device, selections in (("alone, 0", 100, 10), ("alone, 1", 500, 20), ("batch", 300, 30))
    ]
    said = paragraph(Evidence.of(design, rows))
    # 300 ÷ 30 against 600 ÷ 30.
    assert "batch against alone (2 together): bytes from the device per token 0.500 times" in said


def test_the_tables_keep_their_contracts():
    for found in (
        evidence({"cache": [100, 101], "arena": [0, 51]}),
        response({4: [1, 2], 2: [2, 3]}),
        evidence({"a": [1], "b": [2]}),
    ):
        for name, rows in (("condition", condition_rows("e", found)), ("effect", effect_rows("e", found))):
            table = TABLES[f"experiment_{name}"]
            assert validate_table(table.frame(rows), table).height == len(METRICS) * (2 if name == "condition" else 1)
    (row,) = [
        one
        for one in condition_rows("e", evidence({"cache": [100, 104, 96], "arena": [1, 1, 1]}))
        if (one["condition"], one["metric"]) == ("cache", "device_bytes")
    ]
    assert (row["median_value"], row["lowest_value"], row["highest_value"]) == (100, 96, 104)
    assert (row["runs"], row["valid_runs"], row["counted_runs"], row["relative_spread"]) == (3, 3, 3, 0.08)


# Whole experiments


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Two traces and a pool of 4 layers × 32 experts of 64 KiB, and an experiment of two conditions, twice each."""
    folder = tmp_path_factory.mktemp("experiment")
    for place, name in enumerate(("code", "docs")):
        ids = routing(24, experts=32, seed=place)
        trace = make_trace(ids, num_experts=32, phases=["decode"] * 24, trace_id=name)
        write_trace(trace, folder / f"{name}.parquet")
        pool_for(trace, folder / f"pool-{name}", 64 * KIB)
    (folder / "mine.toml").write_text(
        FILE.replace('["restream", "uncached"]', '"restream"')
        .replace("[common]", 'repeats = 2\n[common]\ndevice = "none"', 1)
        .replace("repeats = 2\n", "")
        .replace('finding = "comparison"', 'finding = "comparison"\nrepeats = 2')
    )
    return folder


def asked(made: Path, data: Path, **values: Any) -> Namespace:
    given = {
        "trace": [made / "code.parquet"], "pool": [made / "pool-code"], "experiment": str(made / "mine.toml"),
        "fit_machine": True, "as_published": False, "experiment_seed": None, "plan": None, "repeat": None, "data": data,
        "wait": WAIT_S, "json": True,
    }  # fmt: skip
    return Namespace(**{**given, **values})


def test_an_experiment_is_run_judged_and_gone_on_with(made, tmp_path, capsys):
    needs_memory_groups()
    assert experiment_cli.run_experiment(asked(made, tmp_path)) == 0
    first = json.loads(capsys.readouterr().out)
    outcome = ExperimentOutcome.model_validate(first)
    assert (outcome.runs, outcome.valid_runs, outcome.started_runs, outcome.finished) == (4, 4, 4, True)
    assert outcome.digests_agree is True
    assert Counter(one.condition for one in outcome.by_run) == {"cache": 2, "restream": 2}
    assert [one.position for one in outcome.by_run] == [0, 1, 2, 3]
    assert "restream against cache: " in outcome.finding
    assert "4 of 4 repetitions are complete and bytes_valid in all 4 runs" in outcome.finding
    # A finished experiment measures nothing again; more repetitions go on from those that are there.
    assert experiment_cli.run_experiment(asked(made, tmp_path)) == 0
    assert json.loads(capsys.readouterr().out) == {**first, "started_runs": 0}
    assert experiment_cli.run_experiment(asked(made, tmp_path, repeat=3)) == 0
    more = ExperimentOutcome.model_validate_json(capsys.readouterr().out)
    assert (more.experiment_id, more.started_runs, more.runs) == (outcome.experiment_id, 2, 6)
    assert [one.run_id for one in more.by_run[:4]] == [one.run_id for one in outcome.by_run]
    data = DataFolder(tmp_path)
    assert len(read_marked_runs(data, "experiment_run", outcome.experiment_id)) == 6
    for name in ("experiment", "experiment_condition", "experiment_effect"):
        assert data.result_file(name, outcome.experiment_id).is_file()


def test_two_tenants_are_told_apart(made, tmp_path, capsys):
    needs_memory_groups()
    file = tmp_path / "tenants.toml"
    # Where little is kept, what one tenant reads evicts what the other saw resident just now, and runs are repeated.
    file.write_text(find("two-tenants").read_text().replace('"25%"', '"60%"').replace("threads = 4", "threads = 2"))
    wanted = asked(
        made,
        tmp_path,
        trace=[made / "code.parquet", made / "docs.parquet"],
        pool=[made / "pool-code", made / "pool-docs"],
        experiment=str(file),
        repeat=2,
    )
    assert experiment_cli.run_experiment(wanted) == 0
    outcome = ExperimentOutcome.model_validate_json(capsys.readouterr().out)
    assert outcome.finished
    tenants = Counter(one.tenant for one in outcome.by_run)
    assert tenants["first"] == tenants["second"] >= 6
    together = [one for one in outcome.by_run if one.condition in ("one wall", "two walls")]
    # Both of an attempt were begun together, and stand at one place of the order.
    assert Counter(one.position for one in together) == dict.fromkeys({one.position for one in together}, 2)
    assert "In one wall against two walls, first holds" in outcome.finding


def test_an_interrupted_experiment_keeps_what_is_done_and_says_how_to_go_on(made, tmp_path):
    needs_memory_groups()
    words = [made / "code.parquet", "--pool", made / "pool-code", "--experiment", made / "mine.toml", "--repeat", 50]
    words += ["--fit-machine", "--data", tmp_path, "--wait", WAIT_S]
    with subprocess.Popen(
        command_line("replay", *words), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: len(list(tmp_path.glob("results/experiment_run/*/*.parquet"))) >= 2, WAIT_S)
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "interrupted; what is done is kept, go on with: replayer replay " in complaint
    assert "of 100 repetitions are complete; the experiment is not finished" in said
    found = list(tmp_path.glob("results/experiment_run/*/*.parquet"))
    # A run without its mark is one that the interrupt fell behind; never the other way round.
    assert len(found) <= len(list(tmp_path.glob("results/replay_run/*/*.parquet"))) <= len(found) + 1


def test_a_bad_plan_ends_an_experiment_before_its_first_run_in_one_line(made, tmp_path, capsys):
    trace = read_trace(made / "code.parquet")
    events = len(trace.event_layer)
    silent = Plan(np.ones(events, bool), np.full(events, -1), np.zeros(events + 1, np.int64), np.zeros(0, np.uint16))
    write_plan(tmp_path / "silent.parquet", silent, trace)
    (tmp_path / "bad").write_bytes(b"PAR1")
    (tmp_path / "mine.toml").write_text(
        (made / "mine.toml").read_text().replace('owner = "restream"', 'plan = "p"\ndelivery = "advice"')
    )
    words = ["replay", made / "code.parquet", "--pool", made / "pool-code", "--experiment", tmp_path / "mine.toml"]
    words += ["--data", tmp_path / "data", "--fit-machine", "--plan"]
    for said, exits in (("p=" + str(tmp_path / "bad"), 1), (f"p={tmp_path}", 1), (f"p={tmp_path / 'none'}", 1),
                        ("p=", 2), *((f"{name}={tmp_path / 'silent.parquet'}", 2) for name in "pq")):  # fmt: skip
        status, out, complaint = replayer(capsys, *words, said)
        assert (status, out, complaint.count("\n")) == (exits, "", 1), said
    assert not (tmp_path / "data").exists()


def test_an_experiment_without_a_data_folder_is_refused(made):
    with pytest.raises(ValueError, match="--experiment without --data"):
        experiment_cli.run_experiment(asked(made, None))


@pytest.mark.parametrize("option", [["--owner", "restream"], ["--device", "none"], ["--capacity", "1MiB"]])
def test_an_option_that_the_file_decides_is_refused(capsys, tmp_path: Path, option: list[str]) -> None:
    words = ["any.parquet", "--pool", tmp_path, "--experiment", "equal-memory", "--data", tmp_path, *option]
    status, _, complaint = replayer(capsys, "replay", *words)
    assert status == 2
    assert complaint.count("\n") == 1
    assert f"{option[0]} with --experiment, whose file says it" in complaint
