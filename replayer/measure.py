"""The measuring process: opens the pool, allocates, starts the demand threads, and replays when it is told to.

It is started by `replay` inside the memory limit, gets its instructions as lines of JSON on stdin, shares plan and
results through an arena, and reports in lines of JSON on stdout: `ready`, `cold`, `warm`, `done`, `stopped`, `failed`.
It imports nothing that it does not need and allocates nothing between passes, because all of it lies inside the limit.
It judges nothing: raw counters go back as text.
"""

import errno
import json
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from replayer import loop
from replayer.arena import Arena
from replayer.capacity import die_with_parent, raise_own_oom_score
from replayer.device import NoAccelerator, Region, allocate
from replayer.owners import ReadPathRefused, map_files, open_files

_VECTOR_PAGES = 4096


class Measurement:
    """One prepared process: files open, memory touched, code compiled, threads waiting."""

    def __init__(self, spec: dict[str, Any], arena: Arena) -> None:
        self.spec, self.arrays = spec, arena.arrays
        self.control = self.arrays["control"]
        threads = int(spec["threads"])
        self.files = open_files(Path(spec["folder"]), spec["files"], spec["owner"], spec["fadvise"])
        sizes = self.arrays["file_bytes"]
        self.mappings: list[mmap.mmap] = []
        map_addresses = [0] * len(self.files)
        if spec["residency"] == loop.RESIDENCY_MINCORE:
            self.mappings, map_addresses = map_files(self.files, sizes.tolist())
        of_file = self.arrays["extent_file"]
        self.extents = loop.Extents(
            object_first_extent=self.arrays["object_first_extent"],
            fd=np.asarray(self.files, dtype=np.int32)[of_file],
            offset=self.arrays["extent_offset"],
            length=self.arrays["extent_length"],
            skip=self.arrays["extent_skip"],
            wanted=self.arrays["extent_wanted"],
            slot_offset=self.arrays["extent_slot_offset"],
            first_word=self.arrays["extent_first_word"],
            map_address=np.asarray(map_addresses, dtype=np.int64)[of_file],
            layer_id=self.arrays["object_layer_id"],
            expert_id=self.arrays["object_expert_id"],
            key=self.arrays["object_key"],
            file_fd=np.asarray(self.files, dtype=np.int32),
            file_bytes=sizes,
            file_map_address=np.asarray(map_addresses, dtype=np.int64),
        )
        self.schedule = loop.Schedule(*(self.arrays[name] for name in loop.Schedule._fields))
        self.results = loop.Results(*(self.arrays[name] for name in loop.Results._fields))
        self.region: Region = allocate(spec["device"], threads, int(spec["slots"]), int(spec["slot_bytes"]))
        self.destinations = loop.Destinations(
            slots=self.region.slots,
            # Written to: memory that is touched only later would be missing from what is measured before the limit.
            scratch=np.full((threads, loop.SCRATCH_BYTES), 0, dtype=np.uint8),
            vector=np.full((threads, _VECTOR_PAGES), 0, dtype=np.uint8),
            device_address=self.region.device_address,
            stream=self.region.stream,
        )
        self.counters = loop.Counters(fd=np.zeros(0, dtype=np.int32), first_byte=self.arrays["counter_first_byte"])
        self.barrier = loop.Barrier(threads)
        self.gate = threading.Barrier(threads + 1)
        self.passes = 2 if spec["warm_pass"] else 1
        self._compile()
        self.threads = [threading.Thread(target=self._thread, args=(number,), daemon=True) for number in range(threads)]
        for thread in self.threads:
            thread.start()
        self.gate.wait()

    def open_counters(self, files: dict[str, list[list[str]]]) -> None:
        """Opens what is counted: known only once there is a limit, and once the threads have numbers."""
        step_counters = files["step_counters"] + [
            [f"thread_io {number}", f"/proc/self/task/{thread.native_id}/io"]
            for number, thread in enumerate(self.threads)
        ]
        self.step_counters = [(name, _opened(path)) for name, path in step_counters]
        self.run_counters = [(name, _opened(path)) for name, path in files["run_counters"]]
        # The threads read this when a pass begins.
        self.counters = self.counters._replace(
            fd=np.asarray([descriptor for _, descriptor in self.step_counters], dtype=np.int32)
        )

    def _setting(self) -> loop.Setting:
        return loop.Setting(
            barrier=self.barrier.address,
            page_bytes=os.sysconf("SC_PAGE_SIZE"),
            residency=int(self.spec["residency"]),
            observe_every=int(self.spec["observe_every"]),
            verify=int(self.spec["verify"]),
            copy=self.region.copy,
            synchronize=self.region.synchronize,
        )

    def _compile(self) -> None:
        """One call on no step at all: compiles, or loads what was compiled, before anybody waits for it."""
        nothing = self.schedule._replace(step_first_event=np.zeros(1, dtype=np.int64))
        loop.work(0, nothing, self.extents, self.results, self._setting(), self.destinations, self.counters)
        self.resident_bytes()

    def _thread(self, number: int) -> None:
        try:
            self._demand(number)
        except BaseException as error:
            # The other threads would wait for this one for ever.
            print(f"demand thread {number}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _demand(self, number: int) -> None:
        self.gate.wait()
        setting = self._setting()
        for _ in range(self.passes):
            self.gate.wait()
            loop.work(number, self.schedule, self.extents, self.results, setting, self.destinations, self.counters)
            self.gate.wait()
        # What the kernel counts for a thread goes with it, so it stays until the process ends.
        self.gate.wait()

    def resident_bytes(self) -> int:
        """Bytes of the pool's files in the page cache.

        Raises:
            OSError: the kernel does not say.
        """
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        pages = loop.resident_pages(
            self.extents,
            0,
            1,
            int(self.spec["residency"]),
            page_bytes,
            self.destinations.scratch[0],
            self.destinations.vector[0],
        )
        if pages < 0:
            remedy = "; own the pool's files or be allowed to write them" if -pages == errno.EPERM else ""
            raise OSError(-pages, f"residency of the pool: {os.strerror(-pages)}{remedy}")
        return int(pages) * page_bytes

    def snapshot(self) -> dict[str, Any]:
        """Everything that is counted, as text, with the moment and the resident bytes."""
        return {
            "monotonic_ns": time.monotonic_ns(),
            "resident_bytes": self.resident_bytes(),
            "process_cpu_ns": time.process_time_ns(),
            "text": {name: _text(descriptor) for name, descriptor in self.step_counters + self.run_counters},
        }

    def clear(self) -> None:
        """Empties what a pass writes; all of it was touched before, so memory does not grow."""
        self.control[loop.EVENTS_DONE] = 0
        self.arrays["returned"].fill(loop.NOT_REACHED)
        self.arrays["missing_pages"].fill(loop.NOT_OBSERVED)
        for name in ("begin_ns", "end_ns", "step_begin_ns", "step_end_ns", "check_end_ns", "resident_pages", "digest"):
            self.arrays[name].fill(0)
        for name in ("wrong", "checked_words", "observe_ns", "verify_ns", "ticket", "counter_length"):
            self.arrays[name].fill(0)

    def run_pass(self) -> dict[str, Any]:
        """One pass of all threads, after `clear`; the moments before and after it, by the clock of this thread."""
        begin_ns = time.monotonic_ns()
        self.gate.wait()
        self.gate.wait()
        return {"begin_ns": begin_ns, "end_ns": time.monotonic_ns()}


def _opened(path: str) -> int:
    """A descriptor of a counter file, −1 where there is none: reading that gives nothing, as a vanished file does."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _text(descriptor: int) -> str | None:
    try:
        parts = []
        place = 0
        while part := os.pread(descriptor, 1 << 16, place):
            parts.append(part)
            place += len(part)
        return b"".join(parts).decode("utf-8", "replace")
    except OSError:
        # A counter file of something that has died; the proofs know what to make of that.
        return None


def _say(kind: str, **content: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **content}) + "\n")
    sys.stdout.flush()


def _own_memory() -> str:
    return Path("/proc/self/status").read_text()


def main() -> int:
    """The measuring process from its first line of instructions to its last report; returns the exit code."""
    spec = json.loads(sys.stdin.readline())
    die_with_parent(int(spec["parent_pid"]))
    if spec["first_to_die"]:
        raise_own_oom_score()
    arena = Arena.attach(int(spec["arena_descriptor"]), spec["layout"])
    control = arena.arrays["control"]

    def stop(_number: int, _frame: Any) -> None:
        control[loop.STOP] = 1

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        measurement = Measurement(spec, arena)
        _say("ready", status=_own_memory(), thread_ids=[thread.native_id for thread in measurement.threads])
        files = sys.stdin.readline()
        if not files:
            return 0
        measurement.open_counters(json.loads(files))
        if sys.stdin.readline().strip() != "run":
            return 0
        measurement.clear()
        before = measurement.snapshot()
        _say("cold", snapshot=before)
        if spec["warm_pass"]:
            span = measurement.run_pass()
            before = measurement.snapshot()
            # From the report on, what lies in the arena counts as measured; what failed is looked up there first.
            if not control[loop.FAILED_ACCESS]:
                measurement.clear()
            _say("warm" if not control[loop.STOP] else "stopped", span=span, snapshot=before)
        if not control[loop.STOP]:
            span = measurement.run_pass()
            after = measurement.snapshot()
            _say("done" if not control[loop.STOP] else "stopped", span=span, before=before, after=after)
    except (OSError, ReadPathRefused, NoAccelerator) as error:
        _say("failed", message=str(error), wrong_call=isinstance(error, ReadPathRefused | NoAccelerator))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Demand threads may wait for a pass that will not come; there is nothing left to tidy up.
    os._exit(status)
