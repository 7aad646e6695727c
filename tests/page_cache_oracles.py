"""Slow, obvious versions of the page cache models, from the words of their docstrings; they import nothing of ours.

One cache. A folio is (object, part). `events` are groups of accesses in flight at once: in sequential semantics every
access is a group of its own. `sizes` maps an object to its size in the unit of `capacity`. Out comes, access by
access, how many of the object's folios were absent. Lists hold the newest first.
"""

from math import isqrt

RIGHT_SIZES, AT_EVERY_RECLAIM = 0, -1


def size_of(folio, sizes, parts):
    thing, part = folio
    whole, rest = divmod(sizes[thing], parts)
    return whole + (part < rest)


def served(events, absent_parts, may_enter, read):
    """Absent folios of each access; `read` is called for what each group reads, its hits before its misses."""
    found = []
    for event in events:
        absent = [len(absent_parts(thing)) for thing in event]
        found += absent
        for hit_first in (True, False):
            for thing, missing in zip(event, absent, strict=True):
                if (missing == 0) == hit_first and (hit_first or may_enter(thing)):
                    read(thing, event)
    return found


def two_list(events, *, sizes, capacity, parts, batch, folios_per_gib, refresh=RIGHT_SIZES, refused=()):
    """The classic lists; `refresh` is RIGHT_SIZES, AT_EVERY_RECLAIM, or accesses between two looks at statistics."""
    inactive, active, referenced, left_at = [], [], set(), {}
    now = {"age": 0, "refaults": 0, "seen": 0, "accesses": 0, "known": (0, 0, 0)}

    def used(folios):
        return sum(size_of(folio, sizes, parts) for folio in folios)

    def deactivates():
        low, high, refaults = now["known"]
        if refresh in (RIGHT_SIZES, AT_EVERY_RECLAIM):
            low, high = len(inactive), len(active)
            refaults = now["seen"] if refresh == RIGHT_SIZES else now["refaults"]
        ratio = isqrt(10 * ((low + high) // folios_per_gib)) or 1
        answer = low * ratio < high or refaults != now["seen"]
        now["seen"] = refaults
        return answer

    def scan(priority, event, *, deactivating):
        """Folios evicted by one look at both lists."""
        to_evict, to_move = len(inactive) >> priority, (len(active) >> priority) * deactivating
        gone = 0
        while (to_evict > 0 or to_move > 0) and gone < batch:
            for folio in [one for one in inactive[::-1] if one[0] not in event][: max(min(to_evict, batch), 0)]:
                inactive.remove(folio)
                referenced.discard(folio)
                left_at[folio] = now["age"]
                now["age"] += 1
                gone += 1
            for folio in [one for one in active[::-1] if one[0] not in event][: max(min(to_move, batch), 0)]:
                active.remove(folio)
                inactive.insert(0, folio)
            to_evict, to_move = to_evict - batch, to_move - batch
        return gone

    def reclaim(event):
        for deactivating in (deactivates(), True):
            gone = 0
            for priority in range(12, -1, -1):
                gone += scan(priority, event, deactivating=deactivating)
                if gone >= batch:
                    break
            if gone:
                break

    def absent_parts(thing):
        if refresh > 0 and now["accesses"] % refresh == 0:
            now["known"] = (len(inactive), len(active), now["refaults"])
        now["accesses"] += 1
        return [part for part in range(parts) if (thing, part) not in inactive + active]

    def read(thing, event):
        for folio in [(thing, part) for part in range(parts)]:
            if folio in inactive and folio in referenced:
                inactive.remove(folio)
                active.insert(0, folio)
                referenced.remove(folio)
                now["age"] += 1
            elif folio in inactive + active:
                referenced.add(folio)
            else:
                wanted = capacity - size_of(folio, sizes, parts)
                if used(one for one in inactive + active if one[0] in event) > wanted:
                    continue
                while used(inactive + active) > wanted:
                    reclaim(event)
                referenced.add(folio)
                longest = now["known"][1] if refresh > 0 else len(active)
                if folio in left_at and now["age"] - left_at[folio] <= longest:
                    active.insert(0, folio)
                    now["age"] += 1
                    now["refaults"] += 1
                else:
                    inactive.insert(0, folio)

    return served(events, absent_parts, lambda thing: thing not in refused and sizes[thing] <= capacity, read)


def mglru(events, *, sizes, capacity, parts, batch, refused=()):
    """The generations; `batch` folios are evicted at once, half of them are enough for a reclaim."""
    generations = {0: [], 1: [], 2: [], 3: []}
    reads, left = {}, {}
    refaulted, evicted, kept, mean_refaulted, mean_total = ([0] * 4 for _ in range(5))

    def tier_of(times):
        return max(times - 1, 0).bit_length()

    def used(folios):
        return sum(size_of(folio, sizes, parts) for folio in folios)

    def highest_tier():
        def counted(tier):
            return mean_refaulted[tier] + refaulted[tier], mean_total[tier] + evicted[tier] + kept[tier]

        first_refaulted, first_total = counted(0)
        for tier in (1, 2, 3):
            again, total = counted(tier)
            if again >= batch and again * (first_total + batch) > 2 * (first_refaulted + 1) * total:
                return tier - 1
        return 3

    def end_empty():
        ended = False
        while len(generations) > 2 and not generations[min(generations)]:
            del generations[min(generations)]
            ended = True
            for tier in range(4):
                mean_refaulted[tier] = (mean_refaulted[tier] + refaulted[tier]) // 2
                mean_total[tier] = (mean_total[tier] + evicted[tier] + kept[tier]) // 2
                refaulted[tier] = evicted[tier] = kept[tier] = 0
        return ended

    def evict_batch(event, *, spared):
        """(folios looked at, folios evicted)."""
        leaving, looked_at, highest = [], 0, highest_tier()
        for generation in sorted(generations)[: len(generations) - spared]:
            moved = []
            for folio in [one for one in generations[generation][::-1] if one[0] not in event][: 64 * batch]:
                looked_at += 1
                generations[generation].remove(folio)
                tier = tier_of(reads[folio])
                if generation + 1 in generations and (tier > highest or reads[folio] == 5):
                    moved.append(folio)
                    reads[folio] = 0
                    kept[tier] += 1
                else:
                    leaving.append(folio)
                    if len(leaving) == batch:
                        break
            if moved:
                # Each to the old end of the next generation, so the last of them is the first to be looked at there.
                generations[generation + 1] += moved
            if looked_at:
                break
        looked_at += end_empty()
        for folio in leaving:
            left[folio] = (min(generations), reads[folio])
            evicted[tier_of(reads.pop(folio))] += 1
        return looked_at, len(leaving)

    def has_to_age():
        sizes_of = [len(generations[generation]) for generation in sorted(generations)]
        uneven = sizes_of[-1] * 2 > sum(sizes_of) or sizes_of[0] * 4 < sum(sizes_of)
        return len(generations) == 2 or (len(generations) == 3 and uneven)

    def reclaim(event):
        total = 0
        for priority in range(12, -1, -1):
            looked_at = 0
            while True:
                if has_to_age() and priority < 12:
                    generations[max(generations) + 1] = []
                    break
                to_scan = sum(map(len, generations.values())) >> priority
                if to_scan == 0 or len(generations) == 2:
                    break
                looked, gone = evict_batch(event, spared=2)
                looked_at, total = looked_at + looked, total + gone
                if looked == 0 or len(generations) == 2 or looked_at >= to_scan:
                    break
            if 2 * total >= batch:
                break
        if total == 0:
            evict_batch(event, spared=0)

    def read(thing, event):
        for folio in [(thing, part) for part in range(parts)]:
            if folio in reads:
                reads[folio] = min(reads[folio] + 1, 5)
                continue
            wanted = capacity - size_of(folio, sizes, parts)
            if used(one for one in reads if one[0] in event) > wanted:
                continue
            while used(reads) > wanted:
                reclaim(event)
            reads[folio] = 1
            if folio in left and left[folio][0] == min(generations):
                refaulted[tier_of(left[folio][1])] += 1
                if left[folio][1] >= 4:
                    reads[folio] = 5
            generations[min(generations) + (len(generations) == 4)].insert(0, folio)

    def absent_parts(thing):
        return [part for part in range(parts) if (thing, part) not in reads]

    return served(events, absent_parts, lambda thing: thing not in refused and sizes[thing] <= capacity, read)
