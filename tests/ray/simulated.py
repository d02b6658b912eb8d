"""Pools of simulated engines on Ray: actors without torch, which are there in a second. Also two programs:

simulated.py trainer ADDRESS STORE LOG    A trainer that is killed, and whose engines are.
simulated.py owner                        Has Ray started for a pool, tells its actors' processes, and waits until it
                                          is told to close it.

Each step of an engine sleeps, so that there is a middle of a step to be killed in.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
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


class Killer:
    """Kills actors of a pool at random moments between the calls of a step and their replies."""

    def __init__(self, pool: EnginePool, most: int, seed: int, rate: float = 0.3) -> None:
        self.most, self.rate, self.rng = most, rate, random.Random(seed)
        self.killed: list[Any] = []
        self._wait = pool._transport.wait
        pool._transport.wait = self.wait  # type: ignore[method-assign]

    def wait(self, members: Any, timeout: float | None) -> Any:
        import ray

        left = [m for m in members if m not in self.killed]
        if len(self.killed) < self.most and left and self.rng.random() < self.rate:
            time.sleep(self.rng.uniform(0, 3 * SECONDS))
            victim = self.rng.choice(left)
            self.killed.append(victim)
            if self.rng.random() < 0.5:
                ray.kill(victim.actor)
            else:
                os.kill(victim.about.process, signal.SIGKILL)
        return self._wait(members, timeout)


def train(address: str, directory: str, log: str) -> None:
    """Writes down what it got, one line a delivery."""
    import ray

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    file = Path(log)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with EnginePool(maker(), count=2, ray=RayConfig(num_cpus=0.1), restarts=100) as pool:
        Killer(pool, most=100, seed=len(lines), rate=0.05)
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


def own() -> None:
    with EnginePool(maker(), count=2, ray="local") as pool:
        rollout = Rollout(pool)
        rollout.submit(groups(1))
        rollout.collect()
        print(json.dumps([member.about.process for member in pool._crew.members]), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        train(*sys.argv[2:])
    else:
        own()
