"""Kimi k1.5's partial rollouts (arXiv 2501.12599, section 2.6.2): a fixed output-token budget per iteration."""

from __future__ import annotations

from typing import Literal

from longtail.partial_rollout.strategies.base import (
    Admit,
    Order,
    RolloutState,
    Strategy,
    oldest_unfinished_first,
    positive,
)
from longtail.sample import Sample


class TokenBudget(Strategy):
    """What is unfinished when the budget is spent is paused with its KV and continues first in the next iteration.

    tokens: the budget. per="iteration": of all samples together; the iteration ends with the step that reaches it, so
    it is overshot by less than one token a slot (with drafts, one step's). per="sample": of each sample, as the paper
    has it; a sample that reaches it gives up its slot, and the iteration ends when nobody has budget left.
    groups: most groups that are begun and not handed over; None: however many.
    """

    name = "token-budget"
    fresh_stand = True

    def __init__(
        self, tokens: int, per: Literal["iteration", "sample"] = "iteration", *, groups: int | None = None
    ) -> None:
        super().__init__(groups=groups)
        self.tokens = positive("tokens", tokens)
        if per not in ("iteration", "sample"):
            raise ValueError(f'per must be "iteration" or "sample", not {per!r}')
        self.per = per

    def order(self, sample: Sample, state: RolloutState) -> Order | None:
        if self.per == "sample" and state.new_tokens(sample) >= self.tokens:
            return None  # it has spent its budget
        return oldest_unfinished_first(sample, state)

    def admit(self, sample: Sample, state: RolloutState) -> Admit | None:
        admitted = super().admit(sample, state)
        if admitted is None or self.per == "iteration":
            return admitted
        return Admit(sample, self.tokens - state.new_tokens(sample))

    def horizon(self, state: RolloutState) -> int | None:
        return max(self.tokens - state.num_output_tokens, 1) if self.per == "iteration" else None

    def stop_waiting(self, state: RolloutState) -> bool:
        return self.per == "iteration" and state.num_output_tokens >= self.tokens
