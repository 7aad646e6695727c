"""A 5 GB JSONL dump through `expert-tier ingest` within 1 GiB, and every parser on damaged dumps in a limited child.

By hand and smaller: python -m tests.bench.dumps memory 500MB, python -m tests.bench.dumps fuzz 5.
"""

import importlib
import importlib.util
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from replayer.quantities import format_bytes, parse_bytes
from tests.bench.policies import report
from tests.bench.processes import peak_of

DUMP_BYTES = 5_000_000_000
MEMORY_BYTES = 2**30
FUZZ_SECONDS = 20
"""For each layout."""
LAYERS, EXPERTS, TOP_K = 48, 128, 8

Seed = bytes | dict[str, bytes]


def memory(samples: int, size_bytes: int = DUMP_BYTES) -> None:
    """Peak memory and rate of the ingest of a generated JSONL dump, plain and as zstd; once each, never `samples`."""
    del samples
    with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
        for name, pack in (("big.jsonl", None), ("big.jsonl.zst", "zstd")):
            dump = Path(folder) / name
            _write_jsonl(dump, size_bytes, pack)
            command = [sys.executable, "-m", "pipeline", "ingest", str(dump), "--data", str(Path(folder) / name[-3:])]
            seconds, peak = peak_of(command)
            stored = dump.stat().st_size
            dump.unlink()
            report(
                f"ingest {name}, {format_bytes(size_bytes)} of text",
                f"{peak / 2**20:,.0f} MiB, {seconds:.0f} s, {size_bytes / seconds / 1e6:.0f} MB/s, stored "
                f"{format_bytes(stored)}",
                "≤ 1024 MiB",
                reached=peak <= MEMORY_BYTES,
            )


def _write_jsonl(path: Path, size_bytes: int, pack: str | None) -> None:
    """The lines of 500 tokens again and again, written as they are made or packed on the way."""
    import pyarrow as pa

    generator = random.Random(0)
    lines = b"".join(
        json.dumps({"tok": token, "layers": [generator.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)]}).encode()
        + b"\n"
        for token in range(500)
    )
    with pa.output_stream(str(path), compression=pack) as file:
        for _ in range(size_bytes // len(lines) + 1):
            file.write(lines)


def fuzz(samples: int, seconds: float = FUZZ_SECONDS) -> None:
    """Each parser on damage of its seed, in a child that may take 1 GiB more than it starts with, and 10 s a dump."""
    from tests.mutations import seeds

    del samples
    print(f"damage by {'atheris, guided by coverage' if _atheris() else 'tests.mutations, at random'}")
    for name in seeds():
        with tempfile.TemporaryDirectory(prefix="expert-tier-bench-") as folder:
            command = [sys.executable, "-m", "tests.bench.dumps", "child", name, str(seconds), folder]
            child = subprocess.run(command, capture_output=True, text=True)
            case = Path(folder) / "case"
            if child.returncode == 0:
                report(f"fuzz {name}", child.stdout.strip(), "no crash", reached=True)
                continue
            if child.returncode == -signal.SIGALRM:
                why = "hangs"
            else:
                why = (child.stderr.strip().splitlines() or [f"exit {child.returncode}"])[-1][:200]
            again = f"python -m tests.bench.dumps once {name} {_kept(case)}"
            report(f"fuzz {name}", f"{why}; again: {again}", "no crash", reached=False)


def child(name: str, seconds: float, folder: Path) -> None:
    """Damages one seed for so long; dies of the first bug, of SIGALRM if one dump takes longer than allowed."""
    if _atheris():
        import atheris

        # Before anything imports the parsers. What numba compiles must stay as it is.
        with atheris.instrument_imports(include=["pipeline.dumps"]):
            importlib.import_module("pipeline.dumps.sniff")
    from tests.mutations import SECONDS, answer, random_damage, seeds

    seed = seeds()[name]
    answer(seed, folder)
    limit = _status("VmSize") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resident = _status("VmHWM")
    found = {"trace": 0, "refused": 0}

    def judge(dump: Seed) -> None:
        signal.alarm(SECONDS)
        found[answer(dump, folder)] += 1
        signal.alarm(0)

    def tell() -> None:
        grown = (_status("VmHWM") - resident) / 2**20
        print(
            f"{sum(found.values()):,} dumps: {found['trace']:,} traces, {found['refused']:,} refused; {grown:.0f} MiB "
            "more at most",
            flush=True,
        )

    if _atheris():
        _with_coverage(seed, seconds, folder, judge, tell)
        return
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        (folder / "case").write_text(str(number))
        judge(random_damage(seed, random.Random(number)))
        number += 1
    tell()


def _with_coverage(
    seed: Seed, seconds: float, folder: Path, judge: Callable[[Seed], None], tell: Callable[[], None]
) -> NoReturn:
    """The same by libFuzzer, on the first file of the seed; ends the process."""
    import atheris

    first = sorted(seed)[0] if isinstance(seed, dict) else ""
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(seed[first] if isinstance(seed, dict) else seed)
    until, told = time.monotonic() + seconds, False

    def one(content: bytes) -> None:
        nonlocal told
        if content and time.monotonic() < until:
            (folder / "case").write_bytes(content)
            judge({**seed, first: content} if isinstance(seed, dict) else content)
        elif content and not told:
            told = True
            tell()

    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds) + 2}", "-max_len=65536", "-verbosity=0",
                   f"-artifact_prefix={folder}/", "-rss_limit_mb=0", "-handle_alrm=0", str(corpus)], one)  # fmt: skip
    atheris.Fuzz()
    raise SystemExit(0)


def _kept(case: Path) -> str:
    """The number of a random damage; of a dump that libFuzzer made the file, kept under the temporary folder."""
    if not case.exists() or case.read_bytes().isdigit():
        return case.read_text() if case.exists() else "0"
    with tempfile.NamedTemporaryFile(prefix="expert-tier-fuzz-", delete=False) as file:
        file.write(case.read_bytes())
    return file.name


def once(name: str, case: str) -> None:
    """One damaged dump again, by number or file, for whoever looks for its bug."""
    from tests.mutations import answer, random_damage, seeds

    seed = seeds()[name]
    if case.isdigit():
        print(answer(random_damage(seed, random.Random(int(case)))))
        return
    content = Path(case).read_bytes()
    print(answer({**seed, sorted(seed)[0]: content} if isinstance(seed, dict) else content))


def _atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main(arguments: list[str]) -> None:
    """One of: memory SIZE, fuzz SECONDS, once LAYOUT NUMBER|FILE; child is for fuzz alone."""
    what, *rest = arguments
    if what == "memory":
        memory(1, parse_bytes(rest[0]))
    elif what == "fuzz":
        fuzz(1, float(rest[0]))
    elif what == "once":
        once(rest[0], rest[1])
    elif what == "child":
        child(rest[0], float(rest[1]), Path(rest[2]))
    else:
        raise SystemExit(main.__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
