"""The report's section on labs and the bundles of a lab's results."""

import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.bundle import PROVENANCE, UnusableBundle, _read, add_bundle, shipped, write_bundle
from pipeline.cli import main
from pipeline.lab_report import VIEWS, lab_blocks
from pipeline.report import render_report
from replayer.replay_cli import read_marked_runs, write_rows
from schemas.files import DataFolder
from schemas.tables import TABLES
from tests.table_rows import ROWS
from tests.test_report import SPACE, text_of
from warehouse.build import build_warehouse, query, read_tables

WITH_TEXT = '{"conditions": [{"label": "wall", "request": {"capacity_bytes": "y"}}]}'
MACHINES = {"off": "machine-off", "on": "machine-on"}


def condition(
    label: str, devices: tuple[int, ...], misses: int, *, mechanism: str, mglru: str = "off", capacity: int = 1000
) -> dict[str, Any]:
    return {
        "label": label, "devices": devices, "misses": misses, "mechanism": mechanism, "mglru": mglru,
        "capacity": capacity,
    }  # fmt: skip


def written(root: Path, *conditions: dict[str, Any], is_whole: bool = False) -> DataFolder:
    """A data folder with the results of a lab, a run per device count of each condition.

    is_whole: every row keeps the contract of its table, and so none says what the condition does.
    """
    lab_id = "tiny-1"
    data = DataFolder(root)
    definition = {
        "conditions": [{"label": one["label"], "request": {"capacity_bytes": one["capacity"]}} for one in conditions]
    }
    runs, marks = [], []
    for one in conditions:
        for number, device in enumerate(one["devices"]):
            run_id = f"run-{len(runs)}"
            machine_id = MACHINES[one["mglru"]]
            if is_whole:
                runs.append({**ROWS["replay_run"], "run_id": run_id, "machine_id": machine_id})
            else:
                said = {
                    "mechanism": one["mechanism"], "device_bytes": device, "bytes_valid": True, "bytes_reasons": "",
                    "status": "complete", "failure": None, "resident_median_bytes": 900, "together_id": None,
                    "resident_miss_bytes": one["misses"], "amplification_resident": device / one["misses"],
                }  # fmt: skip
                runs.append({**ROWS["replay_run"], "run_id": run_id, "machine_id": machine_id, **said})
            marks.append({
                **ROWS["lab_run"], "run_id": run_id, "lab_id": lab_id, "condition": one["label"], "repetition": number,
                "place": "guest", "mglru_setting": one["mglru"],
            })  # fmt: skip
    lab = {
        **ROWS["lab"], "lab_id": lab_id, "conditions": len(conditions), "runs": len(runs), "valid_runs": len(runs),
        "definition": json.dumps(definition), "finished": True,
    }  # fmt: skip
    machines = [
        {**ROWS["machine"], "machine_id": machine_id, "mglru": f"{state} 0x0000"}
        for state, machine_id in MACHINES.items()
    ]
    for name, rows in {
        "lab": [lab], "lab_run": marks, "replay_run": runs, "machine": machines, "pool": [ROWS["pool"]],
    }.items():  # fmt: skip
        file = data.result_file(name, lab_id if name.startswith("lab") else "here")
        file.parent.mkdir(parents=True)
        TABLES[name].frame(rows).write_parquet(file)
    return data


def shown(data: DataFolder) -> str:
    build_warehouse(data.root)
    return text_of(render_report(read_tables(data.root, views=VIEWS))).replace(SPACE, " ")


FIVE = (100, 101, 102, 103, 104)


def test_without_a_lab_there_is_no_section(tmp_path: Path) -> None:
    assert lab_blocks({}) == []
    build_warehouse(tmp_path)
    assert lab_blocks(read_tables(tmp_path, views=VIEWS)) == []


def test_mechanisms_agree_or_not_as_the_rows_say(tmp_path: Path) -> None:
    def page(folder: str, device: int) -> str:
        return shown(
            written(
                tmp_path / folder,
                condition("wall", FIVE, 100, mechanism="cgroup"),
                condition("balloon", (device,) * 5, 100, mechanism="balloon"),
            )
        )

    near = page("near", 105)
    assert "Asked for 1.00 kB, 2 ways of limiting memory without MGLRU agree within a tenth" in near
    assert "from 1.020 (wall) to 1.050 (balloon), 1.029 times as much." in near
    # Not again among the native replays of this machine.
    assert "of them quarantined" not in near
    far = page("far", 204)
    assert "2 ways of limiting memory without MGLRU do not agree within a tenth" in far
    assert "2.000 times as much" in far


def test_mglru_is_an_effect_only_where_the_ranges_are_apart(tmp_path: Path) -> None:
    def page(folder: str, devices: tuple[int, ...]) -> str:
        return shown(
            written(
                tmp_path / folder,
                condition("wall, MGLRU on", devices, 100, mechanism="cgroup", mglru="on"),
                condition("wall, MGLRU off", FIVE, 100, mechanism="cgroup"),
                condition("balloon, MGLRU off", FIVE, 100, mechanism="balloon"),
            )
        )

    apart = page("apart", (204, 205, 206, 207, 208))
    assert "wall at 1.00 kB: with MGLRU 2.020 times what the classic lists read" in apart
    assert "the ranges are apart." in apart
    inside = page("inside", (99, 100, 101, 102, 110))
    assert "inside the spread, so no effect is claimed." in inside
    # Held against the same mechanism alone.
    assert apart.count("times what the classic lists read") == 1


def test_mglru_is_held_against_what_asks_for_the_same_but_it(tmp_path: Path) -> None:
    data = written(
        tmp_path,
        condition("wall, 1, MGLRU on", FIVE, 100, mechanism="cgroup", mglru="on"),
        condition("wall, 8, MGLRU off", FIVE, 100, mechanism="cgroup"),
    )
    file = data.result_file("lab", "tiny-1")
    lab = pl.read_parquet(file)
    assert "times what the classic lists read" in shown(data)
    definition = json.loads(lab["definition"].item())
    for one, threads in zip(definition["conditions"], (1, 8), strict=True):
        one["request"]["threads"] = threads
    lab.with_columns(definition=pl.lit(json.dumps(definition))).write_parquet(file)
    assert "times what the classic lists read" not in shown(data)


def test_conditions_of_few_or_invalid_runs_are_shown_and_compared_with_none(tmp_path: Path) -> None:
    data = written(
        tmp_path,
        condition("wall", FIVE, 100, mechanism="cgroup"),
        condition("balloon", (200,) * 4, 100, mechanism="balloon"),
    )
    page = shown(data)
    assert "ways of limiting memory" not in page
    assert "4 of 4" in page
    rows = query(data.root, "SELECT condition, runs, valid_runs, device_bytes FROM lab_matrix").rows()
    assert rows == [("balloon", 4, 4, 200), ("wall", 5, 5, 102)]


def test_runs_to_find_the_boot_limit_by_are_no_repetitions(tmp_path: Path) -> None:
    data = written(tmp_path, condition("wall", (100, 200), 100, mechanism="boot"))
    file = data.result_file("lab_run", "tiny-1")
    marks = pl.read_parquet(file).with_columns(
        repetition=pl.when(pl.col("run_id") == "run-1").then(None).otherwise(pl.col("repetition"))
    )
    marks.write_parquet(file)
    build_warehouse(data.root)
    assert query(data.root, "SELECT runs, device_bytes FROM lab_matrix").rows() == [(1, 100)]


def test_a_bundle_brings_the_same_rows_to_another_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    conditions = (
        condition("wall", FIVE, 100, mechanism="cgroup"),
        condition("wall, MGLRU on", FIVE, 3, mechanism="cgroup", mglru="on"),
    )
    data = written(tmp_path / "here", *conditions, is_whole=True)
    # What belongs to no lab stays behind.
    stranger = data.result_file("replay_run", "stranger")
    stranger.parent.mkdir()
    TABLES["replay_run"].frame([{**ROWS["replay_run"], "run_id": "stranger"}]).write_parquet(stranger)
    call = ["bundle", "tiny-1", "--out", str(tmp_path / "out"), "--made-by", "make lab", "--data", str(data.root)]
    assert main(call) == 0
    other = DataFolder(tmp_path / "there")
    for said in ("out: tiny-1, 10 runs added\n", "out: there already\n"):
        capsys.readouterr()
        assert main(["unbundle", str(tmp_path / "out"), "--data", str(other.root)]) == 0
        assert capsys.readouterr().out == said
    for root in (data.root, other.root):
        build_warehouse(root)
    for name in ("lab", "lab_run", "machine", "pool"):
        assert query(data.root, f"FROM {name} ORDER BY ALL").equals(query(other.root, f"FROM {name} ORDER BY ALL"))
    assert query(other.root, "SELECT count(*) FROM replay_run").item() == 10
    assert json.loads((tmp_path / "out" / PROVENANCE).read_text())["made_by"] == "make lab"


def test_a_lab_that_is_not_there_is_named(tmp_path: Path) -> None:
    data = written(tmp_path / "here", condition("wall", FIVE, 100, mechanism="cgroup"))
    with pytest.raises(UnusableBundle, match=r"no lab 'huge' with runs there; there are: tiny-1"):
        write_bundle(data, "huge", tmp_path / "out", made_by="make lab")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("machine", {"machine_id": "../../escaped"}, "id '../../escaped', wanted letters"),
        ("lab", {"lab_id": ".."}, "id '..', wanted letters"),
        ("lab", {"definition": '{"conditions": 7}'}, "lab.parquet: no definition of a lab: key conditions: wanted"),
        ("lab", {"definition": WITH_TEXT}, "no definition of a lab: key conditions.0.request.capacity_bytes: wanted"),
        ("lab", {"definition": WITH_TEXT.replace('"y"', "1").replace('"wall"', "3")}, "conditions.0.label: wanted"),
        (
            "lab",
            {"definition": WITH_TEXT.replace('"y"', "1").replace("wall", "tree")},
            "runs of condition 'wall', which",
        ),
        ("lab_run", {"lab_id": "other"}, "lab_run.parquet has runs of lab 'other', wanted those of tiny-1"),
        ("lab_run", {"trace_id": "other"}, "lab_run.parquet and replay_run.parquet name other traces"),
        ("lab_run", [], "lab_run.parquet: no rows"),
        ("replay_run", [], "replay_run.parquet: no rows"),
        ("machine", [], "machine.parquet: no rows"),
        ("pool", [], "pool.parquet: no rows"),
        ("lab", [], "0 labs in lab.parquet"),
        ("lab_run", ["run-0"], "replay_run.parquet has run_id run-1, which lab_run.parquet does not have"),
        ("replay_run", ["run-0"], "lab_run.parquet has run_id run-1, which replay_run.parquet does not have"),
        ("machine", {"machine_id": "other"}, "replay_run.parquet has machine_id machine-off, which machine.parquet"),
        ("pool", {"pool_id": "other"}, "replay_run.parquet has pool_id pool-1, which pool.parquet does not have"),
        ("replay_run", {"run_id": "same"}, "one row per run_id (found run_id='same'); damaged, or of another"),
        ("replay_run", {"bytes_valid": None}, "replay_run"),
        ("lab_run", None, "lab_run.parquet: not there; wanted a folder that expert-tier bundle wrote"),
        ("pool", b"PAR1 is not all of it", "pool.parquet: unreadable"),
        ("pool", b"PAR1" + b"\xff" * 40 + b"\x28\x00\x00\x00PAR1", "pool.parquet: unreadable (Couldn't deserialize"),
        ("pool", b"\0" * (1 << 26 | 1), "67,108,865 bytes, wanted at most 67,108,864; those of a lab"),
        ("pool", "folder", "pool.parquet: no file; the bundle is damaged"),
    ],
)
def test_a_damaged_bundle_is_one_line_and_adds_nothing(
    tmp_path: Path, name: str, change: object, words: str, capsys: pytest.CaptureFixture
) -> None:
    data = written(tmp_path / "here", condition("wall", FIVE, 100, mechanism="cgroup"), is_whole=True)
    out = tmp_path / "out"
    write_bundle(data, "tiny-1", out, made_by="make lab")
    file = out / f"{name}.parquet"
    if change is None:
        file.unlink()
    elif isinstance(change, bytes):
        file.write_bytes(change)
    elif change == "folder":
        file.unlink()
        file.mkdir()
    elif isinstance(change, list):
        pl.read_parquet(file).filter(pl.col(TABLES[name].key[0]).is_in(change)).write_parquet(file)
    else:
        frame = pl.read_parquet(file)
        frame.with_columns(**{key: pl.lit(value, frame.schema[key]) for key, value in change.items()}).write_parquet(
            file
        )
    assert main(["unbundle", str(out), "--data", str(tmp_path / "there")]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "there").exists()
    assert not (tmp_path / "escaped").exists()


def test_a_damaged_result_is_named_and_no_bundle_is_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = written(tmp_path / "here", condition("wall", FIVE, 100, mechanism="cgroup"), is_whole=True)
    data.result_file("replay_run", "here").write_bytes(b"PAR1 is not all of it")
    call = ["bundle", "tiny-1", "--out", str(tmp_path / "out"), "--made-by", "make lab", "--data", str(data.root)]
    assert main(call) == 1
    assert "part.parquet: unreadable" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_shipped_bundles_can_be_added_and_asked(tmp_path: Path) -> None:
    assert shipped()
    for folder in shipped():
        add_bundle(folder, DataFolder(tmp_path))
    build_warehouse(tmp_path)
    for lab_id, conditions, repetitions, finished in query(
        tmp_path, "SELECT lab_id, conditions, repetitions, finished FROM lab"
    ).rows():
        rows = query(tmp_path, f"SELECT valid_runs FROM lab_matrix WHERE lab_id = '{lab_id}'").rows()
        assert len(rows) == conditions
        # One that was stopped says so, and goes on where it is added.
        assert all(valid == repetitions if finished else 0 < valid <= repetitions for (valid,) in rows)


def bundled(root: Path, *conditions: dict[str, Any], runs: int | None = None) -> Path:
    """The bundle of a whole lab, or of one that was stopped after so many runs."""
    data = written(root / "measured", *conditions, is_whole=True)
    if runs is not None:
        kept = [f"run-{number}" for number in range(runs)]
        for name in ("lab_run", "replay_run"):
            (file,) = (data.results / name).glob("*/*.parquet")
            pl.read_parquet(file).filter(pl.col("run_id").is_in(kept)).write_parquet(file)
        file = data.result_file("lab", "tiny-1")
        pl.read_parquet(file).with_columns(
            runs=pl.lit(runs, pl.Int64), finished=pl.lit(False)
        ).cast(TABLES["lab"].polars_schema).write_parquet(file)  # fmt: skip
    write_bundle(data, "tiny-1", root / "out", made_by="make lab")
    return root / "out"


def changed(bundle: Path, name: str, **values: object) -> None:
    """Writes other values into a column of a bundle."""
    frame = pl.read_parquet(bundle / f"{name}.parquet")
    frame.with_columns(**{key: pl.lit(value, frame.schema[key]) for key, value in values.items()}).write_parquet(
        bundle / f"{name}.parquet"
    )


def test_a_newer_bundle_of_a_lab_adds_the_runs_that_are_new(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wall = condition("wall", FIVE, 100, mechanism="cgroup")
    half, whole = bundled(tmp_path / "half", wall, runs=2), bundled(tmp_path / "whole", wall)
    data = DataFolder(tmp_path / "there")
    said, states = [], []
    for bundle in (half, half, whole, half, whole):
        assert main(["unbundle", str(bundle), "--data", str(data.root)]) == 0
        said.append(capsys.readouterr().out)
        build_warehouse(data.root)
        states.append(
            query(data.root, "SELECT runs, valid_runs, finished, (SELECT count(*) FROM lab_run) FROM lab").row(0)
        )
    again = "out: there already\n"
    assert said == ["out: tiny-1, 2 runs added\n", again, "out: tiny-1, 3 runs more\n", again, again]
    counted = ROWS["replay_run"]["bytes_valid"] * 1
    assert states == [(2, 2 * counted, False, 2)] * 2 + [(5, 5 * counted, bool(counted), 5)] * 3


def test_a_lab_that_was_brought_goes_on_where_it_stopped(tmp_path: Path) -> None:
    wall = condition("wall", FIVE, 100, mechanism="cgroup")
    data = DataFolder(tmp_path / "there")
    add_bundle(bundled(tmp_path, wall, runs=2), data)
    known = read_marked_runs(data, "lab_run", "tiny-1")
    assert [run["run_id"] for run in known] == ["run-0", "run-1"]
    assert [run["repetition"] for run in known] == [0, 1]
    # As `replayer lab run` writes them: one file per run.
    run = {**ROWS["replay_run"], "run_id": "run-9", "machine_id": MACHINES["off"]}
    mark = {**ROWS["lab_run"], "run_id": "run-9", "lab_id": "tiny-1", "condition": "wall", "repetition": 2}
    write_rows(data.run_file("replay_run", run["trace_id"], "run-9"), "replay_run", [run])
    write_rows(data.run_file("lab_run", "tiny-1", "run-9"), "lab_run", [mark])
    assert {run["run_id"] for run in read_marked_runs(data, "lab_run", "tiny-1")} == {"run-0", "run-1", "run-9"}
    rows = write_bundle(data, "tiny-1", tmp_path / "again", made_by="make lab")
    assert (rows["lab_run"], rows["replay_run"], rows["machine"]) == (3, 3, 1)
    assert add_bundle(tmp_path / "again", DataFolder(tmp_path / "third")).runs == 3
    assert add_bundle(tmp_path / "again", data).runs == 0
    build_warehouse(data.root)


def test_what_a_killed_call_left_is_completed(tmp_path: Path) -> None:
    bundle, data = bundled(tmp_path, condition("wall", FIVE, 100, mechanism="cgroup")), DataFolder(tmp_path / "there")
    add_bundle(bundle, data)
    for name in ("lab_run", "lab"):
        (file,) = (data.results / name).glob("*/*.parquet")
        file.unlink()
    assert add_bundle(bundle, data).runs == 5
    build_warehouse(data.root)
    assert query(data.root, "SELECT count(*) FROM lab_run JOIN replay_run USING (run_id)").item() == 5


def test_a_run_is_of_one_lab(tmp_path: Path) -> None:
    bundle, data = bundled(tmp_path, condition("wall", FIVE, 100, mechanism="cgroup")), DataFolder(tmp_path / "there")
    add_bundle(bundle, data)
    for name in ("lab", "lab_run"):
        changed(bundle, name, lab_id="tiny-2")
    provenance = bundle / PROVENANCE
    provenance.write_text(provenance.read_text().replace("tiny-1", "tiny-2"))
    with pytest.raises(
        UnusableBundle, match="run run-0 of lab tiny-2 is among the results as one of lab tiny-1; add eit"
    ):
        add_bundle(bundle, data)
    build_warehouse(data.root)


def test_a_run_or_lab_that_says_something_else_than_here_is_refused(tmp_path: Path) -> None:
    bundle, data = bundled(tmp_path, condition("wall", FIVE, 100, mechanism="cgroup")), DataFolder(tmp_path / "there")
    add_bundle(bundle, data)
    changed(bundle, "replay_run", threads=3)
    with pytest.raises(UnusableBundle, match="runs of lab tiny-1 that are among the results have other values there"):
        add_bundle(bundle, data)
    changed(bundle, "lab", definition=WITH_TEXT.replace('"y"', "77"))
    with pytest.raises(UnusableBundle, match=r"another definition.*remove results/lab/tiny-1/part.parquet"):
        add_bundle(bundle, data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "provenance.json: not there; wanted a folder"),
        ("{", "provenance.json: no JSON"),
        ("[" * 60_000, "provenance.json: no JSON"),
        ("[]", "does not say what made the results"),
        ('{"lab_id": "tiny-1", "made_by": " "}', "does not say what made the results"),
        ('{"lab_id": "huge", "made_by": "make"}', "of lab 'huge', but lab.parquet has 'tiny-1'"),
        ('{"lab_id": "tiny-1", "made_by": "make"}', "None rows of lab, but lab.parquet has 1"),
        (" " * 70_000, "70,000 bytes, wanted at most 65,536"),
    ],
)
def test_a_bundle_says_what_made_it(tmp_path: Path, text: str | None, words: str) -> None:
    bundle = bundled(tmp_path, condition("wall", FIVE, 100, mechanism="cgroup"))
    file = bundle / PROVENANCE
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(UnusableBundle, match=words):
        add_bundle(bundle, DataFolder(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_what_makes_a_bundle_again_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = written(tmp_path / "here", condition("wall", FIVE, 100, mechanism="cgroup"), is_whole=True)
    call = ["bundle", "tiny-1", "--out", str(tmp_path / "out"), "--made-by", " ", "--data", str(data.root)]
    assert main(call) == 2
    assert "--made-by ' ', wanted the command that remakes the results" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_every_damaged_byte_of_a_bundle_is_one_line(tmp_path: Path) -> None:
    """Whatever a byte is changed to, a table is read, or refused by its name."""
    bundle = bundled(tmp_path, condition("wall", FIVE, 100, mechanism="cgroup"))
    file = bundle / "machine.parquet"
    whole = file.read_bytes()
    generator = random.Random(7)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 2, 8))):
            damaged[generator.randrange(len(whole))] = generator.randrange(256)
        file.write_bytes(damaged)
        try:
            _read(bundle, "machine")
        except UnusableBundle as error:
            refused += 1
            assert str(error).startswith(f"{file}: ")
    assert refused > 20


@pytest.mark.parametrize("definition", [WITH_TEXT, "{}", "[", '{"conditions": [{"label": 3}]}'])
def test_the_report_survives_a_definition_that_says_nothing(tmp_path: Path, definition: str) -> None:
    data = written(
        tmp_path,
        condition("wall", FIVE, 100, mechanism="cgroup"),
        condition("balloon", FIVE, 100, mechanism="balloon"),
    )
    file = data.result_file("lab", "tiny-1")
    pl.read_parquet(file).with_columns(definition=pl.lit(definition)).write_parquet(file)
    page = shown(data)
    assert "What was asked for is not known of 2 conditions, first balloon" in page
    assert "ways of limiting memory" not in page


def test_conditions_that_keep_another_residency_than_asked_are_named(tmp_path: Path) -> None:
    data = written(
        tmp_path,
        condition("wall", FIVE, 100, mechanism="cgroup", capacity=920),
        condition("balloon", FIVE, 100, mechanism="balloon", capacity=1000),
        condition("boot", FIVE, 100, mechanism="boot", capacity=860),
    )
    page = shown(data)
    assert (
        "Further than 4.0 % from the capacity asked for: boot keeps 900 B of 860 B (+4.7 %) and balloon keeps 900 B of "
        "1.00 kB (−10.0 %)." in page
    )
