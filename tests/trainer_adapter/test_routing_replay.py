"""Routing replay: recorded experts in a trainer's forward pass, weights by its router."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from longtail import Group, NativeEngine, RoutedExperts, Sample, SamplingParams
from longtail.trainer_adapter.routing import FREE, mixture_layers, packed_routing, padded_routing, replay_routing

VOCAB, LAYERS = 100, 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, tuple[type, dict]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 8}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 8}),
    "deepseek_v3": (DeepseekV3Config, LATENT),
    "deepseek_v2": (DeepseekV2Config, LATENT | {"topk_method": "group_limited_greedy"}),
}


def make_model(kind: str) -> PreTrainedModel:
    config_class, more = CONFIGS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**(SIZES | more)), attn_implementation="eager")
    return model.eval()


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


class Watch:
    """Sees which experts the blocks are given, and with which weights."""

    def __init__(self, model: nn.Module) -> None:
        self.experts: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        for block in mixture_layers(model).values():
            (experts,) = (child for name, child in block.named_children() if name == "experts")
            experts.register_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.experts.append(args[1])
        self.weights.append(args[2])

    def take(self) -> torch.Tensor:
        """int16 [tokens, layers, top_k] since the last call."""
        taken = torch.stack(self.experts, dim=1).to(torch.int16)
        self.experts, self.weights = [], []
        return taken


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def change(model: nn.Module, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += size * torch.randn(parameter.shape, generator=generator)


def test_the_same_weights_give_the_same_logits(model: PreTrainedModel) -> None:
    watch, ids = Watch(model), tokens(2, 20)
    with torch.no_grad():
        want = model(ids).logits
        recorded = watch.take().unflatten(0, (2, 20))
        with replay_routing(model, recorded):
            got = model(ids).logits
    assert torch.equal(got, want)
    assert torch.equal(watch.take().unflatten(0, (2, 20)), recorded)


def test_other_weights_use_what_was_recorded(model: PreTrainedModel) -> None:
    """Their routers weigh it, and gradients reach them."""
    watch, ids = Watch(model), tokens(2, 20)
    with torch.no_grad():
        model(ids)
        recorded = watch.take().unflatten(0, (2, 20))
        change(model)
        other = model(ids).logits
        assert not torch.equal(watch.take().unflatten(0, (2, 20)), recorded)  # some token would go elsewhere
    model.train(True)
    with replay_routing(model, recorded):
        logits = model(ids).logits
        weights = watch.weights
        assert torch.equal(watch.take().unflatten(0, (2, 20)), recorded)
        assert not torch.equal(logits, other)
        assert all((w > 0).all() for w in weights)  # in DeepSeek-V2 too, of experts beyond today's groups
        logits.log_softmax(-1)[..., 0].sum().backward()
    for name, block in mixture_layers(model).items():
        router = next(m for n, m in block.named_children() if n in ("gate", "router"))
        gradient = router.get_parameter("weight").grad
        assert gradient is not None and gradient.isfinite().all() and gradient.abs().max() > 0, name
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(ids).logits, other)  # afterwards the router chooses again


def test_weights_are_the_routers_over_the_recorded_experts() -> None:
    """Mixtral's: a softmax over all experts, then divided by the sum over those of the token."""
    model = make_model("mixtral")
    watch, ids = Watch(model), tokens(1, 9)
    states: list[torch.Tensor] = []
    block = model.model.layers[0].mlp
    block.gate.register_forward_pre_hook(lambda m, args: states.append(args[0].reshape(-1, 64)))
    recorded = torch.stack([torch.tensor([[i % 8, (i + 3) % 8]] * LAYERS) for i in range(9)])[None]
    with torch.no_grad(), replay_routing(model, recorded):
        model(ids)
    scores = (states[0] @ block.gate.weight.T).softmax(-1).gather(1, recorded[0, :, 0])
    torch.testing.assert_close(watch.weights[0], scores / scores.sum(-1, keepdim=True))


def test_free_tokens_are_routed_by_the_router(model: PreTrainedModel) -> None:
    watch, ids = Watch(model), tokens(1, 20)
    with torch.no_grad():
        model(ids)
        own = watch.take()
        recorded = own.roll(1, 0)  # of other tokens
        recorded[::2] = FREE
        with replay_routing(model, recorded[None]):
            model(ids)
        got = watch.take()
    assert torch.equal(got[1::2], recorded[1::2])
    assert torch.equal(got[::2, 0], own[::2, 0])  # before the first layer nothing differs


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_gradient_checkpointing(checkpointing: bool) -> None:
    """Layers that are computed again in the backward pass replay the same routing."""
    model = make_model("qwen3_moe").train()
    recorded = torch.stack([torch.randperm(12)[:3] for _ in range(20 * LAYERS)]).view(1, 20, LAYERS, 3)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with replay_routing(model, recorded):
        model(tokens(1, 20)).logits.log_softmax(-1)[..., 0].sum().backward()
    twin = make_model("qwen3_moe").train()
    with replay_routing(twin, recorded):
        twin(tokens(1, 20)).logits.log_softmax(-1)[..., 0].sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


# ---- from a rollout


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_a_rollout_is_replayed(layout: str) -> None:
    """Recorded by the engine, replayed by a trainer: the same experts, so the same log-probabilities; after a step of
    training still the same experts."""
    model = make_model("qwen3_moe")
    engine = NativeEngine(model, block_size=16, kv_cache_bytes=4 << 20, record_routing=True)
    params = SamplingParams(n=1, max_tokens=12, ignore_eos=True, seed=5)
    done = [Group.from_prompt(f"g{i}", tokens(5 + 4 * i, seed=i).tolist(), params).samples[0] for i in range(3)]
    engine.add(done)
    while engine.has_work:
        engine.step()
    lengths = [sample.num_tokens for sample in done]
    known = [torch.tensor([*sample.prompt_ids, *sample.output_ids]) for sample in done]
    if layout == "packed":
        recorded = packed_routing(done)
        inputs = {
            "input_ids": torch.cat(known)[None],
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        }
        real = torch.ones(1, sum(lengths), dtype=torch.bool)
    else:
        recorded = padded_routing(done, 30, left=layout == "left")
        real = torch.tensor([[i >= 30 - n if layout == "left" else i < n for i in range(30)] for n in lengths])
        ids = torch.zeros(3, 30, dtype=torch.long)
        ids[real] = torch.cat(known)
        inputs = {
            "input_ids": ids,
            "attention_mask": real.long(),
            "position_ids": (real.cumsum(-1) - 1).clamp(min=0),
        }
    watch = Watch(model)
    for trained in (False, True):
        if trained:
            change(model)
        with torch.no_grad(), replay_routing(model, recorded):
            rows = model(**inputs, use_cache=False).logits.log_softmax(-1)[real].split(lengths)
        used = watch.take()[real.flatten()].split(lengths)
        for sample, log_probs, experts in zip(done, rows, used, strict=True):
            assert np.array_equal(experts[:-1].numpy(), np.asarray(sample.routed_experts))
            first = len(sample.prompt_ids) - 1
            got = log_probs[first:-1].gather(1, torch.tensor(sample.output_ids)[:, None])[:, 0]
            close = torch.allclose(got, torch.tensor(sample.logprobs), rtol=0, atol=1e-4)
            assert close == (not trained)


# ---- batches


def samples() -> Iterator[Sample]:
    """Of 3 + 2 and 2 + 4 tokens; of layers 2 and top_k 2; expert = 10 * sample + position."""
    for i, (prompt, output) in enumerate(((3, 2), (2, 4))):
        sample = Sample(id=f"s{i}", group_id="g", index=i, prompt_ids=(5,) * prompt, params=SamplingParams(), seed=0)
        sample.output_ids = [7] * output
        rows = np.broadcast_to(10 * i + np.arange(prompt + output - 1)[:, None, None], (prompt + output - 1, 2, 2))
        sample.routed_experts = RoutedExperts(2, 2, rows.astype(np.int16).tobytes())
        yield sample


def test_batches_of_samples() -> None:
    both = list(samples())
    packed = packed_routing(both)
    assert packed.shape == (1, 11, 2, 2) and packed.dtype == torch.int16
    assert packed[0, :, 1, 1].tolist() == [0, 1, 2, 3, -1, 10, 11, 12, 13, 14, -1]
    assert padded_routing(both, 7)[:, :, 0, 1].tolist() == [[0, 1, 2, 3, -1, -1, -1], [10, 11, 12, 13, 14, -1, -1]]
    left = padded_routing(both, 7, left=True)[:, :, 0, 0]
    assert left.tolist() == [[-1, -1, 0, 1, 2, 3, -1], [-1, 10, 11, 12, 13, 14, -1]]
    with pytest.raises(ValueError, match="length 5: sample s1 has 6 tokens"):
        padded_routing(both, 5)
    both[0].routed_experts = None
    with pytest.raises(ValueError, match=r"sample s0 has no routed_experts.*record_routing"):
        packed_routing(both)


def test_what_does_not_fit_is_refused() -> None:
    model, ids = make_model("mixtral"), tokens(1, 5)
    good = torch.zeros(1, 5, LAYERS, 2, dtype=torch.int16)
    for bad, message in (
        (good[:, :, :2], r"must be \[batch, length, 3, top_k\]"),
        (good[0], r"must be \[batch, length, 3, top_k\]"),
        (good.float(), "must be integers"),
        (good + 8, "8 to 8 for model.layers.0.mlp, whose experts are 0 to 7"),
        (good - 2, "-2 to -2"),
        (torch.cat([good[..., :1], good[..., 1:] - 1], -1), "some experts recorded and some not"),
    ):
        with pytest.raises(ValueError, match=message), replay_routing(model, bad):
            pass
    for bad, error, message in (
        (good[:, :4], ValueError, "of 4 tokens, the input has 5"),
        (good[..., :1], RuntimeError, "chose 1 of 8 experts 0 times"),
    ):
        with torch.no_grad(), pytest.raises(error, match=message), replay_routing(model, bad):
            model(ids)
    assert all("forward" not in block.__dict__ for block in mixture_layers(model).values())
    dense = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layers of experts"), replay_routing(dense, good):
        pass
