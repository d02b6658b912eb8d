"""A store that is opened again in mid-life, and bounds that hold whatever the strategy prefers."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from longtail import Event, Group, Rollout, SampleStore, SamplingParams
from longtail.partial_rollout.background import VirtualBackground
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.script import Length, log_normal, scripted
from longtail.partial_rollout.environment import Observation, Turn, TurnRequest
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.partial_rollout.groups import GroupRules
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.strategies import ContextAware, OverIssue, TailRounds
from longtail.sample import Sample

CAP = 40
STRATEGIES = [
    "sync:groups=2",
    "token-budget:tokens=25",
    "token-budget:tokens=9,per=sample",
    "over-issue:groups=2,extra=2",
    "tail-rounds:groups=2,samples=2,eta=1.5",
    "tail-rounds:groups=2,samples=2,eta=1.5,regenerate=true",
    "context-aware:chunk=5,groups=2",
    "short-first:groups=2,pool=2",
    "bounded-staleness:groups=2,eta=1",
]


class Killed(BaseException):
    pass


def grade(request: GradeRequest, seconds: float) -> Grade:
    reward = float(len(request.output_ids) % 3 == 0)
    return Grade(sample_id=request.sample_id, reward=reward, failure=None, seconds=seconds, grader="toy")


def answer(request: TurnRequest, seconds: float) -> Turn:
    return Turn(
        sample_id=request.sample_id, observation=Observation((1, 2), request.turn >= 1), failure=None, seconds=seconds
    )


def script(sample: Sample) -> Length:
    failing = sample.seed % 7 == 0 and sample.attempts == 0
    return Length(2 + sample.seed % 30, turns=(4,), failure="planted" if failing else None)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")
def test_killed_again_and_again(tmp_path: Path, strategy: str) -> None:
    """The process dies at every n-th event, also between a commit and what follows from it, and another one goes on
    with what is on the disk, by newer weights: every group leaves once, and nothing on the ledger is left over."""
    directory, n = tmp_path / "store", 0
    groups = [Group.from_prompt(f"p{i}", [5], SamplingParams(n=3, max_tokens=CAP)) for i in range(6)]
    for group in groups:
        group.samples[1].multi_turn = True
    left, version, handed = 1, 0, list[str]()
    while left:
        n += 1
        countdown, copy = 9 + 13 * n, tmp_path / f"{n}"

        def listen(event: Event, copy: Path = copy) -> None:
            nonlocal countdown
            countdown -= 1
            if not countdown:
                shutil.copytree(directory, copy)  # as the disk is: without what the error path and closing write
                raise Killed

        clock = VirtualClock()
        engine = SimulatedEngine(lengths=script, slots=4, clock=clock, listener=listen, version=version)
        store = SampleStore(directory, commit_every=0.0)
        try:
            rollout = Rollout(
                engine,
                strategy=strategy,
                store=store,
                grader=VirtualBackground(clock, grade, lambda r: 2.0),
                environment=VirtualBackground(clock, answer, lambda r: 3.0),
                rules=GroupRules(retries=1, zero_variance="drop"),
                refill=lambda: None,
                staleness=StalenessRule(max_staleness=2, exceeding="regenerate"),
                listener=listen,
            )
            rollout.submit(group for group in groups if group.id not in store)
            rollout.check_integrity()
            while left := len(store):
                for group in rollout.collect():
                    handed.append(group.id)
                    assert len(group.samples) == 2 or not strategy.startswith("tail")
                    assert all(min(v for v in s.versions if v >= 0) >= engine.version - 2 for s in group.samples)
                    assert all(s.reward is not None or s.status == "failed" for s in group.samples)
                rollout.check_integrity()
                version += 1
                rollout.update_weights({}, version)
        except Killed:
            version = engine.version + 1
        with store:
            left = len(store)
        if copy.exists():
            shutil.rmtree(directory)
            shutil.move(copy, directory)
            with SampleStore(directory) as there:
                left = len(there)
        assert n < 60
    with SampleStore(directory) as there:
        there.check_integrity()
        assert there.ledger.pending == 0
        delivered = [group.id for delivery in there.deliveries() for group in delivery.groups]
    assert len(delivered) == len(set(delivered)) and set(handed) <= set(delivered)


def _stored(directory: Path, group: Group, **state: Any) -> None:
    """A store in which the samples of the group are as a killed process left them."""
    with SampleStore(directory) as store:
        store.add([group])
        for sample in group.samples:
            sample.extend([1, 2, 3], [-1.0] * 3, 0, "simulated", "computed")  # type: ignore[arg-type]
            sample.status = "paused"
        for index, (status, reason) in state.items():
            sample = group.samples[int(index[1:])]
            sample.status, sample.finish_reason = status, reason
            sample.failure = "planted" if status == "failed" else None
        store.watch(group.samples)
        store.commit()


def test_a_group_with_its_surplus_still_in_it(tmp_path: Path) -> None:
    """Killed when the second of three had ended, before the third was taken away."""
    group = Group.from_prompt("a", [5], SamplingParams(n=3, max_tokens=CAP))
    _stored(tmp_path, group, s0=("finished", "stop"), s1=("finished", "stop"))
    rollout = Rollout(SimulatedEngine(), strategy=TailRounds(groups=1, samples=2), store=tmp_path)
    rollout.check_integrity()
    (done,) = rollout.collect()
    rollout.check_integrity()
    assert [s.id for s in done.samples] == ["a/0", "a/1"] and rollout.collect() == []
    assert rollout.store.ledger.lines["surplus"] == 3
    rollout.close()


@pytest.mark.parametrize("failed", ["smaller", "drop"])
def test_a_failed_sample_is_dealt_with_by_the_next_process(tmp_path: Path, failed: Any) -> None:
    group = Group.from_prompt("a", [5], SamplingParams(n=2, max_tokens=CAP))
    _stored(tmp_path, group, s0=("failed", "error"))
    engine = SimulatedEngine(lengths=lambda sample: Length(9))
    with Rollout(engine, store=tmp_path, rules=GroupRules(retries=int(failed == "smaller"), failed=failed)) as rollout:
        done = rollout.collect()
        if failed == "drop":
            assert done == [] and not len(rollout.store)
        else:
            assert [(s.status, s.attempts) for s in done[0].samples] == [("finished", 1), ("finished", 0)]
        assert rollout.store.ledger.lines["failed"] == (6 if failed == "drop" else 3)


def test_equal_rewards_of_an_earlier_process_are_refilled(tmp_path: Path) -> None:
    group = Group.from_prompt("a", [5], SamplingParams(n=2, max_tokens=CAP))
    for sample in group.samples:
        sample.reward = 1.0
    _stored(tmp_path, group, s0=("finished", "stop"), s1=("finished", "stop"))
    spare = [Group.from_prompt("b", [5], SamplingParams(n=2, max_tokens=CAP))]
    clock = VirtualClock()
    engine = SimulatedEngine(lengths=scripted({"b/0": 3, "b/1": 4}), clock=clock)
    grader = VirtualBackground(clock, grade, lambda r: 0.0)
    rules = GroupRules(zero_variance="drop")
    with Rollout(engine, store=tmp_path, grader=grader, rules=rules, refill=lambda: spare.pop()) as rollout:
        assert [g.id for g in rollout.collect()] == ["b"]
        assert rollout.store.ledger.lines["zero-variance"] == 6


@pytest.mark.parametrize("exceeding", ["wait", "regenerate", "mask", "drop"])
def test_the_bound_holds_for_what_an_earlier_process_left(tmp_path: Path, exceeding: Any) -> None:
    """Its tokens are of version 0; the next process begins with version 5."""
    group = Group.from_prompt("a", [5], SamplingParams(n=2, max_tokens=CAP))
    _stored(tmp_path, group, s0=("finished", "stop"))
    engine = SimulatedEngine(lengths=lambda sample: Length(6), version=5)
    rule = StalenessRule(max_staleness=2, exceeding=exceeding)
    with Rollout(engine, store=tmp_path, staleness=rule) as rollout:
        done = rollout.collect()
        rollout.check_integrity()
        for sample in (s for g in done for s in g.samples):
            assert all(v >= 3 for v, counts in zip(sample.versions, sample.loss_mask, strict=True) if counts)
        assert len(done) == (exceeding != "drop") and rollout.store.ledger.lines["stale"] == 6


def test_a_store_is_given_back_when_the_rollout_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Rollout(SimulatedEngine(), store=tmp_path, strategy="over-issue:groups=0")
    engine = SimulatedEngine()
    engine.stats = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        Rollout(engine, store=tmp_path)
    SampleStore(tmp_path).close()


# ---- bounds


def test_context_aware_with_a_batch_works_on_the_rest_of_begun_groups() -> None:
    """2 groups of 4: the probes of c and d do not stand in the way of a/1 and b/1."""
    lengths = {f"{g}/{i}": 3 + i for g in "abcd" for i in range(3)}
    engine = SimulatedEngine(lengths=scripted(lengths), slots=3)
    for fairness in (2, 1000):
        rollout = Rollout(engine, strategy=ContextAware(chunk=2, fairness=fairness, groups=2))
        rollout.submit(Group.from_prompt(g, [5], SamplingParams(n=3, max_tokens=CAP)) for g in "abcd")
        assert [g.id for g in rollout.collect()] == ["a", "b"]
        assert [g.id for g in rollout.collect()] == ["c", "d"]
        rollout.check_integrity()


def test_what_is_due_leaves_before_what_can_wait() -> None:
    """One group wanted, two complete and due: the iteration hands over both, for the next update makes them too old."""
    engine = SimulatedEngine(lengths=scripted({"a/0": 9, "b/0": 3, "c/0": 3, "d/0": 1}), slots=4)
    rollout = Rollout(engine, strategy=OverIssue(groups=1, extra=3), staleness=StalenessRule(max_staleness=0))
    rollout.submit(Group.from_prompt(g, [5], SamplingParams(max_tokens=CAP)) for g in "abcd")
    assert [g.id for g in rollout.collect()] == ["a", "b", "c", "d"]
    rollout.update_weights({}, 1)
    assert rollout.store.ledger.wasted == 0


def test_a_long_round_waits_for_all_of_it() -> None:
    """a, b and c complete at 2: one is surplus. It does not count for the long round of d and e."""
    lengths = {"d/0": 9, "e/0": 20, "a/0": 2, "b/0": 2, "c/0": 2, "f/0": 30}
    engine = SimulatedEngine(lengths=scripted(lengths), slots=8)
    rollout = Rollout(engine, strategy=TailRounds(groups=2, samples=1, eta=2.5))
    rollout.submit(Group.from_prompt(n.partition("/")[0], [5], SamplingParams(max_tokens=CAP)) for n in lengths)
    assert [g.id for g in rollout.collect()] == ["a", "b"]
    assert rollout._generation.state.ready.keys() == {"c"}
    rollout.collect()
    assert rollout.strategy.is_long and engine.now() == 20.0  # type: ignore[attr-defined]


def test_a_strategy_is_asked_nothing_before_its_first_iteration() -> None:
    class Late(OverIssue):
        name = "late"

        def begin(self, state: Any) -> None:
            self.base = 1

        def order(self, sample: Sample, state: Any) -> Any:
            return (self.base, *super().order(sample, state))  # type: ignore[misc]

        def needed(self, group: Any, state: Any) -> int:
            return self.base

    rollout = Rollout(SimulatedEngine(lengths=lambda s: Length(3)), strategy=Late(groups=2))
    rollout.submit([[5], [6]], SamplingParams(max_tokens=9))
    assert len(rollout.collect()) == 2


def test_the_example_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "class EverySoOften" in c]
    (tmp_path / "docs_example.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        engine = SimulatedEngine(lengths=log_normal(12, 1.0, longest=CAP), slots=4)
        rollout = Rollout(engine, strategy="docs_example.EverySoOften:steps=10")
        rollout.submit(Group.from_prompt(f"p{i}", [5], SamplingParams(n=2, max_tokens=CAP)) for i in range(12))
        handed = []
        while len(rollout.store):
            handed.append([g.id for g in rollout.collect()])
            rollout.check_integrity()
        assert len(handed) > 2
        assert sorted(name for names in handed for name in names) == sorted(f"p{i}" for i in range(12))
    finally:
        sys.modules.pop("docs_example", None)
