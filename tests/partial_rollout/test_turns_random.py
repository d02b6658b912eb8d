"""Random lives of samples of several turns: whatever happens to them on the way, they end as if undisturbed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.partial_rollout.conftest import EngineMaker
from tests.partial_rollout.drafters import drafter
from tests.partial_rollout.turns import TURNS, all_same, answer, batch, end, model_of, turns_of, undisturbed

from longtail import NativeEngine, Sample
from longtail.spec_decode.controller import FixedLength

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7), st.none()),
        st.tuples(st.just("step"), st.integers(1, 8), st.none()),
        st.tuples(st.just("pause"), st.integers(0, 7), st.booleans()),
        st.tuples(st.just("drop"), st.integers(0, 7), st.none()),
        st.tuples(st.just("cut"), st.integers(0, 7), st.floats(0, 1)),
        st.tuples(st.just("forget prefixes"), st.just(0), st.none()),
    ),
    max_size=50,
)


@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        ("llama", None),
        ("llama", "group>ngram"),
        ("llama", "self"),
        ("gemma3", "half right"),
        ("qwen3_next", None),
        ("qwen3_next", "half right"),
    ],
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=actions)
def test_random_lives(
    make_engine: EngineMaker, kind: str, drafts: str | None, actions: list[tuple[str, int, Any]]
) -> None:
    """Added, stepped, paused, cut anywhere, their KV dropped: with the same weights they end as if undisturbed."""
    want = undisturbed(make_engine, kind)
    engine = engine_of(make_engine, kind, drafts, tuple(want))
    engine.reset_prefix_cache()
    samples = batch()

    def step() -> None:
        for sample in engine.step().turns:
            if turns_of(sample) == TURNS:
                end(sample)
        engine.check_integrity()
        check_drafter(engine)

    def add(sample: Sample) -> None:
        if sample.id not in engine._sequences and not sample.is_done:
            if sample.turn_ended:
                sample.append_observation(answer(sample))
            engine.add([sample])

    for action, number, detail in actions:
        sample = samples[number % len(samples)]
        outside = sample.id not in engine._sequences
        if action == "add":
            add(sample)
        elif action == "step":
            for _ in range(number):
                step()
        elif action == "pause" and not outside:
            engine.pause([sample.id], snapshot=detail)
        elif action == "drop" and outside:
            sample.snapshot = None
        elif action == "cut" and outside:
            length = round(detail * len(sample.output_ids))
            if not sample.is_done or length < len(sample.output_ids):
                sample.cut(length)
        elif action == "forget prefixes":
            engine.reset_prefix_cache()
        sample.check_integrity()
        engine.check_integrity()
    while any(not s.is_done for s in samples):
        for sample in samples:
            add(sample)
        step()
    all_same(samples, want)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    if engine.speculation is not None:
        assert engine.speculation.failure is None


@functools.cache
def engine_of(make_engine: EngineMaker, kind: str, drafts: str | None, want: tuple[Sample, ...]) -> NativeEngine:
    engine = make_engine(model_of(kind), max_num_seqs=6, max_num_batched_tokens=24)
    if drafts is not None:
        engine.use_drafter("self:0,1" if drafts == "self" else drafter(drafts, want), FixedLength(3))
    return engine


def check_drafter(engine: NativeEngine) -> None:
    if engine.speculation is not None:
        one: Any = engine.speculation.drafter
        for part in getattr(one, "drafters", [one]):
            if hasattr(part, "check_integrity"):
                part.check_integrity()
            for held in getattr(part, "_held", {}).values():  # a cut sample is not taken for what it was
                if (seq := engine._sequences.get(held.seq.sample.id)) is not None:
                    assert held.seq.token_ids == seq.token_ids[: len(held.seq.token_ids)]
            for text in getattr(part, "_live", {}).values():
                if (seq := engine._sequences.get(text.sample_id)) is not None:
                    tokens = text.shared.index.read(text.tail)[0].tolist() if text.length else []
                    assert tokens == seq.sample.output_ids[text.dropped : text.length]
