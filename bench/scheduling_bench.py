"""What the rollout itself costs: strategies, queue, groups, store and ledger, on an engine that has no model.

A sequence step is one token of one sample. The engine makes one pass a step here, as real ones do, and what it does
itself is not counted: the rest is what a step of the rollout costs beside the model. It must be small and must not
depend on how many samples wait.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from longtail.bench.machine import describe
from longtail.bench.strategy_specs import check_specs, strategy_for
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.script import Length
from longtail.partial_rollout.rollout import Rollout
from longtail.partial_rollout.strategies import STRATEGIES
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

MOST_MICROSECONDS = 50.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingBenchConfig:
    """Checked at construction."""

    strategies: tuple[str, ...] = tuple(STRATEGIES)
    samples: tuple[int, ...] = (1_000, 10_000)
    slots: int = 512
    group_size: int = 8
    shortest: int = 4
    longest: int = 2_000
    median: float = 60.0
    sigma: float = 1.2
    seed: int = 0

    def __post_init__(self) -> None:
        check_specs(self.strategies)
        for name in ("slots", "group_size", "shortest"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.samples or min(self.samples) < self.group_size:
            raise ValueError(f"samples must be numbers of at least group_size {self.group_size}, not {self.samples}")
        if self.longest < self.shortest:
            raise ValueError(f"longest {self.longest} is below shortest {self.shortest}")

    def length(self, sample: Sample) -> Length:
        drawn = random.Random(sample.seed).lognormvariate(0.0, self.sigma) * self.median
        return Length(min(max(round(drawn), self.shortest), self.longest))


class _Timed(SimulatedEngine):
    """Knows how long it worked, and makes one pass a step."""

    seconds = 0.0
    sequence_steps = 0

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        start = time.perf_counter()
        out = super().step(horizon=1)
        self.seconds += time.perf_counter() - start
        self.sequence_steps += out.num_seqs
        return out


def run(config: SchedulingBenchConfig, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """JSON-ready."""
    rows = []
    for spec in config.strategies:
        for samples in config.samples:
            progress(f"{spec}, {samples:,} samples")
            rows.append(_measure(config, spec, samples))
    worst = max(row["microseconds"] for row in rows)
    return {
        "settings": dataclasses.asdict(config),
        "machine": describe(),
        "rows": rows,
        "must_hold": {"most": MOST_MICROSECONDS, "worst": worst, "holds": worst < MOST_MICROSECONDS},
    }


def _measure(config: SchedulingBenchConfig, spec: str, samples: int) -> dict[str, Any]:
    count = samples // config.group_size
    batch = max(config.slots // config.group_size, 1)
    mean = config.median * 2
    strategy = strategy_for(
        spec, groups=batch, samples=config.group_size, budget=max(round(batch * config.group_size * mean), 1)
    )
    engine = _Timed(lengths=config.length, slots=config.slots, materialise=False)
    rollout = Rollout(engine, strategy=strategy)
    params = SamplingParams(n=config.group_size, max_tokens=config.longest)
    rollout.submit(
        Group.from_prompt(f"p{i}", [5], dataclasses.replace(params, seed=config.seed * 1_000_003 + i))
        for i in range(count)
    )
    start = time.perf_counter()
    while len(rollout.store):
        rollout.collect()
    seconds = time.perf_counter() - start - engine.seconds
    rollout.check_integrity()
    return {
        "strategy": spec,
        "samples": count * config.group_size,
        "sequence_steps": engine.sequence_steps,
        "iterations": rollout.iteration,
        "microseconds": 1e6 * seconds / engine.sequence_steps,
        "microseconds_per_sample": 1e6 * seconds / (count * config.group_size),
    }


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    shown = Table(title="The rollout's own time, without the engine", title_justify="left")
    for name in ("strategy", "samples", "iterations", "sequence steps", "us a sequence step", "us a sample"):
        shown.add_column(name, justify="left" if name == "strategy" else "right")
    for row in result["rows"]:
        shown.add_row(
            row["strategy"],
            f"{row['samples']:,}",
            f"{row['iterations']:,}",
            f"{row['sequence_steps']:,}",
            f"{row['microseconds']:.2f}",
            f"{row['microseconds_per_sample']:.0f}",
        )
    return shown
