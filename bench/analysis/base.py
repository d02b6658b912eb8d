"""Runs of a trace, and the small helpers that every analysis shares."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd


@dataclasses.dataclass(frozen=True)
class Run:
    """One run's events, in order of emission, and its bounds on the emitter's clock."""

    name: str
    events: pd.DataFrame
    """With `of_iteration`: number of the iteration begun last, -1 before the first."""
    start: float
    end: float
    complete: bool
    settings: dict[str, Any]

    def of(self, *kinds: str) -> Iterator[Any]:
        return rows(self.events[self.events["kind"].isin(kinds)])

    def total(self, kind: str, column: str) -> float:
        return self.events.loc[self.events["kind"] == kind, column].sum()


def split_runs(df: pd.DataFrame) -> list[Run]:
    """In order of appearance."""
    result = []
    for name, events in df.groupby("run", sort=False):
        starts = events.loc[events["kind"] == "run_start"]
        ends = events.loc[events["kind"] == "run_end", "time"]
        start = starts["time"].iloc[0] if len(starts) else events["time"].min()
        end = ends.iloc[-1] if len(ends) else (events["time"] + events["duration"]).max()
        settings = read_json(starts["detail"].iloc[0]) if len(starts) else {}
        events = events.assign(of_iteration=(events["kind"] == "iteration_start").cumsum() - 1)
        result.append(Run(str(name), events, float(start), float(end), bool(len(ends)), settings))
    return result


def bounds(events: pd.DataFrame, run: Run) -> tuple[float, float]:
    """Start and end of an iteration of the run, in seconds since its start. events: of the iteration."""
    ends = events.loc[events["kind"] == "iteration_end", "time"]
    end = ends.iloc[-1] if len(ends) else run.end
    return float(events["time"].iloc[0]) - run.start, float(end) - run.start


def read_json(detail: str) -> dict[str, Any]:
    """Of an event's detail; empty if it is not a JSON object."""
    try:
        value = json.loads(detail or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def pieces(events: Sequence[Any], start: float, end: float) -> Iterator[tuple[float, float, int]]:
    """[start, end] cut where an event begins or ends: (begin, stop, index of its owner). A second belongs to the event
    that started last of those going on (of equal starts, to the one that ends first); to none: index -1."""
    spans = [(max(event.time, start), min(event.time + event.duration, end)) for event in events]
    order = sorted((index for index, (begin, stop) in enumerate(spans) if stop > begin), key=lambda i: spans[i][0])
    edges = sorted({start, end, *(edge for index in order for edge in spans[index])})
    going: list[tuple[float, float, int]] = []  # (-begin, stop, index): the last started on top, of equals the shorter
    upcoming = iter(order)
    following = next(upcoming, None)
    for begin, stop in itertools.pairwise(edges):
        while following is not None and spans[following][0] <= begin:
            heapq.heappush(going, (-spans[following][0], spans[following][1], following))
            following = next(upcoming, None)
        while going and going[0][1] <= begin:
            heapq.heappop(going)
        yield begin, stop, going[0][2] if going else -1


def nearest_rank(values: Sequence[float], percent: int) -> float | None:
    """The value of rank ceil(percent / 100 x n) in ascending order; None of nothing."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


def rows(frame: pd.DataFrame) -> Iterator[Any]:
    """The rows as named tuples (typed Any: pandas cannot say what a column holds)."""
    return frame.itertuples()


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def table(rows: list[dict[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns))


def plain(value: Any) -> Any:
    """Plain Python numbers all the way down; NaN becomes None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
