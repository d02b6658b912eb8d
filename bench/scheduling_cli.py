"""`longtail bench scheduling`. Heavy imports happen inside the command, so that --help is quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def scheduling(
    strategies: Annotated[str, typer.Option(help='"all", names, or "sync;over-issue:extra=9;my_module.Mine"')] = "all",
    samples: Annotated[str, typer.Option(help="Samples in all, comma-separated: is the cost flat in them?")] = (
        "1000,10000"
    ),
    slots: Annotated[int, typer.Option(min=1, help="Samples that run at once")] = 512,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """What the rollout itself costs a sequence step, on an engine without a model: samples of 4 to 2,000 tokens, in
    groups of 8. Status 1 if it is more than 50 microseconds. Several minutes with the defaults."""
    from longtail.bench import scheduling_bench
    from longtail.bench.strategy_specs import split_specs

    console = Console(stderr=True)
    try:
        counts = tuple(int(part) for part in samples.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"samples: {samples!r} is not numbers with commas between them") from None
    config = scheduling_bench.SchedulingBenchConfig(strategies=split_specs(strategies), samples=counts, slots=slots)
    with console.status("measuring") as status:
        result = scheduling_bench.run(config, progress=lambda text: status.update(text))
    console.print(scheduling_bench.table(result))
    held = result["must_hold"]
    console.print(
        f"The most is {held['worst']:.2f} us a sequence step; it must be less than {held['most']:g}.", highlight=False
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))
    if not held["holds"]:
        raise typer.Exit(1)
