"""The measuring process: opens the pool, allocates, starts the demand threads, and replays when it is told to.

It is started by `replay` inside the memory limit, gets its instructions as lines of JSON on stdin, shares plan and
results through an arena, and reports in lines of JSON on stdout: `ready`, `held`, `cold`, `warm`, `done`, `stopped`,
`failed`. It imports nothing that it does not need and allocates nothing between passes, because all of it lies inside
the limit.
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
import numpy.typing as npt

from replayer import loop
from replayer.arena import Arena
from replayer.capacity import bind_memory, die_with_parent, raise_own_oom_score
from replayer.device import Locked, NoAccelerator, NotLockable, Region, allocate, lock, nowhere
from replayer.owners import NotDeliverable, ReadPathRefused, advice_of, map_files, open_files
from replayer.seat import Seat

_VECTOR_PAGES = 4096


class Measurement:
    """One prepared process: files open, memory touched, code compiled, threads waiting."""

    def __init__(self, spec: dict[str, Any], arena: Arena) -> None:
        self.spec, self.arrays = spec, arena.arrays
        self.control = self.arrays["control"]
        self.num_threads = threads = int(spec["threads"])
        path = self.arrays["object_path"]
        self.files = open_files(
            [Path(name) for name in spec["paths"]],
            self.arrays["file_ways"],
            spec["fadvise"],
            bool(np.any(path == loop.UNCACHED)),
            spec["owner"],
            is_mapped=spec["residency"] == loop.RESIDENCY_MINCORE or bool(np.any(path == loop.MAPPED)),
        )
        # Kept alive for the loop, which has addresses in it.
        self.names, name_places = _zero_terminated(spec["paths"])
        sizes, any_way = self.arrays["file_bytes"], self.files.any
        self.mappings: list[mmap.mmap] = []
        map_addresses = [0] * len(any_way)
        if self.files.is_mapped:
            self.mappings, map_addresses = map_files(any_way, sizes.tolist(), spec["fadvise"])
        of_file = self.arrays["extent_file"]
        of_way = (path == loop.DIRECT)[self.arrays["extent_object"]]
        descriptors = np.asarray([self.files.buffered, self.files.direct], dtype=np.int32)
        self.extents = loop.Extents(
            object_first_extent=self.arrays["object_first_extent"],
            fd=descriptors[of_way.astype(np.int64), of_file],
            offset=self.arrays["extent_offset"],
            length=self.arrays["extent_length"],
            skip=self.arrays["extent_skip"],
            wanted=self.arrays["extent_wanted"],
            slot_offset=self.arrays["extent_slot_offset"],
            first_word=self.arrays["extent_first_word"],
            map_address=np.asarray(map_addresses, dtype=np.int64)[of_file],
            held_offset=self.arrays["extent_held_offset"],
            file=of_file,
            layer_id=self.arrays["object_layer_id"],
            expert_id=self.arrays["object_expert_id"],
            key=self.arrays["object_key"],
            path=path,
            # Its own: the memory of an owner's bookkeeping counts as the owner's.
            held_address=np.full(len(path), 0, dtype=np.int64),
            file_fd=np.asarray(any_way, dtype=np.int32),
            file_bytes=sizes,
            file_map_address=np.asarray(map_addresses, dtype=np.int64),
            file_name=self.names.ctypes.data + name_places,
        )
        self.decisions = loop.Decisions(*(self.arrays[f"decided_{name}"] for name in loop.Decisions._fields))
        self.locked: Locked | None = None
        self.user_cache: Any = None
        self.schedule = loop.Schedule(*(self.arrays[name] for name in loop.Schedule._fields))
        self.results = loop.Results(*(self.arrays[name] for name in loop.Results._fields))
        self.hints, self.worker = loop.no_hints(), None
        if spec["delivery"] != "none":
            # Who hints nobody does not pay for it.
            from replayer.advice import Worker

            self.hints = loop.Hints(*(self.arrays[f"hints_{name}"] for name in loop.Hints._fields))
            largest = int(self.extents.wanted.max(initial=0))
            self.worker = Worker(spec["delivery"], int(spec["piece_bytes"]), largest)
        self.seat = None if spec["seat"] is None else Seat.attach(**spec["seat"])
        self.region: Region = (
            allocate(spec["device"], threads, int(spec["slots"]), int(spec["slot_bytes"]))
            if self.seat is None
            else nowhere(self.seat.slots, threads)
        )
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
        self.deciders: list[Any] = []
        self.passes = 2 if spec["warm_pass"] else 1
        self._compile()
        self.threads = [
            threading.Thread(target=self._thread, args=(self._demand, number), daemon=True) for number in range(threads)
        ]
        if self.worker is not None:
            self.rendezvous = threading.Barrier(2)
            self.threads.append(threading.Thread(target=self._thread, args=(self._deliver,), daemon=True))
        for thread in self.threads:
            thread.start()
        self.gate.wait()

    def open_counters(self, files: dict[str, list[list[str]]]) -> None:
        """Opens what is counted: known only once there is a limit, and once the threads have numbers."""
        step_counters = files["step_counters"] + [
            # The worker's is the last.
            [f"thread_io {number}", f"/proc/self/task/{thread.native_id}/io"]
            for number, thread in enumerate(self.threads)
        ]
        self.step_counters = [(name, _opened(path)) for name, path in step_counters]
        self.run_counters = [(name, _opened(path)) for name, path in files["run_counters"]]
        # The threads read this when a pass begins.
        self.counters = self.counters._replace(
            fd=np.asarray([descriptor for _, descriptor in self.step_counters], dtype=np.int32)
        )

    def _setting(self, decider: Any = None) -> loop.Setting:
        return loop.Setting(
            barrier=self.barrier.address,
            decide=0 if decider is None else decider.function_address,
            decide_on=0 if decider is None else decider.stage_address,
            page_bytes=os.sysconf("SC_PAGE_SIZE"),
            residency=int(self.spec["residency"]),
            advice=advice_of(self.spec["fadvise"]),
            observe_every=int(self.spec["observe_every"]),
            announce_bytes=int(self.spec["announce_bytes"]),
            verify=int(self.spec["verify"]),
            copy=self.region.copy,
            synchronize=self.region.synchronize,
            hint_semaphore=0 if self.worker is None else self.worker.semaphore,
            hint_slots=int(self.spec["hint_slots"] or 0),
            asked=0 if self.seat is None else self.seat.asked_address,
            served=0 if self.seat is None else self.seat.served_address,
        )

    def _compile(self) -> None:
        """One call on no step at all: compiles, or loads what was compiled, before anybody waits for it."""
        nothing = self.schedule._replace(step_first_event=np.zeros(1, dtype=np.int64))
        setting = self._setting()
        loop.work(
            0, nothing, self.extents, self.results, self.decisions, self.hints, setting, self.destinations,
            self.counters,
        )  # fmt: skip
        if self.worker is not None:
            self.worker.rehearse(self.extents, self.hints, setting)
        loop.preload(0, 1, np.zeros(0, dtype=np.int64), self.extents, setting, self.destinations)
        if self.spec["policy"] is not None:
            # Its kernels weigh on the memory of those alone that need them.
            from replayer.user_cache import rehearse

            rehearse(self.spec["policy"], self.arrays["next_time"] if len(self.arrays["next_time"]) else None)
        self.resident_bytes()

    def _thread(self, work: Any, *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            # The other threads would wait for this one for ever.
            print(f"{' '.join(['thread', *map(str, arguments)])}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _demand(self, number: int) -> None:
        self.gate.wait()
        for passed in range(self.passes):
            self.gate.wait()
            setting = self._setting(self.deciders[passed] if self.deciders else None)
            loop.work(
                number, self.schedule, self.extents, self.results, self.decisions, self.hints, setting,
                self.destinations, self.counters,
            )  # fmt: skip
            self.gate.wait()
        # What the kernel counts for a thread goes with it, so it stays until the process ends.
        self.gate.wait()

    def _deliver(self) -> None:
        assert self.worker is not None, "it is a worker's thread"
        for _ in range(self.passes):
            self.rendezvous.wait()
            self.worker.run(self.extents, self.hints, self._setting())
            self.rendezvous.wait()
        self.rendezvous.wait()

    def hold(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Locks memory and fills it with what the owner begins with; its time, and the process's status after it.

        Raises:
            NotLockable, OSError: it cannot be locked, or an expert not be read.
        """
        self.locked = lock(int(plan["arena_bytes"]))
        address = self.extents.held_address
        if self.spec["policy"] is not None:
            from replayer.user_cache import Sizes, UserCache

            self.user_cache = UserCache(
                self.spec["policy"],
                Sizes(*(np.asarray(plan[name], dtype=np.int64) for name in Sizes.__dataclass_fields__)),
                region_address=self.locked.address,
                seed=int(self.spec["seed"]),
                counts=self.arrays["object_count"],
            )
            future = self.arrays["next_time"]
            self.deciders = [
                self.user_cache.over(
                    self.schedule,
                    self.decisions,
                    self.arrays["event_cache"],
                    self.arrays["event_step"],
                    future[passed] if len(future) else None,
                )
                for passed in range(self.passes)
            ]
            objects = self.user_cache.preloaded
            address[objects] = self.user_cache.slot_address[self.user_cache.slots.slot_of[objects]]
        else:
            place = self.arrays["held_place"]
            objects = np.flatnonzero(place >= 0)
            address[objects] = self.locked.address + place[objects]
        begin_ns = time.monotonic_ns()
        setting = self._setting()
        failed: list[int] = []

        def fill(number: int) -> None:
            place = loop.preload(number, self.num_threads, objects, self.extents, setting, self.destinations)
            if place >= 0:
                failed.append(int(objects[place]))

        fillers = [threading.Thread(target=fill, args=(number,)) for number in range(self.num_threads)]
        for filler in fillers:
            filler.start()
        for filler in fillers:
            filler.join()
        if failed:
            layer_id, expert_id = self.extents.layer_id[failed[0]], self.extents.expert_id[failed[0]]
            raise OSError(errno.EIO, f"layer {layer_id}, expert {expert_id}: not read whole into locked memory")
        if self.spec["policy"] is None:
            self.extents.path[objects] = loop.HELD
        return {"preload_ns": time.monotonic_ns() - begin_ns, "status": _own_memory()}

    def decide_ns(self) -> int | None:
        """Time that decisions took since the last call; null where nobody decides."""
        return None if self.user_cache is None else int(self.user_cache.take_decide_ns())

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
        self.arrays["path"].fill(loop.NOT_SERVED)
        for name in ("begin_ns", "end_ns", "step_begin_ns", "step_end_ns", "check_end_ns", "resident_pages", "digest"):
            self.arrays[name].fill(0)
        for name in ("wrong", "checked_words", "observe_ns", "verify_ns", "ticket", "counter_length"):
            self.arrays[name].fill(0)
        if self.worker is not None:
            for name in ("state", "hint_missing_pages", "hint_grown_pages", "hint_begin_ns", "hint_end_ns", "mailbox"):
                self.arrays[f"hints_{name}"].fill(0)
            self.worker.reset()

    def run_pass(self) -> dict[str, Any]:
        """One pass of all threads, after `clear`; the moments before and after it, by the clock of this thread."""
        if self.worker is not None:
            self.rendezvous.wait()
        begin_ns = time.monotonic_ns()
        self.gate.wait()
        self.gate.wait()
        end_ns = time.monotonic_ns()
        if self.worker is not None:
            # What it is at belongs to what is counted after the pass, not to the pass's time.
            self.worker.quit(self.hints)
            self.rendezvous.wait()
        return {"begin_ns": begin_ns, "end_ns": end_ns}

    def delivery_error(self) -> int | None:
        """errno of the first hint that could not be delivered; null where there is none."""
        return None if self.worker is None else int(self.worker.delivery.failed[0]) or None


def _zero_terminated(paths: list[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(all paths one after the other, each with a zero byte; where each begins)."""
    names = [os.fsencode(path) + b"\0" for path in paths]
    sizes = np.array([len(name) for name in names], dtype=np.int64)
    return np.frombuffer(b"".join(names), dtype=np.uint8), np.cumsum(sizes) - sizes


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
    bind_memory(spec["memory_nodes"])
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
        _say("ready", status=_own_memory(), thread_ids=[thread.native_id for thread in measurement.threads],
             files_stay_open=measurement.files.stay_open)  # fmt: skip
        files = sys.stdin.readline()
        if not files:
            return 0
        measurement.open_counters(json.loads(files))
        command = sys.stdin.readline().strip()
        if command.startswith("{"):
            _say("held", **measurement.hold(json.loads(command)))
            command = sys.stdin.readline().strip()
        if command != "run":
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
            measurement.decide_ns()
            _say("warm" if not control[loop.STOP] else "stopped", span=span, snapshot=before)
            if spec["meets"] and sys.stdin.readline().strip() != "measure":
                return 0
        if not control[loop.STOP]:
            span = measurement.run_pass()
            after = measurement.snapshot()
            _say("done" if not control[loop.STOP] else "stopped", span=span, before=before, after=after,
                 decide_ns=measurement.decide_ns(), delivery_error=measurement.delivery_error())  # fmt: skip
            if spec["meets"]:
                # What this process holds would be room for the others in its wall.
                sys.stdin.readline()
    except (OSError, ReadPathRefused, NoAccelerator, NotLockable, NotDeliverable) as error:
        refused = ReadPathRefused | NoAccelerator | NotLockable | NotDeliverable
        _say("failed", message=str(error), wrong_call=isinstance(error, refused))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Demand threads may wait for a pass that will not come; there is nothing left to tidy up.
    os._exit(status)
