"""Each strategy against its definition, on a scripted engine whose passes take a second: a sample of n tokens holds its
slot for n seconds. The schedules were worked out by hand and can be checked by a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from longtail import Event, Group, Rollout, SamplingParams
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.script import scripted
from longtail.partial_rollout.strategies import (
    STRATEGIES,
    BoundedStaleness,
    ContextAware,
    OverIssue,
    RolloutState,
    ShortFirst,
    Strategy,
    Sync,
    TailRounds,
    TokenBudget,
    make_strategy,
)

CAP = 30


class Run:
    """A rollout on a scripted engine. lengths: of samples by group, one for each sample."""

    def __init__(
        self, strategy: Strategy | str, lengths: Mapping[str, list[int]], slots: int, **settings: Any
    ) -> None:
        script = {f"{name}/{i}": n for name, each in lengths.items() for i, n in enumerate(each)}
        self.events: list[Event] = []
        self.engine = SimulatedEngine(lengths=scripted(script), slots=slots, listener=self.events.append)
        self.rollout = Rollout(self.engine, strategy=strategy, listener=self.events.append, **settings)
        self.groups = {
            name: Group.from_prompt(name, [5], SamplingParams(n=len(each), max_tokens=CAP, seed=i))
            for i, (name, each) in enumerate(lengths.items())
        }
        self.rollout.submit(self.groups.values())

    def collect(self, **options: Any) -> tuple[list[str], float]:
        """-> ids of what is handed over, and the time."""
        ids = [group.id for group in self.rollout.collect(**options)]
        self.rollout.check_integrity()
        self.engine.check_integrity()
        return ids, self.engine.now()

    def collect_all(self) -> list[tuple[list[str], float]]:
        out = []
        while len(self.rollout.store):
            out.append(self.collect())
        return out

    def update(self, version: int) -> None:
        self.rollout.update_weights({}, version)

    def tokens(self, *samples: str) -> list[int]:
        return [len(self.sample(name).output_ids) for name in samples]

    def sample(self, name: str) -> Any:
        group, index = name.split("/")
        return self.groups[group].samples[int(index)]

    def admissions(self) -> list[tuple[float, str]]:
        return [(event.time, event.sample) for event in self.events if event.kind == "admit"]


SHORT_AND_LONG = {"a": [3], "b": [10], "c": [4], "d": [2]}


def test_sync() -> None:
    """Two slots: a and b; at 3 c in a's place; at 7 d; b ends last."""
    run = Run(Sync(), SHORT_AND_LONG, slots=2)
    assert run.collect_all() == [(["a", "b", "c", "d"], 10.0)]
    assert run.admissions() == [(0.0, "a/0"), (0.0, "b/0"), (3.0, "c/0"), (7.0, "d/0")]


def test_sync_with_a_batch() -> None:
    """a and b until 10; then c and d until 14."""
    run = Run(Sync(groups=2), SHORT_AND_LONG, slots=2)
    assert run.collect_all() == [(["a", "b"], 10.0), (["c", "d"], 14.0)]


def test_token_budget() -> None:
    """Two slots, 8 tokens an iteration.

    0: (a b) x 3 makes 6 tokens, a ends; (b c) makes 8, at 4
    1: (b c) x 3 makes 6, c ends at 7; (b d) makes 8, at 8
    2: (b d) makes 2, d ends at 9; b alone, its tenth token at 10
    """
    run = Run(TokenBudget(8), SHORT_AND_LONG, slots=2)
    assert run.collect() == (["a"], 4.0)
    assert run.tokens("b/0", "c/0", "d/0") == [4, 1, 0]
    assert run.collect() == (["c"], 8.0)
    assert run.tokens("b/0", "d/0") == [8, 1]
    assert run.collect() == (["b", "d"], 10.0)


def test_token_budget_of_each_sample() -> None:
    """Two slots, 4 tokens a sample and iteration: a until 3, c until 7, b gives its slot to d at 4, d ends at 6. Then
    b alone: 4 more, and 2 more."""
    run = Run(TokenBudget(4, per="sample"), SHORT_AND_LONG, slots=2)
    assert run.collect() == (["a", "c", "d"], 7.0)
    assert run.tokens("b/0") == [4]
    assert run.collect() == ([], 11.0)
    assert run.collect() == (["b"], 13.0)


def test_over_issue() -> None:
    """Three slots, 2 groups wanted, 1 extra.

    0: a, b, c; at 3 a is complete, and d is not begun (a, b and c are not handed over); at 4 c is complete
    1: b goes on with 4 tokens, d is begun and complete at 6; b at 10
    """
    run = Run(OverIssue(groups=2, extra=1), SHORT_AND_LONG, slots=3)
    assert run.collect() == (["a", "c"], 4.0)
    assert run.tokens("b/0", "d/0") == [4, 0]
    assert run.collect() == (["b", "d"], 10.0)
    assert run.admissions() == [(0.0, "a/0"), (0.0, "b/0"), (0.0, "c/0"), (4.0, "b/0"), (4.0, "d/0")]


def test_over_issue_keeps_surplus_groups() -> None:
    """a, b and c are complete at 3; the oldest two are handed over, c waits and is the first of the next two."""
    run = Run(OverIssue(groups=2, extra=1), {"a": [3], "b": [3], "c": [3], "d": [2], "e": [5]}, slots=3)
    assert run.collect() == (["a", "b"], 3.0)
    assert run.collect() == (["c", "d"], 5.0)
    assert run.collect() == (["e"], 8.0)
    assert run.rollout.store.ledger.wasted == 0


ROUNDS = {"a": [3], "b": [10], "c": [4], "d": [2], "e": [9], "f": [5]}


@pytest.mark.parametrize("regenerate", [False, True])
def test_tail_rounds(regenerate: bool) -> None:
    """2 prompts wanted, 3 begun in a short round.

    short: a, b, c; at 4 a and c are complete, b is left with 4 tokens
    short: d, e, f; at 6 d, at 9 f; e is left with 5
    long: b needs 6 more tokens and e 4, until 15; made again, b needs 10, until 19, and 9 tokens are lost
    """
    run = Run(TailRounds(groups=2, samples=1, eta=1.5, regenerate=regenerate), ROUNDS, slots=3)
    assert run.collect() == (["a", "c"], 4.0)
    assert run.collect() == (["d", "f"], 9.0)
    assert run.tokens("b/0", "e/0") == [4, 5]
    assert run.collect() == (["b", "e"], 19.0 if regenerate else 15.0)
    assert run.rollout.store.ledger.lines["aborted"] == (9 if regenerate else 0)


def test_tail_rounds_take_the_first_samples_of_a_prompt() -> None:
    """3 samples begun for 2 wanted: the first two to end are at 2 and 5; the third has 5 tokens then: surplus."""
    run = Run(TailRounds(groups=1, samples=2, eta=1.5), {"a": [5, 2, 7]}, slots=3)
    assert run.collect() == (["a"], 5.0)
    assert [s.id for s in run.groups["a"].samples] == ["a/0", "a/1"]
    ledger = run.rollout.store.ledger
    assert (ledger.lines["trained"], ledger.lines["surplus"], ledger.pending) == (7, 5, 0)


def test_context_aware() -> None:
    """Two slots, chunks of 2 tokens, fairness out of the way. Probes are A0 (2 tokens) and B0 (4).

    0   A0, B0
    2   A0 ends: its siblings are taken for 2 tokens long. B, of which nothing is known, for CAP: B1
    4   B0 ends: B1, B2 are taken for 4. B2
    5   B1 ends after 3. A1
    7   B2 ends after 3. A1 has outgrown what is known of A: taken for CAP, it goes on. A2
    11  A1 ends after 6
    13  A2 ends after 6
    """
    run = Run(ContextAware(chunk=2, fairness=1000), {"A": [2, 6, 6], "B": [4, 3, 3]}, slots=2)
    assert run.collect() == (["A", "B"], 13.0)
    assert run.admissions() == [
        (0.0, "A/0"),
        (0.0, "B/0"),
        (2.0, "B/1"),
        (4.0, "B/2"),
        (5.0, "A/1"),
        (7.0, "A/2"),
    ]


def test_context_aware_gives_way_after_a_chunk() -> None:
    """One slot, chunks of 2. A0 has 2 tokens at 2, B0 none: B0. At 4 both have 2, B0 goes on; at 6 it has 4: A0, which
    ends at 7; B0 ends at 8."""
    run = Run(ContextAware(chunk=2), {"A": [3], "B": [5]}, slots=1)
    run.collect()
    assert run.admissions() == [(0.0, "A/0"), (2.0, "B/0"), (6.0, "A/0"), (7.0, "B/0")]
    assert run.engine.now() == 8.0


def test_context_aware_is_fair() -> None:
    """One slot, every second admission goes to whoever was submitted first: A1, though B1 is taken for longer.

    0 A0 (probe), 1 B0 would come next, by fairness A1 gets the slot: of those that wait A1 is the oldest"""
    run = Run(ContextAware(chunk=9, fairness=2), {"A": [1, 1], "B": [1, 1]}, slots=1)
    run.collect()
    assert [sample for _, sample in run.admissions()] == ["A/0", "A/1", "B/0", "B/1"]


def test_short_first() -> None:
    """Two slots, 2 groups wanted, a pool of 4.

    0: a, b; at 2 b is complete, c in its place; at 6 c is complete: b and c, a is left with 6 tokens
    1: a is expected to need fewer tokens than d: both run; d ends at 7, a at 8, handed over d first
    2: the pool is used up: e
    """
    lengths = {"a": [8], "b": [2], "c": [4], "d": [1], "e": [1]}
    run = Run(ShortFirst(groups=2, pool=2), lengths, slots=2)
    assert run.collect_all() == [(["b", "c"], 6.0), (["d", "a"], 8.0), (["e"], 9.0)]


def test_bounded_staleness() -> None:
    """Three slots, 2 groups wanted, eta 1: at most 4 are begun and not handed over.

    0: a, b, c; at 3 a is complete, d is the fourth; at 4 c is complete: a and c
    1: b and d go on under version 1, e joins; at 5 d and e are complete
    2: b alone goes on under version 2, until 10
    """
    run = Run(BoundedStaleness(groups=2, eta=1), SHORT_AND_LONG | {"e": [1]}, slots=3)
    assert run.collect() == (["a", "c"], 4.0)
    assert run.tokens("b/0", "d/0", "e/0") == [4, 1, 0]
    assert run.engine.has_work
    run.update(1)
    assert run.collect() == (["d", "e"], 5.0)
    run.update(2)
    assert run.collect() == (["b"], 10.0)
    assert run.sample("b/0").versions == [0] * 4 + [1] + [2] * 5
    assert run.sample("d/0").versions == [0, 1]


def test_the_capacity_rule() -> None:
    """eta 0 and 1 group wanted: one at a time, strictly on-policy."""
    run = Run(BoundedStaleness(groups=1, eta=0), SHORT_AND_LONG, slots=3)
    assert run.collect_all() == [(["a"], 3.0), (["b"], 13.0), (["c"], 17.0), (["d"], 19.0)]


# ---- by name


def test_patience_is_not_inherited_by_other_decisions() -> None:
    """What a finished sample may change is for each class with decisions of its own to say."""

    class Renamed(OverIssue):
        name = "renamed"

    class Hasty(OverIssue):
        def stop_waiting(self, state: RolloutState) -> bool:
            return bool(state.ready)

    classes: list[type[Strategy]] = [*STRATEGIES.values(), Renamed, Hasty]
    patient = {cls for cls in classes if cls.is_patient}
    assert patient == {Sync, OverIssue, BoundedStaleness, Renamed}


def test_every_strategy_has_its_name() -> None:
    assert set(STRATEGIES) == {
        "sync",
        "token-budget",
        "over-issue",
        "tail-rounds",
        "context-aware",
        "short-first",
        "bounded-staleness",
    }


def test_strategies_by_name() -> None:
    assert isinstance(make_strategy(None), Sync)
    budget = make_strategy("token-budget:tokens=80,per=sample")
    assert isinstance(budget, TokenBudget) and (budget.tokens, budget.per) == (80, "sample")
    rounds = make_strategy("tail-rounds: groups=4, samples=8, eta=1.5, regenerate=true")
    assert isinstance(rounds, TailRounds) and (rounds.eta, rounds.regenerate) == (1.5, True)
    own = make_strategy("longtail.partial_rollout.strategies.sync.Sync:groups=3")
    assert isinstance(own, Sync) and own.groups == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fifo", "'fifo' is not known; choose from sync, token-budget"),
        ("sync:tokens=4", "strategy sync: no setting tokens; it has groups"),
        ("over-issue", 'strategy over-issue needs groups, e.g. "over-issue:groups=8"'),
        ("over-issue:groups=0", "groups must be an integer of at least 1, not 0"),
        ("over-issue:8", "'8' is no setting; write name=value"),
        ("longtail.nowhere.Sync", "No module named 'longtail.nowhere'"),
        ("longtail.sample.Sample", "is no subclass of"),
        (3, "strategy must be a Strategy or a name, not 3"),
    ],
)
def test_strategies_that_are_not_there(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_strategy(spec)
