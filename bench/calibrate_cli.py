"""`longtail calibrate`: a cost model from a trace, and how far off it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.bench.cost_model import CostModel

console = Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Adds the command `calibrate`."""
    app.command("calibrate")(calibrate)


def calibrate(
    trace: Annotated[Path, typer.Argument(help="trace.parquet of a bench")],
    out: Annotated[Path, typer.Option(help="Cost model to write, .toml or .json")] = Path("cost.toml"),
    runs: Annotated[str, typer.Option(help="Runs of the trace, comma-separated", show_default="all")] = "",
    stalls: Annotated[
        str, typer.Option(help="Steps that took over three times their time: keep, as part of the sums, or drop")
    ] = "keep",
    as_json: Annotated[bool, typer.Option("--json", help="Print the cost model as the last line of stdout")] = False,
) -> None:
    """Fit what a step costs, and saving, restoring, updating and grading; print how far off the fit is."""
    from longtail.bench.cost_fit import fit
    from longtail.bench.cost_model import check_ending
    from longtail.bench.trace import read_trace

    check_ending(out)
    chosen = [name.strip() for name in runs.split(",") if name.strip()] or None
    df = read_trace(trace)
    costs = fit(df, runs=chosen, stalls=stalls, label=f"{df.attrs['meta'].get('model', 'model')}, from {trace}")
    costs.write(out)
    console.print(_costs(costs))
    console.print(_errors(costs))
    for line in costs.report["findings"]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Cost model: {out}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(costs.as_dict()))


def _costs(costs: CostModel) -> Table:
    from rich.table import Table

    table = Table(title="Costs", title_justify="left")
    table.add_column("")
    table.add_column("milliseconds", justify="right")
    step, report = costs.step, costs.report
    lengths = 1024
    rows = [
        (f"decode pass, {n} sequences of {lengths} tokens", step.seconds(n, n, n * lengths))
        for n in dict.fromkeys((1, report["by_batch"][-1]["to"]))
    ]
    rows.append(("  of it between passes", step.between))
    rows.append(("prompt of 512 tokens, alone", step.seconds(1, 512, 512)))
    for name, transfer in (("save", costs.save), ("restore", costs.restore)):
        if transfer is not None:
            rows.append((f"{name} KV of 1000 tokens", transfer.seconds(1000)))
    named = {"weight update": costs.update, "grade a sample": costs.grade, "training step": costs.train}
    rows += [(name, value) for name, value in (named | {"draft token": costs.draft_token}).items() if value is not None]
    for label, seconds in rows:
        table.add_row(label, f"{1000 * seconds:.3g}")
    return table


def _errors(costs: CostModel) -> Table:
    """Cross-validated, but for its last row."""
    from rich.table import Table

    report = costs.report
    table = Table(title=f"Predicted against measured, {report['steps']} steps, cross-validated", title_justify="left")
    table.add_column("sequences")
    for name in ("steps", "mean ms", "median error", "90 % below", "sum of seconds"):
        table.add_column(name, justify="right")
    for row in report["by_batch"]:
        label = str(row["to"]) if row["from"] == row["to"] else f"{row['from']}-{row['to']}"
        table.add_row(label, str(row["steps"]), f"{1000 * row['mean_seconds']:.3g}", *_percent(row))
    table.add_section()
    table.add_row("all", str(report["steps"]), "", *_percent(report["cross_validated"]))
    table.add_row("all, in sample", str(report["steps"]), "", *_percent(report["in_sample"]))
    return table


def _percent(row: dict[str, float]) -> tuple[str, str, str]:
    return f"{row['median']:.1%}", f"{row['p90']:.1%}", f"{row['total']:+.1%}"
