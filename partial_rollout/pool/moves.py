"""Samples of a pool go to engines, move between them, and leave them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from longtail.errors import SnapshotMismatch
from longtail.events import Event
from longtail.partial_rollout.engines.base import find
from longtail.partial_rollout.pool.calls import Calls
from longtail.partial_rollout.pool.crew import Entry
from longtail.partial_rollout.pool.member import HeldKV, Member
from longtail.partial_rollout.pool.messages import record_of
from longtail.partial_rollout.pool.routing import keep_packed
from longtail.sample import Sample

SUSPECT = 2
"""A sample that has not gained a token while so many engines in a row were lost with it may be the cause: an engine
gets one such sample at a time, so that the others are soon cleared of it,"""
MOST_DEATHS = 5
"""and one with so many is taken for the cause, and fails."""


class Moves(Calls):
    """Adds what decides where samples are. Their engines, and the calls of them, are `Calls`'s."""

    def _place(self, entry: Entry, among: Sequence[Member] = ()) -> None:
        """among: engines that it may go to; empty: all that get samples. Where no engine is left (the last may have
        been lost over a move) it waits for the next."""
        sample = entry.sample
        if not self._crew.alive:
            self._crew.wait(entry)
            return
        member = self._crew.route(sample, self.config.repack)
        if among and member not in among:
            member = min(among, key=lambda m: m.load)
        snapshot = sample.snapshot
        saved: Any = None
        if isinstance(snapshot, HeldKV):
            home = snapshot.member
            saved = snapshot.key if home is member else home.export(snapshot.key, member)
        elif snapshot is not None:
            try:
                saved = self._transport.saved(snapshot)
            except SnapshotMismatch as error:
                self._refused(member, sample, str(error))
        if snapshot is not None and saved is None:
            if isinstance(snapshot, HeldKV):
                self._refused(member, sample, "the engine that saved its KV is lost")
            sample.snapshot = None
        for reports in (self._held.finished, self._held.turns, self._held.at_limit):
            if sample in reports:
                reports.remove(sample)
        member.send("add", record_of(sample), entry.limit, saved)
        self._crew.put(entry, member)
        self._sharing.entered(sample, member)
        sample.status = "waiting"

    def _refused(self, member: Member, sample: Sample, why: str) -> None:
        event = Event("restore", self.now(), engine=member.name, detail=f"refused: {why}")
        event.sample, event.group = sample.id, sample.group_id
        self._events.append(event)

    def _take_out(self, sample_ids: Iterable[str] | None, method: str, how: Any) -> list[Sample]:
        ids = list(self._crew.entries if sample_ids is None else dict.fromkeys(sample_ids))
        entries = [find(self._crew.entries, i) for i in ids]
        by_member: dict[Member, list[str]] = {}
        for entry in entries:
            if entry.member is not None:
                by_member.setdefault(entry.member, []).append(entry.sample.id)
        for member, own in by_member.items():
            member.send(method, own, how)
        self._drain(list(by_member))
        wanted = set(ids)
        taken = {s.id: s for s in self._taken if s.id in wanted}
        self._taken.clear()
        for entry in entries:  # of engines that are lost, or were lost over this
            if self._crew.entries.get(entry.sample.id) is entry and entry.member is None:
                taken[entry.sample.id] = self._let_go(entry, method, how)
        return [taken[i] for i in ids if i in taken]

    def _let_go(self, entry: Entry, method: str, how: Any) -> Sample:
        """Of a sample that is in no engine."""
        sample = entry.sample
        self._crew.left(entry)
        sample.status = "paused"
        if method == "abort":
            sample.status, sample.finish_reason, sample.snapshot = "finished", how, None
            sample.timings.finished = self.now()
        return sample

    def _move(self, entries: Sequence[Entry]) -> None:
        """With their KV, to where the routing says; their engines are released."""
        limits = {entry.sample.id: (entry.limit_at, entry.deaths) for entry in entries}
        self._to_pool = False
        try:
            moving = self._take_out(list(limits), "pause", True)
        finally:
            self._to_pool = True
        for sample in moving:
            self._place(Entry(sample, None, *limits[sample.id]))

    def _give_work(self, refilled: bool) -> None:
        """Samples without an engine get one, engines with more than they have slots for share with those that have
        room, and the tail is gathered."""
        crew, repack = self._crew, self.config.repack
        self._welcome()
        if crew.entries:
            self._first()
        for entry in crew.orphans():
            if entry.deaths >= MOST_DEATHS:
                self._fail(entry, f"{entry.deaths} engines were lost over it ({self.failures[-1]})")
            elif entry.deaths < SUSPECT:
                self._place(entry)
            elif free := [m for m in crew.active if not any(e.deaths >= SUSPECT for e in crew.of(m))]:
                self._place(entry, among=free)  # else it waits until one of the others has gained a token
        if refilled:
            for member in crew.alive:
                if member.released == "tail":
                    member.released = ""
        self._share()
        if repack is not None and not refilled and crew.entries:
            self._repack(repack)
        # Nobody is waited for: engines in a step (it may hang, or its link be cut) let samples go after it.
        leaving = [m for m in crew.alive if m.released == "tail" and not m.is_stepping]
        if moving := [entry for member in leaving for entry in crew.of(member)]:
            self._move(moving)

    def _share(self) -> None:
        crew = self._crew
        if self.config.routing == "group":  # whose samples wait for their engine
            return
        room = sum(crew.open_slots(crew.members.index(m)) for m in crew.active)
        for member in crew.active:
            surplus = min(member.load - member.about.slots, room)
            if surplus > 0 and not member.is_stepping:
                waiting = [e for e in crew.of(member) if e.sample.status == "waiting"]
                self._move(waiting[-surplus:])
                room -= surplus

    def _repack(self, repack: int) -> None:
        """Those that it has released before, and that have samples yet, are among those to choose from."""
        members = [m for m in self._crew.alive if not m.released or (m.released == "tail" and m.load)]
        if len(members) < 2:
            return
        kept = keep_packed([m.load for m in members], min(repack, *(m.about.slots for m in members)))
        for place, member in enumerate(members):
            if place not in kept and not member.released:
                self._tell_of(member, "released", member.load)
            member.released = "" if place in kept else "tail"
