"""Seer's scheduling (arXiv 2511.14617): what the siblings of a prompt have shown decides who runs next."""

from __future__ import annotations

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

    def order(self, sample: Sample, state: RolloutState) -> Order | None:
        if not self.may_begin(state.group(sample), state):
            return (2, 0)  # of a later iteration: in nobody's way
        if sample.index == 0:
            return (0, len(sample.output_ids))
        return (1, -state.lengths.estimate(sample).tokens)

    def admit(self, sample: Sample, state: RolloutState) -> Admit | None:
        if (state.num_admissions + 1) % self.fairness == 0:
            oldest = state.queue.oldest()
            if oldest is not None and self.may_begin(state.group(oldest), state):
                sample = oldest
        return Admit(sample, self.chunk) if self.may_begin(state.group(sample), state) else None

    def at_limit(self, sample: Sample, state: RolloutState) -> int | None:
        return None if state.is_outranked(sample) else self.chunk
