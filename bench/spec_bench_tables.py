"""What a person reads of `longtail bench spec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from longtail.bench.spec_bench import FLOOR, OFF, TAIL_SPEEDUP

if TYPE_CHECKING:
    from rich.table import Table


def table(result: Mapping[str, Any]) -> Table:
    """Medians over the repeats; spreads, break-evens and the controller's reasons are in the JSON."""
    from rich.table import Table

    settings, about = result["settings"], result["machine"]
    out = Table(
        title=f"Speculative decoding: {settings['new_tokens']} tokens a sequence, temperature "
        f"{settings['temperature']:g}, every stream equal to that without drafts",
        title_justify="left",
        caption_justify="left",
        padding=(0, 0),
    )
    out.caption = (
        "length: tokens that a verified draft commits, the target's own counted. drafted, accepted: draft tokens per "
        "token made. us: to draft for one sequence. steps drafted: share of the steps; in the others the drafter had "
        "nothing to say, or drafting did not pay. speed-up: in wall time to the last token, and in tokens a second "
        "while all decode; medians, against off in the same repeat. expected: of the latter, from the cost of steps "
        "with and without drafts, the time to draft, and what the drafts brought, over all steps\n"
        f"{about['cpu']}, {about['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    )
    out.add_column("batch", justify="right")
    out.add_column("drafter", no_wrap=True)
    headers = ("accept.\nlength", "drafted", "accep-\nted", "draft\nus", "step ms", "with\ndrafts", "steps\ndrafted")
    for header in (*headers, "speed-\nup", "all\ndecode", "expec-\nted"):
        out.add_column(header, justify="right", no_wrap=True)
    last = None
    for row in result["rows"]:
        if row["batch"] != last:
            out.add_section()
        off = row["drafter"] == OFF
        cells = [
            _cell(row["acceptance_length"], ".2f"),
            _cell(None if off else row["drafted_per_token"], ".2f"),
            _cell(None if off else row["accepted_per_token"], ".2f"),
            _cell(row["draft_us"], ".0f"),
            _milliseconds(row["step_seconds"]),
            _milliseconds(row["verify_seconds"]),
            _cell(None if off else row["steps_with_drafts"], ".0%"),
            _cell(row["speedup"]["p50"], ".2f"),
            _cell(row["full_batch_speedup"]["p50"], ".2f"),
            _cell(row["expected_speedup"], ".2f"),
        ]
        out.add_row("" if row["batch"] == last else str(row["batch"]), row["label"], *cells)
        last = row["batch"]
    return out


def findings(result: Mapping[str, Any]) -> list[str]:
    """What is promised of the controller, and whether it held."""
    floor, tail = result["must_hold"]["floor"], result["must_hold"]["tail"]
    if floor is None:
        return []
    lines = [
        f"Slowest under the controller: {floor['label']} at batch {floor['batch']}, {floor['speedup']:.3f} x "
        f"({'holds' if floor['holds'] else 'FAILS'}: at least {FLOOR} x)"
    ]
    return lines + [_tail_line(row) for row in tail]


def _tail_line(row: Mapping[str, Any]) -> str:
    if not row["in_reach"]:
        verdict = f"{TAIL_SPEEDUP} x is out of reach"
    else:
        verdict = f"{'holds' if row['holds'] else 'FAILS'}: at least {TAIL_SPEEDUP} x"
    return (
        f"Tail, batch {row['batch']}, {row['label']}: acceptance {row['acceptance']:.2f} against a break-even of "
        f"{row['break_even_acceptance']:.2f}; drafts in {row['steps_with_drafts']:.0%} of the steps, nothing to say in "
        f"{row['silent']:.0%}: {row['expected_speedup']:.2f} x expected, {row['speedup']:.2f} x measured ({verdict})"
    )


def index_table(index: Mapping[str, float]) -> Table:
    """Of `spec_index_bench`'s result."""
    from rich.table import Table

    out = Table(title="The group index", title_justify="left")
    for header in ("live samples", "tokens", "lookup us", "update us", "both us", "p95 us", "bytes / token"):
        out.add_column(header, justify="right")
    cells = [f"{index[name]:.1f}" for name in ("lookup_us", "update_us", "total_us", "total_p95_us", "bytes_per_token")]
    out.add_row(f"{index['samples']:,.0f}", f"{index['tokens']:,.0f}", *cells)
    out.caption = "CPU time a token; a lookup drafts up to 8 tokens"
    return out


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _milliseconds(seconds: Mapping[str, float] | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds['p50']:.1f}"
