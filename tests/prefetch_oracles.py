"""Prefetching by a plan, replayed the slow and obvious way; no import of ours.

Everything is a list or a dict. `events`: lists of objects in the order walked. `plan`: per event None or (issued after,
objects). A read is [object, when it may start, id or None]; the link is a list of (sent, left the link, arrives).
"""


class Replay:
    """One replay; afterwards `outcomes` (per event, per access), `fates` by (event, object), `stalls` per event."""

    def __init__(self, events, plan, *, capacity, transfer, latency, depth, compute, window_events, window_held, touch):
        self.capacity, self.transfer, self.latency, self.depth = capacity, transfer, latency, depth
        self.window_held, self.touch = window_held, touch
        self.stack = []  # newest first
        self.owner = {}  # object -> the (event, object) of the plan that waits, flies or is unused
        self.waits, self.flies, self.deadline = [], [], {}
        self.link = []
        self.fates, self.outcomes, self.stalls = {}, [], []
        issues = {}
        for target, named in enumerate(plan):
            if named is not None:
                after = named[0] if window_events is None else max(named[0], target - window_events)
                issues.setdefault(after, []).append((target, named[1]))
        now = 0
        self.issue(issues.get(-1, []), now)
        for number, members in enumerate(events):
            self.let_pass(now)
            stall = self.event(number, members, now)
            self.issue(issues.get(number, []), now)
            self.stalls.append(stall)
            now += stall + compute
        self.let_pass(now)

    def start_of_next_read(self, since):
        free = self.link[-1][1] if self.link else 0
        slot = self.link[-self.depth][2] if self.depth is not None and len(self.link) >= self.depth else 0
        return max(since, free, slot)

    def send(self, thing, start):
        left = start + self.transfer[thing]
        self.link.append((start, left, left + self.latency))
        return left + self.latency

    def let_pass(self, now):
        """What starts and what arrives up to now."""
        while self.waits and self.start_of_next_read(self.waits[0][1]) <= now:
            thing, since = self.waits.pop(0)
            self.fates[self.owner[thing]] = "in_flight"
            self.flies.append((thing, self.send(thing, self.start_of_next_read(since))))
        while self.flies and self.flies[0][1] <= now:
            thing, _ = self.flies.pop(0)
            self.fates[self.owner[thing]] = "unused"
            self.stack.insert(0, thing)
            self.cut()

    def cut(self):
        for thing in self.stack[self.capacity :]:
            if thing in self.owner:
                self.fates[self.owner.pop(thing)] = "wasted"
        del self.stack[self.capacity :]

    def event(self, number, members, now):
        waiting, flying = [one for one, _ in self.waits], dict(self.flies)
        outcomes, arrivals, misses = [], [now], []
        for thing in members:
            fate = None
            if thing in self.stack:
                outcomes.append("hit")
                fate = "used_in_time"
            elif thing in flying:
                outcomes.append("late")
                arrivals.append(flying[thing])
                fate = "used_late"
            else:
                outcomes.append("miss")
                misses.append(thing)
                fate = "expired"
            if thing in self.owner:
                self.fates[self.owner.pop(thing)] = fate
        self.waits = [
            one for one in self.waits if one[0] not in members and not (self.deadline[one[0]] <= number)
        ]  # fmt: skip
        for thing in set(waiting) - {one for one, _ in self.waits} - set(members):
            self.fates[self.owner.pop(thing)] = "expired"
        self.flies = [one for one in self.flies if one[0] not in members]
        self.stack = list(reversed(members)) + [one for one in self.stack if one not in members]
        self.cut()
        for thing in misses:
            arrivals.append(self.send(thing, self.start_of_next_read(now)))
        self.outcomes.append(outcomes)
        return max(arrivals) - now

    def issue(self, targets, now):
        for target, named in targets:
            for thing in named:
                key = (target, thing)
                if thing in self.stack:
                    self.fates[key] = "skipped_resident"
                    if self.touch:
                        self.stack.remove(thing)
                        self.stack.insert(0, thing)
                elif thing in self.owner:
                    self.fates[key] = "skipped_pending"
                    self.deadline[thing] = max(self.deadline[thing], target)
                elif self.window_held is not None and len(self.owner) >= self.window_held:
                    self.fates[key] = "dropped"
                else:
                    self.fates[key] = "queued"
                    self.owner[thing] = key
                    self.deadline[thing] = target
                    self.waits.append((thing, now))
