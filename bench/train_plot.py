"""Learning curves of training runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from longtail.bench.plots.style import RUN_COLOURS, new_figure, styled, titled
from longtail.trainer_adapter.metrics import read_metrics


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Of one run, a point an evaluation."""

    steps: list[int]
    tokens: list[int]
    """Generated before it."""
    sampled: list[float]
    greedy: list[float]
    rewards: list[tuple[int, float]]
    """Tokens generated up to a step's end, and the mean reward of what it handed over."""


def curves(runs: Sequence[Path]) -> dict[str, Curve]:
    """By the directory's name. ValueError for a directory without evaluations."""
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    return {name: _curve(run) for name, run in zip(names, runs, strict=True)}


def _curve(run: Path) -> Curve:
    if not run.is_dir():
        raise ValueError(f"runs: {run} is no directory; give the --out of `longtail train`")
    steps, evaluations = read_metrics(run / "metrics.jsonl"), read_metrics(run / "eval.jsonl")
    if not evaluations:
        raise ValueError(f"runs: {run} has no evaluations (eval.jsonl); train with --eval-every")
    after = [0]
    for line in steps:
        after.append(after[-1] + line["generated"])
    return Curve(
        steps=[line["step"] for line in evaluations],
        tokens=[after[min(line["step"], len(steps))] for line in evaluations],
        sampled=[line["sampled"] for line in evaluations],
        greedy=[line["greedy"] for line in evaluations],
        rewards=[(after[i + 1], line["reward"]) for i, line in enumerate(steps) if line["reward"] is not None],
    )


def sentence(name: str, curve: Curve) -> str:
    return (
        f"{name}: sampled {curve.sampled[0]:.2f} -> {curve.sampled[-1]:.2f}, greedy {curve.greedy[0]:.2f} -> "
        f"{curve.greedy[-1]:.2f}, {curve.steps[-1]} updates, {curve.tokens[-1]:,d} tokens generated"
    )


@styled
def learning(found: Mapping[str, Curve]) -> Figure:
    """Accuracy on held-out prompts (sampled: full, greedy: dashed), against tokens and against updates."""
    figure, (left, right) = new_figure(3.3, 1, 2, sharey=True)
    handles: list[Line2D] = []
    for (name, curve), colour in zip(found.items(), RUN_COLOURS * (1 + len(found) // len(RUN_COLOURS)), strict=False):
        for panel, x in ((left, curve.tokens), (right, curve.steps)):
            panel.plot(x, curve.sampled, color=colour, marker="o", markersize=3.5, linewidth=1.4)
            panel.plot(x, curve.greedy, color=colour, marker="o", markersize=3, linewidth=1.0, linestyle="--")
        handles.append(Line2D([], [], color=colour, marker="o", markersize=3.5, label=name))
    handles.append(Line2D([], [], color="0.4", linewidth=1.4, label="sampled"))
    handles.append(Line2D([], [], color="0.4", linewidth=1.0, linestyle="--", label="greedy"))
    left.set_xlabel("tokens generated")
    right.set_xlabel("updates")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel("accuracy on held-out prompts")
    left.set_ylim(0, 1)
    ends = ", ".join(f"{c.sampled[-1]:.2f} after {c.tokens[-1]:,d} tokens ({name})" for name, c in found.items())
    return titled(figure, f"Sampled accuracy: {ends}", handles)
