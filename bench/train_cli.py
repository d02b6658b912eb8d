"""`longtail train`: the minimal trainer, and pictures of what it learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(invoke_without_command=True)
console = Console(stderr=True)


@app.callback()
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory of the run: checkpoints, samples, metrics, report")] = Path(
        "runs/train"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out stands, if any")] = False,
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    task: Annotated[
        str, typer.Option(help="add, a mix (arithmetic, gsm, gsm_symbolic=3,chain_sum=1), or a file of prompts.jsonl")
    ] = "add",
    grader: Annotated[
        str | None,
        typer.Option(help="math, regex:{...}, a .toml file, or package.module.function", show_default="the task's own"),
    ] = None,
    strategy: Annotated[str, typer.Option(help="sync, token-budget:tokens=200, over-issue, ...")] = "sync",
    token_budget: Annotated[
        int | None, typer.Option(help="token-budget: output tokens of an iteration", show_default="by the cap")
    ] = None,
    loss: Annotated[str, typer.Option(help="grpo, dr_grpo, dapo, gspo, decoupled_ppo; dapo:clip_high=0.3")] = "grpo",
    correction: Annotated[
        str, typer.Option(help="none, importance, tis, icepop, sequence_mask, ...; tis:cap=2")
    ] = "none",
    steps: Annotated[int, typer.Option(min=1, help="Iterations, each with an update at its end")] = 15,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a batch")] = 8,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of each prompt")] = 8,
    slots: Annotated[int | None, typer.Option(help="Samples that run at once", show_default="a batch")] = None,
    kv_cache_bytes: Annotated[int, typer.Option(min=1, help="Memory of the engine's KV")] = 2 << 30,
    max_tokens: Annotated[
        int | None, typer.Option(help="Cap on a response's tokens", show_default="the task's")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and samples")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads", show_default="all")] = None,
    engine: Annotated[str, typer.Option(help="native, or vllm")] = "native",
    numerics: Annotated[
        str | None,
        typer.Option(help="exact: same bits in every batch; fast: up to rounding", show_default="exact; vllm: its own"),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="exact: log-probabilities that are the rollout's bit for bit; transformers: the model's own forward",
            show_default="by --numerics",
        ),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Speculative decoding: ngram, group, ...", show_default="off")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW")] = 1e-5,
    warmup: Annotated[int, typer.Option(min=0, help="Updates until the full learning rate")] = 0,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW")] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Gradients are clipped to it")] = 1.0,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a forward and backward pass")] = 8192,
    updates: Annotated[int, typer.Option(min=1, help="Updates on each batch")] = 1,
    kl_coef: Annotated[float, typer.Option(help="Of a KL penalty against the starting weights")] = 0.0,
    lora: Annotated[int, typer.Option(min=0, help="Rank of adapters (needs peft); 0: the model itself")] = 0,
    freeze: Annotated[
        str | None, typer.Option(help="Parameters that match this regex are not trained", show_default="none")
    ] = None,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Less memory, one forward pass more")] = False,
    max_staleness: Annotated[
        int | None, typer.Option(help="Oldest token that is trained on, in versions", show_default="any")
    ] = None,
    zero_variance: Annotated[
        str, typer.Option(help="Groups with equal rewards: train (advantage 0), leave_out")
    ] = "train",
    last_segment_only: Annotated[bool, typer.Option(help="Tokens of earlier versions are context only (Kimi)")] = False,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between evaluations; 0: never")] = 5,
    eval_prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts")] = 48,
    eval_samples: Annotated[int, typer.Option(min=1, help="Samples of each, besides the greedy one")] = 4,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints")] = 5,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay")] = 2,
    export: Annotated[bool, typer.Option(help="Write the model at the end")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as the last line of stdout")] = False,
) -> None:
    """Train a model on verifiable rewards: rollout, grade, update, rollout. `kill -9` at any moment and --resume give
    the run that was not killed."""
    if context.invoked_subcommand is not None:
        return
    from longtail.bench.models import resolve_model
    from longtail.bench.train_config import RunConfig

    values = {name: value for name, value in locals().items() if name in RunConfig.__dataclass_fields__}
    config = RunConfig(**values)
    from longtail.bench.train import run
    from longtail.bench.train_display import TrainDisplay

    source = resolve_model(model, progress=lambda text: console.print(text, style="dim", highlight=False))
    with TrainDisplay(config, console) as display:
        summary = run(config, out, resume=resume, model=source, progress=display)
    console.print(f"Report: {out / 'report.html'}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(summary))


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs")],
    out: Annotated[Path, typer.Option(help="Picture: png, svg or pdf")] = Path("learning.png"),
) -> None:
    """Draw what runs learnt: accuracy on held-out prompts against generated tokens and against updates."""
    from longtail.bench.plots.style import save
    from longtail.bench.train_plot import curves, learning, sentence

    found = curves(runs)
    out.parent.mkdir(parents=True, exist_ok=True)
    save(learning(found), out)
    for name, curve in found.items():
        console.print(sentence(name, curve), highlight=False, soft_wrap=True)
    console.print(f"Picture: {out}", highlight=False, soft_wrap=True)


def register(parent: Any) -> None:
    parent.add_typer(app, name="train")
