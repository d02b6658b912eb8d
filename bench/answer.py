"""What the numbers of a bench say, in sentences: what the tail cost, why, what would help, what each run made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]
"""Of a run, as `analysis.summary` has them."""

SAME = 0.02
"""Rates closer than this share are called equal: one run of each strategy cannot tell them apart."""
MANY = 3
"""More runs than this are not described one by one."""

CAUSES = {
    "started_late": "a late start of the last samples",
    "paused": "pauses and preemptions",
    "waiting": "waiting for graders and environments",
    "switch": "weight updates",
    "drafting": "drafts: making them, and verifying those that were rejected",
    "low_batch": "decoding in passes that few sequences shared",
    "between": "gaps between passes",
    "true_length": "true length: tokens that had to be made",
}
REMEDIES = {
    "started_late": "starting the last samples at once",
    "paused": "never pausing or preempting them",
    "waiting": "not waiting for graders and environments",
    "switch": "weight updates that take no time",
    "drafting": "drafts that cost nothing",
    "low_batch": "decoding the tail's tokens among full batches",
    "between": "no gaps between passes",
}


def headline(summary: Mapping[str, Numbers]) -> str:
    """One sentence: what the tail cost under the first run, and what each other run made of it (of many: the fastest
    and the slowest)."""
    (base, first), *others = summary.items()
    cost = (
        f"Under {base}, waiting for the last 10 % of samples took {_format('{:,.1f}', first['tail_seconds'])} s "
        f"({_format('{:.0%}', first['tail_share'])} of the run), and "
        f"{_format('{:.0%}', first['bubble_share'])} of the slot time was empty while generating"
    )
    if len(others) < MANY:
        return "; ".join([cost, *(f"{name} {_outcome(first, other, base)}" for name, other in others)]) + "."
    ranked = sorted(others, key=lambda item: item[1]["tokens_per_second"] or 0.0)
    (slow, slowest), (fast, fastest) = ranked[0], ranked[-1]
    return (
        f"{cost}. Of {len(others)} others, {fast} was the fastest and {_outcome(first, fastest, base)}; {slow} was the "
        f"slowest and {_outcome(first, slowest, base)}."
    )


def why(summary: Mapping[str, Numbers]) -> list[str]:
    """The first run's tail by cause, and what would help most: a sentence each; none without a tail."""
    base, first = next(iter(summary.items()))
    tail, total = first["tail"], first["tail_seconds"]
    if not total:
        return []
    ranked = sorted(tail, key=lambda cause: -tail[cause])
    named = [cause for cause in ranked if tail[cause] > SAME * total]
    parts = [f"{CAUSES[cause]} {_format('{:.0%}', tail[cause] / total)} ({tail[cause]:,.1f} s)" for cause in named]
    sentences = [f"What its tail went to: {'; '.join(parts)}."]
    single = [row for row in first["what_if"] if row["without"] in REMEDIES]
    best = max(single, key=lambda row: row["saved_seconds"])
    if best["saved_seconds"] <= SAME * total:
        sentences.append("Nothing that a schedule could change would shorten it: the last samples are long.")
    elif best["speedup"] is not None and best["speedup"] < 1 + SAME:
        sentences.append(
            f"None of its causes matters to the run: removing one makes {base} less than {SAME:.0%} faster."
        )
    else:
        speedup = _format("{:.2f}", best["speedup"])
        sentences.append(
            f"Most would help: {REMEDIES[best['without']]}. Of the tail {best['saved_seconds']:,.1f} s would go, and "
            f"{base} would be {speedup} times as fast, if its iterations end with their last sample."
        )
    return sentences


def reasons(summary: Mapping[str, Numbers]) -> list[str]:
    """What stands behind each comparison with the first run, one sentence a fact that matters. Of many runs only what
    is wrong with them."""
    (base, first), *others = summary.items()
    facts = []
    for name, numbers in summary.items():
        if not numbers["complete"]:
            facts.append(f"{name} did not reach its end; its numbers cover what was traced.")
        if numbers["tokens_unaccounted"]:
            facts.append(f"{name}: {numbers['tokens_unaccounted']:,} generated tokens have no place in the account.")
    if len(others) < MANY:
        for name, other in others:
            facts += _why(base, first, name, other)
    return facts


def _outcome(first: Numbers, other: Numbers, base: str) -> str:
    ratio = _over(other["tokens_per_second"], first["tokens_per_second"])
    if ratio is None:
        return "cannot be compared, because one of the two trained nothing"
    because = _because(first, other)
    if abs(ratio - 1) <= SAME:
        return f"trained as many tokens per second, {because}"
    verdict = "gained" if ratio > 1 else "did not pay here"
    return f"{verdict}: {ratio:.2f} times the trained tokens per second of {base}, {because}"


def _because(first: Numbers, other: Numbers) -> str:
    """The fact that explains the rate best, as a clause; `reasons` has them all."""
    ratio = _over(other["tokens_per_second"], first["tokens_per_second"]) or 0.0
    speed = _over(other["tokens_generated_per_second"], first["tokens_generated_per_second"]) or 0.0
    bubble = _format("{:.0%}", other["bubble_share"])
    pending = _over(other["tokens_pending"], other["tokens_generated"]) or 0.0
    if ratio > 1 + SAME:
        return f"with {bubble} of the slot time empty"
    if speed > 1 + SAME:
        share = _format("{:.0%}", pending)
        return f"though it generated {speed:.2f} times as fast: {share} of its tokens were still pending at the end"
    if (other["bubble_share"] or 0) < (first["bubble_share"] or 0) - SAME:
        return f"because steps with fuller slots ({bubble} empty) cost more here, or resuming took what they saved"
    return f"because its slots were no fuller ({bubble} empty)"


def _why(base: str, first: Numbers, name: str, other: Numbers) -> list[str]:
    facts = [
        f"{name} left {_format('{:.0%}', other['bubble_share'])} of its slot time empty, {base} "
        f"{_format('{:.0%}', first['bubble_share'])}."
    ]
    speed = _over(other["tokens_generated_per_second"], first["tokens_generated_per_second"])
    fewer_bubbles = (other["bubble_share"] or 0) < (first["bubble_share"] or 0)
    if speed is not None:
        facts.append(f"It generated {speed:.2f} times the tokens per second of {base}, trained or not.")
        if fewer_bubbles and speed < 1 + SAME:
            facts.append(_step_cost(base, first, name, other))
    pending = _over(other["tokens_pending"], other["tokens_generated"])
    if pending and pending > SAME:
        facts.append(
            f"{_format('{:.0%}', pending)} of what it generated was still pending at the end, hence not trained; the"
            " shorter the run, the more this weighs."
        )
    if other["tokens_reprefilled"]:
        again = _over(other["tokens_reprefilled"], other["tokens_generated"]) or 0.0
        facts.append(
            f"Resuming cost {other['tokens_reprefilled']:,} tokens computed again "
            f"({_format('{:.0%}', again)} of those generated)."
        )
    switch, before = (_over(run["breakdown"]["switch"], run["wall_seconds"]) or 0.0 for run in (other, first))
    if abs(switch - before) > SAME:
        facts.append(
            f"Switching took {_format('{:.0%}', switch)} of its time, {_format('{:.0%}', before)} under {base}."
        )
    return facts


def _step_cost(base: str, first: Numbers, name: str, other: Numbers) -> str:
    """Fuller slots that bring nothing: what a generated token cost in each run."""
    costs = [1000 * (_over(run["breakdown"]["decode"], run["tokens_generated"]) or 0.0) for run in (other, first)]
    return (
        f"Fuller slots did not make {name} faster: a generated token took {costs[0]:.1f} ms of decode time, "
        f"{costs[1]:.1f} ms under {base}."
    )


def _format(form: str, value: Any) -> str:
    return "\u2013" if value is None else form.format(value).replace("%", "\u00a0%")


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
