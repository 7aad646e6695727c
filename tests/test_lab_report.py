"""The report's section on labs and the bundles of a lab's results."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.bundle import PROVENANCE, UnusableBundle, add_bundle, shipped, write_bundle
from pipeline.cli import main
from pipeline.lab_report import VIEWS, lab_blocks
from pipeline.report import render_report
from schemas.files import DataFolder
from schemas.tables import TABLES
from tests.table_rows import ROWS
from tests.test_report import SPACE, text_of
from warehouse.build import build_warehouse, query, read_tables

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
        file = data.result_file(name, "here")
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
    assert "cgroup at 1.00 kB: with MGLRU 2.020 times what the classic lists read" in apart
    assert "the ranges are apart." in apart
    inside = page("inside", (99, 100, 101, 102, 110))
    assert "inside the spread, so no effect is claimed." in inside
    # Held against the same mechanism alone.
    assert apart.count("times what the classic lists read") == 1


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
    file = data.result_file("lab_run", "here")
    marks = pl.read_parquet(file).with_columns(
        repetition=pl.when(pl.col("run_id") == "run-1").then(None).otherwise(pl.col("repetition"))
    )
    marks.write_parquet(file)
    build_warehouse(data.root)
    assert query(data.root, "SELECT runs, device_bytes FROM lab_matrix").rows() == [(1, 100)]


def test_a_bundle_brings_the_same_rows_to_another_data_folder(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    conditions = (
        condition("wall", FIVE, 100, mechanism="cgroup"),
        condition("wall, MGLRU on", (7,), 3, mechanism="cgroup", mglru="on"),
    )
    data = written(tmp_path / "here", *conditions, is_whole=True)
    # What belongs to no lab stays behind.
    stranger = data.result_file("replay_run", "stranger")
    stranger.parent.mkdir()
    TABLES["replay_run"].frame([{**ROWS["replay_run"], "run_id": "stranger"}]).write_parquet(stranger)
    call = ["bundle", "tiny-1", "--out", str(tmp_path / "out"), "--made-by", "make lab", "--data", str(data.root)]
    assert main(call) == 0
    other = DataFolder(tmp_path / "there")
    for said in ("out: tiny-1 added\n", "out: there already\n"):
        capsys.readouterr()
        assert main(["unbundle", str(tmp_path / "out"), "--data", str(other.root)]) == 0
        assert capsys.readouterr().out == said
    for root in (data.root, other.root):
        build_warehouse(root)
    for name in ("lab", "lab_run", "machine", "pool"):
        assert query(data.root, f"FROM {name} ORDER BY ALL").equals(query(other.root, f"FROM {name} ORDER BY ALL"))
    assert query(other.root, "SELECT count(*) FROM replay_run").item() == 6
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
        ("lab", {"definition": '{"conditions": 7}'}, "no definition of a lab"),
        ("replay_run", {"bytes_valid": None}, "replay_run"),
        ("lab_run", None, "lab_run.parquet: not there; wanted a folder that expert-tier bundle wrote"),
        ("pool", b"PAR1 is not all of it", "pool.parquet: unreadable"),
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
        assert finished
        rows = query(tmp_path, f"SELECT valid_runs FROM lab_matrix WHERE lab_id = '{lab_id}'").rows()
        assert rows == [(repetitions,)] * conditions
