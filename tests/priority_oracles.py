"""Slow, obvious versions of the policies of `replayer.priorities`; they import nothing of ours.

An oracle knows one cache. In: the events that it serves, each a list of objects in the order walked; `size` of each
object in the unit of `capacity`; `admits`, the objects that may enter. Out: one bool per access, true = found resident.
"""

from fractions import Fraction

INFINITY = float("inf")


def total(things, size):
    return sum(size[thing] for thing in things)


def by_count_or_recency(policy, events, *, atomic, size, capacity, admits):
    """lfu_gated, lfu_always, lfu_in_cache, lfru and least_stale, from the definitions."""
    count, last_event, last_access = {}, {}, {}
    resident, found, clock = set(), [], 0

    def rank(thing):
        """The lowest leaves."""
        if policy == "lfru":
            age = now - last_event[thing] + 1
            return Fraction(count[thing], age), last_event[thing], thing
        if policy == "least_stale":
            return last_event[thing], thing
        return count[thing], last_access[thing]

    for now, event in enumerate(events):
        order, protected = event, set()
        if atomic:
            found += [thing in resident for thing in event]
            hits = [thing for thing in event if thing in resident]
            order, protected = hits + [thing for thing in event if thing not in resident], set(event)
        for thing in order:
            if not atomic:
                found.append(thing in resident)
            if thing not in admits:
                continue
            clock += 1
            count[thing], last_event[thing], last_access[thing] = count.get(thing, 0) + 1, now, clock
            if thing in resident:
                continue
            evictable, victims = sorted(resident - protected, key=rank), []
            while evictable and total(resident, size) - total(victims, size) + size[thing] > capacity:
                victims.append(evictable.pop(0))
            fits = total(resident, size) - total(victims, size) + size[thing] <= capacity
            if fits and (policy != "lfu_gated" or all(count[thing] > count[victim] for victim in victims)):
                resident = (resident - set(victims)) | {thing}
            if policy == "lfu_in_cache":
                count = {other: times for other, times in count.items() if other in resident}
    return found


def belady_sequential(events, *, size, capacity, admits, forced):
    """Evicts the farthest next access; with bypass, only for what is accessed sooner than every victim."""
    accesses = [[thing] for event in events for thing in event]
    resident, found = set(), []
    for now, (thing,) in enumerate(accesses):
        found.append(thing in resident)
        if thing in resident or thing not in admits or size[thing] > capacity:
            continue
        victims = []
        while total(resident, size) - total(victims, size) + size[thing] > capacity:
            victims.append(max(resident - set(victims), key=lambda other: (next_use(accesses, now, other), other)))
        its_next_use = next_use(accesses, now, thing)
        if forced or all(its_next_use < next_use(accesses, now, victim) for victim in victims):
            resident = (resident - set(victims)) | {thing}
    return found


def belady_atomic(events, *, size, capacity, admits, forced):
    """Keeps the nearest next events of residents and members; forced drops members only when nothing else is left."""
    resident, found = set(), []
    for now, event in enumerate(events):
        found += [thing in resident for thing in event]
        resident |= {thing for thing in event if size[thing] <= capacity and thing in admits}
        while total(resident, size) > capacity:
            others = resident - set(event)
            droppable = others if forced and others else resident
            resident.remove(max(droppable, key=lambda thing: (next_use(events, now, thing), thing)))
    return found


def next_use(events, now, thing):
    """The next event after event `now` that accesses `thing`."""
    return next((later for later in range(now + 1, len(events)) if thing in events[later]), INFINITY)


def next_times(events, *, atomic):
    """For each access the next event (sequential: the next access) of its object, aside from its own."""
    if not atomic:
        events = [[thing] for event in events for thing in event]
    return [next_use(events, now, thing) for now, event in enumerate(events) for thing in event]


def decide(policy, events, *, atomic, size, capacity, admits):
    """The oracle of a policy by its name."""
    known = {"size": size, "capacity": capacity, "admits": admits}
    if policy.startswith("belady"):
        belady = belady_atomic if atomic else belady_sequential
        return belady(events, forced=policy == "belady_forced", **known)
    return by_count_or_recency(policy, events, atomic=atomic, **known)
