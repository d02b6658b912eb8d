"""What a forward pass costs: seconds from the rows it verifies, the KV it reads and the prompt tokens it computes.

    seconds = g(rows) + per_context * context + per_prefill * prefill

g is measured for each row count (the mean of the middle half of the last WINDOW steps: a spike does not show), drawn
towards the straight line through all of them where a row count has few steps, never falls (isotonic regression), and
is interpolated where nothing was measured: flat within a block of row_multiple rows, to which the engine pads, linear
between blocks. While one block alone is measured, what further rows cost is taken from passes of prompts. Within a
block only row counts that were run lately are told apart: a cost from a time when the machine was slower would keep
free rows from being tried again. The slope of the context comes from how steps of one row count differ.

There is no factor for how quick the machine is at the moment: what it takes from one row count it gives to another, and
their ratio, which is what matters, is lost.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable

import numpy as np

LATELY = 64
"""Steps within which two row counts have seen the same machine, so that they can be told apart within a block."""
WINDOW = 96
"""Long, so that row counts that are seldom run and those that often are have seen the same loads of the machine."""
KNOWN = 5
"""Steps from which a cost is relied on: the middle half of them bears a slow one."""
LINE_WEIGHT = 2.0
"""Steps that the straight line is worth."""
PROMPT_ROWS = 2.0
"""What a row that is verified may cost beside one of a prompt: it has logits of its own, and reads a context."""
EXACT_ROWS = 64
"""Row counts up to here have a measurement each; above, neighbours within 1/16 share one."""


@dataclasses.dataclass(slots=True)
class _Bucket:
    """The last steps of one row count."""

    rows: float = 0.0
    steps: int = 0
    last: int = 0
    """Number of the last of them."""
    recent: deque[tuple[float, float]] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))
    """(seconds, context)."""
    _middle: _Middle | None = None

    def add(self, number: int, rows: int, seconds: float, context: float) -> None:
        self.steps += 1
        self.last = number
        self.rows += (rows - self.rows) / min(self.steps, WINDOW)
        self.recent.append((seconds, context))
        self._middle = None

    def middle(self) -> _Middle:
        if self._middle is None:
            ordered = sorted(self.recent)
            quarter = len(ordered) // 4
            chosen = ordered[quarter : len(ordered) - quarter]
            count = len(chosen)
            seconds, context = sum(s for s, _ in chosen) / count, sum(c for _, c in chosen) / count
            variance = sum((c - context) ** 2 for _, c in chosen)
            covariance = sum((c - context) * (s - seconds) for s, c in chosen)
            self._middle = _Middle(count, seconds, context, variance, covariance)
        return self._middle


@dataclasses.dataclass(frozen=True, slots=True)
class _Middle:
    """The middle half of a row count's steps by seconds: means, and sums of products less the means."""

    count: int
    seconds: float
    context: float
    variance: float
    """Of the context."""
    covariance: float
    """Of context and seconds."""


class StepCost:
    """row_multiple: the engine pads the rows of a pass to a multiple of it (exact numerics: 4)."""

    def __init__(self, row_multiple: int = 1) -> None:
        if row_multiple < 1:
            raise ValueError(f"row_multiple must be at least 1, not {row_multiple}")
        self.row_multiple = row_multiple
        self.num_steps = 0
        self._buckets: dict[int, _Bucket] = {}
        self._per_context = 0.0
        self._prefill = [0.0, 0.0]  # seconds, tokens; older ones fade
        self._prompts: deque[tuple[int, float]] = deque(maxlen=8)  # (rows, seconds) of passes of prompts alone
        self._curve: np.ndarray | None = None  # both as of some steps ago
        self._most_known: int | None = None

    @classmethod
    def from_points(cls, points: Iterable[tuple[int, float]], row_multiple: int = 1) -> StepCost:
        """From a profile: (rows, seconds), any number of each."""
        cost = cls(row_multiple)
        for rows, seconds in points:
            cost.record(rows, seconds)
        return cost

    def record(self, rows: int, seconds: float, *, context: float = 0.0, prefill: int = 0) -> None:
        """One pass. rows: those of decoding sequences, drafts included; context: KV tokens read; prefill: rows of
        prompts besides. A pass with prompts tells their cost only, where that of its rows is known."""
        if rows < 1 or not seconds > 0.0:
            raise ValueError(f"rows {rows}, seconds {seconds}: a step has at least one row and takes time")
        self.num_steps += 1
        if prefill:
            if self._buckets:
                keep = 1.0 - 1.0 / WINDOW
                rest = max(seconds - self.seconds(rows, context), 0.0)
                self._prefill = [self._prefill[0] * keep + rest, self._prefill[1] * keep + prefill]
            return
        bucket = self._buckets.setdefault(_bucket_of(rows), _Bucket())
        bucket.add(self.num_steps, rows, seconds, context)
        if bucket.steps <= KNOWN:
            self._most_known = None
        if bucket.steps in (1, 2, KNOWN) or self.num_steps % 16 == 0:
            self._curve = None

    def record_prompts(self, rows: int, seconds: float) -> None:
        """A pass of prompts alone."""
        self._prompts.append((rows, seconds))
        if len(self._buckets) == 1:
            self._curve = None

    @property
    def is_empty(self) -> bool:
        """Nothing was measured yet, and nothing can be said."""
        return not self._buckets

    def is_known(self, rows: int) -> bool:
        """Whether KNOWN steps were measured of row counts so near that they tell the cost of this one."""
        block = -(-rows // self.row_multiple)
        near = 0
        for bucket in self._buckets.values():
            if -(-round(bucket.rows) // self.row_multiple) == block or abs(bucket.rows - rows) <= rows / 8:
                near += bucket.steps
        return near >= KNOWN

    def is_measured(self, rows: int) -> bool:
        """Whether this very row count was."""
        return _bucket_of(rows) in self._buckets

    @property
    def most_known(self) -> int:
        """The largest measured row count whose cost is known; 0 for none."""
        if self._most_known is None:
            measured = (round(bucket.rows) for bucket in self._buckets.values())
            self._most_known = max((rows for rows in measured if self.is_known(rows)), default=0)
        return self._most_known

    def seconds(self, rows: int, context: float = 0.0, prefill: int = 0) -> float:
        """Of one pass. Raises ValueError if nothing was measured."""
        return float(self.curve(rows, context, prefill)[rows])

    def curve(self, max_rows: int, context: float = 0.0, prefill: int = 0) -> np.ndarray:
        """float64 [max_rows + 1]: seconds by rows; never falls."""
        if not self._buckets:
            raise ValueError("StepCost: no step was measured; record one, or make it from_points of a profile")
        if self._curve is None or len(self._curve) <= max_rows:
            middles = {rows: bucket.middle() for rows, bucket in self._buckets.items()}
            self._per_context = _context_slope(middles.values())
            self._curve = self._make_curve(middles, max(max_rows, 64))
        per_prefill = self._prefill[0] / self._prefill[1] if self._prefill[1] else 0.0
        return self._curve[: max_rows + 1] + (self._per_context * context + per_prefill * prefill)

    def _make_curve(self, middles: dict[int, _Middle], max_rows: int) -> np.ndarray:
        """g by rows."""
        keys = sorted(middles)
        rows = np.array([round(self._buckets[key].rows) for key in keys])
        values = np.array([middles[key].seconds - self._per_context * middles[key].context for key in keys])
        weights = np.array([float(middles[key].count) for key in keys])
        multiple = self.row_multiple
        block = -(-rows // multiple)
        padded = block * multiple
        values = isotonic(_towards_line(padded, values, weights), weights)
        # Knots at the ends of measured blocks; a block's first and last measurements bound it.
        knots, first = np.unique(block, return_index=True)
        last = np.append(first[1:], len(rows)) - 1
        lines = np.arange(max_rows + 1)
        line_blocks = -(-np.maximum(lines, 1) // multiple)
        if len(knots) > 1:  # from half as many rows: between neighbours it would be noise
            half = first[max(int(np.searchsorted(2 * knots, knots[-1], side="right")) - 1, 0)]
            slope = (values[-1] - values[half]) / (padded[-1] - padded[half])
        else:
            slope = 0.5 * values[-1] / padded[-1]  # at most half of the cost grows with the rows, until it is known
            for prompt_rows, seconds in self._prompts:
                if prompt_rows >= 2 * padded[-1]:
                    each = max(seconds - values[-1], 0.0) / (prompt_rows - padded[-1])
                    slope = min(slope, PROMPT_ROWS * each)
        curve = np.interp(line_blocks * multiple, padded[last], values[last])
        beyond = line_blocks > block[-1]
        curve[beyond] = values[-1] + slope * (line_blocks[beyond] * multiple - padded[-1])
        lately = np.array([self.num_steps - self._buckets[key].last <= LATELY for key in keys])
        for knot, low, high in zip(knots, first, last, strict=True):  # inside a measured block: what was measured
            inside = line_blocks == knot
            chosen = np.arange(low, high + 1)
            if lately[chosen].any():
                chosen = chosen[lately[chosen]]
            curve[inside] = np.interp(lines[inside], rows[chosen], values[chosen])
        return np.maximum.accumulate(curve)


def _context_slope(middles: Iterable[_Middle]) -> float:
    """Least squares within the row counts: seconds over contexts, each less its mean. Not below 0, and never more than
    most of the time: a slope from nearly equal contexts is noise."""
    variance = covariance = 0.0
    most = math.inf
    for middle in middles:
        variance += middle.variance
        covariance += middle.covariance
        if middle.context > 0.0:
            most = min(most, 0.9 * middle.seconds / middle.context)
    return min(max(covariance / variance, 0.0), most) if variance > 0.0 else 0.0


def _bucket_of(rows: int) -> int:
    if rows <= EXACT_ROWS:
        return rows
    return EXACT_ROWS + round(16 * math.log(rows / EXACT_ROWS))


def _towards_line(x: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """values, each drawn towards the least-squares line with LINE_WEIGHT; as they are where no line can be told."""
    if len(np.unique(x)) < 3:
        return values
    mean_x, mean = np.average(x, weights=weights), np.average(values, weights=weights)
    slope = (weights * (x - mean_x) * (values - mean)).sum() / (weights * (x - mean_x) ** 2).sum()
    line = mean + slope * (x - mean_x)
    drawn: np.ndarray = (weights * values + LINE_WEIGHT * line) / (weights + LINE_WEIGHT)
    return drawn


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-falling sequence nearest to `values` (weighted least squares): pool adjacent violators."""
    means: list[float] = []
    totals: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        means.append(value)
        totals.append(weight)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            weight = totals[-2] + totals[-1]
            means[-2] = (means[-2] * totals[-2] + means[-1] * totals[-1]) / weight
            totals[-2] = weight
            sizes[-2] += sizes[-1]
            del means[-1], totals[-1], sizes[-1]
    return np.repeat(means, sizes)
