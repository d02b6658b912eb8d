"""The engines of a pool and the samples in them: who is where, and where the next one goes (`routing.Fleet`)."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable

from longtail.partial_rollout.pool.member import HeldKV, Member
from longtail.partial_rollout.pool.routing import ROUTINGS, expected_tokens
from longtail.sample import Sample

REMEMBERED = 1 << 16
"""Groups and samples of which it is remembered where their KV was; the oldest are forgotten first."""


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A sample in the pool."""

    sample: Sample
    member: Member | None = None
    """None: its engine is lost, and it waits to be given to another."""
    limit_at: int | None = None
    """Output tokens at which the caller wants to be told."""
    deaths: int = 0
    """Engines that were lost with it, perhaps over it, since it gained a token last."""

    @property
    def limit(self) -> int | None:
        """From here on."""
        return None if self.limit_at is None else max(self.limit_at - len(self.sample.output_ids), 1)


class Crew:
    """Owns the members and the entries. Lost members stay in the list, so that numbers keep their meaning."""

    def __init__(self, pool: str, routing: str, spread: int) -> None:
        self.pool, self.spread = pool, spread
        self._rule = ROUTINGS[routing]
        self.members: list[Member] = []
        self.entries: dict[str, Entry] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()
        """Of samples that have left unfinished ("s ID") and of groups ("g ID"): the engine that ran them last."""
        self._bound: OrderedDict[str, int] = OrderedDict()
        self._longest: OrderedDict[str, int] = OrderedDict()
        """Of groups: output tokens of the longest sample that has finished."""
        self._dealt = 0

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.lost is None]

    @property
    def active(self) -> list[Member]:
        """Those that get samples."""
        return [member for member in self.alive if not member.released]

    @property
    def num_free(self) -> int:
        """Slots, those that the tail has left included, and where no other engine is left those of released ones, which
        `route` takes back. What waits for a slot has a claim to one."""
        alive = self.alive
        slots = sum(m.about.slots for m in [m for m in alive if m.released != "request"] or alive)
        return max(slots - len(self.entries), 0)

    @property
    def max_model_len(self) -> int | None:
        lengths = (m.about.max_model_len for m in self.members)
        return min((n for n in lengths if n is not None), default=None)

    def of(self, member: Member) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.member is member]

    def orphans(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.member is None]

    # -- samples come and go -------------------------------------------------------------------------------------------

    def put(self, entry: Entry, member: Member) -> None:
        self.entries[entry.sample.id] = entry
        entry.member = member
        member.load += 1
        self._remember(self._homes, f"g {entry.sample.group_id}", self.members.index(member))

    def wait(self, entry: Entry) -> None:
        """It is in the pool, and in no engine."""
        self.entries[entry.sample.id] = entry
        entry.member, entry.sample.status = None, "waiting"

    def left(self, entry: Entry) -> None:
        """It has left its engine, and the pool."""
        sample, member = entry.sample, entry.member
        del self.entries[sample.id]
        if member is not None:
            member.load -= 1
            if sample.is_done:
                self._homes.pop(f"s {sample.id}", None)
            else:
                self._remember(self._homes, f"s {sample.id}", self.members.index(member))
        if sample.status == "finished":
            longest = max(self._longest.get(sample.group_id, 0), len(sample.output_ids))
            self._remember(self._longest, sample.group_id, longest)

    def orphan(self, member: Member) -> list[Entry]:
        """The samples of a member that is lost. Those that waited behind full slots had nothing to do with it."""
        entries = self.of(member)
        for entry in entries:
            entry.member = None
            entry.deaths += entry.sample.status == "running" or member.load <= member.about.slots
        member.load = 0
        return entries

    @staticmethod
    def _remember(table: OrderedDict[str, int], key: str, value: int) -> None:
        table[key] = value
        table.move_to_end(key)
        if len(table) > REMEMBERED:
            table.popitem(last=False)

    # -- where it goes (routing.Fleet) ---------------------------------------------------------------------------------

    def route(self, sample: Sample, repack: int | None) -> Member:
        """There must be an engine."""
        full = repack is not None and all(m.load >= min(repack, m.about.slots) for m in self.active)
        if full and (spare := next((m for m in self.alive if m.released == "tail"), None)) is not None:
            spare.released = ""
        if not self.active:
            for member in self.alive:
                member.released = ""
        return self.members[self._rule(sample, self)]

    def least_loaded(self, sample: Sample) -> int:
        return self.members.index(min(self.active, key=lambda m: m.load / m.about.slots))

    def home(self, sample: Sample) -> int | None:
        number = self._homes.get(f"s {sample.id}")
        if isinstance(sample.snapshot, HeldKV) and sample.snapshot.member in self.alive:
            number = self.members.index(sample.snapshot.member)
        if number is None or self.members[number].lost is not None:
            number = self._homes.get(f"g {sample.group_id}")
        return None if number is None or self.members[number].lost is not None else number

    def bound(self, sample: Sample) -> int | None:
        number = self._bound.get(sample.group_id)
        if number is None or self.members[number].lost is not None or self.members[number].released:
            active = self.active
            number = self.members.index(active[self._dealt % len(active)])
            self._dealt += 1
            self._remember(self._bound, sample.group_id, number)
        return number

    def load(self, number: int) -> int:
        return self.members[number].load

    def open_slots(self, number: int) -> int:
        member = self.members[number]
        return 0 if member.lost is not None or member.released else max(member.about.slots - member.load, 0)

    def least_work(self, sample: Sample) -> int:
        work = dict.fromkeys(self.active, 0)
        for entry in self.entries.values():
            if entry.member in work:
                work[entry.member] += self.expected(entry.sample)
        free = [m for m in work if m.load < m.about.slots]
        return self.members.index(min(free or work, key=lambda m: work[m] / m.about.slots))

    def expected(self, sample: Sample) -> int:
        """Output tokens that it is expected to make yet."""
        return expected_tokens(sample, self._longest.get(sample.group_id), self.max_model_len)

    def check_integrity(self, inside: Iterable[tuple[Member, dict[str, int]]]) -> None:
        """inside: output tokens of the samples that each engine says it has."""
        for member, has in inside:
            here = {e.sample.id: len(e.sample.output_ids) for e in self.of(member)}
            assert here == has, (member.name, here, has)
            assert member.load == len(here), (member.name, member.load, len(here))
        for entry in self.entries.values():
            assert entry.member is None or entry.member.lost is None, entry.sample.id
            assert entry.sample.status in ("waiting", "running"), (entry.sample.id, entry.sample.status)
            entry.sample.check_integrity()
