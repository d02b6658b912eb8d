"""`ExactPolicy` of a `peft` model: merged weights on both sides, so that the bits are the rollout's."""

from __future__ import annotations

import pytest
import torch
from tests.partial_rollout.conftest import EngineMaker, generate, group, make_model, prompt
from tests.partial_rollout.test_training import gradients, ordinary, packed, recorded

from longtail import UnsupportedModel
from longtail.partial_rollout.engines.native.training import ExactPolicy

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "interface"])
def test_adapters_are_merged(fused: bool | None, make_engine: EngineMaker) -> None:
    model = make_model("qwen3")
    engine = make_engine(model, fused=fused)
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config)
    policy = ExactPolicy(adapted, engine, checkpointing=fused is False)
    assert policy.parameters() and all("lora_" in name for name in policy.state_dict())
    optimiser = torch.optim.AdamW(policy.parameters(), lr=3e-2)
    old = generate(engine, group("a", prompt(12), n=2, max_tokens=12))
    for version in (1, 2):
        optimiser.zero_grad()
        (-policy.logprobs(packed(old)).mean()).backward()
        optimiser.step()
        engine.update_weights(policy.weights(), version)
        samples = generate(engine, group(f"b{version}", prompt(15), n=2, max_tokens=9))
        got, plain = policy.logprobs(packed(samples)), ordinary(adapted, samples, 1.0)
        assert torch.equal(got.detach(), recorded(samples))
        assert not torch.equal(plain.detach(), recorded(samples))
        weights = torch.linspace(-1, 2, len(got))
        own, want = (gradients((x * weights).sum(), policy.parameters()) for x in (got, plain))
        for a, b in zip(own, want, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()
    with torch.no_grad(), adapted.disable_adapter():  # the model as it was before: a reference for a KL penalty
        assert torch.equal(policy.logprobs(packed(old)), recorded(old))


def test_adapters_that_cannot_be_merged(make_engine: EngineMaker) -> None:
    for fields, says in (({"lora_dropout": 0.1}, "drops out"), ({"use_dora": True}, "DoRA")):
        model = make_model("qwen3")
        engine = make_engine(model)
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **fields)
        adapted = peft.get_peft_model(model, config)
        with pytest.raises(UnsupportedModel, match=says):
            ExactPolicy(adapted, engine)
