"""The views that answer questions: their arithmetic against plain Python, and that none of them mixes two contracts."""

import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median_low
from typing import Any

import duckdb
import pytest

import warehouse.build
from schemas.columns import COLUMNS
from schemas.tables import CONTRACT, TABLES
from tests.table_rows import ROWS
from tests.test_warehouse import hit_rate_row, run_row, valid_row
from warehouse.build import view_texts

Row = dict[str, Any]

ALONE = {
    "together_id": None, "tenant_number": None, "tenants": None, "shares_wall": None, "outer_group_bytes": None,
    "policy": None, "scope": None, "fit": None, "admission": None, "seed": None, "arena_fraction": None,
    "miss_path": None, "mechanism_detail": "cgroup v2", "step_begin": 0, "step_end": 10, "replayed_steps": 10,
    "accesses": 40, "selections": 40, "wall_bytes": 9000, "machine_id": "machine", "pool_id": "pool",
    "condition_hash": "c", "fadvise": "random", "destination": "cpu", "threads": 8, "verify": "edges",
    "group_stat": "pass", "access_order": "router", "headroom_bytes": 0, "observe": "every",
}  # fmt: skip
PLAN = {"delivery": "advice", "plan_hash": "p", "piece_bytes": 4096, "hint_slots": None}
OTHERWISE: dict[str, Any] = {
    "experiment_id": "another", "trace_id": "b", "pool_id": "another", "machine_id": "elsewhere",
    "owner": "page_cache_mmap", "policy": "sieve", "scope": "layer", "fit": "same", "admission": "same:top:3",
    "seed": 7, "arena_fraction": 0.5, "miss_path": "direct", "mechanism": "balloon", "limited_by": "cgroup v1",
    "fadvise": "normal", "destination": "none", "threads": 4, "observe": "sample", "residency_counter": "mincore",
    "files_stay_open": False, "verify": "all", "group_stat": "step", "step_begin": 1, "step_end": 11,
    "access_order": "ascending", "warm_pass": False, "headroom_bytes": 1, "outer_group_bytes": 10**6,
    "delivery": "blocking", "plan_hash": "q", "piece_bytes": 8192, "hint_slots": 3,
}  # fmt: skip
"""Another value of each contract column of a native run."""

OWNERS_OWN = {"owner", "policy", "scope", "fit", "admission", "seed", "arena_fraction", "miss_path"}
PLANS_OWN = set(PLAN)
MECHANISMS_OWN = {"mechanism", "limited_by", "group_stat", "outer_group_bytes"}

SIMULATED_OTHERWISE: dict[str, Any] = {
    "trace_id": "b", "policy": "arc", "scope": "global", "semantics": "sequential", "access_order": "ascending",
    "dedup": "none", "capacity_experts_total": 17, "capacity_bytes": 17, "step_begin": 1, "step_end": 11,
    "phase": "prefill", "warm_fraction": 0.5, "warm_steps": 5, "warm_pass": True, "fit": "same", "seed": 3,
    "pinned_fraction": 0.25, "admission": "same:top:9", "quota_fit": "same", "folios_per_expert": 2,
}  # fmt: skip


_NUMBERS = count()


def runs(device: Sequence[int], **values: Any) -> list[Row]:
    """Runs of one condition; what belongs to other tables of a run stays in the row until `build` takes it out."""
    if "limited_by" in values:
        values["mechanism_detail"] = values.pop("limited_by")
    found = []
    for repetition, device_bytes in enumerate(device):
        beside = {name: values[name] for name in (*PLAN, "experiment_id", "lab_condition") if name in values}
        own = {name: value for name, value in values.items() if name not in beside}
        row = run_row(f"run {next(_NUMBERS)}", **{**ALONE, "device_bytes": device_bytes, **own})
        found.append({**row, "beside": beside, "repetition": repetition})
    return found


class Views:
    """Tables and views in memory, since a build of a file takes long; what is put in replaces what was there."""

    def __init__(self) -> None:
        self.held: dict[str, list[Row]] = {}
        self.connection = duckdb.connect(":memory:", config={"threads": 1})
        self.connection.execute(Path(warehouse.build.__file__).with_name("tables.sql").read_text(encoding="utf-8"))
        for text in view_texts().values():
            self.connection.execute(text)

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Puts rows in place of all the table's rows."""
        if self.held.get(table, []) == rows:
            return
        self.connection.execute(f"DELETE FROM {table}")
        self.held[table] = list(rows)
        if not rows:
            return
        frame = TABLES[table].frame(rows)
        self.connection.register("frame", frame.to_arrow())
        self.connection.execute(f"INSERT INTO {table} BY NAME FROM frame")
        self.connection.unregister("frame")

    def build(self, *conditions: list[Row], simulated: Sequence[Row] = (), swept: Sequence[Row] = ()) -> None:
        rows = [row for condition in conditions for row in condition]
        more: dict[str, list[Row]] = {"replay_delivery": [], "experiment_run": [], "lab_run": [], "replay_reclaim": []}
        for row in rows:
            beside, key = row["beside"], {"run_id": row["run_id"], "trace_id": row["trace_id"]}
            of_repetition = {"repetition": row["repetition"], "attempt": 0, "position": 0}
            more["replay_reclaim"].append({**ROWS["replay_reclaim"], "run_id": row["run_id"]})
            if beside.get("delivery"):
                plan = {name: beside.get(name, PLAN[name]) for name in PLAN}
                more["replay_delivery"].append({**ROWS["replay_delivery"], "run_id": row["run_id"], **plan})
            if beside.get("experiment_id"):
                cell = {"experiment_id": beside["experiment_id"], "condition": f"of {row['device_bytes'] // 100}"}
                more["experiment_run"].append({**ROWS["experiment_run"], **key, **cell, **of_repetition})
            if "lab_condition" in beside:
                more["lab_run"].append(
                    {**ROWS["lab_run"], **key, **of_repetition, "condition": beside["lab_condition"]}
                )
        names = TABLES["replay_run"].column_names
        machines = {"machine": {}, "elsewhere": {"cpu_model": "another"}, "classic": {"mglru": "off 0x0000"}}
        for table, of_table in {
            **more,
            "replay_run": [{name: row[name] for name in names} for row in rows],
            "machine": [
                {**ROWS["machine"], "mglru": "on 0x0007", **own, "machine_id": name} for name, own in machines.items()
            ],
            "hit_rate": simulated,
            "sweep": [{"cell_hash": f"{number}", **row} for number, row in enumerate(swept)],
        }.items():
            self.write(table, of_table)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql).fetchall()

    def rows(self, view: str) -> list[Row]:
        return [dict(zip(self.columns(view), row, strict=True)) for row in self.query(f"FROM {view}")]

    def columns(self, view: str) -> list[str]:
        return [name for name, *_ in self.query(f"DESCRIBE {view}")]


@pytest.fixture(scope="module")
def views() -> Iterator[Views]:
    one = Views()
    yield one
    one.connection.close()


def rate(policy: str, hits: int, **values: Any) -> Row:
    contract = {
        "semantics": "event_atomic", "access_order": "router", "dedup": "union", "phase": "decode", "step_begin": 0,
        "step_end": 10, "warm_fraction": 0.6, "warm_steps": 6, "warm_pass": False, "capacity_bytes": 16,
    }  # fmt: skip
    return hit_rate_row(policy=policy, hits=hits, misses=100 - hits, **{**contract, **values})


# Contracts are not mixed.


def test_every_contract_column_is_varied(views: Views) -> None:
    """A column that joins the contract has to be given another value above, and so is tried below."""
    columns = views.columns("native_condition")
    assert set(columns[: columns.index("condition_hash")]) == set(OTHERWISE)
    assert set(SIMULATED_OTHERWISE) == set(CONTRACT)


def varied(values: dict[str, Any], *, but: set[str] = frozenset()) -> list[Any]:  # type: ignore[assignment]
    return [pytest.param({name: value}, id=name) for name, value in values.items() if name not in but]


PLANNED = [pytest.param({**PLAN, name: OTHERWISE[name]}, id=name) for name in PLAN]
ALIKE = (1000, 1004, 1002, 1001, 1003)


@pytest.mark.parametrize("other", [*varied(OTHERWISE, but=PLANS_OWN), *PLANNED])
def test_runs_of_two_contracts_are_two_conditions_and_two_curves(views: Views, other: Row) -> None:
    """Even under one name: condition_hash is the same."""
    mine = PLAN if "delivery" in other else {}
    here, there = runs(ALIKE, **mine), runs((500,) * 5, **other)
    views.build(here, there)
    assert views.query("SELECT repetitions FROM native_condition") == [(5,), (5,)]
    if "experiment_id" not in other:
        assert views.query("SELECT valid_runs FROM reclaim_condition") == [(5,), (5,)]
    views.build(here, runs((500,) * 5, **{**other, "capacity_bytes": 200, "condition_hash": "d"}))
    curve = "SELECT capacity_bytes = anchor_capacity_bytes, capacities, falls_monotonically FROM capacity_response"
    assert views.query(curve) == [(True, 1, None)] * 2


def test_capacities_of_one_contract_are_one_curve(views: Views) -> None:
    views.build(runs(ALIKE), runs((500,) * 5, capacity_bytes=200, condition_hash="d"))
    curve = "SELECT capacities, anchor_capacity_bytes, falls_monotonically FROM capacity_response"
    assert views.query(curve) == [(2, 400, False)] * 2


@pytest.mark.parametrize("other", [{}, *varied(OTHERWISE, but=OWNERS_OWN | PLANS_OWN), {"wall_bytes": 9001}, PLAN])
def test_owners_are_paired_within_one_contract(views: Views, other: Row) -> None:
    views.build(runs(ALIKE), runs((900,) * 5, **{"owner": "user_cache", "policy": "sieve", **other}))
    found = views.query("SELECT page_cache_device_bytes FROM owner_comparison WHERE owner = 'user_cache'"
    )  # fmt: skip
    assert found == ([] if "delivery" in other else [(None,)] if other else [(1002,)])


@pytest.mark.parametrize(
    "other", [{}, *varied(OTHERWISE, but=OWNERS_OWN | PLANS_OWN), {"capacity_bytes": 401, "wall_bytes": 9001}, PLAN]
)
def test_admission_is_measured_within_one_contract(views: Views, other: Row) -> None:
    admitting = {"owner": "page_cache_admission", "admission": "same:top:4", "scope": "layer"}
    views.build(runs(ALIKE), runs((900,) * 5, **{**admitting, **other}))
    found = views.query(
        "SELECT measured_device_bytes, measured_device_bytes_without, simulated_misses FROM admission_effect",
    )
    assert found == [(900, None if other else 1002, None)]


@pytest.mark.parametrize("other", [{}, *varied(OTHERWISE, but=PLANS_OWN), {"capacity_bytes": 401, "wall_bytes": 9001}])
def test_plans_are_compared_within_one_contract(views: Views, other: Row) -> None:
    views.build(runs(ALIKE), runs((900,) * 5, **{**PLAN, **other}))
    assert views.query("SELECT none_runs, none_device_bytes FROM lookahead_effect") == [
        (0, None) if other else (5, 1002)
    ]


@pytest.mark.parametrize("other", [{}, *varied(OTHERWISE, but=MECHANISMS_OWN | PLANS_OWN | {"experiment_id"}), PLAN])
def test_mechanisms_are_paired_within_one_contract(views: Views, other: Row) -> None:
    balloon = {"mechanism": "balloon", "limited_by": "balloon", **other}
    views.build(runs(ALIKE), runs((900,) * 5, **balloon))
    found = views.query("SELECT matched_by, device_over_other FROM mechanism_agreement ORDER BY ALL")
    assert found == ([] if other else [("equal", 900 / 1002), ("equal", 1002 / 900)])


@pytest.mark.parametrize("other", [{}, *varied(OTHERWISE, but=PLANS_OWN | {"experiment_id"}), PLAN])
def test_the_knee_is_looked_for_within_one_contract(views: Views, other: Row) -> None:
    views.build(runs(ALIKE), runs((900,) * 5, **{"machine_id": "classic", **other}))
    found = views.query("SELECT device_over_classic FROM reclaim_knee WHERE is_mglru")
    assert (1002 / 900,) in found if not other else all(ratio is None for (ratio,) in found)


MACHINES_OWN = {"machine_id", "memory_bytes", "mglru", "min_free_bytes", "numa_nodes", "block_device"}


@pytest.mark.parametrize("name", sorted(set(TABLES["machine"].column_names) - MACHINES_OWN))
def test_two_machines_are_not_compared_but_one_that_was_booted_smaller_is(views: Views, name: str) -> None:
    column = next(column for column in TABLES["machine"].columns if column.name == name)
    known = ROWS["machine"][name]
    another = not known if isinstance(known, bool) else known + 1 if isinstance(known, int) else "another"
    assert column.values is None
    views.build(runs(ALIKE), runs((900,) * 5, mechanism="boot", machine_id="small"))
    for own, pairs in (({"memory_bytes": 2**30, "numa_nodes": 2, "min_free_bytes": 1}, 2), ({name: another}, 0)):
        rows = [{**ROWS["machine"], "machine_id": "machine"}, {**ROWS["machine"], "machine_id": "small", **own}]
        views.write("machine", rows)
        assert len(views.query("FROM mechanism_agreement")) == pairs


@pytest.mark.parametrize(
    "other", varied(OTHERWISE, but={*PLANS_OWN, "experiment_id", "limited_by", "residency_counter", "files_stay_open",
                                    "outer_group_bytes", "machine_id"}),
)  # fmt: skip
def test_a_lab_s_condition_holds_one_contract(views: Views, other: Row) -> None:
    views.build(runs(ALIKE, lab_condition="x"), runs((500,) * 5, **{"lab_condition": "x", **other}))
    assert views.query("SELECT valid_runs FROM lab_matrix") == [(5,), (5,)]


def paired_simulations(views: Views, view: str, partner: str, rows: Sequence[Row]) -> int:
    views.build(simulated=rows)
    return len(views.query(f"FROM {view} WHERE {partner}"))


def others(*, but: set[str]) -> list[Any]:
    return [pytest.param({}, id="alike"), *varied(SIMULATED_OTHERWISE, but={"policy", *but})]


@pytest.mark.parametrize("other", others(but={"fit", "seed", "pinned_fraction", "folios_per_expert"}))
def test_policies_stand_side_by_side_within_one_contract(views: Views, other: Row) -> None:
    rows = [rate("lru", 50), rate("belady_bypass", 70, **other)]
    both = "lru_hits IS NOT NULL AND belady_bypass_hits IS NOT NULL"
    assert paired_simulations(views, "policy_comparison", both, rows) == (not other)
    assert len(views.query("FROM belady_gap")) == (not other)


def test_orders_drawn_by_two_seeds_are_two_contracts(views: Views) -> None:
    drawn = {"access_order": "random"}
    rows = [rate("lru", 50, seed=1, **drawn), rate("belady_bypass", 70, seed=2, **drawn)]
    both = "lru_hits IS NOT NULL AND belady_bypass_hits IS NOT NULL"
    assert paired_simulations(views, "policy_comparison", both, rows) == 0
    assert len(views.query("FROM belady_gap")) == 0
    away = rate("static", 40, fit="data/traces/z.parquet", seed=3, **drawn)
    assert paired_simulations(views, "off_domain", "lru_hits IS NOT NULL", [*rows, away]) == 0


@pytest.mark.parametrize("other", others(but={"fit", "seed"}))
def test_a_table_of_another_trace_is_held_against_its_own_within_one_contract(views: Views, other: Row) -> None:
    away = rate("pinned_lru", 40, fit="traces/z.parquet", pinned_fraction=0.5)
    own = rate("pinned_lru", 60, fit="first:0.6", **{"pinned_fraction": 0.5, **other})
    lru = rate("lru", 50, **other)
    found = paired_simulations(views, "off_domain", "own_hits IS NOT NULL", [away, own])
    assert found == (not other)
    apart = {"pinned_fraction", "folios_per_expert"}
    found = paired_simulations(views, "off_domain", "lru_hits IS NOT NULL", [away, lru])
    assert found == (not other or bool(apart & set(other)))


@pytest.mark.parametrize("other", others(but={"admission"}))
def test_admission_is_simulated_within_one_contract(views: Views, other: Row) -> None:
    rows = [rate("lru", 50), rate("lru", 60, admission="first:0.6:top:4", **other)]
    found = paired_simulations(views, "admission_effect", "simulated_misses_without IS NOT NULL", rows)
    assert found == (not other)


MODEL = {
    "scope": "global", "warm_pass": True, "warm_fraction": 0.0, "warm_steps": 0, "capacity_bytes": 390,
    "accesses": 40, "selections": 40, "phase": "all",
}  # fmt: skip


def model(policy: str, misses: int, **values: Any) -> Row:
    row = rate(policy, 0, **{**MODEL, **values})
    return {**row, "hits": 40 - misses, "misses": misses, "compulsory_misses": 0, "capacity_misses": misses,
            "hit_rate": (40 - misses) / 40}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {}, {"scope": "layer"}, {"dedup": "none"}, {"step_begin": 1}, {"step_end": 11}, {"warm_steps": 5},
        {"warm_pass": False}, {"access_order": "ascending"}, {"trace_id": "b"}, {"admission": "same:top:9"},
        {"quota_fit": "same"}, {"capacity_bytes": 398}, {"capacity_bytes": None},
    ],
)  # fmt: skip
def test_a_model_stands_beside_runs_that_it_simulated_alike(views: Views, other: Row) -> None:
    views.build(runs(ALIKE), simulated=[model("two_list", 20, **other)])
    matched = [(None, None, None)] if other else [("two_list", 20, True)]
    assert views.query("SELECT policy, simulated_misses, fits_best FROM kernel_model_fit") == matched


@pytest.mark.parametrize("other", [{}, {"semantics": "sequential"}, {"phase": "decode"}, {"warm_fraction": 0.01}])
def test_the_best_model_is_the_best_of_one_way_of_simulating(views: Views, other: Row) -> None:
    views.build(runs(ALIKE), simulated=[model("two_list", 20), model("lru", 25, **other)])
    assert views.query("SELECT policy, fits_best FROM kernel_model_fit ORDER BY policy") == [
        ("lru", bool(other)), ("two_list", True)
    ]  # fmt: skip


# What the views say.


def test_capacity_response_is_the_study_s_table_2(views: Views) -> None:
    """2608.12103, Table 2, in units of 0.1 GB; a/C and amp are printed from bytes that are not rounded."""
    table = {
        448: (53, 53, 0.0, 0.99),
        256: (98, 81, 5.0, 1.22),
        128: (174, 116, -6.7, 1.50),
        64: (336, 151, -9.7, 2.22),
    }
    views.build(
        *(
            runs((device * 10,) * 5, capacity_bytes=size, condition_hash=f"{size}", nominal_miss_bytes=misses * 10)
            for size, (device, misses, _, _) in table.items()
        ),
    )
    found = views.query(
        "SELECT capacity_bytes, device_bytes_per_step, inverse_capacity_deviation, amplification_nominal, "
        "falls_monotonically, anchor_capacity_bytes, repetitions FROM capacity_response ORDER BY 1",
    )
    assert len(found) == len(table)
    for size, per_step, deviation, amplification, falls, anchor, repetitions in found:
        device, _, wanted_deviation, wanted_amplification = table[size]
        assert (per_step, falls, anchor, repetitions) == (device, True, 448, 5)
        assert deviation * 100 == pytest.approx(wanted_deviation, abs=1)
        assert amplification == pytest.approx(wanted_amplification, abs=0.011)


@pytest.mark.parametrize("seed", range(3))
def test_capacity_response_is_what_plain_python_makes_of_the_runs(views: Views, seed: int) -> None:
    drawn = random.Random(seed)
    conditions = {}
    for size in (100, 200, 300):
        members = []
        for number in range(drawn.randint(1, 6)):
            of_run = {
                "step_median_ns": drawn.randint(10, 99), "stall_p99_ns": drawn.randint(100, 199),
                "time_valid": drawn.random() < 0.7, "nominal_miss_bytes": drawn.choice([50, 60]),
                "resident_miss_bytes": 55, "bytes_valid": number == 0 or drawn.random() < 0.8,
            }  # fmt: skip
            if not of_run["bytes_valid"]:
                of_run["time_valid"] = False
            members += runs((drawn.randint(50, 500),), capacity_bytes=size, condition_hash=f"{size}", **of_run)
        conditions[size] = members
    views.build(*conditions.values())
    found = {
        row["capacity_bytes"]: row for row in views.rows("capacity_response")
    }  # fmt: skip
    valid = {size: [row for row in rows if row["bytes_valid"]] for size, rows in conditions.items()}
    device = {size: median_low(row["device_bytes"] for row in rows) for size, rows in valid.items()}
    for size, rows in valid.items():
        timed = [row["step_median_ns"] for row in rows if row["time_valid"]]
        stalls = [row["stall_p99_ns"] for row in rows if row["time_valid"]]
        all_bytes = [row["device_bytes"] for row in rows]
        nominal = median_low(row["nominal_miss_bytes"] for row in rows)
        assert {name: found[size][name] for name in (
            "repetitions", "is_repeated_enough", "timed_runs", "iteration_ns", "stall_p99_ns", "device_bytes",
            "device_spread", "iteration_spread", "device_bytes_per_step", "amplification_nominal",
            "inverse_capacity_deviation", "falls_monotonically",
        )} == {
            "repetitions": len(rows),
            "is_repeated_enough": len(rows) >= 5,
            "timed_runs": len(timed),
            "iteration_ns": median_low(timed) if timed else None,
            "stall_p99_ns": median_low(stalls) if stalls else None,
            "device_bytes": device[size],
            "device_spread": (max(all_bytes) - min(all_bytes)) / device[size],
            "iteration_spread": (max(timed) - min(timed)) / median_low(timed) if timed else None,
            "device_bytes_per_step": device[size] / 10,
            "amplification_nominal": device[size] / nominal,
            "inverse_capacity_deviation": pytest.approx(device[size] / (device[300] * 300 / size) - 1),
            "falls_monotonically": device[100] >= device[200] >= device[300],
        }  # fmt: skip


def test_no_limit_is_no_capacity_and_bytes_that_were_not_counted_are_no_curve(views: Views) -> None:
    free = {"mechanism": "none", "mechanism_detail": None, "capacity_bytes": None, "condition_hash": "f"}
    blind = runs((0,), capacity_bytes=200, condition_hash="b")
    blind[0] |= {"device_bytes": None, "amplification_nominal": None, "amplification_resident": None}
    views.build(runs((700,), **free), runs((900,), capacity_bytes=400), blind)
    columns = "mechanism, capacity_bytes, device_bytes, inverse_capacity_deviation, falls_monotonically, repetitions"
    assert views.query(f"SELECT {columns} FROM capacity_response ORDER BY ALL") == [
        ("cgroup", 200, None, None, None, 1), ("cgroup", 400, 900, 0.0, None, 1), ("none", None, 700, None, None, 1),
    ]  # fmt: skip


def test_what_is_not_valid_not_complete_or_not_alone_answers_nothing(views: Views) -> None:
    views.build(
        runs((900,)),
        runs((1,), bytes_valid=False, time_valid=False),
        runs((2,), status="interrupted"),
        runs((3,), together_id="pair"),
    )
    found = views.query("SELECT repetitions, is_repeated_enough, device_bytes FROM capacity_response")
    assert found == [(1, False, 900)]


def test_an_experiment_counts_the_first_valid_attempt_at_a_repetition(views: Views) -> None:
    rows = runs((900, 910, 920), experiment_id="e")
    rows[2]["repetition"] = 1
    views.build(rows)
    cell = {**ROWS["experiment_run"], "trace_id": "a", "experiment_id": "e", "condition": "x"}
    tried = zip(rows, (0, 1, 2), strict=True)
    views.write(
        "experiment_run",
        [
            {**cell, "run_id": row["run_id"], "repetition": row["repetition"], "attempt": attempt}
            for row, attempt in tried
        ],
    )
    assert views.query("SELECT repetitions, device_high_bytes FROM native_condition") == [(2, 910)]


def test_owners_in_equal_walls_are_the_study_s_section_6(views: Views) -> None:
    """2608.12103, §6: at 256 GB the arena reads 7.4 of 29.2 GB and takes 1.04 s, the page cache 7.2 and 1.13."""
    demand = {"demand_bytes": 292}
    views.build(
        runs((72,) * 5, wall_ns=113, **demand),
        runs((74,) * 5, wall_ns=104, owner="arena", fit="same", scope="layer", capacity_bytes=390, **demand),
    )
    found = views.query(
        "SELECT served_without_device, page_cache_served_without_device, device_bytes, demand_bytes, "
        "page_cache_wall_ns / wall_ns, effect_bytes, effect_time, is_repeated_enough FROM owner_comparison "
        "WHERE owner = 'arena'",
    )[0]
    assert found[:2] == (pytest.approx(0.746, abs=0.001), pytest.approx(0.753, abs=0.001))
    assert found[2:4] == (74, 292)
    assert found[4] == pytest.approx(1.09, abs=0.005)
    assert found[5:] == ("more", "less", True)


@pytest.mark.parametrize(
    ("device", "effect"),
    [((900,) * 5, "less"), ((1006,) * 5, "none"), ((1007,) * 5, "more"), ((800, 900, 900, 900, 1000), "none"),
     ((900,) * 4, None), ((900,), None)],
)  # fmt: skip
def test_the_verdict_on_an_owner_and_on_admission_follows_the_rows(
    views: Views, device: tuple[int, ...], effect: str | None
) -> None:
    own = {"wall_ns": 7, "admission": "same:top:3"}
    views.build(
        runs(ALIKE, wall_ns=7),
        runs(device, owner="page_cache_admission", scope="layer", **own),
        runs(device, owner="restream", condition_hash="r", wall_ns=7),
    )
    for owner in ("restream", "page_cache_admission"):
        found = views.query(
            "SELECT repetitions, page_cache_repetitions, is_repeated_enough, effect_bytes, effect_time FROM "
            f"owner_comparison WHERE owner = '{owner}'",
        )
        enough = len(device) >= 5
        assert found == [(len(device), 5, enough, effect, "none" if enough else None)]
    measured = "measured_repetitions, measured_effect_bytes, measured_effect_time"
    assert views.query(f"SELECT {measured} FROM admission_effect") == [
        (len(device), effect, "none" if enough else None)
    ]


def test_times_that_are_not_valid_have_no_effect(views: Views) -> None:
    views.build(runs(ALIKE, time_valid=False), runs((900,) * 5, owner="restream", policy=None))
    columns = "effect_bytes, effect_time, page_cache_timed_runs, wall_over_page_cache"
    assert views.query(f"SELECT {columns} FROM owner_comparison WHERE owner = 'restream'") == [("less", None, 0, None)]


@pytest.mark.parametrize(("away", "beats"), [(40, False), (55, True), (50, False)])
def test_another_trace_s_table_is_told_by_its_file_and_held_against_all_own_ones(
    views: Views, away: int, beats: bool
) -> None:
    fits = ("same", "first:0.6", "first:0.7", "d/a.parquet:first:0.5", "d/a.parquet")
    rows = [
        rate("static", away, fit="some folder/z.parquet:first:0.6"),
        *(rate("static", 60 + number, fit=fit) for number, fit in enumerate(fits)),
        rate("lru", 50),
    ]
    # A sweep that repeats a cell of the graph adds no second row.
    views.build(simulated=rows, swept=rows)
    found = views.query(
        "SELECT fit_trace_id, hit_rate, own_fit, own_hit_rate, own_knows_the_future, lru_hit_rate, lost_off_domain, "
        "over_lru, beats_lru FROM off_domain ORDER BY own_hits",
    )
    told = (True, False, True, False, True)
    assert found == [
        ("z", away / 100, fit, (60 + number) / 100, knows, 0.5, (60 + number - away) / 100, (away - 50) / 100, beats)
        for number, (fit, knows) in enumerate(zip(fits, told, strict=True))
    ]


def test_a_table_of_what_may_enter_is_a_table_too(views: Views) -> None:
    rows = [
        rate("lru", 40, admission="d/z.parquet:top:4"),
        rate("lru", 60, admission="first:0.6:top:4"),
        rate("lru", 61, admission="first:0.6:top:5"),
        rate("lru", 50),
        rate("lru", 70, admission="named.csv"),
    ]
    views.build(swept=rows)
    columns = "admission_trace_id, fit_trace_id, hits, own_admission, own_hits, lru_hits"
    assert views.query(f"SELECT {columns} FROM off_domain") == [("z", None, 40, "first:0.6:top:4", 60, 50)]
    found = views.query(
        "SELECT evidence, admission, simulated_saved_misses, simulated_misses_over_without, measured_device_bytes FROM "
        "admission_effect ORDER BY 3",
    )
    assert found == [
        ("simulated", name, saved, (50 - saved) / 50, None)
        for name, saved in (
            ("d/z.parquet:top:4", -10), ("first:0.6:top:4", 10), ("first:0.6:top:5", 11), ("named.csv", 20),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(("misses", "best"), [(21, "two_list"), (30, "lru")])
def test_the_model_nearest_to_the_kernel_follows_the_rows(views: Views, misses: int, best: str) -> None:
    """Two runs hit 20 of 40 each; what is partly resident was read too."""
    rows = [
        model("two_list", misses, folios_per_expert=64),
        model("lru", 24),
        model("mglru", 8, capacity_bytes=396, folios_per_expert=64),
        model("lru", 0, capacity_bytes=396),
    ]
    views.build(runs((1000, 1010)), simulated=rows)
    found = views.query(
        "SELECT policy, simulated_capacity_bytes, matched_by, native_hits, simulated_misses, miss_error, fits_best, "
        "repetitions, is_repeated_enough FROM kernel_model_fit ORDER BY policy",
    )
    same = "capacity within 2 % of the measured residency"
    assert found == [
        ("lru", 390, same, 40, 24, 24 / 20 - 1, best == "lru", 2, False),
        ("two_list", 390, same, 40, misses, misses / 20 - 1, best == "two_list", 2, False),
    ]


def test_runs_whose_accesses_were_sampled_are_held_against_no_model(views: Views) -> None:
    half = {"observe": "sample", "observed_accesses": 20, "native_hits": 10, "native_partial_hits": 5}
    views.build(runs(ALIKE, **half, native_misses=5), simulated=[model("lru", 20)])
    assert len(views.query("FROM kernel_model_fit")) == 0


def test_no_proof_no_answer(views: Views) -> None:
    views.build(runs((900,), bytes_valid=False, bytes_reasons="swapped", time_valid=False))
    views.write("replay_proof", [valid_row(TABLES["replay_proof"], run_id="none", held=False)])
    assert views.query("SELECT bytes_reasons FROM quarantined_runs") == [("swapped",)]
    for view in ("capacity_response", "owner_comparison", "admission_effect", "kernel_model_fit", "native_condition"):
        assert len(views.query(f"FROM {view}")) == 0


@pytest.mark.parametrize(
    "view", ["capacity_response", "owner_comparison", "off_domain", "admission_effect", "kernel_model_fit"]
)
def test_columns_that_no_table_has_say_what_they_mean(views: Views, view: str) -> None:
    found = views.query(f"SELECT column_name, comment FROM duckdb_columns() WHERE table_name = '{view}'")
    assert {name for name, comment in found if comment is None} <= set(COLUMNS)
