"""DPO against arithmetic written out, gradients by gradcheck, pairs that count for nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import grad

from longtail.trainer_adapter.dpo import DPOResult, PreferenceBatch, dpo_loss

KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid smoothed": {"label_smoothing": 0.1},
    "sigmoid normalised": {"length_normalized": True, "beta": 2.0},
    "ipo": {"kind": "ipo"},
    "ipo summed": {"kind": "ipo", "length_normalized": False},
}
every_kind = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())


def pairs(seed: int = 0, lengths: tuple[int, ...] = (3, 5, 4, 4, 1, 6)) -> PreferenceBatch:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    mask = torch.rand(n, generator=generator) < 0.75
    mask[torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
    ref = -torch.rand(n, generator=generator, dtype=torch.float64) - 0.1
    now = ref + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    return PreferenceBatch(lengths=torch.tensor(lengths), mask=mask, logprobs=now.requires_grad_(), ref_logprobs=ref)


def reference(b: PreferenceBatch, **settings: Any) -> dict[str, float]:
    beta, kind = settings.get("beta", 0.1), settings.get("kind", "sigmoid")
    smoothing, normalized = settings.get("label_smoothing", 0.0), settings.get("length_normalized", kind == "ipo")
    assert b.logprobs is not None and b.ref_logprobs is not None
    x = (b.logprobs - b.ref_logprobs).tolist()
    start, scores, logprobs = 0, [], []
    for length in b.lengths.tolist():
        own = [x[t] for t in range(start, start + length) if b.mask[t]]
        scores.append(sum(own) / len(own) if normalized else sum(own))
        logprobs.append(sum(b.logprobs[t].item() for t in range(start, start + length) if b.mask[t]))
        start += length
    names = ("loss", "chosen_reward", "rejected_reward", "correct", "chosen_logprob", "rejected_logprob")
    found = dict.fromkeys(names, 0.0)
    count = len(scores) // 2
    for chosen, rejected in zip(scores[::2], scores[1::2], strict=True):
        delta = chosen - rejected
        sigma = 1 / (1 + math.exp(-beta * delta))
        loss = -(1 - smoothing) * math.log(sigma) - smoothing * math.log(1 - sigma)
        found["loss"] += ((delta - 1 / (2 * beta)) ** 2 if kind == "ipo" else loss) / count
        found["chosen_reward"] += beta * chosen
        found["rejected_reward"] += beta * rejected
        found["correct"] += chosen > rejected
    found["chosen_logprob"], found["rejected_logprob"] = sum(logprobs[::2]), sum(logprobs[1::2])
    return found


@every_kind
@pytest.mark.parametrize("seed", range(3))
def test_against_arithmetic_written_out(settings: dict[str, Any], seed: int) -> None:
    batch = pairs(seed)
    result = dpo_loss(batch, **settings)
    assert int(result.pairs) == 3
    for name, value in reference(batch, **settings).items():
        assert getattr(result, name).item() == pytest.approx(value, rel=0, abs=1e-12), name


@every_kind
def test_gradients_by_gradcheck(settings: dict[str, Any]) -> None:
    batch = pairs()
    assert batch.logprobs is not None
    assert torch.autograd.gradcheck(lambda x: dpo_loss(batch.replace(logprobs=x), **settings).loss, (batch.logprobs,))


def test_a_policy_that_is_its_reference_has_loss_log_2() -> None:
    batch = pairs()
    assert dpo_loss(batch.replace(logprobs=batch.ref_logprobs)).loss.item() == pytest.approx(math.log(2), abs=1e-15)


@every_kind
def test_pairs_without_a_token_count_for_nothing(settings: dict[str, Any]) -> None:
    """The second pair's rejected response is masked wholly, with NaN in it: the mean is that of the other two."""
    batch = pairs()
    assert batch.logprobs is not None and batch.ref_logprobs is not None
    gone = torch.zeros(23, dtype=torch.bool)
    gone[12:16] = True
    logprobs = torch.where(gone, math.nan, batch.logprobs.detach()).requires_grad_()
    partly = batch.replace(mask=batch.mask & ~gone, logprobs=logprobs)
    keep = torch.ones(23, dtype=torch.bool)
    keep[8:16] = False
    without = PreferenceBatch(
        lengths=batch.lengths[[0, 1, 4, 5]],
        mask=batch.mask[keep],
        logprobs=batch.logprobs.detach()[keep].requires_grad_(),
        ref_logprobs=batch.ref_logprobs[keep],
    )
    result, expected = dpo_loss(partly, **settings), dpo_loss(without, **settings)
    assert int(result.pairs) == 2
    assert torch.equal(result.loss, expected.loss)
    given = partly.replace(weights=torch.full((3,), 0.5, dtype=torch.float64))
    assert torch.equal(dpo_loss(given, **settings).loss, expected.loss)  # also where a weight was given to it
    found = grad(result.loss, partly)
    assert torch.equal(found[keep], grad(expected.loss, without))
    assert not found[~keep].any()


@every_kind
@pytest.mark.parametrize("lengths", [(2, 3), (0, 0), ()])
def test_a_mask_without_tokens_gives_zero_and_no_nan(settings: dict[str, Any], lengths: tuple[int, ...]) -> None:
    n = sum(lengths)
    batch = PreferenceBatch(
        lengths=torch.tensor(lengths, dtype=torch.int64),
        mask=torch.zeros(n, dtype=torch.bool),
        logprobs=torch.full((n,), math.nan, requires_grad=True),
        ref_logprobs=torch.full((n,), math.nan),
    )
    result = dpo_loss(batch, **settings)
    assert result.loss.item() == 0.0
    assert torch.equal(grad(result.loss, batch), torch.zeros(n))


@every_kind
def test_micro_batches_add_up(settings: dict[str, Any]) -> None:
    batch = pairs()
    assert batch.logprobs is not None and batch.ref_logprobs is not None
    weights = batch.pair_weights()
    total: DPOResult | None = None
    start = 0
    for i in range(3):
        lengths = batch.lengths[2 * i : 2 * i + 2]
        part = slice(start, start := start + int(lengths.sum()))
        result = dpo_loss(
            PreferenceBatch(
                lengths=lengths,
                mask=batch.mask[part],
                logprobs=batch.logprobs[part],
                ref_logprobs=batch.ref_logprobs[part],
                weights=weights[i : i + 1],
            ),
            **settings,
        )
        total = result if total is None else total + result
    assert total is not None
    whole = dpo_loss(batch, **settings)
    torch.testing.assert_close(total.loss, whole.loss, rtol=0, atol=1e-13)
    assert (int(total.pairs), int(total.correct)) == (3, int(whole.correct))
    torch.testing.assert_close(grad(total.loss, batch), grad(whole.loss, batch), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "hinge"}, "kind 'hinge'"),
        ({"beta": 0.0}, "beta"),
        ({"beta": math.nan}, "beta"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, "label_smoothing"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dpo_loss(pairs(), **settings)


def test_bad_batches() -> None:
    batch = pairs()
    for name in ("logprobs", "ref_logprobs"):
        with pytest.raises(ValueError, match=f"^{name}"):
            dpo_loss(batch.replace(**{name: None}))
    with pytest.raises(ValueError, match="lengths has 3"):
        PreferenceBatch(lengths=torch.tensor([1, 1, 1]), mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has shape \[?\(?4"):
        PreferenceBatch(lengths=torch.tensor([1, 1]), mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask is torch\.float32"):
        PreferenceBatch(lengths=torch.tensor([1, 1]), mask=torch.ones(2))
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        batch.replace(ref_logprobs=torch.zeros(2))
