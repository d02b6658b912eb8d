"""Recognising a response that loops, so that it need not run to its cap (Kimi k1.5, section 2.6.2)."""

from __future__ import annotations

from collections.abc import Sequence


class RepetitionDetector:
    """True when the output ends in one pattern repeated over and over.

    max_period: longest pattern, in tokens; min_tokens: how long the repeated stretch must be; min_repeats: how often
    the pattern must stand in it. Looked at once every `every` output tokens, counted from the start of the output: the
    answer depends on the tokens alone, so a resumed or rescheduled sample ends at the same place.
    """

    def __init__(self, max_period: int = 64, min_tokens: int = 128, min_repeats: int = 4, every: int = 16) -> None:
        for name, value in (
            ("max_period", max_period),
            ("min_tokens", min_tokens),
            ("min_repeats", min_repeats),
            ("every", every),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if min_repeats < 2:
            raise ValueError("min_repeats must be at least 2: a pattern that stands once is no repetition")
        self.max_period = max_period
        self.min_tokens = min_tokens
        self.min_repeats = min_repeats
        self.every = every

    def __call__(self, output_ids: Sequence[int]) -> bool:
        if len(output_ids) % self.every or len(output_ids) < self.min_tokens:
            return False
        for period in range(1, self.max_period + 1):
            length = max(self.min_tokens, self.min_repeats * period)
            if length <= len(output_ids):
                tail = output_ids[-length:]
                if tail[period:] == tail[:-period]:
                    return True
        return False
