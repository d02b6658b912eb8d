"""`longtail serve`. Heavy imports happen inside the command, so that --help is quick."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from longtail.bench.engines import check_engine, make_engine


def serve(
    model: Annotated[str, typer.Option(help="Model name, directory or hub id")] = "smollm2-135m",
    host: Annotated[
        str, typer.Option(help="Address to listen on; whoever reaches it can generate and change the weights")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8000,
    dialect: Annotated[str, typer.Option(help="sglang (slime, AReaL), vllm (prime-rl, SkyRL), or both")] = "both",
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with a key that clients must send", show_default="none")
    ] = "",
    weights_root: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory below which weights may be read for an update; may be repeated",
            show_default="any on a loopback address, else none",
        ),
    ] = None,
    model_name: Annotated[str, typer.Option(help="As /v1/models has it", show_default="--model")] = "",
    engine: Annotated[str, typer.Option(help="native, or vllm")] = "native",
    core: Annotated[
        str | None,
        typer.Option(help="Of vllm: local, or process (its core has a process of its own)", show_default="local"),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Samples that run at once")] = 32,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and output", show_default="the model's")
    ] = None,
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="Memory for KV")] = 2048,
    kv_on_update: Annotated[
        str, typer.Option(help="After a weight update: recompute unfinished samples' KV, or keep the older one")
    ] = "recompute",
    kept_mib: Annotated[int, typer.Option(min=0, help="Host memory for the KV of aborted samples")] = 4096,
    kept_samples: Annotated[int, typer.Option(min=0, help="Aborted samples that may come back")] = 4096,
    kept_seconds: Annotated[float, typer.Option(min=1.0, help="Seconds that they are kept")] = 3600.0,
    max_samples: Annotated[int, typer.Option(min=1, help="Samples in progress; more are refused")] = 2048,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Size of a request")] = 32,
    grace_seconds: Annotated[float, typer.Option(min=0.0, help="For requests to finish at the end")] = 30.0,
    version: Annotated[int, typer.Option(min=0, help="Policy version of the model's weights")] = 0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of samples whose requests name none", show_default="random")
    ] = None,
    numerics: Annotated[
        str | None,
        typer.Option(help="exact: same bits in every batch; fast: up to rounding", show_default="exact; vllm: its own"),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Speculative decoding: ngram, group, group>ngram", show_default="off")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; vllm: OMP_NUM_THREADS", show_default="all")
    ] = None,
) -> None:
    """Serve a model to RL trainers over HTTP: tokens in, tokens with log-probabilities and versions out, weights from a
    directory. Aborted requests that come back go on where they were. Ends with Ctrl-C."""
    numerics = check_engine(engine, threads=threads, numerics=numerics)
    from longtail.trainer_adapter.server.config import ServerConfig

    key = None
    if api_key_env:
        key = os.environ.get(api_key_env)
        if key is None:
            raise ValueError(f"api_key_env: the environment has no variable {api_key_env!r}")
    config = ServerConfig(
        host=host,
        port=port,
        dialect=cast(Any, dialect),  # checked there
        api_key=key,
        weights_roots=tuple(weights_root or ()),
        model_name=model_name or model,
        max_samples=max_samples,
        max_body_bytes=max_body_mib << 20,
        grace_seconds=grace_seconds,
    )
    from longtail.bench.models import resolve_model, tokenizer_of
    from longtail.partial_rollout.service import KeptConfig, RolloutService
    from longtail.trainer_adapter.server.serve import serve as run

    console = Console(stderr=True)
    kept = KeptConfig(max_samples=kept_samples, max_bytes=kept_mib << 20, max_age=kept_seconds)
    source = resolve_model(model, progress=lambda text: console.print(text, style="dim", highlight=False))
    settings: dict[str, Any] = {
        "max_num_seqs": slots,
        "max_num_batched_tokens": max(512, slots),
        "max_model_len": max_model_len,
        "kv_cache_bytes": kv_cache_mib << 20,
        "kv_on_update": kv_on_update,
        "numerics": numerics,
        "threads": threads,
    }
    tokenizer = tokenizer_of(source)
    made = make_engine(engine, source, version=version, drafter=drafter, core=core, **settings)
    if tokenizer is None:
        console.print(f"{model} has no tokenizer: token ids only", style="yellow", highlight=False)
    if not config.readable:
        text = f"{host} is not loopback: no weights are taken; name their directory with --weights-root"
        console.print(text, style="yellow", highlight=False)
    about = {"model_path": str(source), "engine": engine, "drafter": drafter, **settings, "version": version}
    ending = contextlib.closing(made) if core == "process" else contextlib.nullcontext()
    with ending, RolloutService(made, seed=seed, kept=kept) as service:
        run(
            service,
            config,
            tokenizer=tokenizer,
            about=about,
            started=lambda url: console.print(f"serving {config.model_name} on {url}", highlight=False, soft_wrap=True),
        )
