"""A trainer on one host, an engine on each of two, and a link between them that is cut and mended: parted.py CONFIG.

CONFIG and what it writes are JSON. It cuts the link after some steps, and mends it when it has seen what the plan waits
for, so that no time is guessed. Each step of an engine sleeps, so that there is a middle of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longtail import Group, Rollout, Sample, SamplingParams
from longtail.events import Event
from longtail.partial_rollout.pool import EnginePool, RayConfig

SECONDS = 0.03
"""Of a step."""
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 2000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
"""Of Ray: a node is dead when it has not answered so often."""
BEFORE, BESIDE = 20, 40
"""Steps before the link is cut, and of the reachable engine while it is."""


def simulated(name: str) -> Any:
    from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine

    return slowed(SimulatedEngine(name=name, slots=4))


def native(directory: str) -> Callable[..., Any]:
    def make(name: str) -> Any:
        from longtail import NativeEngine

        return slowed(NativeEngine(directory, name=name, kv_cache_bytes=4 << 20, max_num_seqs=4, threads=1))

    return make


def slowed(engine: Any) -> Any:
    """One pass a step, and a pause before it."""
    step = engine.step

    def slow(horizon: int | None = None, **options: Any) -> Any:
        time.sleep(SECONDS)
        return step(horizon=1, **options)

    engine.step = slow
    return engine


def groups(name: str, count: int = 8, tokens: tuple[int, ...] = (30, 60, 90)) -> list[Group]:
    """Of three samples each; `tokens` in turn."""
    return [
        Group.from_prompt(
            f"{name}-{i}",
            [3 + (7 * i + j) % 400 for j in range(10 + 3 * i)],
            SamplingParams(n=3, max_tokens=tokens[i % len(tokens)], seed=i, ignore_eos=True),
        )
        for i in range(count)
    ]


def record(sample: Sample) -> Any:
    return sample.output_ids, [value.hex() for value in sample.logprobs]


class Parted:
    """A pool, and the link between its hosts."""

    def __init__(self, factory: Any, config: dict[str, Any], **settings: Any) -> None:
        ray = RayConfig(num_cpus=0.1, resources={"place": 1.0}, fetch_seconds=2.0)
        self.events: list[Event] = []
        self.pool = EnginePool(factory, count=2, ray=ray, restarts=3, listener=self.events.append, **settings)
        self.config = config
        self.beside = 0
        """Steps of the reachable engine while the link is cut."""
        self.across = 0
        """Of the other one."""

    @property
    def far(self) -> str:
        """The engine, of those that there were at first, on the host whose cable is pulled."""
        return next(m.name for m in self.pool._crew.members[:2] if m.about.host == "b")

    def cut(self) -> None:
        subprocess.run(self.config["pull_cable"], check=True)

    def mend(self) -> None:
        subprocess.run(self.config["plug_in"], check=True)

    def steps(self, start: int, engine: str) -> int:
        return sum(e.kind == "step" and e.engine == engine for e in self.events[start:])

    def collect(self, work: list[Group], enough: Callable[[], bool], during: list[Group], **settings: Any) -> Any:
        """Cuts the link after BEFORE steps; submits `during`; mends it when `enough` says so and the reachable engine
        has done BESIDE steps. -> the samples, what the ledger counts."""
        step, num_steps, since = self.pool.step, 0, -1
        rollout = Rollout(self.pool, **settings)

        def stepping(**options: Any) -> Any:
            nonlocal num_steps, since
            num_steps += 1
            if num_steps == BEFORE:
                self.cut()
                since = len(self.events)
                rollout.submit(during)
            out = step(**options)
            if since >= 0 and enough():
                near = next(m.name for m in self.pool._crew.members[:2] if m.name != self.far)
                self.beside, self.across = self.steps(since, near), self.steps(since, self.far)
                if self.beside >= BESIDE:
                    self.mend()
                    since = -1
            return out

        self.pool.step = stepping  # type: ignore[method-assign]
        rollout.submit(work)
        got: dict[str, Any] = {}
        while len(rollout.store):
            for group in rollout.collect():
                for sample in group.samples:
                    assert sample.id not in got, "handed over twice"
                    got[sample.id] = record(sample)
            rollout.check_integrity()
        self.pool.step = step  # type: ignore[method-assign]
        assert since == -1, "the link is cut yet"
        ledger = rollout.store.ledger
        made = self.pool.stats().num_output_tokens
        return got, {"pending": ledger.pending, "generated": ledger.generated, "made": made}

    def returned(self, name: str) -> dict[str, Any]:
        """What becomes of more work when as many engines are there as at first. -> samples, and tokens by host."""
        while sum(state == "active" for state in self.pool.engines.values()) < 2:
            self.pool.step()
            time.sleep(0.05)
        rollout = Rollout(self.pool)
        rollout.submit(groups(name, 4, (10,)))
        samples = [s for g in rollout.collect() for s in g.samples]
        hosts = {m.name: m.about.host for m in self.pool._crew.members}
        tokens = dict.fromkeys(hosts.values(), 0)
        for sample in samples:
            for segment in sample.segments:
                tokens[hosts[segment.engine]] += segment.end - segment.start
        self.pool.check_integrity()
        return {"samples": {s.id: record(s) for s in samples}, "tokens": tokens}

    def report(self, got: dict[str, Any], ledger: dict[str, int], name: str) -> dict[str, Any]:
        found = {"samples": got, "ledger": ledger, "far": self.far, "beside": self.beside, "across": self.across}
        found |= {"failures": list(self.pool.failures), "after": self.returned(name)}
        self.pool.close()
        return found


def short(config: dict[str, Any]) -> dict[str, Any]:
    """The link is back before the deadline."""
    parted = Parted(simulated, config)
    got, ledger = parted.collect(groups("short"), lambda: True, groups("during", 2), strategy="context-aware:chunk=20")
    return parted.report(got, ledger, "after-short")


def long(config: dict[str, Any]) -> dict[str, Any]:
    """The engine is given up at the deadline; Ray has not noticed anything yet when the link is back."""
    parted = Parted(simulated, config, deadline=3.0)
    got, ledger = parted.collect(groups("long"), lambda: bool(parted.pool.failures), groups("during", 2))
    return parted.report(got, ledger, "after-long")


def dead(config: dict[str, Any]) -> dict[str, Any]:
    """Ray declares the node dead; it comes back as another one."""
    parted = Parted(native(config["model"]), config)
    strategy = "token-budget:tokens=700"
    got, ledger = parted.collect(groups("dead"), lambda: bool(parted.pool.failures), [], strategy=strategy)
    return parted.report(got, ledger, "after-dead")


def saved(config: dict[str, Any]) -> dict[str, Any]:
    """Samples that were paused go on in the reachable engine while the link is cut: those whose KV lies behind it
    compute it again there, and nobody is given up over that."""
    parted = Parted(simulated, config, routing="load")
    pool = parted.pool
    samples = [s for g in groups("saved", 4, (90,)) for s in g.samples]
    pool.add(samples)
    while sum(len(s.output_ids) >= 5 for s in samples) < 8:  # all slots
        pool.step()
    pool.pause()
    behind = [s.id for s in samples if s.snapshot is not None and s.snapshot.member.name == parted.far]
    pool.release(parted.far)
    parted.cut()
    start = len(parted.events)
    pool.add(samples)
    while pool.has_work:
        pool.step()
    parted.mend()
    refused = [e.sample for e in parted.events[start:] if e.kind == "restore" and "fetched" in e.detail]
    pool.recall(parted.far)
    got = {s.id: record(s) for s in samples}
    found = {"samples": got, "behind": behind, "refused": refused, "failures": list(pool.failures)}
    found["after"] = parted.returned("after-saved")
    pool.close()
    return found


def main(path: str) -> None:
    import ray

    config = json.loads(Path(path).read_text())
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=128 << 20,
        resources={"place": 1},
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address=config["ip"],
        _system_config=HEALTH,
    )
    Path(config["address"]).write_text(ray.get_runtime_context().gcs_address)
    while ray.cluster_resources().get("place", 0) < 2:
        time.sleep(0.05)
    results = {}
    for plan in (short, saved, long, dead):
        results[plan.__name__] = plan(config)
        Path(config["results"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
