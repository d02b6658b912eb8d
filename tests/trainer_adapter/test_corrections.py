"""Off-policy corrections: factors by hand, expected gradients by enumeration, and diagnostics."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import grad, random_batch

from longtail.trainer_adapter.batch import TrainBatch
from longtail.trainer_adapter.corrections import (
    CORRECTIONS,
    Correction,
    DivergentSequenceMask,
    RatioCorrection,
    correction,
    decoupled,
    icepop,
    importance,
    sequence_mask,
    tis,
)
from longtail.trainer_adapter.diagnostics import QUANTILES, Diagnostics, diagnose
from longtail.trainer_adapter.losses import decoupled_ppo, grpo


def ratio_batch(ratios: list[list[float]], advantages: list[float] | None = None) -> TrainBatch:
    """Sequences whose tokens have these ratios of the policy now to the behaviour policy; nan: masked."""
    rows = [torch.tensor(row, dtype=torch.float64) for row in ratios]
    flat = torch.cat(rows)
    mu = -torch.arange(1.0, len(flat) + 1, dtype=torch.float64)
    given = torch.tensor(advantages or [1.0] * len(rows), dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in rows])
    return TrainBatch(
        lengths=lengths,
        mask=~flat.isnan(),
        advantages=given.repeat_interleave(lengths),
        rollout_logprobs=mu,
        logprobs=(mu + flat.log()).requires_grad_(),
        versions=torch.zeros(len(flat), dtype=torch.int64),
        version=0,
        groups=torch.zeros(len(rows), dtype=torch.int64),
    )


NAN = math.nan
BY_HAND: list[tuple[str, dict[str, Any], list[float]]] = [
    # ratios 0.25 2 8 (product 4, geometric mean 4^(1/3)) | 1 masked 0.5 (product 0.5, mean 0.5^(1/2))
    ("none", {}, [1, 1, 1, 1, 1, 1]),
    ("importance", {}, [0.25, 2, 8, 1, 1, 0.5]),
    ("tis", {}, [0.25, 2, 2, 1, 1, 0.5]),
    ("tis", {"cap": 4.0}, [0.25, 2, 4, 1, 1, 0.5]),
    ("tis", {"cap": 3.0, "level": "sequence"}, [3, 3, 3, 0.5, 1, 0.5]),
    ("tis", {"level": "geometric"}, [4 ** (1 / 3)] * 3 + [0.5**0.5, 1, 0.5**0.5]),
    ("icepop", {"low": 0.49}, [0, 2, 0, 1, 1, 0.5]),
    ("icepop", {"low": 0.6, "high": 9.0}, [0, 2, 8, 1, 1, 0]),
    ("sequence_mask", {}, [0, 0, 0, 0.5, 1, 0.5]),
    ("sequence_mask", {"low": 0.6, "high": 5.0}, [4, 4, 4, 0, 1, 0]),
    ("sequence_mask", {"low": 0.6, "high": 5.0, "weigh": False}, [1, 1, 1, 0, 1, 0]),
    ("sequence_mask", {"high": 1.5, "level": "geometric", "weigh": False}, [0, 0, 0, 1, 1, 1]),
    ("decoupled", {}, [0.25, 2, 8, 1, 1, 0.5]),
    ("decoupled", {"cap": 5.0}, [0.25, 2, 0, 1, 1, 0.5]),
]


@pytest.mark.parametrize(("name", "settings", "expected"), BY_HAND)
def test_factors_by_hand(name: str, settings: dict[str, Any], expected: list[float]) -> None:
    batch = ratio_batch([[0.25, 2, 8], [1, NAN, 0.5]])
    factors = grpo(proximal="now", corrections=correction(name, **settings)).factors(batch)
    assert not factors.requires_grad
    assert factors.tolist() == pytest.approx(expected, rel=1e-14)
    result = grpo(proximal="now", corrections=correction(name, **settings))(batch)
    assert int(result.dropped) == sum(f == 0 for f in expected)


def test_divergent_sequences_by_hand() -> None:
    """Mean of log mu - log pi: log 2, -log 2, log 2. Only a diverged sequence of negative advantage is dropped."""
    batch = ratio_batch([[0.25, 1.0], [2.0, 2.0], [0.5, NAN]], advantages=[-1.0, -1.0, 1.0])
    for max_kl, expected in ((0.69, [0, 0, 1, 1, 1, 1]), (0.70, [1] * 6)):
        loss = grpo(proximal="now", corrections=correction("divergent_sequence_mask", max_kl=max_kl))
        assert loss.factors(batch).tolist() == expected


def test_factors_multiply() -> None:
    batch = ratio_batch([[0.25, 2, 8], [1, NAN, 0.5]])
    both = tis(4.0) + sequence_mask(high=3.0, weigh=False)
    found = grpo(proximal="now", corrections=both).factors(batch)
    assert found.tolist() == pytest.approx([0, 0, 0, 1, 1, 0.5])


def test_ratios_come_from_log_probabilities_and_never_from_version_tags() -> None:
    batch = random_batch(0)
    other = batch.replace(versions=torch.full_like(batch.versions, batch.version))
    for name in ("importance", "tis", "icepop", "sequence_mask", "decoupled"):
        loss = grpo(proximal="recorded", corrections=correction(name))
        assert torch.equal(loss.factors(batch), loss.factors(other))
        assert torch.equal(loss(batch).loss, loss(other).loss)


def test_an_infinite_ratio_is_masked_and_a_nan_is_not_hidden() -> None:
    batch = ratio_batch([[1.0, 1.0, 1.0]])
    logprobs = batch.rollout_logprobs + torch.tensor([0.0, 1000.0, 0.0], dtype=torch.float64)
    wild = batch.replace(logprobs=logprobs.requires_grad_())
    result = grpo(proximal="now", corrections=icepop())(wild)
    assert result.loss.isfinite() and grad(result.loss, wild).isfinite().all()
    assert int(result.dropped) == 1
    spoilt = batch.replace(logprobs=torch.tensor([0.0, NAN, 0.0], dtype=torch.float64))
    every: list[tuple[Correction, ...]] = [
        icepop(),
        tis(),
        sequence_mask(weigh=False),
        (DivergentSequenceMask(max_kl=0.1),),
    ]
    for corrections in every:
        assert grpo(proximal="now", corrections=corrections)(spoilt).loss.isnan()
        unknown = batch.replace(
            rollout_logprobs=torch.tensor([0.0, NAN, 0.0], dtype=torch.float64),
            proximal_logprobs=batch.need("logprobs").detach(),
            advantages=-batch.advantages,
        )
        assert grpo(proximal="recorded", corrections=corrections)(unknown).loss.isnan()


# ---- gradients in expectation, by enumeration of one token of 5 kinds


def enumerated(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TrainBatch]:
    """-> logits of pi (a leaf), mu, rewards, and a batch in which each kind counts mu of it."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, 5, dtype=torch.float64, generator=generator).unbind()
    logits = logits.clone().requires_grad_()
    mu = other.softmax(0)
    rewards = torch.randn(5, dtype=torch.float64, generator=generator)
    batch = TrainBatch.from_padded(
        mask=torch.ones(5, 1),
        advantages=rewards,
        rollout_logprobs=mu.log()[:, None],
        logprobs=logits.log_softmax(0)[:, None],
        weights=mu[:, None],
    )
    return logits, mu, rewards, batch


@pytest.mark.parametrize(
    "loss",
    [
        grpo(proximal="now", corrections=importance()),
        grpo(proximal="behaviour", clip_low=None, clip_high=None),
        grpo(proximal="recorded", corrections=decoupled(), clip_low=None, clip_high=None),
        decoupled_ppo(clip_low=None, clip_high=None),
    ],
    ids=["importance", "ratio to behaviour", "recorded", "decoupled"],
)
def test_unbounded_corrections_have_the_policy_gradient(loss: Any) -> None:
    """E_mu of the corrected gradient is that of E_pi[reward], exactly; without correction it is not."""
    logits, _, rewards, batch = enumerated()
    proximal = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).log_softmax(0)
    batch = batch.replace(proximal_logprobs=proximal)
    (found,) = torch.autograd.grad(loss(batch).loss, [logits], retain_graph=True)
    (exact,) = torch.autograd.grad(-(logits.softmax(0) * rewards).sum(), [logits])
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-14)
    (naive,) = torch.autograd.grad(grpo(proximal="now")(batch).loss, [logits])
    assert (naive - exact).abs().max() > 0.1


@pytest.mark.parametrize(
    ("corrections", "factor"),
    [
        (tis(1.5), lambda rho: rho.clamp(max=1.5)),
        (icepop(0.5, 1.5), lambda rho: torch.where((rho >= 0.5) & (rho <= 1.5), rho, 0.0)),
        (sequence_mask(0.5, 1.5, weigh=False), lambda rho: ((rho >= 0.5) & (rho <= 1.5)).double()),
    ],
)
def test_bounded_corrections_have_the_bias_of_their_bounds(corrections: Any, factor: Any) -> None:
    logits, mu, rewards, batch = enumerated(1)
    rho = logits.detach().softmax(0) / mu
    assert rho.min() < 0.5 and rho.max() > 1.5
    (found,) = torch.autograd.grad(grpo(proximal="now", corrections=corrections)(batch).loss, [logits])
    surrogate = -(mu * factor(rho) * rewards * logits.log_softmax(0)).sum()
    torch.testing.assert_close(found, torch.autograd.grad(surrogate, [logits])[0], rtol=0, atol=1e-14)


def test_two_tokens_need_the_ratio_of_the_sequence() -> None:
    """All 9 responses of 2 tokens of 3 kinds, reward of the pair. The first token is of an older version, the second
    one is of the policy itself: each sequence then counts with the first ratio. Weighted token by token, the second
    token's gradient lacks it, and the gradient is not that of E_pi[reward]."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True)
    second = torch.randn(3, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    mu = torch.randn(3, dtype=torch.float64, generator=generator).log_softmax(0)
    rewards = torch.randn(9, dtype=torch.float64, generator=generator)
    a, b = torch.arange(9) // 3, torch.arange(9) % 3
    p, q = first.log_softmax(0), second.log_softmax(1)
    counted = (mu[a] + q.detach()[a, b]).exp()
    batch = TrainBatch.from_padded(
        mask=torch.ones(9, 2),
        advantages=rewards,
        logprobs=torch.stack([p[a], q[a, b]], 1),
        rollout_logprobs=torch.stack([mu[a], q.detach()[a, b]], 1),
        versions=torch.tensor([[3, 4]] * 9),
        version=4,
        weights=counted[:, None].expand(9, 2),
    )
    exact = torch.autograd.grad(-((p[a] + q[a, b]).exp() * rewards).sum(), [first, second], retain_graph=True)

    def of(level: Any) -> tuple[torch.Tensor, ...]:
        loss = grpo(proximal="now", corrections=(RatioCorrection(level=level),))(batch).loss
        return torch.autograd.grad(loss, [first, second], retain_graph=True)

    for found, expected in zip(of("sequence"), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    by_token = of("token")
    torch.testing.assert_close(by_token[0], exact[0], rtol=0, atol=1e-14)
    assert (by_token[1] - exact[1]).abs().max() > 0.05


def test_decoupled_ppo_with_the_behaviour_policy_as_its_proximal_is_ppo() -> None:
    batch = random_batch(0)
    same = batch.replace(proximal_logprobs=batch.rollout_logprobs)
    torch.testing.assert_close(
        decoupled_ppo()(same).loss, grpo(aggregation="token_mean")(batch).loss, rtol=0, atol=1e-15
    )


# ---- settings


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"level": "word"}, "level 'word'"),
        ({"outside": "drop"}, "outside 'drop'"),
        ({"low": 2.0, "high": 1.0}, "low 2.0 and high 1.0"),
        ({"low": -1.0}, "low -1.0"),
        ({"high": math.nan}, "high nan"),
        ({"weigh": False}, "changes nothing"),
        ({"weigh": False, "outside": "mask"}, "give bounds"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RatioCorrection(**settings)


def test_names() -> None:
    assert correction("none") == ()
    assert correction("icepop") == (RatioCorrection(low=0.5, high=5.0, outside="mask"),)
    assert all(callable(f) for f in CORRECTIONS.values())
    with pytest.raises(ValueError, match="correction 'vtrace' is unknown; there are none, importance"):
        correction("vtrace")
    with pytest.raises(ValueError, match=r"'tis'.*bound"):
        correction("tis", bound=2)
    with pytest.raises(ValueError, match="max_kl"):
        correction("divergent_sequence_mask", max_kl=-0.1)


# ---- diagnostics


def staged() -> TrainBatch:
    """Staleness 0 0 1 | observation, 1, 3; the token of staleness 3 is masked. Ratios 1 2 4 | -, 1/2, -."""
    batch = ratio_batch([[1.0, 2.0, 4.0], [NAN, 0.5, NAN]])
    return batch.replace(versions=torch.tensor([9, 9, 8, -1, 8, 6]), version=9)


def test_diagnostics_by_hand() -> None:
    found = diagnose(staged(), torch.tensor([1.0, 1, 0, 1, 1, 1]))
    o, log2 = found.overall, math.log(2)
    assert (o.tokens, o.trained, o.dropped) == (5, 4, 1)
    assert o.share_masked == pytest.approx(2 / 5)
    assert o.max_difference == pytest.approx(2 * log2)
    assert o.kl == pytest.approx(-(0 + 1 + 2 - 1) / 4 * log2)
    assert o.kl_k3 == pytest.approx((0 + (1 - log2) + (3 - 2 * log2) + (-0.5 + log2)) / 4)
    assert o.mean_ratio == pytest.approx(7.5 / 4)
    assert o.effective_sample_size == pytest.approx(7.5**2 / (4 * (1 + 4 + 16 + 0.25)))
    expected = torch.quantile(torch.tensor([1.0, 2, 4, 0.5]).double(), torch.tensor(QUANTILES).double())
    assert o.ratio_quantiles == pytest.approx(expected.tolist())
    by = found.by_staleness
    assert list(by) == [0, 1, 3]
    assert [(m.tokens, m.trained, m.dropped) for m in by.values()] == [(2, 2, 0), (2, 2, 1), (1, 0, 0)]
    assert by[0].kl == pytest.approx(-log2 / 2)
    assert by[1].kl == pytest.approx(-(2 - 1) / 2 * log2)
    assert by[3].kl is None and by[3].share_masked == 1.0
    line = json.loads(json.dumps(by[3].as_dict() | {"all": o.as_dict()}))
    assert line["ratio_q0.5"] is None and line["all"]["ratio_q1"] == pytest.approx(4.0)


def test_without_mismatch_every_difference_is_exactly_zero() -> None:
    batch = random_batch(0)
    o = diagnose(batch.replace(logprobs=batch.rollout_logprobs)).overall
    assert (o.max_difference, o.kl, o.kl_k3, o.mean_ratio, o.effective_sample_size) == (0.0, 0.0, 0.0, 1.0, 1.0)


def test_both_estimators_are_kl_of_rollout_to_trainer() -> None:
    """A population in which each of 4 kinds stands as often as mu says: the means are then the expectation."""
    mu, pi = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    kinds = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    batch = ratio_batch([(pi / mu)[kinds].tolist()])
    exact = float((mu * (mu / pi).log()).sum())
    o = diagnose(batch).overall
    assert o.kl == pytest.approx(exact, rel=1e-12)
    assert o.kl_k3 == pytest.approx(exact, rel=1e-12)
    assert o.mean_ratio == pytest.approx(1.0, rel=1e-12)


def test_diagnostics_overflow_and_nan_show() -> None:
    def of(d: list[float]) -> Diagnostics:
        batch = ratio_batch([[1.0] * len(d)])
        return diagnose(batch.replace(logprobs=batch.rollout_logprobs + torch.tensor(d, dtype=torch.float64)))

    huge = of([0.0, 1000.0]).overall
    assert huge.effective_sample_size == pytest.approx(0.5)
    assert huge.mean_ratio == math.inf
    bad = of([0.0, NAN]).overall
    assert all(math.isnan(x) for x in (bad.kl or 0, bad.max_difference or 0, *(bad.ratio_quantiles or ())))


def test_proximal_and_empty() -> None:
    batch = random_batch(0)
    assert diagnose(batch, of="proximal_logprobs").overall.kl != diagnose(batch).overall.kl
    empty = diagnose(batch.replace(mask=torch.zeros_like(batch.mask))).overall
    assert (empty.trained, empty.kl, empty.share_masked) == (0, None, 1.0)
    with pytest.raises(ValueError, match="logprobs"):
        diagnose(batch.replace(logprobs=None))


def test_staleness_counts_add_up() -> None:
    found = diagnose(random_batch(4))
    for name in ("tokens", "trained", "dropped"):
        assert sum(getattr(m, name) for m in found.by_staleness.values()) == getattr(found.overall, name)
