"""The engines that the commands run, by name: longtail's own, or vLLM's (partial_rollout/engines/vllm); or a pool of
them."""

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


def check_engine(name: str, *, threads: int | None = None, numerics: str | None = None) -> str | None:
    """ValueError for an unknown name, for vLLM where it is not installed, and for threads and numerics where they are
    not ours to set. -> the numerics: exact where none are given, None of vLLM, whose are its own."""
    if name not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    if name != "vllm":
        return numerics or "exact"
    if threads is not None:
        raise ValueError("threads: vLLM takes OMP_NUM_THREADS of the environment; set it there, and leave this out")
    if numerics is not None:
        raise ValueError(f"numerics: {numerics} is the native engine's; vLLM's are its own, leave this out")
    try:
        importlib.import_module("longtail.partial_rollout.engines.vllm")
    except ImportError as error:
        raise ValueError(f"engine: {error}") from error
    return None


def make_engine(
    kind: str,
    model: Any,
    /,
    *,
    tokenizer: Any = None,
    version: int = 0,
    drafter: str | None = None,
    numerics: str | None = None,
    threads: int | None = None,
    core: str | None = None,
    **settings: Any,
) -> Any:
    """A `NativeEngine` or `VllmEngine`. model: a directory or hub id; native: also a loaded model. numerics (None:
    exact) and threads are the native engine's alone, core (None: local) is vLLM's. settings: those of both (name,
    max_num_seqs, max_model_len, max_num_batched_tokens, kv_cache_bytes, kv_on_update, fingerprint_versions); None
    leaves one at its default."""
    numerics = check_engine(kind, threads=threads, numerics=numerics)
    if core is not None and kind != "vllm":
        raise ValueError(f"core: {core} says where vLLM's core is; the {kind} engine has none, leave it out")
    if kind == "vllm":
        from longtail.partial_rollout.engines.vllm import VllmEngine

        given = {key: value for key, value in settings.items() if value is not None}
        given |= {"core": core or "local"}
        try:
            return VllmEngine(model, tokenizer=tokenizer, version=version, drafter=drafter, **given)
        except ValueError as error:
            if "KV cache" not in str(error):
                raise
            raise ValueError(  # vLLM's words are for settings that are not ours
                "kv_cache_bytes: vLLM wants room for a sample of max_model_len tokens; give KV more memory, or set a "
                f"smaller max_model_len. It says: {error}"
            ) from error
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    return NativeEngine(
        model,
        tokenizer=tokenizer,
        version=version,
        drafter=drafter,
        numerics=numerics,
        threads=threads,
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
        if self.slowed > 1.0 and self.name != "native":
            raise ValueError(f"slowed: native engines can be, not those of {self.name}; leave it out")

    def make(self, source: str, *, slots: int, threads: int | None, **settings: Any) -> Any:
        """slots: of all together; each engine has as many. threads: of each; None: as many as the machine has, divided
        among the engines that run at once. vLLM's go by the environment, which actors have of this process."""
        if self.count == 1 and self.ray is None:
            return make_engine(self.name, source, threads=threads, max_num_seqs=slots, **settings)
        from longtail.partial_rollout.pool import EnginePool, RayConfig

        drafter = settings.get("drafter")
        if self.name == "vllm" and drafter is not None:
            from longtail.partial_rollout.engines.vllm.drafters import is_vllms_own

            if is_vllms_own(drafter):
                raise ValueError(f"drafter: {drafter!r} is a method of vLLM; engines of a pool take longtail's")
        kind = functools.partial(make_engine, self.name)
        if self.slowed > 1.0:
            kind = functools.partial(slow_engine, self.slowed)
        ray = None
        if self.ray is not None:
            if self.name == "native":
                threads = threads or max(1, (os.cpu_count() or 1) // self.count)
            ray = RayConfig(address=self.ray, num_cpus=threads or 1)
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


def batched_tokens(engine: Any, kind: str) -> int:
    """Tokens of a pass at the most; of a pool, whose engines `Engines` makes: of each, which are of this kind."""
    from longtail.partial_rollout.engines.native.config import NativeConfig
    from longtail.partial_rollout.pool import EnginePool

    if not isinstance(engine, EnginePool):
        return int(engine.config.max_num_batched_tokens)
    if kind == "vllm":
        from longtail.partial_rollout.engines.vllm.config import VllmSettings

        return VllmSettings().max_num_batched_tokens
    return NativeConfig().max_num_batched_tokens


def ending(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Ends what was started for it."""
    from longtail.partial_rollout.pool import EnginePool

    return engine if isinstance(engine, EnginePool) else contextlib.nullcontext()


def renew_drafter(engine: Any, drafter: str | None) -> None:
    """The same drafter, knowing nothing. One of vLLM's own methods goes on with what it knows."""
    if getattr(engine, "drafts_by_itself", False):
        return
    engine.use_drafter(drafter)
