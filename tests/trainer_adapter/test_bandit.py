"""A bandit whose optimum is known, trained on samples of a policy that is never refreshed, and on responses whose first
part such a policy wrote.

Four arms with rewards r, and a penalty beta KL(pi || uniform): the optimum is pi(a) ~ exp(r(a) / beta). What is stale
is of version 0, which likes the bad arms. Where training goes without correction, and with one that bounds ratios, is
the root of the expected gradient, found here by enumeration, without the code under test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer_adapter.helpers import make_sample

from longtail.sample import Group, Sample
from longtail.trainer_adapter.batch import TrainBatch
from longtail.trainer_adapter.corrections import (
    CORRECTIONS,
    divergent_sequence_mask,
    icepop,
    importance,
    sequence_mask,
    tis,
)
from longtail.trainer_adapter.losses import PolicyLoss, decoupled_ppo, grpo
from longtail.trainer_adapter.packing import pack

REWARDS = np.array([1.0, 0.6, 0.2, 0.0])
STALE = np.array([0.15, 0.2, 0.3, 0.35])
BETA = 0.5
OPTIMUM = np.exp(REWARDS / BETA) / np.exp(REWARDS / BETA).sum()
GROUP, GROUPS, STEPS, RATE = 8, 4, 300, 1.0

PENALTY: dict[str, Any] = {"kl": "k1", "kl_coef": BETA, "aggregation": "token_mean", "advantage": "leave_one_out"}


def arm(group: str, index: int, arms: Iterable[int], versions: list[int], logprobs: list[np.ndarray]) -> Sample:
    """A response of an arm a token; logprobs: [4] of each place."""
    chosen = [int(a) for a in arms]
    reward = float(REWARDS[chosen].sum())
    said = [float(row[a]) for row, a in zip(logprobs, chosen, strict=True)]
    return make_sample(group, index, versions, reward, logprobs=said, tokens=chosen)


def descend(
    loss: PolicyLoss, places: int, make: Callable[[int, np.ndarray], list[Group]], updates: int = 1, **packing: Any
) -> np.ndarray:
    """make: step, log pi [places, 4] -> groups. -> the mean of the policies [places, 4] of the last half of the steps,
    `updates` on each batch."""
    logits = torch.zeros(places, 4, dtype=torch.float64, requires_grad=True)
    seen = []
    for step in range(STEPS):
        groups = make(step, logits.detach().log_softmax(1).numpy())
        batch = pack(groups, version=step + 1, advantage=loss.advantage, dtype=torch.float64, **packing)
        at, labels = torch.arange(places).repeat(len(batch)), need_labels(batch)
        batch = batch.replace(
            ref_logprobs=torch.full_like(batch.rollout_logprobs, math.log(1 / 4)),
            proximal_logprobs=logits.detach().log_softmax(1)[at, labels],
        )
        for _ in range(updates):
            result = loss(batch.replace(logprobs=logits.log_softmax(1)[at, labels]))
            (gradient,) = torch.autograd.grad(result.loss, [logits])
            with torch.no_grad():
                logits -= places * RATE / updates * gradient  # each place has its share of the mean over tokens
        seen.append(logits.detach().softmax(1).numpy())
    return np.mean(seen[STEPS // 2 :], 0)


def need_labels(batch: TrainBatch) -> torch.Tensor:
    assert batch.inputs is not None
    return batch.inputs.labels


def distance(p: np.ndarray, q: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(p - q).sum() / 2)


def root(gradient: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The policy at which sum_a gradient(pi)[a] grad log pi(a) is 0."""
    logits = np.zeros(4)
    for _ in range(5000):
        pi = np.exp(logits) / np.exp(logits).sum()
        push = gradient(pi)
        logits += push - pi * push.sum()
    assert np.abs(push - pi * push.sum()).max() < 1e-12
    return pi


# ---- all samples are stale


def train(loss: PolicyLoss, seed: int, updates: int = 1) -> np.ndarray:
    generator = np.random.default_rng(seed)

    def make(step: int, now: np.ndarray) -> list[Group]:
        arms = generator.choice(4, size=(GROUPS, GROUP), p=STALE)
        names = [f"{step}.{g}" for g in range(GROUPS)]
        stale = [np.log(STALE)]
        return [
            Group(name, [arm(name, i, [a], [0], stale) for i, a in enumerate(row)])
            for name, row in zip(names, arms, strict=True)
        ]

    return descend(loss, 1, make, updates)[0]


Factor = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _siblings() -> tuple[np.ndarray, np.ndarray]:
    """The mean reward of the others of a group, every one of its values, and the probability of each."""
    others = GROUP - 1
    means, shares = [], []
    for counts in itertools.product(range(others + 1), repeat=4):
        if sum(counts) == others:
            ways = math.factorial(others) / math.prod(map(math.factorial, counts))
            means.append(np.dot(counts, REWARDS) / others)
            shares.append(ways * np.prod(STALE**counts))
    return np.array(means), np.array(shares)


def expected_end(factor: Factor) -> np.ndarray:
    """Where E_mu[f(rho, A) (A - beta log(pi / uniform)) grad log pi] is 0; rho = pi / mu, A = r - mean of the others.
    factor: rho [4, 1], A [4, M] -> [4, M] or [4, 1]."""
    means, shares = _siblings()
    advantages = REWARDS[:, None] - means

    def gradient(pi: np.ndarray) -> np.ndarray:
        weighted = factor((pi / STALE)[:, None], advantages) * (advantages - BETA * np.log(4 * pi)[:, None])
        return STALE * (weighted @ shares)

    return root(gradient)


# Total variation between where training ends and where it should, over 40 to 60 other seeds of "importance",
# "decoupled", "tis" and "none": means 0.0055 to 0.0075, standard deviations 0.0033 to 0.0046, largest 0.021. The bound
# is 7 standard deviations above the mean (and 5.9 below the bias of "tis"): if the tails are normal, a false alarm in
# fewer than one seed in 10 million; with the seed that is used here, none.
BOUND = 0.04

NONE = expected_end(lambda rho, a: np.ones_like(rho))
now: dict[str, Any] = {"proximal": "now"} | PENALTY
ENDS: dict[str, tuple[PolicyLoss, np.ndarray, int]] = {
    "none": (grpo(**now), NONE, 1),
    "none: ratio to behaviour": (grpo(clip_low=None, clip_high=None, **PENALTY), OPTIMUM, 2),
    "importance": (grpo(corrections=importance(), **now), OPTIMUM, 1),
    "tis": (grpo(corrections=tis(2.0), **now), expected_end(lambda rho, a: np.minimum(rho, 2)), 1),
    "tis above every ratio": (grpo(corrections=tis(4.0), **now), OPTIMUM, 1),
    "icepop around every ratio": (grpo(corrections=icepop(0.1, 5.0), **now), OPTIMUM, 1),
    "sequence_mask around every ratio": (grpo(corrections=sequence_mask(high=5.0), **now), OPTIMUM, 1),
    "sequence_mask without weights": (grpo(corrections=sequence_mask(high=5.0, weigh=False), **now), NONE, 1),
    "decoupled": (decoupled_ppo(**PENALTY), OPTIMUM, 2),
    "divergent_sequence_mask beyond every sequence": (grpo(corrections=divergent_sequence_mask(2.0), **now), NONE, 1),
    "divergent_sequence_mask and importance": (
        grpo(corrections=importance() + divergent_sequence_mask(2.0), **now),
        OPTIMUM,
        1,
    ),
}
BIAS = {
    "none": 0.130,
    "tis": 0.064,
    "sequence_mask without weights": 0.130,
    "divergent_sequence_mask beyond every sequence": 0.130,
}
"""Total variation between the end of training, in expectation, and the optimum: half as much with ratios up to 2 of the
3.7 that the optimum has; and what only leaves out, without weights, corrects nothing of what it keeps."""


def test_every_correction_is_here_by_name() -> None:
    assert {name.replace(":", "").split()[0] for name in ENDS} == set(CORRECTIONS)


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
    assert distance(found, OPTIMUM) > BIAS["none"] + BOUND


# ---- most responses were begun by the stale policy and ended by the present one

RESUMED = 7
"""Of the 8 of a group. With 4 the fresh half pulls the policy to where uncorrected training is 0.012 off."""


def train_segments(loss: PolicyLoss, seed: int, updates: int = 1, **packing: Any) -> np.ndarray:
    """Two arms a response, and the sum of their rewards: seven of a group are of versions (0, now), one of (now, now).
    -> the two policies [2, 4]."""
    generator = np.random.default_rng(seed)

    def make(step: int, log_pi: np.ndarray) -> list[Group]:
        groups = []
        for g in range(GROUPS):
            name, samples = f"{step}.{g}", []
            for i in range(GROUP):
                first, version = (np.log(STALE), 0) if i < RESUMED else (log_pi[0], step + 1)
                arms = [generator.choice(4, p=np.exp(row)) for row in (first, log_pi[1])]
                samples.append(arm(name, i, arms, [version, step + 1], [first, log_pi[1]]))
            groups.append(Group(name, samples))
        return groups

    return descend(loss, 2, make, updates, **packing)


def mostly_stale(pi: np.ndarray) -> np.ndarray:
    """Of the first place, uncorrected: a resumed sample has 6 stale siblings and a fresh one, the fresh one has 7
    stale ones. What the second place adds to rewards and to their means is the same on average, and cancels."""
    stale, fresh, rest = STALE @ REWARDS, pi @ REWARDS, REWARDS - BETA * np.log(4 * pi)
    return (7 * STALE * (rest - (6 * stale + fresh) / 7) + pi * (rest - stale)) / 8


# Total variation of the first place from where it should end, over 20 other seeds: where earlier segments are left out
# and an eighth of its tokens is trained on, mean 0.019, standard deviation 0.009, largest 0.035; else means up to
# 0.008, standard deviations up to 0.005. The bound is 4.8 standard deviations above the mean (and the bias of
# "none" 12 above the bound): if the tails are normal, a false alarm in 1 of 10^6 seeds; with the seed used here, none.
SEGMENT_BOUND = 0.06
SEGMENT_BIAS = 0.098
SEGMENTS: dict[str, tuple[PolicyLoss, np.ndarray, int, dict[str, Any]]] = {
    "none": (grpo(**now), root(mostly_stale), 1, {}),
    "without_earlier_segments": (grpo(**now), OPTIMUM, 1, {"last_segment_only": True}),
    "without_stale": (grpo(**now), OPTIMUM, 1, {"max_staleness": 0}),
    "importance": (grpo(corrections=importance(), **now), OPTIMUM, 1, {}),
    "decoupled": (decoupled_ppo(**PENALTY), OPTIMUM, 2, {}),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_where_training_on_resumed_responses_ends(name: str) -> None:
    """Kimi's choice, which leaves the earlier segment out, ends at the optimum of both places, as the weighted ones do;
    uncorrected the first place ends where most of its tokens pull it, and the second, always fresh, at the optimum."""
    loss, end, updates, packing = SEGMENTS[name]
    assert distance(end, OPTIMUM) == pytest.approx(SEGMENT_BIAS if name == "none" else 0.0, abs=1e-3)
    found = train_segments(loss, 0, updates, **packing)
    assert distance(found[0], end) < SEGMENT_BOUND
    assert distance(found[1], OPTIMUM) < SEGMENT_BOUND
    assert (distance(found[0], OPTIMUM) > SEGMENT_BOUND) == (name == "none")
