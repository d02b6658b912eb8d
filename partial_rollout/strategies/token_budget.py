"""Kimi k1.5's partial rollouts (arXiv 2501.12599, section 2.6.2): a fixed output-token budget per iteration."""

from __future__ import annotations

from typing import Literal

from longtail.partial_rollout.strategies.base import RolloutState, unfinished_first
from longtail.sample import Sample


class TokenBudget:
    """What is unfinished when the budget is spent is paused with its KV and continues first in the next iteration.

    tokens: the budget. per="iteration": of all samples together; the iteration ends with the step that reaches it, so
    it is overshot by less than one token a slot. per="sample": of each sample, as the paper has it; a sample that
    reaches it gives up its slot, and the iteration ends when nobody has budget left.
    """

    name = "token-budget"

    def __init__(self, tokens: int, per: Literal["iteration", "sample"] = "iteration") -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"tokens must be an integer of at least 1, not {tokens!r}")
        if per not in ("iteration", "sample"):
            raise ValueError(f'per must be "iteration" or "sample", not {per!r}')
        self.tokens = tokens
        self.per = per

    def next_sample(self, state: RolloutState) -> Sample | None:
        if self.per == "iteration":
            return unfinished_first(state)
        # A sample that was paused in this very iteration has spent its budget.
        rested = (s for s in [*state.paused, *state.fresh] if s.id not in state.started_with)
        return next(rested, None)

    def to_pause(self, state: RolloutState) -> list[Sample]:
        if self.per == "iteration":
            return []
        return [s for s in state.running.values() if state.new_tokens(s) >= self.tokens]

    def stop_waiting(self, state: RolloutState) -> bool:
        return self.per == "iteration" and state.num_output_tokens >= self.tokens
