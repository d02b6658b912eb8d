"""Strategies on a simulated cluster: the rollout's own code on a virtual clock, and what came of it in numbers.

    result = simulate(read_spec("demo"), parse_workload("lognormal(...)", groups=512, group_size=8))
    result.runs["over-issue"]["makespan"]

A run is a trainer's: prompts are submitted as the rollout needs them; it collects, trains, updates the weights, and
collects again, until every group of the workload is handed over. While a batch is trained, instances of strategies that
keep samples running go on; those of the others wait. Every strategy makes the same samples.

The numbers (`Run`), in the words of `analysis`, but read off the samples instead of a trace, so that a million are no
trouble: `tests/bench/test_simulate.py` holds them against `analysis.summary` of a trace.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from longtail.bench.analysis import nearest_rank
from longtail.bench.cluster_spec import ClusterSpec
from longtail.bench.strategy_specs import BUDGET_SHARE, check_specs, samples_for, strategy_for
from longtail.bench.trace import TraceWriter
from longtail.bench.workload import Workload
from longtail.events import Event, Listener, ignore
from longtail.partial_rollout.background import VirtualBackground
from longtail.partial_rollout.collector import quiet_collector
from longtail.partial_rollout.engines.simulated import Length, SimulatedCluster
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.partial_rollout.length_bias import LengthBiasWarning
from longtail.partial_rollout.rollout import Rollout
from longtail.partial_rollout.strategies import Strategy
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas as pd

TRACED = 20_000
"""Samples of all runs together up to which events are kept."""
AHEAD = 4
"""Batches of prompts that nobody has begun yet, at least."""
STEADY = 8
"""Hand-overs from which on the middle half of a run is told separately."""


@dataclasses.dataclass(slots=True)
class Run:
    """Of one strategy. Seconds are virtual."""

    strategy: str
    makespan: float = 0.0
    iterations: int = 0
    samples_trained: int = 0
    tokens_trained: int = 0
    tokens_generated: int = 0
    tokens_wasted: int = 0
    """Settled on a line of the ledger other than trained."""
    tokens_recomputed: int = 0
    seconds_per_1000_tokens: float | None = None
    steady_seconds_per_1000_tokens: float | None = None
    """Of the middle half of the hand-overs, by groups: without the first batches, which nothing was carried into, and
    the last, after which nothing comes. None: fewer than STEADY hand-overs."""
    tail_seconds: float = 0.0
    generating_seconds: float = 0.0
    bubble_share: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    staleness: dict[str, int] = dataclasses.field(default_factory=dict)
    training_seconds: float = 0.0
    update_seconds: float = 0.0
    ledger: dict[str, int] = dataclasses.field(default_factory=dict)
    biased_at: list[int] = dataclasses.field(default_factory=list)
    """Iterations in which the length-bias meter warned."""
    host_seconds: float = 0.0
    """That the simulation took here."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(slots=True)
class Result:
    runs: dict[str, Run]
    spec: ClusterSpec
    workload: dict[str, Any]
    """`Workload.summary`."""
    trace: TraceWriter | None
    """None: more than TRACED samples."""

    def frame(self) -> pd.DataFrame:
        assert self.trace is not None
        return self.trace.frame()


def simulate(
    spec: ClusterSpec,
    workload: Workload,
    strategies: Sequence[str],
    *,
    traced: int = TRACED,
    progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """ValueError for strategies that are not known, and for samples that the cluster cannot run."""
    check_specs(tuple(strategies))
    trace = TraceWriter() if len(workload) * len(strategies) <= traced else None
    runs = {}
    for name in strategies:
        progress(name)
        runs[name] = run(spec, workload, name, ignore if trace is None else trace.listener(name))
    return Result(runs, spec, workload.summary(), trace)


def run(
    spec: ClusterSpec,
    workload: Workload,
    strategy: str | Strategy,
    listener: Listener = ignore,
    *,
    budget: int | None = None,
    at_once: bool = False,
) -> Run:
    """One strategy. budget: output tokens of an iteration under token-budget; None: BUDGET_SHARE of a batch's. at_once:
    submit everything at the start, as `longtail bench` does."""
    started = time.perf_counter()
    batch = spec.batch
    mean = float(workload.output_tokens.mean())
    tokens = budget or max(1, round(BUDGET_SHARE * mean * batch.groups * batch.group_size))
    if isinstance(strategy, str):
        name, strategy = strategy, strategy_for(strategy, groups=batch.groups, samples=batch.group_size, budget=tokens)
    else:
        name = strategy.name
    with quiet_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LengthBiasWarning)  # the run says it
        made = _Simulation(spec, workload, name, strategy, listener).run(at_once)
    made.host_seconds = time.perf_counter() - started
    return made


class _Simulation:
    def __init__(
        self, spec: ClusterSpec, workload: Workload, name: str, strategy: Strategy, listener: Listener
    ) -> None:
        self.spec, self.workload, self.strategy, self.listener = spec, workload, strategy, listener
        self.prompts = Prompts(workload, strategy)
        self.cluster = SimulatedCluster(
            spec.kinds(),
            lengths=self.prompts.length,
            listener=listener,
            affinity=spec.affinity,
            siblings=spec.siblings,
            routing="group" if spec.routing == "group" else "load",
            faults=spec.faults,
        )
        self.measured = _Measured(Run(name), self.cluster, spec.slots, strategy.keeps_running)
        grade = spec.grade_seconds()
        grader = None
        if grade:
            grader = VirtualBackground[GradeRequest, Grade](
                self.cluster.clock, _graded, lambda request: grade, workers=spec.seconds.graders
            )
        self.rollout = Rollout(self.cluster, strategy=strategy, grader=grader, listener=listener)

    def run(self, at_once: bool) -> Run:
        rollout, cluster, measured = self.rollout, self.cluster, self.measured
        settings = {"strategy": self.strategy.name, "slots": self.spec.slots, "simulated": True}
        self._tell("run_start", detail=json.dumps(settings))
        fresh = self.prompts.num_left if at_once else self._ahead()
        with rollout:
            while True:
                if (wanting := fresh - (len(rollout.store) - rollout.num_started)) > 0:
                    rollout.submit(self.prompts.take(wanting))
                start = cluster.now()
                groups = rollout.collect()
                measured.iteration(start, groups, rollout)
                if not len(rollout.store) and not self.prompts.num_left:
                    break
                self._train()
                start = cluster.now()
                rollout.update_weights({}, cluster.version + 1)
                measured.run.update_seconds += cluster.now() - start
            measured.close(rollout)
            rollout.check_integrity()
        self._tell("run_end")
        return measured.run

    def _ahead(self) -> int:
        batch, pool = self.spec.batch, getattr(self.strategy, "pool", 1)
        return max(AHEAD, pool + 1) * batch.groups + 2 * self.spec.slots // batch.group_size

    def _train(self) -> None:
        """Beside instances that keep samples running, or while they all wait."""
        seconds, cluster = self.spec.seconds.train, self.cluster
        if not seconds:
            return
        start = cluster.now()
        cluster.alarm = start + seconds
        while self.strategy.keeps_running and cluster.now() < cluster.alarm and self.rollout.work():
            pass
        cluster.clock.advance_to(cluster.alarm)
        cluster.alarm = None
        self._tell("train", time=start, duration=seconds)
        self.measured.trained(seconds)

    def _tell(self, kind: Any, **fields: Any) -> None:
        fields.setdefault("time", self.cluster.now())
        self.listener(Event(kind, **fields))


def _graded(request: GradeRequest, seconds: float) -> Grade:
    return Grade(sample_id=request.sample_id, reward=1.0, failure=None, seconds=seconds, grader="simulated")


class Prompts:
    """A workload's groups, made when they are asked for. A strategy that starts more samples than a group has gets
    those beyond as long as its first ones."""

    def __init__(self, workload: Workload, strategy: Strategy) -> None:
        self.workload = workload
        self._next = 0
        ends = list(zip(workload.output_tokens.tolist(), workload.capped.tolist(), strict=True))
        known = {end: Length(end[0], "length" if end[1] else "stop") for end in set(ends)}
        self._lengths = [known[end] for end in ends]
        """Of each sample; of those that end alike the same object."""
        self._starts: list[int] = workload.group_starts.tolist()
        self._prompts: list[int] = workload.prompt_tokens[workload.group_starts[:-1]].tolist()
        self._numbers = None if workload.names is None else {name: i for i, name in enumerate(workload.names)}
        self._strategy = strategy
        self._cap = max(tokens for tokens, _ in ends)
        self._params: dict[int, SamplingParams] = {}
        self._group_of: tuple[str, int, int] = ("", 0, 1)
        """The group that was asked for last: its name, first sample and size. Siblings are asked for one after the
        other."""
        self._same = (1,) * (max(self._prompts) + 1)

    @property
    def num_left(self) -> int:
        return self.workload.num_groups - self._next

    def take(self, count: int) -> list[Group]:
        """The next groups, at most so many."""
        last = min(self._next + count, self.workload.num_groups)
        groups = [self._group(number) for number in range(self._next, last)]
        self._next = last
        return groups

    def _group(self, number: int) -> Group:
        size = samples_for(self._strategy, self._starts[number + 1] - self._starts[number])
        params = self._params.get(size)
        if params is None:
            params = self._params[size] = SamplingParams(n=size, max_tokens=self._cap)
        prompt = (number, *self._same[: max(self._prompts[number], 1) - 1])  # no two are the same
        return Group.from_prompt(self.workload.name(number), prompt, params)

    def length(self, sample: Sample) -> Length:
        """For the engine."""
        name, start, size = self._group_of
        if sample.group_id != name:
            name = sample.group_id
            number = int(name[1:]) if self._numbers is None else self._numbers[name]
            start = self._starts[number]
            size = self._starts[number + 1] - start
            self._group_of = name, start, size
        return self._lengths[start + sample.index % size]


class _Measured:
    """Reads the numbers of a run off what is handed over."""

    def __init__(self, run: Run, cluster: SimulatedCluster, slots: int, keeps_running: bool) -> None:
        self.run, self.cluster, self.slots, self.keeps_running = run, cluster, slots, keeps_running
        self._starts: list[float] = []
        """Of each iteration,"""
        self._finishes: dict[int, list[float]] = {}
        """and the samples that finished in it."""
        self._handed: list[tuple[float, int, int]] = []
        """After each: time, groups and tokens so far."""
        self._groups = 0
        self._staleness: dict[int, int] = {}
        self._began = cluster.now()

    def iteration(self, start: float, groups: list[Group], rollout: Rollout) -> None:
        run, end = self.run, self.cluster.now()
        run.iterations += 1
        self._starts.append(start)
        last = end if self.keeps_running else min(max(self.cluster.last_left, start), end)
        run.generating_seconds += last - start
        version = self.cluster.version
        for group in groups:
            for sample in group.samples:
                self._sample(sample, version)
        self._groups += len(groups)
        self._handed.append((end, self._groups, run.tokens_trained))

    def _sample(self, sample: Sample, version: int) -> None:
        run, finished = self.run, sample.timings.finished
        run.samples_trained += 1
        run.tokens_trained += len(sample.output_ids)
        for segment in sample.segments:
            age = version - segment.version
            self._staleness[age] = self._staleness.get(age, 0) + segment.end - segment.start
        if finished is not None:
            number = bisect.bisect_right(self._starts, finished) - 1
            self._finishes.setdefault(number, []).append(finished)

    def trained(self, seconds: float) -> None:
        self.run.training_seconds += seconds
        if self.keeps_running:
            self.run.generating_seconds += seconds

    def close(self, rollout: Rollout) -> None:
        run, ledger = self.run, rollout.store.ledger
        run.makespan = self.cluster.now() - self._began
        run.tokens_generated, run.tokens_wasted = ledger.generated, ledger.wasted
        run.ledger = ledger.as_dict()
        run.biased_at = list(rollout.length_bias.onsets)
        run.tokens_recomputed = run.ledger["recomputed"]
        run.tail_seconds = sum(max(f) - (nearest_rank(f, 90) or 0.0) for f in self._finishes.values())
        if run.tokens_trained:
            run.seconds_per_1000_tokens = 1000.0 * run.makespan / run.tokens_trained
            ages = sorted(self._staleness)
            total = sum(self._staleness.values())
            run.staleness = {str(age): self._staleness[age] for age in ages}
            run.staleness_mean = sum(age * n for age, n in self._staleness.items()) / total
            run.staleness_max = ages[-1]
        busy = self.cluster.slot_seconds
        if run.generating_seconds:
            run.bubble_share = max(0.0, 1.0 - busy / (self.slots * run.generating_seconds))
        self._steady()

    def _steady(self) -> None:
        if len(self._handed) < STEADY:
            return
        groups = self._handed[-1][1]
        first = next(entry for entry in self._handed if entry[1] >= groups / 4)
        last = next(entry for entry in self._handed if entry[1] >= 3 * groups / 4)
        if last[2] > first[2]:
            self.run.steady_seconds_per_1000_tokens = 1000.0 * (last[0] - first[0]) / (last[2] - first[2])
