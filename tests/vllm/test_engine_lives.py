"""Random lives of samples on vLLM: blocks balance at every moment and all come back, nothing is kept of what is gone,
and what comes out is what an undisturbed run makes. And what the engine tells of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.partial_rollout.conftest import group, prompt
from tests.vllm.conftest import EngineMaker, assert_same, generate, run
from transformers import LlamaForCausalLM

from longtail import Rollout, Sample
from longtail.events import Event
from longtail.partial_rollout.strategies import ContextAware, OverIssue, Strategy, Sync, TokenBudget

ACTIONS = 1000


def make_samples(life: int) -> list[Sample]:
    """Three groups of three; lengths and prompts that cross block boundaries in different places."""
    return [
        sample
        for i in range(3)
        for sample in group(f"g{i}", prompt(14 + 17 * i, i), n=3, max_tokens=9 + 12 * i, seed=10 * life + i).samples
    ]


def lose_a_step(engine: Any, early: bool) -> None:
    """vLLM raises in the middle of one: before its workers hear of it, or when they are to sample."""
    where, name = engine.core.runner.sampler, "_sample"
    if early:
        where, name = engine.core.llm.engine_core.engine_core.model_executor, "execute_model"

    def lost(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, lost)
        with pytest.raises(KeyboardInterrupt, match="planted"):
            engine.step()


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_a_thousand_random_actions(make_vllm: EngineMaker, tiny: LlamaForCausalLM, tight: bool) -> None:
    block = 2 * 2 * 32 * 32 * 4
    settings = {"kv_cache_bytes": 6 * block, "max_model_len": 128, "max_num_batched_tokens": 24} if tight else {}
    engine = make_vllm(**settings)
    start = engine.stats()
    assert start.num_free_blocks == start.num_blocks
    rng = random.Random(int(tight))
    weights = tiny.state_dict()
    if engine.version:
        engine.update_weights(weights, engine.version + 1)
    expected: dict[int, list[Sample]] = {}
    life, samples, aborted = 0, make_samples(0), set[int]()
    counts = dict.fromkeys(("add", "step", "pause", "pause all", "abort", "update", "forget", "lost"), 0)
    weighted = rng.choices(list(counts), [30, 50, 12, 3, 2, 2, 1, 2], k=ACTIONS)
    lives = [samples]
    for action in weighted:
        if all(s.is_done for s in samples):
            life += 1
            samples = make_samples(life)
            lives.append(samples)
        sample = rng.choice(samples)
        inside = sample.id in engine._sequences
        counts[action] += 1
        if action == "add" and not inside and not sample.is_done:
            engine.add([sample])
        elif action == "step":
            engine.step()
        elif action == "pause" and inside:
            engine.pause([sample.id], snapshot=rng.random() < 0.5)
        elif action == "pause all":
            engine.pause()
        elif action == "abort" and inside:
            engine.abort([sample.id])
            aborted.add(id(sample))
        elif action == "update":
            engine.update_weights(weights, engine.version + 1)
        elif action == "forget":
            engine.reset_prefix_cache()
        elif action == "lost" and any(stay.request_id for stay in engine._sequences.values()):
            lose_a_step(engine, early=rng.random() < 0.7)
        engine.check_integrity()
    assert all(counts.values()), counts
    engine.pause()
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks == start.num_blocks
    run(engine, [s for s in samples if not s.is_done])
    if tight:
        assert engine.stats().num_preemptions > start.num_preemptions
    last = generate(engine, group("last", prompt(5)))[0]  # vLLM's workers forget what has ended at the next step
    assert all(i.startswith(last.id) for i in engine.core.runner.requests)
    assert len(engine.core.runner.sampler._rows) <= 1
    assert engine.stats().num_free_blocks == start.num_blocks
    for number, made in enumerate(lives):
        expected[number] = make_samples(number)
        run(engine, expected[number])
        for got, want in zip(made, expected[number], strict=True):
            if id(got) in aborted:
                assert got.finish_reason == "aborted"
                assert got.output_ids == want.output_ids[: len(got.output_ids)]
            else:
                assert_same(got, want)
            assert got.versions == sorted(got.versions)


@pytest.mark.parametrize("early", [True, False], ids=["before-the-pass", "at-sampling"])
def test_what_a_lost_step_scheduled_is_not_taken_for_computed(make_vllm: EngineMaker, early: bool) -> None:
    """vLLM counts blocks as cached when it schedules them."""
    engine = make_vllm()
    expected = generate(engine, group("a", prompt(70)))[0]
    engine.reset_prefix_cache()
    before = engine.stats().num_cached_tokens
    sample = group("a", prompt(70)).samples[0]
    engine.add([sample])
    lose_a_step(engine, early)
    run(engine)
    assert engine.stats().num_cached_tokens == before
    assert_same(sample, expected)
    assert [s.kv for s in sample.segments] == ["computed"]


def test_a_resume_finds_what_was_computed(make_vllm: EngineMaker) -> None:
    """All full blocks of what was computed come from the cache; less than a block is computed again. Without the cache
    all of it is."""
    engine = make_vllm(save_kv=False)
    for forget in (False, True):
        for cut in (1, 10, 11, 12, 44):
            engine.reset_prefix_cache()
            sample = group("a", prompt(21), max_tokens=60).samples[0]
            run(engine, [sample], until=cut)
            engine.pause()
            if forget:
                engine.reset_prefix_cache()
            before = engine.stats()
            engine.add([sample])
            engine.step()
            after = engine.stats()
            known = 21 + cut
            full = 0 if forget else (known - 1) // 32 * 32
            assert after.num_cached_tokens - before.num_cached_tokens == full
            assert after.num_recomputed_tokens - before.num_recomputed_tokens == known - 1 - full
            engine.abort([sample.id])


def test_siblings_share_their_prompt(make_vllm: EngineMaker) -> None:
    engine = make_vllm()
    before = engine.stats().num_cached_tokens
    events: list[Event] = []
    engine.listener = events.append
    samples = group("g", prompt(70), n=6, max_tokens=3).samples
    run(engine, samples[:1])
    run(engine, samples[1:])
    engine.listener = lambda event: None
    assert engine.stats().num_cached_tokens - before == 5 * 64
    assert sum(e.num_prefill_tokens for e in events if e.kind == "step") == 70 + 5 * 6
    assert len({tuple(s.output_ids) for s in samples}) == 6


def test_events_by_hand(make_vllm: EngineMaker) -> None:
    engine = make_vllm()
    events: list[Event] = []
    engine.listener = events.append
    sample = group("a", prompt(21), max_tokens=4).samples[0]
    run(engine, [sample], until=2)
    engine.pause()
    run(engine, [sample])
    engine.listener = lambda event: None
    told = [(e.kind, e.num_tokens, e.value) for e in events if e.kind not in ("step", "first_token")]
    saved = [("save", 22, 0), ("pause", 2, 1), ("restore", 22, 0)]
    assert told == [("admit", 0, 21), *saved, ("admit", 22, 23), ("finish", 4, 0)]
    steps = [e for e in events if e.kind == "step"]
    assert [(e.num_tokens, e.num_prefill_tokens, e.num_context_tokens, e.num_output_tokens) for e in steps] == [
        (21, 21, 21, 1),
        (1, 0, 22, 1),
        (1, 0, 23, 1),
        (1, 0, 24, 1),
    ]
    assert {e.engine for e in events} == {"vllm"} and {e.sample for e in events if e.kind != "step"} == {"a/0"}
    assert sum(e.kind == "first_token" for e in events) == 1
    for event in steps:
        assert 0.0 < event.sample_seconds < event.duration and event.model_seconds > 0.0
    assert sample.timings.running > 0.5 * sum(event.duration for event in steps)


def test_a_listener_that_raises(make_vllm: EngineMaker) -> None:
    """Costs no token."""
    engine = make_vllm()
    expected = generate(engine, group("a", prompt(21)))[0]

    def angry(event: Event) -> None:
        raise OSError("planted")

    sample = group("a", prompt(21)).samples[0]
    engine.add([sample])
    engine.listener = angry
    for _ in range(10):
        with pytest.raises(OSError, match="planted"):
            engine.step()
    engine.listener = lambda event: None
    assert len(sample.output_ids) == 10
    run(engine)
    assert_same(sample, expected)


STRATEGIES: dict[str, Strategy] = {
    "sync": Sync(),
    "token-budget": TokenBudget(50),
    "token-budget-of-sample": TokenBudget(10, per="sample"),
    "over-issue": OverIssue(groups=2),
    "context-aware": ContextAware(chunk=7, fairness=3),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_makes_the_same_samples(make_vllm: EngineMaker, tiny: LlamaForCausalLM, name: str) -> None:
    """With an update of the weights (to the same) after every iteration."""
    lengths = [3, 40, 8, 25, 12, 60]

    def groups() -> list:
        return [group(f"g{i}", prompt(7 + i, i), n=2, max_tokens=n) for i, n in enumerate(lengths)]

    engine = make_vllm(max_num_seqs=4)
    weights = tiny.state_dict()
    engine.update_weights(weights, engine.version + 1)
    plain = {s.id: s for s in generate(engine, *groups())}
    rollout = Rollout(engine, strategy=STRATEGIES[name])
    submitted = groups()
    rollout.submit(submitted)
    handed: list[str] = []
    while len(rollout.store):
        handed += [g.id for g in rollout.collect()]
        rollout.update_weights(weights, engine.version + 1)
        engine.check_integrity()
    assert sorted(handed) == sorted(g.id for g in submitted)
    for g in submitted:
        for sample in g.samples:
            assert_same(sample, plain[sample.id])
            assert sample.versions == sorted(sample.versions)
    rollout.store.check_integrity()
    assert not engine.has_work
