"""What must not be imported, shown in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_simulating_loads_neither_torch_nor_dagster_nor_duckdb_nor_pandas():
    heavy = {"torch", "dagster", "duckdb", "pandas", "pandera", "pipeline", "warehouse", "matplotlib"}
    assert not heavy & loaded_by("import replayer.simulate, replayer.cli")


def test_a_whole_simulation_loads_none_of_them_either(tmp_path):
    code = f"""
from pathlib import Path
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.raw_dumps import random_routes, tok_layers_dump
Path({str(tmp_path / "a.jsonl")!r}).write_bytes(tok_layers_dump(random_routes(20, 2, 16, 2)))
from pipeline.cli import main
main(["ingest", {str(tmp_path / "a.jsonl")!r}, "--data", {str(tmp_path)!r}, "--trace-id", "tiny"])
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    trace = tmp_path / "traces" / "tiny.parquet"
    simulated = loaded_by(
        "from replayer.cli import main\n"
        f"assert main(['simulate', {str(trace)!r}, '--policy', 'lru,belady_bypass', '--capacity-experts', '4']) == 0"
    )
    assert not {"torch", "dagster", "duckdb", "pandas", "pandera", "pipeline", "warehouse"} & simulated


def test_the_replayer_runs_with_dagster_and_duckdb_unimportable():
    code = (
        "import sys\nfor name in ('dagster', 'duckdb', 'pandas', 'torch', 'pipeline', 'warehouse'):\n"
        "    sys.modules[name] = None\n"
        "import runpy\nsys.argv = ['replayer', '--help']\nrunpy.run_module('replayer', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0
    assert "simulate" in done.stdout


def test_pure_modules_do_not_load_dagster():
    """All in one interpreter, since what none of them loads is not there after all of them."""
    names = ("canonical", "inversion", "locality", "lookahead", "replays", "report", "reporting")
    assert "dagster" not in loaded_by("\n".join(f"import pipeline.{name}" for name in names))


def test_the_command_line_loads_what_only_some_commands_need_with_those():
    assert not {"torch", "dagster", "matplotlib"} & loaded_by("import pipeline.cli")


def test_the_sample_package_does_not_load_torch():
    assert "torch" not in loaded_by("import pipeline.sample")


def test_nobody_postpones_annotations_in_the_pipeline():
    # A typed context of a Dagster decorator raises under postponed annotations.
    offenders = [path.name for path in (ROOT / "pipeline").rglob("*.py") if "import annotations" in path.read_text()]
    assert offenders == []
