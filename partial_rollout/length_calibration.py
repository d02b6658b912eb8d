"""How good length estimates were: what was said at admission against what it came to."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Calibration:
    """Pairs (estimate, length) of one source. Figures are of the latest `window` pairs; `count` is of all."""

    def __init__(self, window: int) -> None:
        self.count = 0
        self.pairs: deque[tuple[float, float]] = deque(maxlen=window)

    def add(self, estimate: float, length: float) -> None:
        self.count += 1
        self.pairs.append((estimate, length))

    def report(self) -> dict[str, Any]:
        """JSON-able figures; None where a figure is not defined.

        count: pairs in all; measured: pairs that the rest is about; mean_log_ratio: of ln(estimate / length), above 0
        where estimates are too long; median_abs_error: of |estimate - length| in tokens; coverage: share of lengths
        <= estimate; tau_b: rank correlation of estimates with lengths, what an order by length lives on.
        """
        figures: dict[str, Any] = {"count": self.count, "measured": len(self.pairs)}
        if not self.pairs:
            return figures | dict.fromkeys(("mean_log_ratio", "median_abs_error", "coverage", "tau_b"))
        estimates, lengths = np.array(self.pairs, dtype=np.float64).T
        return figures | {
            "mean_log_ratio": float(np.mean(np.log(estimates / lengths))),
            "median_abs_error": float(np.median(np.abs(estimates - lengths))),
            "coverage": float(np.mean(lengths <= estimates)),
            "tau_b": kendall_tau_b(estimates.tolist(), lengths.tolist()),
        }


def kendall_tau_b(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation corrected for ties, from -1 to 1; None where all of x, or all of y, are equal.

    (C - D) / sqrt((P - Tx) (P - Ty)) over the P pairs of positions: C agree in order, D disagree, Tx are tied in x.
    Sorted by (x, y), D is the number of inversions of y (Knight 1966). O(n log n) comparisons.
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must have one length, not {len(x)} and {len(y)}")
    if any(math.isnan(value) for values in (x, y) for value in values):
        raise ValueError("x and y must be numbers: NaN has no rank")
    rows = sorted(zip(x, y, strict=True))
    discordant, seen = 0, list[float]()
    for _, value in rows:
        discordant += len(seen) - bisect_right(seen, value)
        insort(seen, value)
    pairs = len(rows) * (len(rows) - 1) // 2
    tied_x, tied_y, tied_both = _tied(sorted(x)), _tied(seen), _tied(rows)
    if pairs in (tied_x, tied_y):
        return None
    agreement = pairs - tied_x - tied_y + tied_both - 2 * discordant
    return agreement / math.sqrt((pairs - tied_x) * (pairs - tied_y))


def _tied(ordered: Iterable[Any]) -> int:
    """Pairs of equal items in a sorted sequence."""
    pairs, run, last = 0, 0, object()
    for item in ordered:
        run = run + 1 if item == last else 0
        last = item
        pairs += run
    return pairs
