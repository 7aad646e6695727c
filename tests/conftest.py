"""Fixtures that several test modules share."""

import pytest


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
