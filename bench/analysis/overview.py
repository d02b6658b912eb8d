"""The numbers of a run in one place, ready for JSON, and runs beside each other."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from longtail.bench.analysis.account import ages, reprefilled, settle
from longtail.bench.analysis.base import Run, nearest_rank, plain, ratio, rows, split_runs
from longtail.bench.analysis.parts import breakdown
from longtail.bench.analysis.rounds import iterations, lengths
from longtail.bench.analysis.slots import runs
from longtail.bench.analysis.tail import CAUSES, tail_attribution, what_if

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
    "tokens_wasted",
)


def summary(df: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The numbers of each run, ready for JSON (None where a number does not exist, such as a rate over nothing).

    Times in seconds, lengths in output tokens of finished samples (nearest rank). Shares: tail of the wall time, bubble
    of the slot-seconds while generating, capped of the finished samples. Tokens are those that the policy wrote
    (observations are not among them): tokens_generated = tokens_trained + tokens_pending + tokens_aborted +
    tokens_dropped (cut off or thrown away: the ledger says why) + tokens_unaccounted; the last is 0 unless a run was
    cut with samples in slots. tokens_trained: of everything handed over. tokens_wasted: aborted and dropped.
    tokens_reprefilled: computed again after a pause or a preemption (see `reprefilled`).
    mean_reward: of the samples that were graded; grades_failed: how many could not be;
    graders: names and versions of what graded them (none in traces that do not say).
    drafts_shared: messages, tokens and bytes with which a pool's engines were told what siblings wrote elsewhere.
    tail: seconds by cause (`tail_attribution`); what_if: rows of `what_if` without run.
    """
    facts, parts, steps, ended = runs(df), breakdown(df), iterations(df), lengths(df)
    instead = what_if(df)
    tails: dict[Any, Any] = {row["run"]: row for row in tail_attribution(df).to_dict("records")}
    result = {}
    for run, fact, part in zip(split_runs(df), rows(facts), parts.to_dict("records"), strict=True):
        own = steps[steps["run"] == run.name].drop(columns="run")
        wall = float(fact.wall)
        numbers: dict[str, Any] = {"wall_seconds": wall, "complete": bool(fact.complete), "slots": int(fact.slots)}
        numbers |= _tokens(run, wall)
        numbers |= _waiting(own, wall)
        numbers["drafts_shared"] = _shared(run)
        numbers |= _staleness(run)
        numbers |= _responses(ended[ended["run"] == run.name], run)
        del part["run"]
        numbers["breakdown"] = part
        numbers["tail"] = {cause: float(tails[run.name][cause]) for cause in CAUSES}
        numbers["what_if"] = instead[instead["run"] == run.name].drop(columns="run").to_dict("records")
        numbers["iterations"] = own.to_dict("records")
        result[run.name] = plain(numbers)
    return result


def compare(summary: dict[str, dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Each run's numbers as multiples of the first run's (1.0 for itself; None where either is missing or it is 0)."""
    first = next(iter(summary.values()), {})
    return {
        run: {key: ratio(numbers.get(key), first.get(key)) for key in _COMPARED} for run, numbers in summary.items()
    }


def _waiting(own: pd.DataFrame, wall: float) -> dict[str, Any]:
    tail, empty, everything = (float(own[key].sum()) for key in ("tail_seconds", "bubble_seconds", "slot_seconds"))
    return {
        "tail_seconds": tail,
        "tail_share": ratio(tail, wall),
        "bubble_slot_seconds": empty,
        "bubble_share": ratio(empty, everything),
    }


def _tokens(run: Run, wall: float) -> dict[str, Any]:
    """What became of the generated tokens, and what was computed again or read back."""
    account = settle(run)
    generated = int(run.total("step", "num_output_tokens"))
    handed, lost = account.handed_over, account.lost
    pending, unaccounted = account.lines["pending"], account.lines["unaccounted"]
    dropped = generated - handed - lost - pending - unaccounted
    return {
        "groups_trained": sum(1 for _ in run.of("hand_over")),
        "samples_trained": int(run.total("hand_over", "num_seqs")),
        "tokens_trained": handed,
        "tokens_per_second": ratio(handed, wall),
        "seconds_per_1000_tokens": ratio(1000 * wall, handed),
        "tokens_generated": generated,
        "tokens_generated_per_second": ratio(generated, wall),
        "tokens_pending": pending,
        "tokens_aborted": lost,
        "tokens_dropped": dropped,
        "tokens_wasted": dropped + lost,
        "tokens_unaccounted": unaccounted,
        "tokens_reprefilled": reprefilled(run),
        "tokens_restored": int(run.total("restore", "num_tokens")),
        "tokens_drafted": int(run.total("step", "num_draft_tokens")),
        "tokens_accepted": int(run.total("step", "num_accepted_tokens")),
        "pauses": sum(1 for _ in run.of("pause")),
        "preemptions": sum(1 for _ in run.of("preempt")),
    }


def _shared(run: Run) -> dict[str, int]:
    return {
        "messages": sum(1 for _ in run.of("share")),
        "tokens": int(run.total("share", "num_tokens")),
        "bytes": int(run.total("share", "value")),
    }


def _staleness(run: Run) -> dict[str, Any]:
    """Of the trained tokens, at their hand-over: current version less that of the token."""
    counts = ages(run)
    total = sum(counts.values())
    return {
        "staleness": {str(age): counts[age] for age in sorted(counts)},
        "staleness_mean": ratio(sum(age * n for age, n in counts.items()), total),
        "staleness_max": max(counts, default=None),
    }


def _responses(ended: pd.DataFrame, run: Run) -> dict[str, Any]:
    tokens = [int(count) for count in ended["tokens"]]
    events = list(run.of("grade"))
    grades = [event.value for event in events]
    rewards = [value for value in grades if not math.isnan(value)]
    return {
        "samples_finished": len(tokens),
        "length_p50": nearest_rank(tokens, 50),
        "length_p90": nearest_rank(tokens, 90),
        "length_max": max(tokens, default=None),
        "capped_share": ratio(int((ended["reason"] == "length").sum()), len(tokens)),
        "mean_reward": ratio(math.fsum(rewards), len(rewards)),
        "grades_failed": len(grades) - len(rewards),
        "graders": sorted({name for event in events if (name := grader_in(event.detail))}),
    }


def grader_in(detail: str) -> str | None:
    """Who graded, of a grade event's detail. None where it says only why there is no reward, as older traces do."""
    name = detail.partition(": ")[0]
    return name if name and " " not in name else None
