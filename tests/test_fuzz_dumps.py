"""Every parser on damaged dumps: a refusal or a sound trace, soon, and nothing else. Longer: make bench WHAT=fuzz."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.dumps import sniff
from pipeline.dumps.blocks import DumpFile
from pipeline.ingest import ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from tests.mutations import KINDS, PAYLOADS, SECONDS, Edit, answer, damaged, seeds, written

SEEDS = seeds()
PARTS = st.floats(0, 1, exclude_max=True)
EDITS = st.lists(
    st.tuples(st.sampled_from(KINDS), PARTS, PARTS, st.sampled_from(PAYLOADS) | st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)


IN_PROCESS = {"torch_file"}
"""Each of its files is loaded in a process of its own; damaged trees are tried without one where they are parsed."""


def test_every_layout_has_a_seed():
    assert {layout.name for layout in sniff.LAYOUTS} == set(SEEDS) | IN_PROCESS


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_is_claimed_by_its_layout(tmp_path, name):
    path = written(SEEDS[name], tmp_path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    claimed = []
    for file in files:
        with DumpFile(file) as dump:
            sample = sniff.look(dump)
        claimed += [layout.name for layout in sniff.LAYOUTS if layout.claims(sample)][:1]
    assert claimed[:1] == [name]


REFUSED = {"vllm_expert_stats"}
"""Layouts that exist to be refused by name."""


@pytest.mark.parametrize("name", sorted(set(SEEDS) - REFUSED))
def test_a_seed_becomes_a_trace(tmp_path, name):
    one = ingest(written(SEEDS[name], tmp_path), DataFolder(tmp_path / "data"), UserMetadata())
    assert one.metadata.source.format == name
    assert one.metadata.counts.rows > 20


@pytest.mark.parametrize("name", SEEDS)
@given(edits=EDITS, inside=st.booleans(), file=st.integers(0, 63))
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_a_damaged_dump_is_refused_or_gives_a_sound_trace(name: str, edits: list[Edit], inside: bool, file: int):
    # The seed itself first: what numba compiles at first use is not the parser's time.
    _warmed(name)
    started = time.process_time()
    answer(damaged(SEEDS[name], edits, inside=inside, file=file))
    assert time.process_time() - started < SECONDS


_WARM: set[str] = set()


def _warmed(name: str) -> None:
    if name not in _WARM:
        _WARM.add(name)
        answer(SEEDS[name])


def test_the_judge_of_the_fuzz_sees_a_bug(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("layer")

    monkeypatch.setattr("tests.mutations.ingest", broken)
    with pytest.raises(KeyError):
        answer(b"anything")
