"""`longtail bench mismatch`. Heavy imports happen inside the command, so that --help is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def mismatch(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    tasks: Annotated[str, typer.Option(help="Task mix, e.g. gsm or gsm_symbolic=3,chain_sum=1")] = "gsm",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts")] = 2,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of each prompt")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each sample")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of tasks and samples")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """How far a trainer's log-probabilities are from the rollout's: exact, fast, in 16 bits, and of a small mixture of
    experts with its routing replayed. Status 1 unless the exact ones agree bit for bit. About two minutes."""
    from longtail.bench import mismatch_bench
    from longtail.bench.models import resolve_model

    console = Console(stderr=True)
    source = resolve_model(model, progress=lambda text: console.print(text, style="dim", highlight=False))
    fields: dict[str, Any] = {} if threads is None else {"threads": threads}
    config = mismatch_bench.MismatchBenchConfig(
        model=source,
        tasks=tasks,
        prompts=prompts,
        group_size=group_size,
        max_tokens=tokens,
        temperature=temperature,
        seed=seed,
        **fields,
    )
    with console.status("measuring") as status:
        result = mismatch_bench.run(config, progress=lambda text: status.update(text))
    console.print(mismatch_bench.table(result))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))
    if not result["must_hold"]["holds"]:
        console.print("The exact pass does not give the rollout's bits.", style="red")
        raise typer.Exit(1)
