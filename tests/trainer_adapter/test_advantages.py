"""Advantages of a group, by hand and against torch's statistics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from longtail.sample import is_zero_variance
from longtail.trainer_adapter.advantages import Advantage, group_advantages

KINDS: tuple[Advantage, ...] = ("mean_std", "mean", "leave_one_out")


def test_by_hand() -> None:
    """Rewards 0, 0, 1, 3: mean 1, deviations -1 -1 0 2, variance 6 / 3."""
    rewards = [0.0, 0.0, 1.0, 3.0]
    assert group_advantages(rewards, "mean") == [-1.0, -1.0, 0.0, 2.0]
    assert group_advantages(rewards, "leave_one_out") == [0 - 4 / 3, 0 - 4 / 3, 1 - 3 / 3, 3 - 1 / 3]
    scale = math.sqrt(2.0) + 1e-4
    assert group_advantages(rewards, "mean_std") == [-1 / scale, -1 / scale, 0.0, 2 / scale]


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_against_torch(size: int) -> None:
    r = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    expected = {
        "mean": r - r.mean(),
        "mean_std": (r - r.mean()) / (r.std() + 1e-4),
        "leave_one_out": size / (size - 1) * (r - r.mean()),
    }
    for kind in KINDS:
        found = torch.tensor(group_advantages(r.tolist(), kind), dtype=torch.float64)
        torch.testing.assert_close(found, expected[kind], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, -7e300])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_equal_rewards_are_exactly_zero(kind: Advantage, value: float, size: int) -> None:
    """Also where the mean of equal numbers is not that number: (0.1 + 0.1 + 0.1) / 3 != 0.1 in floating point."""
    assert group_advantages([value] * size, kind) == [0.0] * size


@pytest.mark.parametrize("kind", KINDS)
def test_one_unit_in_the_last_place_is_no_zero_variance_and_no_advantage(kind: Advantage) -> None:
    rewards = [0.3, 0.1 + 0.2]
    assert not is_zero_variance(rewards)
    assert 0 < max(map(abs, group_advantages(rewards, kind))) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_siblings_changes_no_bit(kind: Advantage) -> None:
    rewards = [0.1, 0.7, 1e-9, 0.30000001, 2.5]
    by_reward = dict(zip(rewards, group_advantages(rewards, kind), strict=True))
    for order in itertools.permutations(rewards):
        assert group_advantages(order, kind) == [by_reward[r] for r in order]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="rewards is empty"):
        group_advantages([])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            group_advantages([1.0, bad])
    with pytest.raises(ValueError, match=r"median.*mean_std"):
        group_advantages([1.0, 2.0], "median")  # type: ignore[arg-type]
