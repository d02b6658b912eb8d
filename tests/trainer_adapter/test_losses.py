"""Policy losses against arithmetic written out, gradients by gradcheck, and what must have no influence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import grad, random_batch

from longtail.trainer_adapter.batch import TrainBatch
from longtail.trainer_adapter.corrections import RatioCorrection, divergent_sequence_mask, icepop, sequence_mask, tis
from longtail.trainer_adapter.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    dapo,
    decoupled_ppo,
    dr_grpo,
    grpo,
    gspo,
    kl_estimate,
    policy_loss,
    token_weights,
)

ALL: dict[str, PolicyLoss] = {
    "grpo": grpo(),
    "grpo k3": grpo(kl_coef=0.3),
    "grpo k2": grpo(kl_coef=0.3, kl="k2"),
    "grpo k1": grpo(kl_coef=0.3, kl="k1"),
    "grpo k3 in the reward": grpo(kl_coef=0.3, kl_in="reward"),
    "grpo k3 weighted": grpo(kl_coef=0.3, kl_weighted=True),
    "grpo k3 weighted with tis": grpo(kl_coef=0.3, kl_weighted=True, proximal="now", corrections=tis(1.3)),
    "grpo dual clip": grpo(clip_dual=1.5),
    "grpo unclipped": grpo(clip_low=None, clip_high=None),
    "grpo now tis": grpo(proximal="now", corrections=tis(1.3)),
    "grpo icepop": grpo(proximal="now", corrections=icepop(0.8, 1.3)),
    "grpo sequence mask": grpo(corrections=sequence_mask(0.5, 1.5, weigh=False)),
    "grpo divergent": grpo(corrections=divergent_sequence_mask(0.01)),
    "dr_grpo": dr_grpo(fixed_length=16),
    "dapo": dapo(),
    "dapo by group": dapo(aggregation="group_mean"),
    "gspo": gspo(clip_low=0.05, clip_high=0.05),
    "gspo k3": gspo(clip_low=0.05, clip_high=0.05, kl_coef=0.3),
    "sequence sum": grpo(aggregation="sequence_sum"),
    "decoupled": decoupled_ppo(),
    "decoupled capped": decoupled_ppo(cap=1.2),
}
every_loss = pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())


def reference(loss: PolicyLoss, b: TrainBatch) -> float:
    """The loss as its docstrings say it, one token after the other, in Python floats."""
    now, mu, prox, ref = (
        t.detach().tolist()
        for t in (b.need("logprobs"), b.rollout_logprobs, b.need("proximal_logprobs"), b.need("ref_logprobs"))
    )
    prox = {"behaviour": mu, "recorded": prox, "now": now}[loss.proximal]
    mask, adv = b.mask.tolist(), b.advantages.tolist()
    start, rows = 0, []
    for length in b.lengths.tolist():
        rows.append([t for t in range(start, start + length) if mask[t]])
        start += length
    groups: dict[int, list[int]] = {}
    for row, group in zip(rows, b.groups.tolist(), strict=True):
        groups.setdefault(group, []).extend(row)
    tokens = sum(map(len, rows))
    total = 0.0
    for row, group in zip(rows, b.groups.tolist(), strict=True):
        for t in row:
            factor = 1.0
            for c in loss.corrections:
                if isinstance(c, RatioCorrection):
                    top = now if loss.proximal == "behaviour" else prox
                    logs = [top[u] - mu[u] for u in row]
                    log = {"token": top[t] - mu[t], "sequence": sum(logs), "geometric": sum(logs) / len(row)}[c.level]
                    rho = math.exp(log)
                    if c.outside == "truncate":
                        factor *= min(max(rho, c.low), c.high)
                    else:
                        factor *= (rho if c.weigh else 1.0) if c.low <= rho <= c.high else 0.0
                else:
                    kl = sum(mu[u] - now[u] for u in row) / len(row)
                    factor *= float(adv[t] >= 0 or kl <= c.max_kl)  # type: ignore[attr-defined]
            d = ref[t] - now[t]
            k = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[loss.kl]
            a = adv[t] - (loss.kl_coef * k if loss.kl_place == "reward" else 0.0)
            r = math.exp(now[t] - prox[t])
            if loss.ratio == "sequence":
                r = math.exp(sum(now[u] - prox[u] for u in row) / len(row))
            low = 0.0 if loss.clip_low is None else 1 - loss.clip_low
            high = math.inf if loss.clip_high is None else 1 + loss.clip_high
            clipped = min(max(r, low), high)
            used = r if loss.clip_dual is None else min(r, loss.clip_dual)
            term = -factor * min(used * a, clipped * a)
            if loss.kl_place == "loss":
                term += loss.kl_coef * k * (r * factor if loss.kl_weighted else 1.0)
            total += (
                term
                / {
                    "token_mean": tokens,
                    "sequence_mean": len(rows) * len(row),
                    "sequence_sum": len(rows),
                    "fixed_length": len(rows) * (loss.fixed_length or 0),
                    "group_mean": len(groups) * len(groups[group]),
                }[loss.aggregation]
            )
    return total


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_against_arithmetic_written_out(loss: PolicyLoss, seed: int) -> None:
    batch = random_batch(seed)
    assert loss(batch).loss.item() == pytest.approx(reference(loss, batch), rel=0, abs=1e-12)


@every_loss
@pytest.mark.parametrize("seed", range(2))
def test_gradients_by_gradcheck(loss: PolicyLoss, seed: int) -> None:
    """Where gradients stop on purpose (proximal "now", corrections, k in the reward), the quantity is held at its
    value: a finite difference would move it too."""
    batch = random_batch(seed)
    frozen = loss
    if loss.proximal == "now":
        batch = batch.replace(proximal_logprobs=batch.need("logprobs").detach().clone())
        frozen = PolicyLoss(**{f: getattr(loss, f) for f in PolicyLoss.__dataclass_fields__} | {"proximal": "recorded"})
    fixed = frozen.factors(batch)
    advantages = batch.advantages
    if loss.kl_coef and loss.kl_place == "reward":
        k = kl_estimate(batch.need("logprobs").detach(), batch.need("ref_logprobs"), loss.kl)
        advantages = advantages - loss.kl_coef * k
        frozen = PolicyLoss(**{f: getattr(frozen, f) for f in PolicyLoss.__dataclass_fields__} | {"kl_coef": 0.0})
    held = PolicyLoss(
        **{f: getattr(frozen, f) for f in PolicyLoss.__dataclass_fields__} | {"corrections": (Held(fixed),)}
    )
    held_batch = batch.replace(advantages=advantages)

    def f(logprobs: torch.Tensor) -> torch.Tensor:
        return held(held_batch.replace(logprobs=logprobs)).loss

    assert torch.autograd.gradcheck(f, (batch.need("logprobs"),), eps=1e-7, atol=1e-8)
    # And what is held there is what the loss itself has as its gradient.
    torch.testing.assert_close(
        grad(loss(batch).loss, batch), grad(f(batch.need("logprobs")), batch), rtol=0, atol=1e-14
    )


class Held:
    """Factors that stay what they are."""

    weighs = False

    def __init__(self, factors: torch.Tensor) -> None:
        self.factors = factors

    def __call__(self, batch: TrainBatch, proximal: torch.Tensor) -> torch.Tensor:
        return self.factors


def test_a_hand_computed_grpo_step() -> None:
    """Two responses of 2 and 1 tokens, ratios 1.5, 1, 0.5; advantages 1 and -2. Clip at 0.8 and 1.2:
    (-(1.2 + 1) / 2 + 2 * 0.8) / 2 = 0.25; the gradient of -r A / (S n_s) at the one token that is not clipped."""
    batch = TrainBatch.from_padded(
        mask=torch.tensor([[1, 1], [1, 0]]),
        advantages=torch.tensor([1.0, -2.0], dtype=torch.float64),
        rollout_logprobs=torch.zeros(2, 2, dtype=torch.float64),
        logprobs=torch.tensor([[1.5, 1.0], [0.5, 9.0]], dtype=torch.float64).log().requires_grad_(),
    )
    result = grpo()(batch)
    assert result.loss.item() == pytest.approx(0.25, abs=1e-15)
    assert (int(result.tokens), int(result.clipped_low), int(result.clipped_high)) == (3, 1, 1)
    assert grad(result.loss, batch).tolist() == [0.0, -0.25, 0.0, 0.0]


# ---- what must have no influence


@every_loss
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_masked_has_no_value_and_no_gradient(loss: PolicyLoss, junk: float) -> None:
    batch = random_batch(1)
    clean = loss(batch)
    spoilt = {
        name: torch.where(batch.mask, getattr(batch, name).detach(), junk)
        for name in ("logprobs", "rollout_logprobs", "proximal_logprobs", "ref_logprobs", "advantages")
    }
    spoilt["logprobs"].requires_grad_()
    other = batch.replace(**spoilt)
    result = loss(other)
    assert torch.equal(result.loss, clean.loss)
    found = grad(result.loss, other)
    assert torch.equal(found, grad(clean.loss, batch))
    assert not found[~batch.mask].any()


@every_loss
@pytest.mark.parametrize("lengths", [(3, 2, 4), (0, 0), ()])
def test_a_mask_without_tokens_gives_zero_and_no_nan(loss: PolicyLoss, lengths: tuple[int, ...]) -> None:
    n = sum(lengths)
    batch = TrainBatch(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        mask=torch.zeros(n, dtype=torch.bool),
        advantages=torch.ones(n),
        versions=torch.zeros(n, dtype=torch.int64),
        version=0,
        groups=torch.arange(len(lengths)),
        rollout_logprobs=torch.full((n,), -1.0),
        proximal_logprobs=torch.full((n,), -1.0),
        ref_logprobs=torch.full((n,), -1.0),
        logprobs=torch.full((n,), math.nan, requires_grad=True),
    )
    result = loss(batch)
    assert result.loss.item() == 0.0
    assert torch.equal(grad(result.loss, batch), torch.zeros(n))


@every_loss
def test_a_nan_in_the_mask_shows(loss: PolicyLoss) -> None:
    batch = random_batch(0)
    logprobs = batch.need("logprobs").detach().clone()
    logprobs[batch.mask.nonzero()[-1]] = math.nan
    assert loss(batch.replace(logprobs=logprobs)).loss.isnan()


@every_loss
def test_zero_advantages_have_zero_gradient_whatever_the_ratio(loss: PolicyLoss) -> None:
    """Ratios that overflow float32 among them: 0 times infinity is not NaN here."""
    plain = PolicyLoss(**{f: getattr(loss, f) for f in PolicyLoss.__dataclass_fields__} | {"kl_coef": 0.0})
    n = 6
    batch = TrainBatch(
        lengths=torch.tensor([3, 3]),
        mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.zeros(n),
        rollout_logprobs=torch.tensor([-200.0, -1, -1, -1, -1, -200]),
        proximal_logprobs=torch.tensor([-200.0, -1, -1, -1, -1, -1]),
        versions=torch.zeros(n, dtype=torch.int64),
        version=0,
        groups=torch.tensor([0, 0]),
        logprobs=torch.tensor([-0.1, -1, -1, -1, -200, -0.1], requires_grad=True),
    )
    result = plain(batch)
    assert result.loss.item() == 0.0
    assert torch.equal(grad(result.loss, batch), torch.zeros(n))


def test_a_clipped_ratio_that_overflows_has_gradient_zero() -> None:
    """torch.min of a clipped and an infinite term would have NaN there."""
    batch = random_batch(0, lengths=(2,), mask=torch.tensor([True, True])).replace(
        rollout_logprobs=torch.tensor([-200.0, -1.0]),
        logprobs=torch.tensor([-0.1, -1.0], requires_grad=True),
        advantages=torch.tensor([2.0, 2.0]),
        proximal_logprobs=None,
        ref_logprobs=None,
    )
    result = grpo()(batch)
    assert result.loss.item() == pytest.approx(-(1.2 * 2 + 2) / 2, rel=1e-6)
    assert grad(result.loss, batch).tolist() == pytest.approx([0.0, -1.0])
    negative = batch.replace(advantages=torch.tensor([-2.0, -2.0]))
    assert grpo()(negative).loss.isinf()  # an overflow shows
    assert grad(grpo(clip_dual=10.0)(negative).loss, negative).tolist() == pytest.approx([0.0, 1.0])
    masked = grpo(corrections=icepop_mask_only())(negative)
    assert int(masked.dropped) == 1
    assert grad(masked.loss, negative).tolist() == pytest.approx([0.0, 1.0])


def icepop_mask_only() -> tuple[RatioCorrection, ...]:
    return (RatioCorrection(low=0.5, high=5.0, outside="mask", weigh=False),)


# ---- aggregation, micro-batches


def test_token_weights_by_hand() -> None:
    """Tokens in the mask: 2 of 3, 0 of 2 (nobody), 1 of 1, 3 of 3; groups 0 0 1 1."""
    batch = random_batch(0, lengths=(3, 2, 1, 3), mask=torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool))
    a = {
        "token_mean": [1 / 6, 1 / 6, 0, 0, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6],
        "sequence_mean": [1 / 6, 1 / 6, 0, 0, 0, 1 / 3, 1 / 9, 1 / 9, 1 / 9],
        "sequence_sum": [1 / 3, 1 / 3, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3],
        "fixed_length": [1 / 30, 1 / 30, 0, 0, 0, 1 / 30, 1 / 30, 1 / 30, 1 / 30],
        "group_mean": [1 / 4, 1 / 4, 0, 0, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8],
    }
    for name, expected in a.items():
        found = token_weights(batch, name, 10 if name == "fixed_length" else None)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(expected, abs=1e-15), name
        if name != "sequence_sum" and name != "fixed_length":
            assert found.sum().item() == pytest.approx(1.0)


@every_loss
@pytest.mark.parametrize("max_tokens", [1, 8, 12, 100])
def test_micro_batches_add_up_to_the_batch(loss: PolicyLoss, max_tokens: int) -> None:
    batch = random_batch(2, lengths=(5, 3, 7, 4, 1, 6))
    mask = batch.mask.clone()
    mask[5:8] = False  # the second sequence needs no pass
    batch = loss.weigh(batch.replace(mask=mask))
    parts = list(batch.split(max_tokens))
    assert sum(map(len, parts)) == 5
    assert all(len(p) == 1 or int(p.lengths.sum()) <= max_tokens for p in parts)
    whole, results = loss(batch), [loss(part) for part in parts]
    total = results[0]
    for result in results[1:]:
        total = total + result
    for name in ("loss", "policy_loss", "kl"):
        torch.testing.assert_close(getattr(total, name), getattr(whole, name), rtol=0, atol=1e-14)
    for name in ("tokens", "clipped_low", "clipped_high", "dropped"):
        assert int(getattr(total, name)) == int(getattr(whole, name)), name
    torch.testing.assert_close(grad(total.loss, batch), grad(whole.loss, batch), rtol=0, atol=1e-15)


def test_splitting_needs_weights() -> None:
    with pytest.raises(ValueError, match="weights"):
        list(random_batch().split(10))


# ---- KL: the gradient that each estimator has in expectation, by enumeration


@pytest.mark.parametrize(
    ("kl", "settings", "of"),
    [
        ("k1", {}, "reverse"),
        ("k2", {}, "reverse"),
        ("k3", {}, "forward"),
        ("k3", {"kl_weighted": True}, "reverse"),
    ],
)
def test_gradients_of_kl_penalties_in_expectation(kl: str, settings: dict[str, Any], of: str) -> None:
    """One token of 5 kinds, sampled from the policy: the expected gradient is that of KL(pi || ref) or KL(ref || pi).
    (k1 differentiated in the loss would be 0 here, whatever the policies.)"""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    logp = logits.log_softmax(0)
    batch = TrainBatch.from_padded(
        mask=torch.ones(5, 1),
        advantages=torch.zeros(5, dtype=torch.float64),
        logprobs=logp[:, None],
        ref_logprobs=ref[:, None],
        weights=logp.detach().exp()[:, None],
    )
    (found,) = torch.autograd.grad(grpo(kl_coef=1.0, kl=kl, **settings)(batch).loss, [logits])
    log = logits.log_softmax(0)
    exact = (log.exp() * (log - ref)).sum() if of == "reverse" else (ref.exp() * (ref - log)).sum()
    torch.testing.assert_close(found, torch.autograd.grad(exact, [logits])[0], rtol=0, atol=1e-14)
    log = logits.log_softmax(0)
    nothing = (log.detach().exp() * kl_estimate(log, ref, "k1")).sum()
    assert torch.autograd.grad(nothing, [logits])[0].abs().max() < 1e-15


# ---- settings


def test_names() -> None:
    assert policy_loss("dapo", clip_high=0.3) == dapo(clip_high=0.3)
    assert set(POLICY_LOSSES) == {"grpo", "dr_grpo", "dapo", "gspo", "decoupled_ppo"}
    assert dr_grpo(fixed_length=8).advantage == "mean"
    assert (dapo().clip_low, dapo().clip_high, dapo().aggregation) == (0.2, 0.28, "token_mean")
    assert (gspo().ratio, gspo().clip_low, gspo().clip_high) == ("sequence", 3e-4, 4e-4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ratio": "word"}, "ratio 'word'"),
        ({"aggregation": "mean"}, "aggregation 'mean'"),
        ({"aggregation": "fixed_length"}, "fixed_length is None"),
        ({"fixed_length": 5}, "fixed_length is 5"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"clip_high": math.nan}, "clip_high"),
        ({"clip_dual": 1.1}, "clip_dual"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"kl_coef": math.nan}, "kl_coef"),
        ({"kl": "k4"}, "kl 'k4'"),
        ({"kl": "k1", "kl_in": "loss"}, "expectation 0"),
        ({"kl": "k1", "kl_weighted": True}, "kl_weighted"),
        ({"corrections": tis()}, "proximal"),
        ({"corrections": "tis"}, "corrections must be a tuple"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grpo(**settings)


def test_unknown_names_and_missing_fields() -> None:
    with pytest.raises(ValueError, match="loss 'ppo' is unknown; there are grpo"):
        policy_loss("ppo")
    with pytest.raises(ValueError, match=r"dr_grpo.*fixed_length"):
        policy_loss("dr_grpo")
    with pytest.raises(ValueError, match=r"grpo.*epsilon"):
        policy_loss("grpo", epsilon=0.2)
    batch = random_batch()
    for loss, field in (
        (grpo(), "logprobs"),
        (grpo(kl_coef=0.1), "ref_logprobs"),
        (decoupled_ppo(), "proximal_logprobs"),
    ):
        with pytest.raises(ValueError, match=f"^{field}"):
            loss(batch.replace(**{field: None}))
