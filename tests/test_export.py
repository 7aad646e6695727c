"""A trace written in another layout and ingested again is the same trace, or is refused with what cannot be held."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from pipeline.cli import main
from pipeline.export import FORMATS, CannotHold, export
from pipeline.ingest import ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, speculative_dump, tok_layers_dump
from tests.raw_open_format import open_jsonl

KEPT = ("model", "engine", "domain", "hidden_layers", "moe_layer_ids", "experts_per_layer", "expert_bytes", "id_space",
        "num_experts_source", "top_k_model", "rank_known", "pass_boundaries", "layer_base", "counts")  # fmt: skip


def ingested(folder: Path, name: str, content: bytes, **said: object):
    (folder / name).write_bytes(content)
    return ingest(folder / name, DataFolder(folder / "data"), UserMetadata(**said))


def again(folder: Path, trace: Path, layout: str):
    out = folder / f"out.{layout}"
    left_out = export(trace, layout, out).left_out
    return ingest(out, DataFolder(folder / f"data-{layout}"), UserMetadata()), left_out


def rows(path: Path) -> pl.DataFrame:
    return pl.read_parquet(path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


@st.composite
def open_dumps(draw: st.DrawFn) -> tuple[str, bytes]:
    """(style, an open JSONL dump): anything, or what route CSV or npz can hold; below the length of any check."""
    style = draw(st.sampled_from(["anything", "anything", "one stream", "token by token"]))
    top_k = draw(st.integers(1, 3))
    num_experts = draw(st.integers(4, 8))
    layers = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=3)))
    if style == "token by token":
        layers = list(range(len(layers)))
    weights_known = draw(st.booleans()) and style != "token by token"
    rank_known = draw(st.sampled_from([None, True, False]))
    header = {"top_k": top_k, "num_experts": num_experts, "moe_layer_ids": layers, "rank_known": rank_known,
              "hidden_layers": 10, "model": draw(st.sampled_from([None, "tiny", "a/b c"])),
              "dropped_rows": draw(st.sampled_from([None, {"dense layer": 3}])),
              "expert_bytes": draw(st.sampled_from([None, 64, list(range(1, len(layers) + 1))]))}  # fmt: skip
    if style == "token by token":
        header |= {"layer_ids_known": False, "pass_boundaries_known": False, "hidden_layers": None}
    ids = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    weight = st.one_of(st.none(), st.floats(width=16, allow_nan=False, allow_infinity=False))
    weight_rows = st.one_of(st.none(), st.lists(weight, min_size=top_k, max_size=top_k))
    plans = st.one_of(st.none(), st.lists(st.integers(0, num_experts - 1), max_size=4))
    position = dict.fromkeys(range(3), -1)
    records: list[dict[str, Any]] = []
    step_id = -1
    for number in range(draw(st.integers(1, 3))):
        step_id += 1 if style == "token by token" else draw(st.integers(1, 3))
        positions_known = style != "anything" or draw(st.booleans())
        by_layer: list[list[dict[str, Any]]] = []
        for pass_id in range(draw(st.integers(1, 2)) if style == "anything" else 1):
            phases = ["prefill", "decode", "unknown", *(["warmup"] if number == 0 and records else [])]
            phase = draw(st.sampled_from({"anything": phases, "one stream": phases[:2]}.get(style, ["unknown"])))
            kinds = ["normal", "spec_accept", "spec_rejected", "spec_fallback"]
            kind = draw(st.sampled_from(kinds)) if style == "anything" else "normal"
            one_row = style == "token by token" or (style == "one stream" and phase == "decode")
            count = 1 if one_row else draw(st.integers(1, 2))
            requests = [draw(st.integers(0, 2)) if style == "anything" else 0 for _ in range(count)]
            places = []
            for request in requests:
                position[request] += 1 if style == "token by token" else draw(st.integers(1, 3))
                places.append(position[request])
            first = draw(st.integers(0, len(layers) - 1)) if kind == "spec_fallback" else 0
            of_pass = []
            for layer in layers[first:]:
                record = {
                    "step_id": step_id, "pass_id": pass_id, "phase": phase, "pass_kind": kind, "layer_id": layer,
                    "request_id": requests, "token_position": places if positions_known else None,
                    "expert_ids": [draw(ids) for _ in requests],
                }  # fmt: skip
                if weights_known:
                    record["router_weights"] = draw(st.one_of(st.none(), st.tuples(*[weight_rows] * count)))
                if style == "anything":
                    record["predicted_expert_ids"] = draw(st.one_of(st.none(), st.tuples(*[plans] * count)))
                of_pass.append(record)
            by_layer.append(of_pass)
        if draw(st.booleans()):
            records += [record for of_pass in by_layer for record in of_pass]
        else:
            records += sorted((one for of_pass in by_layer for one in of_pass), key=lambda record: record["layer_id"])
    return style, open_jsonl(header, records)


@settings(max_examples=25, deadline=None)
@given(dump=open_dumps())
def test_what_a_layout_holds_comes_back_the_same_and_the_rest_is_refused(dump):
    style, content = dump
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            one = ingested(folder, "a.jsonl", content)
        except ValueError as error:
            # Few layers of a fallback may be all that a dump has of a layer.
            assert "missing" in str(error) or "goes back" in str(error), error
            assume(False)
        before = rows(one.path)
        for layout in FORMATS:
            try:
                two, left_out = again(folder, one.path, layout)
            except CannotHold as refusal:
                assert not layout.startswith("open_"), refusal
                event(f"{layout} refuses {style}")
                continue
            event(f"{layout} holds {style}")
            assert rows(two.path).equals(before, null_equal=True), layout
            if layout.startswith("open_"):
                assert left_out == []
                for fact in KEPT:
                    assert getattr(two.metadata, fact) == getattr(one.metadata, fact), fact


DUMPS = {
    "npz_experts": npz_dump(random_routes(40, 3, 16, 4), {"model": "m", "num_experts": 16, "k": 4}),
    "jsonl_tok_layers": tok_layers_dump(random_routes(40, 3, 16, 4), first=7),
    "route_csv_v1": route_csv_dump(random_routes(5, 3, 16, 2), random_routes(40, 3, 16, 2, seed=1), experts=16,
                                   expert_bytes=[100, 200, 300], pruned_last_layer=True),
    "spec_jsonl": speculative_dump(3, 16, 2, ["normal", "accept", "rejected", "rejected_by_layer", "repeated",
                                              "rejected_partial", "accept", "normal"])[0],
}  # fmt: skip


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("source", DUMPS)
def test_a_trace_of_each_layout_in_each_other(tmp_path, source, layout):
    one = ingested(tmp_path, "a", DUMPS[source])
    holds = layout.startswith("open_") or layout == source or (source, layout) == ("npz_experts", "jsonl_tok_layers")
    if not holds:
        with pytest.raises(CannotHold, match=f"{layout} cannot hold"):
            again(tmp_path, one.path, layout)
        assert not (tmp_path / f"out.{layout}").exists()
        return
    two, _ = again(tmp_path, one.path, layout)
    assert rows(two.path).equals(rows(one.path), null_equal=True)
    assert two.metadata.source.format == layout
    if layout == "open_jsonl":
        for fact in KEPT:
            assert getattr(two.metadata, fact) == getattr(one.metadata, fact), fact


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [
        ("route_csv_v1", {"predicted_expert_ids": [[1]]}, "predicted_expert_ids"),
        ("route_csv_v1", {"pass_kind": "spec_accept"}, "pass_kind spec_accept"),
        ("route_csv_v1", {"phase": None}, "phase unknown"),
        ("route_csv_v1", {"token_position": None}, "unknown positions"),
        ("npz_experts", {}, "layers whose numbers are known"),
    ],
)
def test_what_cannot_be_held_is_named(tmp_path, layout, change, reason):
    record = {"step_id": 0, "layer_id": 0, "request_id": [0], "token_position": [0], "phase": "decode",
              "expert_ids": [[1, 0]]}  # fmt: skip
    one = ingested(tmp_path, "a", open_jsonl({"top_k": 2, "num_experts": 4}, [record | change]))
    with pytest.raises(CannotHold, match=f"{layout} cannot hold {reason}"):
        export(one.path, layout, tmp_path / "out")


def test_requests_that_run_together_are_no_route_csv(tmp_path):
    record = {"step_id": 0, "layer_id": 0, "request_id": [0, 1], "token_position": [4, 9], "phase": "decode",
              "expert_ids": [[1, 0], [2, 3]]}  # fmt: skip
    one = ingested(tmp_path, "a", open_jsonl({"top_k": 2, "num_experts": 4}, [record]))
    with pytest.raises(CannotHold, match="steps of several requests"):
        export(one.path, "route_csv_v1", tmp_path / "out")


def test_ids_of_unknown_order_are_not_passed_off_as_router_order(tmp_path):
    record = {"step_id": 0, "layer_id": 0, "request_id": [0], "token_position": [4], "phase": "decode",
              "expert_ids": [[1, 0]]}  # fmt: skip
    one = ingested(tmp_path, "a", open_jsonl({"top_k": 2, "num_experts": 4, "rank_known": False}, [record]))
    with pytest.raises(CannotHold, match="neither sorted nor in router order"):
        export(one.path, "route_csv_v1", tmp_path / "out")
    assert again(tmp_path, one.path, "open_jsonl")[0].metadata.rank_known is False


def test_facts_without_a_place_are_named(tmp_path):
    one = ingested(tmp_path, "a.csv", DUMPS["route_csv_v1"], domain="code", id_space="logical", model="a b")
    _, left_out = again(tmp_path, one.path, "route_csv_v1")
    assert {"domain", "id_space", "model"} <= set(left_out)
    assert "expert_bytes" not in left_out


def test_long_records_are_cut_and_read_as_one_event(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.export._ROWS_OF_A_RECORD", 2)
    one = ingested(tmp_path, "a", DUMPS["route_csv_v1"])
    two, _ = again(tmp_path, one.path, "open_jsonl")
    assert rows(two.path).equals(rows(one.path), null_equal=True)
    assert (tmp_path / "out.open_jsonl").read_text().count("\n") == 2 + 3 + 3 + 1 + 3 * 40


def test_the_command_writes_and_says_what_it_left_out(tmp_path, capsys):
    one = ingested(tmp_path, "a.csv", DUMPS["route_csv_v1"], domain="code")
    trace_id, data = one.metadata.trace_id, ["--data", str(tmp_path / "data")]
    out = ["--out", str(tmp_path / "b.csv")]
    assert main(["export", trace_id, "--format", "route_csv_v1", *out, *data, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["format"], "domain" in said["left_out"]) == (131, "route_csv_v1", True)
    assert main(["export", trace_id, "--format", "npz_experts", *out, *data]) == 1
    error = capsys.readouterr().err
    assert "npz_experts cannot hold" in error and error.count("\n") == 1
    assert main(["export", "nobody", "--format", "npz_experts", *out, *data]) == 2
    assert main(["export", trace_id, "--format", "open_jsonl", "--out", str(one.path), *data]) == 2


def test_a_trace_is_exported_only_to_a_file_in_a_folder_that_is_there(tmp_path, capsys):
    one = ingested(tmp_path, "a.csv", DUMPS["route_csv_v1"])
    os.mkfifo(tmp_path / "pipe")
    before = one.path.read_bytes()
    for out, status, words in (
        (tmp_path / "some" / "missing" / "b.csv", 2, f"there is no folder {tmp_path / 'some' / 'missing'}; make it"),
        (tmp_path, 2, "a folder, wanted the name of a file"),
        ("..", 2, "wanted the name of a file"),
        ("", 2, "argument --out: '', wanted a path"),
        (tmp_path / "pipe", 2, "no regular file"),
        (one.path, 2, "which holds what the data folder keeps"),
        (one.path.with_name("other.parquet"), 2, "which holds what the data folder keeps"),
        (tmp_path / "a.csv" / "b.csv", 1, "it is in the way; choose another place"),
    ):
        call = ["export", one.metadata.trace_id, "--format", "open_jsonl", "--out", str(out)]
        try:
            found = main([*call, "--data", str(tmp_path / "data")])
        except SystemExit as stop:
            found = stop.code
        assert found == status, out
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
    assert not (tmp_path / "some").exists()
    assert one.path.read_bytes() == before
