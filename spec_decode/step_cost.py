"""What a forward pass costs: seconds from the rows it verifies, the KV it reads and the prompt tokens it computes.

    seconds = drift * (g(rows) + per_context * context + per_prefill * prefill)

g is measured for each row count, never falls (isotonic regression), and is interpolated where nothing was measured:
flat within a block of row_multiple rows, to which the engine pads, linear between blocks. The slope of the context comes
from how steps of one row count differ. `drift` follows the whole machine, so that row counts that were last seen when
it was quieter stay comparable. An outlier is clipped to twice (or half) of what was expected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

CLIP = 2.0
DRIFT_MEMORY = 4.0
EXACT_ROWS = 64
"""Row counts up to here have a measurement each; above, neighbours within 1/16 share one."""


@dataclasses.dataclass(slots=True)
class _Bucket:
    """Means over the steps of one row count; older ones fade."""

    rows: float = 0.0
    count: float = 0.0
    steps: int = 0
    last: int = 0
    """Number of the step that was last recorded here."""
    seconds: float = 0.0
    context: float = 0.0
    context_var: float = 0.0
    covariance: float = 0.0
    """Of context and seconds."""

    def add(self, rows: int, seconds: float, context: float, memory: float, now: int) -> None:
        self.count = self.count * (1.0 - 1.0 / memory) + 1.0
        share = 1.0 / self.count
        delta_c, delta_s = context - self.context, seconds - self.seconds
        self.context_var = (1.0 - share) * (self.context_var + share * delta_c * delta_c)
        self.covariance = (1.0 - share) * (self.covariance + share * delta_c * delta_s)
        self.rows += share * (rows - self.rows)
        self.context += share * delta_c
        self.seconds += share * delta_s
        self.steps += 1
        self.last = now


class StepCost:
    """row_multiple: the engine pads the rows of a pass to a multiple of it (exact numerics: 4). memory: steps of one
    row count that count."""

    def __init__(self, row_multiple: int = 1, memory: float = 50.0) -> None:
        if row_multiple < 1:
            raise ValueError(f"row_multiple must be at least 1, not {row_multiple}")
        if not memory >= 2.0:
            raise ValueError(f"memory must be at least 2 steps, not {memory}")
        self.row_multiple = row_multiple
        self.memory = memory
        self.num_steps = 0
        self._buckets: dict[int, _Bucket] = {}
        self._drift = 1.0
        self._per_context = 0.0
        self._prefill = [0.0, 0.0]  # seconds, tokens; older ones fade
        self._curve: np.ndarray | None = None

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
                keep = 1.0 - 1.0 / self.memory
                rest = max(seconds - self.seconds(rows, context), 0.0)
                self._prefill = [self._prefill[0] * keep + rest, self._prefill[1] * keep + prefill]
            return
        bucket = self._buckets.setdefault(_bucket_of(rows), _Bucket())
        if bucket.steps >= 3:
            expected = self.seconds(rows, context)
            seconds = min(max(seconds, expected / CLIP), expected * CLIP)
            self._drift *= (seconds / expected) ** (1.0 / DRIFT_MEMORY)
        bucket.add(rows, seconds / self._drift, context, self.memory, self.num_steps)
        if bucket.steps <= 4 or self.num_steps % 8 == 0:
            self._curve = None

    @property
    def is_empty(self) -> bool:
        """Nothing was measured yet, and nothing can be said."""
        return not self._buckets

    def is_known(self, rows: int) -> bool:
        """Whether a row count so near that it tells the cost was measured (twice: the first step is often slow)."""
        block = -(-rows // self.row_multiple)
        near = [b for b in self._buckets.values() if b.steps >= 2]
        return any(-(-round(b.rows) // self.row_multiple) == block or abs(b.rows - rows) <= rows / 8 for b in near)

    def age(self, rows: int) -> int | None:
        """Steps since this row count was recorded last; None if never."""
        bucket = self._buckets.get(_bucket_of(rows))
        return None if bucket is None else self.num_steps - bucket.last

    @property
    def most_rows(self) -> int:
        """The largest row count that was measured."""
        return round(max((b.rows for b in self._buckets.values()), default=0))

    def seconds(self, rows: int, context: float = 0.0, prefill: int = 0) -> float:
        """Of one pass. Raises ValueError if nothing was measured."""
        return float(self.curve(rows, context, prefill)[rows])

    def curve(self, max_rows: int, context: float = 0.0, prefill: int = 0) -> np.ndarray:
        """float64 [max_rows + 1]: seconds by rows; never falls."""
        if not self._buckets:
            raise ValueError("StepCost: no step was measured; record one, or make it from_points of a profile")
        if self._curve is None or len(self._curve) <= max_rows:
            self._per_context = self._context_slope()
            self._curve = self._make_curve(max(max_rows, 2 * self.most_rows, 32))
        per_prefill = self._prefill[0] / self._prefill[1] if self._prefill[1] else 0.0
        fixed = self._drift * self._per_context * context + per_prefill * prefill
        return self._drift * self._curve[: max_rows + 1] + fixed

    def _context_slope(self) -> float:
        variance = sum(b.count * b.context_var for b in self._buckets.values())
        covariance = sum(b.count * b.covariance for b in self._buckets.values())
        if variance <= 0.0:
            return 0.0
        # Never more than all of the time: a slope from nearly equal contexts is noise.
        most = min((b.seconds / b.context for b in self._buckets.values() if b.context > 0.0), default=0.0)
        return min(max(covariance / variance, 0.0), 0.9 * most)

    def _make_curve(self, max_rows: int) -> np.ndarray:
        """g by rows."""
        buckets = sorted(self._buckets.values(), key=lambda b: b.rows)
        rows = np.array([round(b.rows) for b in buckets])
        values = np.array([b.seconds - self._per_context * b.context for b in buckets])
        values = isotonic(values, np.array([b.count for b in buckets]))
        multiple = self.row_multiple
        block = -(-rows // multiple)
        padded = block * multiple
        # Knots at the ends of measured blocks; a block's first and last measurements bound it.
        knots, first = np.unique(block, return_index=True)
        last = np.append(first[1:], len(rows)) - 1
        lines = np.arange(max_rows + 1)
        line_blocks = -(-np.maximum(lines, 1) // multiple)
        if len(knots) > 1:
            slope = (values[-1] - values[first[-2]]) / max(padded[-1] - padded[first[-2]], 1)
        else:
            slope = 0.5 * values[-1] / padded[-1]  # half of the cost grows with the rows, until it is known
        curve = np.interp(line_blocks * multiple, padded[last], values[last])
        beyond = line_blocks > block[-1]
        curve[beyond] = values[-1] + slope * (line_blocks[beyond] * multiple - padded[-1])
        for knot, low, high in zip(knots, first, last, strict=True):  # inside a measured block: what was measured
            inside = line_blocks == knot
            curve[inside] = np.interp(lines[inside], rows[low : high + 1], values[low : high + 1])
        return np.maximum.accumulate(curve)


def _bucket_of(rows: int) -> int:
    if rows <= EXACT_ROWS:
        return rows
    return EXACT_ROWS + round(16 * np.log(rows / EXACT_ROWS))


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
