"""Pools of simulated engines on Ray: actors without torch, which are there in a second. Also a program, a trainer that
is killed: simulated.py ADDRESS STORE LOG.

Each step of an engine sleeps, so that there is a middle of a step to be killed in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longtail import Group, Rollout, SamplingParams
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.pool import EnginePool, RayConfig

SECONDS = 0.02


def maker(seconds: float = SECONDS, **settings: Any) -> Callable[..., SimulatedEngine]:
    def make(name: str) -> SimulatedEngine:  # local, so that it is pickled whole
        import time

        engine = SimulatedEngine(name=name, slots=4, **settings)
        step = engine.step

        def slow(horizon: int | None = None, **options: Any) -> Any:
            time.sleep(seconds)
            out = step(horizon=8, **options)
            time.sleep(seconds)
            return out

        engine.step = slow  # type: ignore[method-assign]
        return engine

    return make


def groups(count: int = 8, size: int = 4) -> list[Group]:
    return [
        Group.from_prompt(f"p{i}", [3] * (2 + i), SamplingParams(n=size, max_tokens=20 + 13 * i % 60, seed=i))
        for i in range(count)
    ]


def record(group: Group) -> list[Any]:
    return [[sample.output_ids, [x.hex() for x in sample.logprobs]] for sample in group.samples]


def main(address: str, directory: str, log: str) -> None:
    """Writes down what it got, one line a delivery."""
    import ray

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    file = Path(log)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with EnginePool(maker(), count=2, ray=RayConfig(num_cpus=0.1)) as pool:
        rollout = Rollout(pool, strategy="token-budget:tokens=150", store=directory)
        with rollout, file.open("a") as out:
            for delivery in rollout.store.deliveries(after=lines[-1][0] if lines else 0):
                out.write(json.dumps([delivery.number, {g.id: record(g) for g in delivery.groups}]) + "\n")
                out.flush()
            rollout.submit(g for g in groups() if g.id not in rollout.store)
            while len(rollout.store):
                if got := rollout.collect():
                    out.write(json.dumps([rollout.store.last_delivery, {g.id: record(g) for g in got}]) + "\n")
                    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
