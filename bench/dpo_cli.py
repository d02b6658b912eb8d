"""`longtail dpo`: training on preference pairs, in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

console = Console(stderr=True)


def dpo(
    pairs: Annotated[Path, typer.Option(help="Pairs to train on: .jsonl or .parquet (`longtail pairs`)")],
    out: Annotated[Path, typer.Option(help="Directory of the run")] = Path("runs/dpo"),
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    held_out: Annotated[float, typer.Option(min=0, help="Share of the prompts to measure on")] = 0.1,
    eval_pairs: Annotated[
        Path | None, typer.Option(help="A file of pairs to measure on, instead", show_default="none")
    ] = None,
    beta: Annotated[
        float, typer.Option(help="How far the policy may go from the reference: the smaller the farther")
    ] = 0.1,
    kind: Annotated[str, typer.Option(help="Loss: sigmoid, ipo")] = "sigmoid",
    label_smoothing: Annotated[float, typer.Option(help="Share of the pairs that may be the wrong way round")] = 0.0,
    length_normalized: Annotated[
        bool | None,
        typer.Option(help="Means over tokens in place of sums", show_default="for ipo"),
    ] = None,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate of AdamW")] = 1e-6,
    warmup: Annotated[int, typer.Option(min=0, help="Updates until the learning rate is reached")] = 0,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW")] = 0.0,
    epochs: Annotated[int, typer.Option(min=1, help="Times that each pair is trained on")] = 1,
    batch_pairs: Annotated[int, typer.Option(min=1, help="Pairs of an update")] = 16,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a forward and backward pass")] = 8192,
    lora: Annotated[int, typer.Option(min=0, help="Rank of adapters; 0: the model itself is trained")] = 0,
    freeze: Annotated[
        str | None, typer.Option(help="Parameters not to train: a regular expression", show_default="none")
    ] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, more time")] = False,
    reason: Annotated[str | None, typer.Option(help="For rows that give none", show_default="none")] = None,
    ignore: Annotated[str, typer.Option(help="Names of further fields that are not read, comma-separated")] = "",
    seed: Annotated[int, typer.Option(help="Of the order of the pairs, and of what is held out")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between measurements; 0: only before and after")] = 0,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints")] = 50,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the directory")] = False,
    export: Annotated[bool, typer.Option(help="Write the model at the end")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as the last line of stdout")] = False,
) -> None:
    """Train a model on preference pairs (DPO), against itself as it was. Killed and resumed it is the same run."""
    from longtail.bench.dpo import DPORunConfig, run
    from longtail.bench.models import resolve_model
    from longtail.bench.pairs_cli import names
    from longtail.trainer_adapter.dpo_trainer import DPOConfig

    config = DPORunConfig(
        model=model,
        pairs=str(pairs),
        held_out=held_out,
        eval_pairs=None if eval_pairs is None else str(eval_pairs),
        reason=reason,
        ignore=names(ignore),
        lora=lora,
        freeze=freeze,
        gradient_checkpointing=gradient_checkpointing,
        threads=threads,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        export=export,
        dpo=DPOConfig(
            beta=beta,
            kind=kind,  # type: ignore[arg-type]
            label_smoothing=label_smoothing,
            length_normalized=length_normalized,
            learning_rate=learning_rate,
            warmup=warmup,
            weight_decay=weight_decay,
            epochs=epochs,
            batch_pairs=batch_pairs,
            micro_batch_tokens=micro_batch_tokens,
            seed=seed,
        ),
    )
    source = resolve_model(model, progress=lambda text: console.print(text, style="dim", highlight=False))
    with DPOProgress(console) as progress:
        summary = run(config, out, resume=resume, model=source, progress=progress)
    if summary["before"] is not None:
        console.print(table(summary))
    console.print(f"Run: {out}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(summary))


class DPOProgress:
    """One bar; what is measured is printed above it."""

    def __init__(self, console: Console) -> None:
        from longtail.bench.display import progress_bars

        self.console = console
        self.bar = progress_bars(console)
        self.task = self.bar.add_task("reference", total=None, live="")

    def __enter__(self) -> DPOProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, what: str, values: Any) -> None:
        if what == "note":
            self.console.print(values, highlight=False, soft_wrap=True)
        elif what == "pairs":
            text = f"{len(values.train):,} pairs to train on, {len(values.held_out):,} held out"
            if values.set_aside:
                text += f"; set aside, not confirmed in both orders: {sum(values.set_aside.values()):,}"
            self.console.print(text, highlight=False)
        elif what == "start":
            total, made = values
            self.bar.update(self.task, description="training", total=total, completed=made)
        elif what == "step":
            live = f"loss {values['loss']:.3f}  accuracy {values['accuracy']:.2f}  margin {values['margin']:+.3f}"
            self.bar.update(self.task, completed=values["step"] + 1, live=live)
        elif what == "eval":
            text = f"step {values['step']}: held-out loss {values['loss']:.4f}, accuracy {values['accuracy']:.3f}"
            self.console.print(text, highlight=False)


ROWS = (
    ("loss", "loss"),
    ("accuracy of the implicit reward", "accuracy"),
    ("margin of the implicit reward", "margin"),
    ("reward, chosen", "chosen_reward"),
    ("reward, rejected", "rejected_reward"),
    ("log-probability, chosen", "chosen_logprob"),
    ("log-probability, rejected", "rejected_logprob"),
)


def table(summary: dict[str, Any]) -> Table:
    """Of the held-out pairs."""
    from rich.table import Table

    made = Table(title=f"{summary['held_out']:,} held-out pairs", title_justify="left")
    for i, column in enumerate(("", "before", "after")):
        made.add_column(column, justify="left" if i == 0 else "right")
    for label, name in ROWS:
        made.add_row(label, f"{summary['before'][name]:.4f}", f"{summary['after'][name]:.4f}")
    return made


def register(app: typer.Typer) -> None:
    app.command("dpo")(dpo)
