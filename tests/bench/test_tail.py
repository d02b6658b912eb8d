"""The tail by cause: planted causes are named, seconds add up on every trace, and what-if agrees with both."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pandas as pd
import pytest

from longtail import Event, Group, Rollout, SamplingParams
from longtail.bench import analysis
from longtail.bench.trace import TraceWriter
from longtail.partial_rollout.background import VirtualBackground
from longtail.partial_rollout.engines.simulated import Length, LinearCost, SimulatedEngine, VirtualClock, scripted
from longtail.partial_rollout.environment import Observation, Turn
from longtail.partial_rollout.grading import Grade
from longtail.partial_rollout.groups import GroupRules
from longtail.partial_rollout.staleness import StalenessRule

SPECS = (
    "sync:groups=3",
    "token-budget:tokens=120",
    "over-issue:groups=2,extra=2",
    "tail-rounds:groups=2,samples=2,eta=1.5",
    "context-aware:chunk=7,groups=3",
    "short-first:groups=2,pool=3",
    "bounded-staleness:groups=2,eta=2",
)
RULES: list[dict[str, Any]] = [
    {},
    {"rules": GroupRules(retries=2, failed="replace", zero_variance="drop")},
    {"rules": GroupRules(retries=0, failed="drop"), "staleness": StalenessRule(max_staleness=1)},
    {"rules": GroupRules(retries=1, failed="smaller")},
    {"staleness": StalenessRule(max_staleness=1, exceeding="regenerate")},
    {"staleness": StalenessRule(max_staleness=1, exceeding="drop", scope="sample")},
]


def frame(*events: Event) -> pd.DataFrame:
    writer = TraceWriter()
    listen = writer.listener("r")
    for event in events:
        listen(event)
    return writer.frame()


def check_laws(df: pd.DataFrame) -> None:
    """What holds on every trace."""
    def whole(row: Any) -> Any:
        return pytest.approx(row["tail_seconds"], rel=1e-12, abs=0)

    tails, total = analysis.tail_by_iteration(df), analysis.tail_attribution(df)
    steps = analysis.iterations(df)
    for row in tails.to_dict("records"):
        (own,) = steps[(steps["run"] == row["run"]) & (steps["iteration"] == row["iteration"])].to_dict("records")
        assert row["tail_seconds"] == own["tail_seconds"]
        assert min(row[cause] for cause in analysis.CAUSES) >= 0
        assert math.fsum(row[cause] for cause in analysis.CAUSES) == whole(row)
    for row in total.to_dict("records"):
        assert math.fsum(row[c] for c in analysis.CAUSES) == whole(row)
        instead = analysis.what_if(df)
        own_rows = instead[instead["run"] == row["run"]].set_index("without")
        everything = own_rows.loc[" + ".join(analysis.REMOVABLE)]
        assert everything["tail_seconds"] == pytest.approx(row["true_length"], abs=1e-9)
        assert (own_rows["saved_seconds"] >= -1e-9).all()
        assert (own_rows["saved_seconds"] <= everything["saved_seconds"] + 1e-9).all()
        for cause in analysis.REMOVABLE:  # what has a share saves something together with others, so it exists
            assert row[cause] <= everything["saved_seconds"] + 1e-9
    parts = analysis.breakdown(df)
    assert parts[list(analysis.PARTS)].sum(axis=1).to_numpy() == pytest.approx(parts["wall"].to_numpy())
    lines = analysis.ledger(df)
    assert (lines[list(analysis.LINES)].sum(axis=1) == lines["generated"]).all()


# --- random rollouts


class Random:
    """A rollout of random prompts, lengths, turns, failures, graders, updates and cancellations on a small engine."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        clock = VirtualClock()
        self.engine = SimulatedEngine(
            cost=LinearCost(rng.choice([0.0, 1.0]), 0.1, 0.01, rng.choice([0.0, 1e-4])),
            lengths=self.length,
            clock=clock,
            slots=rng.randint(1, 8),
            kv_tokens=rng.choice([None, 150]),
            save_seconds=0.001,
            restore_seconds=rng.choice([0.0, 0.002]),
            update_seconds=rng.choice([0.0, 3.0]),
            kv_on_update=rng.choice(["keep", "recompute"]),
            enable_prefix_caching=rng.random() < 0.5,
        )
        self.writer = TraceWriter()
        listen = self.writer.listener("r")
        self.engine.listener = listen
        grader = VirtualBackground(clock, self.grade, lambda r: rng.random() * 20, workers=2)
        self.rollout = Rollout(
            self.engine,
            strategy=rng.choice(SPECS),
            grader=grader,
            environment=VirtualBackground(clock, self.answer, lambda r: rng.random() * 30),
            snapshots=rng.random() < 0.5,
            listener=listen,
            **RULES[seed % len(RULES)],
        )
        self.number = 0
        if self.rollout.staleness is None:
            self.engine.step = self.updating(self.engine.step)  # type: ignore[method-assign]
        listen(Event("run_start", clock.now(), detail=json.dumps({"slots": self.engine.config.slots})))
        self.run()
        listen(Event("run_end", self.engine.now()))

    def updating(self, step: Any) -> Any:
        """Now and then weights come in the middle of an iteration, as from a trainer that works beside it."""

        def and_update(**options: Any) -> Any:
            out = step(**options)
            if self.rng.random() < 0.03:
                self.rollout.update_weights({}, self.engine.version + 1)
            return out

        return and_update

    def length(self, sample: Any) -> Length:
        rng = random.Random(sample.seed)
        failing = rng.random() < 0.08 and (sample.attempts == 0 or rng.random() < 0.5)
        tokens = min(60, 1 + int(rng.lognormvariate(2.3, 1.0)))
        return Length(tokens, turns=(rng.randint(1, 6), rng.randint(1, 6)), failure="planted" if failing else None)

    def grade(self, request: Any, seconds: float) -> Grade:
        return Grade(sample_id=request.sample_id, reward=float(self.rng.random() < 0.5), failure=None, seconds=seconds,
                     grader="toy")  # fmt: skip

    def answer(self, request: Any, seconds: float) -> Turn:
        done = request.turn >= 2 or self.rng.random() < 0.3
        observation = Observation(tuple(range(self.rng.randint(1, 4))), done)
        return Turn(sample_id=request.sample_id, observation=observation, failure=None, seconds=seconds)

    def submit(self) -> None:
        group = Group.from_prompt(f"p{self.number}", [3] * self.rng.randint(1, 9), SamplingParams(n=4, max_tokens=60))
        for sample in group.samples:
            sample.multi_turn = self.rng.random() < 0.3
        self.number += 1
        self.rollout.submit([group])

    def run(self) -> None:
        for _ in range(self.rng.randint(3, 8)):
            for _ in range(self.rng.randint(1, 4)):
                self.submit()
            if self.rng.random() < 0.15:
                self.rollout.cancel([g.id for g in self.rollout.store][:1])
            self.rollout.collect()
            if self.rng.random() < 0.6:
                self.rollout.update_weights({}, self.engine.version + self.rng.randint(1, 2))
        for _ in range(50):
            if not len(self.rollout.store):
                break
            self.rollout.collect(wait=True)
        self.rollout.check_integrity()


@pytest.mark.parametrize("seed", range(40))
def test_everything_adds_up_on_random_rollouts(seed: int) -> None:
    run = Random(seed)
    df = run.writer.frame()
    check_laws(df)
    (line,) = analysis.ledger(df).to_dict("records")
    known = run.rollout.store.ledger
    assert line["unaccounted"] == 0 and line["generated"] == known.generated
    assert {name: line[name] for name in known.places} == known.places
    ages = analysis.staleness(df)
    assert ages["tokens"].sum() == analysis.summary(df)["r"]["tokens_trained"]
    assert ages["share"].sum() == pytest.approx(1.0) or not len(ages)


def test_random_rollouts_have_every_cause() -> None:
    """Else the test above says less than it seems to."""
    seen = dict.fromkeys(analysis.CAUSES, 0.0)
    for seed in range(40):
        (row,) = analysis.tail_attribution(Random(seed).writer.frame()).to_dict("records")
        seen = {cause: seen[cause] + row[cause] for cause in seen}
    assert {cause for cause, seconds in seen.items() if seconds > 1} >= set(analysis.CAUSES) - {"drafting", "between"}


# --- planted causes


def rolled(lengths: dict[str, int | Length], strategy: str = "sync", **settings: Any) -> pd.DataFrame:
    """One iteration of ten prompts of one sample each, s0 to s9."""
    writer = TraceWriter()
    listen = writer.listener("r")
    engine = SimulatedEngine(lengths=scripted(lengths), listener=listen, **settings)
    rollout = Rollout(engine, strategy=strategy, listener=listen)
    listen(Event("run_start", engine.now(), detail=json.dumps({"slots": engine.config.slots})))
    rollout.submit(Group.from_prompt(name.split("/")[0], [1], SamplingParams(max_tokens=500)) for name in lengths)
    rollout.collect()
    listen(Event("run_end", engine.now()))
    return writer.frame()


def ten(last: int) -> dict[str, int | Length]:
    return {f"s{i}/0": last if i == 9 else 10 for i in range(10)}


def one(df: pd.DataFrame) -> Any:
    check_laws(df)
    (row,) = analysis.tail_attribution(df).to_dict("records")
    return row


def test_low_batch() -> None:
    """A pass takes a second whoever is in it: 90 tokens take 90 s alone, 9 s at the speed of ten at once."""
    row = one(rolled(ten(100), slots=10, cost=LinearCost(base=1.0)))
    assert row["tail_seconds"] == 90 and row["cause"] == "low_batch"
    assert (row["low_batch"], row["true_length"]) == (pytest.approx(81), pytest.approx(9))


def test_true_length() -> None:
    """A pass takes a second for each sequence: a token alone costs what it costs among ten."""
    row = one(rolled(ten(100), slots=10, cost=LinearCost(base=0.0, per_seq=1.0)))
    assert row["cause"] == "true_length" and row["true_length"] == pytest.approx(row["tail_seconds"]) == 90


def test_started_late() -> None:
    """Nine slots and ten equal samples."""
    row = one(rolled(ten(10), slots=9, cost=LinearCost(base=0.0, per_seq=1.0)))
    assert row["cause"] == "started_late" and row["started_late"] == pytest.approx(row["tail_seconds"])
    assert row["tail_seconds"] > 0


EVENTS = [Event("run_start", 0.0, detail='{"slots": 10}'), Event("iteration_start", 0.0)]


def life(*between: Event, last: float, step: dict[str, Any] | None = None, pure: bool = True) -> pd.DataFrame:
    """Ten samples admitted at 0; nine finish at 10, s9 at `last`. A pass a second, each costing 0.1 s for each of its
    tokens (no low batches), from 10 s on as `step` says."""
    events = [Event("admit", 0.0, sample=f"s{i}", value=5) for i in range(10)]
    events += [Event("step", t, 1.0, num_seqs=10, num_tokens=10, num_output_tokens=10, model_seconds=1.0)
               for t in map(float, range(10))]  # fmt: skip
    events += [Event("finish", 10.0, sample=f"s{i}", num_tokens=10, detail="stop") for i in range(9)]
    events += between
    if step is not None:
        events += [Event("step", float(t), 1.0, **step) for t in range(10, round(last))]
    events.append(Event("finish", last, sample="s9", num_tokens=20, detail="stop"))
    events += [Event("iteration_end", last), Event("run_end", last)]
    return frame(*EVENTS, *events)


FULL = {"num_seqs": 1, "num_tokens": 10, "num_output_tokens": 10, "model_seconds": 1.0}


def test_paused() -> None:
    row = one(life(Event("pause", 10.0, sample="s9", num_tokens=10), Event("admit", 16.0, sample="s9", num_tokens=14,
              value=15), Event("step", 16.0, 1.0, num_seqs=1, num_tokens=10, num_output_tokens=10, model_seconds=1.0),
              last=17.0))  # fmt: skip
    assert row["cause"] == "paused" and row["paused"] == 6 and row["true_length"] == pytest.approx(1)


def test_preempted_by_memory_and_computed_again() -> None:
    """2 s out of its slot, and a pass of 4 s whose rows are 15 tokens computed again."""
    again = Event("step", 12.0, 4.0, num_seqs=1, num_tokens=15, num_prefill_tokens=15, model_seconds=4.0)
    row = one(life(Event("preempt", 10.0, sample="s9", num_tokens=15, detail="out of blocks"),
                   Event("admit", 12.0, sample="s9", value=16), again, last=16.0))  # fmt: skip
    assert row["paused"] == pytest.approx(6) and row["cause"] == "paused"


def test_weight_switch() -> None:
    """An update of 5 s, 1 s more until it has a slot again, and 4 s of computing again."""
    again = Event("step", 16.0, 4.0, num_seqs=1, num_tokens=15, num_prefill_tokens=15, model_seconds=4.0)
    row = one(life(Event("preempt", 10.0, sample="s9", num_tokens=15, detail="weight update"),
                   Event("update", 10.0, 5.0, value=1), Event("admit", 16.0, sample="s9", value=16), again,
                   last=20.0))  # fmt: skip
    assert row["switch"] == pytest.approx(10) and row["cause"] == "switch"


def test_waiting_for_the_environment() -> None:
    row = one(life(Event("park", 10.0, sample="s9", num_tokens=10), Event("wait", 10.0, 7.0, detail="environment"),
                   Event("observe", 10.0, 7.0, sample="s9", num_tokens=3),
                   Event("admit", 17.0, sample="s9", num_tokens=14, value=18), last=17.0))  # fmt: skip
    assert row["cause"] == "waiting" and row["waiting"] == row["tail_seconds"] == 7


def test_waiting_for_a_grader_before_the_start() -> None:
    """A group takes the place of one that the grader let fall: it is not its queue that made it late."""
    df = frame(
        *EVENTS,
        *(Event("admit", 0.0, sample=f"s{i}", value=5) for i in range(9)),
        Event("step", 0.0, 10.0, num_seqs=9, num_tokens=9, num_output_tokens=9),
        *(Event("finish", 10.0, sample=f"s{i}", num_tokens=1) for i in range(9)),
        Event("wait", 10.0, 8.0, detail="grade"),
        Event("submit", 18.0, sample="s9", num_tokens=5),
        Event("admit", 18.0, sample="s9", value=5),
        Event("finish", 18.0, sample="s9", num_tokens=1),
        Event("iteration_end", 18.0),
    )
    row = one(df)
    assert row["tail_seconds"] == 8 and row["started_late"] + row["waiting"] == pytest.approx(8)
    single = analysis.what_if(df, "waiting", "started_late")["saved_seconds"].tolist()
    assert single == [8, 8]  # it started at 18: 8 s of waiting, 10 s before; either would do


def test_draft_overhead() -> None:
    """Of each second 0.4 s make drafts; half of the 10 rows verify drafts, and all of these are rejected."""
    step = {"num_seqs": 1, "num_tokens": 10, "num_output_tokens": 3, "num_draft_tokens": 5, "draft_seconds": 0.4,
            "model_seconds": 0.6}  # fmt: skip
    row = one(life(last=20.0, step=step))
    assert row["cause"] == "drafting" and row["drafting"] == pytest.approx(10 * (0.4 + 0.3))
    assert row["true_length"] == pytest.approx(3.0)


def test_between_passes() -> None:
    row = one(life(last=15.0))
    assert row["cause"] == "between" and row["between"] == row["tail_seconds"] == 5


def test_slow_passes_before_the_tail_are_not_its_causes() -> None:
    """An update of half a second delayed everybody; only what happens after the 90th percentile finish counts there."""
    row = one(life(Event("update", 3.5, 0.5), last=20.0, step=FULL))
    assert row["switch"] == 0 and row["true_length"] == pytest.approx(10)


def test_two_causes_share_by_what_they_save() -> None:
    """s9 waited 4 s for its slot and 6 s for its environment, and ends 10 s late: both matter, in proportion."""
    df = frame(
        *EVENTS,
        *(Event("admit", 0.0, sample=f"s{i}", value=5) for i in range(9)),
        Event("step", 0.0, 10.0, num_seqs=9, num_tokens=9, num_output_tokens=9),
        Event("admit", 4.0, sample="s9", value=5),
        *(Event("finish", 10.0, sample=f"s{i}", num_tokens=1) for i in range(9)),
        Event("step", 10.0, 4.0, num_seqs=1, num_tokens=4, num_output_tokens=4),
        Event("park", 14.0, sample="s9", num_tokens=1),
        Event("observe", 14.0, 6.0, sample="s9", num_tokens=1),
        Event("finish", 20.0, sample="s9", num_tokens=2),
        Event("iteration_end", 20.0),
    )
    row = one(df)
    assert (row["started_late"], row["waiting"]) == (pytest.approx(4), pytest.approx(6))


def test_another_late_sample_bounds_what_a_cause_saves() -> None:
    """Twenty samples, the last two late: s19 (ends at 30) by a pause of 20 s, s18 (at 25) by its length. Without the
    pause the tail still lasts until 25."""
    df = frame(
        *EVENTS,
        *(Event("admit", 0.0, sample=f"s{i}", value=5) for i in range(20)),
        Event("step", 0.0, 10.0, num_seqs=20, num_tokens=20, num_output_tokens=20, model_seconds=10.0),
        *(Event("finish", 10.0, sample=f"s{i}", num_tokens=1) for i in range(18)),
        Event("pause", 10.0, sample="s19", num_tokens=1),
        Event("step", 10.0, 15.0, num_seqs=1, num_tokens=30, num_output_tokens=30, model_seconds=15.0),
        Event("finish", 25.0, sample="s18", num_tokens=31),
        Event("admit", 30.0, sample="s19", num_tokens=5, value=6),
        Event("finish", 30.0, sample="s19", num_tokens=2),
        Event("iteration_end", 30.0),
    )
    row = one(df)
    assert row["tail_seconds"] == 20 and row["paused"] == pytest.approx(5) and row["true_length"] == pytest.approx(15)
    (without,) = analysis.what_if(df, "paused").to_dict("records")
    assert (without["tail_seconds"], without["wall_seconds"]) == (15, 25)
    assert without["speedup"] == pytest.approx(30 / 25)


def test_what_if_names_what_is_no_cause() -> None:
    with pytest.raises(ValueError, match="what_if: luck is not a cause; choose from started_late, paused"):
        analysis.what_if(life(last=12.0), "luck")


def test_no_tail_has_no_cause() -> None:
    (row,) = analysis.tail_attribution(frame(*EVENTS)).to_dict("records")
    assert row["tail_seconds"] == 0 and row["cause"] == ""
