"""Sound dumps damaged at random, and what an ingest may answer: shared by the fuzz tests and the fuzz bench.

Seeds are the SEEDS of tests/raw_*.py: by layout, a file's bytes, or the bytes of several by name.
"""

import importlib
import io
import random
import tempfile
import zipfile
from pathlib import Path

from pipeline.dumps.blocks import MalformedDump, RefusedDump
from pipeline.ingest import ingest
from schemas.files import DataFolder
from schemas.trace import UserMetadata
from schemas.validation import ContractViolation

Seed = bytes | dict[str, bytes]
Edit = tuple[str, float, float, bytes]
"""What to do, where and how far (both as parts of the length), and bytes to put there."""

KINDS = ("flip", "delete", "insert", "overwrite", "splice", "repeat", "truncate")
PAYLOADS = (
    b"-1", b"0", b"255", b"65536", b"4294967296", b"9" * 25, b"1e999", b"nan", b"null", b"true", b'""', b"[", b"]",
    b"{", b"}", b",", b":", b"\n", b"\r\n", b"#", b'"', b"\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80",
    b"\xed\xa0\x80", b"[" * 5000,
)  # fmt: skip
SECONDS = 10
"""Longest that one dump of a few kilobytes may take."""
MAX_BYTES = 256 * 1024


def seeds() -> dict[str, Seed]:
    """All seeds by the name of their layout."""
    found: dict[str, Seed] = {}
    for path in sorted(Path(__file__).parent.glob("raw_*.py")):
        found |= getattr(importlib.import_module(f"tests.{path.stem}"), "SEEDS", {})
    return found


def edited(content: bytes, edits: list[Edit]) -> bytes:
    """The content after each edit in turn."""
    for kind, where, how_far, payload in edits:
        place = int(where * len(content))
        length = int(how_far**4 * len(content)) + 1
        end = min(place + length, len(content))
        if kind == "flip" and content:
            place = min(place, len(content) - 1)
            content = content[:place] + bytes([content[place] ^ (1 << int(how_far * 8) % 8)]) + content[place + 1 :]
        elif kind == "delete":
            content = content[:place] + content[end:]
        elif kind == "insert":
            content = content[:place] + payload + content[place:]
        elif kind == "overwrite":
            content = content[:place] + payload + content[place + len(payload) :]
        elif kind == "splice":
            other = int(how_far * len(content))
            content = content[:place] + content[other : other + 64] + content[place:]
        elif kind == "repeat":
            content = content[:end] + content[place:end] + content[end:]
        elif kind == "truncate":
            content = content[:place]
    return content[:MAX_BYTES]


def damaged(seed: Seed, edits: list[Edit], *, inside: bool, file: int = 0) -> Seed:
    """The seed with one of its files edited; `inside` edits a file in a zip and packs it again, so that sums agree."""
    if isinstance(seed, dict):
        name = sorted(seed)[file % len(seed)]
        return {**seed, name: _damaged(seed[name], edits, inside, file)}
    return _damaged(seed, edits, inside, file)


def _damaged(content: bytes, edits: list[Edit], inside: bool, file: int) -> bytes:
    if not (inside and content.startswith(b"PK")):
        return edited(content, edits)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for place, (name, member) in enumerate(members):
            archive.writestr(name, edited(member, edits) if place == file % len(members) else member)
    return buffer.getvalue()


def random_damage(seed: Seed, generator: random.Random) -> Seed:
    """The seed after one to four random edits."""
    edits = [
        (generator.choice(KINDS), generator.random(), generator.random(), generator.choice(PAYLOADS))
        for _ in range(generator.randint(1, 4))
    ]
    return damaged(seed, edits, inside=generator.random() < 0.7, file=generator.randrange(64))


def written(seed: Seed, folder: Path) -> Path:
    """The dump in a folder: a file, or a folder of files."""
    path = folder / "dump"
    if isinstance(seed, bytes):
        path.write_bytes(seed)
        return path
    path.mkdir()
    for name, content in seed.items():
        (path / name).write_bytes(content)
    return path


def answer(seed: Seed, under: Path | None = None) -> str:
    """What the ingest says: `trace`, or `refused` in one line; anything else is raised, and nothing half-written stays.

    A trace is validated before it gets its name, so its being there says that it holds the contract.
    """
    with tempfile.TemporaryDirectory(dir=under) as folder:
        data = DataFolder(Path(folder) / "data")
        try:
            ingest(written(seed, Path(folder)), data, UserMetadata())
        except (MalformedDump, RefusedDump, ContractViolation) as error:
            assert str(error), "an error without a word"
            assert "\n" not in str(error) or isinstance(error, ContractViolation), str(error)
            found = "refused"
        else:
            found = "trace"
        left = {entry.name for entry in data.traces.iterdir()} if data.traces.is_dir() else set()
        assert len(left - {".lock"}) == (found == "trace"), left
        return found
