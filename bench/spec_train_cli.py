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
    out: Annotated[
        Path | None, typer.Option(help="Directory of the drafter", show_default="runs/mtp or runs/draft")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="mtp: a multi-token-prediction head; draft: a small model of its own")
    ] = "mtp",
    start: Annotated[
        Path | None,
        typer.Option(help="What to go on with, its version counts on: a head, or a draft model (or any small model)"),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time for hidden states and training")] = 3.0,
    depth: Annotated[
        int | None, typer.Option(min=1, help="mtp: draft positions that are trained", show_default="2")
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(min=0, help="mtp: most frequent tokens that may be drafted; 0: all", show_default="8192"),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="draft: layers of the target to begin with, without --start", show_default="4"),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the split, the order and the start")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as the last line of stdout")] = False,
) -> None:
    """Train a drafter on rollouts: while the machine is idle, or offline. The target's outputs never depend on it.
    Ctrl-C ends it early and keeps what was learnt."""
    own = {"mtp": {"depth": depth, "vocabulary": vocabulary}, "draft": {"layers": layers}}
    if kind not in own:
        raise ValueError(f"kind: no drafter {kind!r} to train; there is {' and '.join(own)}")
    for other in own.keys() - {kind}:
        if given := [f"--{name}" for name, value in own[other].items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: of --kind {other}, not of {kind}")
    if layers is not None and start is not None:
        raise ValueError("--layers: a draft model that begins with --start has the layers of that one")
    if (samples is None) == (generate == 0):
        raise ValueError("give either --samples, or --generate with a number of prompts")
    from longtail.bench import spec_rollouts
    from longtail.bench.models import resolve_model
    from longtail.bench.spec_train import TrainConfig, train_mtp
    from longtail.bench.spec_train_draft import DraftConfig, train_draft
    from longtail.partial_rollout.engines.native.mtp_head import MTPHead

    fields: dict[str, Any] = {name: value for name, value in own[kind].items() if value is not None}
    fields |= {"minutes": minutes, "learning_rate": learning_rate, "seed": seed, "threads": threads}
    config = (TrainConfig if kind == "mtp" else DraftConfig)(**fields)
    out = Path("runs") / kind if out is None else out
    console = Console(stderr=True)
    source = str(resolve_model(target))
    head = None if kind != "mtp" or start is None else MTPHead.load(start)
    with console.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)

        if samples is not None:
            rollouts = spec_rollouts.load_rollouts(samples)
        else:
            rollouts = spec_rollouts.generate(source, generate, tasks=tasks, seed=seed, progress=progress)
        trained: Any
        if isinstance(config, TrainConfig):
            trained = train_mtp(source, rollouts, out, config, start=head, progress=progress)
        else:
            trained = train_draft(source, rollouts, out, config, start=start, progress=progress)
    console.print(table(trained.record))
    name = {"mtp": "mtp", "draft": "model"}[kind]
    console.print(f"Version {trained.version}, drafter {name}:{out}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(trained.record | {"version": trained.version}))


def table(record: dict[str, Any]) -> Table:
    """Held-out acceptance."""
    from rich.table import Table

    found, on = record["held_out"], record["trained_on"]
    before = record.get("held_out_before")
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
            told = [(name, entry)]
            if before is not None:
                told.insert(0, (f"{name}, before", before["temperatures"][temperature][name]))
            for label, figures in told:
                rates = [f"{rate:.2f}" for rate in figures["by_position"]]
                shown.add_row(temperature, label, *rates, f"{figures['acceptance_length']:.2f}")
    return shown
