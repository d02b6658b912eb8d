"""Recorded routing: of every position the experts that computed it, whatever happened to the sample on its way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.partial_rollout import test_latent, test_moe
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run
from tests.partial_rollout.drafters import drafter
from tests.partial_rollout.test_tiers_engine import evict
from transformers import PreTrainedModel

from longtail import NativeEngine, Rollout, RoutedExperts, Sample, TokenBudget, UnsupportedModel
from longtail.kv_manager.tier_config import TierConfig
from longtail.partial_rollout.engines.native import moe
from longtail.partial_rollout.engines.native.verification import Verdict
from longtail.spec_decode.controller import FixedLength

LENGTH = 20
KINDS = ["qwen3_moe", "deepseek_v3"]
"""Full attention; latents, with a first layer that has no experts."""


def make_moe(kind: str) -> PreTrainedModel:
    return test_moe.make_model(kind) if kind in test_moe.CONFIGS else test_latent.make_model(kind)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_moe("deepseek_v3")


@pytest.fixture(scope="module")
def make(make_engine: EngineMaker, model: PreTrainedModel) -> EngineMaker:
    return lambda other=None, **settings: make_engine(other or model, **{"record_routing": True} | settings)


@pytest.fixture(scope="module")
def engine(make: EngineMaker) -> NativeEngine:
    return make()


@pytest.fixture(scope="module")
def expected(engine: NativeEngine) -> Sample:
    """Undisturbed, alone."""
    return generate(engine, group("a", prompt(21), max_tokens=LENGTH))[0]


def rows(sample: Sample) -> np.ndarray:
    assert sample.routed_experts is not None
    return np.asarray(sample.routed_experts)


@torch.no_grad()
def routing_of(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """[tokens, layers, top_k] of the model's own forward pass, experts of a token in ascending order."""
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
        for module in model.modules()
        if moe.form_of(module) is not None
    ]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).sort(-1).values.numpy()


def assert_same_routing(got: Sample, want: Sample) -> None:
    assert_same(got, want)
    assert got.routed_experts == want.routed_experts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_it_is_the_models_routing(make_engine: EngineMaker, kind: str, numerics: str) -> None:
    """Of all tokens but the last, which no pass computed."""
    model = make_moe(kind)
    engine = make_engine(model, record_routing=True, numerics=numerics)
    for sample in generate(engine, *(group(f"g{i}", prompt(9 + 14 * i, i), n=2) for i in range(3))):
        ids = [*sample.prompt_ids, *sample.output_ids]
        assert rows(sample).dtype == np.int16 and len(rows(sample)) == len(ids) - 1
        assert np.array_equal(np.sort(rows(sample), axis=-1), routing_of(model, ids)[:-1])


def test_recording_changes_nothing(make: EngineMaker, expected: Sample) -> None:
    plain = generate(make(record_routing=False), group("a", prompt(21), max_tokens=LENGTH))[0]
    assert_same(plain, expected)
    assert plain.routed_experts is None


@pytest.mark.parametrize("snapshot", [True, False], ids=["from-snapshot", "from-tokens"])
def test_cut_at_every_position(engine: NativeEngine, expected: Sample, snapshot: bool) -> None:
    for cut in range(1, LENGTH):
        engine.reset_prefix_cache()
        sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
        run(engine, [sample], until=cut)
        assert len(rows(sample)) == 21 + cut - 1  # up to date while it runs, too
        engine.pause(snapshot=snapshot)
        engine.reset_prefix_cache()
        run(engine, [sample])
        assert_same_routing(sample, expected)


def test_a_prompt_from_the_cache_brings_its_routing(engine: NativeEngine, make: EngineMaker) -> None:
    """Siblings share blocks, the last one partly filled and copied when they part; a later group finds them again."""
    alone = generate(make(enable_prefix_caching=False, max_num_seqs=1), group("g", prompt(50), n=5))
    engine.reset_prefix_cache()
    for _ in range(2):
        before = engine.stats().num_cached_tokens
        for got, want in zip(generate(engine, group("g", prompt(50), n=5)), alone, strict=True):
            assert_same_routing(got, want)
        assert engine.stats().num_cached_tokens >= before + 4 * 49


def test_a_saved_prompt_of_a_sibling_brings_its_routing(make: EngineMaker) -> None:
    want = generate(make(), group("g", prompt(50), n=2))
    engine = make()
    first, second = group("g", prompt(50), n=2).samples
    run(engine, [first], until=5)
    engine.pause()
    engine.reset_prefix_cache()  # what is left of the prompt is in the first one's snapshot
    run(engine, [second])
    assert engine.stats().num_cached_tokens > 0
    run(engine, [first])
    for got, other in zip((first, second), want, strict=True):
        assert_same_routing(got, other)


@pytest.mark.parametrize("preemption", ["snapshot", "recompute"])
def test_after_preemption(make: EngineMaker, engine: NativeEngine, preemption: str) -> None:
    want = generate(engine, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    size = sum(g.layout.block_bytes for g in engine.kv.groups)
    tight = make(kv_cache_bytes=18 * size, max_model_len=160, preemption=preemption, max_num_batched_tokens=24)
    got = generate(tight, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    assert tight.stats().num_preemptions > 0
    for a, b in zip(got, want, strict=True):
        assert_same_routing(a, b)


def test_drafts_leave_no_trace(make: EngineMaker) -> None:
    """Accepted ones are recorded as what they are, rejected ones not at all."""
    plain = generate(make(), group("g", prompt(30), n=3, max_tokens=30))
    engine = make(drafter=drafter("half right", plain), controller=FixedLength(4))
    drafted = generate(engine, group("g", prompt(30), n=3, max_tokens=30))
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for got, want in zip(drafted, plain, strict=True):
        assert_same_routing(got, want)


@pytest.mark.parametrize("encoding", ["exact", "int8"])
def test_snapshots_on_disk_hold_it(make: EngineMaker, expected: Sample, tmp_path: Path, encoding: str) -> None:
    """Latents and experts are exact in either encoding."""
    engine = make(snapshot_encoding=encoding, tiers=TierConfig(disk=tmp_path))
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    run(engine, [sample], until=7)
    engine.pause()
    evict(engine)
    sample.routed_experts = None  # only the file knows
    engine.reset_prefix_cache()
    run(engine, [sample])
    assert sample.segments[-1].kv == "restored"
    assert_same_routing(sample, expected)


def test_a_store_continues_it(make: EngineMaker, expected: Sample, tmp_path: Path) -> None:
    with Rollout(make(), strategy=TokenBudget(6, per="sample"), store=tmp_path) as rollout:
        rollout.submit([group("a", prompt(21), max_tokens=LENGTH)])
        assert not rollout.collect()
    with Rollout(make(), store=tmp_path) as rollout:
        (paused,) = rollout.store.unfinished()
        assert np.array_equal(rows(paused), rows(expected)[: 21 + 6 - 1])
        (done,) = rollout.collect()
        assert_same_routing(done.samples[0], expected)


# ---- other weights


def changed(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {k: v + 0.05 * torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_after_an_update_old_tokens_keep_their_routing(make: EngineMaker, model: PreTrainedModel, keep: bool) -> None:
    """Their log-probabilities were made by it. With KV computed again, what follows is routed as the new model does."""
    engine = make(kv_on_update="keep" if keep else "recompute")
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    run(engine, [sample], until=8)
    before, weights = rows(sample), changed(model)
    engine.update_weights(weights, 1)
    run(engine)
    after = rows(sample)
    assert len(before) == 28 and len(after) == 40
    assert np.array_equal(after[:28], before)
    twin = make_moe("deepseek_v3")
    twin.load_state_dict(weights)
    new = routing_of(twin, [*sample.prompt_ids, *sample.output_ids])[:-1]
    assert not np.array_equal(new[:28], np.sort(before, axis=-1))
    if not keep:
        assert np.array_equal(new[28:], np.sort(after[28:], axis=-1))


def test_a_prompt_without_output_is_routed_anew(make: EngineMaker, model: PreTrainedModel) -> None:
    engine = make(max_num_batched_tokens=8)
    sample = group("a", prompt(21), max_tokens=4).samples[0]
    engine.add([sample])
    engine.step()
    assert len(rows(sample)) == 8
    weights = changed(model)
    engine.update_weights(weights, 1)
    run(engine)
    twin = make_moe("deepseek_v3")
    twin.load_state_dict(weights)
    want = routing_of(twin, [*sample.prompt_ids, *sample.output_ids])[:-1]
    assert np.array_equal(np.sort(rows(sample), axis=-1), want)


# ---- what cannot be


@pytest.mark.parametrize("where", ["verify", "_commit"])
def test_a_step_that_fails_leaves_no_row_behind(
    make: EngineMaker, expected: Sample, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = make()
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    run(engine, [sample], until=5)
    original, fails = getattr(engine.stepper, where), True

    def flaky(*args: Any) -> Any:
        if fails:
            raise RuntimeError("struck")
        return original(*args)

    monkeypatch.setattr(engine.stepper, where, flaky)
    with pytest.raises(RuntimeError, match="struck"):
        engine.step()
    engine.check_integrity()
    engine.pause()  # records what is computed
    fails = False
    run(engine, [sample])
    assert_same_routing(sample, expected)


def test_a_sample_that_fails_has_the_rows_of_its_tokens(
    make: EngineMaker, expected: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position whose logits were bad has no token after it."""
    engine = make()
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    run(engine, [sample], until=5)
    monkeypatch.setattr(engine.stepper, "verify", lambda *_: [Verdict([-1], [0.0], "a NaN")])
    engine.step()
    assert sample.status == "failed" and len(sample.output_ids) == 5
    assert np.array_equal(rows(sample), rows(expected)[:25])
    sample.check_integrity()


def test_models_that_cannot_are_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="record_routing: LlamaForCausalLM has no experts"):
        make_engine(make_model("llama"), record_routing=True)
    odd = test_moe.make_model("mixtral", hidden_act="relu")
    with pytest.raises(UnsupportedModel, match=r"record_routing.*MixtralExperts.*not understood"):
        make_engine(odd, record_routing=True, numerics="fast")


def test_a_sample_of_another_model_is_refused(engine: NativeEngine) -> None:
    sample = group("a", prompt(5)).samples[0]
    sample.routed_experts = RoutedExperts(5, 2)
    with pytest.raises(ValueError, match=r"sample a/0: routed_experts are of 5 layers and 2 experts.*has 2 and 3"):
        engine.add([sample])
