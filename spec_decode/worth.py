"""What a token of each sequence is worth: in seconds of the run that it saves.

A step over S sequences costs about f + c S seconds: f whether there is one sequence or many, c for each.

Where lengths are open (slots are refilled, or a sample may stop at any token), each sequence is as likely as any other
to be the one that the last steps are made for: every token is worth (f + c S) / S, and what counts is tokens a second.

Where nothing waits and a sequence's end is its cap, the run ends with the one that has most left, K_i tokens:

    seconds left, without drafts = f max_i K_i + c sum_i K_i

A token of that one is worth f + c, one of the others only c: drafts that make quick sequences quicker still, in steps
that all the others have to wait for, lose time. *What happened* is counted by just this. *What to draft* is weighed by
the chances to end last, as tokens accepted later may turn the order: softmax(K_i / sqrt(max K)), the distance by which
sequences drift apart in K steps.

`certain` mixes the two: the probability that the sequences come to their caps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Worth:
    """Of the tokens of one step's sequences. left: tokens that each one has to its cap; None: lengths are open."""

    left: np.ndarray | None = None
    """float64 [sequences]"""
    certain: float = 0.0

    @classmethod
    def of(cls, left: Sequence[int], certain: float) -> Worth:
        if not 0.0 <= certain <= 1.0:
            raise ValueError(f"certain is a probability, not {certain}")
        return cls(np.asarray(left, dtype=np.float64), certain) if certain and len(left) else OPEN

    def weights(self, shared: float) -> np.ndarray | None:
        """shared: f / (f + c S). -> float64 [sequences], mean 1: the worth of a token; None: all alike."""
        if self.left is None:
            return None
        most = self.left.max()
        chances = np.exp((self.left - most) / max(most, 1.0) ** 0.5)
        shared *= self.certain
        weights: np.ndarray = (1.0 - shared) + shared * len(chances) / chances.sum() * chances
        return weights

    def steps(self, emitted: Sequence[int], shared: float) -> float:
        """The steps without drafts that these tokens of each sequence stand for: 1 where each has one."""
        mean = sum(emitted) / len(emitted)
        if self.left is None:
            return mean
        shared *= self.certain
        nearer = float(self.left.max() - (self.left - emitted).max())
        return (1.0 - shared) * mean + shared * nearer

    @property
    def steps_left(self) -> float:
        """Without drafts, as far as is known; 0 where lengths are open."""
        return 0.0 if self.left is None else self.certain * float(self.left.max())


OPEN = Worth()
