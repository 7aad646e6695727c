"""Slow, obvious versions of FIFO, CLOCK, SIEVE, S3-FIFO, ARC and random, written from their papers; no import of ours.

An oracle knows one cache, as in `oracles`: `events` of objects in, one bool per access out (true = found resident).
Sequential semantics are events of one access. A list of objects runs from the oldest to the newest. `size` maps an
object to its size in the unit of `capacity`; `refused` objects may not enter.
"""


class Fifo:
    """A policy answers: who is resident, what a hit changes, and how a newcomer makes itself room.

    `insert` may evict every resident but `members`, and is called only where that is enough.
    """

    def __init__(self, size, capacity):
        self.size, self.capacity = size, capacity
        self.queue = []

    def residents(self):
        return self.queue

    def held(self, objects):
        return sum(self.size[one] for one in objects)

    def lacks_room(self, newcomer):
        return self.held(self.residents()) + self.size[newcomer] > self.capacity

    def touch(self, thing):
        pass

    def insert(self, newcomer, members):
        while self.lacks_room(newcomer):
            self.queue.remove(next(one for one in self.queue if one not in members))
        self.queue.append(newcomer)


class Clock(Fifo):
    """The hand points at the first of the queue and moves by turning the queue."""

    def __init__(self, size, capacity):
        super().__init__(size, capacity)
        self.referenced = set()

    def touch(self, thing):
        self.referenced.add(thing)

    def insert(self, newcomer, members):
        while self.lacks_room(newcomer):
            thing = self.queue.pop(0)
            if thing in members:
                self.queue.append(thing)
            elif thing in self.referenced:
                self.referenced.remove(thing)
                self.queue.append(thing)
        self.queue.append(newcomer)


class Sieve(Fifo):
    """The hand is the resident it points at, or None: start at the oldest."""

    def __init__(self, size, capacity):
        super().__init__(size, capacity)
        self.visited = set()
        self.hand = None

    def touch(self, thing):
        self.visited.add(thing)

    def next_newer(self, thing):
        newer = self.queue[self.queue.index(thing) + 1 :]
        return newer[0] if newer else None

    def insert(self, newcomer, members):
        while self.lacks_room(newcomer):
            thing = self.queue[0] if self.hand is None else self.hand
            while thing in members or thing in self.visited:
                if thing not in members:
                    self.visited.remove(thing)
                thing = self.next_newer(thing)
                if thing is None:
                    thing = self.queue[0]
            self.hand = self.next_newer(thing)
            self.queue.remove(thing)
        self.queue.append(newcomer)


class S3Fifo(Fifo):
    def __init__(self, size, capacity):
        super().__init__(size, capacity)
        self.small, self.main, self.ghost = [], [], []
        self.count = {}
        self.has_evicted = False
        self.small_share = max(1, capacity // 10)
        self.main_share = capacity - self.small_share
        self.ghost_share = capacity * 9 // 10

    def residents(self):
        return self.small + self.main

    def touch(self, thing):
        self.count[thing] = min(self.count[thing] + 1, 3)

    def insert(self, newcomer, members):
        is_remembered = newcomer in self.ghost
        if is_remembered:
            self.ghost.remove(newcomer)
        while self.lacks_room(newcomer):
            self.has_evicted = True
            small = [one for one in self.small if one not in members]
            main = [one for one in self.main if one not in members]
            if main and (self.held(self.main) > self.main_share or not small):
                self.evict_from_main(members)
            else:
                self.evict_from_small(members)
        fills_up = not self.has_evicted and self.held(self.small) >= self.small_share
        (self.main if is_remembered or fills_up else self.small).append(newcomer)
        self.count[newcomer] = 0

    def evict_from_main(self, members):
        while True:
            thing = next(one for one in self.main if one not in members)
            self.main.remove(thing)
            if self.count[thing] == 0:
                return
            self.count[thing] -= 1
            self.main.append(thing)

    def evict_from_small(self, members):
        for thing in [one for one in self.small if one not in members]:
            self.small.remove(thing)
            if self.count[thing] < 2:
                self.remember(thing)
                return
            self.count[thing] = 0
            self.main.append(thing)

    def remember(self, thing):
        if self.size[thing] <= self.ghost_share:
            self.ghost.append(thing)
            while self.held(self.ghost) > self.ghost_share:
                self.ghost.pop(0)


class Arc(Fifo):
    """Figure 4 of the paper for bytes and events, with |X| = what X holds; the names are the paper's."""

    def __init__(self, size, capacity):
        super().__init__(size, capacity)
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.p = 0.0

    def residents(self):
        return self.t1 + self.t2

    def touch(self, thing):
        (self.t1 if thing in self.t1 else self.t2).remove(thing)
        self.t2.append(thing)

    def insert(self, newcomer, members):
        size, c = self.size[newcomer], self.capacity
        b1, b2 = self.held(self.b1), self.held(self.b2)
        if newcomer in self.b1:
            self.p = min(self.p + max(b2 / b1, 1.0) * size, c)
            self.b1.remove(newcomer)
            self.replace_until_it_fits(newcomer, members, was_in_b2=False)
            self.t2.append(newcomer)
        elif newcomer in self.b2:
            self.p = max(self.p - max(b1 / b2, 1.0) * size, 0.0)
            self.b2.remove(newcomer)
            self.replace_until_it_fits(newcomer, members, was_in_b2=True)
            self.t2.append(newcomer)
        else:
            while self.b1 and self.held(self.t1 + self.b1) + size > c:
                self.b1.pop(0)
            while self.held(self.t1) + size > c:
                self.t1.remove(next(one for one in self.t1 if one not in members))
            while self.b2 and self.held(self.t1 + self.t2 + self.b1 + self.b2) + size > 2 * c:
                self.b2.pop(0)
            self.replace_until_it_fits(newcomer, members, was_in_b2=False)
            self.t1.append(newcomer)

    def replace_until_it_fits(self, newcomer, members, *, was_in_b2):
        while self.lacks_room(newcomer):
            once = [one for one in self.t1 if one not in members]
            again = [one for one in self.t2 if one not in members]
            t1 = self.held(self.t1)
            if once and (t1 > self.p or (was_in_b2 and t1 == self.p) or not again):
                self.t1.remove(once[0])
                self.b1.append(once[0])
            else:
                self.t2.remove(again[0])
                self.b2.append(again[0])


def arc_of_figure_4(accesses, c):
    """Figure 4 of the paper, case by case, for objects of one size."""
    t1, t2, b1, b2, p, found = [], [], [], [], 0, []

    def replace(x):
        if t1 and ((x in b2 and len(t1) == p) or len(t1) > p):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in accesses:
        found.append(x in t1 or x in t2)
        if x in t1 or x in t2:  # case I
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:  # case II
            p = min(p + max(len(b2) / len(b1), 1), c)
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:  # case III
            p = max(p - max(len(b1) / len(b2), 1), 0)
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:  # case IV
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return found


class Random(Fifo):
    """Residents stand in a row, members of the event at its end; a draw names a place among the others.

    A victim's place is taken by the last of the others, and that one's by the last of the row. Members move to the end
    only in an event that misses. `stream` is the cache's number: which stream of the seed it draws from.
    """

    def __init__(self, size, capacity, *, seed, stream):
        super().__init__(size, capacity)
        self.word = split_mix_output(seed + (stream + 1) * GOLDEN)
        self.num_others = 0

    def begin_event(self, hits):
        self.num_others = len(self.queue)
        for thing in hits:
            place = self.queue.index(thing)
            if place < self.num_others:
                self.num_others -= 1
                row, last = self.queue, self.num_others
                row[place], row[last] = row[last], row[place]

    def insert(self, newcomer, members):
        while self.lacks_room(newcomer):
            self.word = (self.word + GOLDEN) % 2**64
            place = ((split_mix_output(self.word) >> 20) * self.num_others) >> 44
            others, rest = self.queue[: self.num_others], self.queue[self.num_others :]
            others[place] = others[-1]
            self.queue = others[:-1] + rest[-1:] + rest[:-1]
            self.num_others -= 1
        self.queue.append(newcomer)


GOLDEN = 0x9E3779B97F4A7C15


def split_mix_output(word):
    """SplitMix64's output function (Steele, Lea, Flood 2014)."""
    word %= 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def decide(name, events, *, size, capacity, refused=(), seed=0, stream=0):
    """Decisions of one cache over events: classify all, touch the hits in order, insert the misses in order."""
    if name == "random":
        policy = Random(size, capacity, seed=seed, stream=stream)
    else:
        policy = {"fifo": Fifo, "clock": Clock, "sieve": Sieve, "s3fifo": S3Fifo, "arc": Arc}[name](size, capacity)
    found = []
    for event in events:
        is_hit = [thing in policy.residents() for thing in event]
        found += is_hit
        hits = [thing for thing, hit in zip(event, is_hit, strict=True) if hit]
        if name == "random" and not all(is_hit):
            policy.begin_event(hits)
        for thing in hits:
            policy.touch(thing)
        for thing, hit in zip(event, is_hit, strict=True):
            if hit:
                continue
            if thing in policy.residents():
                policy.touch(thing)
                continue
            members_held = policy.held(set(event) & set(policy.residents()))
            if thing not in refused and members_held + size[thing] <= capacity:
                policy.insert(thing, set(event))
        assert policy.held(policy.residents()) <= capacity
    return found
