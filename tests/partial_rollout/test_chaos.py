"""Chaos: random pauses, updates, cancelled groups, failing samples, graders and environments, an engine that raises.

After each of twenty thousand events, everything that must add up does: groups, ledger, slots, blocks, versions. In the
end every prompt was handed over or thrown away for a named reason, exactly once.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from longtail import Group, LongtailError, Rollout, SamplingParams
from longtail.partial_rollout.background import VirtualBackground
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.cost import LinearCost
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.script import Length
from longtail.partial_rollout.environment import Observation, Turn, TurnRequest
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.partial_rollout.groups import GroupRules
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.strategies import STRATEGIES
from longtail.sample import Sample

SETTINGS: dict[str, str] = {
    "sync": "sync:groups=4",
    "token-budget": "token-budget:tokens=150",
    "over-issue": "over-issue:groups=3,extra=2",
    "tail-rounds": "tail-rounds:groups=2,samples=2,eta=1.5",
    "context-aware": "context-aware:chunk=7,groups=4",
    "short-first": "short-first:groups=2,pool=3",
    "bounded-staleness": "bounded-staleness:groups=2,eta=2",
}
CAP = 60


def script(sample: Sample) -> Length:
    """A function of the seed: some fail, once or always."""
    rng = random.Random(sample.seed)
    tokens = min(CAP, 1 + int(rng.lognormvariate(2.3, 1.0)))
    turns = (rng.randint(1, 6), rng.randint(1, 6))
    failing = rng.random() < 0.06 and (sample.attempts == 0 or rng.random() < 0.5)
    return Length(tokens, turns=turns, failure="planted" if failing else None)


def grade(request: GradeRequest, seconds: float) -> Grade:
    rng = random.Random(f"{request.sample_id}{len(request.output_ids)}")
    failed = rng.random() < 0.1
    return Grade(
        sample_id=request.sample_id,
        reward=None if failed else float(rng.random() < 0.5),
        failure="timed out after 5 s" if failed else None,
        seconds=seconds,
        grader="toy",
    )


def answer(request: TurnRequest, seconds: float) -> Turn:
    rng = random.Random(f"{request.sample_id}{request.turn}")
    if rng.random() < 0.1:
        return Turn(sample_id=request.sample_id, observation=None, failure="RuntimeError: no", seconds=seconds)
    done = request.turn >= 2 or rng.random() < 0.3
    ids = tuple(rng.randrange(100) for _ in range(rng.randint(1, 4)))
    return Turn(sample_id=request.sample_id, observation=Observation(ids, done), failure=None, seconds=seconds)


class Chaos:
    most = 9
    """Tokens of a prompt."""

    def __init__(self, name: str, seed: int, **settings: Any) -> None:
        self.rng = random.Random(f"{name}{seed}")
        clock = VirtualClock()
        self.engine: Any = self.make_engine(clock)
        self.made_before = self.engine.stats().num_output_tokens
        self.raise_in = 0
        step = self.engine.step

        def raising(**options: Any) -> Any:
            self.raise_in -= 1
            if self.raise_in == 0:
                raise LongtailError("planted")
            out = step(**options)
            self.events += 1 + len(out.finished) + len(out.turns) + len(out.at_limit)
            self.check()
            return out

        self.engine.step = raising
        self.grader = VirtualBackground(clock, grade, lambda r: random.Random(r.sample_id).random() * 40, workers=2)
        self.environment = VirtualBackground(clock, answer, lambda r: random.Random(r.sample_id).random() * 30)
        self.submitted: list[Group] = []
        self.handed: Counter[str] = Counter()
        self.cancelled: set[str] = set()
        self.refills = 0
        self.events = 0
        self.discarded: Counter[str] = Counter()
        self.rollout = Rollout(
            self.engine,
            strategy=SETTINGS[name],
            grader=self.grader,
            environment=self.environment,
            refill=self.refill,
            listener=self.listen,
            **settings,
        )

    def make_engine(self, clock: VirtualClock) -> Any:
        return SimulatedEngine(
            cost=LinearCost(base=1.0, per_seq=0.1, per_token=0.01),
            lengths=script,
            clock=clock,
            slots=6,
            kv_tokens=400,
            save_seconds=0.001,
            kv_on_update=self.rng.choice(["keep", "recompute"]),
        )

    def params(self, n: int) -> SamplingParams:
        return SamplingParams(n=n, max_tokens=CAP)

    def weights(self) -> dict[str, Any]:
        return {}

    def listen(self, event: Any) -> None:
        if event.kind == "discard" and not event.sample:
            self.discarded[event.group] += 1

    def group(self) -> Group:
        params = self.params(self.rng.randint(1, 4))
        group = Group.from_prompt(f"p{len(self.submitted)}", [3] * self.rng.randint(1, self.most), params)
        for sample in group.samples:
            sample.multi_turn = self.rng.random() < 0.3
        self.submitted.append(group)
        return group

    def refill(self) -> Group | None:
        self.refills += 1
        return self.group() if self.refills < 40 else None

    def check(self) -> None:
        self.engine.check_integrity()
        self.rollout._generation.check_integrity()

    def run(self, events: int) -> None:
        rng, rollout = self.rng, self.rollout
        while self.events < events:
            action = rng.random()
            if action < 0.5 or not len(rollout.store):
                rollout.submit(self.group() for _ in range(rng.randint(1, 3)))
            if action < 0.06:
                self.raise_in = rng.randint(1, 12)
            if rng.random() < 0.05:
                open_groups = [g.id for g in rollout.store]
                if open_groups:
                    chosen = rng.sample(open_groups, 1)
                    rollout.cancel(chosen)
                    self.cancelled |= set(chosen)
            if rng.random() < 0.4:
                rollout.update_weights(self.weights(), self.engine.version + rng.randint(1, 2))
            self.collect()
        self.raise_in = 0
        for _ in range(200):
            if not len(rollout.store):
                break
            self.collect(wait=True)

    def collect(self, **options: Any) -> None:
        try:
            groups = self.rollout.collect(**options)
        except LongtailError as error:
            assert str(error) == "planted"
            assert not self.engine.has_work  # nothing is left behind in it
            groups = []
        self.events += 1
        for group in groups:
            self.handed[group.id] += 1
            for sample in group.samples:
                sample.check_integrity()
                assert sample.is_done
                if self.rollout.staleness is not None:
                    first = self.engine.version - self.rollout.staleness.max_staleness
                    kept = [v for v, counts in zip(sample.versions, sample.loss_mask, strict=True) if counts]
                    assert min(kept, default=first) >= first, (sample.id, kept, first)
        self.check()
        self.rollout.check_integrity()


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "strict": {"rules": GroupRules(retries=2, failed="replace", zero_variance="drop")},
    "drop": {"rules": GroupRules(retries=0, failed="drop"), "staleness": StalenessRule(max_staleness=1)},
    "regenerate": {"staleness": StalenessRule(max_staleness=1, exceeding="regenerate")},
    "mask": {"staleness": StalenessRule(max_staleness=0, exceeding="mask")},
    "drop-stale": {"staleness": StalenessRule(max_staleness=1, exceeding="drop", scope="sample")},
    "drop-stale-groups": {"staleness": StalenessRule(max_staleness=1, exceeding="drop", scope="group")},
}


# Longer samples have more turns in which to fail, so that what is trained on is short: the meter is right.
@pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rules", RULES)
def test_chaos(name: str, rules: str) -> None:
    chaos = Chaos(name, 0, **RULES[rules])
    chaos.run(400)  # times 49: twenty thousand in all
    check_end(chaos)


def check_end(chaos: Chaos) -> None:
    for group in chaos.submitted:
        assert chaos.handed[group.id] + chaos.discarded[group.id] == 1, (group.id, chaos.handed[group.id])
    assert all(chaos.discarded[group_id] for group_id in chaos.cancelled)
    ledger = chaos.rollout.store.ledger
    assert ledger.pending == 0 and not chaos.engine.has_work
    assert ledger.generated == chaos.engine.stats().num_output_tokens - chaos.made_before
    assert chaos.grader.num_pending == chaos.environment.num_pending == 0
    stats = chaos.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
