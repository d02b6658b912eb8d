"""Samples of several turns in the native engine: parked where a turn ends, exact when they go on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run
from tests.partial_rollout.drafters import NAMES, drafter
from tests.partial_rollout.test_mtp import make_head
from tests.partial_rollout.turns import (
    STOPS,
    TURNS,
    all_same,
    answer,
    batch,
    end,
    model_of,
    play,
    turn_group,
    turns_of,
    undisturbed,
)
from transformers import PreTrainedTokenizerFast

from longtail import Event, PolicyVersion, Sample
from longtail.partial_rollout.engines.native.model_drafter import ModelDrafter, SelfDrafter
from longtail.partial_rollout.engines.native.mtp import MTPDrafter
from longtail.partial_rollout.engines.native.sampler import check_end
from longtail.sample import OBSERVATION
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.suffix_drafter import SuffixDrafter

KINDS = ["llama", "qwen3", "gemma3", "mistral", "qwen3_next", "lfm2", "bamba"]


@pytest.fixture(scope="module")
def expected(make_engine: EngineMaker) -> Any:
    return functools.partial(undisturbed, make_engine)


# ---- exact


@pytest.mark.parametrize("kind", KINDS)
def test_parked_is_exact(make_engine: EngineMaker, expected: Any, kind: str) -> None:
    """All in one batch, each going on from its snapshot: bit for bit what it is when its KV is computed again."""
    engine = make_engine(model_of(kind), max_num_batched_tokens=40)
    samples = batch()

    def between(sample: Sample) -> None:
        assert sample.snapshot is not None
        assert sample.snapshot.num_tokens == sample.num_tokens - 1
        engine.reset_prefix_cache()  # or what it left there would do

    play(engine, samples, between=between)
    all_same(samples, expected(kind))
    assert engine.stats().num_restored_tokens > 0
    assert engine.stats().num_recomputed_tokens < sum(
        len(s) + 1 for sample in samples for s in sample.segments if s.version == OBSERVATION
    )
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next", "lfm2"])
def test_it_is_what_transformers_computes(expected: Any, kind: str) -> None:
    """Observations are read by what comes after them: log-probabilities of the whole text by the model itself. (Without
    penalties; temperature 1.)"""
    sample = expected(kind)[0]
    assert turns_of(sample) > 0
    start = len(sample.prompt_ids)
    with torch.no_grad():
        ids = torch.tensor([[*sample.prompt_ids, *sample.output_ids]])
        logprobs = torch.log_softmax(model_of(kind)(ids).logits[0].float(), -1)
    for i, (token, logprob) in enumerate(zip(sample.output_ids, sample.logprobs, strict=True)):
        want = logprobs[start + i - 1, token].item() if sample.versions[i] != OBSERVATION else 0.0
        assert logprob == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_nothing(make_engine: EngineMaker, expected: Any, kind: str, name: str) -> None:
    """Whatever is drafted across the end of a turn, rejected there or accepted up to it."""
    want = expected(kind)
    engine = make_engine(model_of(kind), drafter=drafter(name, want), controller=FixedLength(4))
    samples = batch()
    play(engine, samples)
    all_same(samples, want)
    assert engine.stats().num_draft_tokens > 0
    assert engine.speculation is not None
    assert engine.speculation.failure is None
    assert not engine.speculation._open
    assert not engine.speculation._by_sample


@pytest.mark.parametrize("name", ["self", "model", "mtp", "ngram", "group"])
def test_drafters_with_a_memory_see_samples_come_and_go(make_engine: EngineMaker, expected: Any, name: str) -> None:
    """What they keep adds up after every step, and is gone in the end."""
    model = model_of("llama")
    other = copy.deepcopy(model)
    made: dict[str, Any] = {
        "self": lambda: SelfDrafter([0, 1]),  # all layers: mostly right
        "model": lambda: ModelDrafter(other),
        "mtp": lambda: MTPDrafter(make_head(model)),
        "ngram": lambda: SuffixDrafter("sample"),
        "group": lambda: SuffixDrafter("prompt"),
    }
    one = made[name]()
    engine = make_engine(model, drafter=one, controller=FixedLength(3))
    samples = batch()
    play(engine, samples, between=lambda sample: one.check_integrity())
    all_same(samples, expected("llama"))
    one.check_integrity()
    stats = engine.stats()
    assert stats.num_draft_tokens > 0
    if name in ("self", "model"):
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens - 3 * TURNS * len(samples)
        assert not one._held
    elif name != "mtp":
        assert not one._live
    assert engine.speculation is not None
    assert engine.speculation.failure is None


def test_a_mixed_batch_and_preemption(make_engine: EngineMaker, expected: Any) -> None:
    """So few blocks that they push each other out, among others that have no turns."""
    one = make_engine().kv.bytes_per_block
    engine = make_engine(kv_cache_bytes=24 * one, max_model_len=16 * 16, max_num_seqs=6, max_num_batched_tokens=24)
    others = [group(f"o{i}", prompt(30, 50 + i), max_tokens=40).samples[0] for i in range(3)]
    want = [generate(make_engine(), group(f"o{i}", prompt(30, 50 + i), max_tokens=40))[0] for i in range(3)]
    samples = batch()
    engine.add(others)
    play(engine, samples)
    all_same(samples, expected("llama"))
    all_same(others, want)
    assert engine.stats().num_preemptions > 0


def test_new_weights_while_it_waits(make_engine: EngineMaker) -> None:
    """Its KV is of the old weights then: computed again, under the versions that made each token."""
    new = make_model("llama", seed=1).state_dict()

    def lives(between: Any) -> list[Sample]:
        engine = make_engine()
        samples = [s for s in batch() if s.group_id == "g0"]
        for sample in samples:
            run(engine, [sample])
            assert sample.turn_ended
        engine.update_weights(new, 1)
        for sample in samples:
            between(sample)
            sample.append_observation(answer(sample))
            run(engine, [sample])
        return samples

    kept = lives(lambda sample: None)
    dropped = lives(lambda sample: setattr(sample, "snapshot", None))
    all_same(kept, dropped)
    for sample in kept:
        assert [s.version for s in sample.segments] == [0, OBSERVATION, 1]
        assert sample.segments[-1].kv == "recomputed"


def test_the_routing_of_every_position(make_engine: EngineMaker) -> None:
    """Observations are routed too; a turn's end is the last token, until more follows."""
    lives = []
    for drops in (False, True):
        engine = make_engine(model_of("qwen3_moe"), record_routing=True, enable_prefix_caching=not drops)
        samples = batch()[:4]

        def between(sample: Sample, drops: bool = drops) -> None:
            assert sample.routed_experts is not None
            assert len(sample.routed_experts) == sample.num_tokens - 1
            if drops:
                sample.snapshot = None

        play(engine, samples, between=between)
        lives.append(samples)
    for a, b in zip(*lives, strict=True):
        assert_same(a, b)
        assert a.routed_experts is not None
        assert len(a.routed_experts) == a.num_tokens - 1
        assert np.array_equal(np.asarray(a.routed_experts), np.asarray(b.routed_experts))


# ---- what a turn is


def test_a_turn_by_hand(make_engine: EngineMaker) -> None:
    """The slot is free at once, the KV is saved, the event says why; the answer is computed in one pass."""
    events: list[Event] = []
    engine = make_engine(listener=events.append)
    free = generate(make_engine(), group("a", prompt(9), max_tokens=30))[0]
    stop = free.output_ids[6]
    assert stop not in free.output_ids[:6]
    sample = turn_group("a", prompt(9), max_tokens=30, stop_token_ids=[stop]).samples[0]
    engine.add([sample])
    outs = []
    while engine.has_work:
        outs.append(engine.step())
    assert [out.turns for out in outs] == [[]] * 6 + [[sample]]
    assert not any(out.finished for out in outs)
    assert (sample.output_ids, sample.stop_reason, sample.finish_reason) == (free.output_ids[:7], stop, None)
    assert (sample.status, sample.turn_ended, engine.num_free_slots) == ("paused", True, 8)
    assert sample.snapshot is not None
    assert (sample.snapshot.num_tokens, sample.timings.finished) == (9 + 6, None)
    assert [e.kind for e in events[-3:]] == ["step", "save", "park"]
    assert (events[-1].num_tokens, events[-1].value, events[-1].detail) == (7, 1.0, str(stop))
    events.clear()
    sample.append_observation([100, 101, stop])
    engine.add([sample])
    engine.step()
    assert [e.kind for e in events] == ["restore", "admit", "step"]
    assert (events[0].num_tokens, events[2].num_tokens, events[2].num_output_tokens) == (9 + 6, 1 + 3, 1)
    assert len(sample.output_ids) == 11
    assert [s.kv for s in sample.segments] == ["computed", "computed", "restored"]
    assert sample.num_generated == 8


def test_eos_ends_a_turn(make_engine: EngineMaker) -> None:
    model = make_model("llama", eos_token_id=list(range(3, 60)))
    engine = make_engine(model)
    sample = turn_group("a", prompt(9), stop_token_ids=(), ignore_eos=False).samples[0]
    play(engine, [sample], turns=2)
    assert turns_of(sample) == 2
    assert (sample.stop_reason, sample.output_ids[-1] in range(3, 60)) == (None, True)


def test_stop_strings_are_looked_for_in_the_turn(make_engine: EngineMaker, letters: PreTrainedTokenizerFast) -> None:
    """Not in what the environment writes, and not across the border to it."""
    free = generate(make_engine(), group("a", prompt(9), max_tokens=30))[0]
    stop = letters.decode(free.output_ids[3:5])
    sample = turn_group("a", prompt(9), max_tokens=30, stop_token_ids=(), stop=[stop]).samples[0]
    engine = make_engine(tokenizer=letters)
    run(engine, [sample])
    assert (sample.output_ids, sample.stop_reason) == (free.output_ids[:5], stop)
    assert sample.turn_ended
    sample.append_observation([300, 301, *free.output_ids[3:5]])  # the string itself, last
    kept, sample.snapshot = sample.snapshot, None
    probe = copy.deepcopy(sample)
    sample.snapshot = kept
    probe.params = group("a", prompt(9), max_tokens=12).samples[0].params
    run(make_engine(), [probe])
    engine.add([sample])
    engine.step()
    assert sample.output_ids == probe.output_ids[:10]
    engine.pause()
    # A string that begins in the observation and ends in the turn stops nothing; one of the turn does.
    across = letters.decode(probe.output_ids[8:10])
    within = letters.decode(probe.output_ids[9:11])
    for text, ends_at in ((across, 12), (within, 11)):
        again = turn_group("a", prompt(9), max_tokens=12, stop_token_ids=(), stop=[text]).samples[0]
        again.extend(probe.output_ids[:5], probe.logprobs[:5], probe.versions[0], "native", "computed")
        again.status, again.turn_ended = "paused", True
        again.append_observation(probe.output_ids[5:9])
        run(engine, [again])
        assert len(again.output_ids) == ends_at
        assert again.output_ids == probe.output_ids[:ends_at]
        assert again.turn_ended == (ends_at == 11)


def test_min_tokens_counts_the_whole_output(make_engine: EngineMaker, expected: Any) -> None:
    """Of the group with min_tokens 20: no turn ends before position 20, observations counted."""
    for sample in expected("llama")[2:4]:
        ends = [s.end for s in sample.segments if s.version != OBSERVATION]
        assert min(ends) >= 20
        assert turns_of(sample) == TURNS


# ---- caps


def test_a_length_cap_finishes_it(make_engine: EngineMaker) -> None:
    engine = make_engine()
    for cap in range(1, 40):
        sample = turn_group("a", prompt(9), max_tokens=cap).samples[0]
        play(engine, [sample])
        if sample.finish_reason == "length":
            assert len(sample.output_ids) >= cap
            assert sample.versions[-1] == OBSERVATION or len(sample.output_ids) == cap
        else:
            assert turns_of(sample) == TURNS


@pytest.mark.parametrize("cap", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize("over", [0, 5])
def test_an_answer_that_leaves_no_room(make_engine: EngineMaker, cap: str, over: int) -> None:
    """The next step finishes it, without a pass, and with nothing more in it."""
    most = 9 + 40
    engine = make_engine(**({} if cap == "max_tokens" else {"max_model_len": most}))
    sample = turn_group("a", prompt(9), max_tokens=40 if cap == "max_tokens" else None).samples[0]
    run(engine, [sample])
    sample.append_observation([77] * (most - sample.num_tokens + over))
    length = len(sample.output_ids)
    engine.add([sample])
    other = group("b", prompt(5), max_tokens=3).samples[0]
    engine.add([other])
    out = engine.step()
    assert (out.finished, out.num_output_tokens) == ([sample], 1)
    assert (sample.status, sample.finish_reason, len(sample.output_ids)) == ("finished", "length", length)
    assert sample.snapshot is None
    run(engine)
    assert other.finish_reason == "length"
    sample = turn_group("c", prompt(9), max_tokens=40 if cap == "max_tokens" else None).samples[0]
    run(engine, [sample])
    sample.append_observation([77] * (most - sample.num_tokens))
    engine.add([sample])
    assert engine.pause() == [sample]  # before the step that would have finished it
    assert engine.step().finished == []
    assert sample.status == "paused"


def test_a_stop_on_the_last_token_of_the_cap_ends_the_turn(make_engine: EngineMaker) -> None:
    """What it wrote is whole: its environment may find it good."""
    engine = make_engine()
    sample = turn_group("a", prompt(9)).samples[0]
    run(engine, [sample])
    again = turn_group("a", prompt(9), max_tokens=len(sample.output_ids)).samples[0]
    run(engine, [again])
    assert (again.output_ids, again.turn_ended, again.finish_reason) == (sample.output_ids, True, None)


def test_repetition_finishes_it(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = turn_group("a", prompt(9)).samples[0]
    run(engine, [sample])
    sample.append_observation([70])
    run(engine, [sample], until=len(sample.output_ids) + 1)
    assert engine.abort([sample.id], reason="repetition") == [sample]
    assert sample.finish_reason == "repetition"


def test_a_turn_without_an_answer_does_not_go_on(make_engine: EngineMaker) -> None:
    engine = make_engine()
    sample = turn_group("a", prompt(9)).samples[0]
    run(engine, [sample])
    with pytest.raises(ValueError, match="its turn has ended; append_observation"):
        engine.add([sample])
    sample.append_observation([600])
    with pytest.raises(ValueError, match="token id 600 is outside the vocabulary"):
        engine.add([sample])


def test_tokens_of_newer_weights_before_an_observation_are_refused(make_engine: EngineMaker) -> None:
    engine = make_engine(version=3)
    sample = turn_group("a", prompt(9)).samples[0]
    run(engine, [sample])
    sample.append_observation([70])
    with pytest.raises(ValueError, match="has tokens of version 3, newer than the engine's 2"):
        make_engine(version=2).add([sample])


# ---- interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_while_it_parks(make_engine: EngineMaker, expected: Any, error: Any) -> None:
    """The turn has ended, the sample is still in the engine: the next step parks it and does not write on."""
    engine = make_engine()
    samples = batch()[:2]
    save = engine.kv.save
    raised: list[int] = []

    def failing(seq: Any, **settings: Any) -> Any:
        if len(raised) < 4:
            raised.append(1)
            raise error
        return save(seq, **settings)

    engine.kv.save = failing  # type: ignore[method-assign]
    engine.add(samples)
    while any(not s.is_done for s in samples):
        try:
            out = engine.step()
        except error:
            engine.check_integrity()
            continue
        for sample in out.turns:
            if turns_of(sample) == TURNS:
                end(sample)
                continue
            sample.append_observation(answer(sample))
            engine.add([sample])
    assert len(raised) == 4
    all_same(samples, expected("llama")[:2])


def test_an_update_after_an_interrupted_step(make_engine: EngineMaker) -> None:
    """It waits for its slot again, with its turn ended: it is parked from there."""
    engine = make_engine()
    sample = turn_group("a", prompt(9)).samples[0]
    engine.kv.save, save = (lambda seq, **_: 1 / 0), engine.kv.save  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        run(engine, [sample])
    engine.kv.save = save  # type: ignore[method-assign]
    length = len(sample.output_ids)
    engine.update_weights(make_model("llama", seed=1).state_dict(), 1)
    out = engine.step()
    assert (out.turns, out.num_seqs, len(sample.output_ids)) == ([sample], 0, length)
    assert (sample.status, sample.snapshot, engine.has_work) == ("paused", None, False)
    engine.check_integrity()


def test_the_yardstick(make_engine: EngineMaker, expected: Any) -> None:
    """Stops are met, turns end at many places of a block, and observations differ."""
    samples = expected("llama")
    ends = {
        (len(s.prompt_ids) + segment.start) % 16 for s in samples for segment in s.segments if segment.version == -1
    }
    assert len(ends) >= 8
    assert all(s.output_ids[i.start - 1] in STOPS for s in samples for i in s.segments if i.version == OBSERVATION)
    lengths = {len(i) for s in samples for i in s.segments if i.version == OBSERVATION}
    assert min(lengths) < 4
    assert max(lengths) > 16


def spelled(ids: Sequence[int]) -> str:
    return "".join("x" if token == 70 else "." for token in ids)


def test_what_an_environment_wrote_ends_nothing() -> None:
    """EOS, a stop id and a stop string at its end; written by the policy they do."""
    ends: list[tuple[dict[str, Any], int]] = [
        ({"ignore_eos": False}, 2),
        ({"stop_token_ids": [9]}, 9),
        ({"stop": ["x"]}, 70),
    ]
    for params, token in ends:
        sample = turn_group("a", prompt(9), **({"stop_token_ids": ()} | params)).samples[0]
        sample.extend([70, 71], [-1.0, -1.0], PolicyVersion(0), "native", "computed")
        sample.status, sample.turn_ended = "paused", True
        sample.append_observation([80, token])
        assert check_end(sample, (2,), 256, spelled) is None
        sample.append(token, -1.0, sample.versions[0], "native", "computed")
        end_of = check_end(sample, (2,), 256, spelled)
        assert end_of is not None
        assert end_of.reason == "stop"
