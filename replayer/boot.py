"""A machine that is small, by `mem=` on the kernel's command line or by itself, as the limit of a replay.

Nothing is locked and nothing needs root: how much room there is, is read once the reader holds its own memory, and
whether it is the size that was asked for is decided here. Text in, numbers and refusals out; `replay` reads the files.
"""

import re
from dataclasses import dataclass

from replayer.capacity import NotEnforceable
from replayer.counters import parse_meminfo
from replayer.quantities import format_bytes

LARGER_SHARE = 0.25
LARGER_SLACK_BYTES = 24 << 20
"""How far the room may exceed what was asked for, whichever is more: the kernel's reserves alone move by 20 MiB."""

_KERNEL_BYTES = 64 << 20
"""Of `mem=`, what is no part of MemTotal: image and page tables; 1/64 of the memory comes on top. A first guess."""

_PAGE_STRUCTS = 64
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class Calibration:
    """What a small machine leaves: room_bytes for experts and headroom, memory_bytes is MemTotal."""

    room_bytes: int
    memory_bytes: int
    limit_word: str | None

    @property
    def detail(self) -> str:
        """How the machine is limited, in words."""
        if self.limit_word is not None:
            return f"booted with {self.limit_word}"
        return f"a machine of {format_bytes(self.memory_bytes)}"


def boot_limit(cmdline: str) -> str | None:
    """The word `mem=SIZE` that limits memory; null without. The last counts, and `mem=nopentium` is another thing."""
    words = [word for word in cmdline.split() if re.fullmatch(r"mem=[0-9]\w*", word)]
    return words[-1] if words else None


def boot_limit_bytes(word: str) -> int | None:
    """The size in such a word, in bytes."""
    match = re.fullmatch(r"mem=(0x[0-9a-f]+?|[0-9]+)([kmgt]?)", word.lower())
    return int(match[1], 0) * _UNITS[match[2]] if match else None


def calibrate(
    meminfo: bytes, cmdline: str, available_bytes: int, *, room_bytes: int | None, pool_bytes: int, step_bytes: int = 0
) -> Calibration:
    """The room of this machine, which has `available_bytes` now that the reader has its own memory.

    room_bytes: what was asked for of experts and headroom, null where any will do. pool_bytes: what would be cached if
    nothing limited it. step_bytes: what the size of the machine can be chosen in, where it can.

    Raises:
        NotEnforceable: the machine has far more, or less, room than was asked for, or holds all of the pool.
    """
    memory_bytes = (parse_meminfo(meminfo) or {}).get("MemTotal")
    if memory_bytes is None:
        raise NotEnforceable("/proc/meminfo does not say MemTotal", "mount /proc")
    found = Calibration(available_bytes, memory_bytes, boot_limit(cmdline))
    taken = max(memory_bytes - available_bytes, 0)
    if room_bytes is None:
        if found.limit_word is None and available_bytes >= pool_bytes:
            raise NotEnforceable(
                f"this machine has {available_bytes:,} bytes available and was booted without mem=, so all of the "
                f"pool's {pool_bytes:,} bytes may stay in memory and nothing limits it",
                f"boot it with about {_suggested(pool_bytes // 2, taken)} for half of it, or use --mechanism none",
            )
        return found
    if available_bytes > room_bytes + max(LARGER_SLACK_BYTES, int(LARGER_SHARE * room_bytes), step_bytes):
        raise NotEnforceable(
            f"this machine has {available_bytes:,} bytes available ({found.detail}), far more than the capacity and "
            f"headroom of {room_bytes:,} bytes",
            f"boot it with about {_suggested(room_bytes, taken)} (what else runs here takes {format_bytes(taken)}), "
            "use --mechanism cgroup or balloon, or leave --capacity out to take what the machine has",
        )
    if available_bytes < room_bytes:
        raise NotEnforceable(
            f"this machine has {available_bytes:,} bytes available ({found.detail}), less than the capacity and "
            f"headroom of {room_bytes:,} bytes",
            f"ask for less, leave --capacity out, or boot it with about {_suggested(room_bytes, taken)}",
        )
    return found


def _suggested(room_bytes: int, taken_bytes: int) -> str:
    """`mem=` for a machine that leaves so much beside what is taken of it now."""
    wanted = (room_bytes + taken_bytes + _KERNEL_BYTES) * _PAGE_STRUCTS // (_PAGE_STRUCTS - 1)
    return f"mem={wanted // (1 << 20) + 1}M"
