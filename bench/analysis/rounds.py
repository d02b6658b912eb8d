"""Iterations, one by one, and the samples that finished in them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from longtail.bench.analysis.base import bounds, nearest_rank, rows, split_runs, table
from longtail.bench.analysis.slots import intervals, runs

_COUNTS = ("version", "generated", "groups", "samples", "tokens", "finished", "paused", "tail_seconds")
_BUBBLE = ("generating_start", "generating", "slot_seconds", "bubble_seconds", "bubble")


def lengths(df: pd.DataFrame) -> pd.DataFrame:
    """Finished samples in order of finishing: run, sample, iteration, time, tokens (output), reason."""
    result = []
    for run in split_runs(df):
        for event in run.of("finish"):
            row = {"run": run.name, "sample": event.sample, "iteration": event.of_iteration}
            result.append({**row, "time": event.time - run.start, "tokens": event.num_tokens, "reason": event.detail})
    return table(result, ["run", "sample", "iteration", "time", "tokens", "reason"])


def iterations(df: pd.DataFrame) -> pd.DataFrame:
    """One row a run and iteration.

    run, iteration, start, end, wall; version (policy); generated (tokens sampled); groups, samples, tokens (handed
    over); finished, paused (samples); tail_seconds; generating_start, generating (from the first admission, the seconds
    to the last release); slot_seconds, bubble_seconds and bubble, their ratio. An iteration cut short by a crash ends
    with the run.
    """
    occupied, slots = intervals(df), {fact.run: fact.slots for fact in rows(runs(df))}
    result = []
    for run in split_runs(df):
        held = occupied[occupied["run"] == run.name]
        for number, events in run.events[run.events["of_iteration"] >= 0].groupby("of_iteration"):
            start, end = bounds(events, run)
            row = {"run": run.name, "iteration": number, "start": start, "end": end, "wall": end - start}
            row |= _iteration_counts(events)
            result.append(row | _bubble(held, start, end, slots[run.name]))
    return table(result, ["run", "iteration", "start", "end", "wall", *_COUNTS, *_BUBBLE])


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
