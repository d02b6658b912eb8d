"""A pool's calls of its engines: replies are taken in order and applied to the samples; who does not answer is lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from longtail.errors import LongtailError, SnapshotMismatch
from longtail.events import Event, Listener
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.pool.crew import Crew, Entry
from longtail.partial_rollout.pool.member import EngineLost, HeldKV, Member, Transport
from longtail.partial_rollout.pool.messages import Gain, Reply, apply
from longtail.partial_rollout.pool.settings import PoolConfig
from longtail.partial_rollout.pool.sharing import Sharing
from longtail.sample import Sample
from longtail.version import PolicyVersion

LASTING = (
    "num_steps",
    "num_recomputed_tokens",
    "num_restored_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_overrun_tokens",
)
"""Counts of an engine that stay when it is gone."""


class Calls:
    """Owns the crew, the replies, and what the next `step` has to report."""

    def __init__(
        self, name: str, config: PoolConfig, transport: Transport, listener: Listener, clock: Callable[[], float]
    ) -> None:
        self.name, self.config, self.listener, self.now = name, config, listener, clock
        self.failures: deque[str] = deque(maxlen=100)
        """The last engines that were lost, and why."""
        self._transport = transport
        self._crew = Crew(name, config.routing, config.spread)
        self._sharing = Sharing(self._crew, config.share_drafts)
        self._version = PolicyVersion(0)
        self._events: deque[Event] = deque()
        self._held = StepOutput(self._version)
        """What the next `step` reports."""
        self._taken: list[Sample] = []
        """What the engines let go on request."""
        self._answers: dict[Member, Reply] = {}
        self._retired = dict.fromkeys(LASTING, 0)
        self._num_output = 0
        self._weights: Any = None
        """Of the last update, for engines that join, where the transport keeps them."""
        self._drafter: tuple[Any, Any] | None = None
        """And its controller: what all draft with (`use_drafter`); None: what they were made with."""
        self._restarts, self._num_made = config.restarts, 0
        self._tiers: Any = None
        self._to_pool = True
        """Saved KV goes to the pool's tiers if a store wants it (not while samples move)."""

    # -- engines come and go -------------------------------------------------------------------------------------------

    def _names(self, count: int) -> list[str]:
        first, self._num_made = self._num_made, self._num_made + count
        return [f"{self.name}-{number}" for number in range(first, first + count)]

    def _join(self, member: Member) -> None:
        if member.name in {m.name for m in self._crew.alive}:
            raise ValueError(f"engines: two are called {member.name!r}; give each its own name=")
        if member.about.slots < 1:
            raise ValueError(f"engine {member.name} has no slots")
        if member.version != self._version:
            if self._weights is None or member.version > self._version:
                raise ValueError(
                    f"engine {member.name} has weights of version {member.version}, the pool of {self._version}; "
                    "update its weights before it joins"
                )
            member.send("update", self._weights, int(self._version))
        if self._drafter is not None:
            member.send("do", "use_drafter", self._drafter)
        self._crew.members.append(member)
        self._tell_of(member, "joined")

    def _lose(self, member: Member, why: str, *, counts: bool = True) -> None:
        if member.lost is not None:
            return
        member.lost = why
        member.outstanding.clear()
        member.kill()
        if member.stats is not None:
            for field in LASTING:
                self._retired[field] += getattr(member.stats, field)
        self._sharing.lost(member)
        orphans = self._crew.orphan(member)
        self._tell_of(member, f"lost: {why}" if counts else why, len(orphans))
        for entry in orphans:
            sample = entry.sample
            if sample.status == "running":  # it had a slot, as far as is known
                event = Event("preempt", self.now(), engine=member.name, detail="engine lost")
                event.sample, event.group, event.num_tokens = sample.id, sample.group_id, sample.num_tokens
                self._events.append(event)
            sample.status = "waiting"
        if counts:
            self.failures.append(f"{member.name}: {why}")
            if self._restarts > 0:
                self._restarts -= 1
                (name,) = self._names(1)
                self._transport.begin(name, self.now)

    def wait_for_engine(self) -> bool:
        """Where all engines are lost: until one is there that was made in their place. -> False if none had to be
        waited for, or none has come."""
        if self._crew.alive:
            return False
        while not self._crew.alive and self._transport.is_making:
            self._welcome(wait=True)
        return bool(self._crew.alive)

    def _first(self) -> Member:
        """LongtailError if no engine is left, and none is coming."""
        self.wait_for_engine()
        if not self._crew.alive:
            raise LongtailError(
                f"{self.name}: all engines are lost ({self._crew.members[-1].lost}); add another one (add_engine), or "
                "make the pool with restarts"
            )
        return self._crew.alive[0]

    def _welcome(self, *, wait: bool = False) -> None:
        """Takes in the engines that have been made. wait: for one."""
        for made in self._transport.made(self.now, wait):
            try:
                if isinstance(made, LongtailError):
                    raise made
                self._join(made)
            except (LongtailError, ValueError) as error:
                self.failures.append(f"no engine in its place: {error}")

    def _tell_of(self, member: Member, what: str, num_seqs: int = 0) -> None:
        self._events.append(Event("engine", self.now(), engine=member.name, detail=what, num_seqs=num_seqs))

    # -- calls and replies ---------------------------------------------------------------------------------------------

    def _collect(self, timeout: float | None = 0.0) -> bool:
        """Takes the replies that are there; timeout: seconds to wait for the first. -> whether a step, or a loss, was
        among them."""
        news = False
        while calling := [m for m in self._crew.alive if m.outstanding]:
            done = self._transport.wait(calling, timeout)
            if not done:
                break
            timeout = 0.0
            for member in done:
                if member.lost is None:  # nor over the reply of another one
                    news |= self._take(member) == "step" or member.lost is not None
        return news

    def _wait(self) -> bool:
        """Until a reply is there, or an engine is given up. -> as `_collect`."""
        waiting = [m for m in self._crew.alive if m.outstanding]
        deadline, now = self.config.deadline, time.monotonic()
        timeout = None
        if deadline is not None and waiting:
            timeout = max(min(m.outstanding[0].since for m in waiting) + deadline - now, 0.0)
        news = self._collect(timeout)
        if deadline is not None:
            for member in waiting:
                call = member.outstanding[0] if member.outstanding else None
                if call is not None and time.monotonic() - call.since >= deadline:
                    self._lose(member, f"hangs: {call.method} has taken more than {deadline:g} s")
                    news = True
        return news

    def _drain(self, members: Sequence[Member]) -> None:
        self._collect()
        while any(m.lost is None and m.outstanding for m in members):
            self._wait()

    def _ask(self, method: str, *arguments: Any) -> dict[Member, Reply]:
        """Of all engines; those that are lost meanwhile do not answer. ValueError if one refuses."""
        asked = self._crew.alive
        self._answers.clear()
        for member in asked:
            member.send(method, *arguments)
        self._drain(asked)
        answers = {m: self._answers.pop(m) for m in asked if m in self._answers}
        for member, reply in answers.items():
            if reply.misuse is not None:
                raise ValueError(f"engine {member.name}: {reply.misuse}")
        return answers

    def _answers_to(self, method: str, member: Member, *arguments: Any) -> bool:
        """-> False if it was lost."""
        self._answers.pop(member, None)
        member.send(method, *arguments)
        self._drain([member])
        reply = self._answers.pop(member, None)
        if reply is not None and reply.misuse is not None:
            raise ValueError(reply.misuse)
        if member.lost is not None and member.lost.startswith(f"{method}: "):  # it would go as badly elsewhere
            raise LongtailError(f"{self.name}: {member.name} has failed: {member.lost}")
        return reply is not None

    def _take(self, member: Member) -> str:
        """Applies the oldest reply of a member. -> what it was called for."""
        try:
            method, reply = member.take()
        except EngineLost as error:
            self._lose(member, str(error))
            return ""
        if reply.failure is not None:  # what it told with it may be half done
            self._lose(member, f"{method}: {reply.failure}")
            return method
        self._apply(member, method, reply)
        return method

    def _apply(self, member: Member, method: str, reply: Reply) -> None:
        member.stats, member.version, member.shares_drafts = reply.stats, reply.version, reply.shares_drafts
        for event in reply.events:
            event.time += member.offset
            self._events.append(event)
        for gain in reply.gains:
            self._gained(member, method, gain)
        self._held.num_seqs += reply.num_seqs
        for sample_id in reply.at_limit:
            entry = self._crew.entries.get(sample_id)
            if entry is not None and entry.member is member:
                entry.limit_at = None
                self._held.at_limit.append(entry.sample)
        for sample_id in reply.refused:
            self._fail(self._crew.entries[sample_id], f"refused by {member.name}: {reply.misuse}")
        if method in ("do", "drafting", "inventory", "update"):
            self._answers[member] = reply
            if method == "update" and reply.misuse is not None and self._version > reply.version:
                self._lose(member, f"update: {reply.misuse}")  # others have these weights

    def _gained(self, member: Member, method: str, gain: Gain) -> None:
        entry = self._crew.entries[gain.sample_id]
        assert entry.member is member, gain.sample_id
        sample = entry.sample
        apply(gain, sample, member.offset)
        if gain.tokens:
            entry.deaths = 0
            self._sharing.wrote(sample, member)
            self._num_output += len(gain.tokens)
            self._held.num_output_tokens += len(gain.tokens)
        if sample.status in ("waiting", "running"):
            return
        self._crew.left(entry)
        if gain.saved is not None:
            sample.snapshot = self._saved(HeldKV(member, gain.saved))
        if method in ("pause", "abort"):
            self._taken.append(sample)
        else:
            (self._held.finished if sample.is_done else self._held.turns).append(sample)

    def _saved(self, held: HeldKV) -> Any:
        """KV that an engine has saved: there, or in the pool's tiers if a store on disk is to keep it."""
        if not self._to_pool or self._tiers is None or self._tiers.directory is None:
            return held
        from longtail.partial_rollout.pool.packed import unpack_snapshot

        try:
            packed = held.member.fetch(held.key)
            return None if packed is None else unpack_snapshot(packed, self._tiers)
        except SnapshotMismatch:  # no room: the tiers have it among their failures
            return None
        except EngineLost as error:
            self._lose(held.member, str(error))
            return None

    def _fail(self, entry: Entry, failure: str) -> None:
        sample = entry.sample
        self._crew.left(entry)
        sample.status, sample.finish_reason, sample.failure, sample.snapshot = "failed", "error", failure, None
        sample.timings.finished = self.now()
        self._held.finished.append(sample)
