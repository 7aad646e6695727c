"""Broken and misleading dumps: one clear line that says where and what to do, and nothing left in the data folder."""

import gzip
import io
import json
import os
import pickle  # noqa: TID251 - to prove that it is never loaded
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.dumps.blocks import DumpFile, MalformedDump, RefusedDump
from pipeline.ingest import WrongMetadata, ingest, read_user_metadata
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.raw_dumps import npy_bytes, npz_dump, random_routes, route_csv_dump, speculative_dump, tok_layers_dump

TRACES = Path(__file__).parents[2] / "shared" / "traces"
ROUTES = random_routes(60, 3, 16, 4)


def refusal(folder: Path, content: bytes, **said: object) -> str:
    """The message of the refused ingest; the data folder must hold nothing afterwards."""
    path = folder / "dump.bin"
    path.write_bytes(content)
    data = DataFolder(folder / "data")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(path, data, UserMetadata(**said))
    left = [entry.name for entry in data.traces.iterdir()] if data.traces.is_dir() else []
    assert left in ([], [".lock"]), left
    message = str(caught.value)
    assert message.startswith(str(path)), message
    assert "\n" not in message
    return message


def csv_text(routes=ROUTES, experts: int = 16) -> str:
    return route_csv_dump([], routes, experts=experts).decode()


def test_empty_file(tmp_path):
    assert "the file is empty" in refusal(tmp_path, b"")


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MalformedDump, match="not a regular file"):
        DumpFile(tmp_path / "pipe")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("content", [tok_layers_dump(ROUTES), route_csv_dump([], ROUTES, experts=16)])
def test_truncated_gzip(tmp_path, content, share):
    packed = gzip.compress(content)
    assert "truncated" in refusal(tmp_path, packed[: int(len(packed) * share)])


def test_damaged_gzip(tmp_path):
    packed = bytearray(gzip.compress(tok_layers_dump(ROUTES)))
    packed[len(packed) // 2] ^= 0xFF
    assert "gzip data" in refusal(tmp_path, bytes(packed))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.99])
def test_truncated_npz(tmp_path, share):
    content = npz_dump(ROUTES, {"model": "m"})
    assert "truncated" in refusal(tmp_path, content[: int(len(content) * share)])


def test_damaged_npz(tmp_path):
    content = bytearray(npz_dump(ROUTES, compress=zipfile.ZIP_STORED))
    content[400] ^= 0x01
    assert "damaged" in refusal(tmp_path, bytes(content))


def test_npz_whose_header_promises_more_than_it_holds(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("experts.npy", npy_bytes((100000, 100000, 8), "<i2", b"\0" * 64))
    assert "holds at most" in refusal(tmp_path, buffer.getvalue())


def test_truncated_jsonl_names_the_last_line(tmp_path):
    content = tok_layers_dump(ROUTES)
    message = refusal(tmp_path, content[: len(content) - 25])
    assert "line 60" in message
    assert "truncated" in message


def test_truncated_csv_in_the_middle_of_a_line(tmp_path):
    content = csv_text().encode()
    message = refusal(tmp_path, content[: len(content) - 8])
    assert "line 723" in message
    assert "truncated" in message


def test_truncated_csv_in_the_middle_of_a_token(tmp_path):
    lines = csv_text().splitlines()
    assert "3 of 4 slots: the dump is truncated" in refusal(tmp_path, ("\n".join(lines[:-1]) + "\n").encode())


def test_truncated_csv_in_the_middle_of_a_step(tmp_path):
    lines = csv_text().splitlines()
    message = refusal(tmp_path, ("\n".join(lines[:-4]) + "\n").encode())
    assert "step 59: layers [2] are missing" in message
    assert "it is the last step: the dump is truncated" in message


def test_truncated_csv_in_the_preamble(tmp_path):
    assert "ends in its preamble" in refusal(tmp_path, b"# route_trace v1\n# model=x n_layer=3\n")


def test_a_missing_line_in_the_middle_of_a_csv(tmp_path):
    lines = csv_text().splitlines()
    del lines[100]
    message = refusal(tmp_path, ("\n".join(lines) + "\n").encode())
    assert "line 100" in message or "line 99" in message
    assert "is a line missing" in message


def test_a_word_where_a_number_belongs_names_line_and_column(tmp_path):
    lines = csv_text().splitlines()
    lines[50] = "0,1,3,0,0,seven,0.5,0,0"
    message = refusal(tmp_path, ("\n".join(lines) + "\n").encode())
    assert "line 51: expert is 'seven', wanted a whole number" in message


@pytest.mark.parametrize("layout", ["npz", "jsonl", "csv"])
def test_an_id_beyond_the_experts_is_located(tmp_path, layout):
    routes = [[list(ids) for ids in token] for token in ROUTES]
    routes[41][1][2] = 16
    content = {
        "npz": npz_dump(routes, {"num_experts": 16}),
        "jsonl": tok_layers_dump(routes),
        "csv": route_csv_dump([], routes, experts=16),
    }[layout]
    message = refusal(tmp_path, content, num_experts=16)
    assert "step 41, layer 1" in message
    assert "expert id 16" in message
    assert "0..15" in message
    assert "expert_id_base=1" in message


def test_ids_counted_from_one_are_read_when_said(tmp_path):
    routes = [[[expert + 1 for expert in ids] for ids in token] for token in ROUTES]
    path = tmp_path / "one.npz"
    path.write_bytes(npz_dump(routes, {"num_experts": 16}))
    found = ingest(path, DataFolder(tmp_path / "data"), UserMetadata(expert_id_base=1))
    assert found.metadata.counts.selections == 60 * 3 * 4


def test_a_negative_id_is_not_an_expert(tmp_path):
    routes = [[list(ids) for ids in token] for token in ROUTES]
    routes[10][0][3] = -1
    assert "was not captured" in refusal(tmp_path, npz_dump(routes))


def test_a_repeated_id_in_a_row_is_located(tmp_path):
    routes = [[list(ids) for ids in token] for token in ROUTES]
    routes[33][2] = [5, 6, 5, 7]
    message = refusal(tmp_path, npz_dump(routes))
    assert "step 33, layer 2" in message
    assert "[5, 6, 5, 7]" in message


def test_a_layer_missing_half_way(tmp_path):
    lines = csv_text().splitlines()
    kept = [line for line in lines if not _is_layer(line, 1, from_step=30)]
    message = refusal(tmp_path, ("\n".join(kept) + "\n").encode())
    assert "step 30: layers [1] are missing" in message


def _is_layer(line: str, layer: int, from_step: int) -> bool:
    fields = line.split(",")
    return line[:1].isdigit() and int(fields[3]) == layer and int(fields[2]) >= from_step


def test_a_layer_list_missing_in_a_token_line(tmp_path):
    lines = tok_layers_dump(ROUTES).splitlines()
    token = json.loads(lines[20])
    del token["layers"][1]
    lines[20] = json.dumps(token).encode()
    message = refusal(tmp_path, b"\n".join(lines) + b"\n")
    assert "line 21" in message
    assert "a layer is missing" in message


def test_the_flat_copy_of_a_strided_view_is_refused(tmp_path):
    # Rows of the argsort, read with the wrong stride: every E ÷ k rows partition the experts.
    generator = np.random.default_rng(0)
    rows = np.concatenate([generator.permutation(64).reshape(8, 8) for _ in range(2 * 40)]).reshape(2, 320, 8)
    np.savez(tmp_path / "x.npz", experts=rows.astype(np.int16), meta=json.dumps({"num_experts": 64}))
    message = refusal(tmp_path, (tmp_path / "x.npz").read_bytes())
    assert "partition the 64 experts" in message
    assert "row stride" in message


def test_fifteen_garbage_rows_of_every_sixteen_are_seen(tmp_path):
    generator = np.random.default_rng(0)
    rows = np.stack([generator.choice(64, 8, replace=False) for _ in range(320)])
    for start in range(0, 320, 16):
        # 15 rows of the argsort, so one whole partition of 8 rows and a part of the next.
        rows[start + 1 : start + 16] = np.concatenate([generator.permutation(64).reshape(8, 8) for _ in range(2)])[:15]
    np.savez(tmp_path / "x.npz", experts=rows[None].astype(np.int16))
    assert "strided top-k view" in refusal(tmp_path, (tmp_path / "x.npz").read_bytes(), num_experts=64)


def test_uniform_random_routes_are_not_taken_for_a_strided_view(tmp_path):
    generator = np.random.default_rng(0)
    rows = np.argsort(generator.random((4, 3000, 64)), axis=2)[:, :, :8]
    np.savez(tmp_path / "x.npz", experts=rows.astype(np.int16))
    found = ingest(tmp_path / "x.npz", DataFolder(tmp_path / "data"), UserMetadata(num_experts=64))
    assert {check.name: check.outcome for check in found.metadata.checks}["no strided-view copy"] == "ok"


def test_few_experts_make_the_partition_test_say_nothing(tmp_path):
    generator = np.random.default_rng(0)
    rows = np.argsort(generator.random((2, 2000, 8)), axis=2)[:, :, :2]
    np.savez(tmp_path / "x.npz", experts=rows.astype(np.int16))
    found = ingest(tmp_path / "x.npz", DataFolder(tmp_path / "data"), UserMetadata(num_experts=8))
    assert {check.name: check.outcome for check in found.metadata.checks}["no strided-view copy"] == "not_applicable"


def test_an_all_zero_layer_is_an_unwritten_buffer(tmp_path):
    routes = [[list(ids) for ids in token] for token in ROUTES]
    for token in routes:
        token[1] = [0, 0, 0, 0]
    message = refusal(tmp_path, npz_dump(routes))
    assert "layer 1" in message
    assert "unwritten buffer, not expert 0" in message


def test_an_all_zero_layer_of_one_expert_per_token_is_refused_too(tmp_path):
    routes = random_routes(60, 3, 16, 1)
    for token in routes:
        token[2] = [0]
    assert "layers [2] choose the same experts in every row" in refusal(tmp_path, npz_dump(routes))


def test_a_dump_that_never_changes_is_refused(tmp_path):
    assert "choose the same experts in every row" in refusal(tmp_path, npz_dump([ROUTES[0]] * 60))


def test_two_identical_layers_are_refused_and_named(tmp_path):
    routes = [[list(ids) for ids in token] for token in ROUTES]
    for token in routes:
        token[2] = token[0]
    message = refusal(tmp_path, npz_dump(routes))
    assert "layers [0, 2] are equal over 60 rows" in message
    assert "tied_routing" in message


def test_tied_layers_are_accepted_when_said(tmp_path):
    routes = [[token[0], token[1], token[0]] for token in ROUTES]
    path = tmp_path / "tied.npz"
    path.write_bytes(npz_dump(routes))
    found = ingest(path, DataFolder(tmp_path / "data"), UserMetadata(tied_routing=True))
    assert any("layers [0, 2] are equal" in warning for warning in found.warnings)


@pytest.mark.parametrize("rows", [16, 64, 3000])
def test_a_leading_block_of_identical_rows_is_marked_warmup(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("pipeline.dumps.npz.ROWS_PER_BLOCK", 21)
    path = tmp_path / "warm.npz"
    path.write_bytes(npz_dump([random_routes(1, 3, 16, 4, seed=9)[0]] * rows + ROUTES))
    found = ingest(path, DataFolder(tmp_path / "data"), UserMetadata())
    assert found.metadata.counts.rows_by_phase["warmup"] == rows * 3
    assert any("marked warmup" in warning for warning in found.warnings)


def test_fifteen_identical_rows_are_not_yet_warmup(tmp_path):
    path = tmp_path / "warm.npz"
    path.write_bytes(npz_dump([random_routes(1, 3, 16, 4, seed=9)[0]] * 15 + ROUTES))
    found = ingest(path, DataFolder(tmp_path / "data"), UserMetadata())
    assert found.metadata.counts.rows_by_phase["warmup"] == 0


@pytest.mark.parametrize(
    "line",
    [
        {"example_index": 0, "routed": {"0": [[0, 9], [1, 1]]}},
        {"layer": 3, "expert_counts": [4, 5, 6]},
        {"step": 1, "counts": [[1, 2], [3, 4]]},
    ],
)
def test_counts_in_jsonl_are_no_trace(tmp_path, line):
    assert "counts per layer and expert" in refusal(tmp_path, json.dumps(line).encode() + b"\n")


def test_counts_in_csv_are_no_trace(tmp_path):
    assert "counts per layer and expert" in refusal(tmp_path, b"layer_id,expert_id,count\n0,0,12\n0,1,7\n")


def test_counts_in_npz_are_no_trace(tmp_path):
    np.savez(tmp_path / "counts.npz", experts=np.arange(64).reshape(4, 16))
    assert "counts per layer and expert" in refusal(tmp_path, (tmp_path / "counts.npz").read_bytes())
    np.savez(tmp_path / "named.npz", logical_count=np.arange(64).reshape(4, 16))
    assert "Counts per expert are no trace" in refusal(tmp_path, (tmp_path / "named.npz").read_bytes())


def test_a_git_lfs_pointer(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
    assert "git lfs pull" in refusal(tmp_path, pointer)


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_pickles_are_refused_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    array = np.array([_Bomb()], dtype=object)
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    np.savez(tmp_path / "b.npz", experts=array)
    torch_like = io.BytesIO()
    with zipfile.ZipFile(torch_like, "w") as archive:
        archive.writestr("dump/data.pkl", pickle.dumps(_Bomb()))
    for content in (
        (tmp_path / "a.npy").read_bytes(),
        (tmp_path / "b.npz").read_bytes(),
        pickle.dumps(_Bomb()),
        torch_like.getvalue(),
    ):
        assert "ickle" in refusal(tmp_path, content)
    assert not (tmp_path / "exploded").exists()


def test_an_object_array_as_meta_is_not_loaded(tmp_path):
    np.savez(tmp_path / "m.npz", experts=np.array(ROUTES, dtype=np.int16).transpose(1, 0, 2), meta=np.array([_Bomb()]))
    assert "pickled Python objects" in refusal(tmp_path, (tmp_path / "m.npz").read_bytes())


def test_printed_tensors_with_elided_axes_are_refused(tmp_path):
    text = b"ffn_moe_topk-0 = (i32) TOPK\n [ 12.0000, 45.0000, 3.0000, ..., 7.0000 ]\n"
    assert "shortened" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "content", [b"hello\n", b"\x00\x01\x02" * 100, b"a,b,c\n1,2,3\n", b'{"a": 1}\n', b"[1, 2]\n", b"\n\n\n"]
)
def test_unknown_content_is_refused_with_what_is_known(tmp_path, content):
    assert "nown" in refusal(tmp_path, content)


def test_a_dump_with_a_header_and_no_route(tmp_path):
    header = csv_text().splitlines()[:3]
    assert "no slot 0" in refusal(tmp_path, b"turn,phase,step,layer,slot,expert\n")
    assert "no route" in refusal(tmp_path, ("\n".join(header) + "\n").encode())


def test_a_line_of_many_megabytes_is_refused_in_bounded_memory(tmp_path):
    content = b'{"tok": 1, "layers": [[' + b"1, " * 6_000_000 + b"1]]}\n"
    assert "dump.bin" in refusal(tmp_path, content)


def test_deeply_nested_json_is_refused(tmp_path):
    assert refusal(tmp_path, b'{"tok": 1, "layers": ' + b"[" * 20000 + b"]" * 20000 + b"}\n")


def test_a_dump_that_grows_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "grows.jsonl"
    path.write_bytes(tok_layers_dump(ROUTES))
    from pipeline.dumps import jsonl

    original = jsonl._token_blocks

    def growing(*arguments):
        yield from original(*arguments)
        with path.open("ab") as file:
            file.write(b"\n")

    monkeypatch.setattr(jsonl, "_token_blocks", growing)
    data = DataFolder(tmp_path / "data")
    with pytest.raises(MalformedDump, match="changed while it was read"):
        ingest(path, data, UserMetadata())
    assert data.trace_ids() == []


def test_a_speculative_step_that_fits_no_rule_is_located(tmp_path):
    content, truth = speculative_dump(4, 32, 4, ["normal"] * 30)
    lines = content.splitlines()
    again = [line for line, record in zip(lines, truth, strict=True) if record["iteration"] == 12]
    where = max(place for place, record in enumerate(truth) if record["iteration"] == 12) + 1
    message = refusal(tmp_path, b"\n".join(lines[:where] + again + again + lines[where:]) + b"\n")
    assert "step 12" in message
    assert "fit no rule" in message


def test_a_record_of_a_third_width_is_located(tmp_path):
    content, _ = speculative_dump(4, 32, 4, ["normal"] * 30)
    lines = content.splitlines()
    lines[50] = json.dumps({"iteration": 12, "layer": 2, "experts": [1, 2, 3, 4, 5, 6]}).encode()
    assert "line 51: experts has 6 ids" in refusal(tmp_path, b"\n".join(lines) + b"\n")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("moe_layer_ids", [0, 1], "you say 2 moe_layer_ids, the dump has 3 layers"),
        ("num_experts", 32, "you say num_experts = 32, the dump says 16"),
        ("hidden_layers", 2, "layer 2, but the model has 2 layers"),
    ],
)
def test_what_the_user_says_must_fit_the_dump(tmp_path, key, value, expected):
    assert expected in refusal(tmp_path, npz_dump(ROUTES, {"num_experts": 16}), **{key: value})


def test_wrong_user_metadata_names_the_key_and_the_known_ones(tmp_path):
    with pytest.raises(WrongMetadata, match=r"modle.*known keys: model"):
        read_user_metadata(tmp_path / "a.npz", ["modle=x"])
    with pytest.raises(WrongMetadata, match="hidden_layers"):
        read_user_metadata(tmp_path / "a.npz", ["hidden_layers=many"])
    with pytest.raises(WrongMetadata, match="key=value"):
        read_user_metadata(tmp_path / "a.npz", ["model"])
    (tmp_path / "a.npz.toml").write_text("colour = 1\n")
    with pytest.raises(MalformedDump, match=r"a\.npz\.toml: colour: no such key"):
        read_user_metadata(tmp_path / "a.npz")
    (tmp_path / "a.npz.toml").write_text('model = "m"\n')
    with pytest.raises(WrongMetadata, match=r"^--meta colour: no such key"):
        read_user_metadata(tmp_path / "a.npz", ["colour=red"])
    (tmp_path / "a.npz.toml").write_text("model = \n")
    with pytest.raises(MalformedDump, match=r"a\.npz\.toml: no TOML"):
        read_user_metadata(tmp_path / "a.npz")


def test_expert_bytes_for_the_wrong_number_of_layers(tmp_path):
    assert "expert_bytes" in refusal(tmp_path, npz_dump(ROUTES), expert_bytes=[1, 2])


@pytest.mark.skipif(not TRACES.is_dir(), reason="published traces are not here")
@pytest.mark.parametrize("name", ["aggregate-olmoe-routed-sets.jsonl.gz", "README.md", "SHA256SUMS"])
def test_published_files_that_are_no_traces_are_refused(tmp_path, name):
    with pytest.raises(RefusedDump):
        ingest(TRACES / name, DataFolder(tmp_path), UserMetadata())


@pytest.mark.parametrize("field", ["request_id", "rank", "phase", "num_experts", "predicted", "topk_ids", "layer_id"])
def test_passes_of_several_requests_or_ranks_are_no_speculation(tmp_path, field):
    records = [
        {"step": step, "layer": layer, "experts": ids, field: 0}
        for step, token in enumerate(random_routes(20, 3, 16, 2))
        for layer, ids in enumerate(token)
    ]
    if field == "topk_ids":
        records = [{**one, "topk_ids": one["experts"]} for one in records]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    with pytest.raises(RefusedDump, match="JSONL of no known layout"):
        ingest(path, DataFolder(tmp_path / "data"), UserMetadata())


def token_lines(*fields: dict, tokens: int = 60) -> bytes:
    """Token lines, of which the n-th has the n-th fields beside its own; the last fields go on."""
    lines = []
    for number, line in enumerate(tok_layers_dump(ROUTES[:tokens]).splitlines()):
        lines.append(json.dumps({**json.loads(line), **fields[min(number, len(fields) - 1)]}))
    return ("\n".join(lines) + "\n").encode()


def test_the_number_of_experts_that_token_lines_say_is_held_against_ids_and_user(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(token_lines({"num_experts": 16, "req": "chat-1"}))
    one = ingest(tmp_path / "a.jsonl", DataFolder(tmp_path / "taken"), UserMetadata())
    assert (one.metadata.experts_per_layer[0], one.metadata.num_experts_source) == (16, "declared")
    content = token_lines({"num_experts": 8})
    assert "ids run 0..7" in refusal(tmp_path, content)
    assert "you say num_experts = 16, the dump says 8" in refusal(tmp_path, content, num_experts=16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (({"num_experts": 16}, {"num_experts": 32}), "line 2: num_experts is 32, but the first line says 16 experts"),
        (({}, {}, {"n_experts": 16}), "line 3: n_experts is 16, but the first line says no number of experts"),
        (({"num_experts": "16"},), "line 1: num_experts is '16', wanted a whole number of 1..65535"),
        (({"num_experts": 0},), "line 1: num_experts is '0', wanted a whole number of 1..65535"),
        (({"num_experts": 16}, {"num_experts": 16.5}), "line 2: num_experts is '16.5', wanted a whole number"),
        (({"req": 7}, {"req": 7}, {"req": 3}), "line 3: req is '3', before it was '7': tokens of several requests"),
        (({"req_id": "a"}, {"req_id": "b"}), "line 2: req_id is 'b', before it was 'a': tokens of several requests"),
        (({"request": "a"}, {"request": 1}), "line 2: request is '1', wanted a text or nothing"),
        (({"request_id": [1]},), "line 1: request_id is '[1]', wanted a whole number or nothing"),
    ],
)
def test_what_token_lines_say_beside_their_routes_is_not_passed_over(tmp_path, fields, words):
    assert words in refusal(tmp_path, token_lines(*fields))
