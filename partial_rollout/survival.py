"""Statistics of lengths that are known in full or only from below (censored): how long responses are, not how long
those are that have ended.

Kaplan and Meier 1958. A response that was followed from `entries` on (not from its start: delayed entry, Tsai, Jewell
and Wang 1987) is at risk of ending at each length in (entry, length]; it ended at `length`, or was longer than that.
Lengths are whole tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Lengths = Sequence[int] | np.ndarray[Any, Any]
Flags = Sequence[bool] | np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Survival:
    """Share of responses that are longer than a length."""

    longer: np.ndarray[Any, Any]
    """float64 [limit + 1]: longer[l] is the share longer than l tokens."""

    @property
    def limit(self) -> int:
        """The longest length seen, ended or not. Nothing is known beyond."""
        return len(self.longer) - 1

    def mean(self) -> float | None:
        """Mean of min(length, limit) in tokens (the restricted mean): a lower bound of the mean where the longest
        response had not ended. None: nothing was seen."""
        return float(self.longer[:-1].sum()) if self.limit else None

    def quantile(self, share: float) -> int | None:
        """The smallest length that at least `share` of the responses do not exceed; None: longer than any seen."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be in (0, 1], not {share}")
        reached = np.flatnonzero(self.longer <= 1.0 - share + 1e-12)
        return int(reached[0]) if self.limit and len(reached) else None


class Exposure:
    """Counts by length, from which a `Survival` is made: memory for the longest length, whatever the number of
    responses."""

    def __init__(self) -> None:
        self._entered = np.zeros(1, np.int64)
        self._left = np.zeros(1, np.int64)
        self._ended = np.zeros(1, np.int64)

    def add(self, lengths: Lengths, ended: Flags, entries: Lengths | None = None) -> None:
        """lengths: tokens when last seen; ended: whether that is all of it (else it is longer); entries: tokens from
        which on it was followed (default 0; one without a token since then tells nothing). ValueError if an entry
        exceeds its length."""
        length = _whole("lengths", lengths)
        entry = np.zeros_like(length) if entries is None else _whole("entries", entries)
        end = np.asarray(ended, dtype=bool)
        if not length.shape == entry.shape == end.shape:
            raise ValueError(
                f"lengths, ended and entries must have one size, not {length.size}, {end.size}, {entry.size}"
            )
        if np.any(entry > length):
            raise ValueError("entries must not exceed lengths")
        followed = length > entry
        self._entered = _counted(self._entered, entry[followed])
        self._left = _counted(self._left, length[followed])
        self._ended = _counted(self._ended, length[followed & end])

    def __iadd__(self, other: Exposure) -> Exposure:
        self._entered = _plus(self._entered, other._entered)
        self._left = _plus(self._left, other._left)
        self._ended = _plus(self._ended, other._ended)
        return self

    def survival(self) -> Survival:
        size = max(len(self._entered), len(self._left))
        entered, left, ended = (_sized(a, size) for a in (self._entered, self._left, self._ended))
        at_risk = np.zeros(size, np.int64)  # at l: entered below l and not left below l
        at_risk[1:] = np.cumsum(entered - left)[:-1]
        # With delayed entry the few that are followed from early on may all end before the others enter. That is no
        # proof that nobody is longer: such an end is left out (Lai and Ying 1991).
        later = np.cumsum(entered[::-1])[::-1]
        ended = np.where((ended == at_risk) & (later > 0) & (at_risk > 0), 0, ended)
        return Survival(np.cumprod(1.0 - ended / np.maximum(at_risk, 1)))


def kaplan_meier(lengths: Lengths, ended: Flags, entries: Lengths | None = None) -> Survival:
    exposure = Exposure()
    exposure.add(lengths, ended, entries)
    return exposure.survival()


def rank_scores(lengths: Lengths, ended: Flags) -> np.ndarray[Any, Any]:
    """float64 [n] in [-1, 1], 0 in the mean: high for short responses, low for long ones and those still unfinished.

    Prentice-Wilcoxon scores (Peto and Peto 1972): S(l) + S(l - 1) - 1 for one that ended at l, S(l) - 1 for one that
    is longer than l. Bounded, so that one giant decides nothing alone.
    """
    length, end = _whole("lengths", lengths), np.asarray(ended, dtype=bool)
    longer = kaplan_meier(length, end).longer
    return np.where(end, longer[length] + longer[np.maximum(length - 1, 0)], longer[length]) - 1.0


def chance_of_low(scores: np.ndarray[Any, Any], units: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any]) -> float:
    """An upper bound of the probability that a choice by lot has scores as low in total as the `chosen`.

    scores: float64 [n]; units: int [n], 0 or more, the unit (prompt) of each; chosen: bool [n]. Responses to one
    prompt resemble each other, so the lot is drawn over whole units where a unit is chosen as a whole or not at all
    (the unit's mean score stands for it), and within the unit where a part of it is.

    A sum drawn without replacement is bounded by the same draw with replacement (Hoeffding 1963, theorem 4), that one
    by Chernoff's inequality with the scores that are really there: no normal approximation, right at any size. 1.0
    where nothing, or all, is chosen.
    """
    if chosen.all() or not chosen.any():
        return 1.0
    size = np.bincount(units)
    count = np.bincount(units, weights=chosen).astype(np.int64)
    means = np.bincount(units, weights=scores) / np.maximum(size, 1)
    whole = (size > 0) & ((count == 0) | (count == size))
    part = (count > 0) & (count < size)
    # Strata, each drawn for itself, around its mean: the whole units, and the inside of each other one.
    mixed = part[units]
    stratum = np.concatenate([np.zeros(int(whole.sum()), np.int64), 1 + units[mixed]])
    of_whole = means[whole]
    centred = np.concatenate([of_whole - (of_whole.mean() if of_whole.size else 0.0), (scores - means[units])[mixed]])
    taken = np.concatenate([count[whole] > 0, chosen[mixed]])
    _, stratum = np.unique(stratum, return_inverse=True)
    members = np.bincount(stratum)
    drawn = np.bincount(stratum, weights=taken)
    low = float(centred[taken].sum())
    best = 0.0
    for tilt in 2.0 ** np.arange(-7.0, 6.5, 0.5):
        # The sum of those drawn is minus the sum of the others: the smaller of the two bounds.
        down = drawn * np.log(np.bincount(stratum, weights=np.exp(-tilt * centred)) / members)
        up = (members - drawn) * np.log(np.bincount(stratum, weights=np.exp(tilt * centred)) / members)
        best = min(best, tilt * low + float(np.minimum(down, up).sum()))
    return math.exp(best)


def _whole(name: str, values: Lengths) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0):
        raise ValueError(f"{name} must be whole numbers of tokens, 0 or more")
    return array.astype(np.int64)


def _sized(counts: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return np.pad(counts, (0, size - len(counts)))


def _counted(counts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return _plus(counts, np.bincount(lengths, minlength=1))


def _plus(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    size = max(len(a), len(b))
    return _sized(a, size) + _sized(b, size)
