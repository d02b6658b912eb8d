"""`longtail store`: looks into a sample store, checks it, and removes what nobody will ask for again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.partial_rollout.database import Database

app = typer.Typer(no_args_is_help=True, help="Look into a sample store on disk, check it, tidy it up.")
Directory = Annotated[Path, typer.Argument(help="Directory of the store", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")]


@app.command("ls")
def list_store(
    directory: Directory,
    limit: Annotated[int, typer.Option(min=1, help="Rows of each table")] = 20,
    as_json: AsJson = False,
) -> None:
    """Open groups and deliveries: counts, tokens, staleness. Works while a run has the store open."""
    from longtail.partial_rollout.store_view import overview

    with _reading(directory) as database:
        found = overview(database)
    if as_json:
        print(json.dumps(found))
        return
    saved = found["saved_kv"]
    _print(
        f"{directory}: {found['groups']:,} groups, {found['samples']:,} samples, {found['tokens']:,} tokens,"
        f" {found['bytes'] / 1e6:,.1f} MB; iteration {found['iteration']}, last delivery {found['last_delivery']}"
        + (f" (pruned up to {found['pruned_up_to']})" if found["pruned_up_to"] else "")
        + (f"; saved KV of {saved['samples']:,} samples, {saved['bytes'] / 1e6:,.1f} MB" if saved["samples"] else "")
    )
    rows: list[Sequence[Any]] = [
        (g["group"], f"{g['done']} / {g['samples']}", g["failed"], f"{g['tokens']:,}", _range(g["staleness"]))
        for g in found["open"]
    ]
    _print_rows("Open groups", ("group", "done", "failed", "tokens", "staleness"), rows, limit)
    rows = [
        (d["number"], d["iteration"], _when(d["time"]), d["groups"], d["samples"], f"{d['tokens']:,}")
        for d in reversed(found["deliveries"])
    ]
    _print_rows("Deliveries", ("number", "iteration", "time", "groups", "samples", "tokens"), rows, limit)


@app.command()
def show(
    directory: Directory,
    name: Annotated[
        str | None, typer.Argument(help="Sample or group", metavar="NAME", show_default="the ledger")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Where every generated token went; or all that is known of one sample or group."""
    from longtail.partial_rollout.store_view import details

    with _reading(directory) as database:
        found: dict[str, Any] | None = database.ledger().as_dict() if name is None else details(database, name)
    if found is None:
        raise ValueError(f"{directory} has no sample or group {name!r}; `longtail store ls {directory}` lists groups")
    if as_json:
        print(json.dumps(found))
    elif name is None:
        _print(ledger_table(found))
    elif "samples" in found:
        _print(f"group {found['group']}: {found['state']}; task: {json.dumps(found['task'])}")
        columns = ("sample", "status", "finish_reason", "line", "tokens", "reward", "grader", "saved KV", "damage")
        for sample in found["samples"]:
            sample["saved KV"] = _saved_kv(sample["saved_kv"])
        rows = [tuple(_text(s[column]) for column in columns) for s in found["samples"]]
        _print_rows("Samples", columns, rows, len(rows))
    else:
        saved = found["saved_kv"]
        found["saved_kv"] = saved and "\n".join([str(_saved_kv(saved)), *saved["files"]])
        _print_rows("Sample", ("", ""), [(key, _text(value)) for key, value in found.items()], len(found))


@app.command()
def verify(directory: Directory) -> None:
    """Check every checksum and every conservation law, saved KV included. Status 1 if something is wrong. Changes
    nothing. Lists KV files that no sample refers to (a kill leaves some): gc removes them, and so does opening."""
    from longtail.partial_rollout.saved_kv import unnamed

    problems = []
    for what, check in CHECKS.items():
        found = check(directory)
        _print(f"{what}: {f'{len(found)} problems' if found else 'sound'}")
        problems += found
    for problem in problems:
        print(problem)
    if problems:
        raise typer.Exit(1)
    with _reading(directory) as database:
        for file in unnamed(database):
            _print(f"{file}: no sample refers to it")


@app.command()
def gc(
    directory: Directory,
    before: Annotated[
        int | None, typer.Option(min=1, help="Also forget the tokens of deliveries before this number")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed")] = False,
) -> None:
    """Remove the tokens of groups that were thrown away and, with --before, of deliveries that no trainer will ask for
    again, and KV files that no sample refers to. Ids stay taken and the ledger stays as it is. Not while a run has the
    store open."""
    from longtail.partial_rollout.database import Database
    from longtail.partial_rollout.saved_kv import unnamed

    last = 0 if before is None else before - 1
    with _reading(directory) as database:
        groups, tokens = database.prunable(last)
        files = unnamed(database)
    if dry_run:
        also = f", and remove {_files(files)}" if files else ""
        _print(f"would forget {groups:,} groups of {tokens:,} tokens{also}")
        return
    database = Database(directory)
    try:
        size = database.size()
        with database.transaction(durable=True):
            database.prune(last)
        database.vacuum()
        _print(f"forgot {groups:,} groups of {tokens:,} tokens; freed {(size - database.size()) / 1e6:,.1f} MB")
        if files := unnamed(database):  # again, with the lock: nobody is about to record one
            text = _files(files)
            for file in files:
                file.unlink()
            _print(f"removed {text}")
    finally:
        database.close()


@app.command()
def rewind(
    directory: Directory,
    version: Annotated[int, typer.Option(min=0, help="Policy version of the weights that the trainer goes on from")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be dropped")] = False,
) -> None:
    """Drop the tokens of open samples that policies newer than --version made: for a trainer that fell back to an older
    checkpoint. On the ledger they are stale. What was handed over stays. Not while a run has the store open."""
    from longtail.partial_rollout.store import SampleStore, newer_parts

    with _reading(directory) as database:
        parts = newer_parts(database.open_groups()[0], version)
    if dry_run:
        tokens = sum(sample.cut(first) for sample, first in parts)  # of copies, read for this
        _print(f"would drop {tokens:,} tokens of {len(parts):,} samples, made by policies newer than {version}")
        return
    with SampleStore(directory) as store:
        for damage in store.damages:
            print(damage)
        tokens = store.rewind_to(version)
    _print(f"dropped {tokens:,} tokens of {len(parts):,} samples, made by policies newer than {version}")


def ledger_table(ledger: dict[str, int]) -> Table:
    from longtail.partial_rollout.ledger import BESIDE

    table = _table("Ledger", ("tokens", "", "share"))
    generated = ledger["generated"]
    for name, tokens in ledger.items():
        if name in BESIDE and name == BESIDE[0]:
            table.add_section()
        share = "" if name in BESIDE or not generated else f"{tokens / generated:.1%}"
        table.add_row(name, f"{tokens:,}", share)
        if name == "generated":
            table.add_section()
    return table


def _check_database(directory: Path) -> list[str]:
    from longtail.errors import StoreCorrupt

    try:
        with _reading(directory) as database:
            return database.check()
    except StoreCorrupt as error:
        return [str(error)]


def _check_saved_kv(directory: Path) -> list[str]:
    from longtail.errors import StoreCorrupt
    from longtail.partial_rollout.saved_kv import problems

    try:
        with _reading(directory) as database:
            return problems(database)
    except StoreCorrupt as error:
        return [str(error)]


CHECKS = {"samples and ledger": _check_database, "saved KV": _check_saved_kv}
"""What `verify` looks at; each takes the directory and returns its problems."""


@contextmanager
def _reading(directory: Path) -> Iterator[Database]:
    from longtail.partial_rollout.database import Database

    database = Database(directory, read_only=True)
    try:
        yield database
    finally:
        database.close()


def _print(what: str | Table) -> None:
    Console().print(what, highlight=False, soft_wrap=isinstance(what, str), markup=False)


def _print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], limit: int) -> None:
    from rich.text import Text

    table = _table(title, columns)
    for row in rows[:limit]:
        table.add_row(*(Text(_text(cell), overflow="fold") for cell in row))
    _print(table)
    if len(rows) > limit:
        _print(f"... and {len(rows) - limit:,} more (--limit)")


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _saved_kv(saved: dict[str, Any] | None) -> str | None:
    if saved is None:
        return None
    return saved.get("damage") or f"{saved['tokens']:,} tokens, {saved['bytes'] / 1e6:,.1f} MB"


def _files(files: Sequence[Path]) -> str:
    size = sum(file.stat().st_size for file in files)
    return f"{len(files):,} KV files of {size / 1e6:,.1f} MB that no sample refers to"


def _text(value: Any) -> str:
    if value is None:
        return "\u2013"
    return value if isinstance(value, str) else json.dumps(value)


def _range(pair: list[int] | None) -> str | None:
    if pair is None:
        return None
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
