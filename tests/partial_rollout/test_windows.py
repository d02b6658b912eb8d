"""Sliding-window models: the same tokens as `transformers`, and exact like any other (P1)."""

from __future__ import annotations

from typing import Any

import numba
import pytest
import torch
from tests.partial_rollout.conftest import SIZES, EngineMaker, assert_same, generate, group, prompt, run
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
)

from longtail import NativeEngine, UnsupportedModel
from longtail.kernels.attention import AttentionVariant
from longtail.partial_rollout.engines.native import decoder, interface, loader
from longtail.partial_rollout.engines.native.decoder import FusedDecoder
from longtail.sample import Sample

WINDOW, LENGTH = 8, 40
UNTIED = {"tie_word_embeddings": False}  # tied, a random model repeats its last token
# No multiples of a vector: what torch computes element by element meets its other code for the last ones.
ODD = {"hidden_size": 60, "intermediate_size": 97}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, tuple[type, dict]] = {
    "gemma3": (
        Gemma3TextConfig,
        {
            "layer_types": MIXED,
            "query_pre_attn_scalar": 16,
            **ODD,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    # Caps that are felt: scores and logits of these models go beyond them.
    "gemma2": (
        Gemma2Config,
        {
            "layer_types": MIXED,
            "query_pre_attn_scalar": 16,
            **ODD,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "mistral": (MistralConfig, {}),
    "qwen3": (Qwen3Config, {"layer_types": MIXED, "use_sliding_window": True}),
    "gpt_oss": (
        GptOssConfig,
        {"layer_types": MIXED, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
KINDS = ["gemma3", "gemma2", "mistral", "mistral-interface", "qwen3"]


def make_model(kind: str, window: int = WINDOW, **fields: object) -> PreTrainedModel:
    config_class, more = CONFIGS[kind]
    config = config_class(**(SIZES | {"num_hidden_layers": 3, "sliding_window": window} | UNTIED | more | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all zeros or ones otherwise
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest, make_engine: EngineMaker) -> EngineMaker:
    kind, _, path = request.param.partition("-")
    model = make_model(kind)
    return lambda **settings: make_engine(model, fused=False if path else None, **settings)


@pytest.fixture(scope="module")
def engine(make: EngineMaker) -> NativeEngine:
    return make()


@pytest.fixture(scope="module")
def expected(engine: NativeEngine) -> Sample:
    """Undisturbed, alone."""
    return generate(engine, group("a", prompt(21), max_tokens=LENGTH))[0]


@pytest.mark.parametrize("kind", [*KINDS, "gpt_oss"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_against_transformers(make_engine: EngineMaker, kind: str, numerics: str) -> None:
    kind, _, path = kind.partition("-")
    model = make_model(kind)
    ids = prompt(25)
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None)
        logprobs = torch.log_softmax(model(want).logits[0].float(), -1)
    engine = make_engine(model, numerics=numerics, fused=False if path else None)
    assert isinstance(engine.decoder, FusedDecoder) == (kind in ("mistral", "qwen3") and not path)
    sample = generate(engine, group("a", ids, temperature=0.0, max_tokens=50))[0]
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


def test_only_the_window_is_kept(make: EngineMaker, engine: NativeEngine) -> None:
    """Of a window of 8 tokens at most two blocks of 16 are held; what was let go is never read again."""
    want = generate(engine, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(3)))
    careless = make(enable_prefix_caching=False)
    samples = [s for i in range(3) for s in group(f"g{i}", prompt(40, i), max_tokens=60).samples]
    careless.add(samples)
    while careless.has_work:
        careless.step()
        careless.check_integrity()
        for place, kept in enumerate(careless.kv.groups):
            tables = [seq.block_tables[place] for seq in careless.scheduler.running]
            if kept.layout.window:
                assert all(sum(block >= 0 for block in table) <= 2 for table in tables)
            free = [block for block, count in enumerate(kept.pool.ref_counts) if not count]
            kept.cache[free] = float("nan")
    for got, expected in zip(samples, want, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("preemption", ["snapshot", "recompute"])
def test_after_preemption(make: EngineMaker, engine: NativeEngine, preemption: str) -> None:
    want = generate(engine, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    # Six samples hold 42 blocks in the end, of a window of 8 tokens at most 12.
    blocks = 18 if any(not group.layout.window for group in engine.kv.groups) else 8
    few = {"max_num_seqs": 6, "max_num_batched_tokens": 16}
    tight = make(kv_cache_bytes=blocks * engine.kv.bytes_per_block, max_model_len=160, preemption=preemption, **few)
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
    """Also those of the norms, whose modules are the engine's own."""
    model = make_model("gemma3")
    engine = make_engine(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    engine.update_weights(dict(model.named_parameters()), 1)
    fresh = make_engine(model)
    assert_same(generate(engine, group("a", prompt(21)))[0], generate(fresh, group("a", prompt(21)))[0])


@pytest.mark.parametrize("kind", [*KINDS, "gpt_oss"])
@pytest.mark.parametrize("error", [-1, 1])
def test_a_wrong_window_is_found_at_load(
    monkeypatch: pytest.MonkeyPatch, make_engine: EngineMaker, kind: str, error: int
) -> None:
    def wrong(window: int, **fields: Any) -> AttentionVariant:
        return AttentionVariant(window=window and window + error, **fields)

    monkeypatch.setattr(interface, "AttentionVariant", wrong)
    monkeypatch.setattr(decoder, "AttentionVariant", wrong)
    kind, _, path = kind.partition("-")
    for window in (WINDOW, 100):
        with pytest.raises(UnsupportedModel, match="computes other logits"):
            make_engine(make_model(kind, window), numerics="fast", fused=False if path else None)


def test_a_window_other_than_the_configs_is_refused(monkeypatch: pytest.MonkeyPatch, make_engine: EngineMaker) -> None:
    """Of a window too long for the check's tokens, the length is compared."""
    model = make_model("gemma3", loader.PROBED_WINDOW + 1)
    make_engine(model)
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(UnsupportedModel, match="layer 0 attends with a window of 0, its config says 257"):
        make_engine(model)


class _OtherEps(torch.nn.RMSNorm):
    """States an eps that it does not use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, [32], self.weight, 1e-6)


def test_norms_are_recognised_by_what_they_compute() -> None:
    torch.manual_seed(0)
    for other in (torch.nn.LayerNorm(32, bias=False), _OtherEps(32, eps=1e-5), torch.nn.Linear(32, 1, bias=False)):
        assert interface.row_invariant_norm(other) is None
    for module, offset in [(torch.nn.RMSNorm(64, eps=1e-5), False), (make_model("gemma3").model.norm, True)]:
        before = module.weight.clone()
        x = torch.randn(1, 5, len(before))
        norm = interface.row_invariant_norm(module)
        assert norm is not None and norm.offset == offset
        assert norm.weight is module.weight and torch.equal(norm.weight, before)
        torch.testing.assert_close(norm(x), module(x), rtol=1e-6, atol=1e-6)
