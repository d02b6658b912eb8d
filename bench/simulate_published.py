"""Published results beside simulated ones: `longtail simulate --published`, from `bench/configs/published/*.toml`.

A paper tells the cluster, the model, the cap and a ratio, seldom the lengths or the batch: those are ours, chosen once
for the baseline's tail to be what the paper says of it, and not for the ratio to come out. What a row `lacks` is what
the paper has and the simulation has not. A simulated ratio near the published one says that the mechanism is enough to
explain it under such lengths; one that is far off says that it is not, or that the lengths were others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.cluster_spec import CONFIGS, ClusterSpec, Speculation, made_of, read_spec
from longtail.bench.simulate import Run
from longtail.bench.simulate import run as simulate_run
from longtail.bench.workload import parse_workload

if TYPE_CHECKING:
    from rich.table import Table

FOLDER = CONFIGS / "published"
KEYS = ("what", "strategy", "ratio", "lacks", "speculation")
CLOSE = 0.15


def run(progress: Callable[[str], None] = lambda text: None, folder: Path = FOLDER) -> dict[str, Any]:
    """JSON-ready."""
    systems = []
    for path in sorted(folder.glob("*.toml")):
        spec = read_spec(path)
        progress(spec.name)
        systems.append(_system(spec, path.stem))
    return {"systems": systems}


def rows_of(spec: ClusterSpec) -> list[dict[str, Any]]:
    """Of the file's `published`. ValueError names the field."""
    table = spec.published or {}
    if not isinstance(table.get("source"), str) or not table.get("rows"):
        raise ValueError("published needs source and [[published.rows]], each with what and strategy")
    for number, row in enumerate(table["rows"]):
        if unknown := sorted(set(row) - set(KEYS)):
            raise ValueError(f"published.rows[{number}]: unknown key {', '.join(unknown)}; known are {', '.join(KEYS)}")
        if "what" not in row or "strategy" not in row:
            raise ValueError(f"published.rows[{number}]: what or strategy is missing")
    return list(table["rows"])


def _system(spec: ClusterSpec, name: str) -> dict[str, Any]:
    batch = spec.batch
    workload = parse_workload(str(spec.workload), groups=batch.groups * batch.iterations, group_size=batch.group_size)
    routing = (spec.published or {}).get("baseline_routing", spec.routing)
    base = simulate_run(dataclasses.replace(spec, routing=routing), workload, "sync")
    rows = []
    for row in rows_of(spec):
        own = spec
        if "speculation" in row:
            own = dataclasses.replace(spec, speculation=made_of(Speculation, "speculation", row["speculation"]))
        made = simulate_run(own, workload, row["strategy"])
        rows.append(
            {
                "what": row["what"],
                "strategy": row["strategy"],
                "published": row.get("ratio"),
                "simulated": _speedup(base, made),
                "tail": made.tail_seconds,
                "makespan": made.makespan,
                "lacks": row.get("lacks", ""),
            }
        )
    published = spec.published or {}
    return {
        "config": name,
        "name": spec.name,
        "note": spec.note,
        "source": published["source"],
        "workload": workload.summary(),
        "base": {"makespan": base.makespan, "tail": base.tail_seconds, "tail_share": base.tail_seconds / base.makespan},
        "rows": rows,
    }


def _speedup(base: Run, made: Run) -> float | None:
    """Trained tokens a second over the baseline's, in the middle half of the runs if both have one."""
    pairs = [
        (base.steady_seconds_per_1000_tokens, made.steady_seconds_per_1000_tokens),
        (base.seconds_per_1000_tokens, made.seconds_per_1000_tokens),
    ]
    return next((before / after for before, after in pairs if before and after), None)


def headline(summary: dict[str, Any]) -> str:
    rows = [row for system in summary["systems"] for row in system["rows"] if row["published"]]
    close = sum(abs(row["simulated"] / row["published"] - 1.0) <= CLOSE for row in rows)
    return (
        f"Of {len(rows)} published ratios the mechanism alone gives {close} within {CLOSE:.0%}, under lengths that we "
        "chose: the papers do not publish theirs."
    )


def table(summary: dict[str, Any]) -> Table:
    from rich.table import Table

    shown = Table(title="Speed-up over sync", title_justify="left")
    for name in ("system", "published", "simulated", "tail", "tail of sync", "not matched"):
        shown.add_column(name, justify="left" if name in ("system", "not matched") else "right")
    for system in summary["systems"]:
        share = system["base"]["tail_share"]
        shown.add_row(f"[bold]{system['name']}[/bold]", "", "", "", f"{share:.0%} of the time", "")
        for row in system["rows"]:
            published = "-" if row["published"] is None else f"{row['published']:.2f}"
            less = 1.0 - row["tail"] / system["base"]["tail"] if system["base"]["tail"] else 0.0
            shown.add_row(f"  {row['what']}", published, f"{row['simulated']:.2f}", f"{-less:+.0%}", "", row["lacks"])
    return shown


def notes(summary: dict[str, Any]) -> list[str]:
    return [f"{system['name']}: {system['source']}. {system['note']}" for system in summary["systems"]]
