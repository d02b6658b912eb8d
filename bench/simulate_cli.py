"""`longtail simulate`: what would this strategy do on that cluster?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from longtail.partial_rollout.strategies import STRATEGIES

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.bench.simulate import Result, Run

console = Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Adds the command `simulate`."""
    app.command("simulate")(simulate)


def simulate(
    cluster: Annotated[str, typer.Option(help="cluster.toml, or the name of a bundled one")] = "demo",
    workload: Annotated[
        str,
        typer.Option(
            help="lognormal(median=..., sigma=..., cap=...), histogram(servegen-r1), a file of lengths, or a trace",
            show_default="the cluster file's",
        ),
    ] = "",
    strategies: Annotated[
        str, typer.Option(help='"all", names, or "sync;over-issue:extra=9"; the first is the baseline')
    ] = "all",
    iterations: Annotated[int | None, typer.Option(min=1, help="Batches", show_default="the cluster file's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths")] = 0,
    validate: Annotated[
        Path | None, typer.Option(help="A directory of `longtail bench --out`: predict its runs, and say how far off")
    ] = None,
    published: Annotated[bool, typer.Option("--published", help="Published results against simulated ones")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for summary.json, trace.parquet and report.html")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as the last line of stdout")] = False,
) -> None:
    """Run strategies on a simulated cluster: the rollout's own code in virtual time, seconds instead of hours."""
    if validate is not None:
        from longtail.bench import simulate_validate

        with console.status("fitting and predicting") as status:
            summary = simulate_validate.validate(validate, progress=status.update)
        console.print(simulate_validate.headline(summary), style="bold", highlight=False, soft_wrap=True)
        console.print(simulate_validate.table(summary))
        _lines(simulate_validate.notes(summary))
    elif published:
        from longtail.bench import simulate_published

        with console.status("simulating") as status:
            summary = simulate_published.run(progress=status.update)
        console.print(simulate_published.headline(summary), style="bold", highlight=False, soft_wrap=True)
        console.print(simulate_published.table(summary))
        _lines(simulate_published.notes(summary))
    else:
        summary = _simulate(cluster, workload, strategies, iterations, seed, out)
    if out is not None:
        from longtail.bench.trace import replacing

        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / "summary.json") as file:
            file.write(json.dumps(summary, indent=1).encode())
        console.print(f"Summary: {out / 'summary.json'}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(summary))


def _simulate(
    cluster: str, text: str, strategies: str, iterations: int | None, seed: int, out: Path | None
) -> dict[str, Any]:
    import dataclasses

    from longtail.bench import simulate as simulation
    from longtail.bench.cluster_spec import read_spec
    from longtail.bench.strategy_specs import split_specs
    from longtail.bench.workload import parse_workload

    spec = read_spec(cluster)
    batch = spec.batch if iterations is None else dataclasses.replace(spec.batch, iterations=iterations)
    spec = dataclasses.replace(spec, batch=batch)
    wanted = text or spec.workload
    if not wanted:
        raise ValueError(f"{cluster}: give --workload, or workload in the file")
    lengths = parse_workload(wanted, groups=batch.groups * batch.iterations, group_size=batch.group_size, seed=seed)
    with console.status("simulating") as status:
        result = simulation.simulate(
            spec,
            lengths,
            split_specs(strategies),
            progress=lambda name: status.update(f"simulating {name}, {len(lengths):,} samples"),
        )
    console.print(headline(result), style="bold", highlight=False, soft_wrap=True)
    console.print(table(result))
    _lines(setting(result))
    if out is not None and result.trace is not None:
        from longtail.bench import analysis
        from longtail.bench.report import write_report

        out.mkdir(parents=True, exist_ok=True)
        meta = {"simulated": spec.name, "workload": lengths.label, "cluster": spec.describe()}
        result.trace.write(out / "trace.parquet", meta)
        frame = result.frame()
        write_report(out / "report.html", frame, analysis.summary(frame), meta)
        console.print(f"Report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    elif out is not None:
        console.print(f"No trace: more than {simulation.TRACED:,} samples", highlight=False)
    return summary_of(result)


def _lines(lines: list[str]) -> None:
    for line in lines:
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def summary_of(result: Result) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "simulated": result.spec.name,
        "cluster": result.spec.describe(),
        "workload": result.workload,
        "headline": headline(result),
        "runs": {name: run.as_dict() for name, run in result.runs.items()},
    }


def headline(result: Result) -> str:
    """The answer in words."""
    runs = list(result.runs.values())
    first, others = runs[0], runs[1:]
    tail = _share(first.tail_seconds, first.makespan)
    begin = f"Under {first.strategy} {tail} of the time goes to the last 10 % of the responses"
    ratios = {run.strategy: ratio for run in others if (ratio := _ratio(run, first)) is not None}
    if not ratios:
        return begin + "."
    best = min(ratios, key=lambda name: ratios[name])
    if ratios[best] > 0.98:
        return f"{begin}; none of the others makes a trained token cheaper by more than 2 %."
    run = result.runs[best]
    age = "all tokens on-policy" if not run.staleness_max else f"tokens {run.staleness_mean:.1f} updates old on average"
    return f"{begin}; {best} needs {1 - ratios[best]:.0%} less time for a trained token, with {age}."


def _ratio(run: Run, first: Run) -> float | None:
    """Time of a trained token, in the middle of the runs where both have one."""
    if run.steady_seconds_per_1000_tokens and first.steady_seconds_per_1000_tokens:
        return run.steady_seconds_per_1000_tokens / first.steady_seconds_per_1000_tokens
    if run.seconds_per_1000_tokens and first.seconds_per_1000_tokens:
        return run.seconds_per_1000_tokens / first.seconds_per_1000_tokens
    return None


def table(result: Result) -> Table:
    from rich.table import Table

    runs = list(result.runs.values())
    first, longest = runs[0], max(run.makespan for run in runs)
    shown = Table(
        title=f"{result.spec.name}, simulated", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False
    )  # narrow: seven strategies and nine columns fit into 80
    shown.add_column("strategy", no_wrap=True)
    for name in ("makespan", f"time /\ntoken\nx {first.strategy}", "whole\nrun", "in the\ntail", "empty\nslots"):
        shown.add_column(name, justify="right")
    for name in ("age,\nmean", "oldest", "wasted"):
        shown.add_column(name, justify="right")
    for run in runs:
        whole = (run.seconds_per_1000_tokens or 0.0) / (first.seconds_per_1000_tokens or 1.0)
        ratio = _ratio(run, first)
        shown.add_row(
            run.strategy,
            _duration(run.makespan, longest),
            "" if ratio is None else f"{ratio:.2f}",
            f"{whole:.2f}",
            _duration(run.tail_seconds, longest),
            "" if run.bubble_share is None else f"{run.bubble_share:.0%}",
            "" if run.staleness_mean is None else f"{run.staleness_mean:.2f}",
            "" if run.staleness_max is None else str(run.staleness_max),
            _share(run.tokens_wasted, run.tokens_generated),
        )
    return shown


def setting(result: Result) -> list[str]:
    """What was simulated, and what the columns mean."""
    load, batch, first = result.workload, result.spec.batch, next(iter(result.runs.values()))
    window = "of the whole run (of its middle half, with 8 iterations or more)"
    if first.steady_seconds_per_1000_tokens is not None:
        window = "of the middle half of the run, without its start and end (whole run: with them)"
    lines = [
        f"{load['samples']:,} samples of {load['groups']:,} prompts, output tokens mean {load['mean']:,.0f}, p90 "
        f"{load['p90']:,}, max {load['max']:,} ({load['label']})",
        f"{result.spec.describe()}; {batch.groups} prompts x {batch.group_size} an iteration",
        f"time / token: {window}. tail: from the 90th percentile of finishes to the last, each iteration's. age: "
        "updates between a token's making and its training, mean and oldest. wasted: tokens thrown away. Simulated in "
        f"{_host(result):.1f} s.",
    ]
    if result.spec.seconds.train and any(STRATEGIES[name].keeps_running for name in _names(result)):
        lines.append(
            "Strategies that keep samples running train beside them, on accelerators of their own, not counted here."
        )
    if biased := [run.strategy for run in result.runs.values() if run.biased_at]:
        lines.append(f"Length bias: under {', '.join(biased)} training sees shorter answers than the policy gives.")
    if result.spec.note:
        lines.append(result.spec.note)
    return lines


def _names(result: Result) -> list[str]:
    return [name for name in (spec.partition(":")[0] for spec in result.runs) if name in STRATEGIES]


def _host(result: Result) -> float:
    return sum(run.host_seconds for run in result.runs.values())


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _duration(seconds: float, longest: float) -> str:
    """In the unit that suits the longest."""
    if longest < 600:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if longest < 36_000 else f"{seconds / 3600:,.1f} h"
