"""`longtail report`: the page of runs that are on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console(stderr=True)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories of benches, or trace files; the first is the baseline")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Page to write", show_default="report.html beside the first run's trace")
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Compare runs that are not alike, and say so")] = False,
) -> None:
    """Write one page about one or several runs: what the tail cost, why, and what would help most. Runs of several
    directories are compared if they made the same samples."""
    from longtail.bench import answer, report
    from longtail.bench.run_files import load, trace_file

    loaded = load(runs, anyway=anyway)
    page = trace_file(runs[0]).parent / "report.html" if out is None else out
    page.parent.mkdir(parents=True, exist_ok=True)
    report.write_report(page, loaded.frame, loaded.summary, loaded.meta, unlike=loaded.unlike)
    for sentence in [*loaded.unlike, answer.headline(loaded.summary), *answer.why(loaded.summary)]:
        console.print(sentence, highlight=False, soft_wrap=True)
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command("report")(report)
