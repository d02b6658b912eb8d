"""`longtail bench pool`. Heavy imports happen inside the command, so that --help is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def pool(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Of the sample that moves")] = 2048,
    live: Annotated[int, typer.Option(min=1, help="Samples that decode")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; ratios are taken pair by pair")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of an engine")] = 2,
    ray: Annotated[
        str | None, typer.Option(help="Also with Ray actors: local, auto or an address", show_default="no")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Instead: makespan of 1, 2 and 4 engines on Ray, simulated and measured")
    ] = False,
    slowed: Annotated[
        float, typer.Option(min=1, help="With --predict: a pass takes so many times its time, asleep for the rest")
    ] = 4.0,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """What a pool of engines costs: moving a sample against computing its KV again, and the time outside the engines'
    steps. One to three minutes, 2 GB of memory; with Ray twice as much of both. --predict: five minutes, 6 GB."""
    from longtail.bench import pool_bench, pool_predict
    from longtail.bench.models import resolve_model

    console = Console(stderr=True)
    source = resolve_model(model, progress=lambda text: console.print(text, style="dim", highlight=False))
    with console.status("measuring") as status:
        if predict:
            workload = pool_predict.PredictConfig(model=source, ray=ray or "local", slowed=slowed)
            result = pool_predict.run(workload, progress=lambda text: status.update(text))
        else:
            config = pool_bench.PoolBenchConfig(
                model=source, tokens=tokens, live=live, repeats=repeats, threads=threads, ray=ray
            )
            result = pool_bench.run(config, progress=lambda text: status.update(text))
    if predict:
        console.print(pool_predict.table(result))
        for line in pool_predict.notes(result):
            console.print(line, highlight=False, soft_wrap=True)
    else:
        console.print(pool_bench.table(result))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))
