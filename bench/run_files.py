"""Runs read back from where `longtail bench` or `longtail trace import` left them, several together if they are alike.

A run is a directory with a trace.parquet (and perhaps a summary.json), or a trace file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from longtail.bench import analysis
from longtail.bench.analysis.overview import grader_in
from longtail.bench.trace import read_trace
from longtail.errors import TraceError

ALIKE = ("model", "tasks", "seed", "iterations", "prompts", "group_size", "max_tokens", "temperature")
"""Settings in which compared runs must agree: they decide what is generated. (Slots, threads, drafters and strategies
decide how, and are what one compares.)"""
_BESIDE = ("ledger", "speculation")
"""Of summary.json: what a trace does not hold, or not all of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    frame: pd.DataFrame
    """The events of all runs. Of several sources the runs are called SOURCE/RUN."""
    summary: dict[str, dict[str, Any]]
    meta: dict[str, Any]
    """Of the trace files; of several, those that differ by source."""
    unlike: list[str]
    """Why they should not be compared."""


def load(paths: Sequence[str | Path], *, anyway: bool = False) -> Loaded:
    """Raises TraceError for a file that is no whole trace, or a summary.json that is damaged, and ValueError if the
    sources are not alike (unless `anyway`), naming the first field that differs."""
    if not paths:
        raise ValueError("runs: none given; pass the directory of a bench")
    files = [trace_file(path) for path in paths]
    if len(set(files)) < len(files):
        raise ValueError("runs: one is given twice")
    frames = [read_trace(file) for file in files]
    names = _names(files)
    unlike = [line for other in range(1, len(files)) for line in _differences(frames, names, other)]
    if unlike and not anyway:
        raise ValueError(f"runs are not alike: {unlike[0]}; compare them all the same with --anyway")
    extras: dict[str, dict[str, Any]] = {}
    metas = [frame.attrs.pop("meta") for frame in frames]
    renamed = []
    for file, frame, name in zip(files, frames, names, strict=True):
        own = {run: run if len(files) == 1 else f"{name}/{run}" for run in frame["run"].unique()}
        extras |= {own[run]: extra for run, extra in _extras(file.parent).items() if run in own}
        renamed.append(frame.assign(run=frame["run"].map(own)))
    df = pd.concat(renamed, ignore_index=True)
    summary = analysis.summary(df)
    for run, extra in extras.items():
        summary[run] |= extra
    return Loaded(df, summary, _merged(metas, names), unlike)


def trace_file(path: str | Path) -> Path:
    path = Path(path)
    return path / "trace.parquet" if path.is_dir() else path


def _names(files: Sequence[Path]) -> list[str]:
    """Short names of the sources: of a directory its name, in full where two are the same."""
    short = [file.resolve().parent.name if file.name == "trace.parquet" else file.stem for file in files]
    return [name if short.count(name) == 1 else str(file) for name, file in zip(short, files, strict=True)]


def _extras(directory: Path) -> dict[str, dict[str, Any]]:
    file = directory / "summary.json"
    if not file.is_file():
        return {}
    try:
        runs = json.loads(file.read_text())["runs"]
        return {run: {key: numbers[key] for key in _BESIDE if key in numbers} for run, numbers in runs.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{file}: damaged, or not the summary of a bench ({error!r}); remove it, and the report is made from the "
            "trace alone"
        ) from error


def _merged(metas: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for meta in metas for key in meta):
        values = [meta.get(key) for meta in metas]
        if all(value == values[0] for value in values):
            merged[key] = values[0]
        else:
            merged |= {f"{key} ({name})": value for name, value in zip(names, values, strict=True)}
    return merged


# --- alike


def _differences(frames: Sequence[pd.DataFrame], names: Sequence[str], other: int) -> Iterator[str]:
    """Between the first source and another: the settings of ALIKE, then prompts, then lengths."""
    first, second = _settings(frames[0]), _settings(frames[other])
    a, b = names[0], names[other]
    for field in ALIKE:
        if first.get(field) != second.get(field):
            yield f"{field} is {_say(first.get(field))} in {a} and {_say(second.get(field))} in {b}"
    graders, theirs = _graders(frames[0]), _graders(frames[other])
    if graders and theirs and graders != theirs:  # a changed exam is no better model
        yield f"grader is {', '.join(sorted(graders))} in {a} and {', '.join(sorted(theirs))} in {b}"
    prompts, others = _tokens(frames[0], "submit"), _tokens(frames[other], "submit")
    if not prompts.keys() & others.keys():
        yield f"samples: none of {a} is in {b}"
    yield from _first_difference("prompts", "prompt tokens", prompts, others, a, b)
    if not (_may_differ(first) or _may_differ(second)):
        ended, end = _tokens(frames[0], "finish"), _tokens(frames[other], "finish")
        yield from _first_difference("lengths", "output tokens", ended, end, a, b)


def _may_differ(settings: Mapping[str, Any]) -> bool:
    """Whether a sample may differ from run to run."""
    return settings.get("numerics") == "fast" or settings.get("engine") == "vllm"


def _first_difference(
    field: str, unit: str, first: Mapping[str, int], second: Mapping[str, int], a: str, b: str
) -> Iterator[str]:
    for sample, tokens in first.items():
        if sample in second and second[sample] != tokens:
            yield f"{field}: sample {sample} has {tokens} {unit} in {a} and {second[sample]} in {b}"
            return


def _say(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _settings(df: pd.DataFrame) -> dict[str, Any]:
    """Of the first run of a source: a bench gives all its runs the same ones of ALIKE."""
    settings: dict[str, Any] = analysis.runs(df)["settings"].iloc[0]
    return settings


def _tokens(df: pd.DataFrame, kind: str) -> dict[str, int]:
    """Sample -> tokens of its event; of a finish only where it ended by itself or at a cap."""
    own = df[df["kind"] == kind]
    if kind == "finish":
        own = own[own["detail"].isin(["stop", "length"])]
    return dict(zip(own["sample"], own["num_tokens"].astype(int), strict=True))


def _graders(df: pd.DataFrame) -> set[str]:
    details = df[df["kind"] == "grade"]["detail"].unique()
    return {name for detail in details if (name := grader_in(detail))}
