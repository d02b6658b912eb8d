"""What must hold of groups from samples to gradients, with every loss and every correction by name: an incomplete group
changes no bit of the others, equal rewards give a gradient of exactly 0, and nothing to train on gives no NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import grad, make_group, make_sample, with_random_logprobs

from longtail.sample import Group
from longtail.trainer_adapter.batch import TrainBatch, expand
from longtail.trainer_adapter.corrections import CORRECTIONS, correction
from longtail.trainer_adapter.diagnostics import diagnose
from longtail.trainer_adapter.losses import POLICY_LOSSES, PolicyLoss, policy_loss
from longtail.trainer_adapter.packing import pack

NEEDS: dict[str, dict[str, Any]] = {"dr_grpo": {"fixed_length": 32}, "divergent_sequence_mask": {"max_kl": 0.01}}
LOSSES = {name: policy_loss(name, **NEEDS.get(name, {})) for name in POLICY_LOSSES} | {
    f"grpo, {name}": PolicyLoss(proximal="now", corrections=correction(name, **NEEDS.get(name, {})))
    for name in CORRECTIONS
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
VERSION = 5


def ready(groups: list[Group], loss: PolicyLoss, **packing: Any) -> TrainBatch:
    batch = with_random_logprobs(pack(groups, version=VERSION, advantage=loss.advantage, **packing))
    return loss.weigh(batch.replace(proximal_logprobs=batch.need("logprobs").detach()))


def gradient(loss: PolicyLoss, batch: TrainBatch) -> torch.Tensor:
    """Of the batch at once, which is that of its micro-batches bit for bit."""
    whole = grad(loss(batch).loss, batch)
    for size in (1, 7, 1000):
        parts = [loss(part).loss for part in batch.split(size)]
        if parts:
            assert torch.equal(grad(torch.stack(parts).sum(), batch), whole), size
    return whole


def unfit(status: str) -> Group:
    """Of which one sample is not done, and the others are as good as any."""
    samples = [make_sample("x", i, [4, 5, 5, 5], float(i)) for i in range(3)]
    return Group("x", [*samples, make_sample("x", 3, [5] * 9, None, status=status)])


FIT = [make_group("a", [1.0, 0.0, 0.5], [4, 5, 5]), make_group("b", [0.0, 0.0, 1.0, 1.0], [3] + [5] * 6)]


@every_loss
@pytest.mark.parametrize("status", ["waiting", "running", "paused"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_incomplete_group_changes_no_bit_of_the_others(loss: PolicyLoss, status: str, place: int) -> None:
    alone = ready(FIT, loss)
    among = ready([*FIT[:place], unfit(status), *FIT[place:]], loss)
    assert among.sample_ids == alone.sample_ids and not any(name.startswith("x") for name in among.sample_ids)
    assert set(among.left_out) == {f"x/{i}" for i in range(4)}
    expected = gradient(loss, alone)
    assert expected.any() and torch.equal(gradient(loss, among), expected)
    assert torch.equal(loss(among).loss, loss(alone).loss)


@every_loss
def test_an_incomplete_group_is_trained_on_where_the_policy_says_so(loss: PolicyLoss) -> None:
    """Its finished samples then have the gradient that they would have as a group of their own; the one that is not
    done has none."""
    group = unfit("paused")
    finished = ready([*FIT, Group("x", group.samples[:3])], loss)
    kept = ready([*FIT, group], loss, incomplete="train")
    assert kept.sample_ids == finished.sample_ids and dict(kept.left_out) == {"x/3": "not done: paused"}
    found = gradient(loss, kept)
    assert torch.equal(found, gradient(loss, finished))
    assert found[expand(kept.groups == 2, kept.lengths)].any()


@every_loss
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e300])
@pytest.mark.parametrize("drift", [0.0, 1.0, 1e4])
def test_equal_rewards_have_a_gradient_of_exactly_zero(loss: PolicyLoss, reward: float, drift: float) -> None:
    """Also where the policy has gone so far that ratios overflow: 0 times infinity is not trained on."""
    equal = make_group("equal", [reward] * 3, [5] * 4)
    batch = ready([equal, *FIT], loss)
    tokens = expand(batch.groups == 0, batch.lengths)
    now = (batch.need("logprobs").detach() + torch.where(tokens, drift, 0.0)).requires_grad_()
    batch = batch.replace(logprobs=now, proximal_logprobs=now.detach())
    found = gradient(loss, batch)
    assert torch.equal(found[tokens], torch.zeros(12))
    assert found[~tokens].isfinite().all() and found[~tokens].any()


@pytest.mark.parametrize("rewards", [[0.3, 0.1 + 0.2], [0.1, 0.1, math.nextafter(0.1, 1)]])
def test_rewards_that_differ_by_one_bit_are_not_equal(rewards: list[float]) -> None:
    """They are trained on, with advantages far below anything that would move a weight."""
    group = make_group("g", rewards)
    assert pack([group], version=VERSION, zero_variance="leave_out").sample_ids != ()
    advantages = pack([group], version=VERSION, dtype=torch.float64).advantages
    assert 0 < advantages.abs().max() < 1e-11


def all_out() -> dict[str, tuple[list[Group], dict[str, Any]]]:
    truncated = make_group("g", [0.0, 1.0])
    for sample in truncated.samples:
        sample.finish_reason = "length"
    observed = Group("g", [make_sample("g", i, [-1, -1], float(i)) for i in range(2)])
    masked = Group("g", [make_sample("g", i, [3, 3, 3], float(i), masked=3) for i in range(2)])
    empty = Group("g", [make_sample("g", i, [], float(i)) for i in range(2)])
    return {
        "too stale": ([make_group("g", [0.0, 1.0], [2, 2])], {"max_staleness": 1}),
        "truncated": ([truncated], {"mask_truncated": True}),
        "observations": ([observed], {}),
        "masked": ([masked], {}),
        "empty outputs": ([empty], {}),
        "no group": ([], {}),
    }


@every_loss
@pytest.mark.parametrize("why", all_out())
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_nothing_to_train_on_gives_zero_and_no_nan(loss: PolicyLoss, why: str, kl_coef: float) -> None:
    groups, packing = all_out()[why]
    settings = {name: getattr(loss, name) for name in PolicyLoss.__dataclass_fields__}
    loss = PolicyLoss(**settings | {"kl_coef": kl_coef})
    batch = pack(groups, version=VERSION, **packing)
    nothing = torch.full((len(batch.mask),), math.nan)
    batch = loss.weigh(batch.replace(ref_logprobs=nothing, proximal_logprobs=nothing))
    batch = batch.replace(logprobs=nothing.clone().requires_grad_())
    assert not batch.mask.any()
    result = loss(batch)
    assert result.loss.item() == 0.0 and int(result.tokens) == 0
    assert torch.equal(grad(result.loss, batch), torch.zeros(len(batch.mask)))
    assert list(batch.split(100)) == []
    overall = diagnose(batch).overall
    assert (overall.trained, overall.kl, overall.max_difference) == (0, None, None)


@every_loss
def test_a_group_that_is_wholly_masked_changes_no_bit_of_the_others(loss: PolicyLoss) -> None:
    old = Group("old", [make_sample("old", i, [1] * 7, float(i)) for i in range(3)])
    alone, among = ready(FIT, loss, max_staleness=2), ready([old, *FIT], loss, max_staleness=2)
    found, expected = gradient(loss, among), gradient(loss, alone)
    tokens = expand(among.groups == 0, among.lengths)
    assert torch.equal(found[~tokens], expected) and not found[tokens].any()
