"""Adapters through peft: merged weights are what the engine gets, the base stays as it is."""

from __future__ import annotations

import pytest
import torch
from tests.trainer_adapter.test_policy import LENGTHS, make_inputs, make_model
from tests.trainer_adapter.test_trainer import VERSION, make_groups

pytest.importorskip("peft", reason="needs the extra lora")

from longtail.trainer_adapter.lora import BaseReference, LoraPolicy, adapted
from longtail.trainer_adapter.losses import grpo
from longtail.trainer_adapter.policy import TransformersPolicy
from longtail.trainer_adapter.trainer import TrainConfig, Trainer


def trained(kl_coef: float = 0.0, **options: bool) -> tuple[LoraPolicy, Trainer]:
    model = adapted(make_model(), rank=4, seed=1)
    policy = LoraPolicy(model, **options)
    reference = BaseReference(model, policy) if kl_coef else None
    trainer = Trainer(policy, grpo(kl_coef=kl_coef), config=TrainConfig(learning_rate=0.05), reference=reference)
    return policy, trainer


def test_it_starts_as_the_model_and_learns() -> None:
    inputs, base = make_inputs(LENGTHS), TransformersPolicy(make_model())
    policy, trainer = trained()
    assert torch.equal(policy.logprobs(inputs), base.logprobs(inputs))
    names = dict(make_model().named_parameters()).keys()
    assert names <= policy.weights().keys() and not [n for n in policy.weights() if "lora" in n or "base_layer" in n]
    for name, tensor in make_model().state_dict().items():
        assert torch.equal(policy.weights()[name], tensor), name
    for _ in range(3):
        assert trainer.step(make_groups(), VERSION).updated == 1
    assert not torch.equal(policy.logprobs(inputs), base.logprobs(inputs))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_merged_weights_are_the_policy(checkpointing: bool) -> None:
    """Up to rounding: float64, 1e-9."""
    policy, trainer = trained(gradient_checkpointing=checkpointing)
    for _ in range(3):
        trainer.step(make_groups(), VERSION)
    merged = make_model()
    merged.load_state_dict(policy.weights())
    inputs = make_inputs(LENGTHS)
    torch.testing.assert_close(
        TransformersPolicy(merged).logprobs(inputs), policy.logprobs(inputs), rtol=1e-9, atol=1e-9
    )


def test_checkpoints_hold_the_adapters_alone() -> None:
    policy, trainer = trained()
    trainer.step(make_groups(), VERSION)
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    assert state and all("lora_" in name for name in state)
    other, _ = trained()
    other.load_state_dict(state)
    inputs = make_inputs(LENGTHS)
    assert torch.equal(other.logprobs(inputs), policy.logprobs(inputs))


def test_the_reference_is_the_base() -> None:
    _, trainer = trained(kl_coef=0.1)
    assert trainer.step(make_groups(), VERSION).kl == pytest.approx(0.0, abs=1e-12)
    assert trainer.step(make_groups(), VERSION).kl > 1e-6
    inputs = make_inputs(LENGTHS)
    assert trainer.reference is not None
    assert torch.equal(trainer.reference.logprobs(inputs), TransformersPolicy(make_model()).logprobs(inputs))


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="rank must be"):
        adapted(make_model(), rank=0)
    with pytest.raises(ValueError):
        adapted(make_model(), rank=2, targets=["nonesuch"])
