"""The trainer: one update of a batch, whatever its micro-batches; what says nothing changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import make_sample
from tests.trainer_adapter.test_policy import make_model

from longtail.sample import Group
from longtail.sampling_params import SamplingParams
from longtail.trainer_adapter.batch import Inputs
from longtail.trainer_adapter.corrections import tis
from longtail.trainer_adapter.losses import PolicyLoss, dapo, decoupled_ppo, grpo, gspo
from longtail.trainer_adapter.packing import pack
from longtail.trainer_adapter.policy import TransformersPolicy
from longtail.trainer_adapter.trainer import TrainConfig, Trainer
from longtail.trainer_adapter.updates import TrainingDiverged

VERSION = 5


def make_groups(
    rewards: Sequence[Sequence[float | None]] = ((1.0, 0.0, 0.5), (0.0, 1.0), (0.25, 0.75, 1.0, 0.0)), **fields: Any
) -> list[Group]:
    """Tokens of versions 3 to 5, lengths from 2 to 9, log-probabilities near those of a uniform distribution."""
    groups, n = [], 0
    for g, own in enumerate(rewards):
        samples = []
        for i, reward in enumerate(own):
            length = 2 + (5 * g + 3 * i) % 8
            n += 1
            samples.append(
                make_sample(
                    f"g{g}",
                    i,
                    sorted(3 + (n + k) % 3 for k in range(length)),
                    reward,
                    tokens=[(7 * n + 3 * k) % 61 for k in range(length)],
                    logprobs=[-4.0 - 0.3 * math.sin(n + k) for k in range(length)],
                    **fields,
                )
            )
        groups.append(Group(f"g{g}", samples))
    return groups


def make_trainer(loss: PolicyLoss | None = None, dtype: torch.dtype = torch.float32, **settings: Any) -> Trainer:
    policy = TransformersPolicy(make_model(dtype=dtype))
    reference = TransformersPolicy(make_model(seed=3, dtype=dtype))
    loss = loss or dapo(corrections=tis(), proximal="recorded")
    return Trainer(policy, loss, config=TrainConfig(**({"learning_rate": 1e-2} | settings)), reference=reference)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


LOSSES = {
    "grpo": grpo(),
    "grpo, KL": grpo(kl_coef=0.1),
    "dapo, tis": dapo(corrections=tis(), proximal="recorded"),
    "gspo": gspo(clip_low=0.5, clip_high=0.5),
    "decoupled": decoupled_ppo(cap=5.0),
}


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_micro_batches_add_up(loss: PolicyLoss, updates: int) -> None:
    """float64, and SGD, which does not hide a scale: losses, norms and weights of any split within 1e-9."""
    results, states = [], []
    for tokens in (1, 23, 10_000):
        trainer = make_trainer(loss, torch.float64, micro_batch_tokens=tokens, updates=updates)
        trainer = Trainer(
            trainer.policy,
            loss,
            torch.optim.SGD(trainer.policy.parameters(), lr=0.5),
            config=trainer.config,
            reference=trainer.reference,
        )
        results.append(trainer.step(make_groups(), VERSION))
        states.append(weights(trainer))
    first = results[0]
    assert len(first.losses) == updates and first.updated == updates
    for result, state in zip(results[1:], states[1:], strict=True):
        assert result.losses == pytest.approx(first.losses, rel=1e-9, abs=1e-12)
        assert result.grad_norms == pytest.approx(first.grad_norms, rel=1e-9)
        assert result.as_dict()["diagnostics"] == pytest.approx(first.as_dict()["diagnostics"], rel=1e-9, nan_ok=True)
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, states[0][name], rtol=1e-9, atol=1e-10)


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    """Against pack, loss and backward written out."""
    trainer = make_trainer(grpo(), torch.float64, micro_batch_tokens=20, max_grad_norm=None)
    model = copy.deepcopy(trainer.policy)
    batch = pack(make_groups(), version=VERSION)
    assert batch.inputs is not None
    loss = grpo()(batch.replace(logprobs=model.logprobs(batch.inputs))).loss
    loss.backward()
    loss = loss.detach()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
    result = trainer.step(make_groups(), VERSION)
    assert result.losses[0] == pytest.approx(float(loss), rel=1e-9)
    assert result.grad_norms[0] == pytest.approx(float(norm), rel=1e-9)


def test_proximal_is_of_the_start_of_the_update() -> None:
    """With several updates, pi / pi_prox is 1 in the first and moves in the second: both the clip and the correction
    read the policy before the first."""
    seen: list[torch.Tensor] = []

    class Watched(TransformersPolicy):
        def logprobs(self, inputs: Inputs, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
            found = super().logprobs(inputs, temperature=temperature)
            seen.append(found.detach())
            return found

    loss = decoupled_ppo()
    trainer = Trainer(Watched(make_model()), loss, config=TrainConfig(learning_rate=0.05, updates=2))
    groups = make_groups([[1.0, 0.0], [0.0, 1.0, 1.0]])
    result = trainer.step(groups, VERSION)
    batch = loss.weigh(pack(groups, version=VERSION))
    assert len(seen) == 2 and not torch.equal(*seen)
    for found, logprobs in zip(result.losses, seen, strict=True):
        expected = loss(batch.replace(logprobs=logprobs, proximal_logprobs=seen[0])).loss
        assert found == pytest.approx(float(expected), rel=1e-5)


# ---- what says nothing


def after(groups: Sequence[Group], loss: PolicyLoss | None = None, **settings: Any) -> dict[str, torch.Tensor]:
    trainer = make_trainer(loss, **settings)
    trainer.step(groups, VERSION)
    return weights(trainer)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 30, 10_000])
def test_an_incomplete_group_gives_no_gradient(place: int, tokens: int) -> None:
    """And its neighbours' updates have the bits that they have without it."""
    groups = make_groups()
    other = Group("open", [make_sample("open", 0, (5, 5), 1.0), make_sample("open", 1, (5,), None, status="paused")])
    expected = after(groups, micro_batch_tokens=tokens)
    assert is_same(after([*groups[:place], other, *groups[place:]], micro_batch_tokens=tokens), expected)
    trained = after([*groups[:place], other, *groups[place:]], micro_batch_tokens=tokens, incomplete="train")
    assert not is_same(trained, expected)  # it would have had one
    trainer = make_trainer()
    result = trainer.step([other], VERSION)
    assert result.updated == 0 and result.left_out["open/0"] == "its group is not complete"


def moved(trainer: Trainer) -> Trainer:
    """With momentum, and weight decay: whatever steps now, moves."""
    trainer.step(make_groups(), VERSION)
    assert trainer.num_updates == 1
    return trainer


@pytest.mark.parametrize(
    "groups",
    [
        make_groups([[1.0, 1.0], [0.0, 0.0, 0.0], [0.1 + 0.2] * 3]),
        make_groups([[None, None]]),
        make_groups([[1.0, 0.0]], masked=2),
        [],
    ],
    ids=["zero variance", "no reward", "all masked", "none"],
)
def test_what_says_nothing_changes_nothing(groups: list[Group]) -> None:
    """Neither weights nor the optimiser's momentum; no NaN anywhere."""
    for group in groups:
        for sample in group.samples:
            if sample.masked:
                sample.masked = len(sample.output_ids)
    trainer = moved(make_trainer(weight_decay=0.1))
    before, state = weights(trainer), copy.deepcopy(trainer.optimiser.state_dict()["state"])
    result = trainer.step(groups, VERSION)
    assert result.updated == 0 and trainer.num_updates == 1 and result.learnt == 0
    assert all(norm == 0.0 for norm in result.grad_norms) and all(loss == 0.0 for loss in result.losses)
    assert is_same(weights(trainer), before)
    for index, values in trainer.optimiser.state_dict()["state"].items():
        assert is_same(values, state[index])


def test_zero_variance_is_zero_beside_others() -> None:
    """Such a group counts in the mean and has a gradient of exactly 0: whether its rewards are all 0 or all 1, the
    weights are the same, bit for bit; and they are another multiple of the others' gradient than without it."""
    groups = make_groups()
    zeros, ones = (make_groups([[r] * 3])[0] for r in (0.0, 1.0))
    for group in (zeros, ones):
        group.id = "same"
    first, second = after([*groups, zeros]), after([*groups, ones])
    assert is_same(first, second)
    trainer = make_trainer(grpo(), torch.float64, max_grad_norm=None)
    alone = trainer.step(groups, VERSION).grad_norms[0]
    beside = make_trainer(grpo(), torch.float64, max_grad_norm=None).step([*groups, zeros], VERSION).grad_norms[0]
    assert beside == pytest.approx(alone * 9 / 12, rel=1e-6)  # of 9 and of 12 sequences
    out = make_trainer(grpo(), torch.float64, max_grad_norm=None, zero_variance="leave_out")
    assert out.step([*groups, zeros], VERSION).grad_norms[0] == pytest.approx(alone, rel=1e-12)


def test_staleness_bound() -> None:
    groups = make_groups()
    for group in groups:
        for sample in group.samples:
            sample.logprobs = [-50.0 if v == 3 else x for v, x in zip(sample.versions, sample.logprobs, strict=True)]
    result = make_trainer(max_staleness=1).step(groups, VERSION)
    assert result.diagnostics is not None and result.diagnostics.by_staleness[2].trained == 0
    assert result.diagnostics.overall.max_difference is not None and result.diagnostics.overall.max_difference < 20


# ---- numbers


def test_clipping_and_warm_up() -> None:
    trainer = make_trainer(warmup=4, max_grad_norm=0.01)
    policy = TransformersPolicy(make_model(dtype=torch.float32))
    by_hand = torch.optim.AdamW(policy.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0)
    loss = trainer.loss
    for k in range(6):
        groups = make_groups()
        result = trainer.step(groups, VERSION)
        assert result.learning_rate == pytest.approx(1e-2 * min(1, (k + 1) / 4))
        batch = pack(groups, version=VERSION)
        assert batch.inputs is not None
        now = policy.logprobs(batch.inputs)
        by_hand.zero_grad()
        loss(batch.replace(logprobs=now, proximal_logprobs=now.detach())).loss.backward()
        assert torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.01) > 0.01
        by_hand.param_groups[0]["lr"] = 1e-2 * min(1, (k + 1) / 4)
        by_hand.step()
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(trainer.policy.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)


def test_temperature_is_the_samples() -> None:
    groups = make_groups(params=SamplingParams(temperature=0.5))
    policy = TransformersPolicy(make_model())
    batch = pack(groups, version=VERSION)
    assert batch.inputs is not None
    with torch.no_grad():
        recorded = policy.logprobs(batch.inputs, temperature=0.5).split(batch.lengths.tolist())
    for sample, own in zip((s for g in groups for s in g.samples), recorded, strict=True):
        sample.logprobs = own.tolist()
        sample.versions = [v * 0 + VERSION for v in sample.versions]  # type: ignore[misc]
        sample.segments = []
    trainer = make_trainer(micro_batch_tokens=20)
    assert trainer.step(groups, VERSION).max_difference == pytest.approx(0.0, abs=1e-5)
    mixed = [*groups, *make_groups([[1.0, 0.0]])]
    mixed[-1].id = "other"
    for sample in mixed[-1].samples:
        sample.id = f"other/{sample.index}"
    assert make_trainer().step(mixed, VERSION).updated == 1


def test_a_batch_that_diverges_is_refused() -> None:
    trainer = moved(make_trainer(grpo(clip_low=None, clip_high=None)))
    before, state = weights(trainer), copy.deepcopy(trainer.optimiser.state_dict()["state"])
    groups = make_groups([[1.0, 0.0]])
    groups[0].samples[0].logprobs[0] = -1e30
    with pytest.raises(TrainingDiverged, match="version 5, update 0: loss"):
        trainer.step(groups, VERSION)
    assert is_same(weights(trainer), before)
    assert all(is_same(v, state[i]) for i, v in trainer.optimiser.state_dict()["state"].items())


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.9}, "truncated"),
        ({"presence_penalty": 1.0}, "penalties"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
def test_samples_of_another_distribution(params: dict[str, Any], says: str) -> None:
    groups = make_groups(params=SamplingParams(**params))
    with pytest.raises(ValueError, match=f"sample g0/0: .*{says}"):
        make_trainer().step(groups, VERSION)
    assert make_trainer(logprobs="raw").step(groups, VERSION).updated == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"max_grad_norm": math.nan}, "max_grad_norm"),
        ({"warmup": -1}, "warmup"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"updates": True}, "updates"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"logprobs": "raws"}, "logprobs"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainConfig(**settings)


def test_a_penalty_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference"):
        Trainer(TransformersPolicy(make_model()), grpo(kl_coef=0.1))
