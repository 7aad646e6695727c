"""Every layout, read from bytes that independent code wrote, gives back the routes that were put in."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ingest import Ingested, ingest, read_user_metadata
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, speculative_dump, tok_layers_dump

TRACES = Path(__file__).parents[2] / "shared" / "traces"


def ingested(folder: Path, name: str, content: bytes, **said: object) -> Ingested:
    path = folder / name
    path.write_bytes(content)
    return ingest(path, DataFolder(folder / "data"), UserMetadata(**said))


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).with_columns(pl.col("phase", "pass_kind").cast(pl.String))


def routes_of(one: Ingested) -> list[list[list[int]]]:
    """[step][event] -> ids, for traces with one row per event."""
    by_step = rows_of(one).group_by("step_id", maintain_order=True).agg("expert_ids")
    return [[list(ids) for ids in step] for step in by_step["expert_ids"].to_list()]


def test_npz_gives_back_its_routes_token_by_token(tmp_path):
    routes = random_routes(40, 3, 16, 4)
    one = ingested(tmp_path, "a.npz", npz_dump(routes, {"model": "m", "num_experts": 16, "k": 4, "top_k": 4}))
    assert routes_of(one) == routes
    assert rows_of(one)["token_position"].to_list() == [token for token in range(40) for _ in range(3)]
    assert one.metadata.model == "m"
    assert one.metadata.pass_boundaries == "assumed_per_token"
    assert one.metadata.layer_base == "assumed_from_0"


@pytest.mark.parametrize(("descr", "code"), [("|u1", "B"), ("<u2", "H"), ("<i4", "i"), ("<i8", "q"), (">i2", None)])
def test_npz_of_any_integer_type_is_read(tmp_path, descr, code):
    routes = random_routes(20, 2, 16, 2)
    content = npz_dump(routes, descr=descr, code=code or "h")
    if code is None:
        flat = [routes[t][layer][k] for layer in range(2) for t in range(20) for k in range(2)]
        content = npz_dump(routes, descr="<i2")
        content = _swap_payload(routes, struct.pack(f">{len(flat)}h", *flat))
    assert routes_of(ingested(tmp_path, "a.npz", content)) == routes


def _swap_payload(routes, payload):
    import io
    import zipfile

    from tests.raw_dumps import npy_bytes

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("experts.npy", npy_bytes((len(routes[0]), len(routes), len(routes[0][0])), ">i2", payload))
    return buffer.getvalue()


def test_npz_in_fortran_order_is_read(tmp_path):
    routes = random_routes(20, 2, 16, 2)
    array = np.asfortranarray(np.array(routes, dtype=np.int16).transpose(1, 0, 2))
    np.savez(tmp_path / "f.npz", experts=array)
    one = ingest(tmp_path / "f.npz", DataFolder(tmp_path / "data"), UserMetadata())
    assert routes_of(one) == routes


def test_large_npz_goes_through_an_unnamed_file_and_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.arrays.IN_MEMORY_BYTES", 64)
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", 7)
    routes = random_routes(40, 3, 16, 4)
    one = ingested(tmp_path, "a.npz", npz_dump(routes))
    assert routes_of(one) == routes
    assert sorted(path.name for path in one.path.parent.iterdir()) == [".lock", one.path.name]


def test_token_lines_give_back_their_routes(tmp_path):
    routes = random_routes(300, 4, 32, 4)
    one = ingested(tmp_path, "a.jsonl", tok_layers_dump(routes, first=7))
    assert routes_of(one) == routes
    assert rows_of(one)["token_position"].unique().to_list() == list(range(7, 307))


def test_gzip_is_seen_by_content_and_changes_nothing_but_the_identity(tmp_path):
    routes = random_routes(30, 2, 16, 2)
    plain = ingested(tmp_path, "a.jsonl", tok_layers_dump(routes))
    packed = ingested(tmp_path, "b.dat", gzip.compress(tok_layers_dump(routes), mtime=0))
    assert rows_of(plain).equals(rows_of(packed))
    assert plain.metadata.trace_id != packed.metadata.trace_id


def test_route_csv_makes_prefill_one_pass_and_each_decode_step_another(tmp_path):
    prefill, decode = random_routes(5, 3, 16, 2, seed=1), random_routes(4, 3, 16, 2, seed=2)
    content = route_csv_dump(prefill, decode, experts=16, expert_bytes=[100, 200, 100])
    one = ingested(tmp_path, "a.csv", content)
    rows = rows_of(one)
    assert one.metadata.counts.steps == 1 + 4
    assert one.metadata.counts.events == 3 + 4 * 3
    assert one.metadata.expert_bytes == [100, 200, 100]
    assert one.metadata.model == "tiny"
    first = rows.filter(pl.col("step_id") == 0)
    assert first["phase"].unique().to_list() == ["prefill"]
    for layer in range(3):
        of_layer = first.filter(pl.col("layer_id") == layer)
        assert [list(ids) for ids in of_layer["expert_ids"].to_list()] == [token[layer] for token in prefill]
        assert of_layer["row_in_event"].to_list() == list(range(5))
    assert routes_of(one)[1:] == decode
    assert rows["router_weights"].null_count() == 0
    assert rows.filter(pl.col("step_id") > 0)["token_position"].unique().to_list() == [5, 6, 7, 8]


def test_route_csv_accepts_a_last_layer_with_output_tokens_only_and_says_so(tmp_path):
    prefill, decode = random_routes(5, 3, 16, 2, seed=1), random_routes(4, 3, 16, 2, seed=2)
    one = ingested(tmp_path, "a.csv", route_csv_dump(prefill, decode, experts=16, pruned_last_layer=True))
    assert one.metadata.counts.rows == 5 + 5 + 1 + 12
    assert any("fewer rows in the last layer" in warning for warning in one.warnings)


def test_route_csv_reads_columns_by_name_in_any_order_and_without_preamble(tmp_path):
    decode = random_routes(20, 2, 16, 2)
    lines = route_csv_dump([], decode, experts=16, preamble=False).decode().splitlines()
    names = lines[0].split(",")
    order = [names.index(name) for name in ("slot", "expert", "layer", "turn", "phase", "step")]
    moved = [",".join([line.split(",")[place] for place in order] + ["x"]) for line in lines]
    moved[0] = "slot,expert,layer,turn,phase,step,unheard_of"
    one = ingested(tmp_path, "a.csv", ("\n".join(moved) + "\n").encode())
    assert routes_of(one) == decode
    assert one.metadata.num_experts_source == "observed"
    assert rows_of(one)["router_weights"].null_count() == one.metadata.counts.rows


def test_route_csv_drops_unattributable_rows_and_counts_them(tmp_path):
    decode = random_routes(20, 2, 16, 2)
    lines = route_csv_dump([], decode, experts=16).decode().splitlines()
    lost = ["0,1,-1,0,0,3,0.5,0,0", "0,1,-1,0,1,4,0.5,0,0"]
    one = ingested(tmp_path, "a.csv", ("\n".join(lines[:3] + lost + lines[3:]) + "\n").encode())
    assert one.metadata.counts.dropped_rows == {"unattributable: negative step": 1}
    assert routes_of(one) == decode


def test_route_csv_takes_a_nan_weight_as_unknown(tmp_path):
    decode = random_routes(20, 2, 16, 2)
    text = route_csv_dump([], decode, experts=16).decode()
    one = ingested(tmp_path, "a.csv", text.replace("0.5000", "nan", 2).encode())
    weights = rows_of(one)["router_weights"].to_list()
    assert next(iter(weights[0])) is None
    assert next(iter(weights[2])) is not None


def test_route_csv_keeps_the_engines_own_hits_beside(tmp_path):
    decode = random_routes(20, 2, 16, 2)
    observation = ingested(tmp_path, "a.csv", route_csv_dump([], decode, experts=16)).metadata.engine_observations[0]
    assert (observation.accesses, observation.hits) == (80, 40)


def test_route_csv_in_small_batches_gives_the_same_trace(tmp_path, monkeypatch):
    prefill, decode = random_routes(50, 3, 16, 2, seed=1), random_routes(400, 3, 16, 2, seed=2)
    content = route_csv_dump(prefill, decode, experts=16)
    whole = rows_of(ingested(tmp_path, "a.csv", content))
    monkeypatch.setattr("pipeline.dumps.route_csv._BLOCK_BYTES", 4096)
    monkeypatch.setattr("pipeline.dumps.route_csv.ROWS_PER_BLOCK", 50)
    (tmp_path / "again").mkdir()
    assert rows_of(ingested(tmp_path / "again", "a.csv", content)).equals(whole)


def test_requests_of_several_turns_stay_apart(tmp_path):
    first = route_csv_dump(random_routes(3, 2, 16, 2), random_routes(9, 2, 16, 2, seed=3), experts=16)
    second = route_csv_dump(random_routes(4, 2, 16, 2), random_routes(9, 2, 16, 2, seed=4), experts=16, turn=1)
    body = b"".join(line + b"\n" for line in second.splitlines() if line[:1].isdigit())
    one = ingested(tmp_path, "a.csv", first + body)
    assert one.metadata.counts.requests == 2
    assert one.metadata.counts.steps == 2 + 18
    assert one.metadata.counts.accepted_tokens == 18 + 2


def test_conformance_events_are_read_with_their_known_answer(tmp_path):
    header = "event_index,scheduler_step,layer,requested_experts,misses,hits\n"
    body = "".join(
        f"{step * 3 + layer},{step},{layer},{a} {b},{2 if step == 0 else 1},{0 if step == 0 else 1}\n"
        for step, (a, b) in enumerate([(0, 1), (0, 2), (0, 1), (0, 3), (0, 1)])
        for layer in range(3)
    )
    one = ingested(tmp_path, "a.csv", (header + body).encode())
    assert one.metadata.counts.accesses == 30
    assert one.metadata.counts.events == 15
    assert one.metadata.engine_observations[0].accesses == 30


# 285 iterations of the study's prose trace give 299 accepted tokens with 14 accepted speculations (paper.md §2.1).
PROSE = ["normal"] * 248 + ["accept"] * 14 + ["rejected"] * 10 + ["repeated"] * 13


@pytest.mark.parametrize("seed", [0, 1])
def test_speculation_is_typed_by_width_and_repetition_and_accepts_299_tokens(tmp_path, seed):
    import random

    kinds = list(PROSE)
    random.Random(seed).shuffle(kinds)
    content, truth = speculative_dump(4, 32, 4, kinds, seed=seed)
    one = ingested(tmp_path, "prose.jsonl", content)
    assert one.metadata.counts.accepted_tokens == 299
    assert one.metadata.counts.steps == 285
    rows = rows_of(one)
    expected = [
        (record["iteration"], record["layer"], record["kind"], record["ids"][row * 4 : row * 4 + 4], row)
        for record in truth
        for row in range(record["rows"])
    ]
    found = rows.select("step_id", "layer_id", "pass_kind", "expert_ids", "row_in_event").rows()
    assert [(a, b, c, list(d), e) for a, b, c, d, e in found] == expected
    assert set(rows["phase"].to_list()) == {"decode"}


@pytest.mark.parametrize("kind", ["rejected_by_layer", "rejected_partial"])
def test_fallbacks_layer_by_layer_and_partial_sweeps_are_typed(tmp_path, kind):
    kinds = ["normal", kind, "accept", kind, "normal"] * 8
    content, truth = speculative_dump(6, 32, 4, kinds)
    one = ingested(tmp_path, "a.jsonl", content)
    events = rows_of(one).group_by("event_id", maintain_order=True).first()
    assert events["pass_kind"].to_list() == [record["kind"] for record in truth]
    assert one.metadata.counts.accepted_tokens == len(kinds) + kinds.count("accept")


def test_speculative_dump_in_small_batches_gives_the_same_trace(tmp_path, monkeypatch):
    content, _ = speculative_dump(4, 32, 4, PROSE)
    whole = rows_of(ingested(tmp_path, "a.jsonl", content))
    monkeypatch.setattr("pipeline.dumps.jsonl.BLOCK_BYTES", 2048)
    monkeypatch.setattr("pipeline.dumps.jsonl.ROWS_PER_BLOCK", 64)
    (tmp_path / "again").mkdir()
    assert rows_of(ingested(tmp_path / "again", "a.jsonl", content)).equals(whole)


def test_pass_records_without_iteration_are_refused_with_the_reason(tmp_path):
    line = json.dumps({"layer": 0, "experts": [1, 2, 3, 4]}) + "\n"
    with pytest.raises(ValueError, match="cannot be told from a rejected one"):
        ingested(tmp_path, "a.jsonl", line.encode())


@given(
    tokens=st.integers(1, 12), layers=st.integers(1, 4), experts=st.integers(4, 300), top_k=st.integers(1, 4),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_all_layouts_of_the_same_routes_give_the_same_experts(tmp_path_factory, tokens, layers, experts, top_k, seed):
    routes = random_routes(tokens, layers, experts, top_k, seed)
    folder = tmp_path_factory.mktemp("same")
    said = {"num_experts": experts, "tied_routing": True}
    three = [
        ingested(folder, "a.npz", npz_dump(routes), **said),
        ingested(folder, "b.jsonl", tok_layers_dump(routes), **said),
        ingested(folder, "c.csv", route_csv_dump([], routes, experts=experts), **said),
    ]
    assert all(routes_of(one) == routes for one in three)
    assert len({one.metadata.counts.accesses for one in three}) == 1


def test_user_metadata_comes_from_the_file_beside_and_is_overridden_by_the_call(tmp_path):
    dump = tmp_path / "a.jsonl"
    (tmp_path / "a.jsonl.toml").write_text('model = "m"\ndomain = "code"\nexpert_bytes = 4096\n')
    said = read_user_metadata(dump, ["domain=math", "moe_layer_ids=[1, 2]"])
    assert (said.model, said.domain, said.expert_bytes, said.moe_layer_ids) == ("m", "math", 4096, [1, 2])


def test_user_metadata_names_layers_and_phases_that_the_dump_leaves_open(tmp_path):
    routes = random_routes(20, 2, 16, 2)
    one = ingested(
        tmp_path, "a.jsonl", tok_layers_dump(routes), moe_layer_ids=[1, 3], hidden_layers=4, phase="decode",
        num_experts=16, expert_bytes=[10, 20],
    )  # fmt: skip
    rows = rows_of(one)
    assert rows["layer_id"].unique().sort().to_list() == [1, 3]
    assert set(rows["phase"].to_list()) == {"decode"}
    assert one.metadata.layer_base == "declared"
    assert one.metadata.sizes_of_layer(1) == [20] * 16


@pytest.mark.skipif(not TRACES.is_dir(), reason="published traces are not here")
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # numbers.md and traces/README.md: 8,000 tokens × 48 layers × 8; 28 prefill tokens (the last layer has one) and
        # 128 decode tokens at top 6; 299 tokens × 16 × 8; 30 accesses.
        ("qwen3-30b-code.npz", (384_000, 8000, 3_072_000)),
        ("qwen3-30b-top6.route.csv", (47 * 28 + 1 + 48 * 128, 129, (47 * 28 + 1 + 48 * 128) * 6)),
        ("olmoe-299.jsonl", (4784, 299, 38_272)),
        ("toy-events.csv", (15, 5, 30)),
    ],
)
def test_published_dumps_have_their_known_size(tmp_path, name, counts):
    found = ingest(TRACES / name, DataFolder(tmp_path), UserMetadata()).metadata.counts
    assert (found.rows, found.steps, found.selections) == counts
