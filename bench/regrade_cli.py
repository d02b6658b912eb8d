"""`longtail regrade`: old samples, another exam, both kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

console = Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Adds the command `regrade`."""
    app.command("regrade")(regrade)


def regrade(
    directory: Annotated[Path, typer.Argument(help="Directory of the store", metavar="STORE")],
    grader: Annotated[
        str,
        typer.Option(help='math, math:{"gold": "final"}, a .toml file, or package.module.function', show_default=False),
    ],
    tokenizer: Annotated[
        str, typer.Option(help="Model name, directory or hub id whose tokenizer wrote the samples", show_default=False)
    ],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes", show_default="half the cores")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a sample; longer is a failure, not a 0")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="Also write both rewards of each sample, one JSON a line")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Grade and show, write nothing to the store; works while a run has it open"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as the last line of stdout")] = False,
) -> None:
    """Score the finished samples of a store with another grader, or another version of it. The rewards that the samples
    were trained with stay as they are; the new ones stand beside them (`longtail store show STORE SAMPLE`). What was
    graded before by this very version is not graded again."""
    from longtail.bench.models import resolve_model
    from longtail.bench.regrade import regrade, summary
    from longtail.bench.trace import replacing
    from longtail.partial_rollout.database import Database
    from longtail.partial_rollout.grading import grader_name
    from longtail.trainer_adapter.rewards.specs import make_grader

    made = make_grader(grader)
    if not isinstance(getattr(made, "version", None), str):
        raise ValueError(
            f"grader: {grader} has no version: its rewards could not be told from those of its next change; give it "
            'attributes, such as grade.name = "mine"; grade.version = "1"'
        )
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"out: there is no folder {out.absolute().parent}")
    label = grader_name(made)
    database = Database(directory, read_only=dry_run)
    try:
        from transformers import AutoTokenizer

        source = resolve_model(tokenizer, progress=lambda text: console.print(text, style="dim", highlight=False))
        words = AutoTokenizer.from_pretrained(source)
        with console.status(f"grading with {label}") as status:
            pairs = regrade(
                database,
                made,
                lambda ids: str(words.decode(ids, skip_special_tokens=True)),
                workers=workers,
                timeout=timeout,
                save=not dry_run,
                progress=lambda done, total: status.update(f"grading with {label}: {done:,} of {total:,}"),
            )
    finally:
        database.close()
    if not pairs:
        raise ValueError(f"{directory} holds no finished samples whose tokens are still there")
    found = summary(pairs, label)
    if out is not None:
        with replacing(out) as file:
            file.writelines(json.dumps(pair.as_dict()).encode() + b"\n" for pair in pairs)
    console.print(table(found))
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    what = "would be kept" if dry_run else "were kept"
    console.print(
        f"{found['graded']:,} rewards of {label} {what} beside the recorded ones; {found['known']:,} were known.",
        highlight=False,
        soft_wrap=True,
    )
    if as_json:
        print(json.dumps(found))


def table(found: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(title=f"{found['grader']} against the recorded rewards", title_justify="left")
    names = ("policy version", "recorded by", "samples", "old mean", "new mean", "up", "down", "no reward")
    for i, name in enumerate(names):
        made.add_column(name, justify="left" if i == 1 else "right")
    for row in found["versions"]:
        made.add_row(str(row["version"]), Text(", ".join(row["graders"]) or "\u2013", overflow="fold"), *_cells(row))
    made.add_section()
    made.add_row("all", Text(", ".join(found["exams"]) or "\u2013", overflow="fold"), *_cells(found["all"]))
    return made


def _cells(row: dict[str, Any]) -> list[str]:
    means = ["\u2013" if row[name] is None else f"{row[name]:.3f}" for name in ("old_mean", "new_mean")]
    counts = [f"{row[name]:,}" for name in ("up", "down", "failures")]
    samples = f"{row['samples']:,}"
    if row["compared"] != row["samples"]:
        samples = f"{row['samples']:,} ({row['compared']:,} compared)"
    return [samples, *means, *counts]
