"""Mixtures of experts: the same tokens as `transformers`, and exact like any other model (P1)."""

from __future__ import annotations

import numba
import pytest
import torch
from tests.partial_rollout.conftest import SIZES, EngineMaker, assert_same, generate, group, prompt, run
from tests.partial_rollout.conftest import make_model as dense_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from longtail import ExactNumericsUnavailable, NativeEngine
from longtail.kernels.linear import RowRule
from longtail.partial_rollout.engines.native import interface, loader, moe
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.differentiable import silu_mul
from longtail.partial_rollout.engines.native.row_invariant import RowInvariantFunctions
from longtail.sample import Sample

LENGTH = 22
# No multiples of a vector: what torch computes element by element meets its other code for the last ones.
ODD = {"hidden_size": 60, "intermediate_size": 97, "moe_intermediate_size": 35, "tie_word_embeddings": False}
CONFIGS: dict[str, tuple[type, dict]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "sliding_window": None}),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 15, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    # A shared expert behind a sigmoid.
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"num_experts": 15, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 37},
    ),
    "gpt_oss": (
        GptOssConfig,
        {"num_local_experts": 7, "sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
KINDS = list(CONFIGS)


def make_model(kind: str, **fields: object) -> PreTrainedModel:
    config_class, more = CONFIGS[kind]
    torch.manual_seed(0)
    config = config_class(**(SIZES | ODD | more | fields))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # all zeros or ones otherwise
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest, make_engine: EngineMaker) -> EngineMaker:
    model = make_model(request.param)
    return lambda **settings: make_engine(model, **settings)


@pytest.fixture(scope="module")
def engine(make: EngineMaker) -> NativeEngine:
    return make()


@pytest.fixture(scope="module")
def expected(engine: NativeEngine) -> Sample:
    """Undisturbed, alone."""
    return generate(engine, group("a", prompt(21), max_tokens=LENGTH))[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_against_transformers(make_engine: EngineMaker, kind: str, numerics: str) -> None:
    model = make_model(kind)
    ids = prompt(25)
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)
        logprobs = torch.log_softmax(model(want).logits[0].float(), -1)
    sample = generate(make_engine(model, numerics=numerics), group("a", ids, temperature=0.0, max_tokens=40))[0]
    assert sample.output_ids == want[0, 25:].tolist()
    assert len(set(sample.output_ids)) > 10  # the model does not merely repeat itself
    probabilities = [logprobs[24 + i, token].item() for i, token in enumerate(sample.output_ids)]
    torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(probabilities), atol=1e-4, rtol=0)


@pytest.mark.parametrize("snapshot", [True, False], ids=["from-snapshot", "from-tokens"])
def test_cut_at_every_position(engine: NativeEngine, expected: Sample, snapshot: bool) -> None:
    for cut in range(1, LENGTH):
        engine.reset_prefix_cache()
        sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
        run(engine, [sample], until=cut)
        engine.pause(snapshot=snapshot)
        engine.reset_prefix_cache()
        run(engine, [sample])
        assert_same(sample, expected)
        assert [s.kv for s in sample.segments] == ["computed", "restored" if snapshot else "recomputed"]


def test_alone_or_in_a_mixed_batch(engine: NativeEngine, expected: Sample) -> None:
    engine.reset_prefix_cache()
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    others = [group(f"o{i}", prompt(5 + 13 * i, i), max_tokens=4 + 7 * i).samples[0] for i in range(6)]
    engine.add(others[:3])
    engine.step()
    engine.step()
    engine.add([sample, *others[3:]])
    run(engine)
    assert_same(sample, expected)


@pytest.mark.parametrize("chunk", [8, 9, 33])
def test_chunked_and_whole_prefill(make: EngineMaker, chunk: int) -> None:
    whole, chunked = make(max_num_batched_tokens=512), make(max_num_batched_tokens=chunk)
    ids = prompt(100)
    assert_same(generate(chunked, group("a", ids))[0], generate(whole, group("a", ids))[0])
    assert chunked.stats().num_steps > whole.stats().num_steps


@pytest.mark.parametrize("preemption", ["snapshot", "recompute"])
def test_after_preemption(make: EngineMaker, engine: NativeEngine, preemption: str) -> None:
    want = generate(engine, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    tight = make(kv_cache_bytes=18 * engine.kv.bytes_per_block, max_model_len=160, preemption=preemption)
    got = generate(tight, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    assert tight.stats().num_preemptions > 0
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_two_threads_and_one(make: EngineMaker) -> None:
    present = torch.get_num_threads(), numba.get_num_threads()
    try:
        results = [
            generate(make(threads=threads), *(group(f"g{i}", prompt(31 * i + 3, i)) for i in range(5)))
            for threads in (1, 2)
        ]
    finally:
        torch.set_num_threads(present[0])
        numba.set_num_threads(present[1])
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_replaced(make_engine: EngineMaker, kind: str) -> None:
    """Those of experts and routers too."""
    model = make_model(kind)
    engine = make_engine(model)
    before = generate(engine, group("a", prompt(21)))[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "gate" in name or "router" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    engine.update_weights(model.state_dict(), 1)
    after = generate(engine, group("a", prompt(21)))[0]
    assert after.logprobs[0] != before.logprobs[0]
    assert_same(after, generate(make_engine(model, version=1), group("a", prompt(21)))[0])


# ---- the parts


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moe_blocks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **(SIZES | ODD), n_routed_experts=20, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
    )
    config._experts_implementation = "eager"
    deepseek = DeepseekV3MoE(config)
    for parameter in deepseek.parameters():
        nn.init.normal_(parameter, std=0.2)
    deepseek.gate.e_score_correction_bias.copy_(0.2 * randn(20))
    blocks = {kind: make_model(kind).model.layers[0].mlp for kind in KINDS}
    return blocks | {"deepseek_v3": deepseek}


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v3"])
@pytest.mark.parametrize("rule", [RowRule("onednn", 2), RowRule("aten", 4, 4), RowRule("tiles", 4, 4)], ids=str)
@torch.no_grad()
def test_a_layers_rows_are_their_own(kind: str, rule: RowRule) -> None:
    """Under any rule that the machine may ask for; rows of a batch, alone, and at another place."""
    block = moe_blocks()[kind]
    x = randn(1, 37, 60, seed=1)
    first = block(x)
    want = first if isinstance(first, torch.Tensor) else first[0]
    own = interface.replace_modules(block, rule)
    assert [type(module).__name__ for module in own.experts.values()] == ["PackedExperts"]

    def compute(rows: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([rows, randn(1, rule.padded(rows.shape[1]) - rows.shape[1], 60, seed=2)], dim=1)
        with moe.routed(rows.shape[1]), RowInvariantFunctions(block, rule):
            got = block(padded)
        return (got if isinstance(got, torch.Tensor) else got[0])[0, : rows.shape[1]]

    got = compute(x)
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-5)
    for i in range(0, 37, 4):
        assert torch.equal(compute(x[:, i : i + 1])[0], got[i])
    for n in (2, 3, 5, 17, 36):
        assert torch.equal(compute(x[:, -n:]), got[-n:])
        assert torch.equal(compute(x[:, :n].flip(1)).flip(0), got[:n])


@torch.no_grad()
def test_experts_of_a_token_are_added_in_order() -> None:
    """Three experts whose results are 1e8, 1 and -1e8: only in the order of their numbers is the sum zero."""
    weights = {"gate_up_proj": torch.zeros(3, 2, 1), "down_proj": torch.tensor([[[1e8]], [[1.0]], [[-1e8]]])}
    weights["gate_up_proj"][:] = 1.0
    experts = moe.PackedExperts(moe.Form(False, lambda x: torch.ones(len(x), 1)), weights, RowRule("aten"))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]):
        assert experts(torch.ones(1, 1), torch.tensor([order]), torch.ones(1, 3)).item() == 0.0


@torch.no_grad()
def test_padding_is_not_routed() -> None:
    experts = moe.PackedExperts(
        moe.Form(False, silu_mul),
        {"gate_up_proj": randn(3, 8, 5), "down_proj": randn(3, 5, 4)},
        RowRule("aten"),
    )
    x, chosen = randn(4, 5), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])
    x[2:] = float("nan")
    with moe.routed(2) as record:
        out = experts(x, chosen, torch.ones(4, 2))
    assert out[:2].isfinite().all() and not out[2:].any()
    assert [part.tolist() for part in record.experts] == [[[0, 1], [1, 2]]]


def test_experts_are_recognised_by_what_they_compute() -> None:
    block = make_model("mixtral").model.layers[0].mlp
    form = moe.form_of(block.experts)
    assert form is not None and not form.transposed and form.gate is silu_mul
    block.experts.act_fn = nn.GELU(approximate="tanh")
    other = moe.form_of(block.experts)
    assert other is not None and other.gate is moe._gelu_mul
    block.experts.act_fn = nn.ReLU()
    assert moe.form_of(block.experts) is None
    oss = moe.form_of(make_model("gpt_oss").model.layers[0].mlp.experts)
    assert oss is not None and oss.transposed
    assert moe.form_of(block.gate) is None


def test_other_experts_run_fast_only(make_engine: EngineMaker) -> None:
    model = make_model("mixtral", hidden_act="relu")
    with pytest.raises(ExactNumericsUnavailable, match=r"MixtralExperts.*fast"):
        make_engine(model)
    ids = prompt(25)
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    sample = generate(make_engine(model, numerics="fast"), group("a", ids, temperature=0.0, max_tokens=10))[0]
    assert sample.output_ids == want[0, 25:].tolist()


def test_the_check_at_load_sees_functions_that_are_not_replaced(
    monkeypatch: pytest.MonkeyPatch, make_engine: EngineMaker
) -> None:
    """Without them the gate of the shared expert depends on the row's place."""
    model = make_model("qwen2_moe")
    monkeypatch.setattr(RowInvariantFunctions, "__enter__", lambda self: self)
    monkeypatch.setattr(RowInvariantFunctions, "__exit__", lambda self, *_: None)
    with pytest.raises(ExactNumericsUnavailable, match="other bits"):
        make_engine(model)


def test_functions_are_watched_only_where_a_model_calls_them(make_engine: EngineMaker) -> None:
    for kind, watched in (("mixtral", True), ("dense", False)):
        model = make_model(kind) if kind in CONFIGS else dense_model("llama")
        decoder = make_engine(model, fused=False).decoder
        assert isinstance(decoder, interface.InterfaceDecoder)
        others = [module for module in decoder.model.modules() if module is not decoder.model.base_model]
        assert any("forward" in vars(module) for module in others) == watched


def test_the_routers_bias_is_a_weight() -> None:
    """A buffer, which a trainer changes all the same."""
    block = moe_blocks()["deepseek_v3"]
    assert "gate.e_score_correction_bias" in weights_of(block)
    assert set(weights_of(make_model("mixtral"))) == {n for n, _ in make_model("mixtral").named_parameters()}
    with pytest.raises(ValueError, match="e_score_correction_bias"):
        loader.check_weights(
            {name: tuple(w.shape) for name, w in weights_of(block).items()}, dict(block.named_parameters())
        )
