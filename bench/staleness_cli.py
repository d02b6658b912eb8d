"""`longtail bench staleness`. Heavy imports happen inside the command, so that --help is quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

N = TypeVar("N", int, float)


def staleness(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    lr: Annotated[str, typer.Option(help="Learning rates of the versions, comma-separated")] = "1e-6,1e-5,1e-4",
    weights: Annotated[
        str, typer.Option(help="Directories of versions that are there, oldest first, instead of a training")
    ] = "",
    ages: Annotated[
        str, typer.Option(help="Versions between KV and weights", show_default="1,2,4,8, or those that --weights has")
    ] = "",
    contexts: Annotated[int, typer.Option(min=1, help="Samples that an update cuts")] = 8,
    stale_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each whose KV becomes stale")] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens after them, on which drift is measured")] = 64,
    tasks: Annotated[str, typer.Option(help="Task mix of the contexts")] = "gsm",
    live: Annotated[int, typer.Option(min=0, help="Samples that recompute; 0: times are not measured")] = 8,
    lengths: Annotated[str, typer.Option(help="Known tokens of each, comma-separated")] = "128,512",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of the times; ratios are taken pair by pair")] = 3,
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="Memory for KV: room for all of these samples")] = 512,
    seed: Annotated[int, typer.Option(help="Of tasks and samples")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 2,
    picture: Annotated[Path | None, typer.Option(help="Write the figure to this file: png, svg or pdf")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """Keep the KV over a weight update, or compute it again? What keep costs in drift, by age and learning rate, and
    what recompute costs in time. Three minutes on two quiet cores and 8 GB of memory with the defaults."""
    from longtail.bench import staleness_bench, staleness_tables
    from longtail.bench.models import resolve_model

    console = Console(stderr=True)
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"picture must end in .png, .svg or .pdf, not {picture.name!r}")

    def say(text: str) -> None:
        console.print(text, style="dim", highlight=False)

    config = staleness_bench.StalenessBenchConfig(
        model=resolve_model(model, progress=say),
        weights=tuple(Path(part.strip()) for part in weights.split(",") if part.strip()),
        rates=_numbers("lr", lr, float),
        ages=_numbers("ages", ages, int),
        contexts=contexts,
        stale_tokens=stale_tokens,
        new_tokens=new_tokens,
        tasks=tasks,
        live=live,
        lengths=_numbers("lengths", lengths, int),
        repeats=repeats,
        kv_cache_bytes=kv_cache_mib << 20,
        seed=seed,
        threads=threads,
    )
    with console.status("measuring") as status:
        result = staleness_bench.run(config, progress=lambda text: status.update(text))
    for table in staleness_tables.tables(result):
        console.print(table)
    for line in staleness_tables.findings(result):
        console.print(line, highlight=False, soft_wrap=True)
    if picture is not None:
        from longtail.bench import plots, staleness_plot

        picture.parent.mkdir(parents=True, exist_ok=True)
        plots.save(staleness_plot.figure(result), picture)
        console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))


def _numbers(option: str, text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not numbers with commas between them") from None
