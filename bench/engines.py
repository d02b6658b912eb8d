"""The engines that the commands run, by name: longtail's own, or vLLM's (partial_rollout/engines/vllm)."""

from __future__ import annotations

import importlib
from typing import Any, Literal

EngineName = Literal["native", "vllm"]
ENGINES: tuple[EngineName, ...] = ("native", "vllm")


def check_engine(name: str, *, threads: int | None = None) -> None:
    """ValueError for an unknown name, for vLLM where it is not installed, and for threads where they are not ours to
    set."""
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    if name != "vllm":
        return
    if threads is not None:
        raise ValueError("threads: vLLM takes OMP_NUM_THREADS of the environment; set it there, and leave this out")
    try:
        importlib.import_module("longtail.partial_rollout.engines.vllm")
    except ImportError as error:
        raise ValueError(f"engine: {error}") from error


def make_engine(
    name: str,
    model: Any,
    *,
    tokenizer: Any = None,
    version: int = 0,
    drafter: str | None = None,
    numerics: str = "exact",
    threads: int | None = None,
    fingerprint_versions: bool = False,
    **settings: Any,
) -> Any:
    """A `NativeEngine` or `VllmEngine`. model: a directory or hub id; native: also a loaded model. numerics, threads
    and fingerprint_versions are the native engine's alone. settings: those that both have (max_num_seqs, max_model_len,
    max_num_batched_tokens, kv_cache_bytes, kv_on_update); None leaves one at its default."""
    check_engine(name, threads=threads)
    if name == "vllm":
        from longtail.partial_rollout.engines.vllm import VllmEngine

        given = {key: value for key, value in settings.items() if value is not None}
        return VllmEngine(model, tokenizer=tokenizer, version=version, drafter=drafter, **given)
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    return NativeEngine(
        model,
        tokenizer=tokenizer,
        version=version,
        drafter=drafter,
        numerics=numerics,
        threads=threads,
        fingerprint_versions=fingerprint_versions,
        **settings,
    )


def renew_drafter(engine: Any, drafter: str | None) -> None:
    """The same drafter, knowing nothing. One of vLLM's own methods goes on with what it knows."""
    if getattr(engine, "drafts_by_itself", False):
        return
    engine.use_drafter(drafter)
