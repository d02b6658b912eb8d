"""What `longtail train` shows in the terminal: a line a step, evaluations between them, and what goes on below."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longtail.bench.train_config import RunConfig

COLUMNS = ("generate", "grade", "switch", "train")
_HEAD = (
    f"{'step':>5} {'reward':>7} {'loss':>9} {'|grad|':>7} {'fresh max|d|':>12} {'age':>5} {'tokens':>7} "
    f"{'generate':>9} {'grade':>6} {'switch':>7} {'train':>7} {'other':>6}"
)
_EVERY = 20
"""Steps between repetitions of the heading."""


class TrainDisplay:
    """A `Progress` of `train.run`."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self.console = console
        self.lines = 0
        self.running = 0
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[live]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self.bar = self.bars.add_task("loading model", total=config.steps, live="")

    def __enter__(self) -> TrainDisplay:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, what: str, values: Any) -> None:
        if what == "event":
            self._event(values)
        elif what == "note":
            self._print(f"[yellow]{values}[/yellow]")
        elif what == "eval":
            self._print(f"[green]{'eval':>5} {evaluation(values)}[/green]")
        else:
            if self.lines % _EVERY == 0:
                self._print(f"[bold]{_HEAD}[/bold]")
            self.lines += 1
            self._print(row(values))
            self.bars.update(self.bar, completed=values["step"] + 1)

    def _event(self, event: Any) -> None:
        if event.kind == "step":
            self.bars.update(self.bar, description="generating", live=f"{event.num_seqs:3d} running")
        elif event.kind == "iteration_end":
            self.bars.update(self.bar, description="training", live="")

    def _print(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, soft_wrap=True)


def row(line: dict[str, Any]) -> str:
    """One step in one line. fresh max|d|: largest difference between trainer and rollout over the tokens that the
    present weights made; age: mean staleness of what was handed over; tokens: generated; then seconds."""
    seconds = line.get("seconds") or {}
    other = sum(seconds.get(name, 0.0) for name in ("evaluate", "checkpoint", "idle"))
    norms = line["grad_norms"]
    cells = [
        f"{line['step']:5d}",
        _cell(line["reward"], "7.3f"),
        _cell(line["loss"], "9.4f"),
        _cell(norms[0] if norms else None, "7.3f"),
        _cell(line["max_difference"], "12.3g"),
        _cell(line["staleness"]["mean"], "5.2f"),
        f"{line['generated']:7d}",
        *(f"{seconds.get(name, 0.0):{width}.1f}" for name, width in zip(COLUMNS, (9, 6, 7, 7), strict=True)),
        f"{other:6.1f}",
    ]
    return " ".join(cells)


def evaluation(line: dict[str, Any]) -> str:
    return f"version {line['version']}: sampled {line['sampled']:.3f}, greedy {line['greedy']:.3f}"


def _cell(value: float | None, form: str) -> str:
    width = int(form.partition(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"
