"""A model decoded with its experts through the tier: the same tokens whoever owns them, routes that replay alike."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from pipeline.cli import main as expert_tier
from replayer.decode import DecodeRun, decode, waits_ns
from replayer.decoder import Decoded, Decoder, load_decoder
from replayer.pool import Pool, map_pool
from replayer.request import UnusableReplay
from replayer.trace import read_trace, walk
from schemas.documents import Captured, DecodedRun, TokenIdentity
from tests.command_lines import replayer
from tests.replays import ENVIRONMENT, MIB, ROOT, WAIT_S, children, failed, needs_memory_groups, replayed, request

SAMPLE = ROOT / "pipeline" / "sample"
PROMPT = b"import os\n\ndef main():\n    "
TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products in two threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_decoder(SAMPLE)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return map_pool(SAMPLE, tmp_path_factory.mktemp("decode") / "pool", allow_unsuitable=True)


@pytest.fixture(scope="module")
def plain(decoder: Decoder) -> Decoded:
    """Decoded with experts as the checkpoint's own library reads them."""
    # Closed again: pages of a file that somebody has mapped cannot be dropped before a run.
    with safe_open(SAMPLE / "model.safetensors", framework="pt") as file:
        return decoder.decode(list(PROMPT), TOKENS, InMemory(file))


class InMemory:
    def __init__(self, file: Any) -> None:
        self._file = file

    def serve(self, layer_id: int, expert_ids: Sequence[int]) -> list[Mapping[str, torch.Tensor]]:
        parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        return [
            {
                part: self._file.get_tensor(f"model.layers.{layer_id}.mlp.experts.{expert_id}.{part}").clone()
                for part in parts
            }
            for expert_id in expert_ids
        ]


def decoded(decoder: Decoder, pool: Pool, tokens: int = TOKENS, **said: Any) -> DecodeRun:
    more = {name: said.pop(name) for name in ("prefill_chunk", "lookahead", "slot_memory_bytes") if name in said}
    asked = request(**{"warm_pass": False, "allow_unsuitable": True, **said})
    return decode(decoder, pool, asked, list(PROMPT), tokens, wait_s=WAIT_S, **more)


WALL = {"mechanism": "cgroup", "capacity_bytes": 2 * MIB}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"warm_pass": True},
        {"owner": "page_cache_mmap"},
        {"owner": "restream"},
        WALL,
        {"owner": "user_cache", "policy": "sieve", "mechanism": "cgroup", "capacity_bytes": 8 * MIB},
        {"prefill_chunk": 5},
        {"slot_memory_bytes": 3 * MIB // 4, "lookahead": True},
    ],
    ids=str,
)
def test_tokens_are_the_same_whoever_owns_the_experts(
    decoder: Decoder, pool: Pool, plain: Decoded, said: dict[str, Any]
) -> None:
    if "mechanism" in said:
        needs_memory_groups()
    one = decoded(decoder, pool, **said)
    assert one.decoded.token_ids == plain.token_ids
    assert one.decoded.sha256 == plain.sha256
    assert one.warm_sha256 == (plain.sha256 if said.get("warm_pass") else None)
    assert failed(one.run) == set()
    assert [event.layer_id for event in one.decoded.passes[-1].events] == list(range(8))
    assert one.run.run["accesses"] == sum(len(event.asked) for each in one.decoded.passes for event in each.events)
    assert 0 < one.decode_wait_ns < one.decode_ns
    assert 0 < one.prefill_wait_ns < one.prefill_ns
    assert {row["phase"] for row in one.layers} == {"prefill", "decode"}
    assert sum(row["accesses"] for row in one.layers) == one.run.run["accesses"]
    whole = sum(row["wait_ns"] + row["compute_ns"] + row["lookahead_ns"] for row in one.layers)
    assert whole <= one.prefill_ns + one.decode_ns
    if said.get("owner") == "restream":
        assert one.run.run["device_bytes"] > one.run.run["demand_bytes"]


def test_captured_routes_replay_the_accesses_that_the_decode_made(
    decoder: Decoder, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_bytes(PROMPT)
    status, out, err = replayer(
        capsys, "decode", "--model", SAMPLE, "--prompt", tmp_path / "prompt.txt", "--tokens", TOKENS, "--owner",
        "restream", "--cold", "--lookahead", "--allow-unsuitable", "--wait", WAIT_S, "--out", tmp_path / "routes.jsonl",
        "--json",
    )  # fmt: skip
    assert (status, err) == (0, "")
    document = DecodedRun.model_validate_json(out)
    assert document.text.encode()[:TOKENS] == bytes(document.token_ids)
    assert expert_tier(["ingest", str(tmp_path / "routes.jsonl"), "--data", str(tmp_path / "data"), "--json"]) == 0
    (ingested,) = json.loads(capsys.readouterr().out)
    trace = read_trace(Path(ingested["path"]))
    # Decoded once more, since the command keeps no events: greedy tokens are the same, and so are the routes.
    again = decoded(decoder, pool, owner="restream", lookahead=True)
    asked = [
        decoder_first + expert
        for each in again.decoded.passes
        for event in each.events
        for decoder_first in [int(pool.layer_first_object[event.layer_id])]
        for expert in event.asked
    ]
    assert walk(trace, 0, TOKENS, order="router").objects.tolist() == asked
    assert trace.metadata.counts.rows_by_phase["prefill"] == 8 * len(PROMPT)
    assert trace.metadata.counts.rows_by_phase["decode"] == 8 * (TOKENS - 1)
    same = replayed(trace, pool, owner="restream", warm_pass=False, allow_unsuitable=True)
    for name in ("consumed_digest", "accesses", "demand_bytes", "device_bytes"):
        assert same.run[name] == getattr(document.run, name) == again.run.run[name], name
    table = pq.read_table(ingested["path"], columns=["layer_id", "predicted_expert_ids", "token_position"])
    predicted = table["predicted_expert_ids"].to_pylist()
    assert all(
        (ids is None) == (layer == 0) for ids, layer in zip(predicted, table["layer_id"].to_pylist(), strict=True)
    )
    assert {len(ids) for ids in predicted if ids is not None} == {4}
    assert sorted(set(table["token_position"].to_pylist())) == list(range(len(PROMPT) + TOKENS - 1))


def test_what_needs_the_future_or_another_model_is_refused(decoder: Decoder, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(UnusableReplay, match="knows the future"):
        decoded(decoder, pool, owner="user_cache", policy="belady_bypass", capacity_bytes=MIB)
    with pytest.raises(UnusableReplay, match="still to come"):
        decoded(decoder, pool, owner="arena", capacity_bytes=MIB)


def test_a_wait_does_not_hold_the_loops_own_counting() -> None:
    step, request_ns, served_ns = np.array([0, 0, 1, 1]), np.array([10, 30, 50, 80]), np.array([15, 40, 70, 81])
    # The first step's residency was counted until 65, while the third event was asked for at 50.
    assert waits_ns(step, request_ns, served_ns, np.array([65, 90])).tolist() == [5, 10, 5, 1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--tokens", "1"], 2, "wanted 2 to"),
        (["--tokens", "2000"], 1, "positions"),
        (["--tokens", "8", "--prompt", "missing.txt"], 2, "2 prompts, wanted one"),
        (["--tokens", "8", "--model", "missing"], 1, "missing"),
        (["--tokens", "8", "--prefill-chunk", "0"], 2, "--prefill-chunk 0"),
        (["--tokens", "8", "--out", "missing/routes.jsonl"], 2, "its folder does not exist"),
        (["--tokens", "8", "--out", "prompt.txt"], 2, "would be lost"),
        (["--tokens", "8", "--owner", "arena", "--capacity", "1MiB"], 2, "still to come"),
        (["--tokens", "8", "--threads", "0"], 2, "--threads 0"),
    ],
)
def test_a_call_that_cannot_be_made_gets_one_line(
    words: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_bytes(PROMPT)
    start = ["decode", "--model", str(SAMPLE), "--prompt", "prompt.txt", "--allow-unsuitable", "--wait", str(WAIT_S)]
    status, out, err = replayer(capsys, *start, *words)
    assert (status, out) == (code, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompt.txt"]
    assert (tmp_path / "prompt.txt").read_bytes() == PROMPT


def test_a_killed_measuring_process_ends_a_decode_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(PROMPT)
    command = [
        sys.executable, "-m", "replayer", "decode", "--model", str(SAMPLE), "--prompt", str(tmp_path / "prompt.txt"),
        "--tokens", "90", "--allow-unsuitable", "--wait", str(WAIT_S),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + WAIT_S
    while not (started := [pid for pid, words in children(process.pid).items() if "replayer.measure" in words]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(1.5)
    os.kill(started[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert "killed" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_decode_in_one_line_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(PROMPT)
    command = [
        sys.executable, "-m", "replayer", "decode", "--model", str(SAMPLE), "--prompt", str(tmp_path / "prompt.txt"),
        "--tokens", "90", "--allow-unsuitable", "--wait", str(WAIT_S), "--out", str(tmp_path / "routes.jsonl"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + WAIT_S
    while not any("replayer.measure" in words for words in children(process.pid).values()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.3)
    started = [pid for pid, words in children(process.pid).items() if "replayer.measure" in words]
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert len(err.splitlines()) == 1
    # torch makes an empty cache folder of its own.
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]
    assert left == ["prompt.txt"]
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_capture_goes_from_a_model_to_the_report(
    tmp_path: Path, own_dagster_home: None, small_reconstruction: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("one", PROMPT), ("two", b"class Reader:\n")):
        (tmp_path / f"{name}.txt").write_bytes(text)
    prompts = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]
    call = [
        "capture",
        str(SAMPLE),
        *prompts,
        "--tokens",
        "12",
        "--lookahead",
        "--data",
        str(tmp_path / "data"),
        "--json",
    ]
    assert expert_tier(call) == 0
    document = Captured.model_validate_json(capsys.readouterr().out)
    assert [one.steps for one in document.captured] == [12, 12]
    assert [one.rows for one in document.captured] == [8 * (len(PROMPT) + 11), 8 * (len(b"class Reader:\n") + 11)]
    assert Path(document.report).is_file()
    recall = pl.concat(map(pl.read_parquet, (tmp_path / "data" / "results" / "lookahead_recall").rglob("*.parquet")))
    recorded = recall.filter((pl.col("predictor") == "recorded") & pl.col("layer_id").is_null())
    assert sorted(recorded["trace_id"].unique()) == sorted(one.trace_id for one in document.captured)
    # A layer's input is nearly that of the layer before, so its router is guessed far better than by chance.
    assert recorded["recall_covered"].min() > 2 * 4 / 32


def test_a_decode_says_where_its_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_bytes(PROMPT)
    status, out, err = replayer(
        capsys, "decode", "--model", SAMPLE, "--prompt", tmp_path / "one.txt", "--tokens", 8, "--cold", "--by-layer",
        "--allow-unsuitable", "--wait", WAIT_S,
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("    layer ")] == list("01234567")
    assert "SHA-256 of the tokens" in out


@pytest.mark.parametrize(("words", "code"), [(["--tokens", "1"], 2), (["--tokens", "900"], 1)])
def test_a_capture_that_cannot_be_made_gets_one_line_and_leaves_nothing(
    words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_bytes(PROMPT)
    assert (
        expert_tier(["capture", str(SAMPLE), str(tmp_path / "one.txt"), *words, "--data", str(tmp_path / "d")]) == code
    )
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_pairs_of_owners_decode_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_bytes(PROMPT)
    status, out, err = replayer(
        capsys, "decode", "--model", SAMPLE, "--prompt", tmp_path / "one.txt", "--tokens", 8, "--cold", "--json",
        "--experiment", "token-identity", "--allow-unsuitable", "--wait", WAIT_S,
    )  # fmt: skip
    assert (status, err) == (0, "")
    document = TokenIdentity.model_validate_json(out)
    assert [pair.order[0] for pair in document.pairs[:2]] == ["page_cache", "restream"]
    assert {pair.void for pair in document.pairs} == {None}
    assert {arm.token_sha256 for pair in document.pairs for arm in pair.arms} == {
        document.pairs[0].arms[0].token_sha256
    }
    assert document.by_prompt[0].identical_pairs == document.by_prompt[0].pairs == 3
