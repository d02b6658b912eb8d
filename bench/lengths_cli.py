"""`longtail lengths`: response lengths for the simulator, from public traces, and what a workload looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Response lengths: import public traces, look at a workload.")
console = Console(stderr=True)
FORMATS = ("servegen", "mooncake")


@app.command("import")
def import_lengths(
    source: Annotated[Path, typer.Argument(help="servegen: folder of a model; mooncake: trace.jsonl")],
    form: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write", show_default="servegen: lengths.json, mooncake: lengths.parquet"),
    ] = None,
) -> None:
    """Make a file for `longtail simulate --workload`: histogram(FILE.json) of ServeGen, FILE.parquet of Mooncake."""
    from longtail.bench import length_import

    if form not in FORMATS:
        raise ValueError(f"format {form!r} is not known; choose from {', '.join(FORMATS)}")
    ending = ".json" if form == "servegen" else ".parquet"
    out = Path(f"lengths{ending}") if out is None else out
    if out.suffix != ending:
        raise ValueError(f"{out}: lengths of {form} are written to a file that ends with {ending}")
    if form == "servegen":
        histogram = length_import.import_servegen(source)
        histogram.write(out)
        middle = histogram.quantiles[len(histogram.quantiles) // 2]
        text = f"{histogram.source}: median {middle:g}, longest {histogram.quantiles[-1]:g} tokens"
    else:
        columns = length_import.import_mooncake(source)
        length_import.write_table(columns, out)
        outputs = columns["output_tokens"]
        text = f"{len(outputs)} requests: mean {outputs.mean():.0f}, longest {outputs.max()} tokens"
    console.print(text, highlight=False, soft_wrap=True)
    console.print(f"Lengths: {out}", highlight=False, soft_wrap=True)


@app.command("show")
def show(
    workload: Annotated[str, typer.Argument(help="As for `longtail simulate --workload`")],
    groups: Annotated[int | None, typer.Option(help="Groups to make, or to draw from a file")] = None,
    group_size: Annotated[int | None, typer.Option(help="Samples of a group")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as the last line of stdout")] = False,
) -> None:
    """Samples, lengths, and how alike siblings are."""
    from longtail.bench.workload import parse_workload

    parsed = parse_workload(workload, groups=groups, group_size=group_size, seed=seed)
    numbers = parsed.summary()
    icc = (
        "unknown: no group has two samples of different lengths" if numbers["icc"] is None else f"{numbers['icc']:.2f}"
    )
    lines = [
        f"{numbers['samples']} samples in {numbers['groups']} groups",
        f"output tokens: mean {numbers['mean']:.0f}, median {numbers['p50']}, 90 % {numbers['p90']}, "
        f"99 % {numbers['p99']}, longest {numbers['max']}; at the cap {numbers['capped']:.1%}",
        f"likeness of siblings (intra-class correlation): {icc}",
        *parsed.notes,
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(numbers))
