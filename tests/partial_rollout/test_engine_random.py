"""Random lives of samples: blocks balance at every moment, and what comes out is what an undisturbed run makes."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, prompt

from longtail import Sample

SAMPLES = 9


def make_samples() -> list[Sample]:
    """Three groups of three; lengths and prompts that cross block boundaries in different places."""
    return [
        sample
        for i in range(3)
        for sample in group(f"g{i}", prompt(14 + 17 * i, i), n=3, max_tokens=9 + 12 * i, seed=i).samples
    ]


@functools.cache
def expected(make_engine: EngineMaker) -> dict[str, Sample]:
    engine = make_engine()
    samples = make_samples()
    engine.add(samples)
    while engine.has_work:
        engine.step()
    return {s.id: s for s in samples}


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("pause"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("pause without KV"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("pause all"), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, SAMPLES - 1)),
        st.tuples(st.just("forget prefixes"), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("blocks", [17, 64], ids=["tight", "roomy"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=actions)
def test_random_adds_pauses_aborts_resumes(
    make_engine: EngineMaker, blocks: int, actions: list[tuple[str, int]]
) -> None:
    engine = engine_of(make_engine, blocks)
    engine.reset_prefix_cache()
    samples = make_samples()
    inside: set[str] = set()
    aborted: set[str] = set()
    for action, number in actions:
        sample = samples[number] if number < SAMPLES else samples[0]
        if action == "add" and sample.id not in inside and not sample.is_done:
            engine.add([sample])
        elif action == "step":
            for _ in range(number):
                engine.step()
                engine.check_integrity()
        elif action.startswith("pause") and action != "pause all" and sample.id in inside:
            engine.pause([sample.id], snapshot=action == "pause")
        elif action == "pause all":
            engine.pause()
        elif action == "abort" and sample.id in inside:
            engine.abort([sample.id])
            aborted.add(sample.id)
        elif action == "forget prefixes":
            engine.reset_prefix_cache()
        inside = {s.id for s in samples if s.status in ("waiting", "running") and s.id in engine._sequences}
        engine.check_integrity()
    engine.add([s for s in samples if s.id not in inside and not s.is_done])
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks == blocks
    want = expected(make_engine)
    for sample in samples:
        if sample.id in aborted:
            assert sample.finish_reason == "aborted"
            n = len(sample.output_ids)
            assert (sample.output_ids, sample.logprobs) == (
                want[sample.id].output_ids[:n],
                want[sample.id].logprobs[:n],
            )
        else:
            assert_same(sample, want[sample.id])


@functools.cache
def engine_of(make_engine: EngineMaker, blocks: int):
    one = make_engine().kv.bytes_per_block
    return make_engine(kv_cache_bytes=blocks * one, max_model_len=16 * 16, max_num_seqs=6, max_num_batched_tokens=24)


def test_generate_helper_is_deterministic(make_engine: EngineMaker) -> None:
    """The yardstick itself: two undisturbed runs agree."""
    a, b = (generate(make_engine(), group("g", prompt(14), n=3)) for _ in range(2))
    for x, y in zip(a, b, strict=True):
        assert_same(x, y)
