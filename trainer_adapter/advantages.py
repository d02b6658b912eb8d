"""Advantages of the samples of one group: how much better each did than its siblings.

Computed from Python floats with sums rounded once (math.fsum), so that the order in which siblings finished does not
change a bit. A group whose rewards are all equal is recognised by equality, and its advantages are exactly 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from longtail.sample import is_zero_variance

Advantage = Literal["mean_std", "mean", "leave_one_out"]

STD_EPSILON = 1e-4
"""Added to the standard deviation, as TRL does. It also keeps a spread of rounding errors from becoming advantages."""


def group_advantages(rewards: Sequence[float], kind: Advantage = "mean_std") -> list[float]:
    """rewards: of the G samples of one group -> G advantages.

    mean_std        (r_i - mean) / (std + 1e-4), std with G - 1: GRPO (Shao et al., arXiv 2402.03300, eq. 3)
    mean            r_i - mean: Dr.GRPO, no weight on questions that are nearly solved or hopeless (Liu et al., arXiv
                    2503.20783)
    leave_one_out   r_i - mean of the others: RLOO, unbiased (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740)

    Exactly 0.0 each where all rewards are equal, also for a sample without siblings. ValueError: no reward, one that
    is not finite, or an unknown kind."""
    if kind not in get_args(Advantage):
        raise ValueError(f"advantage {kind!r} is unknown; there are {', '.join(get_args(Advantage))}")
    if not rewards:
        raise ValueError("rewards is empty; a group needs at least one")
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"rewards has {reward}; leave out a sample that has no finite reward")
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    if kind == "leave_one_out":
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
    mean = total / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return centred
    std = math.sqrt(math.fsum(x * x for x in centred) / (len(rewards) - 1))
    return [x / (std + STD_EPSILON) for x in centred]
