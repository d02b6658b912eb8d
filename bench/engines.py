"""The engines that the commands run, by name: longtail's own, or vLLM's (partial_rollout/engines/vllm); or a pool of
native ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import time
from typing import Any, Literal

EngineName = Literal["native", "vllm"]
ENGINES: tuple[EngineName, ...] = ("native", "vllm")


def check_engine(name: str, *, threads: int | None = None, numerics: str | None = None) -> None:
    """ValueError for an unknown name, for vLLM where it is not installed, and for threads and numerics where they are
    not ours to set."""
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    if name != "vllm":
        return
    if threads is not None:
        raise ValueError("threads: vLLM takes OMP_NUM_THREADS of the environment; set it there, and leave this out")
    if numerics is not None:
        raise ValueError(f"numerics: {numerics} is the native engine's; vLLM's are its own, leave this out")
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
    numerics: str | None = None,
    threads: int | None = None,
    fingerprint_versions: bool = False,
    **settings: Any,
) -> Any:
    """A `NativeEngine` or `VllmEngine`. model: a directory or hub id; native: also a loaded model. numerics (None:
    exact), threads and fingerprint_versions are the native engine's alone. settings: those of both (max_num_seqs,
    max_model_len, max_num_batched_tokens, kv_cache_bytes, kv_on_update); None leaves one at its default."""
    check_engine(name, threads=threads, numerics=numerics)
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
        numerics=numerics or "exact",
        threads=threads,
        fingerprint_versions=fingerprint_versions,
        **settings,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Engines:
    """How many, and where. ray: "local", "auto" or an address; None: in this process, one after the other."""

    count: int = 1
    ray: str | None = None
    name: str = "native"
    """As `make_engine` takes it."""
    slowed: float = 1.0
    """The model's passes take so many times what they would, asleep for the rest (`slow_engine`)."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.slowed < math.inf:
            raise ValueError(f"slowed must be a factor of at least 1, not {self.slowed!r}")
        if self.slowed > 1.0 and self.ray is None:
            raise ValueError("slowed: engines that share cores are those on Ray; give ray, or leave it out")
        if self.name != "native" and (self.count > 1 or self.ray is not None):
            raise ValueError(f"engines: the pool is of native ones, not of {self.name}; leave out engines and ray")

    def make(self, source: str, *, slots: int, threads: int | None, **settings: Any) -> Any:
        """slots: of all together; each engine has as many. threads: of each; None: as many as the machine has, divided
        among the engines that run at once."""
        if self.count == 1 and self.ray is None:
            return make_engine(self.name, source, threads=threads, max_num_seqs=slots, **settings)
        from longtail.partial_rollout.engines.native.engine import NativeEngine
        from longtail.partial_rollout.pool import EnginePool, RayConfig

        ray, kind = None, NativeEngine if self.slowed == 1.0 else functools.partial(slow_engine, self.slowed)
        if self.ray is not None:
            threads = threads or max(1, (os.cpu_count() or 1) // self.count)
            ray = RayConfig(address=self.ray, num_cpus=threads)
        factory = functools.partial(kind, source, threads=threads, max_num_seqs=self.share(slots), **settings)
        return EnginePool(factory, count=self.count, ray=ray)

    def share(self, slots: int) -> int:
        """Of an engine."""
        return math.ceil(slots / self.count)


def slow_engine(factor: float, source: str, **settings: Any) -> Any:
    """A native engine that a machine with few cores can have many of, side by side: after each forward pass it sleeps
    until that has taken `factor` times the least CPU time that one of as many rows has needed so far. What another
    engine takes from a pass, of a core or of the memory's bandwidth, is made up for by a shorter sleep. What it makes
    is the same."""
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    engine = NativeEngine(source, **settings)
    forward, least = engine.decoder.forward, dict[int, float]()

    def slow(batch: Any, cache: Any) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        logits = forward(batch, cache)
        rows = len(batch.input_ids)
        least[rows] = min(least.get(rows, math.inf), time.process_time() - cpu)
        time.sleep(max(start + factor * least[rows] - time.perf_counter(), 0.0))
        return logits

    engine.decoder.forward = slow  # type: ignore[method-assign]
    return engine


def speculation_of(engine: Any) -> dict[str, Any]:
    """What summary.json says of drafting: of a pool by engine."""
    from longtail.partial_rollout.pool import EnginePool

    if isinstance(engine, EnginePool):
        return {"speculation": None, "speculation_by_engine": engine.drafting()}
    return {"speculation": None if engine.speculation is None else engine.speculation.report()}


def batched_tokens(engine: Any) -> int:
    """Tokens of a pass at the most; of a pool, whose engines `Engines` makes: of each."""
    from longtail.partial_rollout.engines.native.config import NativeConfig
    from longtail.partial_rollout.pool import EnginePool

    config = NativeConfig() if isinstance(engine, EnginePool) else engine.config
    return int(config.max_num_batched_tokens)


def ending(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Ends what was started for it."""
    from longtail.partial_rollout.pool import EnginePool

    return engine if isinstance(engine, EnginePool) else contextlib.nullcontext()


def renew_drafter(engine: Any, drafter: str | None) -> None:
    """The same drafter, knowing nothing. One of vLLM's own methods goes on with what it knows."""
    if getattr(engine, "drafts_by_itself", False):
        return
    engine.use_drafter(drafter)
