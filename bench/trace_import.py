"""Other systems' records as a trace of ours, so that `analysis` works on them.

A record is one response, one JSON object a line: which prompt, how many tokens, when it started and ended. What a field
is called differs; `FORMATS` lists the names that are known of vLLM's request metrics and of the JSONL that trainers of
the verl, slime and TRL kind write, and `names=` gives others.

    submit    when it arrived (queued), else when it started          admit     when it started
    first_token, if it is known                                        finish    when it ended; its tokens and reason
    grade     with the reward, at the end, taking no time              hand_over when the last of its group ended

An iteration holds the samples of one `iteration` (trainer's step), or else of one policy version, or else everything;
it ends when the last of them has, and one that starts earlier than that counts from there on.

Such records hold no forward passes. `step` events are made up from them: one for each stretch of time in which the same
samples run, each sample's tokens spread evenly over its time. So generated tokens and busy time are right, and what
happens within a step (prefill, sampling, batch cost) is unknown: they say "imported", and `longtail calibrate` refuses
them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longtail.bench.cost_fit import IMPORTED
from longtail.bench.trace import TraceWriter
from longtail.errors import TraceError
from longtail.events import Event

NAMES: dict[str, tuple[str, ...]] = {
    "sample": ("sample_id", "request_id", "sample_index", "id", "index"),
    "group": ("group_id", "prompt_id", "group_index", "group", "uid"),
    "tokens": ("output_tokens", "num_generation_tokens", "response_length", "completion_length", "completion_tokens",
               "num_output_tokens", "output_length", "length"),
    "prompt_tokens": ("prompt_tokens", "num_prompt_tokens", "prompt_length", "input_tokens", "input_length"),
    "queued": ("queued", "queued_ts", "arrival_time", "submit_time"),
    "start": ("start", "start_time", "scheduled_ts", "first_scheduled_time"),
    "first_token": ("first_token_time", "first_token_ts"),
    "end": ("end", "end_time", "finished_time", "finish_time", "last_token_time", "last_token_ts"),
    "version": ("version", "policy_version", "weight_version", "weight_versions", "param_version"),
    "iteration": ("iteration", "global_step", "rollout_id", "step"),
    "reason": ("finish_reason", "finished_reason", "stop_reason", "status"),
    "reward": ("reward", "score"),
}  # fmt: skip
"""Field of ours: names that it goes by, the first one found counts."""
NEEDED = ("tokens", "end")
FORMATS: dict[str, tuple[str, ...]] = {
    "auto": tuple(NAMES),
    "vllm": ("sample", "tokens", "prompt_tokens", "queued", "start", "first_token", "end", "reason"),
    "trainer": tuple(NAMES),
}
"""Fields that are looked for. A vLLM request knows of no group, version or reward; of its times, those on the engine's
clock (queued_ts, scheduled_ts, ...) come before arrival_time, which is another clock's."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_REASONS = {
    "length": "length", "max_tokens": "length", "truncated": "length", "finished_length_capped": "length",
    "abort": "aborted", "aborted": "aborted", "finished_aborted": "aborted", "cancelled": "aborted",
    "error": "error", "failed": "error", "repetition": "repetition",
}  # fmt: skip
"""Anything else, and nothing, is a stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One response; times in seconds on the records' own clock."""

    line: int
    sample: str
    group: str
    tokens: int
    prompt_tokens: int
    queued: float
    start: float
    first_token: float | None
    end: float
    version: int
    iteration: int | None
    reason: str
    reward: float | None


def import_trace(
    path: str | os.PathLike[str],
    *,
    form: str = "auto",
    unit: str = "s",
    run: str = "imported",
    names: Mapping[str, str] | None = None,
) -> tuple[TraceWriter, dict[str, Any]]:
    """-> the events, and the meta to write with them (source, format, samples, and which name each field was found by).

    form: of FORMATS. unit: of the times, of UNITS. names: field of ours to the name that it has in the file. TraceError
    names the file, the line and the fix for a file that is missing, empty, truncated, foreign or inconsistent;
    ValueError for arguments."""
    if form not in FORMATS:
        raise ValueError(f"format {form!r} is not known; choose from {', '.join(FORMATS)}")
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} is not known; choose from {', '.join(UNITS)}")
    if unknown := [field for field in names or {} if field not in NAMES]:
        raise ValueError(f"names: {', '.join(unknown)} is not a field; the fields are {', '.join(NAMES)}")
    path = Path(path)
    objects = list(_objects(path))
    found = _found(path, objects, FORMATS[form], names or {})
    records = [_record(path, line, values, found, UNITS[unit]) for line, values in objects]
    _check_unique(path, records)
    writer = TraceWriter()
    emit = writer.listener(run)
    for event in _events(records, path.name):
        emit(event)
    return writer, {"source": path.name, "format": form, "imported": True, "samples": len(records), "fields": found}


# --- reading


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object)."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TraceError(f"{path}: {what}; give a file with one JSON object a line")
    data = path.read_bytes()
    if not data.strip():
        raise TraceError(f"{path}: the file is empty; its writer never got to write a record")
    if b"\0" in data:
        raise TraceError(f"{path}: a binary file; give one with one JSON object a line (JSONL)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text in UTF-8 (byte {error.start}); give one JSON object a line") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            last = not any(rest.strip() for rest in lines[number:])
            if last and number > 1:
                raise TraceError(
                    f"{path}: line {number}, the last, is cut off; its writer was stopped. Remove it, or write again"
                ) from error
            raise TraceError(f"{path}: line {number} is not JSON ({error}); give one JSON object a line") from error
        if not isinstance(value, dict):
            raise TraceError(
                f"{path}: line {number} is a JSON {type(value).__name__}, not an object; one record a line"
            )
        yield number, _flat(value)


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    """vLLM keeps times under `metrics`: inner objects' fields stand beside the outer ones, which have precedence."""
    inner = {key: item for part in value.values() if isinstance(part, dict) for key, item in part.items()}
    return inner | {key: item for key, item in value.items() if not isinstance(item, dict)}


def _found(
    path: Path, objects: Sequence[tuple[int, dict[str, Any]]], fields: Sequence[str], given: Mapping[str, str]
) -> dict[str, str]:
    """Field of ours -> its name in the file. A name counts if any record has it."""
    there = {key for _, values in objects for key, value in values.items() if value is not None}
    if missing := [f"{field}={name}" for field, name in given.items() if name not in there]:
        raise TraceError(f"{path}: names {', '.join(missing)}: no record has it; they have {_listed(there)}")
    found = dict(given)
    for field in fields:
        name = next((name for name in NAMES[field] if name in there), None)
        if field not in found and name is not None and name not in found.values():
            found[field] = name
    lacking = [field for field in NEEDED if field not in found]
    if "start" not in found and "queued" not in found:
        lacking.append("start")
    if lacking:
        hint = ", ".join(f"{field}=NAME" for field in lacking)
        raise TraceError(
            f"{path}: no field for {', '.join(lacking)}; the records have {_listed(there)}. Say what is which: {hint}"
        )
    return found


def _listed(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:20]) + (", ..." if len(listed) > 20 else "") if listed else "no fields"


def _record(path: Path, line: int, values: dict[str, Any], found: dict[str, str], second: float) -> Record:
    def get(field: str) -> Any:
        value = values.get(found[field]) if field in found else None
        return value[-1] if field == "version" and isinstance(value, list) and value else value

    def number(field: str, whole: bool) -> Any:
        value = get(field)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or (whole and value != int(value)):
            kind = "a whole number" if whole else "a finite number"
            raise TraceError(f"{path}: line {line}: {found[field]} must be {kind}, not {value!r}")
        return int(value) if whole else float(value)

    def count(field: str) -> int | None:
        value = number(field, True)
        if value is not None and value < 0:
            raise TraceError(f"{path}: line {line}: {found[field]} is {value}; it cannot be below 0")
        return value

    def moment(field: str) -> float | None:
        value = number(field, False)
        return None if value is None else value * second

    tokens, end = count("tokens"), moment("end")
    queued, start = moment("queued"), moment("start")
    start = queued if start is None else start
    for field, value in (("tokens", tokens), ("end", end), ("start", start)):
        if value is None:
            raise TraceError(f"{path}: line {line}: {found.get(field, field)} is missing")
    assert tokens is not None and end is not None and start is not None
    queued = start if queued is None else queued
    first = moment("first_token")
    if not queued <= start <= end or (first is not None and not start <= first <= end):
        order = f"queued {queued:g}, started {start:g}, ended {end:g}"
        raise TraceError(f"{path}: line {line}: times run backwards ({order}); are they of one clock and one unit?")
    sample = get("sample")
    group = get("group")
    return Record(
        line=line,
        sample=f"line{line}" if sample is None else str(sample),
        group=f"g:{sample if sample is not None else line}" if group is None else str(group),
        tokens=tokens,
        prompt_tokens=count("prompt_tokens") or 0,
        queued=queued,
        start=start,
        first_token=first,
        end=end,
        version=number("version", True) or 0,
        iteration=number("iteration", True),
        reason=_REASONS.get(str(get("reason")).lower(), "stop"),
        reward=number("reward", False),
    )


def _check_unique(path: Path, records: Sequence[Record]) -> None:
    lines: dict[str, int] = {}
    for record in records:
        if record.sample in lines:
            raise TraceError(
                f"{path}: sample {record.sample} is on line {lines[record.sample]} and on line {record.line}; give "
                "each response an id of its own (names: sample=NAME), and put the parts of an interrupted one together"
            )
        lines[record.sample] = record.line


# --- events

_Timed = tuple[float, int, int, Event]
"""Time, iteration, rank among those of one time and iteration, event."""


def _events(records: Sequence[Record], source: str) -> list[Event]:
    """In order of time; at one time an iteration's events come before the next one's, and within it what ends comes
    before what begins. A step stands at its end, as engines emit it."""
    begin, final = min(record.queued for record in records), max(record.end for record in records)
    iterations = _iterations(records)
    ends = [end for _, end, _ in iterations]
    settings = {"strategy": "imported", "source": source, "slots": _most_at_once(records), "iterations": len(ends)}
    last = len(ends) - 1
    timed: list[_Timed] = [
        (begin, 0, -1, Event("run_start", begin, detail=json.dumps(settings))),
        (final, last, 10, Event("run_end", final)),
    ]
    for number, (start, end, version) in enumerate(iterations):
        timed.append((start, number, 0, Event("iteration_start", start, iteration=number, value=version)))
        timed.append((end, number, 9, Event("iteration_end", end, iteration=number)))
    for record in records:
        timed += _events_of(record, bisect.bisect_left(ends, record.end))
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    for name, members in groups.items():
        if all(member.reason not in ("aborted", "error") for member in members):
            end, total = max(member.end for member in members), sum(member.tokens for member in members)
            hand_over = Event("hand_over", end, group=name, num_seqs=len(members), num_tokens=total)
            timed.append((end, bisect.bisect_left(ends, end), 8, hand_over))
    for end, step in _steps(records):
        timed.append((end, bisect.bisect_left(ends, end), 1, step))
    return [event for *_, event in sorted(timed, key=lambda entry: entry[:3])]


def _events_of(r: Record, iteration: int) -> Iterator[_Timed]:
    """iteration: in which it ends."""
    ids: dict[str, Any] = {"sample": r.sample, "group": r.group}
    yield r.queued, iteration, 3, Event("submit", r.queued, num_tokens=r.prompt_tokens, **ids)
    yield r.start, iteration, 4, Event("admit", r.start, value=float(r.prompt_tokens), **ids)
    if r.first_token is not None:
        yield r.first_token, iteration, 5, Event("first_token", r.first_token, **ids)
    finish = Event("finish", r.end, num_tokens=r.tokens, detail=r.reason, **ids)
    yield r.end, iteration, 2 if r.start < r.end else 6, finish
    if r.reward is not None:
        yield r.end, iteration, 7, Event("grade", r.end, value=r.reward, **ids)


def _iterations(records: Sequence[Record]) -> list[tuple[float, float, int]]:
    """(start, end, policy version) of each, one after the other. It starts when the first of the samples that are still
    to end was there, and not before the last one ended."""
    members: dict[int, list[Record]] = {}
    for record in records:
        members.setdefault(record.version if record.iteration is None else record.iteration, []).append(record)
    by_end = sorted(records, key=lambda r: r.end)
    ends = [r.end for r in by_end]
    first = list(itertools.accumulate((r.queued for r in reversed(by_end)), min))[::-1]  # from each one on
    result: list[tuple[float, float, int]] = []
    before = -math.inf
    for key in sorted(members):
        end = max(r.end for r in members[key])
        if end > before:  # else all of it happened within the one before
            start = max(before, first[bisect.bisect_right(ends, before)])
            result.append((start, end, max(r.version for r in members[key])))
            before = end
    return result


def _most_at_once(records: Sequence[Record]) -> int:
    changes = sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records])
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return max(most, 1)


def _steps(records: Sequence[Record]) -> Iterator[tuple[float, Event]]:
    """(end, event): one for each stretch in which the same samples run, and one for each sample that took no time. A
    sample's tokens by a time are its tokens x the share of its time that has passed, rounded down, and all of them at
    its end, so that they add up exactly."""
    for r in records:
        if r.start == r.end:
            yield r.end, _step(r.end, 0.0, 1, r.tokens, r.prompt_tokens + r.tokens)
    upcoming = sorted((r for r in records if r.start < r.end), key=lambda r: r.start, reverse=True)
    made: dict[str, int] = {}
    running: list[Record] = []
    for low, high in itertools.pairwise(sorted({time for r in upcoming for time in (r.start, r.end)})):
        running = [r for r in running if r.end > low]
        while upcoming and upcoming[-1].start <= low:
            running.append(upcoming.pop())
        tokens = context = 0
        for r in running:
            done = r.tokens if r.end <= high else int(r.tokens * ((high - r.start) / (r.end - r.start)))
            tokens += done - made.get(r.sample, 0)
            context += r.prompt_tokens + done
            made[r.sample] = done
        if running:
            yield high, _step(low, high - low, len(running), tokens, context)


def _step(start: float, seconds: float, num_seqs: int, tokens: int, context: int) -> Event:
    return Event(
        "step",
        start,
        seconds,
        num_seqs=num_seqs,
        num_tokens=tokens,
        num_context_tokens=context,
        num_output_tokens=tokens,
        model_seconds=seconds,
        detail=IMPORTED,
    )
