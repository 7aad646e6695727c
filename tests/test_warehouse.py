"""The warehouse against its schemas, bad inputs, open readers and untrusted SQL."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import duckdb
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from replayer.disclosure import best_causal
from schemas.columns import POLICIES
from schemas.files import publish
from schemas.tables import TABLES, Table
from schemas.validation import validate_table
from tests.builders import make_trace, write_trace
from warehouse import build
from warehouse.build import (
    MalformedResult,
    QueryFailed,
    WarehouseMissing,
    WarehouseNotBuilt,
    build_warehouse,
    list_relations,
    query,
    read_tables,
)

ROOT = Path(build.__file__).parents[1]
DUCKDB_TYPES = {
    pl.String: "VARCHAR",
    pl.Int64: "BIGINT",
    pl.UInt32: "UINTEGER",
    pl.Float64: "DOUBLE",
    pl.Boolean: "BOOLEAN",
}


def valid_row(table: Table, **values: object) -> dict[str, object]:
    """A row that keeps the table's contract: counts are 6, sums and ratios follow from the counts."""
    row: dict[str, object] = {}
    for column in table.columns:
        if column.dtype == pl.String:
            row[column.name] = column.values[0] if column.values else f"some {column.name}"
        elif column.dtype == pl.Boolean:
            row[column.name] = True
        else:
            row[column.name] = 6.0 if column.dtype == pl.Float64 else 6
    row |= values
    for total, parts in table.sums:
        row |= {part: 0 for part in parts if part not in values}
        if not set(parts) & set(values):
            row[parts[0]] = row[total]
    if "capacity_misses" in row and not {"compulsory_misses", "capacity_misses"} & set(values):
        row |= {"compulsory_misses": 0, "capacity_misses": row["misses"]}
    for column in table.columns:
        if column.ratio is not None:
            numerator, denominator = (row[name] for name in column.ratio)
            row[column.name] = numerator / denominator if denominator and numerator is not None else None
    return row


def write_result(data_dir: Path, table: str, partition: str, rows: Iterable[dict[str, object]]) -> Path:
    frame = validate_table(TABLES[table].frame(rows), TABLES[table])
    file = data_dir / "results" / table / partition / "part.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(file)
    return file


def hit_rate_row(**values: object) -> dict[str, object]:
    nothing = dict.fromkeys(("capacity_bytes", "fit", "seed", "pinned_fraction", "admission", "quota_fit"))
    contract = {"trace_id": "a", "scope": "layer", "capacity_experts_total": 16, **nothing, "folios_per_expert": None}
    counts = {"accesses": 100, "selections": 200, "lag1_uniform_denominator": 1600}
    return valid_row(TABLES["hit_rate"], **{**contract, **counts, **values})


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_tables_sql_equals_the_schemas(tmp_path):
    build_warehouse(tmp_path)
    with duckdb.connect(str(tmp_path / "warehouse.duckdb"), read_only=True) as connection:
        names = connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()
        assert {name for (name,) in names} == set(TABLES)
        for table in TABLES.values():
            found = connection.execute(
                "SELECT column_name, data_type, is_nullable FROM duckdb_columns() WHERE table_name = ? "
                "ORDER BY column_index",
                [table.name],
            ).fetchall()
            assert found == [
                (column.name, DUCKDB_TYPES[column.dtype], column.ratio is not None or column.name in table.nullable)
                for column in table.columns
            ]


def test_each_table_in_tables_sql_is_headed_by_its_grain_and_key():
    text = Path(build.__file__).with_name("tables.sql").read_text(encoding="utf-8")
    for table in TABLES.values():
        header = re.search(rf"((?:^-- .+\n)+)CREATE TABLE {table.name} \(", text, flags=re.MULTILINE)
        assert header is not None
        words = header.group(1).replace("-- ", "").replace("\n", " ")
        assert words == f"{table.grain} Key: {', '.join(table.key)} "


def test_comments_carry_grain_meaning_and_unit(tmp_path):
    build_warehouse(tmp_path)
    comments = query(tmp_path, "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal")
    meaning = {(table, column): comment for table, column, comment in comments.rows()}
    for table in TABLES.values():
        for column in table.columns:
            comment = meaning[table.name, column.name]
            assert comment.startswith(column.description)
            assert column.unit is None or comment.endswith(f"[{column.unit}]")
    assert {relation["name"]: relation["comment"] for relation in list_relations(tmp_path)}["trace"] == TABLES[
        "trace"
    ].grain


def test_rows_come_back_with_their_values_and_types(tmp_path):
    written = {}
    for table in TABLES.values():
        identity = table.key[0]
        rows = [
            valid_row(table, **{identity: 'it\'s "quoted"; 日本 \U0001f600'}),
            valid_row(table, **{identity: "nulls", **dict.fromkeys(table.nullable)}),
        ]
        written[table.name] = table.frame(rows)
        for number, row in enumerate(rows):
            write_result(tmp_path, table.name, f"partition-{number}", [row])
    assert build_warehouse(tmp_path) == dict.fromkeys(TABLES, 2)
    found = read_tables(tmp_path)
    for name, frame in written.items():
        # A table has no order of its own.
        assert_frame_equal(found[name], frame, check_exact=True, check_row_order=False)


def test_the_largest_integers_survive(tmp_path):
    biggest = 2**63 - 1
    write_result(tmp_path, "trace", "a", [valid_row(TABLES["trace"], source_bytes=biggest)])
    build_warehouse(tmp_path)
    assert query(tmp_path, "SELECT source_bytes FROM trace").item() == biggest


def test_nothing_there_gives_empty_tables(tmp_path):
    assert build_warehouse(tmp_path / "new") == dict.fromkeys(TABLES, 0)
    tables = read_tables(tmp_path / "new")
    assert [frame.height for frame in tables.values()] == [0] * len(TABLES)
    assert {name: dict(frame.schema) for name, frame in tables.items()} == {
        name: table.polars_schema for name, table in TABLES.items()
    }
    assert names_in(tmp_path / "new") == ["warehouse.duckdb"]


def test_unfinished_and_foreign_files_are_left_out(tmp_path):
    write_result(tmp_path, "hit_rate", "a", [hit_rate_row()])
    folder = tmp_path / "results" / "hit_rate"
    shutil.copytree(folder / "a", folder / ".b.tmp")
    shutil.copytree(folder / "a", folder / "c.tmp")
    shutil.copy(folder / "a" / "part.parquet", folder / "a" / ".part.parquet")
    shutil.copy(folder / "a" / "part.parquet", folder / "a" / "part.parquet.tmp")
    (folder / "a" / "note.txt").write_text("not a table")
    (tmp_path / "results" / "some_later_table").mkdir()
    assert build_warehouse(tmp_path)["hit_rate"] == 1


def test_building_again_follows_the_results(tmp_path):
    write_result(tmp_path, "hit_rate", "a", [hit_rate_row()])
    write_result(tmp_path, "hit_rate", "b", [hit_rate_row(trace_id="b")])
    assert build_warehouse(tmp_path)["hit_rate"] == 2
    shutil.rmtree(tmp_path / "results" / "hit_rate" / "b")
    assert build_warehouse(tmp_path)["hit_rate"] == 1


def test_files_with_columns_in_another_order_load_by_name(tmp_path):
    file = write_result(tmp_path, "hit_rate", "a", [hit_rate_row(hits=30, misses=70)])
    backwards = pl.read_parquet(file)
    backwards.select(reversed(backwards.columns)).write_parquet(file)
    write_result(tmp_path, "hit_rate", "b", [hit_rate_row(trace_id="b", hits=40, misses=60)])
    build_warehouse(tmp_path)
    assert query(tmp_path, "SELECT hits, misses FROM hit_rate ORDER BY trace_id").rows() == [(30, 70), (40, 60)]


def test_an_open_reader_keeps_the_old_file_and_new_readers_see_the_new_one(tmp_path):
    write_result(tmp_path, "hit_rate", "a", [hit_rate_row()])
    build_warehouse(tmp_path)
    program = (
        "import duckdb, sys\n"
        "connection = duckdb.connect(sys.argv[1], read_only=True)\n"
        "for _ in sys.stdin:\n"
        "    print(connection.execute('SELECT count(*) FROM hit_rate').fetchall()[0][0], flush=True)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "warehouse.duckdb")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def count_of_reader() -> int:
        reader.stdin.write("count\n")
        reader.stdin.flush()
        return int(reader.stdout.readline())

    assert count_of_reader() == 1
    write_result(tmp_path, "hit_rate", "b", [hit_rate_row(trace_id="b")])
    build_warehouse(tmp_path)
    assert count_of_reader() == 1
    assert query(tmp_path, "SELECT count(*) FROM hit_rate").item() == 2
    reader.communicate()
    assert reader.returncode == 0


def test_an_open_reader_in_this_process_does_not_give_old_data_to_queries(tmp_path):
    build_warehouse(tmp_path)
    with duckdb.connect(str(tmp_path / "warehouse.duckdb"), read_only=True):
        write_result(tmp_path, "hit_rate", "a", [hit_rate_row()])
        build_warehouse(tmp_path)
        assert query(tmp_path, "SELECT count(*) FROM hit_rate").item() == 1


def truncated(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:200])
    return "wanted a readable Parquet file"


def empty(file: Path) -> str:
    file.write_bytes(b"")
    return "wanted a readable Parquet file"


def with_damaged_pages(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    return "wanted a readable Parquet file"


def without_a_column(file: Path) -> str:
    pl.read_parquet(file).drop("hits", "policy").write_parquet(file)
    return f"policy is missing, hits is missing; wanted the {len(TABLES['hit_rate'].columns)} columns"


def with_another_column(file: Path) -> str:
    pl.read_parquet(file).with_columns(extra=1).write_parquet(file)
    return "'extra' is not a column of the table"


def with_another_type(file: Path) -> str:
    pl.read_parquet(file).with_columns(pl.col("hits").cast(pl.Int32)).write_parquet(file)
    return "hits is INTEGER, wanted BIGINT"


def with_a_null_policy(file: Path) -> str:
    pl.read_parquet(file).with_columns(policy=pl.lit(None, pl.String)).write_parquet(file)
    return 'NOT NULL constraint failed: hit_rate."policy"'


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        empty,
        with_damaged_pages,
        without_a_column,
        with_another_column,
        with_another_type,
        with_a_null_policy,
    ],
)
def test_a_bad_file_is_named_and_the_old_warehouse_stays(tmp_path, damage):
    write_result(tmp_path, "hit_rate", "a", [hit_rate_row()])
    build_warehouse(tmp_path)
    before = (tmp_path / "warehouse.duckdb").read_bytes()
    wanted = damage(write_result(tmp_path, "hit_rate", "b", [hit_rate_row(trace_id="b")]))
    with pytest.raises(MalformedResult) as raised:
        build_warehouse(tmp_path)
    message = str(raised.value)
    assert message.startswith("results/hit_rate/b/part.parquet: ")
    assert wanted in message
    assert "expert-tier run" in message
    assert "\n" not in message
    assert (tmp_path / "warehouse.duckdb").read_bytes() == before
    assert names_in(tmp_path) == ["results", "warehouse.duckdb"]


def test_a_key_in_two_files_is_refused_with_both_named(tmp_path):
    write_result(tmp_path, "hit_rate", "a", [hit_rate_row(), hit_rate_row(capacity_experts_total=32)])
    write_result(tmp_path, "hit_rate", "b", [hit_rate_row()])
    with pytest.raises(MalformedResult) as raised:
        build_warehouse(tmp_path)
    message = str(raised.value)
    assert message.startswith("results/hit_rate: 1 of its keys occur more than once, first trace_id='a', policy='lru'")
    assert "in results/hit_rate/a/part.parquet, results/hit_rate/b/part.parquet;" in message
    assert not (tmp_path / "warehouse.duckdb").exists()


def test_null_is_a_value_of_its_own_in_a_key(tmp_path):
    rows = [hit_rate_row(policy="static", fit=fit) for fit in (None, "same", "first:0.6")]
    write_result(tmp_path, "hit_rate", "a", rows)
    assert build_warehouse(tmp_path)["hit_rate"] == 3


def test_hostile_names_and_values_are_only_names_and_values(tmp_path):
    data_dir = tmp_path / "it's [a] {data} *folder* 100%"
    hostile = "a'); DROP TABLE hit_rate; --"
    write_result(data_dir, "hit_rate", hostile, [hit_rate_row(trace_id=hostile, phase="all")])
    write_result(data_dir, "hit_rate", "[ab]*?.x", [hit_rate_row(trace_id='x" OR 1=1')])
    write_result(data_dir, "trace", hostile, [valid_row(TABLES["trace"], trace_id=hostile, model="$1 {{7*7}} '")])
    (data_dir / "traces").mkdir()
    write_trace(make_trace([[[[0, 1]]]]), data_dir / "traces" / "o'clock; --.parquet")
    assert build_warehouse(data_dir)["hit_rate"] == 2
    assert set(query(data_dir, "SELECT trace_id FROM hit_rate")["trace_id"]) == {hostile, 'x" OR 1=1'}
    assert query(data_dir, "SELECT model FROM trace").item() == "$1 {{7*7}} '"
    assert query(data_dir, "SELECT trace_id, expert_ids FROM routing").rows() == [("o'clock; --", [0, 1])]
    write_result(data_dir, "hit_rate", "again", [hit_rate_row(trace_id=hostile, phase="all")])
    with pytest.raises(MalformedResult, match="DROP TABLE hit_rate"):
        build_warehouse(data_dir)


def test_what_a_killed_build_left_is_removed_and_a_running_build_is_left_alone(tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from warehouse import build\n"
        "build._load = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "build.build_warehouse(Path(sys.argv[1]))\n"
    )
    data_dir = tmp_path / "data"
    killed = subprocess.run([sys.executable, "-c", program, str(data_dir)], check=False, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert {name.split(".tmp")[1] for name in names_in(data_dir)} <= {"", ".wal"}
    with publish(data_dir / "warehouse.duckdb") as running:
        build_warehouse(data_dir)
        assert names_in(data_dir) == [running.name, "warehouse.duckdb"]


def test_a_folder_that_cannot_hold_a_warehouse_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WarehouseNotBuilt, match=r"warehouse\.duckdb: not built, .*the old one, if any, stands"):
        build_warehouse(tmp_path / "file")


def test_routing_unites_traces_of_different_width_and_reads_what_comes_later(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    assert "routing" not in {relation["name"] for relation in list_relations_after_build(tmp_path)}
    write_trace(make_trace([[[[0, 1]]], [[[1, 2]]]], layer_ids=[3]), traces / "two.v1.parquet")
    write_trace(make_trace([[[[0, 1, 2]]]]), traces / "three.parquet")
    (traces / ".half.parquet").write_bytes(b"half")
    (traces / "half.parquet.tmp").write_bytes(b"half")
    build_warehouse(tmp_path)
    rows = query(tmp_path, "SELECT trace_id, layer_id, expert_ids, router_weights FROM routing ORDER BY ALL").rows()
    assert rows == [
        ("three", 0, [0, 1, 2], None),
        ("two.v1", 3, [0, 1], None),
        ("two.v1", 3, [1, 2], None),
    ]
    write_trace(make_trace([[[[4, 5]]]]), traces / "later.parquet")
    assert query(tmp_path, "SELECT count(*) FROM routing").item() == 4


def list_relations_after_build(data_dir: Path) -> list[build.Relation]:
    build_warehouse(data_dir)
    return list_relations(data_dir)


def test_relations_are_listed_with_question_and_rows(tmp_path):
    (tmp_path / "traces").mkdir()
    write_trace(make_trace([[[[0, 1]]]]), tmp_path / "traces" / "a.parquet")
    write_result(tmp_path, "hit_rate", "a", [hit_rate_row(), hit_rate_row(policy="lfu_gated")])
    relations = list_relations_after_build(tmp_path)
    assert [relation["name"] for relation in relations if relation["kind"] == "table"] == sorted(TABLES)
    views = {relation["name"]: relation for relation in relations if relation["kind"] == "view"}
    assert set(views) == {
        "policy_comparison", "policy_ranking", "belady_gap", "nominal_misses", "lookahead_summary",
        "lookahead_waterfall", "lookahead_effect", "trace_unknowns",
        "replay_summary", "quarantined_runs",
        "native_vs_simulated", "reclaim_condition", "reclaim_pair", "mechanism_agreement", "reclaim_knee", "lab_matrix",
        "native_condition", "simulated", "capacity_response", "owner_comparison", "off_domain", "admission_effect",
        "kernel_model_fit", "decode_summary", "decode_pair_ratio", "routing",
    }  # fmt: skip
    assert all(view["comment"].endswith("?") for view in views.values())
    assert (views["policy_comparison"]["rows"], views["routing"]["rows"]) == (1, 1)
    shutil.rmtree(tmp_path / "traces")
    gone = {relation["name"]: relation["rows"] for relation in list_relations(tmp_path)}
    assert (gone["routing"], gone["hit_rate"]) == (None, 2)


def test_policy_comparison_puts_policies_side_by_side_within_one_contract(tmp_path):
    hits = {"lru": 40, "lfu_gated": 45, "lfu_always": 30, "belady_bypass": 60, "belady_forced": 55}
    rows = [hit_rate_row(policy=policy, hits=count, misses=100 - count) for policy, count in hits.items()]
    rows += [hit_rate_row(policy="static", fit="first:0.6", hits=20, misses=80)]
    rows += [hit_rate_row(policy="static", fit="same", hits=50, misses=50)]
    rows += [hit_rate_row(semantics="sequential", hits=10, misses=90)]
    rows += [hit_rate_row(capacity_experts_total=32, hits=70, misses=30, warm_fraction=0.0)]
    rows += [hit_rate_row(capacity_experts_total=8, accesses=0, hits=0, misses=0)]
    write_result(tmp_path, "hit_rate", "a", rows)
    build_warehouse(tmp_path)
    columns = (
        "lru_hit_rate, lfu_gated_hit_rate, lfu_always_hit_rate, static_fit, static_hit_rate, belady_forced_hit_rate, "
        "belady_bypass_hit_rate, accesses, lru_hits, static_hits"
    )
    found = query(
        tmp_path,
        f"SELECT semantics, capacity_experts_total, {columns} FROM policy_comparison "
        "ORDER BY semantics, capacity_experts_total, static_fit",
    ).rows()
    assert found == [
        ("event_atomic", 8, *[None] * 7, 0, 0, None),
        ("event_atomic", 16, 0.4, 0.45, 0.3, "first:0.6", 0.2, 0.55, 0.6, 100, 40, 20),
        ("event_atomic", 16, 0.4, 0.45, 0.3, "same", 0.5, 0.55, 0.6, 100, 40, 50),
        ("event_atomic", 32, 0.7, *[None] * 6, 100, 70, None),
        ("sequential", 16, 0.1, *[None] * 6, 100, 10, None),
    ]


def test_policy_comparison_has_a_column_for_every_policy(tmp_path):
    build_warehouse(tmp_path)
    columns = query(tmp_path, "FROM policy_comparison").columns
    assert {f"{policy}_hit_rate" for policy in POLICIES} <= set(columns)
    assert {f"{policy}_hits" for policy in POLICIES} <= set(columns)


def test_policy_ranking_puts_the_most_hits_first_with_interval_and_null_beside_them(tmp_path):
    intervals = {"hit_rate_low": 0.3, "hit_rate_high": 0.5, "over_reference_low": -0.1, "over_reference_high": 0.1}
    rows = [
        hit_rate_row(policy=policy, hits=hits, misses=100 - hits, shuffled_accesses=100, shuffled_hits=20, **intervals)
        for policy, hits in (("lru", 40), ("arc", 45), ("fifo", 40))
    ]
    rows += [hit_rate_row(policy="lru", hits=90, misses=10, capacity_experts_total=32)]
    write_result(tmp_path, "hit_rate", "a", rows)
    build_warehouse(tmp_path)
    columns = "policy, hits, hit_rate_low, over_reference_high, shuffled_hit_rate, shuffled_hits"
    assert query(tmp_path, f"SELECT capacity_experts_total, {columns} FROM policy_ranking").rows() == [
        (16, "arc", 45, 0.3, 0.1, 0.2, 20),
        (16, "fifo", 40, 0.3, 0.1, 0.2, 20),
        (16, "lru", 40, 0.3, 0.1, 0.2, 20),
        (32, "lru", 90, 6.0, 6.0, 1.0, 6),
    ]


def gap_after(data_dir: Path, *rows: dict[str, object]) -> list[tuple[object, ...]]:
    write_result(data_dir, "hit_rate", "a", rows)
    build_warehouse(data_dir)
    return query(
        data_dir,
        "SELECT best_policy, best_misses, forced_misses, bypass_misses, gap_misses, gap_ratio, admission_misses, "
        "admission_share, victim_misses, victim_share FROM belady_gap",
    ).rows()


def missing(policy: str, misses: int, **values: object) -> dict[str, object]:
    return hit_rate_row(policy=policy, hits=100 - misses, misses=misses, **values)


def test_belady_gap_is_that_of_the_best_causal_policy_and_follows_the_rows(tmp_path):
    belady = (missing("belady_forced", 40), missing("belady_bypass", 30))
    assert gap_after(tmp_path, missing("lru", 60), missing("arc", 50), *belady) == [
        ("arc", 50, 40, 30, 20, 0.4, 10, 0.5, 10, 0.5)
    ]
    assert gap_after(tmp_path, missing("lru", 50), missing("arc", 60), *belady)[0][:2] == ("lru", 50)
    # The first in the alphabet of equals, so that a rebuild says the same.
    assert gap_after(tmp_path, missing("lru", 50), missing("arc", 50), *belady)[0][0] == "arc"
    assert gap_after(tmp_path, missing("lru", 50)) == []
    assert gap_after(tmp_path, *belady) == []
    assert gap_after(tmp_path, missing("lru", 30), belady[1]) == [("lru", 30, None, 30, 0, 0.0, None, None, None, None)]


@pytest.mark.parametrize(
    ("fit", "warm_steps", "best"),
    [
        ("same", 30, "lru"),
        ("first:0.6", 30, "static"),
        ("first:0.6", 29, "lru"),
        ("first:1", 30, "lru"),
        ("other.parquet", 0, "static"),
        ("first:x", 0, "static"),
    ],
)
def test_a_table_that_saw_scored_steps_is_no_causal_policy(tmp_path, fit, warm_steps, best):
    of_window = {"step_begin": 0, "step_end": 50, "warm_steps": warm_steps}
    rows = [missing("lru", 60, **of_window), missing("belady_bypass", 30, **of_window)]
    rows += [missing("static", 40, fit=fit, **of_window)]
    assert gap_after(tmp_path, *rows)[0][0] == best
    if fit != "first:x":
        assert best_causal(rows)["policy"] == best


def test_nominal_misses_are_lru_s_over_all_layers_where_bytes_are_known(tmp_path):
    of_bytes = {"scope": "global", "scored_steps": 10, "scored_accepted_tokens": 20, "demand_bytes": 10**6}
    rows = [
        hit_rate_row(miss_bytes=4000, **of_bytes),
        hit_rate_row(miss_bytes=3000, policy="arc", **of_bytes),
        hit_rate_row(miss_bytes=5000, **{**of_bytes, "scope": "layer"}),
        hit_rate_row(miss_bytes=None, capacity_experts_total=32, **of_bytes),
        hit_rate_row(miss_bytes=2000, admission="same:top:8", **of_bytes),
    ]
    write_result(tmp_path, "hit_rate", "a", rows)
    build_warehouse(tmp_path)
    assert query(
        tmp_path,
        "SELECT capacity_experts_total, miss_bytes, miss_bytes_per_step, miss_bytes_per_accepted_token "
        "FROM nominal_misses",
    ).rows() == [(16, 4000, 400.0, 200.0)]


def test_rows_of_a_sweep_are_loaded_and_a_bad_file_of_them_says_who_makes_them(tmp_path):
    row = valid_row(TABLES["sweep"], trace_id="a")
    file = write_result(tmp_path, "sweep", "a", [row])
    file.rename(file.with_name("0123456789abcdef.parquet"))
    assert build_warehouse(tmp_path)["sweep"] == 1
    pl.read_parquet(file.with_name("0123456789abcdef.parquet")).drop("hits").write_parquet(file)
    with pytest.raises(MalformedResult, match=r"results/sweep/a/part\.parquet: hits is missing; .*: replayer sweep$"):
        build_warehouse(tmp_path)


def test_lookahead_summary_keeps_the_totals_with_their_parts(tmp_path):
    table = TABLES["lookahead_recall"]
    counts = {
        "events": 10, "covered_events": 8, "accesses": 100, "covered_accesses": 80, "predicted_experts": 160,
        "predicted_accesses": 40, "chance_predicted_accesses": 10.0, "step_begin": 0, "step_end": 50, "warm_steps": 30,
    }  # fmt: skip
    key = {"predictor": "conditional", "fit": "first:0.6", "lookahead_steps": 0, "width": 8, "phase": "decode"}
    rows = [valid_row(table, trace_id="a", **key, **counts, lookahead_layers=2, layer_id=layer) for layer in (None, 5)]
    write_result(tmp_path, "lookahead_recall", "a", rows)
    build_warehouse(tmp_path)
    assert query(tmp_path, "FROM lookahead_summary").to_dicts() == [
        {
            "trace_id": "a", "phase": "decode", "step_begin": 0, "step_end": 50, "warm_steps": 30,
            "predictor": "conditional", "fit": "first:0.6", "lookahead_layers": 2, "lookahead_steps": 0,
             "width": 8, "recall_all": 0.4, "predicted_accesses": 40, "accesses": 100,
            "recall_covered": 0.5, "covered_accesses": 80, "precision": 0.25, "predicted_experts": 160,
            "hint_coverage": 0.8, "covered_events": 8, "events": 10, "chance_recall_all": 0.1,
            "chance_predicted_accesses": 10.0,
        }
    ]  # fmt: skip


def test_trace_unknowns_has_a_row_per_trace_and_fact(tmp_path):
    table = TABLES["trace"]
    rows = [valid_row(table, trace_id="a", unknowns="model, top_k_model"), valid_row(table, trace_id="b", unknowns="")]
    for row in rows:
        write_result(tmp_path, "trace", str(row["trace_id"]), [row])
    build_warehouse(tmp_path)
    assert query(tmp_path, "SELECT trace_id, unknown_fact FROM trace_unknowns").rows() == [
        ("a", "model"),
        ("a", "top_k_model"),
    ]


def run_row(run_id: str, **values: object) -> dict[str, object]:
    measured = {
        "run_id": run_id, "trace_id": "a", "owner": "page_cache", "mechanism": "cgroup", "bytes_valid": True,
        "bytes_reasons": "", "time_valid": True, "capacity_bytes": 400, "enforced_bytes": 404,
        "resident_median_bytes": 390, "demand_bytes": 4000, "device_bytes": 1800, "nominal_miss_bytes": 1500,
        "resident_miss_bytes": 1600, "observed_accesses": 40, "native_hits": 20, "native_partial_hits": 5,
        "native_misses": 15, "stall_median_ns": 40, "stall_p99_ns": 80, "failure": None, "status": "complete",
    }  # fmt: skip
    return valid_row(TABLES["replay_run"], **{**measured, **values})


def write_run(data_dir: Path, run_id: str, *, without: str | None = None, **values: object) -> None:
    """What one native run leaves, each table in a file of its own; `without` one that was not written any more."""
    rows = {
        "replay_run": [run_row(run_id, **values)],
        "replay_step": [valid_row(TABLES["replay_step"], run_id=run_id, step_id=step) for step in (0, 1)],
        "replay_layer": [
            valid_row(
                TABLES["replay_layer"], run_id=run_id, layer_id=layer, accesses=20, observed_accesses=20,
                native_hits=10, native_partial_hits=4, native_misses=6, simulated_hits=12, simulated_misses=8,
            )
            for layer in (1, 3)
        ],
        "replay_proof": [
            valid_row(TABLES["replay_proof"], run_id=run_id, name=name, held=held)
            for name, held in (("a", True), ("b", values.get("bytes_valid", True)), ("c", None))
        ],
    }  # fmt: skip
    for name, of_table in rows.items():
        if name != without:
            file = data_dir / "results" / name / "a" / f"{run_id}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            validate_table(TABLES[name].frame(of_table), TABLES[name]).write_parquet(file)


def test_a_run_that_was_killed_before_its_row_was_written_shows_nowhere(tmp_path):
    write_run(tmp_path, "whole")
    write_run(tmp_path, "torn", without="replay_run")
    rows = build_warehouse(tmp_path)
    assert {name: rows[name] for name in ("replay_run", "replay_step", "replay_layer", "replay_proof")} == {
        "replay_run": 1, "replay_step": 2, "replay_layer": 2, "replay_proof": 3,
    }  # fmt: skip
    for name in ("replay_step", "replay_layer", "replay_proof", "native_vs_simulated", "replay_summary"):
        assert query(tmp_path, f"SELECT DISTINCT run_id FROM {name}").rows() == [("whole",)], name
    assert query(tmp_path, "FROM quarantined_runs").height == 0


def test_runs_append_and_one_run_in_two_files_is_refused(tmp_path):
    write_run(tmp_path, "one")
    write_run(tmp_path, "two")
    assert build_warehouse(tmp_path)["replay_run"] == 2
    write_result(tmp_path, "replay_run", "b", [run_row("one")])
    with pytest.raises(MalformedResult, match=r"run_id='one' in .*delete both and make them again with: replayer"):
        build_warehouse(tmp_path)


def test_replay_summary_holds_valid_runs_with_measured_and_simulated_bytes_apart(tmp_path):
    write_run(tmp_path, "good")
    write_run(tmp_path, "slow", time_valid=False, capacity_bytes=500)
    write_run(tmp_path, "bad", bytes_valid=False)
    build_warehouse(tmp_path)
    found = query(
        tmp_path,
        "SELECT run_id, capacity_bytes, enforced_bytes, resident_median_bytes, device_bytes, nominal_miss_bytes, "
        "amplification_nominal, resident_miss_bytes, amplification_resident, stall_median_ns, stall_p99_ns "
        "FROM replay_summary",
    ).rows()
    measured = (404, 390, 1800, 1500, 1.2, 1600, 1.125)
    assert found == [("good", 400, *measured, 40, 80), ("slow", 500, *measured, None, None)]


def test_quarantined_runs_say_why_and_count_the_failed_proofs(tmp_path):
    write_run(tmp_path, "good")
    write_run(tmp_path, "bad", bytes_valid=False, bytes_reasons="b: expected 0, found 1")
    write_run(tmp_path, "bare", bytes_valid=False, status="failed", failure="no disk", without="replay_proof")
    build_warehouse(tmp_path)
    assert query(
        tmp_path, "SELECT run_id, status, failure, bytes_reasons, failed_proofs, proofs FROM quarantined_runs"
    ).rows() == [
        ("bad", "complete", None, "b: expected 0, found 1", 1, 3),
        ("bare", "failed", "no disk", "", 0, 0),
    ]


def test_native_vs_simulated_puts_the_layers_of_valid_runs_side_by_side(tmp_path):
    write_run(tmp_path, "good")
    write_run(tmp_path, "bad", bytes_valid=False)
    build_warehouse(tmp_path)
    assert query(
        tmp_path,
        "SELECT run_id, layer_id, native_hits, native_partial_hits, native_misses, native_hit_rate, simulated_hits, "
        "simulated_misses, simulated_hit_rate FROM native_vs_simulated",
    ).rows() == [("good", layer, 10, 4, 6, 0.5, 12, 8, 0.6) for layer in (1, 3)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Path:
    """A warehouse with one trace, and a secret file outside the data folder and one inside; only read."""
    tmp_path = tmp_path_factory.mktemp("guarded")
    data_dir = tmp_path / "data"
    (data_dir / "traces").mkdir(parents=True)
    write_trace(make_trace([[[[0, 1]]]]), data_dir / "traces" / "a.parquet")
    (tmp_path / "secret.csv").write_text("secret\n1\n")
    (data_dir / "secret.csv").write_text("secret\n1\n")
    write_result(data_dir, "hit_rate", "a", [hit_rate_row(), hit_rate_row(policy="lfu_gated")])
    build_warehouse(data_dir)
    return data_dir


@pytest.mark.parametrize(
    "sql",
    [
        "FROM read_csv('{outside}/secret.csv')",
        "FROM '{data}/secret.csv'",
        "FROM read_text('{data}/traces/../secret.csv')",
        "FROM glob('{outside}/*')",
        "COPY hit_rate TO '{outside}/stolen.csv'",
        "COPY hit_rate TO '{data}/traces/stolen.csv'",
        "WITH stolen AS (COPY (SELECT 1) TO '{data}/traces/stolen.csv') FROM stolen",
        "SELECT * FROM (WITH stolen AS (COPY (SELECT 1) TO '{data}/traces/stolen.csv') FROM stolen)",
        "FROM query('WITH stolen AS (COPY (SELECT 1) TO ''{data}/traces/stolen.csv'') FROM stolen')",
        "EXPLAIN ANALYZE COPY hit_rate TO '{data}/traces/stolen.csv'",
        "EXPORT DATABASE '{data}/traces'",
        "ATTACH '{outside}/other.duckdb'",
        "ATTACH '{data}/traces/other.duckdb'",
        "SET enable_external_access = true",
        "RESET allowed_directories",
        "INSTALL httpfs",
        "LOAD httpfs",
        "DROP TABLE hit_rate",
        "DELETE FROM hit_rate",
        "WITH gone AS (DELETE FROM hit_rate RETURNING *) FROM gone",
        "CREATE TABLE more AS SELECT 1",
        "SELECT 1; DROP TABLE hit_rate",
        "FROM tmp_path",
    ],
)
def test_untrusted_sql_reads_nothing_else_and_writes_nothing(guarded, sql):
    def state() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in guarded.parent.rglob("*") if path.is_file()}

    before = state()
    with pytest.raises(QueryFailed) as raised:
        query(guarded, sql.format(data=guarded, outside=guarded.parent))
    assert "\n" not in str(raised.value)
    assert state() == before


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT count(*) AS n FROM hit_rate -- a comment",
        "FROM hit_rate;",
        "WITH a AS (SELECT 1 AS n) FROM a",
        "DESCRIBE hit_rate",
        "SUMMARIZE hit_rate",
        "SHOW TABLES",
        "VALUES (1), (2)",
        "FROM routing",
        "PIVOT hit_rate ON policy IN ('lru') USING sum(hits) GROUP BY scope",
    ],
)
def test_reading_of_every_kind_works(guarded, sql):
    assert query(guarded, sql).height > 0


def test_a_query_keeps_its_order_and_gives_integers_back(guarded):
    ordered = query(guarded, "SELECT i FROM range(300000) t(i) ORDER BY hash(i)")["i"]
    assert ordered.to_list() != sorted(ordered)
    assert_frame_equal(ordered.to_frame(), query(guarded, "SELECT i FROM range(300000) t(i) ORDER BY hash(i)"))
    sums = query(guarded, "SELECT sum(accesses) AS accesses, sum(170141183460469231731687303715884105::HUGEINT) AS h "
                          "FROM hit_rate")  # fmt: skip
    assert sums.item(0, "accesses") == 200
    assert sums.schema["accesses"] == pl.Int64
    assert int(sums.item(0, "h")) == 2 * 170141183460469231731687303715884105


def test_an_error_in_the_sql_is_told_in_one_line(guarded):
    with pytest.raises(QueryFailed) as raised:
        query(guarded, "SELECT hitrate FROM hit_rate")
    assert str(raised.value) == 'Binder Error: Referenced column "hitrate" not found in FROM clause!'


def test_without_a_warehouse_the_error_says_what_to_run(tmp_path):
    for read in (lambda: query(tmp_path, "SELECT 1"), lambda: list_relations(tmp_path), lambda: read_tables(tmp_path)):
        with pytest.raises(WarehouseMissing, match="expert-tier run"):
            read()


def test_a_file_that_is_no_warehouse_says_what_to_run(tmp_path):
    (tmp_path / "warehouse.duckdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(QueryFailed, match=r"cannot be opened .*expert-tier run"):
        query(tmp_path, "SELECT 1")


def test_a_warehouse_of_other_columns_says_what_to_run(tmp_path):
    for statement in ("CREATE TABLE trace (trace_id VARCHAR)", "DROP TABLE trace"):
        with duckdb.connect(str(tmp_path / "warehouse.duckdb")) as connection:
            connection.execute(statement)
        with pytest.raises(QueryFailed, match=r"table trace is missing or has other columns .*expert-tier run"):
            read_tables(tmp_path)
