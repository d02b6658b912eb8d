"""RollPacker's tail batching (arXiv 2509.21009): short rounds leave the long responses behind, long rounds are made of
them."""

from __future__ import annotations

import math

from longtail.partial_rollout.groups import GroupState
from longtail.partial_rollout.strategies.base import (
    BatchStrategy,
    Order,
    RolloutState,
    at_least,
    oldest_unfinished_first,
    positive,
)
from longtail.sample import Sample


class TailRounds(BatchStrategy):
    """A short round begins eta x `groups` prompts with eta x `samples` responses each and ends when `groups` of them
    have `samples` responses. What is unfinished waits until `groups` prompts of it have come together: they make a long
    round, with no more than `samples` responses of each, that waits for all of them.

    Groups are submitted with n of at least `samples` (eta x samples for over-issue within the prompt); they are handed
    over with `samples` responses, in a short round those that finished first, and the others are surplus on the ledger.

    eta: 1.25 in the paper. Work of a short round is saved and continues in the long one; regenerate=True begins it
    again there, as in the paper, for the price of what had been made.
    """

    name = "tail-rounds"

    def __init__(self, groups: int, samples: int, eta: float = 1.25, regenerate: bool = False) -> None:
        super().__init__(groups)
        self.samples = positive("samples", samples)
        self.eta, self.regenerate = at_least("eta", eta, 1.0), regenerate
        self._round: set[str] = set()
        """Ids of the groups that this round works on."""
        self.is_long = False

    def begin(self, state: RolloutState) -> None:
        left = [g for g in state.groups.values() if g.started and g.id not in state.ready]
        fresh = [g for g in state.groups.values() if not g.started]
        self.is_long = len(left) >= self.wanted or not fresh
        chosen = left[: self.wanted] if self.is_long else fresh[: math.ceil(self.eta * self.wanted)]
        self._round = {g.id for g in chosen}

    def restarts(self, group: GroupState, state: RolloutState) -> bool:
        return self.regenerate and self.is_long and group.id in self._round

    def needed(self, group: GroupState, state: RolloutState) -> int:
        return min(self.samples, len(group.samples))

    def order(self, sample: Sample, state: RolloutState) -> Order | None:
        if sample.group_id not in self._round:
            return None
        if self.is_long and sample.index not in self._wanted(state.group(sample)):
            return None
        if not self.is_long and sample.index >= math.ceil(self.eta * self.samples):
            return None
        return oldest_unfinished_first(sample, state)

    def _wanted(self, group: GroupState) -> set[int]:
        """In a long round: the finished ones, and of the others the first."""
        ended = [s.index for s in group.ended]
        others = [s.index for s in group.samples if s.index not in ended]
        return {*ended, *others[: self.samples - len(ended)]}

    def stop_waiting(self, state: RolloutState) -> bool:
        if self.is_long:
            return all(group_id in state.ready for group_id in self._round if group_id in state.groups)
        return super().stop_waiting(state)
