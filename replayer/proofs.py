"""The identities that one run must satisfy, each with what was expected, what was found, and whether it held.

Every proof is made from counters and arrays that were taken independently of each other. A proof that could not be
made says why and holds neither way; a proof that failed spoils the bytes of a run (and with them its times) or its
times alone.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from replayer import counters
from replayer.accounting import Recording, between, delivery_columns, has_readahead, text_of
from replayer.capacity import balloon_state
from replayer.content import EDGE_BYTES, access_digest, bytes_of
from replayer.holdings import expected_hits
from replayer.loop import DIRECT, HELD, HINT_COMPLETED, HINT_DROPPED, HINT_IN_FLIGHT, HINT_OVERWRITTEN
from replayer.owners import fills_page_cache, reads_directly
from replayer.quantities import format_bytes
from replayer.trace import Trace

RACED_SHARE, RACED_SHARE_IN_COMPANY = 0.01, 0.05
"""Of the pages missing, those that may be evicted between look and read; more where another replay shares the wall."""
RESIDENT_SHARE = 0.01
BALLOON_SLACK_BYTES = 24 << 20
"""What a whole machine, small or with a balloon, leaves beyond the room meant: the kernel's reserves, measured at
−1 … +20 MiB."""
TIME_SHARE, TIME_SLACK_NS = 0.01, 5_000_000
NEIGHBOR_SHARE, NEIGHBOR_SLACK_BYTES = 0.05, 16 << 20
LOAD_SHARE = 0.10
OBSERVATION_SHARE = 0.05
APART_SHARE = 0.05
"""Of the shortest of several measured passes, what need not overlap: they are told to begin one after the other."""
IDLE_PAGE_OUT_NS = 20_000_000_000
"""DAMON was seen to page out what had not been touched for about this long."""


@dataclass(frozen=True)
class Proof:
    """One row of the table `replay_proof`, less its run. held is null if the proof could not be made."""

    name: str
    spoils: str
    expected: str
    found: str
    tolerance: str = ""
    held: bool | None = None


def prove(recording: Recording, run: dict[str, Any]) -> list[Proof]:
    """Every proof of one run; `run` holds the columns that `accounting.account` counted."""
    proofs = [
        _on_a_device(recording),
        _pool_absent(recording),
        _machine_unchanged(recording),
        _pool_unchanged(recording),
    ]
    if recording.measured:
        for make in _OF_MEASURED:
            proofs.extend(make(recording, run))
    proofs.append(_completed(recording))
    return proofs


def verdicts(proofs: list[Proof]) -> dict[str, Any]:
    """bytes_valid and time_valid, with the reasons in words."""
    failed = [proof for proof in proofs if proof.held is False]
    reasons = {
        kind: "; ".join(
            f"{proof.name}: expected {proof.expected}, found {proof.found}" for proof in failed if proof.spoils == kind
        )
        for kind in ("bytes", "time")
    }
    time_reasons = "; ".join(
        reason for reason in (reasons["bytes"] and "bytes are not valid", reasons["time"]) if reason
    )
    return {
        "bytes_valid": not reasons["bytes"],
        "bytes_reasons": reasons["bytes"],
        "time_valid": not time_reasons,
        "time_reasons": time_reasons,
    }


def _completed(recording: Recording) -> Proof:
    found = recording.status if recording.failure is None else f"{recording.status}: {recording.failure}"
    return Proof("run complete", "bytes", "complete", found, held=recording.status == "complete")


def _pool_absent(recording: Recording) -> Proof:
    name, expected = "pool absent at the cold start", "0 bytes resident"
    if recording.cold is None:
        return Proof(name, "bytes", expected, "the run did not get there")
    resident_bytes = recording.cold["resident_bytes"]
    return Proof(name, "bytes", expected, f"{resident_bytes:,} bytes", held=resident_bytes == 0)


def _on_a_device(recording: Recording) -> Proof:
    found = recording.unsuitable_storage
    return Proof("pool on a device", "bytes", "a local disk", found or "a local disk", held=found is None)


def _machine_unchanged(recording: Recording) -> Proof:
    before, after = recording.machine_before, recording.machine_after
    changed = [name for name in before if name != "machine_id" and before[name] != after.get(name)]
    found = "; ".join(f"{name} {before[name]} became {after.get(name)}" for name in changed)
    if not after:
        found = "the pool's folder is gone, so what holds it cannot be said"
    return Proof(
        "machine state unchanged",
        "bytes",
        str(before.get("machine_id")),
        found or str(after.get("machine_id")),
        held=not changed,
    )


def _pool_unchanged(recording: Recording) -> Proof:
    files = recording.pool.files
    pairs = zip(files, recording.pool_files_before, recording.pool_files_after, strict=True)
    changed = [name for name, before, after in pairs if before != after or after is None]
    return Proof(
        "pool files unchanged",
        "bytes",
        f"size, time and inode of {len(files):,} files",
        "unchanged" if not changed else f"{len(changed)} changed, first {changed[0]}",
        held=not changed,
    )


def _conserved(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """Σ rows × k against the walk's selections, and the unions of the trace's events against the reads."""
    trace, walk = recording.trace, recording.walk
    rows, accesses = _rows_and_unions(recording)
    yield Proof(
        "selections conserved",
        "bytes",
        f"{rows * trace.top_k:,} = {rows:,} rows × {trace.top_k}",
        f"{int(walk.selections.sum()):,}",
        held=rows * trace.top_k == int(walk.selections.sum()),
    )
    yield Proof(
        "reads conserved",
        "bytes",
        f"{accesses:,} accesses of the trace",
        f"{run['reads']:,} reads",
        held=accesses == run["reads"],
    )


def _rows_and_unions(recording: Recording) -> tuple[int, int]:
    """(rows, Σ of unions) of the selected events, from the trace itself and not from the walk."""
    trace = recording.trace
    selected = selected_events(recording)
    first = trace.event_first_row[:-1][selected]
    end = trace.event_first_row[1:][selected]
    rows = int((end - first).sum())
    single = end - first == 1
    # A row names an expert once at most, which reading the trace has checked.
    unions = int(np.count_nonzero(single)) * trace.top_k
    for begin, stop in zip(first[~single], end[~single], strict=True):
        unions += len(np.unique(trace.expert_ids[begin:stop]))
    return rows, unions


def selected_events(recording: Recording) -> npt.NDArray[np.int64]:
    """(N,) event_id of each replayed event, from the trace itself."""
    return replayed_events(recording.trace, recording.step_begin, recording.step_end)


def replayed_events(trace: Trace, step_begin: int, step_end: int) -> npt.NDArray[np.int64]:
    """(N,) event_id of each event of a range of steps, counted without warm-up."""
    warmup = trace.event_phase == 2
    steps = np.unique(trace.event_step[~warmup])[step_begin:step_end]
    return np.flatnonzero(~warmup & np.isin(trace.event_step, steps))


def _bytes_returned(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """Bytes that the trace demands, from the experts' sizes in the trace's order, against what the reads returned."""
    counts = np.bincount(recording.walk.objects, minlength=recording.pool.num_objects)
    expected = int((counts * recording.pool.object_bytes).sum())
    yield Proof(
        "bytes returned",
        "bytes",
        f"{expected:,} bytes",
        f"{run['returned_bytes']:,} bytes",
        held=expected == run["returned_bytes"],
    )


def _content(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    checked = run["checked_bytes"]
    wrong = int(recording.arrays["wrong"].sum())
    if recording.pool.content is None:
        yield Proof("content", "bytes", "what the pool must hold", "a checkpoint has no known content")
        return
    parts = "all pages" if recording.request.verify == "all" else "first and last page of each read"
    yield Proof(
        "content",
        "bytes",
        f"0 wrong words of 8 bytes ({parts})",
        f"{wrong:,} of {checked // 8:,}",
        held=wrong == 0 and checked > 0 if checked or recording.status == "complete" else None,
    )
    if recording.status == "complete":
        expected = f"{expected_digest(recording):016x}"
        yield Proof("digest", "bytes", expected, run["consumed_digest"], held=expected == run["consumed_digest"])


def expected_digest(recording: Recording) -> int:
    """The digest of the trace, from the content function alone: what every owner must have consumed."""
    pool, walk = recording.pool, recording.walk
    first, last = pool.object_first_extent[:-1], pool.object_first_extent[1:] - 1
    sizes, lengths = pool.object_bytes, pool.extent_length_bytes
    edge_bytes = np.minimum(np.minimum(lengths[first], lengths[last]), EDGE_BYTES)
    edges = np.zeros((pool.num_objects, 2, EDGE_BYTES), dtype=np.uint8)
    for obj in np.unique(walk.objects):
        size, edge = int(sizes[obj]), int(edge_bytes[obj])
        place = int(pool.object_layer_id[obj]), int(pool.object_expert_id[obj])
        edges[obj, 0, :edge] = bytes_of(*place, 0, edge)
        edges[obj, 1, :edge] = bytes_of(*place, size - edge, edge)
    event_ids = selected_events(recording)[recording.access_event]
    return int(_sum_of_digests(event_ids, walk.objects, pool.object_layer_id, pool.object_expert_id, edges, edge_bytes))


@numba.njit(cache=True, nogil=True)
def _sum_of_digests(event_ids, objects, layer_ids, expert_ids, edges, edge_bytes):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for access in range(len(objects)):
        obj = objects[access]
        edge = edges[obj, :, : edge_bytes[obj]]
        total += access_digest(event_ids[access], layer_ids[obj], expert_ids[obj], edge[0], edge[1])
    return total


def _device_identity(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """What was read from the device against what was seen missing right before each read."""
    name, request = "device bytes", recording.request
    found = run["device_bytes"]
    if recording.after is None:
        yield Proof(name, "bytes", "counted", "the run ended before it was counted")
        return
    if found is None:
        yield Proof(name, "bytes", "counted", "this kernel keeps no read_bytes per thread (CONFIG_TASK_IO_ACCOUNTING)")
        return
    direct = run["direct_bytes"]
    if reads_directly(request.owner, recording.miss_path):
        yield Proof(name, "bytes", f"{direct:,} bytes asked of O_DIRECT", f"{found:,} bytes", held=found == direct)
        return
    if run["missing_bytes"] is None:
        yield Proof(
            name, "bytes", "bytes missing before the reads", f"residency was observed of {request.observe} accesses"
        )
        return
    cached = ~recording.served(DIRECT)
    missing = int(recording.arrays["missing_pages"][cached].sum()) * recording.page_bytes
    past = f" and {direct:,} asked of O_DIRECT" if direct else ""
    if has_readahead(request):
        yield Proof(
            name,
            "bytes",
            f"at least {missing:,} bytes missing before the reads{past}",
            f"{found:,} bytes",
            held=run["overshoot_bytes"] >= 0,
        )
        return
    if recording.planned is not None:
        yield from _device_identity_hinted(recording, run, missing)
        return
    shared, raced = _shared_pages(recording), run["raced_pages"]
    beyond = found - missing - direct
    if request.mechanism == "none":
        allowed, tolerance = 0, "to the byte"
    else:
        # What an expert still had in memory may be evicted by the read of what it lacked, before it is copied itself.
        partial = recording.classes[1] & cached
        own = int((recording.access_pages - recording.arrays["missing_pages"])[partial].sum())
        company = recording.company
        share = RACED_SHARE_IN_COMPANY if company is not None and company.shares_wall else RACED_SHARE
        allowed = int(share * missing / recording.page_bytes) + own
        tolerance = (
            f"0 to {allowed:,} pages: {100 * share:.0f} % evicted between look and read, and {own:,} of partly "
            "resident experts, which their own read may evict"
        )
    if shared:
        tolerance += f"; {shared:,} pages shared by two experts of one event may be counted twice"
    yield Proof(
        name,
        "bytes",
        f"{missing:,} bytes missing before the reads{past}",
        f"{found:,} bytes, {raced:,} pages apart",
        tolerance,
        held=-shared * recording.page_bytes <= beyond <= allowed * recording.page_bytes,
    )


def _device_identity_hinted(recording: Recording, run: dict[str, Any], missing: int) -> Iterator[Proof]:
    """At least what demand found missing, which somebody read; at most that and what the worker found missing.

    A page that both found missing was read once, and one that the kernel did not read ahead not at all.
    """
    columns = delivery_columns(recording)
    assert columns is not None, "a plan was delivered"
    found, hinted = run["device_bytes"], columns["hinted_missing_bytes"]
    # The worker is another reader in the same wall: each page it brings may push one out that demand has looked at.
    raced = int(RACED_SHARE_IN_COMPANY * missing) + hinted if recording.request.mechanism != "none" else 0
    partial = recording.classes[1] & ~recording.served(DIRECT)
    raced += int((recording.access_pages - recording.arrays["missing_pages"])[partial].sum()) * recording.page_bytes
    shared = _shared_pages(recording) * recording.page_bytes
    yield Proof(
        "device bytes",
        "bytes",
        f"{missing:,} bytes missing before the reads, and up to {hinted:,} more missing before hints were delivered",
        f"{found:,} bytes",
        f"{raced:,} bytes evicted between look and read; {shared:,} of shared pages",
        held=missing - shared <= found <= missing + hinted + raced,
    )


def _hints(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """Hints of the plan against those handed over, and what each became against the counts of both threads."""
    columns = delivery_columns(recording)
    if columns is None or recording.planned is None:
        return
    expected = int(recording.planned.place_first_hint[recording.ended_events + 1])
    submitted = columns["hints_submitted"]
    if recording.status == "complete":
        yield Proof(
            "hints handed over",
            "bytes",
            f"{expected:,} of the plan for the replayed events",
            f"{submitted:,}",
            held=expected == submitted,
        )
    parts = ("completed", "overwritten", "dropped", "in_flight")
    total = sum(columns[f"hints_{part}"] for part in parts)
    states = np.bincount(recording.arrays["hints_state"], minlength=HINT_IN_FLIGHT + 1)
    counted = [columns[f"hints_{part}"] for part in parts]
    marked = [int(states[one]) for one in (HINT_COMPLETED, HINT_OVERWRITTEN, HINT_DROPPED, HINT_IN_FLIGHT)]
    yield Proof(
        "hints add up",
        "bytes",
        f"{submitted:,} handed over",
        " + ".join(f"{columns[f'hints_{part}']:,} {part.replace('_', ' ')}" for part in parts)
        + ("" if counted == marked else f", but {marked} are marked so"),
        held=total == submitted and counted == marked,
    )
    number = recording.delivery_error
    yield Proof(
        "hints delivered",
        "bytes",
        "no error of the kernel",
        "none" if number is None else os.strerror(number),
        held=number is None,
    )


def _loaded_alone(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """Resident bytes of the pool against what this run loaded: another reader would give it hits for nothing."""
    passes = [(recording.before, recording.after, run["device_bytes"])]
    if recording.request.warm_pass:
        passes.append((recording.cold, recording.warm, run["warm_device_bytes"]))
    # What is read past the page cache is the same in both passes, unless a policy decides.
    past = None if reads_directly(recording.request.owner, recording.miss_path) else run["direct_bytes"]
    passes = [
        (before, after, 0 if past is None else loaded if loaded is None else loaded - past)
        for before, after, loaded in passes
    ]
    # Of a last page that the file fills in part, less than a page may be read.
    slack = int((-recording.pool.file_bytes % recording.page_bytes).sum())
    free = [
        after["resident_bytes"] - before["resident_bytes"] - loaded
        for before, after, loaded in passes
        if before is not None and after is not None and loaded is not None
    ]
    yield Proof(
        "pool loaded by this run alone",
        "bytes",
        "resident bytes grow by what was read at most",
        f"{max(*free, 0):,} bytes more" if free else "not counted",
        f"{slack:,} bytes" if slack else "",
        held=max(free) <= slack if free else None,
    )


def _shared_pages(recording: Recording) -> int:
    """Pages in which two extents read in one event lie, where both accesses had pages missing.

    Two threads may both see such a page missing, and one of them reads it. A page that was resident when either looked
    is counted by one of them at most, so accesses that missed nothing do not enter.
    """
    pool, page, walk = recording.pool, recording.page_bytes, recording.walk
    begin, end = pool.extent_offset_bytes, pool.extent_offset_bytes + pool.extent_length_bytes
    if not np.any(begin % page) and not np.any(end % page):
        return 0
    stride = int(pool.file_bytes.max()) // page + 2
    file = pool.extent_file.astype(np.int64) * stride
    # Numbered densely, so that an event and a page fit one 64-bit key.
    _, edge = np.unique(np.stack([file + begin // page, file + (end - 1) // page]), return_inverse=True)
    first_page, last_page = edge.reshape(2, -1)
    accesses = np.flatnonzero((recording.arrays["missing_pages"] > 0) & ~recording.served(DIRECT))
    objects = walk.objects[accesses]
    parts = pool.object_first_extent[objects + 1] - pool.object_first_extent[objects]
    of_access = np.repeat(np.arange(len(accesses)), parts)
    within = np.arange(len(of_access)) - np.repeat(np.cumsum(parts) - parts, parts)
    extent = pool.object_first_extent[objects][of_access] + within
    event = recording.access_event[accesses][of_access] * (int(edge.max(initial=0)) + 1)
    several = first_page[extent] != last_page[extent]
    keys = np.concatenate([event + first_page[extent], (event + last_page[extent])[several]])
    return len(keys) - len(np.unique(keys))


def _within_wall(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    name, limits, own = "resident within the wall", recording.limits, recording.own_anonymous_bytes
    if limits.wall_bytes is None or own is None:
        return
    room = limits.wall_bytes - own - limits.others_bytes - (recording.arena_bytes or 0)
    slack = int(RESIDENT_SHARE * limits.wall_bytes)
    if recording.request.mechanism in ("balloon", "boot", "offline") and recording.request.outer_group_bytes is None:
        slack += BALLOON_SLACK_BYTES
    most = run["resident_max_bytes"]
    steps = recording.resident_bytes
    if most is None:
        yield Proof(name, "bytes", f"at most {room:,} bytes", "no step ended")
        return
    above = int(np.count_nonzero(steps > room + slack))
    yield Proof(
        name,
        "bytes",
        f"at most {format_bytes(room)} at the end of each step",
        f"at most {format_bytes(most)}, {above:,} of {len(steps):,} steps above",
        f"{format_bytes(slack)}",
        held=above == 0 and int(steps.min()) >= 0,
    )


def _wall_alive(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """The limit as the group says it, after every step; and the group the reader is in."""
    if recording.limits.limit_bytes is not None:
        expected = recording.limits.limit_bytes
        found = {
            counters.parse_single_number(recording.step_text(step, "limit")) for step in range(recording.ended_steps)
        }
        if recording.after is not None:
            found.add(counters.parse_single_number(text_of(recording.after, "limit")))
        yield Proof(
            "wall alive",
            "bytes",
            f"limit {expected:,} bytes after every step",
            ", ".join(
                "gone" if size is None else f"{size:,} bytes" for size in sorted(found, key=lambda size: size or 0)
            ),
            held=found == {expected} if found else None,
        )
    places = {recording.step_text(step, "cgroup") for step in range(recording.ended_steps)}
    snapshots = (recording.cold, recording.before, recording.after)
    places |= {text_of(snapshot, "cgroup") for snapshot in snapshots if snapshot is not None}
    group = recording.limits.group_path
    same = len(places) == 1 and (
        group is None or all(place is not None and group.encode() in place for place in places)
    )
    yield Proof(
        "one scope",
        "bytes",
        "warm-up and every measured step in " + (group or "the same groups"),
        "the same" if same else f"{len(places)} different sets of groups, or outside it",
        held=same,
    )


def _arena_locked(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """The locked memory of the reader after every step: what was swapped or given back holds no expert."""
    if recording.holding is None:
        return
    expected = -(-recording.holding.arena_bytes // recording.page_bytes) * recording.page_bytes
    found = {recording.arena_bytes} | {
        (counters.parse_status(recording.step_text(step, "own_status")) or {}).get("VmLck")
        for step in range(recording.ended_steps)
    }
    yield Proof(
        "arena locked",
        "bytes",
        f"{expected:,} bytes locked by the reader before the run and after every step",
        ", ".join(
            "not said" if size is None else f"{size:,} bytes" for size in sorted(found, key=lambda size: size or 0)
        ),
        held=found == {expected},
    )


def _decisions(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """What locked memory served against what a simulation of table or policy, made from the trace alone, hits."""
    if recording.holding is None or recording.status != "complete":
        return
    expected = expected_hits(recording.choice, recording.holding, recording.walk, recording.request)
    found = recording.served(HELD)
    differ = int(np.count_nonzero(found != expected))
    yield Proof(
        "decisions as simulated",
        "bytes",
        f"{int(np.count_nonzero(expected)):,} of {len(expected):,} accesses served from locked memory",
        f"{int(np.count_nonzero(found)):,}, {differ:,} decided otherwise",
        held=differ == 0,
    )


def _balloon_alive(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    limits = recording.limits
    if limits.balloon_bytes is None:
        return
    lost, least = 0, None
    for step in range(recording.ended_steps):
        locked, start = balloon_state(
            recording.step_text(step, "balloon_status") or b"", recording.step_text(step, "balloon_stat") or b""
        )
        if locked != limits.balloon_bytes or start != limits.balloon_start_ticks:
            lost += 1
        mlocked = (counters.parse_meminfo(recording.step_text(step, "meminfo")) or {}).get("Mlocked")
        least = mlocked if least is None or (mlocked is not None and mlocked < least) else least
    yield Proof(
        "balloon alive",
        "bytes",
        f"{limits.balloon_bytes:,} bytes locked by the same process after every step",
        f"{lost:,} of {recording.ended_steps:,} steps without",
        held=lost == 0 if recording.ended_steps else None,
    )
    if limits.balloon_machine_locked_bytes is not None and least is not None:
        # Each processor keeps a batch of small pages back before it counts them.
        slack = 64 * int(recording.machine_before.get("cpus") or 1) * recording.page_bytes
        yield Proof(
            "locked memory not lower",
            "bytes",
            f"Mlocked at least {limits.balloon_machine_locked_bytes:,} bytes",
            f"at least {least:,} bytes",
            format_bytes(slack),
            held=least >= limits.balloon_machine_locked_bytes - slack,
        )


def _machine_size(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """The memory of a machine that is the limit: memory that comes or goes meanwhile is another limit."""
    expected = recording.limits.memory_bytes
    if expected is None:
        return
    texts = [recording.step_text(step, "meminfo") for step in range(recording.ended_steps)]
    if recording.after is not None:
        texts.append(text_of(recording.after, "meminfo"))
    found = {(counters.parse_meminfo(text) or {}).get("MemTotal") for text in texts}
    yield Proof(
        "machine size unchanged",
        "bytes",
        f"MemTotal {expected:,} bytes, as when it was calibrated, after every step",
        ", ".join(
            "not said" if size is None else f"{size:,} bytes" for size in sorted(found, key=lambda size: size or 0)
        ),
        held=found == {expected} if found else None,
    )


def _no_oom_no_swap(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    machine = between(recording, "vmstat", counters.parse_flat, lambda stat: stat.get("oom_kill"))
    group = recording.group_oom_kills
    # Where a group holds all of a run, a kill elsewhere on the machine is somebody else's.
    counted = machine if group is None else group
    yield Proof(
        "no out-of-memory kill",
        "bytes",
        "0 in the run's group" if group is not None else "0 on the machine",
        "not counted here" if counted is None else f"{counted} (machine {machine}, group {group})",
        held=None if counted is None else counted == 0,
    )
    swapped = [
        between(recording, "vmstat", counters.parse_flat, lambda stat, name=name: stat.get(name))
        for name in ("pswpin", "pswpout")
    ]
    own = (counters.parse_status(text_of(recording.after, "status")) or {}).get("VmSwap")
    known = [number for number in (*swapped, own) if number is not None]
    yield Proof(
        "no swap",
        "bytes",
        "0 pages in or out, 0 bytes of the reader",
        "not counted here" if not known else f"{swapped[0]} in, {swapped[1]} out, {own} bytes",
        held=sum(known) == 0 if known else None,
    )


def _times_add_up(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """Step times by thread 0 against the whole interval by the thread that waits, and stalls inside their steps."""
    if recording.status != "complete" or run["interval_ns"] is None:
        return
    name, found, expected = "step times sum to the interval", run["wall_ns"] + run["check_ns"], run["interval_ns"]
    slack = int(TIME_SHARE * expected) + TIME_SLACK_NS
    if recording.asker_cpu_ns is None:
        yield Proof(
            name,
            "time",
            f"{expected / 1e6:,.1f} ms",
            f"{found / 1e6:,.1f} ms",
            f"{slack / 1e6:.1f} ms",
            held=abs(found - expected) <= slack,
        )
    else:
        # Between steps the loop waits for who asks.
        yield Proof(name, "time", f"at most {expected / 1e6:,.1f} ms", f"{found / 1e6:,.1f} ms", held=found <= expected)
    yield Proof(
        "stalls within their steps",
        "time",
        f"at most {run['wall_ns'] / 1e6:,.1f} ms",
        f"{run['stall_ns'] / 1e6:,.1f} ms",
        held=0 < run["stall_ns"] <= run["wall_ns"],
    )


def _together(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """Replays that are to contend must do so all the while the shortest of them is measured."""
    if recording.company is None or recording.span is None:
        return
    overlap, shortest = recording.overlap_ns, recording.shortest_ns
    known = overlap is not None and shortest is not None
    yield Proof(
        "measured together",
        "bytes",
        f"{recording.company.size} measured passes at the same time, until the first of them ends",
        f"{overlap / 1e6:,.1f} ms of {shortest / 1e6:,.1f} ms"
        if overlap is not None and shortest is not None
        else "not all of them ended",
        f"{100 * APART_SHARE:.0f} %",
        held=known and (overlap or 0) >= (1 - APART_SHARE) * (shortest or 0),
    )


def _quiet(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    """What leaves the bytes alone but makes times worthless: neighbours, load, idle page-out, emulation, own checks."""
    neighbor, device = run["neighbor_bytes"], run["device_bytes"]
    if recording.company is not None:
        yield Proof("no neighbour on the device", "time", "little beside the run's own reads", "replays ran together")
    elif neighbor is None or device is None:
        yield Proof("no neighbour on the device", "time", "little beside the run's own reads", "not counted here")
    else:
        allowed = int(max(NEIGHBOR_SHARE * device, NEIGHBOR_SLACK_BYTES))
        yield Proof(
            "no neighbour on the device",
            "time",
            "0 bytes read by others",
            format_bytes(neighbor),
            format_bytes(allowed),
            held=neighbor <= allowed,
        )
    yield from _load(recording, run)
    yield from _idle_page_out(recording, run)
    virtualization = str(recording.machine_before.get("virtualization"))
    yield Proof("no emulation", "time", "a real or virtual processor", virtualization, held="tcg" not in virtualization)
    threads_ns = run["wall_ns"] * recording.request.threads
    own = run["observe_ns"] + run["verify_ns"]
    if threads_ns:
        yield Proof(
            "checks are cheap",
            "time",
            "0 % of the demand threads' time",
            f"{100 * own / threads_ns:.1f} %",
            f"{100 * OBSERVATION_SHARE:.0f} %",
            held=own <= OBSERVATION_SHARE * threads_ns,
        )


def _load(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    name, expected = "no foreign load", "0 % of the processors"
    busy = between(recording, "cpu", counters.parse_cpu_stat, lambda cpu: cpu.busy_ns + cpu.stolen_ns)
    total = between(recording, "cpu", counters.parse_cpu_stat, lambda cpu: cpu.total_ns)
    if recording.company is not None:
        yield Proof(name, "time", expected, "replays ran together")
        return
    # The kernel accounts by tick; below a quarter of a second a share says nothing.
    if busy is None or not total or run["cpu_ns"] is None or run["interval_ns"] < 250_000_000:
        yield Proof(name, "time", expected, "too short to tell" if total else "not counted here")
        return
    share = max(busy - run["cpu_ns"] - (recording.asker_cpu_ns or 0), 0) / total
    yield Proof(name, "time", expected, f"{100 * share:.1f} %", f"{100 * LOAD_SHARE:.0f} %", held=share <= LOAD_SHARE)


def _idle_page_out(recording: Recording, run: dict[str, Any]) -> Iterator[Proof]:
    name, damon = "no idle page-out by the machine", str(recording.machine_before.get("damon"))
    request = recording.request
    if request.mechanism == "none" and fills_page_cache(request.owner, recording.miss_path):
        if recording.before is None or recording.after is None or run["device_bytes"] is None:
            return
        grown = recording.after["resident_bytes"] - recording.before["resident_bytes"]
        lost = run["device_bytes"] - run["direct_bytes"] - grown
        yield Proof(
            name,
            "time",
            "resident bytes grow by what was read",
            f"{lost:,} bytes left meanwhile (DAMON {damon})",
            held=lost == 0,
        )
        return
    long = run["interval_ns"] is not None and run["interval_ns"] > IDLE_PAGE_OUT_NS
    on = damon.startswith("on")
    yield Proof(
        name,
        "time",
        "no kernel thread that pages out idle memory",
        f"DAMON {damon}",
        "runs up to 20 s",
        held=not (on and long),
    )


_OF_MEASURED: tuple[Callable[[Recording, dict[str, Any]], Iterator[Proof]], ...] = (
    _conserved,
    _bytes_returned,
    _content,
    _device_identity,
    _hints,
    _loaded_alone,
    _within_wall,
    _wall_alive,
    _arena_locked,
    _decisions,
    _balloon_alive,
    _machine_size,
    _no_oom_no_swap,
    _together,
    _times_add_up,
    _quiet,
)
