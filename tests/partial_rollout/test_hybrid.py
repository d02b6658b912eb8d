"""Hybrid models, whose layers keep recurrent or convolutional states beside KV: as `transformers`, and exact (P1)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from tests.partial_rollout.conftest import SIZES, EngineMaker, assert_same, generate, group, prompt, run
from tests.partial_rollout.drafters import drafter
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from longtail import NativeEngine, Rollout, TokenBudget, UnsupportedModel
from longtail.events import Event
from longtail.kernels.linear import RowRule
from longtail.partial_rollout.engines.native import state_layers
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.row_invariant import RowInvariantFunctions
from longtail.partial_rollout.engines.native.state_layers import state_shapes
from longtail.sample import Sample
from longtail.spec_decode.controller import FixedLength

LENGTH = 28
UNTIED = {"tie_word_embeddings": False}  # tied, a random model repeats its last token
# No multiples of a vector: what torch computes element by element meets its other code for the last ones.
ODD = {"hidden_size": 60, "intermediate_size": 97}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 18,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    # Dense: every layer has an MLP instead of experts.
    "qwen3_next": (Qwen3NextConfig, ODD | DELTA | {"mlp_only_layers": [0, 1, 2]}),
    "qwen3_next_moe": (
        Qwen3NextConfig,
        DELTA
        | {
            "hidden_size": 60,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 36,
        },
    ),
    "minimax": (
        MiniMaxConfig,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "block_size": 16,
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, ODD | DELTA),
    "olmo_hybrid": (OlmoHybridConfig, DELTA | {"linear_allow_neg_eigval": True}),
    "lfm2": (
        Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False, "intermediate_size": 97},
    ),
    "bamba": (BambaConfig, MAMBA2 | {"attn_layer_indices": [1]}),
    "bamba_of_one_group": (BambaConfig, MAMBA2 | {"attn_layer_indices": [1], "mamba_n_groups": 1}),
    "granite": (
        GraniteMoeHybridConfig,
        MAMBA2
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 97,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "nemotron_h": (
        NemotronHConfig,
        ODD
        | {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 10,
            "chunk_size": 16,
        },
    ),
}
THOROUGH = ["qwen3_next", "lfm2", "bamba"]
"""A gated delta network, a short convolution, a state space: the others share their code."""


def make_model(kind: str, **fields: object) -> PreTrainedModel:
    config_class, more = CONFIGS[kind]
    config = config_class(**(SIZES | {"num_hidden_layers": 3} | UNTIED | more | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("dt_bias", ".D")):  # all zeros or ones otherwise
                parameter += 0.3 * torch.randn(parameter.shape)
            if name.endswith("A_log"):  # or most heads forget at once, and a wrong state would go unnoticed
                parameter -= 3.0
    return model


@pytest.fixture(scope="module", params=THOROUGH)
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


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_against_transformers(make_engine: EngineMaker, kind: str, numerics: str) -> None:
    model = make_model(kind)
    ids = prompt(25, 1)
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None)
        logprobs = torch.log_softmax(model(want).logits[0].float(), -1)
    engine = make_engine(model, numerics=numerics)
    sample = generate(engine, group("a", ids, temperature=0.0, max_tokens=50))[0]
    assert sample.output_ids == want[0, 25:].tolist()
    assert len(set(sample.output_ids)) > 10  # the model does not merely repeat itself
    probabilities = [logprobs[24 + i, token].item() for i, token in enumerate(sample.output_ids)]
    torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(probabilities), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_old_tokens_are_felt_through_the_states(kind: str) -> None:
    """Without attention, the logits still depend on a token of 12 before; or the tests here would show little."""
    model, ids = make_model(kind), torch.tensor([prompt(13)])
    for module in model.modules():
        if hasattr(module, "k_proj") and state_shapes(module) is None:
            nn.init.zeros_((module.o_proj if hasattr(module, "o_proj") else module.out_proj).weight)
    with torch.no_grad():
        before = model(ids).logits[0, -1]
        ids[0, 0 if kind != "lfm2" else 8] += 1  # two convolutions of 3 taps reach back by 4
        assert (model(ids).logits[0, -1] - before).abs().max() > 0.05


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


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in THOROUGH])
def test_cuts_chunks_and_a_mixed_batch_of_the_other_models(make_engine: EngineMaker, kind: str) -> None:
    model = make_model(kind)
    engine = make_engine(model, max_num_batched_tokens=24)
    want = generate(make_engine(model), group("a", prompt(40), max_tokens=24))[0]
    for cut in (1, 9, 23):
        for snapshot in (True, False):
            engine.reset_prefix_cache()
            sample = group("a", prompt(40), max_tokens=24).samples[0]
            run(engine, [sample], until=cut)
            engine.pause(snapshot=snapshot)
            engine.add([group(f"o{cut}{snapshot}", prompt(33, cut), max_tokens=9).samples[0]])
            run(engine, [sample])
            assert_same(sample, want)


def test_resume_in_another_engine(make: EngineMaker, expected: Sample) -> None:
    for snapshot in (True, False):
        first, second = make(name="first"), make(name="second", max_num_batched_tokens=16, max_num_seqs=4)
        sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
        run(first, [sample], until=17)
        first.pause(snapshot=snapshot)
        run(second, [sample])
        assert_same(sample, expected)
        assert sample.segments[-1].kv == ("restored" if snapshot else "recomputed")


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
    states = 0 if engine.kv.states is None else engine.kv.states.num_slots * engine.kv.states.layout.block_bytes
    blocks = sum(group.layout.block_bytes for group in engine.kv.groups)
    tight = make(kv_cache_bytes=states + 18 * blocks, max_model_len=160, preemption=preemption)
    got = generate(tight, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    assert tight.stats().num_preemptions > 0
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_siblings_share_a_prompt(make: EngineMaker, engine: NativeEngine) -> None:
    engine.reset_prefix_cache()
    siblings = generate(engine, group("g", prompt(50), n=6))
    assert len({tuple(s.output_ids) for s in siblings}) == 6
    again = generate(engine, group("g", prompt(50), n=6))  # from the state that was kept at the end of the prompt
    alone = make(enable_prefix_caching=False, max_num_seqs=1)
    for a, b, c in zip(siblings, generate(alone, group("g", prompt(50), n=6)), again, strict=True):
        assert_same(a, b)
        assert_same(c, b)


def test_a_later_process_goes_on_from_the_store(make: EngineMaker, engine: NativeEngine, tmp_path: Path) -> None:
    """States lie in the store's files beside the KV of the same sample."""
    groups = [group("a", prompt(40), n=2, max_tokens=14), group("b", prompt(9, 1), max_tokens=10)]
    want = {s.id: s for s in generate(engine, *copy.deepcopy(groups))}
    with Rollout(make(), strategy=TokenBudget(4, per="sample"), store=tmp_path) as rollout:
        rollout.submit(groups)
        rollout.collect()
    with Rollout(make(), store=tmp_path) as rollout:
        rollout.collect(wait=True)
        got = [s for d in rollout.store.deliveries(after=0) for g in d.groups for s in g.samples]
        rollout.store.check_integrity()
    assert {s.id for s in got} == want.keys()
    for sample in got:
        assert_same(sample, want[sample.id])
        assert [segment.kv for segment in sample.segments] == ["computed", "restored"]


@pytest.mark.parametrize("name", ["oracle", "half right", "garbage"])
def test_drafts_change_nothing(make: EngineMaker, engine: NativeEngine, name: str) -> None:
    """States are those before a rejected draft again."""
    want = generate(engine, *(group(f"g{i}", prompt(9 + 20 * i, i), max_tokens=LENGTH) for i in range(3)))
    drafting = make(drafter=drafter(name, want), controller=FixedLength(4))
    got = generate(drafting, *(group(f"g{i}", prompt(9 + 20 * i, i), max_tokens=LENGTH) for i in range(3)))
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    assert drafting.stats().num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["lfm2", "minimax"])
def test_rejected_drafts_cost_a_bounded_number_of_rows(make_engine: EngineMaker, kind: str) -> None:
    """A state cannot be cut: what was accepted is computed once more, and no more than that. So a snapshot is of all
    that was computed, too."""
    events: list[Event] = []
    engine = make_engine(make_model(kind), listener=events.append)
    want = generate(engine, group("a", prompt(21), max_tokens=LENGTH))[0]
    length = 3
    engine.use_drafter(drafter("garbage", []), FixedLength(length))
    events.clear()
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    run(engine, [sample], until=LENGTH // 2)
    (paused,) = engine.pause()
    assert paused.snapshot is not None
    assert paused.snapshot.num_tokens == paused.num_tokens - 1
    run(engine, [sample])
    assert_same(sample, want)
    rows = [e.num_tokens for e in events if e.kind == "step" and e.num_draft_tokens]
    assert rows
    assert max(rows) <= 2 * (1 + length)


@pytest.mark.parametrize("name", ["garbage", "half right"])
@pytest.mark.parametrize("stops", [False, True])
def test_routing_under_drafts(make_engine: EngineMaker, name: str, stops: bool) -> None:
    """Recorded for every token but the last, wherever in a draft the sample ends."""
    params = {"max_tokens": LENGTH}
    if stops:
        params |= {"stop_token_ids": tuple(range(3, 120)), "min_tokens": 9}  # type: ignore[dict-item]
    engine = make_engine(make_model("minimax"), record_routing=True)
    groups = [group(f"g{i}", prompt(9 + 6 * i, i), n=2, **params) for i in range(3)]
    want = generate(engine, *groups)
    engine.use_drafter(drafter(name, want), FixedLength(3))
    engine.reset_prefix_cache()
    got = generate(engine, *(group(f"g{i}", prompt(9 + 6 * i, i), n=2, **params) for i in range(3)))
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
        assert a.routed_experts is not None
        assert b.routed_experts is not None
        assert len(a.routed_experts) == a.num_tokens - 1
        assert np.array_equal(np.asarray(a.routed_experts), np.asarray(b.routed_experts))


def test_kept_state_of_older_weights_under_drafts(make_engine: EngineMaker) -> None:
    """An update finds every state where its sample stands, also if a draft was rejected right before it: what follows
    is what follows without drafts."""
    other = {k: v + 0.02 * torch.randn(v.shape) for k, v in make_model("lfm2").state_dict().items()}
    finished = []
    for name in (None, "garbage"):
        engine = make_engine(make_model("lfm2"), kv_on_update="keep")
        engine.use_drafter(None if name is None else drafter(name, []), FixedLength(3))
        sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
        run(engine, [sample], until=LENGTH // 2)
        engine.update_weights(other, 1)
        run(engine)
        finished.append(sample)
    assert_same(finished[1], finished[0])


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


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_replaced(make_engine: EngineMaker, kind: str) -> None:
    """Those of convolutions, decays and gated norms too, which the engine's own code reads."""
    model = make_model(kind)
    engine = make_engine(model)
    before = generate(engine, group("a", prompt(21)))[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    engine.update_weights(weights_of(model), 1)
    after = generate(engine, group("b", prompt(21)))[0]
    assert_same(after, generate(make_engine(model), group("b", prompt(21)))[0])
    assert after.output_ids != before.output_ids


def test_a_wrong_state_is_found_at_load(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that starts every pass from nothing."""
    for name in ("causal_conv", "gated_delta_rule"):
        right = getattr(state_layers, name)

        def wrong(*args: Any, right: Any = right, **more: Any) -> torch.Tensor:
            at = next(i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.dtype == torch.int64) - 1
            return right(*args[:at], torch.zeros_like(args[at]), *args[at + 1 :], **more)

        with monkeypatch.context() as patch:
            patch.setattr(state_layers, name, wrong)
            with pytest.raises(UnsupportedModel, match="computes other logits"):
                make_engine(make_model("qwen3_next"), numerics="fast")


# ---- elementwise functions


@pytest.mark.parametrize("kind", CONFIGS)
def test_modules_that_call_elementwise_functions_are_found(kind: str) -> None:
    model = make_model(kind)
    found = {module.__name__ for module in RowInvariantFunctions(model, RowRule("aten")).callers(model)}
    own = {
        "qwen3_next": {"Qwen3NextAttention"},
        "qwen3_next_moe": {"Qwen3NextAttention", "Qwen3NextSparseMoeBlock", "Qwen3NextTopKRouter"},
        "minimax": {"MiniMaxTopKRouter"},
        "qwen3_5": {"Qwen3_5Attention"},
        "lfm2": {"Lfm2MLP"},
    }
    layers = {type(module).__name__ for module in make_model(kind).modules() if state_shapes(module) is not None}
    assert own.get(kind, set()) <= found
    assert found - own.get(kind, set()) <= layers | {name for name in found if "NormGated" in name or "SiLU" in name}


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * x.sigmoid() + torch.nn.functional.sigmoid(x) * self.act(x.clone())


def test_elements_of_a_module_do_not_depend_on_their_place() -> None:
    module, x = _Gate(), torch.randn(33, 61, generator=torch.Generator().manual_seed(1))
    plain = module(x)
    assert any(not torch.equal(module(x[t : t + 1])[0], plain[t]) for t in range(33))  # so there is something to fix
    RowInvariantFunctions(module, RowRule("aten")).attach(module)
    whole = module(x)
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-6)
    for t in range(33):
        assert torch.equal(module(x[t : t + 1])[0], whole[t])
    assert torch.equal(module(x.flip(0)), whole.flip(0))


# ---- what is refused


def test_unknown_layers_are_refused(make_engine: EngineMaker) -> None:
    model = make_model("lfm2")
    model.config.layer_types = ["conv", "full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModel, match="has layers of type chunked_attention; not supported yet"):
        make_engine(model)
    model.config.layer_types = ["conv", "full_attention", "full_attention"]
    with pytest.raises(UnsupportedModel, match="layer 2 is of type full_attention, of which the native engine knows"):
        make_engine(model)
    activation = make_model("qwen3_next")
    activation.model.layers[0].linear_attn.activation = "gelu"
    with pytest.raises(UnsupportedModel, match="Qwen3NextGatedDeltaNet with activation gelu; not supported"):
        make_engine(activation)
    mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(UnsupportedModel):
        make_engine(mamba)
