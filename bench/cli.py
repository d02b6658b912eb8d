"""The `longtail` command. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from longtail.bench import (
    calibrate_cli,
    dpo_cli,
    lengths_cli,
    mismatch_cli,
    pairs_cli,
    pool_cli,
    regrade_cli,
    report_cli,
    scheduling_cli,
    serve_cli,
    simulate_cli,
    spec_cli,
    staleness_cli,
    store_cli,
    trace_cli,
    train_cli,
)
from longtail.bench.machine import quiet_threads

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Rollouts for RL on language models that do not wait for the long tail. Start with: longtail bench",
)
bench = typer.Typer(invoke_without_command=True)
app.add_typer(bench, name="bench")
app.add_typer(store_cli.app, name="store")
app.add_typer(spec_cli.app, name="spec")
bench.command("mismatch")(mismatch_cli.mismatch)
bench.command("scheduling")(scheduling_cli.scheduling)
bench.command("staleness")(staleness_cli.staleness)
app.command("serve")(serve_cli.serve)
bench.command("pool")(pool_cli.pool)
app.add_typer(trace_cli.app, name="trace")
app.add_typer(lengths_cli.app, name="lengths")
app.add_typer(pairs_cli.app, name="pairs")
calibrate_cli.register(app)
regrade_cli.register(app)
dpo_cli.register(app)
report_cli.register(app)
simulate_cli.register(app)
train_cli.register(app)
console = Console(stderr=True)


def main() -> None:
    """Errors that the user can mend are one line, not a traceback."""
    quiet_threads()
    # Bars for loading, advice on configs and vLLM's log are noise beside our own progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from longtail.errors import LongtailError

    try:
        app()
    except (ValueError, LongtailError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(2)


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="smollm2-135m, tiny-llama, tiny-qwen3, a directory, or a hub id")],
) -> None:
    """Make a small model once (or check a given one) and print where it is."""
    from longtail.bench.models import resolve_model

    print(resolve_model(name, progress=lambda text: console.print(text, style="dim", highlight=False)))


@bench.callback()
def bench_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory for summary.json, trace.parquet and report.html")] = Path(
        "runs/bench"
    ),
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    tasks: Annotated[str, typer.Option(help="Task mix, e.g. mixed or gsm_symbolic=3,chain_sum=1")] = "mixed",
    strategies: Annotated[
        str,
        typer.Option(help='"all", names, or "sync;over-issue:extra=9;my_module.Mine"; the first is the baseline'),
    ] = "sync,token-budget",
    iterations: Annotated[int, typer.Option(min=1, help="Batches in all (weight updates of a trainer)")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a batch")] = 6,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of each prompt")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="Samples that run at once")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Cap on a response's tokens")] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature")] = 0.7,
    token_budget: Annotated[
        int | None,
        typer.Option(help="token-budget: output tokens of an iteration", show_default="0.9 of what sync makes"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks and samples")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    numerics: Annotated[
        str | None,
        typer.Option(help="exact: same bits in every batch; fast: up to rounding", show_default="exact; vllm: its own"),
    ] = None,
    kv_on_update: Annotated[
        str, typer.Option(help="Unfinished samples' KV after a weight update: recompute or keep")
    ] = "recompute",
    drafter: Annotated[
        str | None, typer.Option(help="Speculative decoding: ngram, group, group>ngram", show_default="off")
    ] = None,
    engine: Annotated[str, typer.Option(help="native, or vllm, whose threads are OMP_NUM_THREADS")] = "native",
    alone: Annotated[
        bool, typer.Option("--alone", help="vllm: first vLLM without longtail, driven synchronously, to compare with")
    ] = False,
    engines: Annotated[int, typer.Option(min=1, help="A pool of so many, which share the slots")] = 1,
    ray: Annotated[
        str | None,
        typer.Option(help="Engines as Ray actors: local, auto or an address", show_default="in this process, in turn"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as the last line of stdout")] = False,
) -> None:
    """Run the same prompts and seeds under several strategies and show where the time goes."""
    if context.invoked_subcommand is not None:
        return
    from longtail.bench.run import BenchConfig, run, write
    from longtail.bench.strategy_specs import split_specs

    config = BenchConfig(
        model=model,
        tasks=tasks,
        strategies=split_specs(strategies),
        iterations=iterations,
        prompts=prompts,
        group_size=group_size,
        slots=slots,
        max_tokens=max_tokens,
        temperature=temperature,
        token_budget=token_budget,
        seed=seed,
        threads=threads,
        numerics=numerics,
        kv_on_update=kv_on_update,
        drafter=drafter,
        engine=engine,
        alone=alone,
        engines=engines,
        ray=ray,
    )
    source = _resolve(model)
    from longtail.bench.display import BenchProgress, summary_table

    with BenchProgress(config, console) as progress:
        result = run(config, model=source, progress=progress)
    write(result, out)
    console.print(summary_table(result.summary))
    _print_headline(result.summary)
    console.print(f"Report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(result.summary))
    if result.summary["identical_tokens"] is False and config.numerics == "exact":
        raise typer.Exit(1)


@bench.command("engine")
def bench_engine(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated")] = "1,4,16,32",
    peers: Annotated[str, typer.Option(help="Compared with: generate, continuous, vllm")] = "generate,continuous",
    decode_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded per sequence")] = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; ratios are taken pair by pair")] = 3,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """Decode and prefill speed of the native engine against transformers and vLLM, as ratios measured in one run."""
    from longtail.bench import engine_bench

    fields: dict[str, Any] = {
        "model": str(_resolve(model)),
        "batches": tuple(int(b) for b in batches.split(",")),
        "peers": tuple(p.strip() for p in peers.split(",") if p.strip()),
        "decode_tokens": decode_tokens,
        "repeats": repeats,
    }
    if threads is not None:
        fields["threads"] = threads
    config = engine_bench.EngineBenchConfig(**fields)
    with console.status("measuring") as status:
        result = engine_bench.run(config, progress=lambda text: status.update(text))
    table: Table = engine_bench.table(result)
    console.print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))


@bench.command("kernels")
def bench_kernels(
    ops: Annotated[str, typer.Option(help="Ops, comma-separated", show_default="all")] = "",
    dtypes: Annotated[
        str,
        typer.Option(help="Comma-separated", show_default="bfloat16; timed on a CPU float32, which its kernels take"),
    ] = "",
    compile_only: Annotated[
        bool, typer.Option("--compile", help="Compile for GPUs that are not here, and show the machine code's figures")
    ] = False,
    targets: Annotated[str, typer.Option(help="With --compile")] = "sm_80,sm_90,sm_100,gfx942",
    repeats: Annotated[int, typer.Option(min=1, help="On a CPU")] = 15,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this file, one JSON object a line")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows, one JSON object a line")] = False,
) -> None:
    """Every kernel against what the machine can do: on a GPU Triton's, on a CPU its own."""
    chosen, kinds = _names("ops", ops), _names("dtypes", dtypes)
    with console.status("measuring") as status:

        def progress(text: str) -> None:
            status.update(text)

        if compile_only:
            if importlib.util.find_spec("triton") is None:
                raise ValueError("--compile needs Triton: pip install triton")
            from longtail.bench import kernel_compile

            rows = list(kernel_compile.run(_names("targets", targets), kinds or ("bfloat16",), chosen, progress))
            shown: Table = kernel_compile.table(rows)
        else:
            from longtail.bench import kernel_bench

            config = kernel_bench.KernelBenchConfig(ops=chosen, dtypes=kinds, repeats=repeats, threads=threads)
            rows = list(kernel_bench.run(config, progress))
            shown = kernel_bench.table(rows)
    console.print(shown)
    lines = [json.dumps(row) for row in rows]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n")
    if as_json:
        print("\n".join(lines))
    if problems := [problem for row in rows for problem in row.get("problems", ())]:
        console.print("\n".join(problems), style="red", highlight=False)
        raise typer.Exit(1)


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise ValueError(f"{option}: no name in {text!r}")
    return names


@bench.command("spec")
def bench_spec(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    drafters: Annotated[
        str, typer.Option(help="Comma-separated: names, a>b, oracle:P (right with that probability), garbage")
    ] = "ngram,group,group>ngram,oracle:0.8,garbage",
    lengths: Annotated[
        str, typer.Option(help="Fixed draft lengths to run besides, comma-separated", show_default="none")
    ] = "",
    batches: Annotated[str, typer.Option(help="Sequences that decode at once, comma-separated")] = "1,4,16,32",
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each sequence")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature")] = 0.7,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of each prompt")] = 8,
    tasks: Annotated[str, typer.Option(help="Task mix, e.g. gsm or gsm_symbolic=3,chain_sum=1")] = "gsm",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; ratios are taken pair by pair")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of tasks and samples")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="2")] = None,
    index: Annotated[
        bool, typer.Option("--index", help="Also what the group index costs (15 seconds, 1 GB of memory)")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """What drafting brings: acceptance, costs and speed-up of each drafter at each batch size, and that not one token
    changes. Three to five minutes on two cores."""
    from longtail.bench import spec_bench, spec_bench_tables
    from longtail.bench.spec_index_bench import spec_index_bench

    fields: dict[str, Any] = {
        "model": str(_resolve(model)),
        "drafters": _names("drafters", drafters),
        "lengths": _numbers("lengths", lengths),
        "batches": _numbers("batches", batches),
        "new_tokens": tokens,
        "temperature": temperature,
        "group_size": group_size,
        "tasks": tasks,
        "repeats": repeats,
        "seed": seed,
    }
    if threads is not None:
        fields["threads"] = threads
    config = spec_bench.SpecBenchConfig(**fields)
    with console.status("measuring") as status:
        result = spec_bench.run(config, progress=lambda text: status.update(text))
        if index:
            status.update("group index")
            result["index"] = spec_index_bench()
    console.print(spec_bench_tables.table(result))
    for line in spec_bench_tables.findings(result):
        console.print(line, highlight=False, soft_wrap=True)
    if index:
        console.print(spec_bench_tables.index_table(result["index"]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number.strip())
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not whole numbers with commas between them") from None


@bench.command("kv")
def bench_kv(
    directory: Annotated[Path, typer.Option(help="On the disk to measure; nothing is left there")] = Path("."),
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    sequences: Annotated[int, typer.Option(min=1, help="Saved and restored, of 1k to 4k tokens each")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="In the largest store")] = 10_000,
    resume_tokens: Annotated[int, typer.Option(min=1, help="Restored, and computed again, to compare")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; ratios are taken pair by pair")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads")] = 2,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as the last line of stdout")] = False,
) -> None:
    """What saving KV and keeping samples on disk cost, as ratios measured in one run. About a minute, 3.5 GB of memory
    (most of it the model) and 1 GB of disk; with 32 sequences, 12 GB and 4 GB."""
    from longtail.bench import kv_tables
    from longtail.bench.kv_bench import KVBenchConfig
    from longtail.bench.overhead_bench import OverheadBenchConfig
    from longtail.bench.store_bench import StoreBenchConfig

    if not directory.is_dir():
        raise ValueError(f"directory must be there; {directory} is not")
    source = _resolve(model)
    kv = KVBenchConfig(
        directory=directory,
        model=source,
        sequences=sequences,
        resume_tokens=resume_tokens,
        repeats=repeats,
        threads=threads,
    )
    store = StoreBenchConfig(sizes=kv_tables.sizes_up_to(samples))
    overhead = OverheadBenchConfig(model=source, repeats=repeats, threads=threads)
    with console.status("measuring") as status:
        result = kv_tables.run(kv, store, overhead, progress=lambda text: status.update(text))
    for table in kv_tables.tables(result):
        console.print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1))
    if as_json:
        print(json.dumps(result))


def _resolve(name: str) -> Path | str:
    from longtail.bench.models import resolve_model

    return resolve_model(name, progress=lambda text: console.print(text, style="dim", highlight=False))


def _print_headline(summary: dict[str, Any]) -> None:
    from longtail.bench.answer import headline, why
    from longtail.bench.run import ROUNDING
    from longtail.bench.vllm_alone import OWN

    for sentence in [headline(summary["runs"]), *why(summary["runs"])]:
        console.print(sentence, highlight=False)
    for name, run in summary["runs"].items():
        for text in run["warnings"]:
            console.print(f"{name}: {text}", style="yellow", highlight=False)
    if summary["identical_tokens"] is not None:
        same = summary["identical_tokens"]
        bits = summary["config"]["engine"] == "native"
        text = "and log-probabilities, bit for bit" if bits else f"and, within {ROUNDING:g}, the same log-probabilities"
        text = f"Every sample has the same tokens {text}" if same else "Some have DIFFERENT tokens or log-probabilities"
        runs = f"whichever regime ran but {OWN}" if OWN in summary["runs"] else "whichever regime ran"
        console.print(
            f"{text}, {runs} (updates leave the weights as they are here).",
            style="green" if same else "yellow",
            highlight=False,
        )


if __name__ == "__main__":
    main()
