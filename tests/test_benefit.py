"""What plans would have saved: rows keep their contract and add up, and the bounds hold on real traces."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.benefit import TYPICAL, UNBOUNDED, lookahead_benefit
from replayer.trace import Trace
from schemas.tables import TABLES
from schemas.validation import validate_table
from tests.builders import make_trace
from tests.replays import routing

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def trace_of(expert_bytes: int | None) -> Trace:
    """240 events of 4 accesses, on 256 experts of four layers."""
    return make_trace(routing(60, layers=4, experts=64), num_experts=64, expert_bytes=expert_bytes)


def test_rows_keep_their_contract_and_add_up() -> None:
    rows = validate_table(lookahead_benefit(trace_of(1 << 20)), TABLES["lookahead_benefit"])
    assert set(rows["predictor"]) == {"previous_token", "frequency", "conditional", "oracle"}
    assert set(rows["bandwidth_bytes_per_s"]) == {None, 6_000_000_000}
    # 24 steps after the first three fifths, of four events with four accesses each.
    assert set(rows["accesses"]) == {24 * 4 * 4}
    added = rows.select(
        misses=pl.col("misses") - pl.col("simulated_removed_misses") + pl.col("simulated_displaced"),
        named=pl.col("predicted_misses") <= pl.col("predicted_accesses"),
        removable=pl.col("simulated_removed_late") <= pl.col("simulated_removed_misses"),
        demand=pl.col("miss_bytes") - pl.col("simulated_removed_bytes") + pl.col("simulated_displaced_bytes"),
    )
    assert added["misses"].equals(rows["simulated_misses_with"], check_names=False)
    assert added["named"].all()
    assert added["removable"].all()
    prefetched = rows["simulated_device_bytes"] - added["demand"]
    assert prefetched.equals(rows["simulated_submitted"] * (1 << 20), check_names=False)
    typical = rows.filter(pl.col("bandwidth_bytes_per_s").is_not_null())
    saved = typical["simulated_time_without_ns"] - typical["simulated_time_with_ns"]
    assert (saved.filter(typical["predictor"] == "oracle") > 0).all()


def test_sizes_that_are_unknown_leave_bytes_null_and_the_link_out() -> None:
    rows = lookahead_benefit(trace_of(None))
    assert set(rows["bandwidth_bytes_per_s"]) == {None}
    assert rows["simulated_device_bytes"].null_count() == rows.height
    assert rows["simulated_device_bytes_per_miss_byte"].null_count() == rows.height
    assert lookahead_benefit(trace_of(None), links=[TYPICAL]).height == 0


def test_one_layer_is_predicted_from_the_step_before() -> None:
    rows = lookahead_benefit(make_trace(routing(40, layers=1, experts=32), num_experts=32, expert_bytes=4096))
    oracle = rows.filter(pl.col("predictor") == "oracle")
    assert set(zip(oracle["lookahead_layers"], oracle["lookahead_steps"], strict=True)) == {(0, 1)}


def oracle_without_bound(trace: Trace) -> pl.DataFrame:
    rows = lookahead_benefit(trace, links=[UNBOUNDED])
    return rows.filter((pl.col("predictor") == "oracle") & (pl.col("lookahead_layers") == 1))


def test_the_oracle_removes_every_miss_over_an_unbounded_link() -> None:
    rows = oracle_without_bound(trace_of(None))
    assert rows["simulated_misses_with"].to_list() == [0] * rows.height
    assert rows["misses"].sum() > 0
    assert set(rows["recall_all"]) == set(rows["precision"]) == {1.0}


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"public router dumps are not at {TRACES}")
@pytest.mark.parametrize("domain", ["code", "math"])
def test_the_oracle_removes_every_miss_of_published_traces(domain: str) -> None:
    with np.load(TRACES / f"qwen3-30b-{domain}.npz") as dump:
        experts = np.ascontiguousarray(dump["experts"].transpose(1, 0, 2)[:1500])
    rows = oracle_without_bound(make_trace(experts, num_experts=128))
    assert rows["simulated_misses_with"].to_list() == [0] * rows.height
    assert rows["misses"].min() > 0
