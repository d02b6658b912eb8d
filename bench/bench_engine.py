"""What `longtail bench` runs on: an engine by name, or a pool of native ones, in this process or on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from typing import Any

from longtail.bench.engines import make_engine
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.partial_rollout.pool import EnginePool, RayConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Engines:
    """How many, and where. ray: "local", "auto" or an address; None: in this process, one after the other."""

    count: int = 1
    ray: str | None = None
    name: str = "native"
    """As `make_engine` takes it."""

    def __post_init__(self) -> None:
        if self.name != "native" and (self.count > 1 or self.ray is not None):
            raise ValueError(f"engines: the pool is of native ones, not of {self.name}; leave out engines and ray")

    def make(self, source: str, *, slots: int, threads: int | None, **settings: Any) -> Any:
        """slots: of all together; each engine has as many. threads: of each; None: as many as the machine has, divided
        among the engines that run at once."""
        if self.count == 1 and self.ray is None:
            return make_engine(self.name, source, threads=threads, max_num_seqs=slots, **settings)
        ray = None
        if self.ray is not None:
            threads = threads or max(1, (os.cpu_count() or 1) // self.count)
            ray = RayConfig(address=self.ray, num_cpus=threads)
        share = math.ceil(slots / self.count)
        factory = functools.partial(NativeEngine, source, threads=threads, max_num_seqs=share, **settings)
        return EnginePool(factory, count=self.count, ray=ray)


def speculation_of(engine: Any) -> dict[str, Any]:
    """What summary.json says of drafting: of a pool by engine."""
    if isinstance(engine, EnginePool):
        return {"speculation": None, "speculation_by_engine": engine.drafting()}
    return {"speculation": None if engine.speculation is None else engine.speculation.report()}


def ending(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """Ends what was started for it."""
    return engine if isinstance(engine, EnginePool) else contextlib.nullcontext()
