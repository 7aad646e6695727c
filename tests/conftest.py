"""Fixtures that several test modules share."""

import signal
from pathlib import Path

import pytest

from tests.raw_dumps import random_routes, route_csv_dump

# A shell leaves SIGINT ignored in what it starts in the background, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def own_dagster_home(tmp_path, monkeypatch):
    """Dagster keeps its history below the test's own folder and sends nothing anywhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))


@pytest.fixture
def small_reconstruction(monkeypatch):
    """The graph's reconstruction of the study's routes, at a size that takes no seconds."""
    from pipeline import assets
    from pipeline.inversion import SyntheticRouter, synthetic_trace

    small = SyntheticRouter(layers=2, steps=20, num_experts=32, top_k=4)
    monkeypatch.setattr(assets, "synthetic_trace", lambda: synthetic_trace(small))


@pytest.fixture
def dump(tmp_path) -> Path:
    """A small dump with prefill, decode and sizes."""
    path = tmp_path / "a.csv"
    prefill, decode = random_routes(4, 3, 16, 2), random_routes(40, 3, 16, 2, seed=1)
    path.write_bytes(route_csv_dump(prefill, decode, experts=16, expert_bytes=[64] * 3))
    return path
