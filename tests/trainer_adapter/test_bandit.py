"""A bandit whose optimum is known, trained on samples of a policy that is never refreshed.

Four arms with rewards r, and a penalty beta KL(pi || uniform): the optimum is pi(a) ~ exp(r(a) / beta). All samples are
of version 0, which likes the bad arms. Where training goes without correction, and with one that bounds ratios, is the
root of the expected gradient, found here by enumeration, without the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer_adapter.helpers import make_sample

from longtail.sample import Group
from longtail.trainer_adapter.corrections import icepop, importance, tis
from longtail.trainer_adapter.losses import PolicyLoss, decoupled_ppo, grpo
from longtail.trainer_adapter.packing import pack

REWARDS = np.array([1.0, 0.6, 0.2, 0.0])
STALE = np.array([0.15, 0.2, 0.3, 0.35])
BETA = 0.5
OPTIMUM = np.exp(REWARDS / BETA) / np.exp(REWARDS / BETA).sum()
GROUP, GROUPS, STEPS, RATE = 8, 4, 300, 1.0

PENALTY: dict[str, Any] = {"kl": "k1", "kl_coef": BETA, "aggregation": "token_mean", "advantage": "leave_one_out"}


def train(loss: PolicyLoss, seed: int, updates: int = 1) -> np.ndarray:
    """-> the mean of the policies of the last half of the steps, `updates` on each batch."""
    generator = np.random.default_rng(seed)
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    log_stale, uniform = np.log(STALE), math.log(1 / 4)
    seen = []
    for step in range(STEPS):
        arms = generator.choice(4, size=(GROUPS, GROUP), p=STALE)
        groups = [
            Group(
                f"{step}.{g}",
                [
                    make_sample(f"{step}.{g}", i, [0], REWARDS[a], logprobs=[log_stale[a]], tokens=[int(a)])
                    for i, a in enumerate(row)
                ],
            )
            for g, row in enumerate(arms)
        ]
        batch = pack(groups, version=step, advantage=loss.advantage, dtype=torch.float64)
        assert batch.inputs is not None
        labels = batch.inputs.labels
        batch = batch.replace(
            ref_logprobs=torch.full_like(batch.rollout_logprobs, uniform),
            proximal_logprobs=logits.detach().log_softmax(0)[labels],
        )
        for _ in range(updates):
            result = loss(batch.replace(logprobs=logits.log_softmax(0)[labels]))
            (gradient,) = torch.autograd.grad(result.loss, [logits])
            with torch.no_grad():
                logits -= RATE / updates * gradient
        seen.append(logits.detach().softmax(0).numpy())
    return np.mean(seen[STEPS // 2 :], 0)


def expected_end(factor: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Where E_mu[f(pi / mu) (r - b - beta log(pi / uniform)) grad log pi] is 0; b: the mean reward of the others."""
    logits = np.zeros(4)
    for _ in range(5000):
        pi = np.exp(logits) / np.exp(logits).sum()
        push = STALE * factor(pi / STALE) * (REWARDS - STALE @ REWARDS - BETA * np.log(4 * pi))
        logits += push - pi * push.sum()
    assert np.abs(push - pi * push.sum()).max() < 1e-12
    return pi


def distance(p: np.ndarray, q: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(p - q).sum() / 2)


# Total variation between where training ends and where it should, over 40 to 60 other seeds of "importance",
# "decoupled", "tis" and "uncorrected": means 0.0055 to 0.0075, standard deviations 0.0033 to 0.0046, largest 0.021. The
# bound is 7 standard deviations above the mean (and 5.9 below the bias of "tis"): if the tails are normal, a false
# alarm in fewer than one seed in 10 million; with the seed that is used here, none.
BOUND = 0.04

ENDS: dict[str, tuple[PolicyLoss, np.ndarray, int]] = {
    "importance": (grpo(proximal="now", corrections=importance(), **PENALTY), OPTIMUM, 1),
    "ratio to behaviour": (grpo(clip_low=None, clip_high=None, **PENALTY), OPTIMUM, 2),
    "decoupled": (decoupled_ppo(**PENALTY), OPTIMUM, 2),
    "tis above every ratio": (grpo(proximal="now", corrections=tis(4.0), **PENALTY), OPTIMUM, 1),
    "icepop around every ratio": (grpo(proximal="now", corrections=icepop(0.1, 5.0), **PENALTY), OPTIMUM, 1),
    "tis": (grpo(proximal="now", corrections=tis(2.0), **PENALTY), expected_end(lambda rho: np.minimum(rho, 2)), 1),
    "uncorrected": (grpo(proximal="now", **PENALTY), expected_end(np.ones_like), 1),
}
BIAS = {"tis": 0.064, "uncorrected": 0.130}
"""Total variation between the end of training, in expectation, and the optimum: half as much with ratios up to 2 of the
3.7 that the optimum has."""


@pytest.mark.parametrize("name", ENDS)
def test_where_training_ends(name: str) -> None:
    """Each where its expected gradient is 0: at the optimum, or as far from it as its bias says."""
    loss, end, updates = ENDS[name]
    bias = distance(end, OPTIMUM)
    assert bias == pytest.approx(BIAS.get(name, 0.0), abs=1e-3)
    found = train(loss, seed=0, updates=updates)
    assert distance(found, end) < BOUND
    assert (distance(found, OPTIMUM) > BOUND) == (name in BIAS)


def test_a_clip_around_the_behaviour_policy_keeps_the_policy_there() -> None:
    """GRPO as published, whose old policy is that which sampled: an arm is not pushed below 0.8 of its stale
    probability nor above 1.2 of it, and training ends farther from the optimum than without any correction. Decoupled
    PPO has the same clip around the policy at the start of the update, and ends at the optimum, above."""
    found = train(grpo(**PENALTY), seed=0, updates=2)
    assert (found[2:] > 0.7 * STALE[2:]).all()
    assert distance(found, OPTIMUM) > BIAS["uncorrected"] + BOUND
