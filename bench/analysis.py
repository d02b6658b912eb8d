"""What a trace says: pandas in, pandas out, no state. `summary` is what `summary.json` holds.

Every function takes the frame of `read_trace` (events of one or more runs) and reports times in seconds since the
start of the run. The words (DESIGN.md section 2):

- *tail*: the last 10 % of samples to finish. The 90th percentile sample is the one of nearest rank: of n finishes in
  order, number ceil(0.9 n). *Tail time*: from its finish to the last finish, over the samples that finish in one
  iteration; a run's tail time is the sum over its iterations.
- *bubble*: slot-seconds without a sequence. An iteration generates from its first admission to its last release; all
  its slot-seconds are that time x the engine's slots.
- *occupied*: a slot belongs to a sample from `admit` to its next `pause`, `park`, `preempt` or `finish`.
- *trained*: handed over, in complete groups. *Pending*: generated, kept, not handed over when the run ends.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from longtail.errors import TraceError

PARTS = ("prefill", "decode", "sampling", "drafting", "scheduling", "switch", "grade", "wait", "train", "idle")
"""Columns of `breakdown`, which add up to `wall`; the first five are *generate*."""
GENERATE = PARTS[:5]
_PART_OF_KIND = {
    "save": "switch",
    "restore": "switch",
    "update": "switch",
    "grade": "grade",
    "wait": "wait",
    "train": "train",
}
_RELEASES = ("pause", "park", "preempt", "finish")
_COMPARED = (
    "wall_seconds",
    "tokens_per_second",
    "seconds_per_1000_tokens",
    "samples_trained",
    "tokens_trained",
    "tokens_generated",
    "tail_seconds",
    "tail_share",
    "bubble_share",
)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run's events, in order of emission, and its bounds on the emitter's clock."""

    name: str
    events: pd.DataFrame
    start: float
    end: float
    complete: bool
    settings: dict[str, Any]

    def of(self, *kinds: str) -> Iterator[Any]:
        return rows(self.events[self.events["kind"].isin(kinds)])

    def total(self, kind: str, column: str) -> float:
        return self.events.loc[self.events["kind"] == kind, column].sum()


def runs(df: pd.DataFrame) -> pd.DataFrame:
    """One row a run, in order of appearance: run, start and end (emitter's clock), wall, complete, slots, settings.

    A run ends at its `run_end`; one that was killed has none and ends with its last event (`complete` is False). Slots
    are those of the settings, or the most samples ever seen at once if that is unknown or larger.
    """
    occupied = intervals(df)
    result = []
    for run in _runs(df):
        slots = max(int(run.settings.get("slots") or 0), _most_slots(occupied, run.name))
        row = {"run": run.name, "start": run.start, "end": run.end, "wall": run.end - run.start}
        result.append({**row, "complete": run.complete, "slots": slots, "settings": run.settings})
    return _frame(result, ["run", "start", "end", "wall", "complete", "slots", "settings"])


def intervals(df: pd.DataFrame) -> pd.DataFrame:
    """Slot occupancy: run, sample, start, end, slot, outcome.

    Outcome is the release: finish, length (a finish at the cap), pause, park, preempt, or open (still held when the run
    ended). A trace does not name slots: each interval takes the lowest one free at its start, so the numbers are a
    drawing aid; how many are taken at any moment is exact. Raises TraceError if a sample is admitted twice at once.
    """
    result = []
    for run in _runs(df):
        result += _with_slots(_occupancy(run))
    return _frame(result, ["run", "sample", "start", "end", "outcome", "slot"])


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
    return _frame(result, ["run", "time", "active"])


def lengths(df: pd.DataFrame) -> pd.DataFrame:
    """Finished samples in order of finishing: run, sample, iteration, time, tokens (output), reason."""
    result = []
    for run in _runs(df):
        for event in run.of("finish"):
            row = {"run": run.name, "sample": event.sample, "iteration": event.of_iteration}
            result.append({**row, "time": event.time - run.start, "tokens": event.num_tokens, "reason": event.detail})
    return _frame(result, ["run", "sample", "iteration", "time", "tokens", "reason"])


def breakdown(df: pd.DataFrame) -> pd.DataFrame:
    """Where the seconds of each run went: run, wall, the columns of PARTS (they add up to wall), and generate.

    - prefill, decode: forward passes. A mixed step's model time is split by the share of its query tokens, which
      overstates the prefill part where decode is bound by reading KV and weights.
    - sampling: processing logits and drawing. drafting: making drafts (their rows are in decode). scheduling: the rest
      of the steps.
    - switch: saving and restoring KV, updating weights. grade, train: as emitted. wait: for graders and environments
      with nothing to run; what they do while others decode takes no time of the run.
    - idle: the run's wall time in none of these.

    A second counts once: where events overlap, the one that started last has it (a restore inside a step is switch).
    """
    result = []
    for run in _runs(df):
        parts = dict.fromkeys(PARTS, 0.0)
        timed = run.events[run.events["kind"].isin(["step", *_PART_OF_KIND])]
        events = list(rows(timed))
        for event, seconds in zip(events, _own_seconds(events, run.start, run.end), strict=True):
            if event.kind != "step":
                parts[_PART_OF_KIND[event.kind]] += seconds
                continue
            for part, share in _split_step(event, seconds).items():
                parts[part] += share
        wall = run.end - run.start
        parts["idle"] = max(0.0, wall - math.fsum(parts.values()))
        result.append({"run": run.name, "wall": wall, **parts, "generate": math.fsum(parts[part] for part in GENERATE)})
    return _frame(result, ["run", "wall", *PARTS, "generate"])


def iterations(df: pd.DataFrame) -> pd.DataFrame:
    """One row a run and iteration.

    run, iteration, start, end, wall; version (policy); generated (tokens sampled); groups, samples, tokens (handed
    over); finished, paused (samples); tail_seconds; generating_start, generating (from the first admission, the seconds
    to the last release); slot_seconds, bubble_seconds and bubble, their ratio. An iteration cut short by a crash ends
    with the run.
    """
    occupied, slots = intervals(df), {fact.run: fact.slots for fact in rows(runs(df))}
    result = []
    for run in _runs(df):
        held = occupied[occupied["run"] == run.name]
        for number, events in run.events[run.events["of_iteration"] >= 0].groupby("of_iteration"):
            start, end = _bounds(events, run)
            row = {"run": run.name, "iteration": number, "start": start, "end": end, "wall": end - start}
            row |= _iteration_counts(events)
            result.append(row | _bubble(held, start, end, slots[run.name]))
    return _frame(result, ["run", "iteration", "start", "end", "wall", *_COUNTS, *_BUBBLE])


def summary(df: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The numbers of each run, ready for JSON (None where a number does not exist, such as a rate over nothing).

    Times in seconds, lengths in output tokens of finished samples (nearest rank). Shares: tail of the wall time, bubble
    of the slot-seconds while generating, capped of the finished samples. tokens_generated = tokens_trained +
    tokens_pending + tokens_aborted + tokens_dropped (cut off or thrown away: the ledger says why) + tokens_unaccounted;
    the last is 0 unless a run was cut with samples in slots.
    tokens_reprefilled: computed again after a pause or a preemption (see `_reprefilled`).
    """
    facts, parts, steps, ended = runs(df), breakdown(df), iterations(df), lengths(df)
    result = {}
    for run, fact, part in zip(_runs(df), rows(facts), parts.to_dict("records"), strict=True):
        own = steps[steps["run"] == run.name].drop(columns="run")
        numbers: dict[str, Any] = {
            "wall_seconds": float(fact.wall),
            "complete": bool(fact.complete),
            "slots": int(fact.slots),
        }
        numbers |= _trained(run, float(fact.wall))
        numbers |= _waiting(own, float(fact.wall))
        numbers |= _tokens(run, int(numbers["tokens_trained"]))
        numbers |= _staleness(run)
        numbers |= _responses(ended[ended["run"] == run.name], run)
        del part["run"]
        numbers["breakdown"] = part
        numbers["iterations"] = own.to_dict("records")
        result[run.name] = _plain(numbers)
    return result


def compare(summary: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Each run's numbers as multiples of the first run's (1.0 for itself; None where either is missing or it is 0)."""
    first = next(iter(summary.values()), {})
    return {
        run: {key: _ratio(numbers.get(key), first.get(key)) for key in _COMPARED} for run, numbers in summary.items()
    }


def nearest_rank(values: Sequence[float], percent: int) -> float | None:
    """The value of rank ceil(percent / 100 x n) in ascending order; None of nothing."""
    ordered = sorted(values)
    return ordered[-(-percent * len(ordered) // 100) - 1] if ordered else None


def rows(frame: pd.DataFrame) -> Iterator[Any]:
    """The rows as named tuples (typed Any: pandas cannot say what a column holds)."""
    return frame.itertuples()


# --- runs and slots


def _runs(df: pd.DataFrame) -> list[_Run]:
    result = []
    for name, events in df.groupby("run", sort=False):
        starts = events.loc[events["kind"] == "run_start"]
        ends = events.loc[events["kind"] == "run_end", "time"]
        start = starts["time"].iloc[0] if len(starts) else events["time"].min()
        end = ends.iloc[-1] if len(ends) else (events["time"] + events["duration"]).max()
        settings = _settings(starts["detail"].iloc[0]) if len(starts) else {}
        events = events.assign(of_iteration=(events["kind"] == "iteration_start").cumsum() - 1)
        result.append(_Run(str(name), events, float(start), float(end), bool(len(ends)), settings))
    return result


def _settings(detail: str) -> dict[str, Any]:
    try:
        settings = json.loads(detail or "{}")
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}


def _occupancy(run: _Run) -> list[dict[str, Any]]:
    """Intervals without slots, in order of start; starts of equal time keep the order of emission."""
    admitted: dict[str, float] = {}
    result = []

    def close(sample: str, end: float, outcome: str) -> None:
        result.append(
            {"run": run.name, "sample": sample, "start": admitted.pop(sample), "end": end, "outcome": outcome}
        )

    for event in run.of("admit", *_RELEASES):
        time = event.time - run.start
        if event.kind == "admit":
            if event.sample in admitted:
                raise TraceError(
                    f"run {run.name}: sample {event.sample} is admitted at {time:.6f} s and again before it left its "
                    "slot; the engine that wrote this trace lost track of it"
                )
            admitted[event.sample] = time
        elif event.sample in admitted:  # aborting a waiting or paused sample releases no slot
            capped = event.kind == "finish" and event.detail == "length"
            close(event.sample, time, "length" if capped else event.kind)
    for sample in list(admitted):
        close(sample, run.end - run.start, "open")
    return sorted(result, key=lambda row: row["start"])


def _with_slots(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, slot)
    for row in rows:
        while busy and busy[0][0] <= row["start"]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row["slot"] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (row["end"], row["slot"]))
    return rows


def _most_slots(occupied: pd.DataFrame, run: str) -> int:
    slots = occupied.loc[occupied["run"] == run, "slot"]
    return int(slots.max()) + 1 if len(slots) else 0


# --- breakdown


def _own_seconds(events: list[Any], start: float, end: float) -> list[float]:
    """For each event the seconds of [start, end] in which it is the last started of those going on."""
    spans = [(max(event.time, start), min(event.time + event.duration, end)) for event in events]
    order = sorted((index for index, (begin, stop) in enumerate(spans) if stop > begin), key=lambda i: spans[i][0])
    edges = sorted({edge for index in order for edge in spans[index]})
    seconds = [0.0] * len(events)
    going: list[tuple[float, float, int]] = []  # (-begin, stop, index): the last started on top, of equals the shorter
    upcoming = iter(order)
    following = next(upcoming, None)
    for begin, stop in itertools.pairwise(edges):
        while following is not None and spans[following][0] <= begin:
            heapq.heappush(going, (-spans[following][0], spans[following][1], following))
            following = next(upcoming, None)
        while going and going[0][1] <= begin:
            heapq.heappop(going)
        if going:
            seconds[going[0][2]] += stop - begin
    return seconds


def _split_step(event: Any, seconds: float) -> dict[str, float]:
    """A step's own seconds; what was measured in it shrinks in proportion if other events took part of the step."""
    measured = event.model_seconds + event.sample_seconds + event.draft_seconds
    scale = min(1.0, seconds / measured) if measured > 0 else 0.0
    prefill = event.num_prefill_tokens / event.num_tokens if event.num_tokens else 0.0
    model = event.model_seconds * scale
    return {
        "prefill": model * prefill,
        "decode": model * (1 - prefill),
        "sampling": event.sample_seconds * scale,
        "drafting": event.draft_seconds * scale,
        "scheduling": max(0.0, seconds - measured * scale),
    }


# --- iterations

_COUNTS = ("version", "generated", "groups", "samples", "tokens", "finished", "paused", "tail_seconds")
_BUBBLE = ("generating_start", "generating", "slot_seconds", "bubble_seconds", "bubble")


def _bounds(events: pd.DataFrame, run: _Run) -> tuple[float, float]:
    ends = events.loc[events["kind"] == "iteration_end", "time"]
    end = ends.iloc[-1] if len(ends) else run.end
    return float(events["time"].iloc[0]) - run.start, float(end) - run.start


def _iteration_counts(events: pd.DataFrame) -> dict[str, Any]:
    kind = events["kind"]
    handed = events[kind == "hand_over"]
    finishes = list(events.loc[kind == "finish", "time"])
    return {
        "version": int(events["value"].iloc[0]),
        "generated": int(events.loc[kind == "step", "num_output_tokens"].sum()),
        "groups": len(handed),
        "samples": int(handed["num_seqs"].sum()),
        "tokens": int(handed["num_tokens"].sum()),
        "finished": len(finishes),
        "paused": int((kind == "pause").sum()),
        "tail_seconds": max(finishes) - (nearest_rank(finishes, 90) or 0.0) if finishes else 0.0,
    }


def _bubble(held: pd.DataFrame, start: float, end: float, slots: int) -> dict[str, float]:
    """Of one iteration: intervals are clipped to it, so that a sample held across the border counts on both sides."""
    begin, stop = held["start"].clip(lower=start), held["end"].clip(upper=end)
    inside = stop > begin
    first = float(begin[inside].min()) if inside.any() else start
    generating = float(stop[inside].max()) - first if inside.any() else 0.0
    everything = slots * generating
    empty = max(0.0, everything - float((stop - begin)[inside].sum()))
    share = empty / everything if everything else 0.0
    return {
        "generating_start": first,
        "generating": generating,
        "slot_seconds": everything,
        "bubble_seconds": empty,
        "bubble": share,
    }


# --- summary


def _trained(run: _Run, wall: float) -> dict[str, Any]:
    tokens = int(run.total("hand_over", "num_tokens"))
    generated = int(run.total("step", "num_output_tokens"))
    return {
        "groups_trained": sum(1 for _ in run.of("hand_over")),
        "samples_trained": int(run.total("hand_over", "num_seqs")),
        "tokens_trained": tokens,
        "tokens_per_second": _ratio(tokens, wall),
        "seconds_per_1000_tokens": _ratio(1000 * wall, tokens),
        "tokens_generated": generated,
        "tokens_generated_per_second": _ratio(generated, wall),
    }


def _waiting(own: pd.DataFrame, wall: float) -> dict[str, Any]:
    tail, empty, everything = (float(own[key].sum()) for key in ("tail_seconds", "bubble_seconds", "slot_seconds"))
    return {
        "tail_seconds": tail,
        "tail_share": _ratio(tail, wall),
        "bubble_slot_seconds": empty,
        "bubble_share": _ratio(empty, everything),
    }


def _tokens(run: _Run, trained: int) -> dict[str, int]:
    """What became of the generated tokens, and what was computed again or read back."""
    handed = {event.group for event in run.of("hand_over")}
    known: dict[str, Any] = {}  # each sample's last word on its output tokens
    groups: dict[str, str] = {}
    dropped = 0
    for event in run.of("submit", "admit", "pause", "park", "finish", "cut", "discard"):
        if event.group and event.sample:
            groups[event.sample] = event.group
        if event.kind in ("cut", "discard"):
            dropped += event.num_tokens
            gone = [event.sample] if event.sample else [s for s in known if groups.get(s) == event.group]
            for sample in gone:
                known.pop(sample, None)
        elif event.kind in ("pause", "park", "finish"):
            known[event.sample] = event
    pending = aborted = 0
    for sample, event in known.items():
        if groups.get(sample) not in handed:
            lost = event.kind == "finish" and event.detail in ("aborted", "error")
            aborted += event.num_tokens * lost
            pending += event.num_tokens * (not lost)
    generated = int(run.total("step", "num_output_tokens"))
    return {
        "tokens_pending": pending,
        "tokens_aborted": aborted,
        "tokens_dropped": dropped,
        "tokens_unaccounted": generated - trained - pending - aborted - dropped,
        "tokens_reprefilled": _reprefilled(run),
        "tokens_restored": int(run.total("restore", "num_tokens")),
        "tokens_drafted": int(run.total("step", "num_draft_tokens")),
        "tokens_accepted": int(run.total("step", "num_accepted_tokens")),
        "pauses": sum(1 for _ in run.of("pause")),
        "preemptions": sum(1 for _ in run.of("preempt")),
    }


def _reprefilled(run: _Run) -> int:
    """Tokens computed a second time: at each admission after a release, what had been computed less what comes with it.

    Computed at a preemption: the event says it. At the end of a turn, or a pause with output: all tokens known then but
    the last, which no step has read yet; what an environment answered since is new. At a pause before the first token:
    taken as none.
    """
    left: dict[str, Any] = {}
    observed: dict[str, int] = {}
    again = 0
    for event in run.of("admit", "pause", "park", "preempt", "observe"):
        if event.kind == "observe":
            observed[event.sample] = event.num_tokens
            continue
        if event.kind != "admit":
            left[event.sample] = event
            continue
        release, answer = left.pop(event.sample, None), observed.pop(event.sample, 0)
        if release is None or (release.kind == "pause" and release.num_tokens == 0):
            continue
        computed = release.num_tokens if release.kind == "preempt" else int(event.value) - answer - 1
        again += max(0, computed - event.num_tokens)
    return again


def _staleness(run: _Run) -> dict[str, Any]:
    """Of the trained tokens, at their hand-over: current version less that of the token."""
    counts: dict[int, int] = {}
    for event in run.of("hand_over"):
        for age, tokens in _settings(event.detail).get("staleness", {}).items():
            counts[int(age)] = counts.get(int(age), 0) + int(tokens)
    total = sum(counts.values())
    return {
        "staleness": {str(age): counts[age] for age in sorted(counts)},
        "staleness_mean": _ratio(sum(age * n for age, n in counts.items()), total),
        "staleness_max": max(counts, default=None),
    }


def _responses(ended: pd.DataFrame, run: _Run) -> dict[str, Any]:
    tokens = [int(count) for count in ended["tokens"]]
    rewards = [event.value for event in run.of("grade")]
    return {
        "samples_finished": len(tokens),
        "length_p50": nearest_rank(tokens, 50),
        "length_p90": nearest_rank(tokens, 90),
        "length_max": max(tokens, default=None),
        "capped_share": _ratio(int((ended["reason"] == "length").sum()), len(tokens)),
        "mean_reward": _ratio(math.fsum(rewards), len(rewards)),
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns)


def _plain(value: Any) -> Any:
    """Plain Python numbers all the way down; NaN becomes None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
