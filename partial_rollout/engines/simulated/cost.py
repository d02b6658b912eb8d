"""Seconds of a forward pass. What a pass costs depends on its rows and on the KV that it reads, and on nothing else.

A run of decode passes has the same sequences throughout: pass i of it (from 0) makes a token for each of them and reads
`context_tokens + i * num_seqs` tokens of KV. Its cost is wanted as a whole, so that time can go on in leaps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Protocol


class StepSeconds(Protocol):
    """A cost model. All costs are finite and at least 0."""

    def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
        """Of one pass. num_seqs: sequences in it; query_tokens: rows, at least one a sequence; context_tokens: KV
        tokens that it reads, over all sequences, those that it makes itself among them."""
        ...

    def decode_seconds(self, num_seqs: int, context_tokens: int, num_passes: int) -> float:
        """Of a run of decode passes: pass i (from 0) reads context_tokens + i x num_seqs tokens of KV. Subclasses
        inherit the sum over the passes; one that is to be quick gives a closed form."""
        each = (self.seconds(num_seqs, num_seqs, context_tokens + i * num_seqs) for i in range(num_passes))
        return math.fsum(each)


class LinearCost:
    """base + per_seq x sequences + per_token x rows + per_context x KV tokens, in seconds. As it stands, every pass
    takes a second."""

    def __init__(
        self, base: float = 1.0, per_seq: float = 0.0, per_token: float = 0.0, per_context: float = 0.0
    ) -> None:
        for name, value in (
            ("base", base),
            ("per_seq", per_seq),
            ("per_token", per_token),
            ("per_context", per_context),
        ):
            check_seconds(name, value)
        self.base, self.per_seq, self.per_token, self.per_context = base, per_seq, per_token, per_context

    def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
        rows = self.base + self.per_seq * num_seqs + self.per_token * query_tokens
        return rows + self.per_context * context_tokens

    def decode_seconds(self, num_seqs: int, context_tokens: int, num_passes: int) -> float:
        rows = self.base + (self.per_seq + self.per_token) * num_seqs
        return num_passes * rows + self.per_context * total_context(num_seqs, context_tokens, num_passes)


class TableCost:
    """Measured seconds of a decode pass by its number of sequences, linear in between; beyond the last entry as
    between the last two, and below the first as the first.

    per_prefill_token: of each row beyond one a sequence; per_context: of each KV token read.
    """

    def __init__(
        self, decode: Mapping[int, float], *, per_prefill_token: float = 0.0, per_context: float = 0.0
    ) -> None:
        if not decode:
            raise ValueError("decode is empty; give the seconds of a pass for at least one number of sequences")
        for num_seqs, value in decode.items():
            if isinstance(num_seqs, bool) or not isinstance(num_seqs, int) or num_seqs < 1:
                raise ValueError(f"decode: the number of sequences must be an integer of at least 1, not {num_seqs!r}")
            check_seconds(f"decode[{num_seqs}]", value)
        check_seconds("per_prefill_token", per_prefill_token)
        check_seconds("per_context", per_context)
        self._sizes = sorted(decode)
        self._seconds = [decode[size] for size in self._sizes]
        self.per_prefill_token, self.per_context = per_prefill_token, per_context

    def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
        prefill = self.per_prefill_token * (query_tokens - num_seqs)
        return self._decode(num_seqs) + prefill + self.per_context * context_tokens

    def decode_seconds(self, num_seqs: int, context_tokens: int, num_passes: int) -> float:
        context = total_context(num_seqs, context_tokens, num_passes)
        return num_passes * self._decode(num_seqs) + self.per_context * context

    def _decode(self, num_seqs: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if num_seqs <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        above = min(bisect.bisect_left(sizes, num_seqs), len(sizes) - 1)
        slope = (seconds[above] - seconds[above - 1]) / (sizes[above] - sizes[above - 1])
        return max(0.0, seconds[above] + slope * (num_seqs - sizes[above]))


def total_context(num_seqs: int, context_tokens: int, num_passes: int) -> int:
    """KV tokens that a run of decode passes reads."""
    return num_passes * context_tokens + num_seqs * (num_passes * (num_passes - 1) // 2)


def check_seconds(name: str, value: float) -> None:
    """ValueError unless it is a duration."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of seconds of at least 0, not {value!r}")
