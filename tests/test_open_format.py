"""The open dump format: README's writer and examples are read as they stand, every rule of the format is kept."""

import gzip
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.dumps import sniff
from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from schemas.validation import ContractViolation
from tests.raw_open_format import open_jsonl, open_parquet

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## The open dump format")[1].split("\n## ")[0]
HEADER = {"top_k": 2, "num_experts": 16, "moe_layer_ids": [1, 4]}


def ingested(folder: Path, content: bytes, **said: object) -> Ingested:
    (folder / "dump").write_bytes(content)
    return ingest(folder / "dump", DataFolder(folder / "data"), UserMetadata(**said))


def refusal(folder: Path, content: bytes, **said: object) -> str:
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingested(folder, content, **said)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


def batches(steps: int = 12, seed: int = 0, layers: tuple[int, ...] = (1, 4)) -> list[dict[str, Any]]:
    """Continuous batching: request 5 joins request 2 later; prefill and decode rows of one step are two records."""
    generator = random.Random(seed)
    records = []
    for step in range(steps):
        parts = [("prefill", [2] * 3, [0, 1, 2])] if step == 0 else [("decode", [2], [2 + step])]
        if step == 4:
            parts.append(("prefill", [5, 5], [0, 1]))
        elif step > 4:
            parts = [("decode", [2, 5], [2 + step, step - 3])]
        for layer in layers:
            for phase, requests, positions in parts:
                records.append(
                    {
                        "step_id": 3 * step,
                        "phase": phase,
                        "layer_id": layer,
                        "request_id": requests,
                        "token_position": positions,
                        "expert_ids": [generator.sample(range(16), 2) for _ in requests],
                        "router_weights": [[0.75, 0.25] for _ in requests],
                    }
                )
    return records


def expected(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows in recorded order, one event a record, steps counted densely."""
    steps = {step: place for place, step in enumerate(dict.fromkeys(record["step_id"] for record in records))}
    return [
        (number, steps[record["step_id"]], request, position, record["phase"], record["layer_id"], tuple(ids), *weights)
        for number, record in enumerate(records)
        for request, position, ids, weights in zip(
            record["request_id"], record["token_position"], record["expert_ids"], record["router_weights"], strict=True
        )
    ]


def found(one: Ingested) -> list[tuple[Any, ...]]:
    names = ("event_id", "step_id", "request_id", "token_position", "phase", "layer_id", "expert_ids", "router_weights")
    rows = rows_of(one).select(names).rows()
    return [(*row[:6], tuple(row[6]), *row[7]) for row in rows]


# What README says is what is read


def test_the_writer_of_the_readme_writes_what_is_read(tmp_path):
    block = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)[0]
    assert len(block.splitlines()) <= 40
    names: dict[str, Any] = {}
    exec(block, names)
    records = batches()
    writer = names["RouteWriter"](tmp_path / "routes.jsonl", 2, num_experts=16, moe_layer_ids=[1, 4], engine="mine")
    for step in range(12):
        for record in [one for one in records if one["step_id"] == 3 * step]:
            writer.record(**{name: value for name, value in record.items() if name != "step_id"})
        writer.end_step()
        # What has been flushed is whole lines.
        assert (tmp_path / "routes.jsonl").read_bytes().endswith(b"}\n")
    writer.missing(16, "cached prefix")
    writer.close()
    one = ingest(tmp_path / "routes.jsonl", DataFolder(tmp_path / "data"), UserMetadata())
    assert found(one) == expected(records)
    assert one.metadata.engine == "mine"
    assert any("16: cached prefix" in warning for warning in one.warnings)
    with pytest.raises(FileExistsError):
        names["RouteWriter"](tmp_path / "routes.jsonl", 2)


def test_the_example_of_the_readme_is_read(tmp_path):
    block = re.findall(r"```json\n(.*?)```", SECTION, flags=re.DOTALL)[0]
    one = ingested(tmp_path, block.encode())
    assert (one.metadata.counts.rows, one.metadata.moe_layer_ids, one.metadata.model) == (4, [1, 2], "tiny")
    assert rows_of(one)["token_position"].to_list() == [16, 17, 16, 17]


def test_every_key_is_in_the_readme():
    from pipeline.dumps.open_format import _JSON, Header

    assert all(f"`{name}`" in SECTION or f'"{name}"' in SECTION for name in (*Header.model_fields, *_JSON.names))


# What goes in comes out


@pytest.mark.parametrize("write", [open_jsonl, open_parquet, lambda *what: gzip.compress(open_jsonl(*what))])
def test_all_fields_come_out_of_batched_requests(tmp_path, write):
    records = batches()
    one = ingested(tmp_path, write({**HEADER, "weight_kind": "renormalised", "unheard_of": 1}, records))
    assert found(one) == expected(records)
    assert one.metadata.counts.requests == 2
    assert one.metadata.counts.accepted_tokens == 11 + 7 + 2
    assert one.metadata.layer_base == "recorded"
    assert one.metadata.weight_kind == "renormalised"


@pytest.mark.parametrize("write", [open_jsonl, open_parquet])
def test_facts_of_the_header_come_out(tmp_path, write):
    facts = {
        "model": "m", "engine": "e", "domain": "code", "capture_method": "hook", "hidden_layers": 6, "top_k_model": 4,
        "expert_bytes": [[64] * 15 + [65], [32] * 16], "id_space": "logical", "rank_known": False,
        "pass_boundaries_known": False, "dropped_rows": {"dense layer": 9},
    }  # fmt: skip
    metadata = ingested(tmp_path, write({**HEADER, **facts}, batches())).metadata
    same = ("model", "engine", "domain", "capture_method", "hidden_layers", "top_k_model", "expert_bytes", "id_space")
    assert {name: getattr(metadata, name) for name in (*same, "rank_known")} == {
        name: facts[name] for name in (*same, "rank_known")
    }
    assert metadata.pass_boundaries == "assumed_per_token"
    assert metadata.counts.dropped_rows == {"dense layer": 9}
    assert metadata.num_experts_source == "declared"


@pytest.mark.parametrize("write", [open_jsonl, open_parquet])
def test_only_what_must_be_there_leaves_the_rest_unknown(tmp_path, write):
    records = [
        {"step_id": 0, "layer_id": 0, "expert_ids": [[3, 1]]},
        {"step_id": 1, "layer_id": 0, "expert_ids": [[0, 2]]},
    ]
    one = ingested(tmp_path, write({"top_k": 2}, records))
    row = rows_of(one).row(0, named=True)
    assert (row["request_id"], row["token_position"], row["phase"], row["pass_kind"]) == (0, None, "unknown", "normal")
    assert row["router_weights"] is row["predicted_expert_ids"] is None
    assert {"num_experts", "phase", "model", "expert_bytes"} <= set(one.metadata.unknowns)


@pytest.mark.parametrize("write", [open_jsonl, open_parquet])
def test_plans_weights_and_kinds_keep_their_nulls(tmp_path, write):
    fields = {"step_id": 0, "request_id": [0, 1], "token_position": [3, 8]}
    records = [
        fields | {"layer_id": 1, "expert_ids": [[3, 1], [2, 0]], "predicted_expert_ids": [[7, 1], []],
                  "router_weights": [[0.5, None], None]},
        fields | {"layer_id": 4, "expert_ids": [[3, 2], [2, 0]], "predicted_expert_ids": [None, [1]],
                  "router_weights": [[0.25, 0.125], [None, 1.0]]},
        {"step_id": 1, "layer_id": 1, "expert_ids": [[3, 1]], "pass_kind": "spec_rejected"},
        {"step_id": 1, "layer_id": 4, "expert_ids": [[9, 1]], "pass_kind": "spec_rejected"},
        {"step_id": 1, "layer_id": 4, "expert_ids": [[9, 2]], "pass_kind": "spec_fallback"},
    ]  # fmt: skip
    rows = rows_of(ingested(tmp_path, write(HEADER, records)))
    plans = [None if plan is None else list(plan) for plan in rows["predicted_expert_ids"].to_list()]
    assert plans == [[7, 1], [], None, [1], None, None, None]
    weights = [None if row is None else list(row) for row in rows["router_weights"].to_list()]
    assert weights == [[0.5, None], None, [0.25, 0.125], [None, 1.0], None, None, None]
    assert rows["pass_kind"].to_list() == ["normal"] * 4 + ["spec_rejected"] * 2 + ["spec_fallback"]
    assert rows["token_position"].to_list() == [3, 8, 3, 8, None, None, None]


def test_records_of_one_layer_that_follow_each_other_are_one_event(tmp_path):
    whole = batches()
    cut = []
    for record in whole:
        for row in range(len(record["expert_ids"])):
            cut.append(
                {name: value[row : row + 1] if isinstance(value, list) else value for name, value in record.items()}
            )
    assert found(ingested(tmp_path, open_jsonl(HEADER, cut))) == expected(whole)


def test_what_a_dump_calls_warmup_is_warmup(tmp_path):
    records = [record | {"phase": "warmup"} if record["step_id"] == 0 else record for record in batches()]
    one = ingested(tmp_path, open_jsonl(HEADER, records))
    assert one.metadata.counts.rows_by_phase["warmup"] == 6
    assert found(one) == expected(records)


def test_layers_without_numbers_take_those_of_the_user(tmp_path):
    records = batches(layers=(0, 1))
    content = open_jsonl({"top_k": 2, "layer_ids_known": False}, records)
    assert ingested(tmp_path, content).metadata.layer_base == "assumed_from_0"
    (tmp_path / "said").mkdir()
    assert ingested(tmp_path / "said", content, moe_layer_ids=[1, 4]).metadata.moe_layer_ids == [1, 4]
    (tmp_path / "one").mkdir()
    assert "wanted the places of as many layers" in refusal(tmp_path / "one", content, moe_layer_ids=[1])


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int32()), pa.list_(pa.uint8(), 2)])
def test_parquet_of_any_width_is_read(tmp_path, kind):
    records = batches()
    content = open_parquet(
        HEADER, records, expert_ids=kind, step_id=pa.uint32(), layer_id=pa.uint8(), token_position=pa.uint32(),
        phase=pa.dictionary(pa.int8(), pa.string()), router_weights=pa.list_(pa.float16()),
    )  # fmt: skip
    assert found(ingested(tmp_path, content)) == expected(records)


@pytest.mark.parametrize("write", [open_jsonl, open_parquet])
def test_small_blocks_give_the_same_trace(tmp_path, monkeypatch, write):
    records = batches(steps=400)
    monkeypatch.setattr("pipeline.dumps.open_format.ROWS_PER_BLOCK", 40)
    monkeypatch.setattr("pipeline.dumps.open_format.MAX_RECORD_BYTES", 2048)
    assert found(ingested(tmp_path, write(HEADER, records))) == expected(records)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.integers(1, 30), layers=st.sets(st.integers(0, 300), min_size=1, max_size=4), rows=st.integers(1, 9),
    top_k=st.integers(1, 6), seed=st.integers(0, 99),
)  # fmt: skip
def test_shapes_come_out(tmp_path_factory, steps, layers, rows, top_k, seed):
    generator = random.Random(seed)
    records = [
        {"step_id": step, "layer_id": layer, "phase": "prefill",
         "expert_ids": [generator.sample(range(60), top_k) for _ in range(rows)]}
        for step in range(steps) for layer in sorted(layers)
    ]  # fmt: skip
    from pipeline.dumps.blocks import Asked

    folder = tmp_path_factory.mktemp("shapes")
    for write in (open_jsonl, open_parquet):
        (folder / "dump").write_bytes(write({"top_k": top_k}, records))
        with DumpFile(folder / "dump") as dump:
            blocks = list(sniff.parse(dump, Asked(UserMetadata(), folder)).blocks)
        ids = np.concatenate([block.expert_ids for block in blocks])
        assert ids.tolist() == [row for record in records for row in record["expert_ids"]]
        assert np.concatenate([block.layer for block in blocks]).tolist() == [
            record["layer_id"] for record in records for _ in range(rows)
        ]


# What is refused


LINES = open_jsonl(HEADER, batches()).splitlines(keepends=True)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"version": 2}, "version '2' of the open format, this program reads version 1"),
        ({"version": "1"}, "version '1' of the open format"),
        ({"top_k": None}, "top_k: Input should be a valid integer"),
        ({"num_experts": -1}, "num_experts: Input should be greater than 0"),
        ({"moe_layer_ids": [4, 1]}, "ascending without repeats"),
        ({"expert_bytes": [1, 2, 3]}, "expert_bytes has 3 entries for 2 moe_layer_ids"),
        ({"moe_layer_ids": [1, 5]}, "step 0: layer_id 4, wanted a layer of the header's moe_layer_ids"),
        ({"num_experts": 10}, "but ids run 0..9"),
    ],
)
@pytest.mark.parametrize("write", [open_jsonl, open_parquet])
def test_a_header_that_is_none(tmp_path, header, reason, write):
    assert reason in refusal(tmp_path, write({**HEADER, **header}, batches()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step_id": None}, "line 5: step_id is 'None', wanted a whole number"),
        ({"step_id": -1}, "line 5: step_id is '-1'"),
        ({"step_id": 1.5}, "line 5: step_id is '1.5'"),
        ({"layer_id": 70000}, "line 5: layer_id is '70000', wanted a whole number below 65536"),
        ({"pass_id": -2}, "line 5: pass_id is '-2'"),
        ({"phase": "thinking"}, "line 5: phase is 'thinking', wanted one of prefill, decode"),
        ({"pass_kind": "spec"}, "line 5: pass_kind is 'spec'"),
        ({"expert_ids": [[1, 2, 3]]}, "line 5: a row of expert_ids is [1, 2, 3], wanted top_k = 2"),
        ({"expert_ids": [[1, None]]}, "a token whose routes were not captured is left out"),
        ({"expert_ids": [None]}, "a token whose routes were not captured is left out"),
        ({"expert_ids": []}, "line 5: expert_ids is [], wanted a list of 2 ids"),
        ({"expert_ids": None}, "line 5: expert_ids is None"),
        ({"expert_ids": {"a": 1}}, "line 5: expert_ids is"),
        ({"request_id": [1, 2]}, "line 5: request_id is [1, 2], wanted 1 whole numbers"),
        ({"token_position": [None]}, "line 5: token_position is [None]"),
        ({"token_position": [-3]}, "line 5: token_position is [-3]"),
        ({"router_weights": [[0.5]]}, "line 5: a row of router_weights is [0.5]"),
        ({"router_weights": [[0.5, "much"]]}, "line 5: a row of router_weights"),
        ({"router_weights": [None, None]}, "line 5: router_weights has not 1 entries"),
        ({"predicted_expert_ids": [[-1]]}, "line 5: a row of predicted_expert_ids is [-1]"),
        ({"predicted_expert_ids": [[16]]}, "expert id 16 among predicted_expert_ids, but ids run 0..15"),
        ({"expert_ids": [[-1, 2]]}, "a negative id marks a route that was not captured"),
        ({"missing": 4}, 'line 5: wanted {"missing": positions, "reason": "why"}'),
        ({"step_id": 0}, "step_id 0 after 3; steps MUST NOT go back"),
        ({"step_id": 90}, "steps MUST NOT go back"),
        ({"end": True}, 'line 5: wanted {"end": true, "records"'),
    ],
)
def test_a_record_that_is_none_is_named_by_its_line(tmp_path, change, reason):
    records = batches()
    assert len(records[3]["expert_ids"]) == 1
    records[3] = {**records[3], **change}
    if "end" in change or "step_id" in change or "missing" in change:
        records[3].setdefault("records", None)
    message = refusal(tmp_path, open_jsonl(HEADER, records))
    if "end" in change:
        assert "lines after the closing line" in message or reason in message
    else:
        assert reason in message


def test_positions_of_some_rows_of_a_step(tmp_path):
    records = batches()
    records[3]["token_position"] = None
    assert "token_position of some rows only" in refusal(tmp_path, open_jsonl(HEADER, records))


def test_experts_counted_from_1_are_none_of_this_format(tmp_path):
    assert "counts experts from 0" in refusal(tmp_path, open_jsonl(HEADER, batches()), expert_id_base=1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"".join(LINES[:-1]), 'no closing line after 26 records: truncated'),
        (b"".join(LINES[:5] + LINES[6:]), "the closing line counts 26 records, found 25"),
        (b"".join(LINES + LINES), "lines after the closing line"),
        (b"".join(LINES[:-1])[:-40], "the dump is truncated"),
        (LINES[0], "no closing line after 0 records"),
        (LINES[0] + b'{"end": true, "records": 0}\n', "a header and no route"),
        (b"".join([*LINES[:3], b'{"missing": 3}\n', *LINES[3:]]), 'line 4: wanted {"missing": positions, "reason"'),
        (b"".join([*LINES[:3], b"[1]\n", *LINES[3:]]), "line 4: wanted an object"),
    ],
)  # fmt: skip
def test_lost_and_added_lines(tmp_path, content, reason):
    assert reason in refusal(tmp_path, content)


def test_a_record_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.open_format.MAX_RECORD_BYTES", 1024)
    record = {"step_id": 0, "layer_id": 1, "phase": "prefill", "expert_ids": [[1, 2]] * 2000}
    assert "write several of the same layer" in refusal(tmp_path, open_jsonl(HEADER, [record]))


def test_nan_and_infinity_as_python_writes_them(tmp_path):
    records = batches()
    records[3]["router_weights"] = [[float("nan"), 0.5]]
    assert list(rows_of(ingested(tmp_path, open_jsonl(HEADER, records)))["router_weights"][6 + 1]) != [0.75, 0.25]
    records[3]["router_weights"] = [[float("inf"), 0.5]]
    (tmp_path / "again").mkdir()
    assert "a weight beyond 16-bit floats" in refusal(tmp_path / "again", open_jsonl(HEADER, records))


@pytest.mark.parametrize(
    ("types", "reason"),
    [
        ({"step_id": pa.float64()}, "column step_id is double, wanted whole numbers"),
        ({"phase": pa.binary()}, "column phase is binary, wanted texts"),
        ({"expert_ids": pa.list_(pa.float32())}, "column expert_ids is list<"),
        ({"router_weights": pa.list_(pa.int32())}, None),
    ],
)
def test_parquet_of_other_types(tmp_path, types, reason):
    records = [{**record, "router_weights": [[1, 0] for _ in record["expert_ids"]]} for record in batches()]
    message = refusal(tmp_path, open_parquet(HEADER, records, **types))
    assert (reason or "column router_weights") in message


def test_parquet_values_that_do_not_belong(tmp_path):
    def parquet(name: str, value: Any) -> str:
        table = pq.read_table(io.BytesIO(open_parquet(HEADER, batches())))
        column = table.column(name).to_pylist()
        column[5] = value
        changed = table.set_column(table.schema.names.index(name), name, pa.array(column))
        pq.write_table(changed, tmp_path / "changed")
        return refusal(tmp_path, (tmp_path / "changed").read_bytes())

    assert "rows 0..45: expert_ids: wanted top_k = 2 ids in every row" in parquet("expert_ids", [1])
    assert "expert_ids: wanted top_k" in parquet("expert_ids", None)
    assert "expert_ids: wanted top_k" in parquet("expert_ids", [1, None])
    assert "step_id: wanted a value in every row" in parquet("step_id", None)
    assert "layer_id: wanted whole numbers from 0 to below 65536" in parquet("layer_id", 70000)
    assert "phase: wanted one of prefill" in parquet("phase", "thinking")
    assert "router_weights: wanted top_k = 2 numbers" in parquet("router_weights", [0.5])
    assert "token_position: wanted whole numbers" in parquet("token_position", -1)
    assert "token_position of some rows only" in parquet("token_position", None)


def test_other_parquet_is_of_no_known_layout(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a")
    assert "Parquet of no known layout, columns a" in refusal(tmp_path, (tmp_path / "a").read_bytes())
    content = open_parquet(HEADER, batches())
    one = ingested(tmp_path, content)
    assert "a canonical trace, which needs no ingest" in refusal(tmp_path, one.path.read_bytes())
    no_ids = pq.read_table(io.BytesIO(content)).drop_columns(["expert_ids"])
    pq.write_table(no_ids, tmp_path / "a")
    assert "column expert_ids is missing" in refusal(tmp_path, (tmp_path / "a").read_bytes())


def test_look_alikes_are_not_claimed(tmp_path):
    for content in (
        b'{"format": "expert-tier-route", "version": 1}\n',
        b'{"version": 1, "top_k": 2}\n',
        b'["format"]\n',
    ):
        (tmp_path / "dump").write_bytes(content)
        with DumpFile(tmp_path / "dump") as dump:
            sample = sniff.look(dump)
            assert not any(one.claims(sample) for one in sniff.LAYOUTS if one.name.startswith("open_"))


def test_the_command_says_it_in_one_line(tmp_path, capsys):
    for name, content in (("a.jsonl", b"".join(LINES[:-1])), ("a.parquet", open_parquet(HEADER, batches())[:-9])):
        (tmp_path / name).write_bytes(content)
        assert main(["ingest", str(tmp_path / name), "--data", str(tmp_path / "data")]) == 1
        error = capsys.readouterr().err
        assert "truncated" in error and error.count("\n") == 1


CONTENTS = {"jsonl": open_jsonl(HEADER, batches()), "parquet": open_parquet(HEADER, batches())}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), form=st.sampled_from(sorted(CONTENTS)))
def test_damage_ends_in_a_refusal_or_a_valid_trace(tmp_path_factory, data, form):
    content = bytearray(CONTENTS[form])
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damage")
    try:
        ingested(folder, bytes(content))
    except (MalformedDump, RefusedDump, ContractViolation) as error:
        assert "\n" not in str(error) or isinstance(error, ContractViolation)


def test_memory_is_bounded_by_a_block_and_speed_is_that_of_columns(tmp_path):
    """A few hundred thousand selections in well below the time that a loop over rows would take."""
    import time

    rng = np.random.default_rng(0)
    ids = rng.random((200, 16, 100, 64)).argpartition(8, axis=-1)[..., :8]
    with (tmp_path / "dump").open("wb") as file:
        file.write(
            json.dumps({"format": "expert-tier-routes", "version": 1, "top_k": 8, "num_experts": 64}).encode() + b"\n"
        )
        for step in range(200):
            for layer in range(16):
                record = {
                    "step_id": step,
                    "layer_id": layer,
                    "phase": "prefill",
                    "expert_ids": ids[step, layer].tolist(),
                }
                file.write(json.dumps(record).encode() + b"\n")
        file.write(b'{"end": true, "records": 3200}\n')
    from pipeline.dumps.blocks import Asked

    started = time.monotonic()
    with DumpFile(tmp_path / "dump") as dump:
        blocks = [block.rows for block in sniff.parse(dump, Asked(UserMetadata(), tmp_path)).blocks]
    assert sum(blocks) == 320_000
    assert max(blocks) <= 2 * 128 * 1024
    assert sum(blocks) * 8 / (time.monotonic() - started) > 100_000
