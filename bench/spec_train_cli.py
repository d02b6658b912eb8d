"""`longtail spec train`: a drafter from rollouts that are there already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table


def train(
    target: Annotated[str, typer.Option(help="The model to draft for: name, directory or hub id")] = "smollm2-135m",
    samples: Annotated[
        str | None, typer.Option(help="A sample store's directory, or a file of JSON lines (prompt_ids, output_ids)")
    ] = None,
    generate: Annotated[int, typer.Option(min=0, help="Without --samples: make them, from so many prompts")] = 0,
    tasks: Annotated[str, typer.Option(help="With --generate: task mix")] = "gsm",
    out: Annotated[Path, typer.Option(help="Directory of the head")] = Path("runs/mtp"),
    kind: Annotated[str, typer.Option(help="mtp: a multi-token-prediction head")] = "mtp",
    start: Annotated[Path | None, typer.Option(help="A head to go on with; its version counts on")] = None,
    minutes: Annotated[float, typer.Option(help="Time for hidden states and training")] = 3.0,
    depth: Annotated[int, typer.Option(min=1, help="Draft positions that are trained")] = 2,
    vocabulary: Annotated[int, typer.Option(min=0, help="Most frequent tokens that may be drafted; 0: all")] = 8192,
    learning_rate: Annotated[float, typer.Option(help="Peak")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the split, the order and the start")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as the last line of stdout")] = False,
) -> None:
    """Train a drafter on rollouts: while the machine is idle, or offline. The target's outputs never depend on it.
    Ctrl-C ends it early and keeps what was learnt."""
    if kind != "mtp":
        raise ValueError(f"kind: no drafter {kind!r} to train; there is mtp")
    if (samples is None) == (generate == 0):
        raise ValueError("give either --samples, or --generate with a number of prompts")
    from longtail.bench import spec_rollouts
    from longtail.bench.models import resolve_model
    from longtail.bench.spec_train import TrainConfig, train_mtp
    from longtail.partial_rollout.engines.native.mtp_head import MTPHead

    config = TrainConfig(
        minutes=minutes, depth=depth, vocabulary=vocabulary, learning_rate=learning_rate, seed=seed, threads=threads
    )
    console = Console(stderr=True)
    source = str(resolve_model(target))
    first = None if start is None else MTPHead.load(start)
    with console.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)

        if samples is not None:
            rollouts = spec_rollouts.load_rollouts(samples)
        else:
            rollouts = spec_rollouts.generate(source, generate, tasks=tasks, seed=seed, progress=progress)
        head = train_mtp(source, rollouts, out, config, start=first, progress=progress)
    console.print(table(head.record))
    console.print(f"Head of version {head.version}: {out}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(head.record | {"version": head.version}))


def table(record: dict[str, Any]) -> Table:
    """Held-out acceptance."""
    from rich.table import Table

    found, on = record["held_out"], record["trained_on"]
    shown = Table(
        title=f"Estimated on {found['rows']:,} held-out positions; trained on {on['samples']:,} samples, "
        f"{on['tokens']:,} tokens, {record['steps']:,} steps"
    )
    depth = 0
    for entries in found["temperatures"].values():
        depth = max(depth, *(len(e["by_position"]) for e in entries.values()))
    for name in ("temperature", "acceptance", *(f"draft {j + 1}" for j in range(depth)), "tokens a step"):
        shown.add_column(name, justify="left" if name == "acceptance" else "right")
    for temperature, entries in found["temperatures"].items():
        for name, entry in entries.items():
            rates = [f"{rate:.2f}" for rate in entry["by_position"]]
            shown.add_row(temperature, name, *rates, f"{entry['acceptance_length']:.2f}")
    return shown
