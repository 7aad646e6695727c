"""Slow, obvious versions of what `replayer.curves` computes, in plain lists; they import nothing of ours.

An *event* is the list of objects it accesses, in the order they are walked. One cache at a time.
"""

from itertools import product


def one_by_one(events):
    """Sequential semantics: every access is an event of its own."""
    return [[thing] for event in events for thing in event]


def stack_distances(events, *, atomic, admitted=None):
    """Per access how many other objects lie above it in the recency stack; "first" or "never" where it is not there.

    Event-atomic: as the stack stood when the event began. What is not `admitted` never enters the stack.
    """
    stack, seen, found = [], set(), []
    for event in events if atomic else one_by_one(events):
        before = list(stack)
        for thing in event:
            found.append(before.index(thing) if thing in before else "never" if thing in seen else "first")
            seen.add(thing)
        for thing in event:
            if admitted is None or thing in admitted:
                stack = [thing] + [other for other in stack if other != thing]
    return found


def byte_distances(events, *, atomic, size):
    """As `stack_distances`: the bytes of the stack from its top down to the object, its own included."""
    stack, seen, found = [], set(), []
    for event in events if atomic else one_by_one(events):
        before = list(stack)
        for thing in event:
            if thing in before:
                found.append(sum(size[other] for other in before[: before.index(thing) + 1]))
            else:
                found.append("never" if thing in seen else "first")
            seen.add(thing)
        for thing in event:
            stack = [thing] + [other for other in stack if other != thing]
    return found


def table_hits(accesses, fitted_on, objects, size):
    """Accesses to the `size` objects that `fitted_on` names most often, ties to the lowest."""
    table = sorted(objects, key=lambda thing: (-fitted_on.count(thing), thing))[:size]
    return sum(thing in table for thing in accesses)


def others_between_visits(events, layers):
    """Per event the distinct objects accessed since the event before of the same layer, without both; null for none."""
    found = []
    for now, layer in enumerate(layers):
        earlier = [event for event in range(now) if layers[event] == layer]
        if earlier:
            found.append(len({thing for event in events[earlier[-1] + 1 : now] for thing in event}))
        else:
            found.append(None)
    return found


def best_split(hits_by_cache, total):
    """The split of `total` with the most hits, by trying all; among equals the one that gives the lowest cache most."""
    total = min(total, sum(len(hits) - 1 for hits in hits_by_cache))
    splits = [split for split in product(*[range(len(hits)) for hits in hits_by_cache]) if sum(split) == total]
    return max(
        splits,
        key=lambda split: (sum(hits[part] for hits, part in zip(hits_by_cache, split, strict=True)), split),
    )
