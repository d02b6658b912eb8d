"""The report of a bench: one HTML page that needs no network, the answer first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from longtail.bench import analysis
from longtail.bench.trace import replacing

_TEMPLATES = Path(__file__).parent / "templates"
_SAME = 0.02
"""Rates closer than this share are called equal: one run of each strategy cannot tell them apart."""

_CAPTIONS = {
    "slots": "Each bar is a sample's stay in a slot. Gaps before an iteration's last bar ends are bubbles; then come "
    "grading, training and the weight update. A partial iteration pauses unfinished samples and continues them later.",
    "active": "How many sequences share each forward pass. Shaded: slots left empty between an iteration's first "
    "admission and its last release.",
    "lengths": "Finished samples only: work still pending is missing from a run's curve, and it is the long part. "
    "Samples cut at the cap stand apart.",
    "breakdown": "Every second of a run has one place. Runs may differ in how much they trained; compare seconds per "
    "1,000 trained tokens in the table.",
}

_TABLE = (  # (label, key, format)
    ("wall time (s)", "wall_seconds", "{:,.1f}"),
    ("samples trained", "samples_trained", "{:,d}"),
    ("tokens trained", "tokens_trained", "{:,d}"),
    ("trained tokens per second", "tokens_per_second", "{:,.1f}"),
    ("seconds per 1,000 trained tokens", "seconds_per_1000_tokens", "{:,.2f}"),
    ("tail time (s)", "tail_seconds", "{:,.1f}"),
    ("tail time, share of wall time", "tail_share", "{:.1%}"),
    ("bubble, share of slot time", "bubble_share", "{:.1%}"),
    ("tokens generated", "tokens_generated", "{:,d}"),
    ("generated tokens per second", "tokens_generated_per_second", "{:,.1f}"),
    ("tokens pending at the end", "tokens_pending", "{:,d}"),
    ("tokens aborted", "tokens_aborted", "{:,d}"),
    ("tokens unaccounted", "tokens_unaccounted", "{:,d}"),
    ("tokens re-prefilled", "tokens_reprefilled", "{:,d}"),
    ("tokens restored", "tokens_restored", "{:,d}"),
    ("pauses", "pauses", "{:,d}"),
    ("preemptions", "preemptions", "{:,d}"),
    ("output tokens p50 / p90 / max", "lengths", "{}"),
    ("share at the cap", "capped_share", "{:.1%}"),
    ("mean reward", "mean_reward", "{:.3f}"),
)

_ITERATION_TABLE = (
    ("wall (s)", "wall", "{:,.1f}"),
    ("groups", "groups", "{:,d}"),
    ("samples", "samples", "{:,d}"),
    ("tokens trained", "tokens", "{:,d}"),
    ("tokens generated", "generated", "{:,d}"),
    ("paused", "paused", "{:,d}"),
    ("tail (s)", "tail_seconds", "{:,.1f}"),
    ("bubble", "bubble", "{:.0%}"),
)

_DEFINITIONS = {
    "ledger": "where every generated token stands: pending, trained, or wasted for a named reason (stale to failed); "
    "recomputed, restored and rejected-draft tokens are counted beside",
    "tail": "the last 10 % of samples to finish, of those that finish in one iteration",
    "tail time": "from the finish of the 90th percentile sample (nearest rank) to the last finish; summed over "
    "iterations",
    "bubble": "slot-seconds without a sequence; its share is of slots \u00d7 the time from an iteration's first "
    "admission to its last release",
    "trained": "handed over in complete groups",
    "pending": "generated and kept, not handed over when the run ends",
    "re-prefilled": "tokens computed again after a pause or a preemption; restored tokens came from a snapshot instead",
    "prefill and decode": "a mixed step's model time, split by the share of its query tokens",
    "drafting": "making drafts; the passes that verify them are in decode",
    "acceptance length": "tokens that a verified draft brings, the target's own one included",
    "scheduling": "step time outside the model, sampling and drafting",
    "switch": "saving and restoring KV, and updating weights",
    "idle": "wall time in no other part",
}


def write_report(
    path: str | os.PathLike[str], df: pd.DataFrame, summary: Mapping[str, Mapping[str, Any]], meta: Mapping[str, Any]
) -> None:
    """Writes the page for `summary(df)`. `meta` (settings and machine, any JSON) is shown as a table, escaped."""
    page = render(df, summary, meta)
    with replacing(path) as file:
        file.write(page.encode())


def render(df: pd.DataFrame, summary: Mapping[str, Mapping[str, Any]], meta: Mapping[str, Any]) -> str:
    """The page as text."""
    import jinja2

    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    settings = {row.run: row.settings for row in analysis.rows(analysis.runs(df))}
    return environment.get_template("report.html.j2").render(
        title=" against ".join(summary),
        headline=headline(summary),
        reasons=reasons(summary),
        runs=list(summary),
        table=_table(summary),
        ledger=_ledger_rows(summary),
        drafters=_drafter_rows(summary),
        drafter_columns=[label for label, _ in _DRAFTER_COLUMNS],
        batches=_batch_rows(summary),
        figures=_figures(df),
        iterations=_iteration_rows(summary),
        iteration_columns=[label for label, _, _ in _ITERATION_TABLE],
        settings=_settings_rows(settings),
        meta=[(key, _text(value)) for key, value in meta.items()],
        definitions=_DEFINITIONS,
    )


def headline(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence: what the tail cost under the first run, and what each other run made of it."""
    (base, first), *others = summary.items()
    cost = (
        f"Under {base}, waiting for the last 10 % of samples took {_format('{:,.1f}', first['tail_seconds'])} s "
        f"({_format('{:.0%}', first['tail_share'])} of the run), and "
        f"{_format('{:.0%}', first['bubble_share'])} of the slot time was empty while generating"
    )
    return "; ".join([cost, *(f"{name} {_outcome(first, other, base)}" for name, other in others)]) + "."


def reasons(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What stands behind each comparison with the first run, one sentence a fact that matters."""
    (base, first), *others = summary.items()
    facts = []
    for name, numbers in summary.items():
        if not numbers["complete"]:
            facts.append(f"{name} did not reach its end; its numbers cover what was traced.")
        if numbers["tokens_unaccounted"]:
            facts.append(f"{name}: {numbers['tokens_unaccounted']:,} generated tokens have no place in the account.")
    for name, other in others:
        facts += _why(base, first, name, other)
    return facts


def _outcome(first: Mapping[str, Any], other: Mapping[str, Any], base: str) -> str:
    ratio = _over(other["tokens_per_second"], first["tokens_per_second"])
    if ratio is None:
        return "cannot be compared, because one of the two trained nothing"
    because = _because(first, other)
    if abs(ratio - 1) <= _SAME:
        return f"trained as many tokens per second, {because}"
    verdict = "gained" if ratio > 1 else "did not pay here"
    return f"{verdict}: {ratio:.2f} times the trained tokens per second of {base}, {because}"


def _because(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The fact that explains the rate best, as a clause; `reasons` has them all."""
    ratio = _over(other["tokens_per_second"], first["tokens_per_second"]) or 0.0
    speed = _over(other["tokens_generated_per_second"], first["tokens_generated_per_second"]) or 0.0
    bubble = _format("{:.0%}", other["bubble_share"])
    pending = _over(other["tokens_pending"], other["tokens_generated"]) or 0.0
    if ratio > 1 + _SAME:
        return f"with {bubble} of the slot time empty"
    if speed > 1 + _SAME:
        share = _format("{:.0%}", pending)
        return f"though it generated {speed:.2f} times as fast: {share} of its tokens were still pending at the end"
    if (other["bubble_share"] or 0) < (first["bubble_share"] or 0) - _SAME:
        return f"because steps with fuller slots ({bubble} empty) cost more here, or resuming took what they saved"
    return f"because its slots were no fuller ({bubble} empty)"


def _why(base: str, first: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> list[str]:
    facts = [
        f"{name} left {_format('{:.0%}', other['bubble_share'])} of its slot time empty, {base} "
        f"{_format('{:.0%}', first['bubble_share'])}."
    ]
    speed = _over(other["tokens_generated_per_second"], first["tokens_generated_per_second"])
    fewer_bubbles = (other["bubble_share"] or 0) < (first["bubble_share"] or 0)
    if speed is not None:
        facts.append(f"It generated {speed:.2f} times the tokens per second of {base}, trained or not.")
        if fewer_bubbles and speed < 1 + _SAME:
            facts.append(_step_cost(base, first, name, other))
    pending = _over(other["tokens_pending"], other["tokens_generated"])
    if pending and pending > _SAME:
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
    if abs(switch - before) > _SAME:
        facts.append(
            f"Switching took {_format('{:.0%}', switch)} of its time, {_format('{:.0%}', before)} under {base}."
        )
    return facts


def _step_cost(base: str, first: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> str:
    """Fuller slots that bring nothing: what a generated token cost in each run."""
    costs = [1000 * (_over(run["breakdown"]["decode"], run["tokens_generated"]) or 0.0) for run in (other, first)]
    return (
        f"Fuller slots did not make {name} faster: a generated token took {costs[0]:.1f} ms of decode time, "
        f"{costs[1]:.1f} ms under {base}."
    )


def _table(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(label, a cell per run); later runs also show their ratio to the first, where `compare` has one."""
    ratios = analysis.compare({run: dict(numbers) for run, numbers in summary.items()})
    first = next(iter(summary))
    rows = []
    for label, key, form in _TABLE:
        cells = []
        for run, numbers in summary.items():
            value = _lengths(numbers) if key == "lengths" else numbers[key]
            ratio = None if run == first else ratios[run].get(key)
            cells.append(_format(form, value) + (f" ({ratio:.2f}\u00d7)" if ratio is not None else ""))
        rows.append((label, cells))
    return rows


def _lengths(numbers: Mapping[str, Any]) -> str:
    return " / ".join(_format("{:,d}", numbers[key]) for key in ("length_p50", "length_p90", "length_max"))


def _ledger_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(line, a cell per run); nothing where no run has a ledger (a trace alone holds none)."""
    ledgers = [numbers.get("ledger", {}) for numbers in summary.values()]
    lines = dict.fromkeys(line for ledger in ledgers for line in ledger)
    return [(line, [_format("{:,d}", ledger.get(line)) for ledger in ledgers]) for line in lines]


def _by_position(drafter: Mapping[str, Any]) -> str:
    pairs = zip(drafter["accepted_by_position"], drafter["judged_by_position"], strict=True)
    return " ".join(f"{accepted / judged:.0%}" for accepted, judged in pairs if judged)


_DRAFTER_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("drafts verified", lambda d: _format("{:,d}", d["drafted"])),
    ("accepted", lambda d: _format("{:.0%}", d["accepted"] / d["drafted"] if d["drafted"] else None)),
    ("acceptance length", lambda d: _format("{:.2f}", d["acceptance_length"])),
    ("drafting (s)", lambda d: _format("{:.2f}", d["draft_seconds"])),
    ("verifying (s)", lambda d: _format("{:.2f}", d["verify_seconds"])),
    ("accepted of those judged, by position", _by_position),
)


def _drafter_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """(run, drafter, cells); nothing where no run drafted."""
    return [
        (run, name, [cell(drafter) for _, cell in _DRAFTER_COLUMNS])
        for run, numbers in summary.items()
        for name, drafter in ((numbers.get("speculation") or {}).get("drafters") or {}).items()
    ]


def _batch_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, str, str]]:
    """(run, sequences that decode, what was done in how many steps, break-even acceptance)."""
    return [
        (
            run,
            row["batch"],
            ", ".join(f"{reason} {steps:,d}" for reason, steps in row["steps"].items()),
            _format("{:.0%}", row["break_even_acceptance"]),
        )
        for run, numbers in summary.items()
        for row in (numbers.get("speculation") or {}).get("batches") or ()
    ]


def _iteration_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, list[str]]]:
    return [
        (run, row["iteration"], [_format(form, row[key]) for _, key, form in _ITERATION_TABLE])
        for run, numbers in summary.items()
        for row in numbers["iterations"]
    ]


def _figures(df: pd.DataFrame) -> list[dict[str, Any]]:
    from markupsafe import Markup

    from longtail.bench import plots

    return [
        {"svg": Markup(plots.svg(figure, alternative(figure, name), name)), "caption": _CAPTIONS[name]}
        for name, figure in plots.all_figures(df).items()
    ]


def alternative(figure: Any, name: str) -> str:
    """Alt text: the kind of picture and the finding it carries as its title."""
    kinds = {
        "slots": "Timeline of the slots of each run",
        "active": "Active sequences over time",
        "lengths": "Histogram and survival curve of response lengths",
        "breakdown": "Stacked bars of where the time went",
    }
    return f"{kinds[name]}. {figure.texts[0].get_text()}."


def _settings_rows(settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Settings of the runs side by side, in order of first mention."""
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    return [(key, [_text(values.get(key)) for values in settings.values()]) for key in keys]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "\u2013" if value is None else str(value)


def _format(form: str, value: Any) -> str:
    return "\u2013" if value is None else form.format(value).replace("%", "\u00a0%")


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
