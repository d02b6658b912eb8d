"""A trace in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open as a timeline.

Each run is a process; its threads are the lanes of `analysis.timeline`: iterations, slots, steps, KV and weights,
grades, waits, training. Times are microseconds from the run's start, so that runs lie below each other. What an
environment takes for an answer is an asynchronous span: many go on at once. A counter shows the sequences in slots.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pandas as pd

from longtail.bench import analysis
from longtail.bench.trace import replacing

_ASYNC = "environment"
_LANES = 1_000_000
"""Thread ids of a track start at its number times this: tracks keep their order, lanes theirs within them."""


def chrome_trace(df: pd.DataFrame) -> dict[str, Any]:
    """The whole file as JSON data. Spans ("X") of one thread do not overlap, instants are "i", asynchronous ones "b"
    and "e", counters "C", names "M"."""
    events: list[dict[str, Any]] = []
    spans, counts = analysis.timeline(df), analysis.active(df)
    for pid, fact in enumerate(analysis.rows(analysis.runs(df)), 1):
        events += [
            _meta(pid, 0, "process_name", name=fact.run),
            _meta(pid, 0, "process_sort_index", sort_index=pid),
        ]
        own = spans[spans["run"] == fact.run]
        threads: dict[int, str] = {}
        several = len(set(own["engine"]) - {""}) > 1
        for number, span in enumerate(analysis.rows(own)):
            track = analysis.TRACKS.index(span.track)
            tid = track * _LANES + (0 if span.track == _ASYNC else span.lane) + 1
            threads[tid] = _thread_name(span, several)
            events += _span(span, pid, tid, number)
        for tid, name in sorted(threads.items()):
            events += [_meta(pid, tid, "thread_name", name=name), _meta(pid, tid, "thread_sort_index", sort_index=tid)]
        for row in analysis.rows(counts[counts["run"] == fact.run]):
            events.append({"ph": "C", "name": "sequences in slots", "pid": pid, "ts": _us(row.time),
                           "args": {"active": int(row.active)}})  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": "longtail"}}


def write_chrome_trace(path: str | os.PathLike[str], df: pd.DataFrame) -> int:
    """-> the number of events written."""
    data = chrome_trace(df)
    with replacing(path) as file:
        file.write(json.dumps(data, allow_nan=False, separators=(",", ":")).encode())
    return len(data["traceEvents"])


def _span(span: Any, pid: int, tid: int, number: int) -> list[dict[str, Any]]:
    args = {key: getattr(span, key) for key in ("sample", "group", "engine") if getattr(span, key)}
    args |= {key: _plain(value) for key, value in span.detail.items()}
    name = span.sample if span.track == "slots" else span.name
    base = {"name": name, "cat": span.track, "pid": pid, "tid": tid, "ts": _us(span.start), "args": args}
    if span.track == "slots":
        args["outcome"] = span.name
    if span.track == _ASYNC:
        end = {**base, "ph": "e", "id": f"{pid}.{number}", "ts": _us(span.end), "args": {}}
        return [{**base, "ph": "b", "id": end["id"]}, end]
    begin, stop = _us(span.start), _us(span.end)
    if stop <= begin and span.track in ("grades", "waits"):
        return [{**base, "ph": "i", "s": "t"}]
    return [{**base, "ph": "X", "dur": max(0, stop - begin)}]


def _thread_name(span: Any, several: bool) -> str:
    """several: engines are in the run; each has threads of its own."""
    if span.track == "slots":
        return f"slot {span.lane} of {span.engine}" if several and span.engine else f"slot {span.lane}"
    return f"{span.track} of {span.engine}" if several and span.engine else str(span.track)


def _us(seconds: float) -> int:
    """Whole microseconds: ends that met as seconds still meet."""
    return round(seconds * 1e6)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _meta(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
