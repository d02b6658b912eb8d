"""The exported timeline keeps the rules of the Trace Event Format, and holds what the trace holds."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from longtail import Event, TraceError
from longtail.bench import analysis
from longtail.bench.chrome_trace import chrome_trace
from longtail.bench.cli import app
from longtail.bench.trace import TraceWriter

NEEDED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
}


def problems(data: Any) -> list[str]:
    """What is against the rules of the format (Google, "Trace Event Format"): fields of each phase, whole and
    non-negative times, spans of a thread that nest, asynchronous spans that pair, threads with names."""
    found = []
    spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    opened: dict[tuple[str, str], int] = {}
    named = {(e["pid"], e["tid"]) for e in data["traceEvents"] if e["name"] == "thread_name"}
    for event in data["traceEvents"]:
        phase = event.get("ph")
        if phase not in NEEDED:
            found.append(f"phase {phase}")
            continue
        if missing := NEEDED[phase] - event.keys():
            found.append(f"{phase} lacks {sorted(missing)}")
            continue
        times = [event.get(key, 0) for key in ("ts", "dur")]
        if any(not isinstance(t, int) or t < 0 for t in times):
            found.append(f"times {times}")
        if phase in "Xibe" and (event["pid"], event["tid"]) not in named:
            found.append(f"thread {event['tid']} has no name")
        if phase == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif phase == "b":
            opened[event["cat"], event["id"]] = event["ts"]
        elif phase == "e" and opened.pop((event["cat"], event["id"]), event["ts"] + 1) > event["ts"]:
            found.append(f"{event['id']} ends before it begins")
        elif phase == "C" and not all(isinstance(v, int | float) for v in event["args"].values()):
            found.append("a counter that does not count")
    found += [f"{ident} never ends" for ident in opened]
    for thread, own in spans.items():
        stack: list[int] = []
        for begin, stop in sorted(own, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= begin:
                stack.pop()
            if stack and stack[-1] < stop:
                found.append(f"thread {thread}: a span crosses another's end at {stack[-1]}")
            stack.append(stop)
    return found


def test_the_rules_are_kept(synthetic: pd.DataFrame) -> None:
    data = json.loads(json.dumps(chrome_trace(synthetic), allow_nan=False))
    assert problems(data) == []


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"ph": "X", "name": "a", "ts": 5, "pid": 1, "tid": 1}, "lacks ['dur']"),
        ({"ph": "X", "name": "a", "ts": -5, "dur": 1, "pid": 1, "tid": 1}, "times"),
        ({"ph": "X", "name": "a", "ts": 5, "dur": 10, "pid": 1, "tid": 1}, "crosses"),
        ({"ph": "X", "name": "a", "ts": 5, "dur": 1, "pid": 1, "tid": 2}, "has no name"),
        ({"ph": "b", "name": "a", "cat": "c", "id": "1", "ts": 0, "pid": 1, "tid": 1}, "never ends"),
        ({"ph": "e", "name": "a", "cat": "c", "id": "1", "ts": 0, "pid": 1, "tid": 1}, "before it begins"),
        ({"ph": "?", "name": "a", "pid": 1, "tid": 1}, "phase ?"),
    ],
)
def test_a_broken_rule_is_found(event: dict[str, Any], says: str) -> None:
    good = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}},
        {"ph": "X", "name": "a", "ts": 0, "dur": 10, "pid": 1, "tid": 1},
    ]
    assert problems({"traceEvents": good}) == []
    assert any(says in line for line in problems({"traceEvents": [*good, event]}))


def test_every_stay_and_step_is_there(synthetic: pd.DataFrame) -> None:
    events = chrome_trace(synthetic)["traceEvents"]
    stays = [e for e in events if e.get("cat") == "slots"]
    held = analysis.intervals(synthetic)
    assert len(stays) == len(held)
    assert sum(e["dur"] for e in stays) == pytest.approx(1e6 * (held["end"] - held["start"]).sum(), abs=len(held))
    assert sum(e.get("cat") == "steps" for e in events) == (synthetic["kind"] == "step").sum()
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"sync", "token-budget"}


def test_environments_overlap_and_grades_are_instants() -> None:
    writer = TraceWriter()
    listen = writer.listener("r")
    for event in (
        Event("observe", 0.0, 3.0, sample="a", num_tokens=2),
        Event("observe", 1.0, 3.0, sample="b", num_tokens=2),
        Event("grade", 2.0, sample="c", value=float("nan"), detail="timed out"),
    ):
        listen(event)
    data = chrome_trace(writer.frame())
    json.dumps(data, allow_nan=False)
    assert problems(data) == []
    assert sorted(e["ph"] for e in data["traceEvents"] if "cat" in e) == ["b", "b", "e", "e", "i"]


def test_export_command(tmp_path: Path, synthetic_writer: TraceWriter) -> None:
    synthetic_writer.write(tmp_path / "trace.parquet", {})
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["trace", "export", str(tmp_path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert problems(json.loads(out.read_text())) == []
    (tmp_path / "trace.parquet").write_bytes(b"PAR1")
    failed = CliRunner().invoke(app, ["trace", "export", str(tmp_path), "--out", str(out)])
    assert isinstance(failed.exception, TraceError) and "truncated" in str(failed.exception)
