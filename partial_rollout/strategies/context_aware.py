"""Seer's scheduling (arXiv 2511.14617): what the siblings of a prompt have shown decides who runs next."""

from __future__ import annotations

import itertools

from longtail.partial_rollout.strategies.base import Admit, Order, RolloutState, Strategy, positive
from longtail.sample import Sample


class ContextAware(Strategy):
    """Synchronous, strictly on-policy: an iteration ends when everything has ended, and the long responses start early.

    - One sample of each group, the first, is its *probe*. Probes go before all others, those with the fewest tokens so
      far first (the shortest are known soonest).
    - The length of the others is estimated by the longest sibling that has finished, without one by the cap. The
      longest go first, approximately: every `fairness`-th slot goes to whoever was submitted first, so that nobody
      starves.
    - Responses are divided into chunks of `chunk` tokens. After each, the sample gives its slot to one that comes
      before it, if there is one; it keeps its KV, and may go on elsewhere.

    groups: as in `Sync`.
    """

    name = "context-aware"

    def __init__(self, chunk: int = 256, fairness: int = 8, *, groups: int | None = None) -> None:
        super().__init__(groups=groups)
        self.chunk, self.fairness = positive("chunk", chunk), positive("fairness", fairness, 2)
        self._members: set[str] = set()
        """Ids of the groups that the iteration works on, where their number is bounded."""

    def begin(self, state: RolloutState) -> None:
        if self.groups is not None:
            begun = [g.id for g in state.groups.values() if g.started]
            fresh = (g.id for g in state.groups.values() if not g.started)
            self._members = {*begun, *itertools.islice(fresh, max(self.groups - len(begun), 0))}

    def order(self, sample: Sample, state: RolloutState) -> Order | None:
        if self.groups is not None and sample.group_id not in self._members:
            if len(self._members) >= self.groups:
                return (2, 0.0)  # after all others: they may not be begun yet, and must not be in anybody's way
            self._members.add(sample.group_id)
        if sample.index == 0:
            return (0, len(sample.output_ids))
        return (1, -state.lengths.estimate(sample).tokens)

    def admit(self, sample: Sample, state: RolloutState) -> Admit | None:
        if (state.num_admissions + 1) % self.fairness == 0:
            sample = state.queue.oldest() or sample
        admitted = super().admit(sample, state)
        return None if admitted is None else Admit(sample, self.chunk)

    def at_limit(self, sample: Sample, state: RolloutState) -> int | None:
        return None if state.is_outranked(sample) else self.chunk
