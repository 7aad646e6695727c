"""What one run is asked for, and which of it belongs together. No file, trace or machine is looked at here."""

from dataclasses import dataclass

from replayer.owners import default_miss_path, has_table, holds_memory
from replayer.policies import FITTED

HINTED_OWNERS = ("page_cache", "page_cache_mmap")
"""Owners that get every expert from the page cache, which hints fill."""

MOST_HINT_SLOTS = 1 << 20
LEAST_SPLIT_BYTES = 4096


class UnusableReplay(ValueError):
    """The run asked for cannot be made: a call to correct."""


@dataclass(frozen=True)
class Request:
    """What one run is asked for; everything that may change its numbers enters `condition_hash`.

    capacity_bytes, wall_bytes and outer_group_bytes are null without a limit; of a wall, what the reader's own memory
    and headroom leave is the capacity. steps is half-open, counted without warm-up steps. What owners take: arena,
    hybrid and page_cache_admission a miss_path (`schemas.columns.READ_PATHS`); hybrid the arena_fraction of the
    capacity; arena and hybrid a scope and the fit of their table; user_cache a policy, its scope, and fit where it is
    pinned; page_cache_admission admit, as `simulate.Choices`. group_stat: of `schemas.columns.GROUP_STATS`; after each
    step only where the reader is in a group of its own. accelerator_memory: whether nodes without processors count.
    offline_memory_blocks: says that memory of this machine may be taken offline, which mechanism offline does.
    delivery: of `schemas.columns.DELIVERIES`; all but none take plan, a lookahead plan's file, and split: auto, none,
    or bytes of the largest piece that is asked for at once. hint_slots: places of the queue that hints wait in; null
    for one slot, which a newer hint overwrites.
    """

    owner: str = "page_cache"
    mechanism: str = "none"
    capacity_bytes: int | None = None
    wall_bytes: int | None = None
    headroom_bytes: int = 0
    outer_group_bytes: int | None = None
    miss_path: str | None = None
    arena_fraction: float | None = None
    policy: str | None = None
    scope: str | None = None
    fit: str | None = None
    admit: str | None = None
    seed: int = 0
    fadvise: str = "random"
    destination: str = "cpu"
    threads: int = 8
    observe: str = "every"
    verify: str = "edges"
    group_stat: str = "pass"
    warm_pass: bool = True
    steps: tuple[int | None, int | None] = (None, None)
    accelerator_memory: bool = False
    offline_memory_blocks: bool = False
    plan: str | None = None
    delivery: str = "none"
    split: str | int = "auto"
    hint_slots: int | None = None
    allow_thrash: bool = False
    allow_unsuitable: bool = False


def fits_a_table(request: Request) -> bool:
    """Whether what is held, or pinned, comes from the accesses of a fit."""
    return request.owner in ("arena", "hybrid") or request.policy in FITTED


def check_request(request: Request) -> None:
    """Refuses what does not belong together, before anything is read.

    Raises:
        UnusableReplay: says which two things, and what to do.
    """
    owner, limited = request.owner, request.mechanism != "none"
    if request.capacity_bytes is not None and request.wall_bytes is not None:
        raise UnusableReplay("--capacity and --wall; the wall's rest is the capacity, so say one of them")
    if request.wall_bytes is not None and not limited:
        raise UnusableReplay("--wall with mechanism none, which builds none; add --mechanism cgroup or balloon")
    says_size = request.capacity_bytes is not None or request.wall_bytes is not None
    if holds_memory(owner) and not says_size:
        raise UnusableReplay(f"owner {owner} without --capacity or --wall, so how much it locks is not said; add one")
    # A small machine has the size it has.
    needs_size = limited and request.mechanism != "boot"
    if not holds_memory(owner) and ((says_size and not limited) or (needs_size and not says_size)):
        raise UnusableReplay(
            "--mechanism none takes no --capacity, cgroup, balloon and offline need one (or --wall); say both or "
            "neither"
        )
    if needs_size and not says_size:
        raise UnusableReplay(f"mechanism {request.mechanism} without --capacity or --wall; add one")
    if (owner == "user_cache") != (request.policy is not None):
        raise UnusableReplay(
            "owner user_cache without --policy; add one"
            if owner == "user_cache"
            else f"--policy with owner {owner}, wanted owner user_cache; leave it out"
        )
    if (owner == "page_cache_admission") != (request.admit is not None):
        raise UnusableReplay(
            "owner page_cache_admission without --admit, the table of what may enter; add one"
            if owner == "page_cache_admission"
            else f"--admit with owner {owner}, wanted owner page_cache_admission; leave it out"
        )
    if (owner == "hybrid") != (request.arena_fraction is not None):
        raise UnusableReplay(
            "owner hybrid without --arena-fraction, its locked share of the capacity; add one"
            if owner == "hybrid"
            else f"--arena-fraction with owner {owner}, wanted owner hybrid; leave it out"
        )
    if request.arena_fraction is not None and not 0 < request.arena_fraction < 1:
        raise UnusableReplay(f"--arena-fraction {request.arena_fraction}, wanted above 0 and below 1")
    if request.miss_path is not None and default_miss_path(owner) is None:
        raise UnusableReplay(f"--miss-path with owner {owner}, which reads everything alike; leave it out")
    if owner == "user_cache" and request.miss_path not in (None, "direct"):
        raise UnusableReplay(f"--miss-path {request.miss_path} with owner user_cache, which fills slots by O_DIRECT")
    if owner == "page_cache_admission" and request.miss_path == "buffered":
        raise UnusableReplay("--miss-path buffered with owner page_cache_admission, which would admit all; say direct")
    if request.fit is not None and not fits_a_table(request):
        raise UnusableReplay(f"--fit with owner {owner}, which has no table of its own; leave it out")
    if request.scope is not None and not (holds_memory(owner) or has_table(owner)):
        raise UnusableReplay(f"--scope with owner {owner}, whose cache is one over all layers; leave it out")
    if request.outer_group_bytes is not None and request.mechanism != "balloon":
        raise UnusableReplay(
            f"--machine-bytes with mechanism {request.mechanism}, wanted balloon: that group would limit the reader too"
        )
    if request.group_stat == "step" and request.mechanism != "cgroup" and request.outer_group_bytes is None:
        raise UnusableReplay(
            f"--group-stat step with mechanism {request.mechanism}, which puts the reader in no group; leave it out"
        )
    if request.offline_memory_blocks != (request.mechanism == "offline"):
        raise UnusableReplay(
            f"mechanism {request.mechanism} {'with' if request.offline_memory_blocks else 'without'} "
            "--offline-memory-blocks: mechanism offline takes memory from the whole machine while it replays, so it "
            "needs that word as well, and no other mechanism does"
        )
    if (request.delivery == "none") != (request.plan is None):
        raise UnusableReplay(
            "--plan without --delivery, so nothing of it would be read ahead; add --delivery advice, blocking or uring"
            if request.delivery == "none"
            else f"--delivery {request.delivery} without --plan, the lookahead plan to deliver; add one"
        )
    if request.plan == "":
        raise UnusableReplay("--plan '', wanted the file of a lookahead plan; name one")
    if request.delivery == "none" and (request.split != "auto" or request.hint_slots is not None):
        raise UnusableReplay("--split or --hint-slots without --delivery, to which they belong; leave them out")
    if request.delivery != "none" and owner not in HINTED_OWNERS:
        raise UnusableReplay(
            f"--delivery {request.delivery} with owner {owner}, which reads nothing through the page cache that hints "
            f"could fill; use owner {' or '.join(HINTED_OWNERS)}"
        )
    if request.hint_slots is not None and not 1 <= request.hint_slots <= MOST_HINT_SLOTS:
        raise UnusableReplay(f"--hint-slots {request.hint_slots}, wanted 1 to {MOST_HINT_SLOTS:,}")
    if isinstance(request.split, int) and request.split < LEAST_SPLIT_BYTES:
        raise UnusableReplay(f"--split {request.split}, wanted at least {LEAST_SPLIT_BYTES:,} bytes, auto or none")
    if owner == "page_cache_mmap" and request.fadvise == "noreuse":
        raise UnusableReplay("--fadvise noreuse is advice on reads; choose another with owner page_cache_mmap")
