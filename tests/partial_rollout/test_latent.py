"""Latent attention (MLA): the same tokens as `transformers`, and exact like any other model (P1)."""

from __future__ import annotations

from typing import Any

import numba
import pytest
import torch
from tests.partial_rollout.conftest import SIZES, EngineMaker, assert_same, generate, group, prompt, run
from tests.partial_rollout.drafters import drafter
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, PreTrainedModel

from longtail import NativeEngine, UnsupportedModel
from longtail.kernels.latent import latent_attention
from longtail.kernels.linear import RowRule
from longtail.partial_rollout.engines.native import latent
from longtail.sample import Sample
from longtail.spec_decode.controller import FixedLength

LENGTH = 16
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "hidden_size": 60,
    "intermediate_size": 97,
    "moe_intermediate_size": 35,
    "head_dim": 8,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[type, dict]] = {
    "deepseek_v3": (DeepseekV3Config, LATENT),
    # Queries without a latent of their own, half-split rotation, a scale with YaRN's factor.
    "deepseek_v3-yarn": (
        DeepseekV3Config,
        LATENT | {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": YARN},
    ),
    "deepseek_v2": (DeepseekV2Config, LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}),
}
KINDS = list(CONFIGS)


def make_model(kind: str, **fields: object) -> PreTrainedModel:
    config_class, more = CONFIGS[kind]
    torch.manual_seed(0)
    config = config_class(**(SIZES | more | fields))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, tensor in model.state_dict().items():
        if "norm" in name or "bias" in name:  # all zeros or ones otherwise
            tensor += 0.3 * torch.randn(tensor.shape)
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
        want = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None)
        logprobs = torch.log_softmax(model(want).logits[0].float(), -1)
    sample = generate(make_engine(model, numerics=numerics), group("a", ids, temperature=0.0, max_tokens=50))[0]
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
    blocks = 18 * engine.kv.groups[0].layout.block_bytes
    tight = make(kv_cache_bytes=blocks, max_model_len=160, preemption=preemption)
    got = generate(tight, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    assert tight.stats().num_preemptions > 0
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_siblings_share_a_prompt(make: EngineMaker, engine: NativeEngine) -> None:
    engine.reset_prefix_cache()
    siblings = generate(engine, group("g", prompt(50), n=6))
    assert len({tuple(s.output_ids) for s in siblings}) == 6
    alone = make(enable_prefix_caching=False, max_num_seqs=1)
    for a, b in zip(siblings, generate(alone, group("g", prompt(50), n=6)), strict=True):
        assert_same(a, b)


def test_drafts_change_nothing(make: EngineMaker, engine: NativeEngine) -> None:
    """Verified in passes of several tokens a sequence."""
    plain = generate(engine, group("g", prompt(30), n=3, max_tokens=30))
    drafting = make(drafter=drafter("half right", plain), controller=FixedLength(4))
    drafted = generate(drafting, group("g", prompt(30), n=3, max_tokens=30))
    assert 0 < drafting.stats().num_accepted_tokens < drafting.stats().num_draft_tokens
    for a, b in zip(drafted, plain, strict=True):
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


def test_weights_are_replaced(make_engine: EngineMaker) -> None:
    """Those of the absorbed projection, and the bias of the router, which is a buffer."""
    model = make_model("deepseek_v3")
    engine = make_engine(model)
    for part in ("kv_b_proj", "e_score_correction_bias"):
        before = generate(engine, group(part, prompt(21)))[0]
        for name, tensor in model.state_dict().items():
            if part in name:
                tensor += 0.5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        engine.update_weights(model.state_dict(), engine.version + 1)
        after = generate(engine, group(part, prompt(21)))[0]
        assert after.logprobs != before.logprobs
        fresh = make_engine(model, version=engine.version)
        assert_same(after, generate(fresh, group(part, prompt(21)))[0])


@pytest.mark.parametrize("rule", [RowRule("onednn", 2), RowRule("aten", 4, 4), RowRule("tiles", 4, 4)], ids=str)
def test_absorbed_is_expanded_on_the_other_side(rule: RowRule) -> None:
    """q . (W_UK c) is (W_UK^T q) . c, and sum of p W_UV c is W_UV of the sum of p c."""
    attention = make_model("deepseek_v3").model.layers[1].self_attn
    weight = attention.kv_b_proj.weight.detach().view(4, 12 + 10, 20)
    projection = latent.AbsorbedProjection(attention, rule)
    generator = torch.Generator().manual_seed(0)
    q, c = torch.randn(4, 8, 12, generator=generator), torch.randn(8, 20, generator=generator)
    keys = torch.einsum("hnr,tr->htn", weight[:, :12], c)
    scores = projection.absorb(q).transpose(0, 1) @ c.T
    torch.testing.assert_close(scores, q @ keys.transpose(1, 2), rtol=1e-4, atol=1e-4)
    values = torch.einsum("hvr,tr->thv", weight[:, 12:], c)
    torch.testing.assert_close(projection.expand(c[:, None].expand(-1, 4, -1)), values, rtol=1e-4, atol=1e-5)


def test_a_wrong_scale_is_found_at_load(monkeypatch: pytest.MonkeyPatch, make_engine: EngineMaker) -> None:
    """YaRN's, say, left out."""

    right: Any = latent_attention

    def wrong(*args: Any) -> torch.Tensor:
        return right(*args[:-1], 20**-0.5)

    monkeypatch.setattr(latent, "latent_attention", wrong)
    make_engine(make_model("deepseek_v3"))
    with pytest.raises(UnsupportedModel, match="computes other logits"):
        make_engine(make_model("deepseek_v3-yarn"))
