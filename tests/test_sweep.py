"""Sweeps: which cells there are, what names them, and that an interrupted sweep loses a batch at most."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from replayer import cli, sweep
from replayer.simulate import Capacity, Choices, Window, prepare, simulate
from replayer.trace import read_trace
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests.builders import make_trace, write_trace


def routed(path: Path, seed: int = 0, **known) -> Path:
    """Writes a trace of 30 steps on two layers of six experts."""
    generator = np.random.default_rng(seed)
    experts = np.argsort(generator.random((30, 2, 6)), axis=-1)[..., :2]
    return write_trace(make_trace(experts, num_experts=6, trace_id=path.stem, **known), path)


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    return [routed(tmp_path / f"{name}.parquet", seed) for seed, name in enumerate(["first", "second"])]


def asked(paths: list[Path], **said) -> sweep.Sweep:
    usual = {
        "policies": ["lru", "sieve"],
        "scopes": ["layer", "global"],
        "semantics": ["event_atomic", "sequential"],
        "capacities": [Capacity(experts=2), Capacity(experts=4)],
    }
    return sweep.Sweep(paths, **{**usual, **said})


def hashes(one: sweep.Sweep) -> set[str]:
    return {cell.cell_hash for cell in sweep.plan(one)}


def test_a_plan_has_every_combination_once(paths):
    cells = sweep.plan(asked(paths))
    assert len(cells) == len(hashes(asked(paths))) == 2 * 2 * 2 * 2 * 2
    assert len(sweep.plan(asked([*paths, *paths], policies=["lru", "sieve", "lru"]))) == len(cells)
    assert sweep.without(cells, {cells[3].cell_hash}) == cells[:3] + cells[4:]


def test_a_semantics_that_a_policy_lacks_gives_no_cell(paths):
    cells = sweep.plan(asked(paths, semantics=["token_clock"]))
    assert {cell.cell.policy for cell in cells} == {"lru"}


def test_seeds_make_cells_only_where_something_is_random(paths):
    seeds = {"seeds": (0, 1, 2), "scopes": ["layer"], "semantics": ["sequential"]}
    cells = sweep.plan(asked(paths[:1], policies=["lru", "random"], **seeds))
    assert sorted((cell.cell.policy, cell.seed) for cell in cells) == sorted(
        [("lru", 0), ("random", 0), ("random", 1), ("random", 2)] * 2
    )
    assert len(sweep.plan(asked(paths[:1], policies=["lru"], order="random", **seeds))) == 3 * 2


def test_a_cell_is_named_by_the_bytes_of_its_trace_and_not_by_its_place(tmp_path, paths):
    before = hashes(asked(paths[:1]))
    assert before == hashes(asked(paths[:1]))
    moved = tmp_path / "moved.parquet"
    moved.write_bytes(paths[0].read_bytes())
    assert hashes(asked([moved])) == before
    routed(paths[0], seed=9)
    assert not hashes(asked(paths[:1])) & before


@pytest.mark.parametrize(
    "said",
    [
        {"window": Window((0, 20))},
        {"window": Window(phase="unknown")},
        {"window": Window(warm_fraction=Fraction(1, 3))},
        {"window": Window(warm_pass=True)},
        {"order": "descending"},
        {"dedup": "none"},
        {"expert_bytes": 10},
        {"capacities": [Capacity(experts=3)]},
        {"choices": Choices(admit="same:top:3")},
    ],
)
def test_every_part_of_the_contract_changes_the_names(paths, said):
    assert not hashes(asked(paths, **said)) & hashes(asked(paths))


def test_a_choice_changes_the_names_of_the_policies_it_concerns(paths):
    everything = {"policies": ["lru", "static", "pinned_lru", "two_list"], "scopes": ["layer", "global"]}

    def changed(**choice) -> set[tuple[str, str]]:
        plain = hashes(asked(paths[:1], **everything))
        cells = sweep.plan(asked(paths[:1], **everything, choices=Choices(**choice)))
        return {(cell.cell.policy, cell.scope) for cell in cells if cell.cell_hash not in plain}

    both = ("layer", "global")
    assert changed(fit="first:0.5") == {(policy, scope) for policy in ("static", "pinned_lru") for scope in both}
    assert changed(pinned_fraction=Fraction(1, 4)) == {("pinned_lru", scope) for scope in both}
    assert changed(folios_per_expert=2) == {("two_list", scope) for scope in both}
    assert changed(quota_fit="same") == {(policy, "layer") for policy in everything["policies"]}


def test_a_table_fitted_elsewhere_names_the_cells_by_its_content(tmp_path, paths):
    table = tmp_path / "hot.csv"
    table.write_text("layer_id,expert_id\n0,1\n")
    for choices in (Choices(admit=str(table)), Choices(fit=f"{table}:first:0.5"), Choices(quota_fit=str(table))):
        one = asked(paths[:1], policies=["static"], scopes=["layer"], choices=choices)
        table.write_text("layer_id,expert_id\n0,1\n")
        before = hashes(one)
        table.write_text("layer_id,expert_id\n0,2\n")
        assert not hashes(one) & before


def test_rows_keep_the_table_and_are_those_of_simulate(paths):
    one = asked(paths, policies=["lru", "static", "random"], seeds=(0, 5), window=Window(warm_pass=True))
    cells = sweep.plan(one)
    rows = [row for batch in sweep.run(one, cells) for row in batch]
    table = TABLES["sweep"]
    validate_table(table.frame(rows), table)
    assert {row["cell_hash"] for row in rows} == {cell.cell_hash for cell in cells}
    by_hash = {row["cell_hash"]: row for row in rows}
    for cell in cells:
        # In scope global a capacity stands for as many experts of every layer.
        experts = cell.cell.capacity.experts * (2 if cell.scope == "global" else 1)
        (wanted,) = simulate(
            prepare(read_trace(cell.trace), one.window, seed=cell.seed),
            names=[cell.cell.policy],
            scope=cell.scope,
            semantics=[cell.cell.semantics],
            capacities=[Capacity(experts=experts)],
        )
        assert by_hash[cell.cell_hash] == {"cell_hash": cell.cell_hash, **wanted}


def test_the_rows_of_a_batch_are_of_one_trace_and_no_more_than_a_batch(paths, monkeypatch):
    monkeypatch.setattr(sweep, "BATCH_CELLS", 3)
    one = asked(paths)
    batches = list(sweep.run(one, sweep.plan(one)))
    assert sum(map(len, batches)) == 32
    assert max(map(len, batches)) == 3
    assert all(len({row["trace_id"] for row in batch}) == 1 for batch in batches)


def test_bytes_hold_equally_much_in_both_scopes(tmp_path):
    path = routed(tmp_path / "sized.parquet", expert_bytes=10)
    one = asked([path], capacities=[Capacity(bytes=40)])
    rows = [row for batch in sweep.run(one, sweep.plan(one)) for row in batch]
    assert {row["capacity_bytes"] for row in rows} == {40}


# The command


def run_sweep(capsys, *arguments: object) -> tuple[int, dict | str, str]:
    try:
        status = cli.main(["sweep", *map(str, arguments)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, json.loads(out) if status == 0 and "--json" in arguments else out, err


def kept(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(sorted((folder / "results" / "sweep").glob("*/*.parquet")))


USUAL = ("--policy", "lru,sieve", "--semantics", "event_atomic,sequential", "--scope", "layer,global")


def test_a_second_run_simulates_nothing_and_a_larger_one_the_rest(capsys, tmp_path, paths):
    said = [*USUAL, "--data", tmp_path / "d", "--json"]
    status, first, err = run_sweep(capsys, paths[0], "--capacity-experts", "2,3", *said)
    assert (status, err) == (0, "")
    folder = str(tmp_path / "d" / "results" / "sweep")
    assert first == {"cells": 16, "skipped": 0, "simulated": 16, "folder": folder}
    before = kept(tmp_path / "d")
    assert run_sweep(capsys, paths[0], "--capacity-experts", "2,3", *said)[1]["simulated"] == 0
    larger = run_sweep(capsys, *paths, "--capacity-experts", "2,3,4", *said)[1]
    assert (larger["cells"], larger["skipped"], larger["simulated"]) == (48, 16, 32)
    after = kept(tmp_path / "d")
    assert len(after) == after["cell_hash"].n_unique() == 48
    table = TABLES["sweep"]
    validate_table(after, table)
    assert after.columns == list(table.column_names)
    assert after.join(before, on="cell_hash", how="semi").sort("cell_hash").equals(before.sort("cell_hash"))


def test_an_interrupted_sweep_keeps_its_batches_and_goes_on_with_the_rest(capsys, tmp_path, paths, monkeypatch):
    monkeypatch.setattr(sweep, "BATCH_CELLS", 3)
    said = [*paths, "--capacity-experts", "2,3", *USUAL, "--data", tmp_path / "d", "--json"]
    whole_run, batches = sweep.run, 0

    def interrupted(one, cells):
        nonlocal batches
        for batch in whole_run(one, cells):
            if batches == 4:
                raise KeyboardInterrupt
            batches += 1
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "run", interrupted)
        status, _, err = run_sweep(capsys, *said)
    assert (status, len(err.splitlines())) == (1, 1)
    saved = len(kept(tmp_path / "d"))
    assert 0 < saved < 32
    rest = run_sweep(capsys, *said)[1]
    assert (rest["skipped"], rest["simulated"]) == (saved, 32 - saved)
    assert kept(tmp_path / "d")["cell_hash"].n_unique() == 32
    assert not [path for path in (tmp_path / "d").rglob("*") if path.name.endswith(".tmp")]


def test_a_changed_trace_is_simulated_again(capsys, tmp_path, paths):
    said = [paths[0], "--capacity-experts", "2", "--data", tmp_path / "d", "--json"]
    assert run_sweep(capsys, *said)[1]["simulated"] == 1
    routed(paths[0], seed=9)
    assert run_sweep(capsys, *said)[1]["simulated"] == 1
    assert len(kept(tmp_path / "d")) == 2


def test_text_says_what_was_found_and_what_was_simulated(capsys, tmp_path, paths):
    said = [*paths, "--capacity-experts", "2,3", "--data", tmp_path / "d"]
    assert "4 cells: 4 simulated, 0 found in " in run_sweep(capsys, *said)[1]
    assert "4 cells: 0 simulated, 4 found in " in run_sweep(capsys, *said)[1]


@pytest.mark.parametrize(
    ("said", "status", "named"),
    [
        (["--capacity-experts", "2"], 2, "--data"),
        (["--data", "{data}"], 2, "--capacity-experts"),
        (["--data", "{data}", "--capacity", "1KiB"], 2, "no expert sizes"),
        (["--data", "{data}", "--capacity-experts", "2", "--seeds", "0,x"], 2, "'x'"),
        (["--data", "{data}", "--capacity-experts", "2", "--folios-per-expert", "0"], 2, "--folios-per-expert 0"),
        (["missing.parquet", "--data", "{data}", "--capacity-experts", "2"], 1, "missing.parquet"),
        (["--data", "{data}", "--capacity-experts", "2", "--policy", "static", "--fit", "x.parquet"], 1, "x.parquet"),
        (["--data", "{data}", "--capacity-experts", "2", "--steps", "9:99"], 2, "wanted a range inside 0:30"),
    ],
)
def test_a_wrong_call_is_one_line_and_its_exit_code(capsys, tmp_path, paths, said, status, named):
    found, out, err = run_sweep(capsys, paths[0], *[part.format(data=tmp_path / "d") for part in said])
    assert (found, out) == (status, "")
    assert len(err.splitlines()) == 1, err
    assert named in err


def test_a_damaged_result_is_named_in_one_line(capsys, tmp_path, paths):
    said = [paths[0], "--capacity-experts", "2", "--data", tmp_path / "d"]
    assert run_sweep(capsys, *said)[0] == 0
    (file,) = (tmp_path / "d").rglob("*.parquet")
    file.write_bytes(b"PAR1 only the beginning")
    status, out, err = run_sweep(capsys, *said)
    assert (status, out, len(err.splitlines())) == (1, "", 1)
    assert str(file) in err


def test_a_sweep_is_a_value(paths):
    one = asked(paths)
    assert replace(one, seeds=(1,)) != one
