"""How far off the simulator is: a bench's own runs, predicted.

    longtail bench --out RUN --strategies "sync;token-budget;over-issue"
    longtail simulate --validate RUN

The costs are fitted to one run of the trace (the baseline, with whatever the machine did in it), the lengths are those
that the samples got (every strategy makes the same samples), and each run is then simulated with its own settings. What
is printed is predicted against measured, for the calibrated strategy and for those that the fit has not seen, from the
same function (`analysis.summary`) on both traces.

A real run is one draw of a shared machine: `floor` says how far the machine itself is from being constant, as the share
by which the pass times of the other runs differ in total from what the fit to the first says of the very same passes.
A prediction cannot be closer than that but by luck.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.bench import analysis
from longtail.bench.cluster_spec import BATCHED, Batch, ClusterSpec, Seconds
from longtail.bench.cost_fit import fit, steps_of
from longtail.bench.engines import Engines
from longtail.bench.simulate import run
from longtail.bench.trace import TraceWriter, read_trace
from longtail.bench.workload_files import read_workload
from longtail.partial_rollout.engines.simulated import Instances

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from longtail.bench.cost_model import CostModel

COMPARED = (("wall_seconds", "makespan"), ("tail_seconds", "tail"), ("bubble_share", "empty slots"))
SCHEDULE = (("tokens_generated", "tokens"), ("tokens_prefilled", "prefilled"), ("passes", "passes"))
"""What no machine's speed changes."""
SEEN, UNSEEN = 0.05, 0.10
"""What is hoped for, of the makespan."""


def validate(folder: Path, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """folder: of a `longtail bench --out`. JSON-ready. ValueError or TraceError names the fix."""
    folder = Path(folder)
    path = folder / "trace.parquet" if folder.is_dir() else folder
    df = read_trace(path)
    found = measured(df)
    names = list(found)
    settings = {name: settings_of(df, name) for name in names}
    for name, own in settings.items():
        if not found[name]["complete"]:
            raise ValueError(f"{path}: run {name} was cut off; validate on a bench that ended")
        if own.get("drafter"):
            raise ValueError(f"{path}: run {name} drafts ({own['drafter']}); validate on a bench without --drafter")
        if own.get("engines", 1) > 1 and own.get("ray") is None:
            raise ValueError(f"{path}: the engines of run {name} took turns in one process; validate on one with --ray")
    progress(f"fitting to {names[0]}")
    costs = fit(df, runs=[names[0]])
    rows = []
    for name in names:
        progress(f"predicting {name}")
        predicted = predict(df, path, name, names[0], costs, settings[name])
        slower = floor(df, name, costs)
        step = dataclasses.replace(costs.step, scale=costs.step.scale * (1.0 + slower))
        own = predict(df, path, name, names[0], dataclasses.replace(costs, step=step), settings[name])
        rows.append(
            {
                "run": name,
                "seen": name == names[0],
                "floor": slower,
                "at its speed": _pair(own["wall_seconds"], found[name]["wall_seconds"]),
                **{
                    label: _pair(predicted[key], found[name][key])
                    for key, label in (*COMPARED, *SCHEDULE)
                },
            }
        )
    return {"trace": str(path), "calibrated_on": names[0], "report": costs.report, "rows": rows}


def settings_of(df: pd.DataFrame, name: str) -> dict[str, Any]:
    started = df[(df["run"] == name) & (df["kind"] == "run_start")]
    if not len(started):
        raise ValueError(f"run {name} does not say its settings; validate on the trace of a `longtail bench`")
    settings: dict[str, Any] = json.loads(started["detail"].iloc[0] or "{}")
    for key in ("slots", "prompts_per_iteration", "group_size", "iterations"):
        if key not in settings:
            raise ValueError(f"run {name}: its settings lack {key}; validate on the trace of a `longtail bench`")
    return settings


def predict(
    df: pd.DataFrame, path: Path, name: str, first: str, costs: CostModel, settings: dict[str, Any]
) -> dict[str, Any]:
    """`analysis.summary` of the simulated run. first: the run of the trace `df` (at `path`) that was fitted, with its
    lengths, and its seconds of grading and of KV; settings: of the run to predict, called `name`."""
    workload = read_workload(path, run=first)
    engines = Engines(settings.get("engines", 1), settings.get("ray"))
    spec = _Fitted(
        name="validation",
        batch=Batch(
            groups=settings["prompts_per_iteration"],
            group_size=settings["group_size"],
            iterations=settings["iterations"],
        ),
        instances=(),
        seconds=Seconds(
            update=_update_seconds(df, first, costs, engines.count),
            grade=_grade_seconds(df, first),
            graders=1,
            **_kv_seconds(df, first),
        ),
        costs=costs,
        siblings=settings.get("ray") is not None or engines.count > 1,
        count=engines.count,
        own_slots=engines.share(settings["slots"]),
        own_batched=settings.get("max_num_batched_tokens", BATCHED),
        kv_on_update=settings.get("kv_on_update", "recompute"),
    )
    trace = TraceWriter()
    run(spec, workload, name, trace.listener(name), budget=settings.get("token_budget"), at_once=True)
    return measured(trace.frame())[name]


def measured(df: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """With what `SCHEDULE` needs besides."""
    counts = df[df["kind"] == "step"].groupby("run")[["num_passes", "num_prefill_tokens"]].sum()
    return {
        name: own
        | {
            "passes": int(counts["num_passes"][name]),
            "tokens_prefilled": int(counts["num_prefill_tokens"][name]),
        }
        for name, own in analysis.summary(df).items()
    }


def _kv_seconds(df: pd.DataFrame, name: str) -> dict[str, float]:
    """Seconds a token of saving and restoring, over the whole run: their sums are what a makespan holds."""
    result = {}
    for kind in ("save", "restore"):
        events = df[(df["run"] == name) & (df["kind"] == kind)]
        if not len(events):
            events = df[df["kind"] == kind]
        tokens = float(events["num_tokens"].sum())
        result[kind] = float(events["duration"].sum()) / tokens if tokens else 0.0
    return result


def _update_seconds(df: pd.DataFrame, name: str, costs: CostModel, engines: int) -> float:
    """The time between iterations, in which weights are sent and an engine puts them in place. Several: the others do
    so after it."""
    after = (costs.update or 0.0) if engines > 1 else 0.0
    own = df[df["run"] == name]
    ends, starts = (own.loc[own["kind"] == f"iteration_{what}", "time"].to_numpy() for what in ("end", "start"))
    if len(starts) < 2 or len(ends) < len(starts) - 1:
        return (costs.update or 0.0) + after
    return max(float((starts[1:] - ends[: len(starts) - 1]).mean()), costs.update or 0.0) + after


def _grade_seconds(df: pd.DataFrame, name: str) -> float:
    """Of the time with nothing to do but wait for graders, a sample's share."""
    own = df[df["run"] == name]
    graded = int((own["kind"] == "grade").sum())
    waited = float(own.loc[own["kind"] == "wait", "duration"].sum())
    return waited / graded if graded else 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted(ClusterSpec):
    """Instances with fitted costs."""

    costs: CostModel
    count: int
    own_slots: int
    """Of each instance."""
    own_batched: int
    """Tokens of one forward pass."""

    @property
    def slots(self) -> int:
        return self.count * self.own_slots

    def kinds(self) -> list[Instances]:
        settings = {
            "slots": self.own_slots,
            "max_num_batched_tokens": max(self.own_slots, self.own_batched),
            "update_seconds": self.seconds.update,
            "save_seconds": self.seconds.save,
            "restore_seconds": self.seconds.restore,
            "kv_on_update": self.kv_on_update,
        }
        return [Instances(count=self.count, cost=self.costs.step, settings=settings)]

    def grade_seconds(self) -> float:
        return self.seconds.grade or 0.0


def floor(df: pd.DataFrame, name: str, costs: CostModel) -> float:
    """Measured over fitted seconds of this run's own passes, less 1."""
    steps = steps_of(df[df["run"] == name])
    fitted = costs.step.many(steps.seqs, steps.rows, steps.context) - costs.step.between
    return float((steps.seconds * steps.passes).sum() / np.sum(fitted * steps.passes)) - 1.0


def _pair(predicted: Any, measured: Any) -> dict[str, Any]:
    error = predicted / measured - 1.0 if predicted is not None and measured else None
    return {"predicted": predicted, "measured": measured, "error": error}


def headline(summary: dict[str, Any]) -> str:
    seen = [row for row in summary["rows"] if row["seen"]]
    unseen = [row for row in summary["rows"] if not row["seen"]]
    parts = []
    for rows, what, goal in ((seen, "of the calibrated strategy", SEEN), (unseen, "of the others", UNSEEN)):
        errors = [abs(row["makespan"]["error"]) for row in rows if row["makespan"]["error"] is not None]
        if errors:
            verdict = "within" if max(errors) <= goal else "beyond"
            parts.append(f"{what} {max(errors):.1%} off at most, {verdict} {goal:.0%}")
    noise = max(abs(row["floor"]) for row in summary["rows"])
    own = max(abs(row["at its speed"]["error"]) for row in summary["rows"])
    machine = f"The machine's speed changed by up to {noise:.0%} between the runs; at each run's own: {own:.1%} off."
    return f"Predicted makespan: {'; '.join(parts)}. {machine}"


def table(summary: dict[str, Any]) -> Table:
    """Fits into 80 columns."""
    from rich.table import Table

    title = f"Predicted / measured, costs fitted to {summary['calibrated_on']} (* unseen)"
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("run", no_wrap=True)
    headers = ("makespan\ns", "off", "tail\ns", "off", "empty\n%", "off", "passes", "ma-\nchine", "own\nspeed")
    for header in headers:
        shown.add_column(header, justify="right")
    for row in summary["rows"]:
        cells = []
        for _, label in COMPARED:
            share = label == "empty slots"
            pair = row[label]
            both = [pair[key] for key in ("predicted", "measured")]
            cells.append("/".join("-" if x is None else f"{100 * x:.0f}" if share else f"{x:.1f}" for x in both))
            if share:
                cells.append("" if None in both else f"{100 * (both[0] - both[1]):+.0f}")
            else:
                cells.append("" if pair["error"] is None else f"{pair['error']:+.0%}")
        passes, own = row["passes"], row["at its speed"]["error"]
        cells.append(f"{passes['predicted']}/{passes['measured']}")
        shown.add_row(row["run"] + "*" * (not row["seen"]), *cells, f"{row['floor']:+.0%}", f"{own:+.0%}")
    return shown


def notes(summary: dict[str, Any]) -> list[str]:
    lines = [
        "machine: by how much the passes of this run took longer than the fit to the first run says of the same "
        "passes: noise of the machine (and of the fit), which no schedule explains. own speed: the error of the "
        "makespan when the costs are scaled by that; it knows the run's speed, and predicts its schedule.",
    ]
    return lines + [str(line) for line in summary["report"]["findings"]]
