"""Drafters that run a model: what they draft is right where it can be, what they hold is bounded and given back.

Verified by match; by rejection: tests/partial_rollout/test_rejection.py.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run
from tests.partial_rollout.test_drafting import LENGTH, groups
from tests.partial_rollout.test_windows import make_model as make_windowed

from longtail import NativeEngine
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.coupling import coupling
from longtail.partial_rollout.engines.native.model_drafter import DecoderDrafter, ModelDrafter, SelfDrafter
from longtail.sample import Sample
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.drafter import Draft, DraftRequest


@functools.cache
def small_model() -> Any:
    """Other weights, sizes and layers than the target, the same vocabulary."""
    return make_model("llama", seed=5, num_hidden_layers=1, hidden_size=32)


def close_model(model: Any, noise: float = 0.004) -> Any:
    """The model, a little off: often right, not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in other.parameters():
            p += noise * torch.randn(p.shape, generator=generator)
    return other


@functools.cache
def target(kind: str) -> Any:
    if kind in ("gemma3", "mistral"):
        return make_windowed(kind)
    return make_model(kind)


def drafter_of(engine: NativeEngine) -> Any:
    assert engine.speculation is not None
    return engine.speculation.drafter


def step_all(engine: NativeEngine, samples: Sequence[Sample] = ()) -> None:
    """Blocks of the drafter add up between all steps, and none is held in the end."""
    engine.add(samples)
    drafter = drafter_of(engine)
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        drafter.check_integrity()
    assert drafter.kv.num_free == drafter.kv.num_blocks
    assert not drafter._held


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-interface", "gemma3", "mistral"])
def test_the_same_samples_with_any_model(make_engine: EngineMaker, kind: str) -> None:
    kind, _, path = kind.partition("-")
    model = target(kind)
    engine = make_engine(model, fused=False if path else None)
    want = generate(engine, *groups())
    everything = range(len(engine.spec.layers))
    made: dict[str, DecoderDrafter] = {
        "itself": ModelDrafter(model, fused=False if path else None),
        "all layers": SelfDrafter(everything),
        "close": ModelDrafter(close_model(model)),
        "small": ModelDrafter(small_model()),
        "half": SelfDrafter(),
    }
    rates = {}
    for name, drafter in made.items():
        for length in (1, 4) if name == "close" else (4,):
            before = engine.stats()
            engine.use_drafter(drafter, FixedLength(length))
            engine.reset_prefix_cache()
            samples = [s for g in groups() for s in g.samples]
            step_all(engine, samples)
            for got, expected in zip(samples, want, strict=True):
                assert_same(got, expected)
            after = engine.stats()
            drafted = after.num_draft_tokens - before.num_draft_tokens
            rates[name] = (after.num_accepted_tokens - before.num_accepted_tokens) / drafted
            assert drafted > 100
    assert rates["itself"] == rates["all layers"] == 1.0  # also where samples end
    assert rates["small"] < rates["close"] < 1.0
    assert rates["small"] < 0.2
    assert rates["half"] < 1.0


def test_drafts_do_not_depend_on_what_was_drafted_before(make_engine: EngineMaker) -> None:
    """After rejected drafts, with others in the batch, by whatever chunks it caught up: as a fresh drafter's, that has
    seen nothing but the committed tokens of one sample."""
    model = target("llama")
    engine, other = make_engine(max_num_batched_tokens=16), make_engine()
    drafter, fresh = ModelDrafter(close_model(model, 0.02)), ModelDrafter(close_model(model, 0.02))
    checked, propose = [0, 0], drafter.propose

    def compared(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = propose(requests)
        for request, draft in zip(requests, drafts, strict=True):
            if not draft.tokens:
                continue
            other.use_drafter(fresh)
            (expected,) = fresh.propose([request])
            assert draft.tokens == expected.tokens
            assert draft.probs == expected.probs
            checked[0] += 1
            checked[1] += len(draft)
        return drafts

    drafter.propose = compared  # type: ignore[method-assign]
    engine.use_drafter(drafter, FixedLength(4))
    generate(engine, *groups())
    stats = engine.stats()
    assert 0.1 * stats.num_draft_tokens < stats.num_accepted_tokens < 0.9 * stats.num_draft_tokens
    assert checked[0] > 100


class Choosy(FixedLength):
    """Verifies a part of each draft, another one every time."""

    turn = 0

    def plan(self, acceptance: Any, *args: Any) -> Any:
        plan = super().plan(acceptance, *args)
        self.turn += 1
        plan.lengths[:] = [n * (i + self.turn) % (n + 1) for i, n in enumerate(plan.lengths)]
        return plan


def test_drafts_that_are_cut(make_engine: EngineMaker) -> None:
    """What was drafted beyond the verified tokens may come true all the same."""
    want = generate(make_engine(), *groups())
    engine = make_engine(drafter=ModelDrafter(target("llama")), controller=Choosy(5))
    samples = [s for g in groups() for s in g.samples]
    step_all(engine, samples)
    for got, expected in zip(samples, want, strict=True):
        assert_same(got, expected)
    stats = engine.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


def rows_computed(drafter: DecoderDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the rows, without padding, of each of the drafter's passes."""
    rows: list[int] = []
    assert drafter.decoder is not None
    forward = drafter.decoder.forward

    def counted(batch: ForwardBatch, cache: Any) -> torch.Tensor:
        rows.append(int(batch.cu_seqlens[-1]))
        return forward(batch, cache)

    monkeypatch.setattr(drafter.decoder, "forward", counted)
    return rows


def test_each_token_is_computed_once(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of a group once, in chunks of at most a pass; after accepted drafts only the token after them."""
    drafter = ModelDrafter(target("llama"))
    engine = make_engine(drafter=drafter, controller=FixedLength(3), max_num_batched_tokens=24)
    rows = rows_computed(drafter, monkeypatch)
    samples = generate(engine, group("a", prompt(97), n=4, max_tokens=LENGTH))
    assert max(rows) <= 24
    outputs = sum(len(s.output_ids) for s in samples)
    assert 96 + 4 < sum(rows) <= 96 + 4 + outputs  # all blocks of the prompt are shared, its last token is not
    stats = engine.stats()
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 0.6 * outputs


def test_a_resumed_sample_is_caught_up_with(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a drafter that knows it, what is new; also if the sample is another object, read from a store."""
    drafter = ModelDrafter(target("llama"))
    engine = make_engine(drafter=drafter, controller=FixedLength(3))
    rows = rows_computed(drafter, monkeypatch)
    want = generate(make_engine(), group("a", prompt(30), max_tokens=100))[0]
    (sample,) = group("a", prompt(30), max_tokens=100).samples
    run(engine, [sample], until=40)
    engine.pause()
    known = sum(rows)
    again = copy.copy(sample)
    elsewhere = make_engine()
    again.output_ids, again.snapshot = list(sample.output_ids), None
    run(elsewhere, [again], until=60)
    elsewhere.pause()
    again.snapshot = None
    rows.clear()
    step_all(engine, [again])
    assert_same(again, want)
    assert known >= 60
    assert sum(rows) <= 60 + 3 + engine.config.block_size  # it may have changed meanwhile: full blocks are kept
    # One of the same id with other tokens, in the prompt or behind it, is not taken for it.
    for ids, seed in ((prompt(30, 1), 7), (prompt(30), 8)):
        (other,) = group("a", ids, max_tokens=60, seed=seed).samples
        expected = generate(make_engine(), group("a", ids, max_tokens=60, seed=seed))[0]
        run(elsewhere, [other], until=50)
        elsewhere.pause()
        other.snapshot = None
        (sample,) = group("a", prompt(30), max_tokens=100).samples
        run(engine, [sample], until=40)
        engine.pause()
        before = engine.stats()
        step_all(engine, [other])
        assert_same(other, expected)
        after = engine.stats()
        drafted = after.num_draft_tokens - before.num_draft_tokens
        assert drafted == after.num_accepted_tokens - before.num_accepted_tokens > 0


def test_tight_memory_means_fewer_drafts(make_engine: EngineMaker) -> None:
    """Room for little more than one sample: the others get none, nobody fails, nobody waits for ever."""
    many = [group(f"g{i}", prompt(30, i), max_tokens=60) for i in range(6)]
    want = generate(make_engine(), *many)
    one = make_engine().kv.bytes_per_block
    drafted = []
    for blocks in (10, 17, 64):
        drafter = ModelDrafter(target("llama"), kv_cache_bytes=blocks * one)
        engine = make_engine(max_model_len=160, drafter=drafter, controller=FixedLength(3))
        assert drafter.kv is not None
        assert drafter.kv.num_blocks == blocks
        samples = [group(f"g{i}", prompt(30, i), max_tokens=60).samples[0] for i in range(6)]
        step_all(engine, samples)
        for got, expected in zip(samples, want, strict=True):
            assert_same(got, expected)
        stats = engine.stats()
        assert stats.num_draft_tokens == stats.num_accepted_tokens
        drafted.append(stats.num_draft_tokens)
    assert 40 < drafted[0] < drafted[1] < drafted[2]


def test_idle_samples_make_room(make_engine: EngineMaker) -> None:
    """Those not asked for lately first."""
    one = make_engine().kv.bytes_per_block
    drafter = ModelDrafter(target("llama"), kv_cache_bytes=10 * one)
    engine = make_engine(max_model_len=160, drafter=drafter, controller=FixedLength(3))
    paused = []
    for i in range(5):  # 3 to 4 blocks each
        (sample,) = group(f"g{i}", prompt(35, i), max_tokens=60).samples
        run(engine, [sample], until=12)
        paused += engine.pause()
        drafter.check_integrity()
        assert sample.id in drafter._held
        assert list(drafter._held) == [s.id for s in paused[-len(drafter._held) :]]
        assert len(drafter._held) == min(i + 1, 3)
    step_all(engine, paused[2:])
    step_all(engine, paused[:2])


def test_a_drafter_of_fewer_positions(make_engine: EngineMaker) -> None:
    """Beyond the positions of the draft model there are no drafts."""
    want = generate(make_engine(), group("a", prompt(20), max_tokens=80))[0]
    short = make_model("llama", max_position_embeddings=64)
    engine = make_engine(drafter=ModelDrafter(short), controller=FixedLength(4))
    (sample,) = group("a", prompt(20), max_tokens=80).samples
    step_all(engine, [sample])
    assert_same(sample, want)
    stats = engine.stats()
    assert 64 - 20 - 16 < stats.num_draft_tokens == stats.num_accepted_tokens <= 64 - 20 + 1


def test_across_updates_of_the_weights(make_engine: EngineMaker) -> None:
    """`self` follows the target at once, a draft model when it is given weights."""
    weights = make_model("llama", seed=1).state_dict()
    plain = make_engine(make_model("llama", seed=1), version=1)
    fresh = generate(plain, *(group(f"f{i}", prompt(9, i)) for i in range(3)))
    for drafter in (SelfDrafter([0, 1]), ModelDrafter(target("llama"))):
        engine = make_engine(drafter=drafter, controller=FixedLength(4))
        samples = [group(f"g{i}", prompt(9, i), max_tokens=90).samples[0] for i in range(3)]
        run(engine, samples, until=12)
        cuts = [len(s.output_ids) for s in samples]
        engine.update_weights(weights, 1)
        if isinstance(drafter, ModelDrafter):
            drafter.load_weights(weights)
            drafter.check_integrity()
        step_all(engine)
        for i, (sample, cut) in enumerate(zip(samples, cuts, strict=True)):
            undrafted = make_engine()
            (want,) = group(f"g{i}", prompt(9, i), max_tokens=90).samples
            run(undrafted, [want], until=cut)
            undrafted.update_weights(weights, 1)
            run(undrafted)
            assert_same(sample, want)
        again = [group(f"f{i}", prompt(9, i)).samples[0] for i in range(3)]
        step_all(engine, again)
        for got, expected in zip(again, fresh, strict=True):
            assert_same(got, expected)
        stats = engine.stats()
        assert stats.num_draft_tokens == stats.num_accepted_tokens > 0


def test_a_stale_draft_model_is_only_slow(make_engine: EngineMaker) -> None:
    weights = make_model("llama", seed=1).state_dict()
    fresh = generate(make_engine(make_model("llama", seed=1), version=1), group("a", prompt(9)))
    engine = make_engine(drafter=ModelDrafter(target("llama")), controller=FixedLength(4))
    engine.update_weights(weights, 1)
    samples = group("a", prompt(9)).samples
    step_all(engine, samples)
    assert_same(samples[0], fresh[0])
    stats = engine.stats()
    assert stats.num_accepted_tokens < 0.2 * stats.num_draft_tokens
    drafter = drafter_of(engine)
    with pytest.raises(ValueError, match=r"weights: .* parameters are missing"):
        drafter.load_weights({})
    drafter.load_weights(weights)
    step_all(engine, group("b", prompt(9)).samples)
    now = engine.stats()
    accepted = now.num_accepted_tokens - stats.num_accepted_tokens
    assert accepted == now.num_draft_tokens - stats.num_draft_tokens > 0


def test_broken_weights_draft_nothing(make_engine: EngineMaker, caplog: pytest.LogCaptureFixture) -> None:
    want = generate(make_engine(), group("a", prompt(9)))[0]
    broken = close_model(small_model(), math.nan)
    drafter = ModelDrafter(small_model())
    engine = make_engine(drafter=drafter, controller=FixedLength(4))
    drafter.load_weights(dict(broken.named_parameters()))
    (sample,) = group("a", prompt(9)).samples
    with caplog.at_level(logging.WARNING):
        step_all(engine, [sample])
    assert_same(sample, want)
    assert engine.stats().num_draft_tokens == 0
    warnings = [r.getMessage() for r in caplog.records if "draft_model" in r.getMessage()]
    assert warnings == ["drafter draft_model: its logits have NaN or +inf; samples get no drafts where that is so"]


def test_chosen_by_name(make_engine: EngineMaker, tmp_path: Path) -> None:
    target("llama").save_pretrained(tmp_path / "model")
    want = generate(make_engine(), group("a", prompt(9), n=3))
    for name in (f"model:{tmp_path / 'model'}", "self:0,1", "self", "group > self:0,1", f"self>model:{tmp_path}/model"):
        engine = make_engine(drafter=name, controller=FixedLength(4))
        for got, expected in zip(generate(engine, group("a", prompt(9), n=3)), want, strict=True):
            assert_same(got, expected)
        stats = engine.stats()
        assert stats.num_accepted_tokens > 0
        if name.startswith("model") or name == "self:0,1":
            assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("selfs", "no drafter 'selfs'; did you mean 'self'"),
        ("self:", 'names no layers; write for example "self:0,2,4"'),
        ("self:1,x", "names no layers"),
        ("self:1,0", r"layers must be indices in rising order, each once, not \[1, 0\]"),
        ("self:0,7", "layers names 7, the target has 2 layers"),
        ("model:", "names no model"),
        ("model:/nowhere/at/all", "is not a model directory"),
        ("self>self", "names one drafter twice"),
    ],
)
def test_bad_choices_are_refused(make_engine: EngineMaker, choice: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_engine(drafter=choice)


def test_a_drafter_that_does_not_fit_is_refused(make_engine: EngineMaker) -> None:
    other = make_model("llama", vocab_size=300)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a vocabulary of 300 tokens, the target one of 512"):
        make_engine(drafter=ModelDrafter(other))
    with pytest.raises(ValueError, match=r"drafter draft_model: kv_cache_bytes leaves .*the drafter's own"):
        make_engine(drafter=ModelDrafter(small_model(), kv_cache_bytes=5000))
    with pytest.raises(ValueError, match="kv_cache_bytes must be at least 1"):
        ModelDrafter(small_model(), kv_cache_bytes=0)
    with pytest.raises(ValueError, match="drafter draft_model: it belongs to no engine yet"):
        ModelDrafter(small_model()).propose([])


def test_acceptance_is_within_its_bounds(make_engine: EngineMaker) -> None:
    """Match accepts at a position with a probability between (1 - TV) / (1 + TV) and 1 - TV, whatever came before it.
    So by Hoeffding and Azuma the sums of n positions keep to that within sqrt(n * log(1 / a) / 2), but for a
    probability of a; a = 1e-7 here, for each of 10 comparisons."""
    model = target("llama")
    params: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"top_k": 5, "top_p": 0.9}]
    chosen = [group(f"g{i}", prompt(9, i), n=6, max_tokens=100, **p) for i, p in enumerate(params)]
    engine = make_engine()
    samples = generate(engine, *chosen)
    for noise, least in ((0.004, 0.5), (0.01, 0.3), (0.03, 0.05), (None, 0.0)):
        drafter = ModelDrafter(small_model() if noise is None else close_model(model, noise))
        engine.use_drafter(drafter)
        found = coupling(engine, drafter, samples)
        assert found.positions == sum(len(s.output_ids) for s in samples)
        slack = math.sqrt(math.log(1e7) / (2 * found.positions))
        assert found.bound - slack <= found.match <= found.rejection + slack
        assert least <= found.bound <= found.rejection < 1.0
    engine.use_drafter(twin := SelfDrafter([0, 1]))
    found = coupling(engine, twin, samples)
    assert found.match == 1.0
    assert found.rejection == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="none of them has output"):
        coupling(engine, twin, group("x", prompt(3)).samples)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 19)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("pause"), st.integers(0, 19)),
        st.tuples(st.just("pause all"), st.just(0)),
        st.tuples(st.just("drafter"), st.integers(0, 4)),
        st.tuples(st.just("forget prefixes"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("blocks", [17, 64], ids=["tight", "roomy"])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS)
def test_random_lives(make_engine: EngineMaker, blocks: int, actions: list[tuple[str, int]]) -> None:
    """Samples are paused at random, blocks run out for target and drafter, drafters come and go."""
    engine, want, drafters = _life(make_engine, blocks)
    engine.reset_prefix_cache()
    engine.use_drafter(drafters[0], Choosy(4))
    samples = [s for g in groups() for s in g.samples]
    inside: set[str] = set()
    for action, number in actions:
        sample = samples[number % len(samples)]
        if action == "add" and sample.id not in inside and not sample.is_done:
            engine.add([sample])
        elif action == "step":
            for _ in range(number):
                engine.step()
                engine.check_integrity()
                drafter_of(engine).check_integrity()
        elif action == "pause" and sample.id in inside:
            engine.pause([sample.id], snapshot=number % 2 == 0)
        elif action == "pause all":
            engine.pause()
        elif action == "drafter":
            engine.use_drafter(drafters[number], Choosy(4))
        elif action == "forget prefixes":
            engine.reset_prefix_cache()
        inside = {s.id for s in samples if s.status in ("waiting", "running") and s.id in engine._sequences}
    step_all(engine, [s for s in samples if s.id not in inside and not s.is_done])
    for sample in samples:
        assert_same(sample, want[sample.id])


@functools.cache
def _life(make_engine: EngineMaker, blocks: int) -> tuple[NativeEngine, dict[str, Sample], list[DecoderDrafter]]:
    model = target("llama")
    one = make_engine().kv.bytes_per_block
    engine = make_engine(kv_cache_bytes=blocks * one, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=24)
    drafters = [
        ModelDrafter(close_model(model), kv_cache_bytes=blocks * one),
        SelfDrafter(),
        ModelDrafter(model, kv_cache_bytes=16 * one),
        ModelDrafter(small_model()),
        SelfDrafter([0, 1], kv_cache_bytes=20 * one),
    ]
    return engine, {s.id: s for s in generate(make_engine(), *groups())}, drafters
