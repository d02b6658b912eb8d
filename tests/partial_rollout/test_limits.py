"""Limits: an engine tells when a sample has made so many tokens, once, and goes on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run
from tests.partial_rollout.drafters import drafter
from tests.partial_rollout.turns import answer, turn_group

from longtail import NativeEngine, Sample
from longtail.spec_decode.controller import FixedLength


def reports(engine: NativeEngine, samples: list[Sample]) -> dict[str, list[int]]:
    """Steps to the end. -> by sample, its output tokens whenever it was reported."""
    lengths: dict[str, list[int]] = {s.id: [] for s in samples}
    while engine.has_work:
        for sample in engine.step().at_limit:
            assert sample.status == "running"
            lengths[sample.id].append(len(sample.output_ids))
        engine.check_integrity()
    return lengths


def test_limits_by_hand(make_engine: EngineMaker) -> None:
    """Counted from when a sample is added or its limit is set; reported once."""
    engine = make_engine()
    a, b, c = (group(name, prompt(9, i), max_tokens=20).samples[0] for i, name in enumerate("abc"))
    engine.add([a, b], limit=5)
    engine.add([c])
    outs = [engine.step() for _ in range(7)]
    assert [out.at_limit for out in outs] == [[]] * 4 + [[a, b], [], []]
    engine.set_limit(a.id, 3)
    engine.set_limit(c.id, 4)
    outs = [engine.step() for _ in range(5)]
    assert [out.at_limit for out in outs] == [[], [], [a], [c], []]
    engine.set_limit(b.id, 1)
    engine.set_limit(b.id, None)
    assert reports(engine, [a, b, c]) == {"a/0": [], "b/0": [], "c/0": []}
    for sample, want in zip(
        (a, b, c),
        (generate(make_engine(), group(n, prompt(9, i), max_tokens=20))[0] for i, n in enumerate("abc")),
        strict=True,
    ):
        assert_same(sample, want)


def test_a_sample_that_ends_at_its_limit_has_ended(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = group("a", prompt(9), max_tokens=6).samples[0]
    turn = turn_group("b", prompt(9)).samples[0]
    run(engine, [turn])
    length = len(turn.output_ids)
    again = turn_group("b", prompt(9)).samples[0]
    engine.add([sample], limit=6)
    engine.add([again], limit=length)
    assert reports(engine, [sample, again]) == {"a/0": [], "b/0": []}
    assert (sample.finish_reason, again.turn_ended) == ("length", True)


def test_an_observation_is_no_progress(make_engine: EngineMaker) -> None:
    """A limit is counted from when the sample is added, behind its observation."""
    engine = make_engine()
    sample = turn_group("a", prompt(9), stop_token_ids=(), stop=None, max_tokens=60).samples[0]
    sample.extend([70, 71], [-1.0, -1.0], engine.version, "native", "computed")
    sample.status, sample.turn_ended = "paused", True
    sample.append_observation(answer(sample))
    before = len(sample.output_ids)
    engine.add([sample], limit=4)
    assert reports(engine, [sample]) == {"a/0": [before + 4]}


@pytest.mark.parametrize("name", ["oracle", "half right", "group>ngram"])
def test_drafts_may_overshoot_a_limit(make_engine: EngineMaker, name: str) -> None:
    """By fewer tokens than a step makes; whatever is reported, the samples are the same."""
    groups = [group(f"g{i}", prompt(9, i), n=2, max_tokens=48) for i in range(2)]
    want = generate(make_engine(), *groups)
    engine = make_engine(drafter=drafter(name, want), controller=FixedLength(4))
    samples = [s for i in range(2) for s in group(f"g{i}", prompt(9, i), n=2, max_tokens=48).samples]
    engine.add(samples, limit=7)
    due = {s.id: 7 for s in samples}
    while engine.has_work:
        before = {s.id: len(s.output_ids) for s in samples}
        reported = {s.id for s in engine.step().at_limit}
        for sample in samples:
            length = len(sample.output_ids)
            assert (sample.id in reported) == (before[sample.id] < due[sample.id] <= length and not sample.is_done)
            if sample.id in reported:
                assert length - due[sample.id] <= 4
                engine.set_limit(sample.id, 7)
                due[sample.id] = length + 7
    for a, b in zip(samples, want, strict=True):
        assert_same(a, b)
    assert all(due[s.id] > 40 for s in samples)


def test_a_limit_outlives_preemption_and_an_update(make_engine: EngineMaker) -> None:
    engine = make_engine()
    one = engine.kv.bytes_per_block
    tight = make_engine(kv_cache_bytes=18 * one, max_model_len=160, max_num_seqs=6)
    samples = [group(f"g{i}", prompt(40, i), max_tokens=60).samples[0] for i in range(6)]
    tight.add(samples, limit=50)
    lengths = {s.id: [50] for s in samples}
    assert reports(tight, samples) == lengths
    assert tight.stats().num_preemptions > 0
    sample = group("a", prompt(9)).samples[0]
    engine.add([sample], limit=9)
    for _ in range(4):
        engine.step()
    engine.update_weights(make_model("llama", seed=1).state_dict(), 1)
    assert reports(engine, [sample]) == {"a/0": [9]}


def test_a_limit_goes_when_the_sample_leaves(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = group("a", prompt(9)).samples[0]
    engine.add([sample], limit=9)
    for _ in range(4):
        engine.step()
    engine.pause()
    engine.add([sample])
    assert reports(engine, [sample]) == {"a/0": []}


def test_a_report_that_a_listener_swallowed_comes_again(make_engine: EngineMaker) -> None:
    def raising(event: Any) -> None:
        raise RuntimeError("full")

    engine = make_engine()
    sample = group("a", prompt(9)).samples[0]
    engine.add([sample], limit=5)
    for _ in range(4):
        engine.step()
    engine.listener, listener = raising, engine.listener
    with pytest.raises(RuntimeError, match="full"):
        engine.step()
    engine.listener = listener
    assert len(sample.output_ids) == 5
    assert reports(engine, [sample]) == {"a/0": [6]}


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_limits_that_mean_nothing_are_refused(make_engine: EngineMaker, limit: Any) -> None:
    engine = make_engine()
    sample = group("a", prompt(9)).samples[0]
    with pytest.raises(ValueError, match="limit must be at least 1"):
        engine.add([sample], limit=limit)
    assert not engine.has_work
    assert sample.status == "waiting"
    engine.add([sample])
    with pytest.raises(ValueError, match="limit must be at least 1"):
        engine.set_limit(sample.id, limit)
    with pytest.raises(ValueError, match="'b/0' is not in the engine"):
        engine.set_limit("b/0", 3)
