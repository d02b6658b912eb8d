"""`longtail trace`: other systems' records as traces of ours, and traces of ours for other systems' viewers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Traces: import other systems' records, export.")
console = Console(stderr=True)


@app.command("import")
def import_records(
    records: Annotated[Path, typer.Argument(help="One JSON object a line, each a response")],
    form: Annotated[
        str, typer.Option("--format", help="auto, vllm (request metrics), trainer (verl, slime, TRL and the like)")
    ] = "auto",
    unit: Annotated[str, typer.Option(help="Of the times: s, ms, us, ns")] = "s",
    names: Annotated[
        str, typer.Option(help="What fields are called, e.g. group=prompt_uid,end=t1", show_default="known names")
    ] = "",
    run: Annotated[str, typer.Option(help="Name of the run in the trace")] = "imported",
    out: Annotated[Path, typer.Option(help="Trace to write")] = Path("trace.parquet"),
) -> None:
    """Make a trace that `longtail report` and longtail.bench.analysis read."""
    from longtail.bench import analysis
    from longtail.bench.trace_import import import_trace

    pairs = [part.partition("=") for part in names.split(",") if part.strip()]
    if wrong := [key for key, _, value in pairs if not (key.strip() and value.strip())]:
        raise ValueError(f"names: {', '.join(wrong)} is not FIELD=NAME")
    given = {key.strip(): value.strip() for key, _, value in pairs}
    writer, meta = import_trace(records, form=form, unit=unit, run=run, names=given)
    writer.write(out, meta)
    numbers = analysis.summary(writer.frame())[run]
    console.print(
        f"{meta['samples']} responses, {numbers['tokens_generated']} tokens in {numbers['wall_seconds']:.1f} s; "
        f"{numbers['tail_seconds']:.1f} s of it in the tail",
        highlight=False,
        soft_wrap=True,
    )
    fields = ", ".join(f"{field}={name}" for field, name in meta["fields"].items())
    console.print(f"Read as: {fields}", highlight=False, soft_wrap=True)
    console.print(f"Trace: {out}", highlight=False, soft_wrap=True)


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="Directory of a bench, or a trace file")],
    out: Annotated[Path, typer.Option(help="File to write")] = Path("trace.json"),
) -> None:
    """Write a trace as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    from longtail.bench.chrome_trace import write_chrome_trace
    from longtail.bench.run_files import trace_file
    from longtail.bench.trace import read_trace

    count = write_chrome_trace(out, read_trace(trace_file(run)))
    console.print(f"{count:,} events: {out}; open it at ui.perfetto.dev", highlight=False, soft_wrap=True)
