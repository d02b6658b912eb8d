"""AReaL's asynchronous generation (arXiv 2505.24298): it never stops, and admission bounds the staleness."""

from __future__ import annotations

from longtail.partial_rollout.strategies.base import BatchStrategy, positive


class BoundedStaleness(BatchStrategy):
    """An iteration hands over `groups` groups, the oldest of those that are complete, as soon as there are so many. The
    others stay in the engine: new weights take their place between two steps, under running samples.

    A group is begun only while fewer than (eta + 1) x `groups` are begun and not handed over. This is AReaL's rule
    capacity = min(slots - running, (eta + version + 1) x batch - (accepted + running)), in which version x batch is
    what was handed over. It bounds the staleness at the time a group is begun; one that then takes longer than others
    may exceed it. For a hard bound give the rollout a `StalenessRule`.
    """

    name = "bounded-staleness"
    keeps_running = True

    def __init__(self, groups: int, eta: int = 1) -> None:
        super().__init__(groups)
        self.eta = positive("eta", eta, 0)
        self.most_begun = (self.eta + 1) * groups
