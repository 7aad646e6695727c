"""Slow, obvious versions of the clever things, written from design.md section 5; they import nothing of ours.

An *object* is a (layer, expert) pair. An *event* is the list of objects it accesses, in the order they are walked.
A policy's oracle knows one cache: `events` in, one bool per access out (true = found resident). `size` maps an object
to its size in the unit of `capacity`. `each_cache` applies an oracle to the caches of a scope.
"""

from functools import cache
from itertools import combinations, pairwise

INFINITY = float("inf")


def accessed(rows, order, dedup):
    """Expert ids of one event in walk order, from its rows of ids; `router` is row by row, rank by rank."""
    mentioned = [expert for row in rows for expert in row]
    if dedup == "union":
        mentioned = list(dict.fromkeys(mentioned))
    return {"router": mentioned, "ascending": sorted(mentioned), "descending": sorted(mentioned)[::-1]}[order]


def each_cache(oracle, events, cache_of_event, capacity_of_cache, *, step_of_event, **known):
    """Decisions over all events, each event served by the cache that `cache_of_event` lists for it."""
    decisions = {}
    for name, capacity in capacity_of_cache.items():
        mine = [event for event, its_cache in zip(events, cache_of_event, strict=True) if its_cache == name]
        steps = [step for step, its_cache in zip(step_of_event, cache_of_event, strict=True) if its_cache == name]
        decisions[name] = iter(oracle(mine, capacity=capacity, steps=steps, **known))
    return [next(decisions[name]) for event, name in zip(events, cache_of_event, strict=True) for _ in event]


def one_by_one(events):
    """Sequential semantics: every access is an event of its own."""
    return [[thing] for event in events for thing in event]


def total(things, size):
    return sum(size[thing] for thing in things)


def lru(events, *, size, capacity):
    """Event-atomic; sequential over `one_by_one(events)`. The stack holds the most recent first and is never cut."""
    stack, found = [], []
    for event in events:
        resident = [thing for place, thing in enumerate(stack) if total(stack[: place + 1], size) <= capacity]
        found += [thing in resident for thing in event]
        for thing in event:
            if size[thing] <= capacity:
                stack = [thing] + [other for other in stack if other != thing]
    return found


def lfu(events, *, size, capacity, gated):
    """Event-atomic; sequential over `one_by_one(events)`. Counts are never forgotten."""
    count, last_use, resident, found, now = {}, {}, set(), [], 0
    for event in events:
        hits, misses = [x for x in event if x in resident], [x for x in event if x not in resident]
        found += [thing in hits for thing in event]
        for thing in hits + misses:
            now += 1
            count[thing], last_use[thing] = count.get(thing, 0) + 1, now
            if thing in resident:
                continue
            evictable = sorted(resident - set(event), key=lambda other: (count[other], last_use[other]))
            victims = []
            while evictable and total(resident, size) - total(victims, size) + size[thing] > capacity:
                victims.append(evictable.pop(0))
            fits = total(resident, size) - total(victims, size) + size[thing] <= capacity
            if fits and (not gated or all(count[thing] > count[victim] for victim in victims)):
                resident = (resident - set(victims)) | {thing}
    return found


def static(events, *, size, capacity, fitted_on):
    """A table of the most accessed objects of the events `fitted_on`, ties to the lowest; it never changes."""
    fitted = [thing for event in fitted_on for thing in event]
    table = set()
    for thing in sorted(set(fitted), key=lambda one: (-fitted.count(one), one)):
        if total(table, size) + size[thing] <= capacity:
            table.add(thing)
    return [thing in table for event in events for thing in event]


def next_use(events, now, thing):
    """The next event after event `now` that accesses `thing`."""
    return next((later for later in range(now + 1, len(events)) if thing in events[later]), INFINITY)


def belady_sequential(events, *, size, capacity, forced):
    """Evicts the resident with the farthest next access; ties leave in descending (layer, expert)."""
    accesses = one_by_one(events)
    resident, found = set(), []
    for now, (thing,) in enumerate(accesses):
        found.append(thing in resident)
        if thing in resident or size[thing] > capacity:
            continue
        farthest = sorted(resident, key=lambda other: (next_use(accesses, now, other), other), reverse=True)
        victims = []
        while total(resident, size) - total(victims, size) + size[thing] > capacity:
            victims.append(farthest.pop(0))
        is_nearer = all(next_use(accesses, now, thing) < next_use(accesses, now, victim) for victim in victims)
        if forced or is_nearer:
            resident = (resident - set(victims)) | {thing}
    return found


def belady_atomic(events, *, size, capacity, forced):
    """Keeps the nearest next events of residents and members; forced drops members only when nothing else is left."""
    resident, found = set(), []
    for now, event in enumerate(events):
        found += [thing in resident for thing in event]
        resident |= {thing for thing in event if size[thing] <= capacity}
        while total(resident, size) > capacity:
            others = resident - set(event)
            droppable = others if forced and others else resident
            resident.remove(max(droppable, key=lambda thing: (next_use(events, now, thing), thing)))
    return found


def token_clock(events, *, size, capacity, steps):
    """Sequential; the victim is the lowest object of the oldest step, and it leaves before the newcomer enters."""
    last_step, resident, found = {}, set(), []
    for event, step in zip(events, steps, strict=True):
        for thing in event:
            found.append(thing in resident)
            if size[thing] > capacity:
                continue
            while thing not in resident and total(resident, size) + size[thing] > capacity:
                resident.remove(min(resident, key=lambda other: (last_step[other], other)))
            resident.add(thing)
            last_step[thing] = step
    return found


def pinned_lru(events, *, size, capacity, fitted_on, admitted):
    """Half of the capacity is a static table, what that leaves is LRU over all other objects."""
    fitted = sorted({thing for event in fitted_on for thing in event})
    in_table = static([fitted], size=size, capacity=capacity // 2, fitted_on=fitted_on)
    held = {thing for thing, is_in in zip(fitted, in_table, strict=True) if is_in}
    others = [[thing for thing in event if thing not in held] for event in events]
    left = capacity - total(held, size)
    rest = iter(decide("lru", "event_atomic", others, size=size, capacity=left, admitted=admitted))
    return [thing in held or next(rest) for event in events for thing in event]


POLICIES = ("lru", "lfu_gated", "lfu_always", "static", "pinned_lru", "belady_bypass", "belady_forced")
"""Policies that have their oracle here; those of queues and other priorities stand in files of their own."""


def decide(policy, semantics, events, *, size, capacity, steps=None, fitted_on=(), admitted=None):
    """The oracle of a policy by its name, for one cache; what is not `admitted` is served past it."""
    if policy == "static":
        return static(events, size=size, capacity=capacity, fitted_on=fitted_on)
    if semantics == "sequential" and not policy.startswith("belady"):
        events = one_by_one(events)
    if policy == "pinned_lru":
        return pinned_lru(events, size=size, capacity=capacity, fitted_on=fitted_on, admitted=admitted)
    if admitted is not None:
        # Who may not enter is never resident, so its accesses miss and leave everything else as it was.
        seen = [[thing for thing in event if thing in admitted] for event in events]
        inside = iter(decide(policy, semantics, seen, size=size, capacity=capacity, steps=steps))
        return [thing in admitted and next(inside) for event in events for thing in event]
    if semantics == "token_clock":
        return token_clock(events, size=size, capacity=capacity, steps=steps)
    if policy.startswith("belady"):
        belady = belady_atomic if semantics == "event_atomic" else belady_sequential
        return belady(events, size=size, capacity=capacity, forced=policy == "belady_forced")
    if policy == "lru":
        return lru(events, size=size, capacity=capacity)
    return lfu(events, size=size, capacity=capacity, gated=policy == "lfu_gated")


def most_hits_sequential(accesses, capacity, *, must_admit):
    """The most hits any demand policy can have, by trying every victim (and, unless it must admit, bypassing)."""

    @cache
    def most(now, resident):
        if now == len(accesses):
            return 0
        thing = accesses[now]
        if thing in resident:
            return 1 + most(now + 1, resident)
        choices = [] if must_admit and capacity else [resident]
        if len(resident) < capacity:
            choices.append(resident | {thing})
        else:
            choices += [resident - {victim} | {thing} for victim in resident]
        return max(most(now + 1, choice) for choice in choices)

    return most(0, frozenset())


def most_hits_atomic(events, capacity):
    """The most hits if after each event any of its members and the residents may stay, up to the capacity."""

    @cache
    def most(now, resident):
        if now == len(events):
            return 0
        pool = sorted(resident | set(events[now]))
        choices = [frozenset(kept) for held in range(capacity + 1) for kept in combinations(pool, held)]
        hits = sum(thing in resident for thing in events[now])
        return hits + max(most(now + 1, choice) for choice in choices)

    return most(0, frozenset())


def lag1_reuse(events):
    """Accesses whose object the event before in the same cache accessed too: the numerator of W_1."""
    return sum(thing in before for before, event in pairwise(events) for thing in event)


def is_sampled(access: int, every: int) -> bool:
    """Whether one in `every` accesses, chosen by SplitMix64's output function of its place, has its residency asked."""
    word = (access ^ (access >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return (word ^ (word >> 31)) % every == 0
