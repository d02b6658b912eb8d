"""What `longtail bench` shows in the terminal: a progress bar while it runs, a table when it is done."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from longtail.events import Event

if TYPE_CHECKING:
    from longtail.bench.run import BenchConfig


def progress_bars(console: Console) -> Progress:
    """With a name, a bar, a count, what is going on (field `live`) and the time."""
    return Progress(
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[live]}"),
        TimeElapsedColumn(),
        console=console,
    )


class BenchProgress:
    """One bar a strategy; counts finished samples."""

    def __init__(self, config: BenchConfig, console: Console) -> None:
        self.total = config.iterations * config.prompts * config.group_size
        self.bars = progress_bars(console)
        self.ids: dict[str, TaskID] = {}
        self.tokens = 0
        self.started = 0.0

    def __enter__(self) -> BenchProgress:
        self.bars.start()
        self.ids["load"] = self.bars.add_task("loading model", total=None, live="", visible=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def __call__(self, strategy: str, event: Event) -> None:
        if event.kind == "run_start":
            if "load" in self.ids:
                self.bars.remove_task(self.ids.pop("load"))
            self.ids[strategy] = self.bars.add_task(strategy, total=self.total, live="")
            self.tokens, self.started = 0, event.time
        elif event.kind == "finish":
            self.bars.advance(self.ids[strategy])
        elif event.kind == "step":
            self.tokens += event.num_output_tokens
            elapsed = event.time + event.duration - self.started
            live = f"{event.num_seqs:3d} running  {self.tokens / elapsed:4.0f} tokens/s"
            self.bars.update(self.ids[strategy], live=live)
        elif event.kind == "run_end":
            self.bars.update(self.ids[strategy], live="")


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("wall time", "wall_seconds", "{:.1f} s"),
    ("samples trained", "samples_trained", "{:.0f}"),
    ("tokens trained", "tokens_trained", "{:.0f}"),
    ("trained tokens / s", "tokens_per_second", "{:.0f}"),
    ("time in the tail", "tail_seconds", "{:.1f} s"),
    ("bubbles (slot-time idle)", "bubble_share", "{:.0%}"),
)
_DRAFTING: tuple[tuple[str, str], ...] = (("drafts verified", "tokens_drafted"), ("drafts accepted", "tokens_accepted"))
"""Where there are any."""
_PARTS: tuple[tuple[str, str], ...] = (
    ("prefill", "prefill"),
    ("decode", "decode"),
    ("verify drafts", "verify"),
    ("sampling", "sampling"),
    ("drafting", "drafting"),
    ("scheduling, bookkeeping", "scheduling"),
    ("switch (save, restore)", "switch"),
    ("grade", "grade"),
    ("wait", "wait"),
    ("idle", "idle"),
)
_WHERE_ANY = ("verify drafts", "drafting", "wait")
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("wall s", "wall_seconds", "{:.1f}"),
    ("tok/s", "tokens_per_second", "{:.0f}"),
    ("x first", "ratio", "{:.2f}"),
    ("s/1k", "seconds_per_1000_tokens", "{:.2f}"),
    ("tail s", "tail_seconds", "{:.1f}"),
    ("empty", "bubble_share", "{:.0%}"),
    ("mean age", "staleness_mean", "{:.2f}"),
    ("max age", "staleness_max", "{:d}"),
    ("wasted tokens", "tokens_wasted", "{:d}"),
)
_FEW = 3
"""Up to so many runs stand beside each other as columns; of more, each has a row."""


def summary_table(summary: dict[str, Any]) -> Table:
    """The first run is the baseline."""
    return _columns(summary) if len(summary["runs"]) <= _FEW else _rows(summary)


def _rows(summary: dict[str, Any]) -> Table:
    title = "Same prompts, same seeds (tok/s, s/1k: of trained tokens)"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for label, _, _ in _COLUMNS:
        table.add_column(label, justify="right")
    for name, numbers in summary["runs"].items():
        values = numbers | {"ratio": summary["compare"][name]["tokens_per_second"]}
        table.add_row(name, *(_cell(form, values[key]) for _, key, form in _COLUMNS))
    return table


def _columns(summary: dict[str, Any]) -> Table:
    """The last column compares the last run with the first."""
    runs = summary["runs"]
    names = list(runs)
    table = Table(title="Same prompts, same seeds", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    compared = len(names) > 1
    if compared:
        table.add_column(f"{names[-1]} / {names[0]}", justify="right")
    for label, key, form in _ROWS:
        cells = [_cell(form, runs[name][key]) for name in names]
        if compared:
            cells.append(_cell("{:.2f}", summary["compare"][names[-1]].get(key)))
        table.add_row(label, *cells)
    for label, key in _DRAFTING:
        if any(runs[name][key] for name in names):
            table.add_row(label, *(f"{runs[name][key]:d}" for name in names), *([""] if compared else []))
    table.add_section()
    for label, key in _PARTS:
        values = [runs[name]["breakdown"][key] for name in names]
        if label in _WHERE_ANY and not any(values):
            continue
        table.add_row(f"  {label}", *(f"{v:.1f} s" for v in values), *([""] if compared else []))
    return table


def _cell(form: str, value: Any) -> str:
    return "" if value is None else form.format(value)
