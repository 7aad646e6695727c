"""Fixtures that several test modules share."""

import pytest


@pytest.fixture
def own_dagster_home(tmp_path, monkeypatch):
    """Dagster keeps its history below the test's own folder and sends nothing anywhere."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
