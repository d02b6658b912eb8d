"""What the simulator says of pools of several engines, against what they take: `longtail bench pool --predict`.

The same prompts run on pools of Ray actors, each engine with the same slots. The costs are fitted to the first pool, of
one engine; the others are predicted from them, unseen. Beside that, each from its own costs (a trace of several engines
is fitted by engine): what is off then is the schedule.

A machine with few cores has no room for many engines at once. They are slowed by a known factor
(`engines.slow_engine`): asleep for most of a pass, they leave the cores to each other.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.cost_fit import fit
from longtail.bench.machine import describe
from longtail.bench.run import BenchConfig
from longtail.bench.run import run as run_bench
from longtail.bench.simulate_validate import floor, measured, predict, settings_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from longtail.bench.cost_model import CostModel

GOAL = 0.10
"""Of the makespan."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PredictConfig:
    """Checked at construction."""

    model: str | Path
    """A directory or a hub id."""
    counts: tuple[int, ...] = (1, 2, 4)
    """Engines; the first pool is the one that the costs are fitted to."""
    slots: int = 4
    """Of each engine."""
    strategy: str = "sync"
    iterations: int = 2
    prompts: int = 12
    group_size: int = 4
    max_tokens: int = 64
    slowed: float = 4.0
    ray: str = "local"

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"counts must be numbers of engines of at least 1, not {self.counts!r}")
        self.bench(self.counts[0])  # checks the rest

    def bench(self, count: int) -> BenchConfig:
        return BenchConfig(
            model=str(self.model),
            strategies=(self.strategy,),
            iterations=self.iterations,
            prompts=self.prompts,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            slots=count * self.slots,
            threads=1,
            engines=count,
            ray=self.ray,
            slowed=self.slowed,
        )


def run(config: PredictConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """JSON-ready."""
    name, rows = config.strategy, list[dict[str, Any]]()
    first: CostModel | None = None
    with tempfile.TemporaryDirectory(prefix="pool-predict-") as folder:
        path = Path(folder)
        frame: pd.DataFrame | None = None
        for count in config.counts:
            progress(f"{config.prompts * config.group_size * config.iterations} samples on {count} engines")
            result = run_bench(config.bench(count))
            own, own_path = fit(result.frame), Path(folder) / f"{count}.parquet"
            result.trace.write(own_path, {})
            took = measured(result.frame)[name]
            of_run = settings_of(result.frame, name)
            from_first = from_own = predict(result.frame, own_path, name, name, own, of_run)
            if first is None or frame is None:  # the lengths are the same in all
                first, frame, path = own, result.frame, own_path
            else:
                from_first = predict(frame, path, name, name, first, of_run)
            rows.append(
                {
                    "engines": count,
                    "seen": result.frame is frame,
                    "measured": took["wall_seconds"],
                    "predicted": from_first["wall_seconds"],
                    "error": from_first["wall_seconds"] / took["wall_seconds"] - 1.0,
                    "own_error": from_own["wall_seconds"] / took["wall_seconds"] - 1.0,
                    "passes": {"measured": took["passes"], "predicted": from_first["passes"]},
                    "machine": floor(result.frame, name, first),
                }
            )
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()}
    return {"settings": settings, "machine": describe(), "costs": first and first.report, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    out = Table(title="Makespan of a pool, simulated and measured (* unseen)", title_justify="left")
    out.add_column("engines")
    for header in ("measured\ns", "predicted\ns", "off", "own costs:\noff", "passes", "machine"):
        out.add_column(header, justify="right")
    for row in result["rows"]:
        passes = row["passes"]
        out.add_row(
            f"{row['engines']}{'' if row['seen'] else '*'}",
            f"{row['measured']:.1f}",
            f"{row['predicted']:.1f}",
            f"{row['error']:+.1%}",
            f"{row['own_error']:+.1%}",
            f"{passes['predicted']}/{passes['measured']}",
            f"{row['machine']:+.1%}",
        )
    return out


def notes(result: dict[str, Any]) -> list[str]:
    slowed, rows = result["settings"]["slowed"], result["rows"]
    parts = []
    for key, what in (("own_error", "each from its own costs"), ("error", f"from those of {rows[0]['engines']}")):
        worst = max(abs(row[key]) for row in rows)
        parts.append(f"{what} {worst:.1%} off at most, {'within' if worst <= GOAL else 'beyond'} {GOAL:.0%}")
    lines = [f"Predicted makespan: {'; '.join(parts)}."]
    if slowed > 1.0:
        lines.append(
            f"The engines were slowed: each slept until a pass had taken {slowed:g} times the CPU time that one of as "
            "many rows needs, so that this machine's cores have room for all of them at once."
        )
    lines.append(
        "passes: of all engines, predicted/measured. machine: by how much passes took longer than the costs of the "
        "first pool say of the same passes."
    )
    return lines
