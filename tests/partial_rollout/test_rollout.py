"""Rollout and strategies: whole groups, each once; the same samples whatever the regime."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt

from longtail import Event, Group, LongtailError, Rollout, SampleStore, SamplingParams, Sync, TokenBudget
from longtail.partial_rollout.repetition import RepetitionDetector
from longtail.partial_rollout.strategies import (
    BoundedStaleness,
    ContextAware,
    OverIssue,
    ShortFirst,
    Strategy,
    TailRounds,
)
from longtail.sample import Sample

LENGTHS = [3, 40, 8, 25, 12, 60]


def groups(first: int = 0, count: int = 6) -> list[Group]:
    return [group(f"g{i}", prompt(7 + i, i), n=2, max_tokens=LENGTHS[i % 6]) for i in range(first, first + count)]


def collect_all(rollout: Rollout, batches: list[list[Group]]) -> list[list[str]]:
    handed = []
    for batch in batches:
        rollout.submit(batch)
        handed.append([g.id for g in rollout.collect()])
    while len(rollout.store):
        handed.append([g.id for g in rollout.collect()])
    return handed


STRATEGIES: dict[str, Strategy] = {
    "sync": Sync(),
    "budget-of-iteration": TokenBudget(50),
    "tiny-budget": TokenBudget(1),
    "budget-of-sample": TokenBudget(10, per="sample"),
    "over-issue": OverIssue(groups=2),
    "tail-rounds": TailRounds(groups=1, samples=2),
    "tail-rounds-regenerate": TailRounds(groups=1, samples=2, eta=2.0, regenerate=True),
    "context-aware": ContextAware(chunk=7, fairness=3),
    "short-first": ShortFirst(groups=1, pool=3),
    "bounded-staleness": BoundedStaleness(groups=1, eta=2),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("snapshots", [True, False])
def test_every_regime_makes_the_same_samples(make_engine: EngineMaker, name: str, snapshots: bool) -> None:
    plain = {s.id: s for s in generate(make_engine(), *groups())}
    rollout = Rollout(make_engine(max_num_seqs=4), strategy=STRATEGIES[name], snapshots=snapshots)
    submitted = groups()
    handed = collect_all(rollout, [submitted[:3], submitted[3:]])
    assert sorted(itertools.chain(*handed)) == sorted(g.id for g in submitted)  # each exactly once
    for g in submitted:
        assert g.is_complete
        for sample in g.samples:
            assert_same(sample, plain[sample.id])
    rollout.store.check_integrity()
    assert not rollout.engine.has_work


def test_sync_waits_for_everything(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine(max_num_seqs=3))
    rollout.submit(groups())
    assert len(rollout.collect()) == 6 and len(rollout.store) == 0


def test_token_budget_by_hand(make_engine: EngineMaker) -> None:
    """Two slots, three groups of one sample, lengths 3, 10, 4; 8 tokens an iteration.

    iteration 0: steps of (a b) (a b) (a b) make 6 tokens, a ends, c joins: (b c) makes 8 -> stop; b 4, c 1
    iteration 1: (b c) x 3 makes 6, c ends at 4, b at 7; b alone 8, 9 -> 8 tokens, stop; b 9
    iteration 2: b ends
    """
    events: list[Event] = []
    engine = make_engine(max_num_seqs=2, listener=events.append)
    rollout = Rollout(engine, strategy=TokenBudget(8), listener=events.append)
    a, b, c = (group(n, prompt(5, i), max_tokens=m) for i, (n, m) in enumerate([("a", 3), ("b", 10), ("c", 4)]))
    rollout.submit([a, b, c])
    assert [g.id for g in rollout.collect()] == ["a"]
    assert [len(g.samples[0].output_ids) for g in (b, c)] == [4, 1]
    assert [g.samples[0].status for g in (b, c)] == ["paused", "paused"]
    assert [g.id for g in rollout.collect()] == ["c"]
    assert len(b.samples[0].output_ids) == 9
    assert [g.id for g in rollout.collect()] == ["b"]
    assert [e.num_output_tokens for e in events if e.kind == "step"] == [2, 2, 2, 2, 2, 2, 2, 1, 1, 1]
    assert engine.stats().num_recomputed_tokens == 0  # resumed on their KV


def test_unfinished_samples_go_first(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=2)
    rollout = Rollout(engine, strategy=TokenBudget(4))
    rollout.submit(groups(1, 1))
    rollout.collect()
    rollout.submit(groups(3, 1))
    events: list[Event] = []
    engine.listener = events.append
    rollout.collect()
    assert [e.sample for e in events if e.kind == "admit"] == ["g1/0", "g1/1"]


def test_sample_budget_bounds_each_iteration(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine(max_num_seqs=3), strategy=TokenBudget(10, per="sample"))
    submitted = groups()
    rollout.submit(submitted)
    before = {s.id: 0 for g in submitted for s in g.samples}
    while len(rollout.store):
        rollout.collect()
        for g in submitted:
            for s in g.samples:
                assert 0 <= len(s.output_ids) - before[s.id] <= 10
                before[s.id] = len(s.output_ids)
    assert rollout.iteration == 6  # the longest needs 60 tokens


def test_update_weights_between_collects(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine(), strategy=TokenBudget(20))
    (g,) = rollout.submit([group("a", prompt(9), max_tokens=50)])
    rollout.collect()
    rollout.update_weights(make_model("llama", seed=1).state_dict(), 1)
    rollout.collect(wait=True)
    assert g.samples[0].versions == [0] * 20 + [1] * 30


def test_submit_rejects_what_it_cannot_take(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine())
    rollout.submit(groups(0, 1))
    with pytest.raises(ValueError, match="'g0' was submitted before"):
        rollout.submit(groups(0, 2))
    assert len(rollout.store) == 1
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        rollout.submit([[]], SamplingParams(max_tokens=3))
    rollout.collect()
    with pytest.raises(ValueError, match="'g0' was submitted before"):  # also after it was handed over
        rollout.submit(groups(0, 1))


def test_submitted_token_ids_become_groups(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine())
    made = rollout.submit([prompt(4), prompt(5)], SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    more = rollout.submit([prompt(6)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [(g.id, len(g.samples)) for g in made + more] == [("g0", 3), ("g1", 3), ("g2", 1)]
    assert [g.id for g in rollout.collect()] == ["g0", "g1", "g2"]


def test_a_prompt_the_engine_refuses_is_refused_at_submit(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine())
    with pytest.raises(ValueError, match="sample bad/0: prompt_ids has 297 tokens"):
        rollout.submit([group("good", prompt(5), max_tokens=3), group("bad", list(range(3, 300)), max_tokens=3)])
    assert len(rollout.store) == 0
    rollout.submit([group("good", prompt(5), max_tokens=3)])  # its id is still free
    assert [g.id for g in rollout.collect()] == ["good"]


def test_submit_takes_all_or_none(make_engine: EngineMaker) -> None:
    rollout = Rollout(make_engine())
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    twin = group("twin", prompt(4), max_tokens=2)
    stranger = Group("stranger", twin.samples)
    cases: list[tuple[list, str]] = [
        ([prompt(4), Group("empty", [])], "group 'empty' has no samples"),
        ([prompt(4), twin, Group("other", twin.samples)], "sample id 'twin/0' was submitted before"),
        ([prompt(4), stranger], "sample 'twin/0' has group_id 'twin', not 'stranger'"),
    ]
    for batch, message in cases:
        with pytest.raises(ValueError, match=message):
            rollout.submit(batch, params)
        assert len(rollout.store) == 0
    rollout.submit([group("g0", prompt(4), max_tokens=2), group("g2", prompt(4), max_tokens=2)])
    assert [g.id for g in rollout.submit([prompt(5), prompt(6)], params)] == ["g1", "g3"]  # names that are taken


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_collect_after_an_error_goes_on_where_it_stopped(make_engine: EngineMaker, error: type[BaseException]) -> None:
    plain = {s.id: s for s in generate(make_engine(), *groups())}
    engine = make_engine(max_num_seqs=3)
    rollout = Rollout(engine)
    submitted = groups()
    rollout.submit(submitted)
    step, calls = engine.step, []

    def failing(**asked):
        calls.append(1)
        if len(calls) in (5, 9):
            raise error
        return step(**asked)

    engine.step = failing  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(error):
            rollout.collect()
        assert not engine.has_work
    assert len(rollout.collect()) == 6
    for g in submitted:
        for sample in g.samples:
            assert_same(sample, plain[sample.id])


def test_an_engine_full_of_other_samples_is_an_error(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=1)
    stranger = group("stranger", prompt(5), max_tokens=20)
    engine.add(stranger.samples)
    rollout = Rollout(engine)
    rollout.submit(groups(0, 1))
    with pytest.raises(LongtailError, match="has no free slot"):
        rollout.collect()
    engine.abort([stranger.samples[0].id])
    assert len(rollout.collect()) == 1


def test_budget_arguments() -> None:
    for bad in (0, -3, 1.5, True):
        with pytest.raises(ValueError, match="tokens must be an integer of at least 1"):
            TokenBudget(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per must be"):
        TokenBudget(5, per="group")  # type: ignore[arg-type]


def test_store_hands_over_once() -> None:
    store = SampleStore()
    store.add([group("a", prompt(3))])
    assert store.complete() == []
    (sample,) = store.unfinished()
    sample.status, sample.finish_reason = "finished", "stop"
    (complete,) = store.complete()
    store.hand_over([complete])
    assert store.complete() == [] and "a" in store and len(store) == 0


def test_a_listener_that_raises_loses_no_group(make_engine: EngineMaker) -> None:
    def listener(event: Event) -> None:
        if event.kind == "hand_over" and not raised:
            raised.append(event)
            raise OSError("no space left on device")

    raised: list[Event] = []
    rollout = Rollout(make_engine(), listener=listener)
    rollout.submit(groups())
    with pytest.raises(OSError, match="no space left"):
        rollout.collect()
    assert len(rollout.collect()) == 6 and len(rollout.store) == 0


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([1, 2, 3] * 11 + [1, 2, 3], True),  # 36 tokens, period 3
        ([7] * 32, True),
        ([7] * 31, False),  # not a multiple of `every`
        (list(range(32)), False),
        (list(range(8)) * 4, True),
        (list(range(16)) * 2, False),  # stands only twice
        ([9] * 4 + [1, 2, 3, 4] * 7, True),  # the last 24 repeat
        ([1, 2, 3, 4] * 7 + [9] * 4, False),
    ],
)
def test_repetition_detector(output: list[int], expected: bool) -> None:
    detector = RepetitionDetector(max_period=8, min_tokens=24, min_repeats=3, every=4)
    assert detector(output) == expected


def test_repetition_ends_a_loop_at_the_same_place_in_every_regime(make_engine: EngineMaker) -> None:
    """Greedy decoding of a model with small random weights loops soon."""
    model = make_model("llama", initializer_range=0.02)
    detector = RepetitionDetector(max_period=32, min_tokens=32, min_repeats=2, every=8)
    ends: list[list[Sample]] = []
    for strategy in (Sync(), TokenBudget(17)):
        rollout = Rollout(make_engine(model), strategy=strategy, repetition=detector)
        made = rollout.submit([group(f"g{i}", prompt(5, i), temperature=0.0, max_tokens=200) for i in range(4)])
        while len(rollout.store):
            rollout.collect()
        ends.append([g.samples[0] for g in made])
    for a, b in zip(*ends, strict=True):
        assert_same(a, b)
    looped = [s for s in ends[0] if s.finish_reason == "repetition"]
    assert looped and all(detector(s.output_ids) and len(s.output_ids) % 8 == 0 for s in looped)


@pytest.mark.parametrize("ends", ["repetition", "limit"])
def test_a_sample_that_ended_in_a_pause(make_engine: EngineMaker, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs ahead may end samples while others are paused, and tells of it with the next step."""
    detector = RepetitionDetector(max_period=1, min_tokens=10_000)
    strategy = ContextAware(chunk=15) if ends == "limit" else Sync()
    engine = make_engine(make_model("llama"))
    rollout = Rollout(engine, strategy=strategy, repetition=detector)
    if ends == "repetition":
        monkeypatch.setattr(RepetitionDetector, "__call__", lambda self, ids: len(ids) >= 16)
    step, left, held = engine.step, rollout._generation._left, list[Sample]()

    def told(**how: Any) -> Any:
        out = step(**how)
        out.finished[:0] = held
        held.clear()
        return out

    def left_and_paused(samples: list[Sample]) -> None:
        left(samples)
        if engine.has_work:
            held.extend(step().finished)

    monkeypatch.setattr(engine, "step", told)
    monkeypatch.setattr(rollout._generation, "_left", left_and_paused)
    (made,) = rollout.submit([group("a", prompt(5), n=2, max_tokens=16)])
    assert rollout.collect() == [made]
    assert [s.finish_reason for s in made.samples] == ["length"] * 2
