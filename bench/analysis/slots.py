"""Who held a slot, and when; and everything else that took time, as spans on tracks."""

from __future__ import annotations

import heapq
import re
from typing import Any

import pandas as pd

from longtail.bench.analysis.base import Run, bounds, rows, split_runs, table
from longtail.errors import TraceError

RELEASES = ("pause", "park", "preempt", "finish")
_SPANS = {
    "step": "steps",
    "save": "KV and weights",
    "restore": "KV and weights",
    "update": "KV and weights",
    "grade": "grades",
    "observe": "environment",
    "wait": "waits",
    "train": "training",
    "evaluate": "training",
    "checkpoint": "training",
}
"""Kind of event -> its track in `timeline`."""
TRACKS = ("iterations", "slots", *dict.fromkeys(_SPANS.values()))


def runs(df: pd.DataFrame) -> pd.DataFrame:
    """One row a run, in order of appearance: run, start and end (emitter's clock), wall, complete, slots, settings.

    A run ends at its `run_end`; one that was killed has none and ends with its last event (`complete` is False). Slots
    are those of the settings, or the most samples ever seen at once if that is unknown or larger.
    """
    occupied = intervals(df)
    result = []
    for run in split_runs(df):
        slots = max(int(run.settings.get("slots") or 0), _most_slots(occupied, run.name))
        row = {"run": run.name, "start": run.start, "end": run.end, "wall": run.end - run.start}
        result.append({**row, "complete": run.complete, "slots": slots, "settings": run.settings})
    return table(result, ["run", "start", "end", "wall", "complete", "slots", "settings"])


def intervals(df: pd.DataFrame) -> pd.DataFrame:
    """Slot occupancy: run, engine, sample, start, end, outcome, slot.

    Outcome is the release: finish, length (a finish at the cap), pause, park, preempt, or open (still held when the run
    ended). A trace does not name slots: each interval takes the lowest one of its engine free at its start, so the
    numbers are a drawing aid; how many are taken at any moment is exact. Of a pool's engines, each one's slots follow
    those of the one before. Raises TraceError if a sample is admitted twice at once.
    """
    result = []
    for run in split_runs(df):
        result += _with_lanes_of_engines(_occupancy(run), "slot")
    return table(result, ["run", "engine", "sample", "start", "end", "outcome", "slot"])


def active(df: pd.DataFrame) -> pd.DataFrame:
    """Sequences in slots as a step function: run, time, active (from this time to the next row's)."""
    result = []
    for name, held in intervals(df).groupby("run", sort=False):
        change: dict[float, int] = {0.0: 0}
        for interval in rows(held):
            change[interval.start] = change.get(interval.start, 0) + 1
            change[interval.end] = change.get(interval.end, 0) - 1
        count = 0
        for time in sorted(change):
            count += change[time]
            result.append({"run": name, "time": time, "active": count})
    return table(result, ["run", "time", "active"])


def timeline(df: pd.DataFrame) -> pd.DataFrame:
    """All that took time, and instants of grading: run, track (of TRACKS), lane, name, start, end, engine, sample,
    group, detail (a dict of the numbers that matter).

    Spans of one run, track and lane do not overlap: each takes the lowest lane of its engine free at its start, so that
    a pool's engines lie below each other. On the track of slots the lane is the slot of `intervals` and the name
    its outcome; on the others the name is the kind of event.
    """
    result = []
    for run in split_runs(df):
        spans = [{**row, "track": "slots", "name": row["outcome"], "lane": row["slot"]} for row in
                 _with_lanes_of_engines(_occupancy(run), "slot")]  # fmt: skip
        by_track: dict[str, list[dict[str, Any]]] = {track: [] for track in TRACKS}
        by_track["slots"] = spans
        by_track["iterations"] = _with_lanes(_iteration_spans(run), "lane")
        for event in run.of(*_SPANS):
            begin = event.time - run.start
            span = {"run": run.name, "name": event.kind, "start": begin, "end": begin + event.duration}
            ids = {"engine": event.engine, "sample": event.sample, "group": event.group}
            by_track[_SPANS[event.kind]].append({**span, **ids, "detail": _numbers(event)})
        for track, own in by_track.items():
            if track not in ("slots", "iterations"):
                own.sort(key=lambda row: row["start"])
                _with_lanes_of_engines(own, "lane")
            blank: dict[str, Any] = {"engine": "", "sample": "", "group": ""}
            result += [{**blank, "detail": {}, **row, "track": track} for row in own]
    columns = ["run", "track", "lane", "name", "start", "end", "engine", "sample", "group", "detail"]
    return table(result, columns)


def _numbers(event: Any) -> dict[str, Any]:
    """Of an event the fields that say something: those of a step, and elsewhere tokens, value and detail."""
    if event.kind == "step":
        names = ["num_seqs", "num_tokens", "num_prefill_tokens", "num_output_tokens", "num_draft_tokens",
                 "num_accepted_tokens", "num_passes"]  # fmt: skip
    else:
        names = ["num_tokens", "value", "detail"]
    return {name: value for name in names if (value := getattr(event, name)) and value == value}


def _iteration_spans(run: Run) -> list[dict[str, Any]]:
    result = []
    for number, events in run.events[run.events["of_iteration"] >= 0].groupby("of_iteration"):
        start, end = bounds(events, run)
        version = int(events["value"].iloc[0])
        detail = {"iteration": int(str(number)), "version": version}
        result.append({"run": run.name, "name": f"iteration {number}", "start": start, "end": end, "detail": detail})
    return result


def _occupancy(run: Run) -> list[dict[str, Any]]:
    """Intervals without slots, in order of start; starts of equal time keep the order of emission."""
    admitted: dict[str, tuple[float, str]] = {}
    result = []

    def close(sample: str, end: float, outcome: str) -> None:
        start, engine = admitted.pop(sample)
        row = {"run": run.name, "engine": engine, "sample": sample, "start": start, "end": end, "outcome": outcome}
        result.append(row)

    for event in run.of("admit", *RELEASES):
        time = event.time - run.start
        if event.kind == "admit":
            if event.sample in admitted:
                raise TraceError(
                    f"run {run.name}: sample {event.sample} is admitted at {time:.6f} s and again before it left its "
                    "slot; the engine that wrote this trace lost track of it"
                )
            admitted[event.sample] = time, event.engine
        elif event.sample in admitted:  # aborting a waiting or paused sample releases no slot
            capped = event.kind == "finish" and event.detail == "length"
            close(event.sample, time, "length" if capped else event.kind)
    for sample in list(admitted):
        close(sample, run.end - run.start, "open")
    return sorted(result, key=lambda row: row["start"])


def _with_lanes(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Spans in order of start, each with the lowest lane free at its start."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, lane)
    for row in rows:
        while busy and busy[0][0] <= row["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row[name] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (row["end"], row[name]))
    return rows


def _with_lanes_of_engines(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Each engine, in the order of names and numbers, has lanes of its own."""
    by_engine: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_engine.setdefault(row["engine"], []).append(row)
    first = 0
    for _, own in sorted(by_engine.items(), key=lambda item: _natural(item[0])):
        for row in _with_lanes(own, name):
            row[name] += first
        first = max(row[name] for row in own) + 1
    return rows


def _natural(name: str) -> list[str | int]:
    """pool-10 after pool-9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _most_slots(occupied: pd.DataFrame, run: str) -> int:
    """Taken at once."""
    own = occupied[occupied["run"] == run]
    held = _with_lanes([{"start": row.start, "end": row.end} for row in rows(own)], "lane")
    return max((row["lane"] for row in held), default=-1) + 1
