"""What the kernel counted of reclaim while one run was measured: text in, rows of the table `replay_reclaim` out.

Each column's definition, with the counter behind it and what that misses, is in `schemas.columns`. Nothing here judges
a run. A counter that is absent, or that went back, is null.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from replayer import counters
from replayer.accounting import Recording, text_of
from replayer.nodes import parse_node_meminfo, parse_numa_stat

_NODE = {
    "node_bytes": "MemTotal",
    "node_free_bytes": "MemFree",
    "node_file_bytes": "FilePages",
    "node_locked_bytes": "Mlocked",
}

SCAN_PER_STEAL_FLAG = 2.0
"""More pages scanned than this per page reclaimed: so in every cell of arXiv 2608.12103 §5 that amplified."""

Reader = Callable[[str], bytes | None]
"""Gives the text of a counter file by its name in a snapshot; null where it was not read."""

_REFAULT = "workingset_refault_file"
_ACTIVATED_AT_ONCE = "workingset_activate_file"
_OTHERS = ("khugepaged", "proactive")
"""Who else reclaims, apart from kswapd and processes in want of memory; older kernels count none of them."""

_LEVELS = {
    "machine_free_bytes": "MemFree",
    "machine_available_bytes": "MemAvailable",
    "machine_cached_bytes": "Cached",
    "machine_locked_bytes": "Mlocked",
    "machine_unevictable_bytes": "Unevictable",
    "memory_bytes": "MemTotal",
}


@dataclass(frozen=True)
class Reading:
    """What was counted up to one moment, by column; levels: what was there at that moment."""

    counts: Mapping[str, int | None]
    levels: Mapping[str, int | None]


def read(text: Reader, page_bytes: int) -> Reading:
    """The counters of one moment, from the text of their files."""
    counts: dict[str, int | None] = {}
    counts |= _of_group(_group_stat(text("memory_stat")), page_bytes)
    counts |= _of_machine(counters.parse_flat(text("vmstat")) or {}, page_bytes)
    for whose, prefix in (("group", "group_"), ("machine", "")):
        for resource in ("memory", "io"):
            pressure = counters.parse_pressure(text(f"{prefix}{resource}_pressure"))
            counts[f"{whose}_{resource}_some_ns"] = None if pressure is None else pressure.some_ns
            counts[f"{whose}_{resource}_full_ns"] = None if pressure is None else pressure.full_ns
    return Reading(counts, _levels(text))


def reclaim_rows(recording: Recording, device_bytes: int | None) -> list[dict[str, Any]]:
    """Rows of `replay_reclaim`, less run_id: the measured pass as a whole, then each step that ended.

    device_bytes: of the whole pass. Empty where the run was not measured.
    """
    if recording.before is None or not recording.measured:
        return []
    before = read(partial(text_of, recording.before), recording.page_bytes)
    after = None if recording.after is None else read(partial(text_of, recording.after), recording.page_bytes)
    rows = [{"step_id": None, **_row(before, after, before.levels, device_bytes)}]
    last = before
    for step, step_id in enumerate(recording.ended_step_ids):
        reading = read(partial(recording.step_text, step), recording.page_bytes)
        device = None if recording.step_device_bytes is None else int(recording.step_device_bytes[step])
        rows.append({"step_id": step_id, **_row(last, reading, reading.levels, device)})
        last = reading
    return rows


def node_rows(recording: Recording) -> list[dict[str, Any]]:
    """Rows of `replay_node`, less run_id; empty where the measured pass did not end."""
    if recording.after is None:
        return []
    of_group = parse_numa_stat(text_of(recording.after, "numa_stat"), recording.page_bytes) or {}
    rows = []
    for node in recording.nodes.all:
        meminfo = parse_node_meminfo(text_of(recording.after, f"node {node.node_id}")) or {}
        rows.append(
            {
                "node_id": node.node_id,
                "has_processors": node.has_processors,
                "is_counted": node in recording.nodes.used,
                **{column: meminfo.get(name) for column, name in _NODE.items()},
                "group_node_file_bytes": of_group.get(node.node_id),
            }
        )
    return rows


def _row(
    first: Reading, last: Reading | None, levels: Mapping[str, int | None], device_bytes: int | None
) -> dict[str, Any]:
    row: dict[str, Any] = {"device_bytes": device_bytes, **levels}
    for name, begin in first.counts.items():
        end = None if last is None else last.counts[name]
        row[name] = None if begin is None or end is None or end < begin else end - begin
    for name, (above, below) in RATIOS.items():
        numerator, denominator = row[above], row[below]
        row[name] = None if numerator is None or not denominator else numerator / denominator
    return row


RATIOS = {
    "group_scan_per_steal": ("group_scan_pages", "group_steal_pages"),
    "group_refault_per_device_byte": ("group_refault_bytes", "device_bytes"),
    "group_locked_share": ("group_unevictable_bytes", "group_limit_bytes"),
    "machine_scan_per_steal": ("machine_scan_pages", "machine_steal_pages"),
    "machine_file_scan_per_steal": ("machine_file_scan_pages", "machine_file_steal_pages"),
    "machine_refault_per_device_byte": ("machine_refault_bytes", "device_bytes"),
    "machine_locked_share": ("machine_locked_bytes", "memory_bytes"),
}
"""Derived column → numerator and denominator, as the columns have them."""


def _group_stat(text: bytes | None) -> dict[str, int]:
    """memory.stat of a group; of cgroup v1 the lines that include the groups inside, under the names of v2."""
    stat = counters.parse_flat(text) or {}
    whole = {name.removeprefix("total_"): value for name, value in stat.items() if name.startswith("total_")}
    if not whole:
        return stat
    return {"file" if name == "cache" else name: value for name, value in whole.items()}


def _of_group(stat: Mapping[str, int], page_bytes: int) -> dict[str, int | None]:
    return {
        **_scans("group", stat, whole=True),
        **_common("group", stat, page_bytes),
    }


def _of_machine(stat: Mapping[str, int], page_bytes: int) -> dict[str, int | None]:
    return {
        **_scans("machine", stat, whole=False),
        "machine_file_scan_pages": stat.get("pgscan_file"),
        "machine_file_steal_pages": stat.get("pgsteal_file"),
        **_common("machine", stat, page_bytes),
    }


def _scans(whose: str, stat: Mapping[str, int], *, whole: bool) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for verb in ("scan", "steal"):
        kswapd, direct = stat.get(f"pg{verb}_kswapd"), stat.get(f"pg{verb}_direct")
        total = stat.get(f"pg{verb}") if whole else None
        if total is None and kswapd is not None and direct is not None:
            total = kswapd + direct + sum(stat.get(f"pg{verb}_{other}", 0) for other in _OTHERS)
        found[f"{whose}_kswapd_{verb}_pages"] = kswapd
        found[f"{whose}_direct_{verb}_pages"] = direct
        found[f"{whose}_{verb}_pages"] = total
    return found


def _common(whose: str, stat: Mapping[str, int], page_bytes: int) -> dict[str, int | None]:
    refaults, faults, major = stat.get(_REFAULT), stat.get("pgfault"), stat.get("pgmajfault")
    return {
        f"{whose}_refault_bytes": None if refaults is None else refaults * page_bytes,
        f"{whose}_refault_activated_pages": stat.get(_ACTIVATED_AT_ONCE),
        f"{whose}_activated_pages": stat.get("pgactivate"),
        f"{whose}_minor_faults": None if faults is None or major is None else faults - major,
        f"{whose}_major_faults": major,
    }


def _levels(text: Reader) -> dict[str, int | None]:
    meminfo = counters.parse_meminfo(text("meminfo")) or {}
    stat = _group_stat(text("memory_stat"))
    return {
        **{column: meminfo.get(name) for column, name in _LEVELS.items()},
        "group_cached_bytes": stat.get("file"),
        "group_unevictable_bytes": stat.get("unevictable"),
        "group_limit_bytes": counters.parse_single_number(text("limit")),
    }
