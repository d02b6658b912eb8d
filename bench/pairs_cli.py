"""`longtail pairs`: preference pairs from the groups of a store, and what is wrong with a file of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.partial_rollout.database import Database
    from longtail.sample import Group
    from longtail.trainer_adapter.order_swap import OrderSwap
    from longtail.trainer_adapter.preferences import LengthBias

app = typer.Typer(no_args_is_help=True, help="Preference pairs: from graded groups, and from reviewed files.")
console = Console(stderr=True)
Model = Annotated[str | None, typer.Option(help="Whose tokenizer reads text and messages: name, directory or hub id")]
Reason = Annotated[str | None, typer.Option(help="For rows that give none")]
Ignore = Annotated[str, typer.Option(help="Names of further fields that are not read, comma-separated")]


@app.command("from")
def from_store(
    directory: Annotated[Path, typer.Argument(help="Directory of the store", metavar="STORE")],
    out: Annotated[Path, typer.Option(help="File to write: .jsonl or .parquet")] = Path("pairs.jsonl"),
    rule: Annotated[str, typer.Option(help="best_worst, random_pair or all_pairs")] = "best_worst",
    per_group: Annotated[
        int | None, typer.Option(min=1, help="Pairs of a group at most", show_default="1; all_pairs: 16")
    ] = None,
    margin: Annotated[float, typer.Option(min=0, help="Rewards differ by at least this")] = 0.0,
    length_ratio: Annotated[
        float | None,
        typer.Option(min=1, help="The longer response has at most so many times the tokens", show_default="any"),
    ] = None,
    truncated: Annotated[
        str, typer.Option(help="Samples that did not end by themselves: leave_out, reject (as the worse one), use")
    ] = "leave_out",
    seed: Annotated[int, typer.Option(help="Of random_pair")] = 0,
    after: Annotated[
        int | None, typer.Option(min=0, help="Deliveries after this number", show_default="all that are kept")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Also write text, for reviewers: whose tokenizer (name, directory or hub id)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as the last line of stdout")] = False,
) -> None:
    """Pairs of the complete groups of a store, delivered or not. Works while a run has the store open."""
    from longtail.trainer_adapter.pair_files import write_pairs
    from longtail.trainer_adapter.preferences import PairRules, length_bias, pairs_from_groups

    rules = PairRules(
        rule=rule,  # type: ignore[arg-type]
        per_group=per_group,
        margin=margin,
        length_ratio=length_ratio,
        truncated=truncated,  # type: ignore[arg-type]
        seed=seed,
    )
    tokenizer = load_tokenizer(model)
    notes: list[str] = []
    found = pairs_from_groups(_groups(directory, after, notes), rules)
    bias = length_bias(found.pairs)
    for note in notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    rows = [
        ("groups", found.groups),
        *((f"  none: {why}", n) for why, n in found.reasons()["groups"].items()),
        *((f"  samples left out: {why}", n) for why, n in found.reasons()["samples"].items()),
        ("pairs that the rules allow", found.candidates),
        ("pairs", len(found.pairs)),
    ]
    show("Pairs", rows)
    show_lengths(bias)
    if not found.pairs:
        raise ValueError(f"{directory}: no pair; {out} is not written")
    write_pairs(out, found.pairs, tokenizer)
    console.print(f"Pairs: {out}", highlight=False, soft_wrap=True)
    if as_json:
        numbers: dict[str, Any] = {"pairs": len(found.pairs), "groups": found.groups, "candidates": found.candidates}
        numbers |= {"groups_without": found.reasons()["groups"], "samples_left_out": found.reasons()["samples"]}
        print(json.dumps(numbers | {"length_bias": _plain(bias), "out": str(out)}))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="Pairs: .jsonl or .parquet", metavar="FILE")],
    model: Model = None,
    reason: Reason = None,
    ignore: Ignore = "",
    out: Annotated[
        Path | None, typer.Option(help="Write the pairs that a judge confirmed in both orders, or did not see")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Problems shown")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as the last line of stdout")] = False,
) -> None:
    """Every row with something wrong, by line and field; lengths; and where the file has verdicts of a judge in both
    orders, whether they agree and whether it favours a place. Status 1 if a row is wrong."""
    from longtail.trainer_adapter.order_swap import order_swap
    from longtail.trainer_adapter.pair_files import check_pairs, write_pairs
    from longtail.trainer_adapter.preferences import length_bias

    found = check_pairs(file, tokenizer=load_tokenizer(model), reason=reason, ignore=names(ignore))
    for problem in found.problems[:limit]:
        print(problem)
    if len(found.problems) > limit:
        print(f"... and {len(found.problems) - limit:,} more (--limit)")
    swap, bias = order_swap(found.pairs), length_bias(found.pairs)
    show("Pairs", [("rows", found.rows), ("with a problem", len(found.problems)), ("pairs", len(found.pairs))])
    show_lengths(bias)
    show_swap(swap)
    if as_json:
        numbers: dict[str, Any] = {"rows": found.rows, "pairs": len(found.pairs), "length_bias": _plain(bias)}
        problems = [dataclasses.asdict(problem) | {"file": str(file)} for problem in found.problems]
        print(json.dumps(numbers | {"problems": problems, "order_swap": swap_numbers(swap)}))
    if found.problems:
        raise typer.Exit(1)
    if out is not None:
        write_pairs(out, swap.kept)
        console.print(f"Pairs: {len(swap.kept):,} in {out}", highlight=False, soft_wrap=True)


def _groups(directory: Path, after: int | None, notes: list[str]) -> Iterator[Group]:
    """Delivered groups that are kept, then those that are not handed over."""
    from longtail.errors import StoreError
    from longtail.partial_rollout.database import Database

    database: Database = Database(directory, read_only=True)
    try:
        pruned, last = database.last_pruned(), database.last_delivery()
        if after is not None and after > last:
            raise StoreError(f"{directory}: the last delivery is {last}, not {after}; is this the right store?")
        if pruned > (after or 0):
            notes.append(f"{directory}: deliveries up to {pruned} were pruned, and give no pairs")
        for delivery in database.deliveries(max(pruned, after or 0)):
            yield from delivery.groups
        groups, damages = database.open_groups()
        notes += [f"{damage.found}; its group is not complete" for damage in damages]
        yield from groups
    finally:
        database.close()


def load_tokenizer(model: str | None) -> Any:
    if model is None:
        return None
    from transformers import AutoTokenizer

    from longtail.bench.models import resolve_model

    return AutoTokenizer.from_pretrained(str(resolve_model(model)))


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


# ---- tables


def show(title: str, rows: Iterable[Sequence[Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table: Table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for label, value in rows:
        table.add_row(Text(label), f"{value:,}" if isinstance(value, int) else Text(str(value)))
    console.print(table)


def show_lengths(bias: LengthBias | None) -> None:
    if bias is None:
        return
    rows: list[tuple[str, Any]] = [
        ("tokens of a chosen response, mean", f"{bias.chosen_mean:,.1f}"),
        ("tokens of a rejected response, mean", f"{bias.rejected_mean:,.1f}"),
        ("chosen is the longer one", bias.longer),
        ("chosen is the shorter one", bias.shorter),
        ("same length", bias.equal),
    ]
    if bias.share is not None and bias.interval is not None:
        low, high = bias.interval
        rows.append(("longer, of those that differ", f"{bias.share:.1%} ({low:.1%} to {high:.1%})"))
    show("Lengths (tokens that are trained on)", rows)
    if bias.is_biased and bias.share is not None:
        word = "longer" if bias.share > 0.5 else "shorter"
        text = f"The {word} response tends to be the chosen one: a loss will learn that too. --length-ratio narrows it."
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


OUTCOMES: Mapping[str, str] = {
    "agrees": "confirmed in both orders",
    "opposed": "the rejected response preferred in both orders",
    "no difference": "a tie in both orders",
    "first place": "the first place preferred, whichever it is",
    "second place": "the second place preferred, whichever it is",
    "half a tie": "a tie in one order only",
    "not asked": "without verdicts",
}


def show_swap(swap: OrderSwap) -> None:
    """Nothing where no pair has verdicts."""
    if swap.consistency is None or swap.consistency_interval is None:
        return
    assert swap.position_bias is not None and swap.position_interval is not None
    rows: list[tuple[str, Any]] = [(text, swap.counts[name]) for name, text in OUTCOMES.items()]  # type: ignore[index]
    (a, b), (c, d) = swap.consistency_interval, swap.position_interval
    rows.append(("same answer in both orders", f"{swap.consistency:.1%} ({a:.1%} to {b:.1%})"))
    rows.append(("position bias, -1 to 1", f"{swap.position_bias:+.3f} ({c:+.3f} to {d:+.3f})"))
    show("Order swap (95 % intervals)", rows)
    if swap.set_aside:
        console.print(f"{len(swap.set_aside):,} pairs are set aside.", highlight=False)
    if swap.is_biased:
        word = "first" if swap.position_bias > 0 else "second"
        console.print(f"The judge favours the {word} place.", style="yellow", highlight=False)


def swap_numbers(swap: OrderSwap) -> dict[str, Any]:
    left = ("consistency", "consistency_interval", "position_bias", "position_interval")
    return {"counts": swap.counts, "kept": len(swap.kept)} | {name: getattr(swap, name) for name in left}


def _plain(bias: LengthBias | None) -> dict[str, Any] | None:
    return None if bias is None else dataclasses.asdict(bias) | {"is_biased": bias.is_biased}
