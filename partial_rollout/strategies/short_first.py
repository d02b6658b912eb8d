"""SortedRL (arXiv 2603.23414): short responses are trained on first, and the batch is updated from early."""

from __future__ import annotations

from longtail.partial_rollout.groups import GroupState
from longtail.partial_rollout.strategies.base import BatchStrategy, Order, RolloutState, positive
from longtail.sample import Sample


class ShortFirst(BatchStrategy):
    """Prompts are taken in pools of `pool` x `groups`. Within a pool whoever is expected to end first runs first, and
    an iteration ends as soon as `groups` groups are complete; they are handed over shortest first. The next pool is
    begun when this one is used up: no response is trained on more than about `pool` updates after it was begun, and
    each pool is trained on as a whole, its long responses last.
    """

    name = "short-first"

    def __init__(self, groups: int, pool: int = 4) -> None:
        super().__init__(groups)
        self.pool = positive("pool", pool)
        self._members: set[str] = set()
        """Ids of the groups of the present pool."""

    def begin(self, state: RolloutState) -> None:
        self._members = {g.id for g in state.groups.values() if g.id in self._members or g.started}
        if not self._members:
            self._members = set(list(state.groups)[: self.pool * self.wanted])

    def order(self, sample: Sample, state: RolloutState) -> Order | None:
        if sample.group_id not in self._members:
            return None
        return (state.lengths.remaining(sample),)

    def hand_over(self, state: RolloutState) -> list[GroupState]:
        ready = state.oldest_ready()
        return sorted(ready, key=lambda g: sum(len(s.output_ids) for s in g.samples))[: self.wanted]
