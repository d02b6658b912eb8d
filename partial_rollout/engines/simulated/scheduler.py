"""The native scheduler's rules, by counting: who runs, what the next pass computes, and when something happens next.

Decoding sequences come first, one token each, then prefills in order of admission, in chunks, until the token budget is
used up; then new sequences while there are free slots. When memory runs out, the sequence admitted last gives up its
slot and is first in line to return.

While all that run are decoding and nobody can be admitted, every pass is like the one before. The *agenda*, a heap of
the passes in which something happens to a decoding sequence, says how many of them there are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from longtail.partial_rollout.engines.simulated.memory import Memory
from longtail.partial_rollout.engines.simulated.sequence import Passes, SimulatedSequence

FOREVER = 1 << 60


class Chunk(NamedTuple):
    """Tokens that a pass computes of a sequence that is not decoding."""

    seq: SimulatedSequence
    num_tokens: int


class Scheduler:
    """Owns `waiting` and what runs.

    attach: sets what a waiting sequence would bring (computed, num_cached_tokens, num_restored_tokens, kv, refused).
    on_admit: told when it has its slot. on_preempt: saves what a sequence has computed, which then leaves its slot.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        slots: int,
        max_num_batched_tokens: int,
        attach: Callable[[SimulatedSequence], None],
        on_admit: Callable[[SimulatedSequence], None],
        on_preempt: Callable[[SimulatedSequence], None],
    ) -> None:
        self.memory = memory
        self.slots = slots
        self.max_num_batched_tokens = max_num_batched_tokens
        self.attach, self.on_admit, self.on_preempt = attach, on_admit, on_preempt
        self.passes = Passes()
        self.waiting: deque[SimulatedSequence] = deque()
        self.num_waiting_tokens = 0
        """Known tokens of those that wait."""
        self.running: dict[int, SimulatedSequence] = {}
        """By number of admission."""
        self.prefilling: dict[int, SimulatedSequence] = {}
        """Of these, those with more than one token to compute, or that were admitted for the pass in hand."""
        self._known = 0
        """Known tokens of all decoding sequences, less the passes made for each."""
        self._prefilled = 0
        """Computed tokens of all prefilling sequences."""
        self._admissions = 0
        self._agenda: list[tuple[int, int, int, SimulatedSequence]] = []
        """(pass, order, stamp, sequence); an entry of an older stamp counts for nothing."""
        self._blocked = False
        """Nobody can be admitted until something leaves or comes."""

    # -- counts -------------------------------------------------------------------------------------------------------

    @property
    def num_decoding(self) -> int:
        return len(self.running) - len(self.prefilling)

    @property
    def num_decoding_tokens(self) -> int:
        """Known tokens of all decoding sequences: what a decode pass reads."""
        return self._known + (len(self.running) - len(self.prefilling)) * self.passes.count

    @property
    def num_used(self) -> int:
        """KV tokens held."""
        decoding = len(self.running) - len(self.prefilling)  # each holds all that it knows but one
        return self._known + decoding * (self.passes.count - 1) + self._prefilled - self.memory.saved

    @property
    def num_free(self) -> int:
        return FOREVER if self.memory.capacity is None else self.memory.capacity - self.num_used

    # -- passes alike -------------------------------------------------------------------------------------------------

    def num_alike(self) -> int:
        """So many passes from here on only give each decoding sequence a token; something happens to one of them in the
        last of these at the earliest. 0: the next pass is to be scheduled."""
        if self.prefilling or not self.running:
            return 0
        n = len(self.running)
        if self.waiting and n < self.slots and not self._blocked:
            return 0
        self._skip_stale()
        alike = self._agenda[0][0] - self.passes.count
        memory = self.memory
        if memory.capacity is None:
            return alike
        used = self._known + n * (self.passes.count - 1) - memory.saved  # as `num_used`: all are decoding
        return min(alike, (memory.capacity - used) // n)

    def due(self) -> list[SimulatedSequence]:
        """Decoding sequences to which something happens in the pass just made, in order of admission."""
        found = []
        while self._agenda and self._agenda[0][0] <= self.passes.count:
            _, _, stamp, seq = heapq.heappop(self._agenda)
            if stamp == seq.stamp and seq.decoding:
                found.append(seq)
        return found

    def plan(self, seq: SimulatedSequence) -> None:
        """Its next event, or its limit, has changed."""
        seq.stamp += 1
        if not seq.decoding:
            return
        due = len(seq.sample.prompt_ids) + seq.next_emission - seq.known
        heapq.heappush(self._agenda, (due, seq.order, seq.stamp, seq))
        if len(self._agenda) > 2 * len(self.running) + 64:
            self._agenda = [entry for entry in self._agenda if entry[2] == entry[3].stamp and entry[3].decoding]
            heapq.heapify(self._agenda)

    def _skip_stale(self) -> None:
        while (entry := self._agenda[0])[2] != entry[3].stamp or not entry[3].decoding:
            heapq.heappop(self._agenda)

    # -- one pass -----------------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """What the next pass computes beside a token of each decoding sequence."""
        preempted = False
        while self.num_free < self.num_decoding:
            preempted = True
            self._preempt(self.running[next(reversed(self.running))])
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens - self.num_decoding
        taken = self.num_decoding
        for seq in list(self.prefilling.values()):
            if budget == 0:
                break
            if not seq.is_running:  # preempted for the sake of an earlier one
                continue
            count = min(seq.known - seq.computed, budget)
            while self.num_free - taken < count:
                preempted = True
                scheduled = {id(chunk.seq) for chunk in chunks}
                victim = next(s for s in reversed(self.prefilling.values()) if id(s) not in scheduled)
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                chunks.append(Chunk(seq, count))
                budget -= count
                taken += count
        while not preempted and budget > 0 and len(self.running) < self.slots:
            admitted = self._admit(budget, self.num_free - taken)
            if admitted is None:
                self._blocked = not self.prefilling
                break
            chunks.append(admitted)
            budget -= admitted.num_tokens
            taken += admitted.num_tokens
        return chunks

    def compute(self, chunk: Chunk) -> bool:
        """The pass has been made. -> whether it gave the sequence a token: it is decoding from here on."""
        seq = chunk.seq
        seq.computed += chunk.num_tokens
        self._prefilled += chunk.num_tokens
        self.memory.computed(seq)
        if seq.computed < seq.known:
            return False
        del self.prefilling[seq.order]
        self._prefilled -= seq.computed
        seq.known += 1 - self.passes.count
        seq.decoding = True
        self._known += seq.known
        return True

    def _admit(self, budget: int, free: int) -> Chunk | None:
        for place, seq in enumerate(self.waiting):
            if self.memory.is_awaited(seq):
                continue
            self.attach(seq)
            count = min(seq.known - seq.computed, budget)
            if seq.computed - seq.num_cached_tokens + count > free:
                return None
            del self.waiting[place]
            self.num_waiting_tokens -= seq.known
            seq.order = self._admissions
            self._admissions += 1
            self.running[seq.order] = self.prefilling[seq.order] = seq
            self._prefilled += seq.computed
            self.on_admit(seq)
            return Chunk(seq, count)
        return None

    # -- coming and going ---------------------------------------------------------------------------------------------

    def wait(self, seq: SimulatedSequence) -> None:
        self.waiting.append(seq)
        self.num_waiting_tokens += seq.known
        self._blocked = False

    def remove(self, seq: SimulatedSequence) -> None:
        """Out, whether it runs or waits; its counters stay as they are."""
        if seq.is_running:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
            self.num_waiting_tokens -= seq.known
            self._blocked = False

    def reconsider(self) -> None:
        """Whoever could not be admitted perhaps can."""
        self._blocked = False

    def _preempt(self, seq: SimulatedSequence) -> None:
        self.on_preempt(seq)
        self.give_way(seq)

    def give_way(self, seq: SimulatedSequence) -> None:
        """Out of its slot, and first in line to return."""
        self._leave(seq)
        self.waiting.appendleft(seq)
        self.num_waiting_tokens += seq.known

    def _leave(self, seq: SimulatedSequence) -> None:
        del self.running[seq.order]
        if seq.decoding:
            self._known -= seq.known
            seq.known, seq.computed, seq.decoding = seq.num_tokens, seq.num_computed_tokens, False
        else:
            del self.prefilling[seq.order]
            self._prefilled -= seq.computed
        self.memory.leave(seq)
        seq.order = -1
        self._blocked = False

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """AssertionError if the counts are not those of the sequences, or something would happen unannounced."""
        running = list(self.running.values())
        decoding = [seq for seq in running if seq.decoding]
        assert [seq.order for seq in running] == sorted(self.running) and len(running) <= self.slots
        assert [seq for seq in running if not seq.decoding] == list(self.prefilling.values())
        assert all(not seq.is_running and not seq.decoding for seq in self.waiting)
        assert self.num_waiting_tokens == sum(seq.known for seq in self.waiting)
        assert self.num_decoding_tokens == sum(seq.num_tokens for seq in decoding)
        shared = self.memory.saved
        assert self.num_used == sum(seq.num_computed_tokens for seq in running) - shared
        assert self.num_used >= 0 and self.num_free >= 0
        self.memory.check_integrity(running)
        announced = {entry[3].order: entry[0] for entry in self._agenda if entry[2] == entry[3].stamp}
        for seq in decoding:
            due = len(seq.sample.prompt_ids) + seq.next_emission - seq.known
            assert announced.get(seq.order) == due > self.passes.count, f"{seq.sample.id} is due in pass {due}"
        for seq in (*running, *self.waiting):
            assert seq.num_tokens > seq.num_computed_tokens, f"{seq.sample.id} has nothing to compute"
