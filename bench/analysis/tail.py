"""Why the tail took as long as it did, and what it would have been otherwise.

The tail of an iteration lasts from t90, the finish of its 90th percentile sample (nearest rank), to the last finish.
For each *tail sample*, one that finishes after t90, the seconds that each cause cost it are measured on its own path:

    iteration starts        admitted    pause    admitted        t90                     finish
    |------ started_late ------|---------|-paused---|-------------|--in passes: see below--|

- Out of a slot the time is the sample's own, and counts from the start of the iteration on. `started_late`: before its
  first admission (of the run, and again after its output was cut). `paused`: out of its slot after that (paused,
  preempted, waiting for a slot after its environment has answered), and computing again the KV that this lost.
  `waiting`: parked with its environment, and seconds in which nothing ran because everybody waited for graders or
  environments. `switch`: during a weight update, and out of its slot (and computing again) because of one.
- In a slot a pass delays all that run alike, the 90th percentile sample too: there only seconds after t90 count.
  `switch`: updates. `paused`: KV saved and restored. `drafting`: making drafts, and of the passes the share of the rows
  whose drafts were rejected. `low_batch`: what decoding took beyond the tokens made x the seconds that a token takes in
  the fullest batches of the run, as if the tail's tokens had been decoded among full batches. `between`: no pass ran.

Without a set S of causes, sample s would have ended at f(s, S) = finish - its seconds of the causes in S, and the tail
would have lasted v(S) = max(0, max over tail samples f(s, S) - t90): t90 stays. A cause's share of the tail is its
Shapley value in v (Shapley 1953): what removing it saves, averaged over all orders in which causes can be removed. So
the split knows no order, adds up to v(nothing) - v(all) = tail - `true_length`, and `true_length`, what is left when no
cause is, makes it whole: the tokens that the last samples had to make, at the speed of full batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from longtail.bench.analysis.account import recomputed_at, settle
from longtail.bench.analysis.base import Run, nearest_rank, pieces, ratio, rows, split_runs, table
from longtail.bench.analysis.parts import own_seconds, split_step

REMOVABLE = ("started_late", "paused", "waiting", "switch", "drafting", "low_batch", "between")
CAUSES = (*REMOVABLE, "true_length")
"""Columns of `tail_attribution`, which add up to `tail_seconds`."""
FULL = 0.9
"""A pass is full if it has at least this share of the sequences of the run's largest pass that only decodes."""
_SUBSETS = [frozenset(chosen) for k in range(len(REMOVABLE) + 1) for chosen in itertools.combinations(REMOVABLE, k)]


def tail_attribution(df: pd.DataFrame) -> pd.DataFrame:
    """The tail's seconds by cause, one row a run, summed over its iterations: run, tail_seconds, the columns of CAUSES
    (each at least 0; they add up to tail_seconds), cause (the largest; "" without a tail). How: see the module."""
    tails = tail_by_iteration(df)
    result = []
    for run in split_runs(df):
        own = tails[tails["run"] == run.name]
        seconds = {cause: math.fsum(own[cause]) for cause in CAUSES}
        largest = max(CAUSES, key=seconds.__getitem__) if any(seconds.values()) else ""
        row = {"run": run.name, "tail_seconds": math.fsum(own["tail_seconds"]), **seconds, "cause": largest}
        result.append(row)
    return table(result, ["run", "tail_seconds", *CAUSES, "cause"])


def tail_by_iteration(df: pd.DataFrame) -> pd.DataFrame:
    """`tail_attribution`, one row an iteration: run, iteration, samples (that finish after t90), last (the sample that
    finishes last), tail_seconds, CAUSES. Iterations in which no sample finishes are left out."""
    result = []
    for run, tail in _tails(df):
        shares = _shapley(tail)
        row = {"run": run, "iteration": tail.iteration, "samples": len(tail.finishes), "last": tail.last}
        result.append({**row, "tail_seconds": tail.without(()), **shares})
    return table(result, ["run", "iteration", "samples", "last", "tail_seconds", *CAUSES])


def what_if(df: pd.DataFrame, *sets: str | Iterable[str]) -> pd.DataFrame:
    """How the runs would have gone without some causes of the tail, from the trace alone (the simulator knows better:
    here nobody else is moved, slots are never short, and an iteration ends with its last sample).

    sets: causes of REMOVABLE to be without, each a name or several; none given: each alone, and all at once. One row a
    run and set: run, without (names with + between them), tail_seconds (what would be left of it), saved_seconds,
    wall_seconds, tokens_per_second (trained), speedup (of the wall time). The tail is v of the module's text, summed
    over iterations, so that saving all causes leaves the `true_length` of `tail_attribution`. ValueError for a cause
    that is none.
    """
    chosen = [(one,) if isinstance(one, str) else tuple(one) for one in sets]
    if unknown := sorted({cause for one in chosen for cause in one} - set(REMOVABLE)):
        raise ValueError(f"what_if: {', '.join(unknown)} is not a cause; choose from {', '.join(REMOVABLE)}")
    chosen = chosen or [*((cause,) for cause in REMOVABLE), REMOVABLE]
    tails: dict[str, list[_Tail]] = {}
    for name, tail in _tails(df):
        tails.setdefault(name, []).append(tail)
    result = []
    for run in split_runs(df):
        own, wall = tails.get(run.name, []), run.end - run.start
        tokens = settle(run).handed_over
        before = math.fsum(tail.without(()) for tail in own)
        for causes in chosen:
            left = math.fsum(tail.without(causes) for tail in own)
            shorter = wall - (before - left)
            row = {"run": run.name, "without": " + ".join(causes), "tail_seconds": left, "saved_seconds": before - left}
            row |= {"wall_seconds": shorter, "tokens_per_second": ratio(tokens, shorter)}
            result.append(row | {"speedup": ratio(wall, shorter)})
    columns = ["run", "without", "tail_seconds", "saved_seconds", "wall_seconds", "tokens_per_second", "speedup"]
    return table(result, columns)


# --- one tail


@dataclasses.dataclass(frozen=True)
class _Tail:
    iteration: int
    t90: float
    last: str
    finishes: np.ndarray[Any, Any]
    """[samples that finish after t90] float64, seconds on the emitter's clock."""
    costs: np.ndarray[Any, Any]
    """[those samples, REMOVABLE] float64, seconds."""

    def without(self, causes: Iterable[str]) -> float:
        if not len(self.finishes):
            return 0.0
        chosen = [REMOVABLE.index(cause) for cause in causes]
        ends = self.finishes - self.costs[:, chosen].sum(axis=1)
        return max(0.0, float(ends.max()) - self.t90)


def _shapley(tail: _Tail) -> dict[str, float]:
    value = {chosen: tail.without(chosen) for chosen in _SUBSETS}
    n = len(REMOVABLE)
    weights = [math.factorial(k) * math.factorial(n - k - 1) / math.factorial(n) for k in range(n)]
    shares = {}
    for cause in REMOVABLE:
        gains = (
            weights[len(chosen)] * (value[chosen] - value[chosen | {cause}])
            for chosen in _SUBSETS
            if cause not in chosen
        )
        shares[cause] = max(0.0, math.fsum(gains))
    shares["true_length"] = value[frozenset(REMOVABLE)]
    return shares


def _tails(df: pd.DataFrame) -> Iterator[tuple[str, _Tail]]:
    for run in split_runs(df):
        clock: _Clock | None = None
        finished = run.events[run.events["kind"] == "finish"]
        for number, ends in finished[finished["of_iteration"] >= 0].groupby("of_iteration"):
            t90 = nearest_rank(ends["time"].tolist(), 90)
            assert t90 is not None
            late = ends[ends["time"] > t90]
            clock = clock or _Clock(run)
            begin = float(run.events[run.events["of_iteration"] == number]["time"].iloc[0])
            costs = [clock.costs(event, begin, t90) for event in rows(late)]
            shape = (len(costs), len(REMOVABLE))
            last = str(ends["sample"].iloc[int(ends["time"].to_numpy(float).argmax())])
            yield run.name, _Tail(
                int(str(number)), t90, last, late["time"].to_numpy(float), np.array(costs, dtype=float).reshape(shape)
            )


# --- seconds of a sample


class _Rate:
    """Seconds per second over time, piecewise constant: what of [low, high] is its share."""

    def __init__(self, spans: Sequence[tuple[float, float, float]]) -> None:
        """spans: (begin, stop, share), in order and without overlap."""
        edges: list[float] = []
        totals: list[float] = []
        total = 0.0
        for begin, stop, share in spans:
            if not edges or edges[-1] != begin:
                edges.append(begin)
                totals.append(total)
            total += share * (stop - begin)
            edges.append(stop)
            totals.append(total)
        self._edges, self._totals = np.array(edges or [0.0]), np.array(totals or [0.0])

    def __call__(self, low: float, high: float) -> float:
        if high <= low:
            return 0.0
        ends = np.interp([low, high], self._edges, self._totals)
        return max(0.0, min(float(ends[1] - ends[0]), high - low))


@dataclasses.dataclass(frozen=True)
class _Stay:
    """A stretch of a sample's life. state: new, slot, out, parked, or updated (out of its slot by a weight update)."""

    state: str
    start: float
    end: float
    engine: str
    recomputed: int
    """slot: tokens computed again at its start,"""
    by_update: bool
    """and whether because of an update."""


class _Clock:
    """What each engine of a run did with its time, and where each sample was."""

    def __init__(self, run: Run) -> None:
        self.run = run
        timed = list(run.of("step", "save", "restore", "update", "wait"))
        full = _full_batch_seconds(timed)
        engines = dict.fromkeys(e.engine for e in timed if e.kind != "wait")
        self.engines = {name: _Engine(run, [e for e in timed if e.engine == name], full) for name in engines}
        updates = [e for e in timed if e.kind == "update"]
        both = sorted([*updates, *(e for e in timed if e.kind == "wait")], key=lambda e: e.kind != "update")
        self.updating = _Rate(_union(updates))
        self.stopped = _Rate(_union(both))
        self.stays = _stays(run)

    def costs(self, finish: Any, begin: float, t90: float) -> list[float]:
        """Of the sample that ends with this event, by REMOVABLE."""
        seconds = dict.fromkeys(REMOVABLE, 0.0)
        for stay in self.stays.get(finish.sample, ()):
            low, high = max(stay.start, begin), min(stay.end, finish.time)
            if high < low or stay.start >= finish.time:
                continue
            if stay.state == "slot":
                engine = self.engines.get(stay.engine)
                if engine is not None:
                    engine.in_slot(stay, low, high, t90, seconds)
            else:
                self._out_of_slot(stay.state, low, high, seconds)
        return [seconds[cause] for cause in REMOVABLE]

    def _out_of_slot(self, state: str, low: float, high: float, seconds: dict[str, float]) -> None:
        update = self.updating(low, high)
        wait = max(0.0, self.stopped(low, high) - update)
        cause = {"new": "started_late", "parked": "waiting", "updated": "switch"}.get(state, "paused")
        seconds["switch"] += update
        seconds["waiting"] += wait
        seconds[cause] += max(0.0, high - low - update - wait)


class _Engine:
    """How an engine's passes spend the seconds of those that run."""

    def __init__(self, run: Run, events: list[Any], full: float) -> None:
        own = own_seconds(events, run.start, run.end)
        shares: dict[str, dict[int, float]] = {cause: {} for cause in ("drafting", "low_batch")}
        again: dict[int, float] = {}
        for index, event in enumerate(events):
            if event.kind == "step" and own[index] > 0:
                drafting, low_batch, row = _costs_of_step(event, own[index], full)
                shares["drafting"][index] = drafting / own[index]
                shares["low_batch"][index] = low_batch / own[index]
                again[index] = row
        cut = list(pieces(events, run.start, run.end))
        kinds = [events[owner].kind if owner >= 0 else "none" for _, _, owner in cut]

        def rate(share: Any) -> _Rate:
            return _Rate([(b, s, share(owner, kind)) for (b, s, owner), kind in zip(cut, kinds, strict=True)])

        self.rates = {
            "switch": rate(lambda owner, kind: float(kind == "update")),
            "paused": rate(lambda owner, kind: float(kind in ("save", "restore"))),
            "between": rate(lambda owner, kind: float(kind == "none")),
            **{cause: rate(lambda owner, kind, by=by: by.get(owner, 0.0)) for cause, by in shares.items()},
        }
        self.steps = [e for e in events if e.kind == "step"]
        self.starts = np.array([e.time for e in self.steps])
        self.row_seconds = [again.get(i, 0.0) for i, e in enumerate(events) if e.kind == "step"]

    def in_slot(self, stay: _Stay, low: float, high: float, t90: float, seconds: dict[str, float]) -> None:
        for cause, rate in self.rates.items():
            seconds[cause] += rate(max(low, t90), high)
        seconds["switch" if stay.by_update else "paused"] += self._recomputing(stay, low, high)

    def _recomputing(self, stay: _Stay, low: float, high: float) -> float:
        """Of the passes from its admission on, the share of the rows that compute again what it had."""
        left, seconds = stay.recomputed, 0.0
        if stay.start < low:
            return 0.0
        for index in range(int(np.searchsorted(self.starts, stay.start)), len(self.steps)):
            step = self.steps[index]
            if left <= 0 or step.time + step.duration > high:
                break
            taken = min(left, step.num_prefill_tokens)
            seconds += taken * self.row_seconds[index]
            left -= taken
        return seconds


def _costs_of_step(event: Any, own: float, full: float) -> tuple[float, float, float]:
    """-> its seconds of drafting in vain and of low batches, and the seconds of a prefill row."""
    parts = split_step(event, own)
    unmeasured = event.model_seconds + event.sample_seconds + event.draft_seconds <= 0
    rows = max(event.num_tokens, 1)
    model = own if unmeasured else parts["prefill"] + parts["decode"] + parts["verify"]
    drafting = parts["drafting"] + model * max(0, event.num_draft_tokens - event.num_accepted_tokens) / rows
    prefill = model * event.num_prefill_tokens / rows
    return drafting, max(0.0, own - drafting - prefill - event.num_output_tokens * full), model / rows


def _full_batch_seconds(timed: Sequence[Any]) -> float:
    """Seconds of an output token in the fullest passes of those that only decode; of all passes if none does."""
    steps = [e for e in timed if e.kind == "step" and e.num_output_tokens > 0]
    steps = [e for e in steps if not e.num_prefill_tokens] or steps
    most = max((e.num_seqs for e in steps), default=0)
    chosen = [e for e in steps if e.num_seqs >= FULL * most]
    seconds = math.fsum(e.duration - _costs_of_step(e, e.duration, 0.0)[0] for e in chosen)
    return seconds / max(1, sum(e.num_output_tokens for e in chosen))


def _union(events: Sequence[Any]) -> list[tuple[float, float, float]]:
    """The time that any of the events covers, with share 1."""
    merged: list[tuple[float, float, float]] = []
    for begin, stop in sorted((e.time, e.time + e.duration) for e in events if e.duration > 0):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop), 1.0)
        else:
            merged.append((begin, stop, 1.0))
    return merged


def _stays(run: Run) -> dict[str, list[_Stay]]:
    """Of each sample, without gaps, from the run's start to the end of the run."""
    state: dict[str, tuple[str, float, str, int, bool]] = {}
    left: dict[str, Any] = {}
    answered: dict[str, int] = {}
    result: dict[str, list[_Stay]] = {}

    def move(sample: str, time: float, to: str, engine: str = "", recomputed: int = 0, by_update: bool = False) -> None:
        was, since, where, again, updated = state.get(sample, ("new", run.start, "", 0, False))
        if time > since:
            result.setdefault(sample, []).append(_Stay(was, since, time, where, again, updated))
        state[sample] = (to, max(time, since), engine, recomputed, by_update)

    for event in run.of("admit", "pause", "preempt", "park", "observe", "cut", "retry", "finish"):
        sample = event.sample
        if event.kind == "admit":
            release = left.pop(sample, None)
            again = recomputed_at(event, release, answered.pop(sample, 0))
            by_update = release is not None and _by_update(release)
            move(sample, event.time, "slot", event.engine, again, by_update)
        elif event.kind == "observe":
            answered[sample] = event.num_tokens
            move(sample, event.time + event.duration, "out")
        elif event.kind in ("cut", "retry"):
            left.pop(sample, None)
            move(sample, event.time, "new" if event.kind == "cut" else "out")
        else:
            left[sample] = event
            to = {"park": "parked", "preempt": "updated" if _by_update(event) else "out"}.get(event.kind, "out")
            move(sample, event.time, to)
    for sample in list(state):
        move(sample, run.end, "out")
    return result


def _by_update(release: Any) -> bool:
    return release.kind == "preempt" and release.detail == "weight update"
