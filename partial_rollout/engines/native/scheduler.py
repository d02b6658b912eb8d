"""Which tokens the next forward pass computes. One rule: bring computed up to known.

Decoding sequences (one uncomputed token) come first, then prefills in order of admission, in chunks, until the token
budget is used up; then new sequences while there are free slots. When blocks run out, the sequence admitted last gives
up its slot (its KV goes to a host snapshot) and is first in line to return.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import torch

from longtail.kv_manager.manager import KVManager
from longtail.sequence import Sequence


@dataclasses.dataclass(slots=True)
class Scheduled:
    seq: Sequence
    num_tokens: int
    """To compute in this pass, from seq.num_computed_tokens on."""
    drafts: list[int] = dataclasses.field(default_factory=list)
    """Tokens to verify behind them, where they reach the last known token."""
    distributions: torch.Tensor | None = None
    """As `Draft.distributions`, of these."""


class Scheduler:
    """Owns `waiting` and `running`."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        is_ready: Callable[[Sequence], bool],
        attach: Callable[[Sequence], bool],
        on_admit: Callable[[Sequence], None],
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_ready = is_ready
        """Whether a waiting sequence can be admitted without waiting for a disk."""
        self.attach = attach
        """Gives a sequence its KV (prefix, snapshot); False if there are not enough blocks now."""
        self.on_admit = on_admit
        """Told when a sequence has its slot and its blocks."""
        self.on_preempt = on_preempt
        """Saves and releases the sequence's KV."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def schedule(self) -> list[Scheduled]:
        budget = self.max_num_batched_tokens
        scheduled: list[Scheduled] = []
        preempted = False
        for seq in sorted(self.running, key=lambda s: s.num_uncomputed_tokens > 1):  # stable: decodes first
            if budget == 0:
                break
            if seq not in self.running:  # preempted for the sake of an earlier one
                continue
            assert seq.num_uncomputed_tokens >= 1, f"{seq.sample.id} has nothing to compute"
            count = self.kv.chunk(seq, min(seq.num_uncomputed_tokens, budget))
            while not self.kv.reserve(seq, seq.num_computed_tokens + count):
                preempted = True
                victim = self._victim(scheduled)
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                scheduled.append(Scheduled(seq, count))
                budget -= count
        while not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            admitted = self._admit(budget)
            if admitted is None:
                break
            scheduled.append(admitted)
            budget -= admitted.num_tokens
        return scheduled

    def _victim(self, scheduled: list[Scheduled]) -> Sequence:
        """The sequence admitted last that has no part in this pass yet. The one that asks is always eligible."""
        taken = {id(item.seq) for item in scheduled}
        return next(seq for seq in reversed(self.running) if id(seq) not in taken)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.on_preempt(seq)
        self.waiting.appendleft(seq)

    def _admit(self, budget: int) -> Scheduled | None:
        # A group's prompt is computed once: siblings wait until its owner has computed it, then share its blocks.
        computing = {
            seq.sample.group_id
            for seq in self.running
            if self.kv.prefix_caching and seq.num_computed_tokens < len(seq.sample.prompt_ids) - 1
        }
        for seq in self.waiting:
            if seq.sample.group_id in computing and seq.sample.snapshot is None:
                continue
            if not self.is_ready(seq):
                continue
            if not self.attach(seq):
                return None
            count = self.kv.chunk(seq, min(seq.num_uncomputed_tokens, budget))
            if not self.kv.reserve(seq, seq.num_computed_tokens + count):
                self.kv.release(seq)
                return None
            self.waiting.remove(seq)
            self.running.append(seq)
            self.on_admit(seq)
            return Scheduled(seq, count)
        return None
