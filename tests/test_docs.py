"""The documents are true: commands exist, flags are real, the dictionary is what the schemas say."""

import re
import shlex
from pathlib import Path

import pytest

from pipeline import cli
from replayer import cli as replayer_cli
from schemas.__main__ import dictionary
from schemas.tables import TABLES
from schemas.trace import UserMetadata

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = list(ROOT.glob("*.md"))


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    return [line.split(" #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_dictionary_in_the_readme_is_current():
    assert README.endswith(dictionary()), "run: python -m schemas"


@pytest.mark.parametrize("command", [line for line in commands() if not line.startswith("make")])
def test_every_command_of_the_readme_parses(command):
    program, *arguments = shlex.split(command)
    parser = replayer_cli._parser() if program.endswith("replayer") else cli._parser()
    parser.parse_args(arguments)


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"`make (\w+)", README)) | {"demo"} <= targets


def test_every_metadata_key_is_in_the_readme():
    assert all(f"{name}" in README for name in UserMetadata.model_fields)


def test_every_table_is_in_the_changelog_and_every_file_that_is_named_exists():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(name in changelog for name in TABLES)
    for name in re.findall(r"`((?:pipeline|replayer|schemas|warehouse|tests)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_document_names_a_path_of_some_machine(path):
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users)/", path.read_text(encoding="utf-8"))
