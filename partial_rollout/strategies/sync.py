"""Wait for everything: the baseline that every trainer starts from."""

from __future__ import annotations

from longtail.partial_rollout.strategies.base import RolloutState, unfinished_first
from longtail.sample import Sample


class Sync:
    """An iteration ends when every submitted sample has ended. Strictly on-policy; the tail is waited out."""

    name = "sync"

    def next_sample(self, state: RolloutState) -> Sample | None:
        return unfinished_first(state)

    def to_pause(self, state: RolloutState) -> list[Sample]:
        return []

    def stop_waiting(self, state: RolloutState) -> bool:
        return False
