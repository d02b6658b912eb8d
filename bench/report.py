"""The report of a bench: one HTML page that needs no network, the answer first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from longtail.bench import analysis, answer
from longtail.bench.trace import replacing

_TEMPLATES = Path(__file__).parent / "templates"
_FEW = 3
"""Up to so many runs stand beside each other as columns; of more, each has a row."""

_CAPTIONS = {
    "tail": "The seconds in which an iteration waits for its last samples, by cause. Low-batch decode is what these "
    "passes cost beyond the same tokens decoded among full batches; true length is what is left without any cause.",
    "what-if": "Each cause removed alone, everything else as it was. The causes of one second overlap, so these do not "
    "add up; the shares above do.",
    "ledger": "Every generated token has one place. Pending: kept, not handed over when the run ended.",
    "staleness": "How many versions of the weights lie between the making of a token and its hand-over.",
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
    ("tokens wasted", "tokens_wasted", "{:,d}"),
    ("tokens unaccounted", "tokens_unaccounted", "{:,d}"),
    ("tokens re-prefilled", "tokens_reprefilled", "{:,d}"),
    ("tokens restored", "tokens_restored", "{:,d}"),
    ("pauses", "pauses", "{:,d}"),
    ("preemptions", "preemptions", "{:,d}"),
    ("output tokens p50 / p90 / max", "lengths", "{}"),
    ("share at the cap", "capped_share", "{:.1%}"),
    ("mean reward", "mean_reward", "{:.3f}"),
    ("graded by", "graders", "{}"),
)

_OVERVIEW = (  # (label, key, format) of the table with a row a run
    ("wall (s)", "wall_seconds", "{:,.1f}"),
    ("trained tokens/s", "tokens_per_second", "{:,.1f}"),
    ("\u00d7 first", "ratio", "{:.2f}"),
    ("s per 1,000 trained", "seconds_per_1000_tokens", "{:,.2f}"),
    ("tail (s)", "tail_seconds", "{:,.1f}"),
    ("tail", "tail_share", "{:.0%}"),
    ("bubbles", "bubble_share", "{:.0%}"),
    ("age mean", "staleness_mean", "{:.2f}"),
    ("age max", "staleness_max", "{:d}"),
    ("wasted tokens", "tokens_wasted", "{:,d}"),
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
    "started late": "of the tail: the last samples' seconds without a slot before their first admission",
    "paused": "of the tail: their seconds out of a slot after it, and computing again what that lost",
    "waiting": "of the tail: their seconds with an environment, or while everybody waited for graders",
    "low-batch decode": "of the tail: what decoding took beyond its tokens at the speed of the fullest batches",
    "true length": "of the tail: what would be left without any of the causes",
    "age": "of a trained token: version of the weights at its hand-over less that of those that made it",
    "wasted": "generated, and dropped or aborted: nobody trains on it",
    "verify": "a step's model time, by the share of its rows that verify drafts",
    "drafting": "making drafts",
    "acceptance length": "tokens that a verified draft brings, the target's own one included",
    "scheduling": "step time outside the model, sampling and drafting",
    "switch": "saving and restoring KV, and updating weights",
    "evaluate": "measuring the policy on held-out prompts, their generation and grading included",
    "checkpoint": "writing down what the run goes on from",
    "idle": "wall time in no other part",
}


def write_report(
    path: str | os.PathLike[str],
    df: pd.DataFrame,
    summary: Mapping[str, Mapping[str, Any]],
    meta: Mapping[str, Any],
    unlike: Sequence[str] = (),
) -> None:
    """Writes the page for `summary(df)`. `meta` (settings and machine, any JSON) is shown as a table, escaped. unlike:
    why the runs should not be compared, shown first."""
    page = render(df, summary, meta, unlike)
    with replacing(path) as file:
        file.write(page.encode())


def render(
    df: pd.DataFrame,
    summary: Mapping[str, Mapping[str, Any]],
    meta: Mapping[str, Any],
    unlike: Sequence[str] = (),
) -> str:
    """The page as text."""
    import jinja2

    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    settings = {row.run: row.settings for row in analysis.rows(analysis.runs(df))}
    return environment.get_template("report.html.j2").render(
        title=" against ".join(summary) if len(summary) <= _FEW else f"{len(summary)} runs",
        unlike=list(unlike),
        headline=answer.headline(summary),
        why=answer.why(summary),
        reasons=answer.reasons(summary),
        runs=list(summary),
        few=len(summary) <= _FEW,
        overview=_overview(summary),
        overview_columns=[label for label, _, _ in _OVERVIEW],
        table=_table(summary),
        seconds=_seconds(summary),
        ledger=_ledger_rows(summary),
        drafters=_drafter_rows(summary),
        drafter_columns=[label for label, _ in _DRAFTER_COLUMNS],
        batches=_batch_rows(summary),
        shared=_shared_rows(summary),
        figures=_figures(df),
        iterations=_iteration_rows(summary),
        iteration_columns=[label for label, _, _ in _ITERATION_TABLE],
        settings=_settings_rows(settings),
        meta=_meta_rows(meta, settings),
        definitions=_DEFINITIONS,
    )


def _overview(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(run, a cell per column)."""
    ratios = analysis.compare({run: dict(numbers) for run, numbers in summary.items()})
    table = []
    for run, numbers in summary.items():
        values = {**numbers, "ratio": ratios[run]["tokens_per_second"]}
        table.append((run, [_format(form, values[key]) for _, key, form in _OVERVIEW]))
    return table


def _seconds(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """(title, columns, (run, a cell per column)): the breakdown of the wall time, and of the tail. Columns in which no
    run has a tenth of a second are left out."""
    tables = []
    for title, key, whole in (("Wall time (s)", "breakdown", "wall_seconds"), ("Tail (s)", "tail", "tail_seconds")):
        names = analysis.PARTS if key == "breakdown" else analysis.CAUSES
        used = [name for name in names if any(numbers[key][name] >= 0.05 for numbers in summary.values())]
        rows = [
            (run, [_format("{:,.1f}", value) for value in (numbers[whole], *(numbers[key][name] for name in used))])
            for run, numbers in summary.items()
        ]
        tables.append((title, ["all", *(name.replace("_", " ") for name in used)], rows))
    return tables


def _table(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(label, a cell per run); later runs also show their ratio to the first, where `compare` has one."""
    ratios = analysis.compare({run: dict(numbers) for run, numbers in summary.items()})
    first = next(iter(summary))
    rows = []
    for label, key, form in _TABLE:
        cells = []
        for run, numbers in summary.items():
            value = _TEXTS[key](numbers) if key in _TEXTS else numbers[key]
            ratio = None if run == first else ratios[run].get(key)
            cells.append(_format(form, value) + (f" ({ratio:.2f}\u00d7)" if ratio is not None else ""))
        rows.append((label, cells))
    return rows


def _lengths(numbers: Mapping[str, Any]) -> str:
    return " / ".join(_format("{:,d}", numbers[key]) for key in ("length_p50", "length_p90", "length_max"))


def _graders(numbers: Mapping[str, Any]) -> str | None:
    return ", ".join(numbers["graders"]) or None


_TEXTS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {"lengths": _lengths, "graders": _graders}


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
    """(run, drafter, cells); nothing where no run drafted. Of a pool by engine."""
    return [
        (run, f"{name} ({engine})" if engine else name, [cell(drafter) for _, cell in _DRAFTER_COLUMNS])
        for run, numbers in summary.items()
        for engine, report in _speculations(numbers)
        for name, drafter in report["drafters"].items()
    ]


def _speculations(numbers: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(engine of a pool or nothing, its report)."""
    reports = {"": numbers.get("speculation"), **(numbers.get("speculation_by_engine") or {})}
    return [(engine, report) for engine, report in reports.items() if report]


def _shared_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a pool's engines were told of drafts, of the runs where they were."""
    shared = {run: numbers.get("drafts_shared") or {} for run, numbers in summary.items()}
    return [
        f"{run}: engines were told what siblings of their samples wrote in others, {told['tokens']:,d} tokens in "
        f"{told['messages']:,d} messages of {told['bytes'] / 1000:,.1f} kB in all"
        for run, told in shared.items()
        if told.get("messages")
    ]


def _batch_rows(summary: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(run, sequences that decode, what was done in how many steps, break-even acceptance)."""
    return [
        (
            run,
            f"{row['batch']} ({engine})" if engine else str(row["batch"]),
            ", ".join(f"{reason} {steps:,d}" for reason, steps in row["steps"].items()),
            _format("{:.0%}", row["break_even_acceptance"]),
        )
        for run, numbers in summary.items()
        for engine, report in _speculations(numbers)
        for row in report["batches"]
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
        "tail": "Stacked bars of the tail's seconds by cause",
        "what-if": "Bars of the seconds that would be saved without each cause",
        "ledger": "Stacked bars of where the generated tokens went",
        "staleness": "Stacked bars of the trained tokens by age",
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


def _meta_rows(meta: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the settings of the runs do not say already: they have what was resolved, where the list of a trace has what
    was asked for. Of several sources "key (source)" is about the runs "source/...": see `run_files.load`."""
    rows = []
    for name, value in meta.items():
        key, _, source = name.removesuffix(")").partition(" (")
        own = [of for run, of in settings.items() if not source or run.startswith(f"{source}/")]
        if not own or any(key not in of for of in own):
            rows.append((name, _text(value)))
    return rows


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
