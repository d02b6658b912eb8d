"""`longtail bench kv`: the measurements of saved KV and of the sample store in one run, and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench import kv_bench, overhead_bench, store_bench

if TYPE_CHECKING:
    from rich.table import Table

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)


def sizes_up_to(samples: int) -> tuple[int, ...]:
    """Points of the curve of cost per sample; the last is `samples`."""
    return (*(size for size in SIZES if size < samples), samples)


def run(
    kv: kv_bench.KVBenchConfig,
    store: store_bench.StoreBenchConfig,
    overhead: overhead_bench.OverheadBenchConfig,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """JSON-ready."""
    directory = Path(kv.directory)
    result = kv_bench.run(kv, progress)
    result["store"] = store_bench.run(store, directory, lambda text: progress(f"store of {text}"))
    result["overhead"] = overhead_bench.run(overhead, directory, progress)
    result["settings"] |= {
        "store": dataclasses.asdict(store),
        "overhead": dataclasses.asdict(overhead) | {"model": str(overhead.model)},
    }
    return result


def tables(result: dict[str, Any]) -> list[Table]:
    return [_kv(result), _store(result), _overhead(result)]


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    out = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        out.add_column(column, justify="right" if i else "left", no_wrap=True)
    return out


def _kv(result: dict[str, Any]) -> Table:
    settings, about = result["settings"], result["machine"]
    lengths = f"{settings['sequences']} sequences of {settings['shortest']:,} to {settings['longest']:,} tokens"
    out = _table(f"Saved KV, {lengths}; medians", "", "time", "GiB/s", "share of bandwidth")
    out.caption = f"{about['cpu']}, {about['threads']} threads, {settings['directory']}"
    for row in result["rows"]:
        if row["measure"] == "resume":
            out.add_section()
            for name, values in row["milliseconds"].items():
                out.add_row(f"{name}, {row['tokens']:,} tokens", f"{values['p50']:.1f} ms", "", "")
            for name, times in row["times_cheaper"].items():
                out.add_row(f"{name}, against recompute", "", "", f"{times:.1f} x cheaper")
            continue
        ratio = ", ".join(f"{values['p50']:.0%} of {other}" for other, values in row.get("ratio", {}).items())
        seconds = sorted(row["seconds"])[len(row["seconds"]) // 2]
        out.add_row(row["measure"], f"{1e3 * seconds:.0f} ms", f"{row['gib_per_second']['p50']:.2f}", ratio)
    return out


def _store(result: dict[str, Any]) -> Table:
    tokens = result["settings"]["store"]["output_tokens"]
    columns = ("open", "open, delivered", "submit", "save", "hand over", "commit", "bytes")
    out = _table(f"Sample store, {tokens} output tokens a sample", "samples", *columns)
    out.caption = "submit, save, hand over, bytes: of each sample; commit: of a step's progress of all running samples"
    for row in result["store"]:
        per_sample = (f"{row[f'{name}_us_per_sample']:.0f} us" for name in ("submit", "save", "hand_over"))
        opening = (f"{row[name]:.2f} s" for name in ("open_seconds", "open_delivered_seconds"))
        commit, size = f"{row['commit_ms']:.1f} ms", f"{row['bytes_per_sample']:,.0f}"
        out.add_row(f"{row['samples']:,}", *opening, *per_sample, commit, size)
    return out


def _overhead(result: dict[str, Any]) -> Table:
    row = result["overhead"]
    out = _table("Store on disk against store in memory, the same rollout", "", "p20", "median", "p80")
    out.caption = f"{row['tokens']:,} tokens, {row['saved_bytes'] / 1e6:,.0f} MB of KV saved; pair by pair"
    for name, values in (
        ("time, disk / memory", {k: f"{v:.3f}" for k, v in row["disk_over_memory"].items()}),
        ("time in the store's calls", {k: f"{v:.2%}" for k, v in row["share_in_store_calls"].items()}),
        *((f"  {n}", {k: f"{1e3 * v:.1f} ms" for k, v in c.items()}) for n, c in row["call_seconds"].items()),
    ):
        out.add_row(name, *values.values())
    return out
