"""The validator: each reported failure that fits a small file, its check, its one line, its exit code; and repairs.

Numbers (#7 …) are those of the reported failures these files stand for; all files are synthetic.
"""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeline.dump_checks import CHECKS, WARMUP_ROWS
from pipeline.dumps.blocks import MalformedDump, ParsedDump, RefusedDump, RowBlock
from pipeline.ingest import Ingested, ingest, judge
from pipeline.repairs import Repairs
from pipeline.validator import Validator
from schemas.documents import DumpCheck, IngestedTrace, Inspection
from schemas.files import DataFolder
from schemas.trace import CheckRecord, UserMetadata
from tests.command_lines import expert_tier
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, tok_layers_dump

LAYERS, TOKENS, EXPERTS, TOP_K = 4, 200, 64, 8
ROUTES = random_routes(TOKENS, LAYERS, EXPERTS, TOP_K, seed=1)
ARRAY = np.array(ROUTES, dtype=np.int16).transpose(1, 0, 2)  # (L, T, k)
NAMES = [check.name for check in CHECKS]


def npz(array: np.ndarray, meta: dict | None = None) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, experts=array, **({} if meta is None else {"meta": np.array(json.dumps(meta))}))
    return buffer.getvalue()


def written(folder: Path, content: bytes) -> Path:
    path = folder / "dump.bin"
    path.write_bytes(content)
    return path


def taken(folder: Path, content: bytes, **said: object) -> Ingested:
    return ingest(written(folder, content), DataFolder(folder / "data"), UserMetadata(**said))


def rows_of(one: Ingested) -> pl.DataFrame:
    return pl.read_parquet(one.path).drop("token_position")


def outcome(one: Ingested, name: str) -> str:
    return {check.name: check.outcome for check in one.metadata.checks}[name]


def found(one: Ingested, name: str) -> str:
    return {check.name: check.found for check in one.metadata.checks}[name]


def refused(capsys, folder: Path, content: bytes, *flags: str) -> tuple[str, str]:
    """(check that refused, the line on stderr): of `inspect`, and the same of `ingest`."""
    path = written(folder, content)
    status, out, err = expert_tier(capsys, "inspect", path, "--json", *flags)
    document = Inspection.model_validate_json(out)
    assert (status, document.verdict, document.metadata) == (1, "refuse", None)
    assert err == f"expert-tier: {document.refusal}\n"
    assert [check.name for check in document.checks] == NAMES
    outcomes = [check.outcome for check in document.checks]
    first = outcomes.index("refuse") if "refuse" in outcomes else None
    assert first is not None
    by_refusal = next(place for place, check in enumerate(document.checks) if check.found == document.refusal)
    assert set(outcomes[by_refusal + 1 :]) <= {"not_reached"}
    assert "not_reached" not in outcomes[:by_refusal]
    status, out, again = expert_tier(capsys, "ingest", path, "--data", folder / "data", *flags)
    assert (status, out, again) == (1, "", err)
    assert err.count("\n") == 1
    return document.checks[by_refusal].name, err


# The list


def test_the_list_names_every_check_once_with_its_threshold_and_reason(capsys):
    assert len(set(NAMES)) == len(NAMES)
    status, out, err = expert_tier(capsys, "inspect", "--checks", "--json")
    assert (status, err) == (0, "")
    listed = TypeAdapter(list[DumpCheck]).validate_json(out)
    assert [check.name for check in listed] == NAMES
    assert all(check.looks_for and check.wanted and check.reason for check in listed)
    _, out, _ = expert_tier(capsys, "inspect", "--checks")
    lines = out.splitlines()
    assert len(lines) == len(NAMES) + 2
    assert {line.count("|") for line in lines} == {5}


def test_inspect_takes_a_dump_or_the_list(capsys, tmp_path):
    for arguments in ([], [written(tmp_path, npz(ARRAY)), "--checks"]):
        status, _, err = expert_tier(capsys, "inspect", *arguments)
        assert (status, err.count("\n")) == (2, 1)


def test_a_sound_dump_has_every_check_in_order_and_no_warning(capsys, tmp_path):
    path = written(tmp_path, npz(ARRAY, {"num_experts": EXPERTS}))
    status, out, err = expert_tier(capsys, "inspect", path, "--json")
    assert (status, err) == (0, "")
    document = Inspection.model_validate_json(out)
    assert (document.verdict, document.refusal) == ("ok", None)
    assert [check.name for check in document.checks] == NAMES
    assert {check.outcome for check in document.checks} == {"ok", "not_applicable"}
    assert [check.model_dump() for check in document.metadata.checks] == [
        check.model_dump() for check in document.checks
    ]
    _, out, _ = expert_tier(capsys, "inspect", path)
    assert "verdict: ok" in out
    assert all(name in out for name in NAMES)


def test_a_refused_dump_prints_what_was_judged_before_and_what_was_not_reached(capsys, tmp_path):
    array = ARRAY.copy()
    array[3] = array[1]
    path = written(tmp_path, npz(array))
    status, out, err = expert_tier(capsys, "inspect", path)
    assert status == 1
    assert "layers [1, 3] are equal over 200 rows" in err
    lines = {line[18:].split(":")[0].strip(): line[2:17].strip() for line in out.splitlines() if line.startswith("  ")}
    assert list(lines) == NAMES
    assert lines["no expert twice in a row"] == "ok"
    assert lines["layers differ"] == "refuse"
    assert lines["no warm-up rows"] == "not reached"


def test_a_file_of_no_known_layout_reaches_no_check_but_the_first(capsys, tmp_path):
    name, line = refused(capsys, tmp_path, b"layer_id,expert_id,count\n0,0,12\n")
    assert name == NAMES[0]
    assert "counts per layer and expert" in line
    assert refused(capsys, tmp_path, b"")[0] == NAMES[0]


def test_a_parser_s_own_verdict_of_a_listed_check_takes_the_place_of_ours():
    record = CheckRecord(name="ids are logical", outcome="ok", wanted="a map", found="mapped by the map of each pass")
    own = CheckRecord(name="replicas equal", outcome="warn", wanted="w", found="one of two differs")
    validator = validator_of(rows_block(), id_space="physical", checks=[record, own, own])
    judged = validator.checks()
    assert [check.name for check in judged] == [*NAMES, "replicas equal"]
    assert next(check for check in judged if check.name == record.name) == record
    assert judged[-1].found == "one of two differs; one of two differs"


def rows_block(array: np.ndarray = ARRAY, weights: np.ndarray | None = None) -> RowBlock:
    layers, tokens, top_k = array.shape
    rows = layers * tokens
    return RowBlock(
        step=np.repeat(np.arange(tokens), layers),
        pass_in_step=np.zeros(rows, dtype=np.int32),
        layer=np.tile(np.arange(layers, dtype=np.int32), tokens),
        request=np.zeros(rows, dtype=np.int64),
        position=None,
        phase=np.ones(rows, dtype=np.int8),
        expert_ids=array.transpose(1, 0, 2).reshape(rows, top_k).astype(np.int32),
        weights=weights,
    )


def validator_of(block: RowBlock, user: UserMetadata | None = None, **said: object) -> Validator:
    parsed = ParsedDump(format="by_hand", blocks=iter([]), top_k=block.expert_ids.shape[1], **said)
    validator = Validator(Path("by_hand"), parsed, user or UserMetadata())
    validator.look_at_header()
    validator.look_at_ids(block)
    validator.look_at_rows(block, block.phase, 0)
    return validator


# Ids (#12, #19, #20, #21, #33)


def test_ids_counted_from_one_name_the_flag_that_reads_them(capsys, tmp_path):
    routes = random_routes(60, 3, 16, 4)
    content = npz_dump([[[expert + 1 for expert in ids] for ids in token] for token in routes], {"num_experts": 16})
    name, line = refused(capsys, tmp_path, content)
    assert name == "expert ids in range"
    assert "--expert-id-base 1" in line
    status, out, _ = expert_tier(
        capsys, "ingest", tmp_path / "dump.bin", "--data", tmp_path / "data", "--expert-id-base", "1", "--json"
    )
    assert status == 0
    (one,) = TypeAdapter(list[IngestedTrace]).validate_json(out)
    assert any("ids of 180 rows counted from 0 instead of 1" in warning for warning in one.warnings)
    assert pl.read_parquet(one.path)["expert_ids"].to_list() == [ids for token in routes for ids in token]


def test_an_id_beyond_the_experts_is_not_clamped_to_a_zero_compute_expert(capsys, tmp_path):
    array = ARRAY.copy()
    array[1, 50, 3], array[2, 90, 0] = EXPERTS + 2, EXPERTS + 5
    name, line = refused(capsys, tmp_path, npz(array, {"num_experts": EXPERTS}))
    assert name == "expert ids in range"
    assert "step 50, layer 1" in line
    assert "zero-compute experts" in line


def with_shared(array: np.ndarray, experts: int = EXPERTS, shared: int = 1, seed: int = 0) -> np.ndarray:
    """Each row with ids experts.. put in at random places, as fused or interleaved shared experts are."""
    generator = np.random.default_rng(seed)
    wide = np.concatenate([array, np.full((*array.shape[:2], shared), experts) + np.arange(shared)], axis=2)
    return np.take_along_axis(wide, np.argsort(generator.random(wide.shape), axis=2), axis=2).astype(np.int16)


@pytest.mark.parametrize("shared", [1, 2])
def test_fused_shared_experts_are_named_and_left_out_when_asked(capsys, tmp_path, shared):
    wide = with_shared(ARRAY, shared=shared)
    name, line = refused(capsys, tmp_path, npz(wide, {"num_experts": EXPERTS}))
    assert name == "expert ids in range"
    assert f"--strip-shared-experts {shared}" in line
    one = taken(tmp_path, npz(wide, {"num_experts": EXPERTS}), shared_experts=shared)
    assert one.metadata.top_k_observed == TOP_K
    assert f"{shared} shared experts left out of {LAYERS * TOKENS} rows" in found(one, "repaired as asked")
    kept = [[[expert for expert in ids if expert < EXPERTS] for ids in layer] for layer in wide.tolist()]
    plain = taken(tmp_path, npz(np.array(kept, dtype=np.int16), {"num_experts": EXPERTS}))
    assert rows_of(one).equals(rows_of(plain))


def test_shared_experts_that_are_not_in_every_row_are_refused(capsys, tmp_path):
    wide = with_shared(ARRAY)
    wide[2, 30] = np.arange(TOP_K + 1)
    flags = ("--strip-shared-experts", "1")
    name, line = refused(capsys, tmp_path, npz(wide, {"num_experts": EXPERTS}), *flags)
    assert name == "expert ids in range"
    assert "step 30, layer 2" in line
    assert "num_experts=E" in refused(capsys, tmp_path, npz(wide), *flags)[1]
    assert refused(capsys, tmp_path, npz(wide, {"num_experts": EXPERTS}), "--strip-shared-experts", "9")[0] == (
        "what is said fits"
    )


def test_weights_of_shared_experts_go_with_their_ids():
    array = with_shared(ARRAY[:1, :3])
    block = rows_block(array, weights=array.transpose(1, 0, 2).reshape(-1, TOP_K + 1).astype(np.float32) / 128)
    kept = Repairs(Path("d"), UserMetadata(shared_experts=1), EXPERTS).apply(block)
    assert np.array_equal(kept.weights * 128, kept.expert_ids)


@pytest.mark.parametrize("space", ["local", "slot"])
def test_ids_that_name_several_experts_are_refused_without_a_map(capsys, tmp_path, space):
    name, line = refused(capsys, tmp_path, npz(ARRAY), "--meta", f"id_space={space}")
    assert name == "ids are logical"
    assert f"{space} ids" in line


def test_physical_ids_are_refused_without_a_map_unless_each_copy_is_taken_for_an_expert():
    block = rows_block()
    with pytest.raises(RefusedDump, match="replicas of one expert have several") as caught:
        validator_of(block, id_space="physical")
    assert caught.value.check == "ids are logical"
    said = validator_of(block, UserMetadata(id_space="physical"), id_space="physical").checks()
    assert [check.outcome for check in said if check.name == "ids are logical"] == ["warn"]


def test_k_taken_for_the_number_of_experts_is_refused_unless_it_is_said(capsys, tmp_path):
    generator = np.random.default_rng(0)
    square = np.argsort(generator.random((3, 60, 6)), axis=2).astype(np.int16)
    name, line = refused(capsys, tmp_path, npz(square))
    assert name == "expert ids in range"
    assert "is k taken for the number of experts?" in line
    assert outcome(taken(tmp_path, npz(square), num_experts=6), "expert ids in range") == "warn"
    assert outcome(taken(tmp_path, npz(square[:, :20])), "expert ids in range") == "warn"
    name, line = refused(capsys, tmp_path, npz(ARRAY), "--meta", "num_experts=6")
    assert name == "expert ids in range"
    assert "is k taken for E" in line


def test_255_in_8_bits_is_named_where_nobody_says_how_many_experts_there_are(tmp_path):
    array = ARRAY.astype(np.uint8)
    array[:, 30:60, 0] = 255
    assert outcome(taken(tmp_path, npz(array)), "255 is an expert") == "warn"
    assert outcome(taken(tmp_path, npz(ARRAY.astype(np.uint8))), "255 is an expert") == "ok"
    assert outcome(taken(tmp_path, npz(ARRAY)), "255 is an expert") == "not_applicable"


def test_more_experts_than_the_type_holds_are_refused_by_the_range_check(capsys, tmp_path):
    name, line = refused(capsys, tmp_path, npz(ARRAY.astype(np.uint8)), "--meta", "num_experts=512")
    assert name == "expert ids in range"
    assert "they wrapped" in line


def test_experts_that_no_layer_chooses_are_named(tmp_path):
    for experts, wanted in ((64, "ok"), (72, "ok"), (86, "warn"), (128, "warn"), (256, "warn")):
        one = taken(tmp_path, npz(ARRAY, {"num_experts": experts}))
        assert outcome(one, "expert ids in range") == wanted, experts
    assert "256 experts are declared, but no id is above 63 in 6400 selections of 4 layers" in found(
        one, "expert ids in range"
    )
    few = taken(tmp_path, npz(ARRAY[:, :20], {"num_experts": 256}))
    assert outcome(few, "expert ids in range") == "ok"


# Zeros (#7, #8, #9)


def test_a_tape_of_zeros_was_never_written(capsys, tmp_path):
    name, line = refused(capsys, tmp_path, npz(np.zeros((8, 60, 4), dtype=np.uint8)))
    assert name == "no constant layer"
    assert "100.0% of all rows" in line
    assert "nothing was captured" in line


@pytest.mark.parametrize("zero", [slice(0, 120), slice(50, None)], ids=["prompt", "other ranks' rows"])
def test_a_part_of_the_rows_of_every_layer_that_is_zero_is_a_shard_or_an_uncaptured_prompt(capsys, tmp_path, zero):
    array = ARRAY.copy()
    array[:, zero] = 0
    name, line = refused(capsys, tmp_path, npz(array))
    assert name == "no constant layer"
    share = (zero.stop or TOKENS) - zero.start
    assert f"{share} of {TOKENS} rows of this layer, {share / TOKENS:.1%} of all rows and 4 of 4 layers" in line
    assert "shard" in line


def test_a_dense_layer_of_zeros_names_the_layer_map(capsys, tmp_path):
    array = ARRAY.copy()
    array[0] = 0
    name, line = refused(capsys, tmp_path, npz(array))
    assert name == "no constant layer"
    assert "moe_layer_ids" in line


# Layers (#10, #27, #32)


def test_lists_without_numbers_need_a_layer_map_and_take_it(capsys, tmp_path):
    name, line = refused(capsys, tmp_path, npz(ARRAY), "--meta", "hidden_layers=27")
    assert name == "layers are numbered"
    assert "--layer-map" in line
    for text, wanted in (("3,4,5,26", [3, 4, 5, 26]), ("1-4", [1, 2, 3, 4]), ("0,2-4", [0, 2, 3, 4])):
        flags = ("--meta", "hidden_layers=27", "--layer-map", text, "--json")
        status, out, _ = expert_tier(capsys, "inspect", tmp_path / "dump.bin", *flags)
        document = Inspection.model_validate_json(out)
        assert (status, document.metadata.moe_layer_ids, document.metadata.layer_base) == (0, wanted, "declared")
        assert "layers numbered as you say" in document.checks[-1].found
    assert refused(capsys, tmp_path, npz(ARRAY), "--layer-map", "1-3")[0] == "layers are numbered"


@pytest.mark.parametrize("text", ["", "x", "3,,4", "9-3", "1-99999999", "4,3", "3,3", "1-4,2", "70000"])
def test_a_layer_map_that_is_none_is_a_wrong_call(capsys, tmp_path, text):
    status, _, err = expert_tier(capsys, "inspect", written(tmp_path, npz(ARRAY)), "--layer-map", text)
    assert (status, err.count("\n")) == (2, 1)


def test_a_ragged_layer_that_is_not_the_last_is_refused(capsys, tmp_path):
    routes = random_routes(30, 4, 16, 2)
    lines = route_csv_dump(routes, routes, experts=16).decode().splitlines()
    kept = [line for line in lines if not (line.startswith("0,0,") and line.split(",")[2:4] == ["29", "1"])]
    name, line = refused(capsys, tmp_path, ("\n".join(kept) + "\n").encode())
    assert name == "every pass has every layer"
    assert "29 rows, but 30 in the first layer" in line


def test_a_pruned_last_layer_is_a_declared_exception_and_the_rest_is_conserved(tmp_path):
    routes = random_routes(30, 4, 16, 2)
    one = taken(
        tmp_path, route_csv_dump(routes, random_routes(9, 4, 16, 2, seed=2), experts=16, pruned_last_layer=True)
    )
    assert outcome(one, "every pass has every layer") == "warn"
    assert outcome(one, "rows conserved") == "ok"
    assert found(one, "rows conserved") == "20 to 78 selections per layer, since the last layer was pruned"


def test_one_of_many_groups_of_equal_layers_is_named(capsys, tmp_path):
    array = np.concatenate([ARRAY, ARRAY[2:]])
    name, line = refused(capsys, tmp_path, npz(array))
    assert name == "layers differ"
    assert "layers [2, 4] and 1 more groups are equal over 200 rows" in line


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize(("odd", "wanted"), [(1, None), (15, "warn"), (60, "ok")])
def test_a_layer_that_copies_another_but_for_few_rows_or_shifted(capsys, tmp_path, shift, odd, wanted):
    array = ARRAY.copy()
    array[3] = np.roll(ARRAY[1], shift, axis=0)
    array[3, 20 : 20 + 2 * odd : 2] = ARRAY[2, 20 : 20 + 2 * odd : 2]
    if wanted is not None:
        assert outcome(taken(tmp_path, npz(array)), "layers differ") == wanted
        return
    if shift == 0 and odd == 1:
        assert outcome(taken(tmp_path, npz(array), tied_routing=True), "layers differ") == "warn"
    name, line = refused(capsys, tmp_path, npz(array))
    assert name == "layers differ"
    apart = f", {abs(shift)} row{'s' * (abs(shift) > 1)} apart," if shift else ""
    assert f"layers [1, 3]{apart} are equal in " in line
    assert "one is a copy of the other" in line


def test_layers_that_collapsed_to_the_same_experts_are_no_copies(tmp_path):
    array = ARRAY.copy()
    for layer, offset in ((1, 0), (3, 7)):
        array[layer] = np.arange(TOP_K) * 3
        array[layer, 20 + offset :: 20] = ARRAY[layer, 20 + offset :: 20]
    one = taken(tmp_path, npz(array))
    assert outcome(one, "layers differ") == "ok"
    assert outcome(one, "no routing collapse") == "warn"


# Warm-up (#15)


def test_warm_up_rows_are_dropped_when_asked_and_the_rest_is_as_without_them(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", 84)
    warm = random_routes(1, LAYERS, EXPERTS, TOP_K, seed=9)
    content = npz_dump(warm * 64 + ROUTES)
    one = taken(tmp_path, content, drop_warmup=True)
    assert rows_of(one).equals(rows_of(taken(tmp_path, npz_dump(ROUTES))))
    assert list(one.metadata.counts.dropped_rows.values()) == [64 * LAYERS]
    assert outcome(one, "no warm-up rows") == "warn"
    assert f"{64 * LAYERS} rows dropped" in found(one, "repaired as asked")
    marked = taken(tmp_path, content)
    assert marked.metadata.counts.rows_by_phase["warmup"] == 64 * LAYERS
    assert marked.metadata.trace_id != one.metadata.trace_id
    flagged = expert_tier(
        capsys, "ingest", tmp_path / "dump.bin", "--data", tmp_path / "data", "--drop-warmup", "--json"
    )
    assert json.loads(flagged[1])[0]["trace_id"] == one.metadata.trace_id


@pytest.mark.parametrize("flags", [(), ("--drop-warmup",)])
def test_a_dump_of_nothing_but_warm_up_is_refused(capsys, tmp_path, flags):
    name, _ = refused(capsys, tmp_path, npz_dump([ROUTES[0]] * (4 * WARMUP_ROWS)), *flags)
    assert name == "no constant layer"


# Padding (#11)


def padded(array: np.ndarray, before: int, after: int, *, running: bool) -> np.ndarray:
    layers, _, top_k = array.shape

    def filled(tokens: int) -> np.ndarray:
        if running:
            return (np.arange(tokens * layers * top_k) % EXPERTS).reshape(tokens, layers, top_k).transpose(1, 0, 2)
        return np.broadcast_to(np.arange(top_k), (layers, tokens, top_k))

    return np.concatenate([filled(before), array, filled(after)], axis=1).astype(np.int16)


@pytest.mark.parametrize("running", [True, False], ids=["arange", "0..k-1"])
@pytest.mark.parametrize(("before", "after"), [(0, 12), (12, 0), (5, 4)])
def test_padding_with_a_running_number_at_the_edges_is_refused(capsys, tmp_path, running, before, after, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", 28)
    name, line = refused(capsys, tmp_path, npz(padded(ARRAY, before, after, running=running)))
    assert name == "no padding rows"
    assert f"{before + after} of {TOKENS + before + after} tokens at the edges" in line
    assert "cut it by length" in line


def test_padding_is_cut_by_the_lengths_the_user_says(capsys, tmp_path):
    content = npz(padded(ARRAY, 0, 12, running=True))
    status, out, _ = expert_tier(
        capsys, "ingest", written(tmp_path, content), "--data", tmp_path / "data", "--sequence-lengths", "200", "--json"
    )
    assert status == 0
    path = json.loads(out)[0]["path"]
    assert pl.read_parquet(path).equals(pl.read_parquet(taken(tmp_path, npz(ARRAY)).path))
    one = taken(tmp_path, content, sequence_lengths=[200])
    assert one.path == Path(path)
    assert sum(one.metadata.counts.dropped_rows.values()) == 12 * LAYERS
    assert "one for each" in refused(capsys, tmp_path, content, "--meta", "sequence_lengths=[]")[1]


@pytest.mark.parametrize("apart", [1, 2, 7])
@pytest.mark.parametrize("running", [True, False], ids=["arange", "0..k-1"])
def test_padding_inside_a_request_is_refused(capsys, tmp_path, running, apart, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", 28)
    array = ARRAY.copy()
    array[:, 90 : 90 + 10 * apart : apart] = padded(ARRAY, 10, 0, running=running)[:, :10]
    name, line = refused(capsys, tmp_path, npz(array))
    assert name == "no padding rows"
    assert "from step 90 on: 10 of 200 tokens inside requests have consecutive ids in every layer" in line
    array[:, 93 : 90 + 10 * apart] = ARRAY[:, 93 : 90 + 10 * apart]
    assert outcome(taken(tmp_path, npz(array)), "no padding rows") == "ok"


def test_routes_that_count_up_throughout_were_made(tmp_path):
    starts = np.random.default_rng(0).integers(0, EXPERTS, (LAYERS, TOKENS, 1))
    one = taken(tmp_path, npz(((starts + np.arange(TOP_K)) % EXPERTS).astype(np.int16), {"num_experts": EXPERTS}))
    assert outcome(one, "no padding rows") == "warn"
    assert "made, not routed?" in found(one, "no padding rows")


def test_each_of_several_requests_has_its_own_edges(capsys, tmp_path):
    lines: list[bytes] = []
    for turn in range(3):
        routes = random_routes(20, LAYERS, EXPERTS, TOP_K, seed=turn) + [[list(range(TOP_K))] * LAYERS] * 2
        content = route_csv_dump([], routes, experts=EXPERTS, turn=turn, preamble=turn == 0)
        lines += content.splitlines() if turn == 0 else content.splitlines()[1:]
    name, line = refused(capsys, tmp_path, b"\n".join(lines) + b"\n")
    assert name == "no padding rows"
    assert "6 of 66 tokens at the edges of requests" in line


def test_few_experts_make_consecutive_ids_say_nothing(tmp_path):
    one = taken(tmp_path, npz_dump(random_routes(60, 1, 6, 2)))
    assert outcome(one, "no padding rows") == "not_applicable"


# Copies (#4, #16, #18, #29)


def events_csv(array: np.ndarray, times: int) -> bytes:
    lines = ["event_index,scheduler_step,layer,requested_experts"]
    for token in range(array.shape[1]):
        for _ in range(times):
            for layer in range(array.shape[0]):
                ids = " ".join(map(str, array[layer, token]))
                lines.append(f"{len(lines) - 1},{token},{layer},{ids}")
    return ("\n".join(lines) + "\n").encode()


def test_passes_that_stand_twice_are_refused_where_positions_cannot_tell(capsys, tmp_path):
    array = np.array(random_routes(40, 16, 32, 2), dtype=np.int16).transpose(1, 0, 2)
    one = taken(tmp_path, events_csv(array, 1))
    assert found(one, "no pass twice") == "0 of 40 passes stand twice or more in a row"
    for times in (2, 3):
        name, line = refused(capsys, tmp_path, events_csv(array, times))
        assert name == "no pass twice"
        assert "40 of 40 passes stand twice" in line


def test_a_token_recorded_twice_is_refused_by_its_position(capsys, tmp_path):
    lines = tok_layers_dump(ROUTES).splitlines(keepends=True)
    name, _ = refused(capsys, tmp_path, b"".join(line for line in lines for _ in range(2)))
    assert name == "positions continuous"


def test_a_graph_that_writes_one_token_s_routes_again_is_named_in_decode(tmp_path):
    prefill, decode = random_routes(30, 3, 32, 4), random_routes(20, 3, 32, 4, seed=4)
    one = taken(tmp_path, route_csv_dump(prefill, decode + [decode[-1]] * 40, experts=32))
    assert outcome(one, "no frozen rows") == "warn"
    assert "graph" in found(one, "no frozen rows")


DEEP = np.array(random_routes(TOKENS, 16, 32, 4, seed=3), dtype=np.int16).transpose(1, 0, 2)  # (L, T, k)


@pytest.mark.parametrize(("rows", "wanted"), [(2, "ok"), (3, "warn"), (7, "warn"), (8, None), (12, None)])
@pytest.mark.parametrize("rows_per_block", [28, 10**5])
def test_a_buffer_that_was_not_written_again_is_refused_in_many_layers(
    capsys, tmp_path, monkeypatch, rows, wanted, rows_per_block
):
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", rows_per_block)
    array = DEEP.copy()
    array[:, 100 : 100 + rows] = array[:, 100:101]
    if wanted is None:
        name, line = refused(capsys, tmp_path, npz(array))
        assert name == "no frozen rows"
        assert f"from step 100 on: {rows} tokens in a row choose the same experts in all 16 layers" in line
        one = taken(tmp_path, npz(array), repeated_tokens=True)
    else:
        one = taken(tmp_path, npz(array))
    assert outcome(one, "no frozen rows") == (wanted or "warn")
    assert found(one, "no frozen rows").startswith(f"{rows} in every layer (from step 100 on), ")
    # One layer that goes on tells that the buffer was written.
    array[5] = DEEP[5]
    assert outcome(taken(tmp_path, npz(array)), "no frozen rows") == "ok"


def test_a_router_that_repeats_by_itself_is_not_refused(tmp_path):
    array = DEEP.copy()
    array[:, 100:112] = array[:, 100:101]
    for begin in (20, 40):
        array[:, begin : begin + 2] = array[:, begin : begin + 1]
    assert outcome(taken(tmp_path, npz(array)), "no frozen rows") == "warn"
    # A toy of few layers does so without a word, as the bundled sample does; a repetition that stands alone is named.
    assert outcome(taken(tmp_path, npz(array[:8])), "no frozen rows") == "ok"
    array = DEEP[:8].copy()
    array[:, 100:110] = array[:, 100:101]
    assert outcome(taken(tmp_path, npz(array)), "no frozen rows") == "warn"


def test_the_frozen_rows_of_one_request_among_others_are_found():
    block = rows_block(DEEP)
    others = np.arange(TOKENS) % 3
    array = DEEP.copy()
    mine = np.flatnonzero(others == 1)[20:30]
    array[:, mine] = array[:, mine[:1]]
    ids = array.transpose(1, 0, 2).reshape(block.rows, -1).astype(np.int32)
    requests = np.repeat(others, 16)
    with pytest.raises(MalformedDump, match=rf"from step {mine[0]} on, request 1: 10 tokens in a row") as caught:
        validator_of(replace(block, expert_ids=ids, request=requests)).checks()
    assert caught.value.check == "no frozen rows"


def test_prefill_and_decode_of_one_step_are_different_tokens():
    routes = DEEP[:, :40].transpose(1, 0, 2)  # (T, L, k)
    frozen = np.broadcast_to(routes[39], (10, 16, 4))
    ids, step, layer, phase = [], [], [], []
    for number in range(10):
        for code, rows in ((0, routes[2 * number : 2 * number + 2]), (1, frozen[number : number + 1])):
            for place in range(16):
                ids += list(rows[:, place])
                step += [number] * len(rows)
                layer += [place] * len(rows)
                phase += [code] * len(rows)
    rows = len(ids)
    block = RowBlock(
        step=np.array(step), pass_in_step=np.zeros(rows, dtype=np.int32), layer=np.array(layer, dtype=np.int32),
        request=np.array(phase), position=None, phase=np.array(phase, dtype=np.int8),
        expert_ids=np.array(ids, dtype=np.int32), weights=None,
    )  # fmt: skip
    with pytest.raises(MalformedDump, match="from step 0 on, request 1: 10 tokens in a row"):
        validator_of(block).checks()


def test_selections_that_are_not_rows_times_k_in_every_layer_are_refused():
    validator = validator_of(rows_block())
    assert [check.outcome for check in validator.checks() if check.name == "rows conserved"] == ["ok"]
    validator._state.counts[2, 5] *= 3
    with pytest.raises(MalformedDump, match="every token passes every layer once") as caught:
        validator.checks()
    assert caught.value.check == "rows conserved"


# Weights


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("renormalised", "warn"), ("softmax", "warn"), ("sigmoid", "ok"), ("scaled", "ok"), ("logits", "ok")],
)
def test_weights_must_fit_the_kind_they_are_said_to_be(tmp_path, kind, wanted):
    # The writer's weights are 1/2, 1/3, 1/4, 1/5: each below 1, their sum above.
    one = taken(tmp_path, route_csv_dump([], random_routes(40, 3, 16, 4), experts=16), weight_kind=kind)
    assert outcome(one, "weights agree") == wanted
    assert ("is weight_kind right?" in found(one, "weights agree")) == (wanted == "warn")


# Repairs are part of what a trace is


def test_every_repair_makes_another_trace_and_says_so(tmp_path):
    routes = [[[expert + 1 for expert in ids] for ids in token] for token in random_routes(60, 3, 16, 4)]
    said = [
        {},
        {"expert_id_base": 1},
        {"moe_layer_ids": [1, 2, 3]},
        {"drop_warmup": True},
        {"sequence_lengths": [50]},
    ]
    done = [taken(tmp_path, npz_dump(routes), **one) for one in said]
    assert len({one.metadata.trace_id for one in done}) == len(said)
    # The number of a layer changes no row, and nothing here is warm-up.
    assert [outcome(one, "repaired as asked") for one in done] == ["ok", "warn", "ok", "ok", "warn"]
    for one, keys in zip(done, said, strict=True):
        assert one.metadata.user_metadata.model_dump(exclude_none=True) == keys


# Bounds on both sides


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 60), layers=st.integers(1, 5), experts=st.integers(2, 40), data=st.data(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_sound_routes_are_never_refused(tmp_path, tokens, layers, experts, data, seed):
    top_k = data.draw(st.integers(1, max(1, experts // 2)))
    path = written(
        tmp_path, npz_dump(random_routes(tokens, layers, experts, top_k, seed=seed), {"num_experts": experts})
    )
    verdict = judge(path, UserMetadata(), tmp_path)
    assert verdict.refusal is None or verdict.refusal.check in ("no constant layer", "layers differ"), verdict.refusal


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, 39), st.integers(1, 20), st.sampled_from([-1, 0, 1, 15, 16, 17, 255])
        ),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_is_wrong_every_check_has_one_verdict_in_order(tmp_path, faults):
    array = np.array(random_routes(40, 4, 16, 2), dtype=np.int16).transpose(1, 0, 2)
    for layer, begin, length, value in faults:
        array[layer, begin : begin + length] = (value, value + 1) if value % 2 else value
    verdict = judge(written(tmp_path, npz(array, {"num_experts": 16})), UserMetadata(), tmp_path)
    assert [check.name for check in verdict.checks] == NAMES
    assert (verdict.metadata is None) == (verdict.refusal is not None) == (verdict.outcome == "refuse")
    if verdict.refusal is not None:
        assert "\n" not in str(verdict.refusal)
        assert verdict.refusal.check in NAMES


# What an attack got past the checks


def test_a_fused_shared_expert_is_refused_though_nobody_says_how_many_experts_there_are(capsys, tmp_path):
    routes = random_routes(60, 4, 32, 4)
    fused = [[[*ids, 32] for ids in token] for token in routes]
    name, line = refused(capsys, tmp_path, tok_layers_dump(fused))
    assert name == "shared experts apart"
    assert "--strip-shared-experts 1 --meta num_experts=32" in line
    one = taken(tmp_path, tok_layers_dump(fused), shared_experts=1, num_experts=32)
    assert one.metadata.top_k_observed == 4
    # One that is not the highest is some router's favourite, or an expert that another engine numbers first.
    first = [[[0, *(expert + 1 for expert in ids)] for ids in token] for token in routes]
    assert outcome(taken(tmp_path, tok_layers_dump(first)), "shared experts apart") == "warn"
    assert outcome(taken(tmp_path, tok_layers_dump(routes)), "shared experts apart") == "ok"


def test_swapped_axes_are_refused(capsys, tmp_path):
    routes = random_routes(300, 4, 32, 4)
    swapped = [[routes[token][layer] for token in range(300)] for layer in range(4)]
    name, line = refused(capsys, tmp_path, npz_dump(swapped))
    assert name == "every pass has every layer"
    assert "300 layers, at most 256 are believed; are the axes of tokens and layers swapped" in line


@pytest.mark.parametrize("lengths", ["40,1", "70", "20,20,20"])
def test_lengths_of_other_requests_are_refused(capsys, tmp_path, lengths):
    name, line = refused(capsys, tmp_path, npz_dump(random_routes(60, 3, 16, 4)), "--sequence-lengths", lengths)
    assert name == "no padding rows"
    assert "say the tokens of each request" in line


def test_what_is_said_twice_must_be_the_same(capsys, tmp_path):
    (tmp_path / "dump.bin").write_bytes(npz_dump(random_routes(60, 3, 16, 4)))
    for said in (("--meta", "num_experts=16", "--meta", "num_experts=17"), ("--layer-map", "0-2", "--meta",
                                                                            "moe_layer_ids=[3,4,5]")):  # fmt: skip
        status, _, err = expert_tier(capsys, "inspect", tmp_path / "dump.bin", *said)
        assert status == 2
        assert "is said twice" in err
    status, _, err = expert_tier(capsys, "inspect", tmp_path / "dump.bin", "--layer-map", "3,2,1")
    assert (status, err.splitlines()) == (2, [err.strip()])
    assert "--layer-map: '3,2,1', wanted layer numbers of at most 65535 that ascend without repeats" in err
    said = ("--meta", "moe_layer_ids=[3,2,1]")
    status, _, err = expert_tier(capsys, "inspect", tmp_path / "dump.bin", *said)
    assert (status, err.splitlines()) == (2, [err.strip()])
    assert "--meta moe_layer_ids: moe_layer_ids must ascend without repeats" in err


def test_what_a_terminal_would_obey_is_printed_escaped(capsys, tmp_path):
    for name in ("\x1b[2J.npz", "\u202egnp.npz"):
        (tmp_path / name).write_bytes(npz_dump(random_routes(60, 3, 16, 4), {"model": "a\x1b[31m\nb"}))
        status, out, err = expert_tier(capsys, "inspect", tmp_path / name)
        assert (status, err) == (0, "")
        assert "a\\x1b[31m\\nb" in out
        assert all(line.isprintable() for line in out.splitlines())
        (tmp_path / name).write_bytes(b"{")
        err = expert_tier(capsys, "inspect", tmp_path / name)[2]
        assert err.strip().isprintable()
