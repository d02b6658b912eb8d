"""Whatever raises, wherever: every sample stays in one place, and the next collect goes on to the same end."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from longtail import Event, Group, Rollout, SampleStore, SamplingParams
from longtail.errors import LongtailError, StoreFull
from longtail.partial_rollout.background import VirtualBackground
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.script import Length, scripted
from longtail.partial_rollout.environment import Observation, Turn, TurnRequest
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.partial_rollout.groups import GroupRules
from longtail.partial_rollout.length_bias import LengthBiasWarning
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.strategies import Strategy
from longtail.sample import Sample

CAP = 30


class Planted(Exception):
    pass


def grade(request: GradeRequest, seconds: float) -> Grade:
    reward = float(len(request.output_ids) % 2)
    return Grade(sample_id=request.sample_id, reward=reward, failure=None, seconds=seconds, grader="toy")


def answer(request: TurnRequest, seconds: float) -> Turn:
    done = request.turn >= 1
    return Turn(sample_id=request.sample_id, observation=Observation((1, 2), done), failure=None, seconds=seconds)


def script(sample: Sample) -> Length:
    failing = sample.id in ("p1/1", "p4/0") and sample.attempts == 0
    return Length(3 + sample.seed % 15, turns=(4,), failure="planted" if failing else None)


class Rig:
    """Everything at once: turns, grades, retries, surplus, staleness, zero variance."""

    def __init__(self, strategy: str, directory: Path | None = None, **settings: Any) -> None:
        clock = VirtualClock()
        self.bomb = -1
        self.kinds: list[str] = []
        self.engine = SimulatedEngine(lengths=script, slots=4, clock=clock, listener=self.listen)
        self.grader = VirtualBackground(clock, grade, lambda r: 2.0)
        self.environment = VirtualBackground(clock, answer, lambda r: 3.0)
        self.gone: list[str] = []
        self.rollout = Rollout(
            self.engine,
            strategy=strategy,
            store=SampleStore(directory, commit_every=0.0),
            grader=self.grader,
            environment=self.environment,
            rules=GroupRules(retries=1, zero_variance="drop"),
            staleness=StalenessRule(max_staleness=1, exceeding="regenerate"),
            listener=self.listen,
            **settings,
        )
        self.groups = [Group.from_prompt(f"p{i}", [5], SamplingParams(n=3, max_tokens=CAP)) for i in range(6)]
        for group in self.groups:
            group.samples[2].multi_turn = True

    def listen(self, event: Event) -> None:
        if event.kind == "discard" and not event.sample:
            self.gone.append(event.group)
        self.bomb -= 1
        if self.bomb == 0:
            self.kinds.append(event.kind)
            raise Planted(event.kind)

    def run(self) -> list[str]:
        handed: list[str] = []
        for call in (lambda: self.rollout.submit(self.groups[:4]), lambda: self.rollout.submit(self.groups[4:])):
            try:
                call()
            except Planted:
                self.rollout.check_integrity()
        for _ in range(60):
            if not len(self.rollout.store):
                break
            try:
                handed += [g.id for g in self.rollout.collect()]
                self.rollout.check_integrity()
                self.rollout.update_weights({}, self.engine.version + 1)
            except Planted:
                pass
            self.rollout.check_integrity()
        return handed


@pytest.mark.parametrize(
    "strategy",
    [
        "sync:groups=3",
        "over-issue:groups=2,extra=1",
        "tail-rounds:groups=2,samples=2,eta=1.5",
        "token-budget:tokens=9,per=sample",
        "bounded-staleness:groups=2,eta=1",
    ],
)
@pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")
def test_a_listener_that_raises(strategy: str) -> None:
    """At every second event in turn."""
    kinds: set[str] = set()
    for first in range(1, 330, 2):
        rig = Rig(strategy)
        rig.bomb = first
        handed = rig.run()
        kinds |= set(rig.kinds)
        ids = sorted(g.id for g in rig.groups)
        assert not len(rig.rollout.store), (first, rig.kinds, [g.id for g in rig.rollout.store])
        assert len(handed) == len(set(handed))
        assert set(handed) <= set(ids)
        assert rig.rollout.store.ledger.pending == 0
        assert rig.grader.num_pending == rig.environment.num_pending == 0 and not rig.engine.has_work
    assert kinds >= {"submit", "admit", "step", "finish", "grade", "park", "observe", "hand_over"}, kinds


class Full(SampleStore):
    """A write finds the disk full with this probability."""

    share = 0.3

    def __init__(self) -> None:
        super().__init__(commit_every=0.0)
        self._rng = random.Random(1)

    def _transaction(self, *arguments: Any, **keywords: Any) -> Any:
        if self._rng.random() < self.share:
            raise StoreFull("planted")
        return super()._transaction(*arguments, **keywords)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("rules", [GroupRules(retries=1), GroupRules(retries=0, failed="drop", zero_variance="drop")])
@pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")
def test_a_disk_that_is_full_now_and_then(share: float, rules: GroupRules) -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(lengths=script, slots=4, clock=clock)
    store = Full()
    store.share = share
    rollout = Rollout(
        engine,
        strategy="tail-rounds:groups=2,samples=2,eta=1.5",
        store=store,
        grader=VirtualBackground(clock, grade, lambda r: 2.0),
        rules=rules,
        staleness=StalenessRule(max_staleness=1, exceeding="drop", scope="sample"),
    )
    groups = [Group.from_prompt(f"p{i}", [5], SamplingParams(n=3, max_tokens=CAP)) for i in range(6)]
    handed: list[str] = []
    calls: list[Callable[[], Any]] = [partial(rollout.submit, [group]) for group in groups]
    for _ in range(3000):
        call = calls[0] if calls else rollout.collect
        try:
            done = call()
        except StoreFull:
            continue
        finally:
            rollout._generation.check_integrity()
        if calls:
            calls.pop(0)
        else:
            handed += [g.id for g in done]
            if not len(store):
                break
            with contextlib.suppress(StoreFull):
                rollout.update_weights({}, engine.version + 1)
    assert not len(store) and len(handed) == len(set(handed))
    store.share = 0.0
    store.commit()
    store.check_balance()
    assert store.ledger.pending == 0


def test_a_refill_that_raises_leaves_no_ghost() -> None:
    def refill() -> Group | None:
        raise Planted("no more prompts")

    engine = SimulatedEngine(lengths=scripted({"a/0": Length(3, failure="x"), "a/1": 9, "b/0": 4}), slots=4)
    rollout = Rollout(engine, rules=GroupRules(retries=0, failed="replace"), refill=refill)
    rollout.submit([Group.from_prompt(n, [5], SamplingParams(n=k, max_tokens=CAP)) for n, k in (("a", 2), ("b", 1))])
    with pytest.raises(Planted):
        rollout.collect()
    rollout.check_integrity()
    assert [g.id for g in rollout.collect()] == ["b"]


def test_a_grader_that_refuses_a_request_does_not_hang() -> None:
    """The error comes with each collect, until the group is cancelled."""
    clock = VirtualClock()
    engine = SimulatedEngine(lengths=scripted({"a/0": 3, "b/0": 3}), clock=clock)
    grader = VirtualBackground(clock, grade, lambda r: -1.0 if r.group_id == "a" else 0.0)
    rollout = Rollout(engine, grader=grader)
    rollout.submit([Group.from_prompt(n, [5], SamplingParams(max_tokens=CAP)) for n in "ab"])
    for _ in range(2):
        with pytest.raises(ValueError, match="seconds of a/0"):
            rollout.collect()
        rollout.check_integrity()
    rollout.cancel(["a"])
    assert [g.id for g in rollout.collect()] == ["b"]


def test_a_grader_that_was_closed_is_an_error_and_no_endless_wait() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(lengths=scripted({"a/0": 3}), clock=clock)
    grader = VirtualBackground(clock, grade, lambda r: 50.0)
    rollout = Rollout(engine, grader=grader, strategy="token-budget:tokens=2")
    rollout.submit([Group.from_prompt("a", [5], SamplingParams(max_tokens=CAP))])
    rollout._generation.begin(rollout.strategy, 0)
    while not grader.num_pending:
        rollout._generation.advance()
    grader.close()
    with pytest.raises(LongtailError, match="grade: 1 samples wait for a result, but nothing is pending"):
        rollout.collect()
    rollout.check_integrity()


def test_an_old_grade_is_not_given_to_what_was_made_again() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(lengths=scripted({"a/0": 4, "b/0": 4}), clock=clock)
    grader = VirtualBackground(clock, grade, lambda r: 0.0)
    rollout = Rollout(engine, grader=grader, staleness=StalenessRule(max_staleness=0, exceeding="regenerate"))
    rollout.submit([Group.from_prompt(n, [5], SamplingParams(max_tokens=CAP)) for n in "ab"])
    generation = rollout._generation
    generation.begin(rollout.strategy, 0)
    generation.advance()
    generation.workers.poll()  # fetched, and something came between
    rollout.update_weights({}, 1)
    assert generation.workers.next() is None
    assert len(rollout.collect()) == 2


def test_a_strategy_that_raises() -> None:
    class Bad(Strategy):
        name = "bad"
        left = 3

        def stop_waiting(self, state: Any) -> bool:
            self.left -= 1
            if self.left == 0:
                raise Planted("stop_waiting")
            return False

    engine = SimulatedEngine(lengths=scripted({"a/0": 3, "a/1": 7, "a/2": 9}))
    rollout = Rollout(engine, strategy=Bad())
    rollout.submit([Group.from_prompt("a", [5], SamplingParams(n=3, max_tokens=CAP))])
    with pytest.raises(Planted):
        rollout.collect()
    rollout.check_integrity()
    assert not engine.has_work
    assert [g.id for g in rollout.collect()] == ["a"]


def test_a_warning_that_is_an_error_costs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(lengths=scripted({"a/0": 3, "b/0": 3}))
    rollout = Rollout(engine, strategy="sync:groups=1")

    def observe(*arguments: Any) -> None:
        raise LengthBiasWarning("planted")

    monkeypatch.setattr(rollout.length_bias, "observe", observe)
    rollout.submit([Group.from_prompt(n, [5], SamplingParams(max_tokens=CAP)) for n in "ab"])
    assert [g.id for g in rollout.collect()] == ["a"]
    with pytest.raises(LengthBiasWarning):
        rollout.collect()
    assert [g.id for g in rollout.collect()] == ["b"]
    assert rollout.iteration == 2


@pytest.mark.parametrize("longest", [None, 20])
def test_a_sample_without_a_cap(longest: int | None) -> None:
    free = Group.from_prompt("a", [5], SamplingParams())
    rollout = Rollout(SimulatedEngine(lengths=lambda s: Length(5), max_model_len=longest))
    rollout.submit([free])
    assert rollout.collect() == [free]


def test_an_observation_that_the_engine_cannot_take_fails_the_sample() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine(lengths=lambda s: Length(20, turns=(4,)), clock=clock, vocab_size=100)
    check = engine.check

    def strict(sample: Sample) -> None:
        check(sample)
        if any(token >= 100 for token in sample.output_ids):
            raise ValueError("token 100 is not in the vocabulary")

    engine.check = strict  # type: ignore[method-assign]
    environment: Any = VirtualBackground(
        clock,
        lambda r, s: Turn(sample_id=r.sample_id, observation=Observation((100,)), failure=None, seconds=s),
        lambda r: 1.0,
    )
    rollout = Rollout(engine, environment=environment, rules=GroupRules(retries=0))
    group = Group.from_prompt("a", [5], SamplingParams(max_tokens=CAP))
    group.samples[0].multi_turn = True
    rollout.submit([group])
    assert rollout.collect() == [group]
    (sample,) = group.samples
    assert (sample.status, sample.finish_reason) == ("failed", "error")
    assert sample.failure == "observation: token 100 is not in the vocabulary"
