"""Speculative decoding in the native engine: with any drafter, or none, the same tokens and log-probabilities.

The yardstick is the engine without drafts, which tests/partial_rollout/test_exactness.py holds to its own.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.partial_rollout.conftest import VOCAB, EngineMaker, assert_same, generate, group, make_model, prompt, run
from tests.partial_rollout.drafters import NAMES, Oracle, drafter
from tests.partial_rollout.test_windows import make_model as make_windowed

from longtail import Group, NativeEngine, Rollout, TokenBudget
from longtail.events import Event
from longtail.sample import Sample
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.drafter import Draft
from longtail.spec_decode.speculation import DrafterDropped

LENGTH = 40
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},  # few tokens: drafts are often right by chance
    {"top_p": 0.6, "min_p": 0.01},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"ignore_eos": False, "stop_token_ids": tuple(range(3, 60)), "min_tokens": 12},
    {"temperature": 0.5, "stop_token_ids": tuple(range(3, 200)), "top_k": 20},
    {"max_tokens": 7},
    {"max_tokens": 1},
]


@pytest.fixture(scope="module", params=["llama", "qwen3-interface", "gemma3", "mistral"])
def engine(request: pytest.FixtureRequest, make_engine: EngineMaker) -> NativeEngine:
    kind, _, path = request.param.partition("-")
    if kind in ("gemma3", "mistral"):
        return make_engine(make_windowed(kind))
    return make_engine(make_model(kind), fused=False if path else None)


def groups() -> list[Group]:
    """Every kind of parameters, a group of two each; prompts of many lengths."""
    return [
        group(f"g{i}", prompt(5 + 13 * i % 37, i), n=2, **({"max_tokens": LENGTH} | p)) for i, p in enumerate(PARAMS)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_samples_with_any_drafter(engine: NativeEngine, name: str) -> None:
    engine.use_drafter(None)
    want = generate(engine, *groups())
    steps = engine.stats().num_steps
    for length in (1, 3, 5):
        engine.use_drafter(drafter(name, want), FixedLength(length))
        engine.reset_prefix_cache()
        before = engine.stats()
        for got, expected in zip(generate(engine, *groups()), want, strict=True):
            assert_same(got, expected)
        after = engine.stats()
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        assert after.num_output_tokens - before.num_output_tokens == sum(len(s.output_ids) for s in want)
        assert 0 <= accepted <= drafted
        if name == "oracle":
            assert drafted == accepted > 0
            assert after.num_steps - before.num_steps < steps
        if name in ("garbage", "half right"):
            assert drafted > accepted
        assert after.num_free_blocks == after.num_blocks
    engine.use_drafter(None)


def test_stop_strings_end_where_they_would(make_engine: EngineMaker, letters: Any) -> None:
    """The first event in order wins, wherever in a draft it lies; nothing after it is emitted, counted or kept."""
    engine = make_engine(tokenizer=letters)
    plain = generate(engine, group("a", prompt(9), max_tokens=LENGTH))[0]
    text = letters.decode(plain.output_ids)
    for end in (1, 2, 5, 11, 20):
        for width in (1, 2, 3):
            stop = text[max(end - width, 0) : end]
            for more in ({}, {"min_tokens": end + 2}):
                params: dict[str, Any] = {"max_tokens": LENGTH, "stop": (stop,), **more}
                engine.use_drafter(None)
                want = generate(engine, group("a", prompt(9), **params))[0]
                if not more:
                    assert (want.finish_reason, want.stop_reason) == ("stop", stop)
                for length in (1, 4, 7):
                    engine.use_drafter(drafter("oracle", [plain]), FixedLength(length))
                    before = engine.stats()
                    assert_same(generate(engine, group("a", prompt(9), **params))[0], want)
                    after = engine.stats()
                    assert after.num_output_tokens - before.num_output_tokens == len(want.output_ids)
                    assert after.num_accepted_tokens - before.num_accepted_tokens <= len(want.output_ids)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_logprobs_of_either_mode(make_engine: EngineMaker, mode: str) -> None:
    engine = make_engine(logprobs_mode=mode)
    want = generate(engine, *groups())
    engine.use_drafter(drafter("half right", want), FixedLength(4))
    for got, expected in zip(generate(engine, *groups()), want, strict=True):
        assert_same(got, expected)


def test_rejected_drafts_leave_no_trace(make_engine: EngineMaker) -> None:
    """Nobody finds them in the prefix cache, no block is held for them, nothing counts them."""
    want = generate(make_engine(), group("a", prompt(17), max_tokens=LENGTH))[0]
    engine = make_engine(drafter=drafter("garbage", []), controller=FixedLength(6))
    (sample,) = group("a", prompt(17), max_tokens=LENGTH).samples
    engine.add([sample])
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        for seq in engine.scheduler.running:
            assert len(seq.block_tables[0]) == seq.num_computed_tokens // 16 + 1
    assert_same(sample, want)
    twin = Sample(
        id="b",
        group_id="b",
        index=0,
        prompt_ids=(*sample.prompt_ids, *sample.output_ids[:-1], 7),
        params=sample.params,
        seed=5,
    )
    fresh = generate(make_engine(enable_prefix_caching=False), Group("b", [_copy(twin)]))[0]
    assert_same(generate(engine, Group("b", [twin]))[0], fresh)  # on the blocks that the drafted sample left
    assert engine.stats().num_cached_tokens >= 32


def _copy(s: Sample) -> Sample:
    return Sample(id=s.id, group_id=s.group_id, index=0, prompt_ids=s.prompt_ids, params=s.params, seed=s.seed)


def test_preempted_for_lack_of_blocks(make_engine: EngineMaker) -> None:
    """Nobody loses a slot for a draft; drafts are cut to the blocks there are."""
    many = [group(f"g{i}", prompt(30, i), max_tokens=60) for i in range(6)]
    want = generate(make_engine(), *many)
    one = make_engine().kv.bytes_per_block
    for preemption in ("snapshot", "recompute"):
        tight = make_engine(kv_cache_bytes=16 * one, max_model_len=160, preemption=preemption)
        tight.use_drafter(drafter("half right", want), FixedLength(5))
        got = generate(tight, *(group(f"g{i}", prompt(30, i), max_tokens=60) for i in range(6)))
        assert tight.stats().num_preemptions > 0
        assert tight.stats().num_accepted_tokens > 0
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)


def test_across_updates_of_the_weights(make_engine: EngineMaker) -> None:
    """A step with drafts goes further, so an update lands elsewhere; where it lands, the stream is that of a run
    without drafts whose updates came at the same tokens."""
    weights = [make_model("llama", seed=s).state_dict() for s in (1, 2)]
    params: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0.5, "top_k": 2}
    undisturbed = generate(make_engine(), group("a", prompt(9), **params))
    engine = make_engine(drafter=drafter("oracle", undisturbed), controller=FixedLength(4))
    (sample,) = group("a", prompt(9), **params).samples
    cuts = []
    engine.add([sample])
    for version, state in enumerate(weights, 1):
        while len(sample.output_ids) < 12 * version:
            engine.step()
        cuts.append(len(sample.output_ids))
        engine.update_weights(state, version)
    run(engine)
    assert engine.stats().num_accepted_tokens > 0
    plain = make_engine()
    (want,) = group("a", prompt(9), **params).samples
    run(plain, [want], until=cuts[0])
    plain.update_weights(weights[0], 1)
    while len(want.output_ids) < cuts[1]:
        plain.step()
    plain.update_weights(weights[1], 2)
    run(plain)
    assert_same(sample, want)
    assert sample.versions == want.versions


def test_events_and_counts_agree(make_engine: EngineMaker) -> None:
    want = generate(make_engine(), *groups())
    events: list[Event] = []
    engine = make_engine(listener=events.append)
    engine.use_drafter(drafter("half right", want), FixedLength(3))
    generate(engine, *groups())
    steps = [e for e in events if e.kind == "step"]
    stats = engine.stats()
    assert sum(e.num_draft_tokens for e in steps) == stats.num_draft_tokens > 0
    assert sum(e.num_accepted_tokens for e in steps) == stats.num_accepted_tokens > 0
    assert sum(e.num_output_tokens for e in steps) == sum(len(s.output_ids) for s in want)
    of_samples = [e for e in events if e.kind == "drafts"]
    assert len({e.sample for e in of_samples}) == len(of_samples) > 0
    assert sum(e.num_draft_tokens for e in of_samples) == stats.num_draft_tokens
    assert sum(e.num_accepted_tokens for e in of_samples) == stats.num_accepted_tokens
    prompts = sum(len(s.prompt_ids) for s in want) - stats.num_cached_tokens
    decoded = sum(len(s.output_ids) - 1 for s in want) - stats.num_accepted_tokens
    rows = prompts + decoded + stats.num_draft_tokens
    # A sample that ends with an accepted draft has one token less from its last pass than rows that count.
    assert rows <= sum(e.num_tokens for e in steps) <= rows + len(want)
    assert sum(e.num_prefill_tokens for e in steps) == prompts
    speculation = engine.speculation
    assert speculation is not None
    total = speculation.total
    assert (total.drafted, total.accepted) == (stats.num_draft_tokens, stats.num_accepted_tokens)
    assert not speculation._by_sample
    assert not speculation._open


def test_the_ledger_counts_rejected_drafts(make_engine: EngineMaker, tmp_path: Path) -> None:
    want = generate(make_engine(), *(group(f"g{i}", prompt(9, i)) for i in range(3)))
    engine = make_engine(drafter=drafter("half right", want), controller=FixedLength(3))
    with Rollout(engine, strategy=TokenBudget(20), store=tmp_path / "store") as rollout:
        rollout.submit([group(f"g{i}", prompt(9, i)) for i in range(3)])
        done: list[Group] = []
        while len(done) < 3:
            done += rollout.collect()
        for got, expected in zip(sorted(done, key=lambda g: g.id), want, strict=True):
            assert_same(got.samples[0], expected)
        stats = engine.stats()
        assert stats.num_rejected_tokens > 0
        assert rollout.store.ledger.beside["rejected-drafts"] == stats.num_rejected_tokens
        rollout.store.check_balance()


def test_a_fault_behind_a_rejected_draft_is_nobodys(make_engine: EngineMaker) -> None:
    """Logits of a row that is not reached may hold anything."""
    want = generate(make_engine(), group("a", prompt(9), max_tokens=8))[0]
    engine = make_engine(drafter=drafter("garbage", []), controller=FixedLength(4))
    forward = engine.decoder.forward

    def poisoned(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        if len(logits) > 4:  # the row of the last token and four drafts, padded
            logits[2:] = float("nan")
        return logits

    engine.decoder.forward = poisoned  # type: ignore[method-assign, assignment]
    assert_same(generate(engine, group("a", prompt(9), max_tokens=8))[0], want)


def test_a_fault_in_a_draft_that_is_reached_fails_the_sample_there(make_engine: EngineMaker) -> None:
    want = generate(make_engine(), group("a", prompt(9), max_tokens=20))[0]
    engine = make_engine(drafter=drafter("oracle", [want]), controller=FixedLength(4))
    forward = engine.decoder.forward

    def poisoned(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        if len(logits) > 4:
            logits[2:] = float("nan")
        return logits

    engine.decoder.forward = poisoned  # type: ignore[method-assign, assignment]
    (got,) = generate(engine, group("a", prompt(9), max_tokens=20))
    assert got.status == "failed"
    assert got.failure is not None
    assert got.failure.startswith("sampling output token 3: the logits have NaN")
    assert got.output_ids == want.output_ids[:3]


class Broken(Oracle):
    """fault: what it does in its third proposal; or the call that raises there."""

    def __init__(self, fault: Any) -> None:
        super().__init__({}, 1.0)
        self.name, self.fault, self.calls = "broken", fault, 0

    def propose(self, requests: Any) -> Any:
        self.calls += 1
        drafts = super().propose(requests)
        return self.fault(drafts) if self.calls >= 3 and callable(self.fault) else drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        if self.fault == "observe" and self.calls >= 3:
            raise RuntimeError("in observe")

    def forget(self, sample_id: str) -> None:
        if self.fault == "forget":
            raise RuntimeError("in forget")


def _raise(drafts: Any) -> Any:
    raise RuntimeError("in propose")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_raise, "in propose"),
        ("observe", "in observe"),
        ("forget", "in forget"),
        (lambda drafts: None, "list of 2 drafts"),
        (lambda drafts: drafts[:1], "list of 2 drafts"),
        (lambda drafts: [*drafts, drafts[0]], "list of 2 drafts"),
        (lambda drafts: [None, *drafts[1:]], "must give Drafts"),
        (lambda drafts: [Draft([VOCAB], "x"), *drafts[1:]], f"below {VOCAB}"),
        (lambda drafts: [Draft([-1], "x"), *drafts[1:]], "ids from 0"),
        (lambda drafts: [Draft([1.0], "x"), *drafts[1:]], "ids from 0"),  # type: ignore[list-item]
        (lambda drafts: [Draft(np.array([1, 2]), "x"), *drafts[1:]], "a list of ids"),  # type: ignore[arg-type]
        (lambda drafts: [Draft([1, 2], "x", [0.5]), *drafts[1:]], "probs has 1 entries for 2"),
        (lambda drafts: [Draft([1, 2], "x", None, [-1, 0]), *drafts[1:]], "trees"),
    ],
)
def test_a_broken_drafter_is_dropped_and_the_run_goes_on(make_engine: EngineMaker, fault: Any, message: str) -> None:
    want = generate(make_engine(), group("a", prompt(9), n=2, max_tokens=20))
    engine = make_engine(drafter=Broken(fault), controller=FixedLength(2))
    with pytest.warns(DrafterDropped, match=message):
        got = generate(engine, group("a", prompt(9), n=2, max_tokens=20))
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    assert engine.speculation is not None
    assert "drafter broken was dropped" in engine.speculation.report()["failure"]


def test_drafts_that_are_too_long_are_cut(make_engine: EngineMaker) -> None:
    """Also where the model ends: position 63 of 64."""
    engine = make_engine(max_model_len=64)
    want = generate(engine, group("a", prompt(40), max_tokens=100))[0]
    engine.use_drafter(Broken(lambda drafts: [Draft([5] * 300, "x") for _ in drafts]), FixedLength(4))
    assert_same(generate(engine, group("a", prompt(40), max_tokens=100))[0], want)
    assert engine.stats().num_draft_tokens <= 4 * len(want.output_ids)


def test_bad_choices_are_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="no drafter 'ngrams'; did you mean 'ngram'"):
        make_engine(drafter="ngrams")


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PARAMS) * 2 - 1)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("pause"), st.integers(0, len(PARAMS) * 2 - 1)),
        st.tuples(st.just("pause without KV"), st.integers(0, len(PARAMS) * 2 - 1)),
        st.tuples(st.just("pause all"), st.just(0)),
        st.tuples(st.just("drafter"), st.integers(0, len(NAMES))),
        st.tuples(st.just("length"), st.integers(1, 7)),
        st.tuples(st.just("forget prefixes"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("blocks", [17, 64], ids=["tight", "roomy"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, seed=st.integers(0, 1000))
def test_random_lives(make_engine: EngineMaker, blocks: int, actions: list[tuple[str, int]], seed: int) -> None:
    """Drafters come, go and change, samples are paused at random, blocks run out."""
    engine, want = _engine_of(make_engine, blocks), _expected(make_engine)
    engine.reset_prefix_cache()
    samples = [s for g in groups() for s in g.samples]
    inside: set[str] = set()
    length = 3
    engine.use_drafter(drafter("half right", list(want.values()), seed), FixedLength(length))
    for action, number in actions:
        sample = samples[number % len(samples)]
        if action == "add" and sample.id not in inside and not sample.is_done:
            engine.add([sample])
        elif action == "step":
            for _ in range(number):
                engine.step()
                engine.check_integrity()
        elif action in ("pause", "pause without KV") and sample.id in inside:
            engine.pause([sample.id], snapshot=action == "pause")
        elif action == "pause all":
            engine.pause()
        elif action == "drafter":
            chosen = None if number == len(NAMES) else drafter(NAMES[number], list(want.values()), seed)
            engine.use_drafter(chosen, FixedLength(length))
        elif action == "length":
            length = number
        elif action == "forget prefixes":
            engine.reset_prefix_cache()
        inside = {s.id for s in samples if s.status in ("waiting", "running") and s.id in engine._sequences}
        engine.check_integrity()
    engine.add([s for s in samples if s.id not in inside and not s.is_done])
    run(engine)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks == blocks
    for sample in samples:
        assert_same(sample, want[sample.id])


@functools.cache
def _expected(make_engine: EngineMaker) -> dict[str, Sample]:
    return {s.id: s for s in generate(make_engine(), *groups())}


@functools.cache
def _engine_of(make_engine: EngineMaker, blocks: int) -> NativeEngine:
    one = make_engine().kv.bytes_per_block
    return make_engine(kv_cache_bytes=blocks * one, max_model_len=16 * 16, max_num_seqs=6, max_num_batched_tokens=24)
