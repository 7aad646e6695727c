"""What stands twice in a dump is refused with both places; what was run twice, or looks alike in part, is not."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dumps import repeats
from pipeline.dumps.blocks import MalformedDump, ParsedDump, RefusedDump, RowBlock
from pipeline.ingest import Ingested, ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.raw_dumps import npz_dump, random_routes, route_csv_dump, speculative_dump, tok_layers_dump
from tests.raw_hooks import beyond_csv, exp_ids_dump, lines, parquet_of, routing_selection_dump, strict_records

ROUTES = random_routes(40, 3, 16, 4)
OTHERS = random_routes(40, 3, 16, 4, seed=1)


def ingested(folder: Path, content: bytes, **said: object) -> Ingested:
    (folder / "dump").write_bytes(content)
    return ingest(folder / "dump", DataFolder(folder / "data"), UserMetadata(**said))


def refused(folder: Path, content: bytes, **said: object) -> str:
    (folder / "dump").write_bytes(content)
    data = DataFolder(folder / "without")
    with pytest.raises((MalformedDump, RefusedDump)) as caught:
        ingest(folder / "dump", data, UserMetadata(**said))
    assert not list(data.traces.glob("*.parquet"))
    message = str(caught.value)
    assert message.startswith(str(folder / "dump"))
    assert "\n" not in message
    return message


# All steps, several times over


def blocks_of(steps: list[list[tuple[int, list[int]]]], rows_per_block: int) -> list[RowBlock]:
    """Blocks of steps, each a list of (layer, ids); at least so many rows each, and whole steps."""
    blocks: list[RowBlock] = []
    held: list[tuple[int, int, list[int]]] = []
    for number, rows in enumerate(steps):
        held += [(number, layer, ids) for layer, ids in rows]
        if len(held) >= rows_per_block or number == len(steps) - 1:
            count = len(held)
            blocks.append(
                RowBlock(
                    step=np.array([row[0] for row in held], dtype=np.int64),
                    pass_in_step=np.zeros(count, dtype=np.int32),
                    layer=np.array([row[1] for row in held], dtype=np.int32),
                    request=np.zeros(count, dtype=np.int64),
                    position=None,
                    phase=np.zeros(count, dtype=np.int8),
                    expert_ids=np.array([row[2] for row in held], dtype=np.int32),
                )
            )
            held = []
    return blocks


def watched(steps: list[list[tuple[int, list[int]]]], rows_per_block: int = 7) -> int:
    """Rows that come through."""
    parsed = ParsedDump("x", iter(blocks_of(steps, rows_per_block)), 2)
    return sum(block.rows for block in repeats.watched(Path("dump"), parsed))


@given(
    part=st.lists(st.lists(st.tuples(st.integers(0, 2), st.permutations(range(4)))
                           .map(lambda row: (row[0], row[1][:2])), min_size=1, max_size=4), min_size=1, max_size=8),
    copies=st.integers(1, 5), rest=st.integers(0, 3), rows_per_block=st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_exactly_the_dumps_that_are_a_part_of_them_several_times_over_are_refused(part, copies, rest, rows_per_block):
    steps = part * copies + part[:rest]
    firsts: dict[int, list[int]] = {}
    varies = any(firsts.setdefault(layer, ids) != ids for step in steps for layer, ids in step)
    selections = 2 * sum(map(len, steps))
    wanted = next(
        (
            size
            for size in range(1, len(steps) // 2 + 1)
            if len(steps) % size == 0
            and steps == steps[:size] * (len(steps) // size)
            and selections // (len(steps) // size) >= repeats.TELLING_SELECTIONS
        ),
        None,
    )
    if wanted is None or not varies:
        assert watched(steps, rows_per_block) == sum(map(len, steps))
        return
    with pytest.raises(MalformedDump, match=f"first {wanted} of them {len(steps) // wanted} times over"):
        watched(steps, rows_per_block)


@pytest.mark.parametrize(("ratio", "terms"), [(3, 1), (3, 2), (5, 7), (2**63 + 1, 1000), (1, 64)])
def test_the_sum_of_powers_is_that_of_its_terms(ratio, terms):
    assert repeats._geometric(ratio, terms) == sum(pow(ratio, power, 2**64) for power in range(terms)) % 2**64


UNNUMBERED = {
    "npz_experts": npz_dump(ROUTES * 2),
    "jsonl_tok_layers": tok_layers_dump(ROUTES) * 2,
    "exp_ids_jsonl": exp_ids_dump([ROUTES[:30], ROUTES[30:]]) * 2,
    "moe_beyond_csv": beyond_csv(ROUTES, order="token") + beyond_csv(ROUTES, order="token").split(b"\n", 1)[1],
    "route_parquet": parquet_of(
        [(name, layer, place, token[layer])
         for _ in range(2) for name, routes in (("a", ROUTES), ("b", OTHERS))
         for place, token in enumerate(routes) for layer in range(3)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNNUMBERED)
def test_a_file_joined_with_itself_is_refused(tmp_path, name):
    message = refused(tmp_path, UNNUMBERED[name], num_experts=16)
    steps = 80 if name == "route_parquet" else 40
    assert f"{2 * steps} steps, which are the first {steps} of them 2 times over" in message
    assert "leave the copies out" in message


def test_a_file_that_repeats_in_part_is_no_copy(tmp_path):
    one = ingested(tmp_path, tok_layers_dump(ROUTES) * 2 + tok_layers_dump(OTHERS[:1]), num_experts=16)
    assert one.metadata.counts.steps == 81


# Named requests


def test_a_turn_that_stands_twice_is_refused_by_both_places(tmp_path):
    one = route_csv_dump(ROUTES[:10], ROUTES[10:], experts=16)
    two = route_csv_dump(OTHERS[:10], OTHERS[10:], experts=16, turn=1, preamble=False).split(b"\n", 1)[1]
    body = one[one.index(b"\n0,") + 1 :]
    assert ingested(tmp_path, one + two).metadata.counts.requests == 2
    for content in (one + body, one + two + body, one + body + two):
        message = refused(tmp_path, content)
        assert (
            "request 0 (numbered as in the trace) stands twice with the same positions and routes, 120 rows" in message
        )
        assert "from step 0 on and again from step" in message


def test_turns_with_equal_routes_are_two_turns(tmp_path):
    one = route_csv_dump(ROUTES[:10], ROUTES[10:], experts=16)
    again = route_csv_dump(ROUTES[:10], ROUTES[10:], experts=16, turn=1, preamble=False).split(b"\n", 1)[1]
    assert ingested(tmp_path, one + again).metadata.counts.requests == 2


def test_requests_of_strict_records_that_stand_twice_are_refused(tmp_path):
    one = strict_records(ROUTES[:10], ROUTES[10:], layers=[0, 1, 2])
    two = strict_records(OTHERS[:10], OTHERS[10:], request="req-002", layers=[0, 1, 2])
    assert ingested(tmp_path, lines(one + two), num_experts=16).metadata.counts.requests == 2
    message = refused(tmp_path, lines(one + two + one + two), num_experts=16)
    assert "request 0 (numbered as in the trace) stands twice" in message
    assert "from step 0 on and again from step 62 on" in message


def test_a_context_that_stands_twice_among_others_is_known_by_its_positions(tmp_path):
    calls = [
        (name, layer, place, token[layer])
        for name, routes in (("a", ROUTES), ("b", OTHERS))
        for place, token in enumerate(routes)
        for layer in range(3)
    ]
    assert ingested(tmp_path, parquet_of(calls), num_experts=16).metadata.counts.requests == 2


# Numbers in other spellings, and values that mean nothing


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("expert", "0x0f", "expert is '0x0f', wanted a whole number"),
        ("expert", "0X1", "expert is '0X1', wanted a whole number"),
        ("expert", "1f", "expert is '1f', wanted a whole number"),
        ("step", "0x3", "step is '0x3', wanted a whole number"),
        ("residency", "9", "residency is 9, wanted 0 (miss), 1 (hit), 2 (prefetch hit) or -1 (unknown)"),
        ("residency", "-2", "residency is -2, wanted"),
        ("weight", "-1", "weight is -1, wanted 0 or more, or nan where it is unknown"),
    ],
)
@pytest.mark.parametrize("more", ["", ",host"])
def test_route_csv_refuses_what_is_no_number_by_column_and_line(tmp_path, column, value, expected, more):
    rows = route_csv_dump(ROUTES[:10], ROUTES[10:], experts=16).decode().split("\n")
    header = next(place for place, row in enumerate(rows) if row.startswith("turn,"))
    names = rows[header].split(",")
    fields = rows[header + 8].split(",")
    fields[names.index(column)] = value
    rows[header + 8] = ",".join(fields)
    rows = [row + (more if place == header else ",x1" if more and place > header and row else "")
            for place, row in enumerate(rows)]  # fmt: skip
    assert f"line {header + 9}: {expected}" in refused(tmp_path, "\n".join(rows).encode())


def test_a_column_of_texts_beside_the_known_ones_may_hold_an_x(tmp_path):
    rows = route_csv_dump(ROUTES[:10], ROUTES[10:], experts=16).decode().split("\n")
    header = next(place for place, row in enumerate(rows) if row.startswith("turn,"))
    rows = [row + (",host" if place == header else ",x1" if place > header and row else "")
            for place, row in enumerate(rows)]  # fmt: skip
    assert ingested(tmp_path, "\n".join(rows).encode()).metadata.counts.requests == 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"\n1,1,", b"\n0x1,1,", "Layer ID is '0x1', wanted a whole number"),
        (b"\n1,1,", b"\n1,0x1,", "Batch Number is '0x1', wanted a whole number"),
        (b'"[', b'"[0x', "Activated Expert IDs is '[0x"),
    ],
)
def test_moe_beyond_refuses_hexadecimal_numbers(tmp_path, old, new, expected):
    assert expected in refused(tmp_path, beyond_csv(ROUTES).replace(old, new, 1), num_experts=16)


@pytest.mark.parametrize("probability", [-1, 1.5, float("inf")])
def test_what_is_no_probability_is_located(tmp_path, probability):
    content = routing_selection_dump(ROUTES[:10], ROUTES[10:], experts=16, top_k=4)
    rows = content.split(b"\n")
    record = json.loads(rows[7])
    record["selected_probabilities"][2] = probability
    rows[7] = json.dumps(record).encode()
    message = refused(tmp_path, b"\n".join(rows))
    assert f"line 8: selected_probabilities holds {probability!r}, wanted probabilities of 0 to 1" in message


# Passes of an iteration


def records_of(content: bytes) -> list[dict]:
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_record_that_stands_twice_is_no_fallback(tmp_path, top_k):
    content, _ = speculative_dump(4, 32, top_k, ["normal", "accept"] * 10)
    records = records_of(content)
    place = next(n for n, record in enumerate(records) if (record["iteration"], record["layer"]) == (4, 2))
    twice = [*records[: place + 1], *records[place:]]
    message = refused(tmp_path, lines(twice))
    assert (
        "iteration 4, layer 2: the record stands twice with the same ids (1 such records in this iteration)" in message
    )


def test_a_pass_that_stands_twice_is_no_fallback(tmp_path):
    content, _ = speculative_dump(4, 32, 4, ["normal", "accept"] * 10)
    records = records_of(content)
    again = [record for record in records if record["iteration"] == 6]
    place = records.index(again[-1]) + 1
    message = refused(tmp_path, lines(records[:place] + again + records[place:]))
    assert "iteration 6, layer 0: the record stands twice with the same ids (4 such records" in message


def test_a_fallback_with_routes_of_its_own_is_one(tmp_path):
    content, _ = speculative_dump(4, 32, 4, ["normal", "repeated", "rejected", "rejected_by_layer"] * 5)
    assert ingested(tmp_path, content).metadata.counts.steps == 20


@pytest.mark.parametrize("iterations", [1, 2, 9])
def test_a_list_of_the_most_used_experts_is_no_pass(tmp_path, iterations):
    hot = random_routes(1, 6, 64, 8)[0]
    records = [
        {"iteration": number, "layer": layer, "experts": sorted(ids)}
        for number in range(iterations)
        for layer, ids in enumerate(hot)
    ]
    message = refused(tmp_path, lines(records))
    assert "most used experts" in message
    assert ("one iteration alone, a list of experts for each of 6 layers" in message) == (iterations == 1)


def test_a_pair_of_tokens_with_the_same_list_is_one_too(tmp_path):
    hot = random_routes(1, 6, 64, 8)[0]
    records = [
        {"iteration": number, "layer": layer, "experts": ids * 2}
        for number in range(4)
        for layer, ids in enumerate(hot)
    ]
    assert "the same experts in every record of 4 iterations" in refused(tmp_path, lines(records), top_k_model=8)
