"""Actors, drivers and engines that are killed or hang: every sample comes once, with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'longtail[ray]'")

from tests.partial_rollout.pool_helpers import balance, collect_all
from tests.processes import is_running, until
from tests.ray import simulated

from longtail import LongtailError, Rollout
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.ledger import LINES
from longtail.partial_rollout.pool import EnginePool, RayConfig
from longtail.partial_rollout.store import SampleStore

SMALL = RayConfig(num_cpus=0.1)


def alone(groups: list[Any]) -> dict[str, Any]:
    rollout = Rollout(SimulatedEngine(slots=8))
    rollout.submit(groups)
    return {g.id: simulated.record(g) for g in rollout.collect()}


@pytest.fixture(scope="module")
def simulated_samples() -> dict[str, Any]:
    return alone(simulated.groups())


def check_tokens(got: dict[str, Any], simulated_samples: dict[str, Any]) -> None:
    assert {s.id: s.output_ids for s in got.values()} == {
        f"{name}/{i}": tokens for name, samples in simulated_samples.items() for i, (tokens, _) in enumerate(samples)
    }


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_kills(cluster: str, kills: int) -> None:
    """At random moments between the calls of a step and their replies, by Ray or by the system; other actors take the
    places."""
    groups = simulated.groups(count=kills)
    with EnginePool(simulated.maker(), count=3, ray=SMALL, restarts=kills) as pool:
        killer = simulated.Killer(pool, kills, seed=3)
        rollout = Rollout(pool, strategy="token-budget:tokens=120")
        got = collect_all(rollout, groups, {})
        pool.check_integrity()  # asks every engine, so that the last one is missed too
        assert len(killer.killed) == kills and len(pool.failures) == kills
        assert all("ActorDiedError" in why for why in pool.failures)
        balance(pool, rollout)
    records: dict[str, list[Any]] = {group.id: [] for group in groups}
    for name in sorted(got, key=lambda name: got[name].index):
        sample = got[name]
        records[sample.group_id].append([sample.output_ids, [x.hex() for x in sample.logprobs]])
    assert records == alone(simulated.groups(count=kills))


def test_all_actors_are_killed_while_nothing_runs(cluster: str, simulated_samples: dict[str, Any]) -> None:
    """Before the pool has heard of it, what it is given is checked, and made, by those that come in their places."""
    with EnginePool(simulated.maker(), count=2, ray=SMALL, restarts=2) as pool:
        rollout = Rollout(pool)
        for member in pool._crew.members:
            os.kill(member.about.process, signal.SIGKILL)
        got = collect_all(rollout, simulated.groups())
        assert len(pool.failures) == 2
        balance(pool, rollout)
    check_tokens(got, simulated_samples)


def test_a_hung_engine_is_given_up(cluster: str, simulated_samples: dict[str, Any], tmp_path: Path) -> None:
    """One of two engines stops in its third step. When the deadline has passed, its samples go on in the other."""
    flag = str(tmp_path / "flag")

    def make(name: str) -> SimulatedEngine:
        import time
        from pathlib import Path

        engine = SimulatedEngine(name=name, slots=4)
        step, steps = engine.step, 0

        def stopping(**options: Any) -> Any:
            nonlocal steps
            steps += 1
            if name == "pool-1" and steps == 3:
                Path(flag).touch()
                time.sleep(3600)
            return step(**options | {"horizon": 8})

        engine.step = stopping  # type: ignore[method-assign]
        return engine

    with EnginePool(make, count=2, ray=SMALL, deadline=10.0) as pool:
        rollout = Rollout(pool)
        got = collect_all(rollout, simulated.groups())
        assert Path(flag).exists()
        assert list(pool.failures) == ["pool-1: hangs: step has taken more than 10 s"]
        balance(pool, rollout)
    check_tokens(got, simulated_samples)


@pytest.mark.parametrize("most", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_the_driver_is_killed(cluster: str, simulated_samples: dict[str, Any], tmp_path: Path, most: int) -> None:
    """Again and again, and its engines meanwhile; the next one goes on from the store. Every group comes once, with the
    same bits."""
    log = tmp_path / "log"
    command = [sys.executable, simulated.__file__, "trainer", cluster, str(tmp_path / "store"), str(log)]
    kills, rng = 0, random.Random(most)
    while True:
        driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if kills < most:
            before = log.stat().st_size if log.exists() else 0
            while driver.poll() is None and not (log.exists() and log.stat().st_size > before):
                time.sleep(0.01)  # until it has got something
            time.sleep(rng.uniform(0.0, 0.3))
            driver.send_signal(signal.SIGKILL)
        _, errors = driver.communicate(timeout=400)
        if driver.returncode == 0:
            break
        assert driver.returncode == -signal.SIGKILL, errors
        kills += 1
        text = log.read_text()
        log.write_text(text[: text.rfind("\n") + 1])  # its last line may not be whole: that delivery it has not seen
        with SampleStore(tmp_path / "store") as store:
            assert store.damages == []
            store.check_integrity()
    assert kills >= 1
    got = [json.loads(line) for line in log.read_text().splitlines()]
    names = [name for _, groups in got for name in groups]
    assert sorted(names) == sorted(simulated_samples), "a group is missing, or came twice"
    for _, groups in got:
        for name, samples in groups.items():
            assert samples == simulated_samples[name]
    with SampleStore(tmp_path / "store") as store:
        ledger = store.ledger
        assert ledger.pending == 0 and ledger.generated == sum(ledger.lines[line] for line in LINES)


def test_an_engine_that_cannot_be_made(cluster: str) -> None:
    def broken(name: str) -> Any:
        raise ValueError("no such model")

    with pytest.raises(LongtailError, match=r"an engine could not be made.*no such model"):
        EnginePool(broken, count=2, ray=SMALL)
    with pytest.raises(LongtailError, match="were not there in 2 s: the cluster has"):
        EnginePool(simulated.maker(), count=1, ray=RayConfig(resources={"moon": 1}, ready_seconds=2.0))
    with EnginePool(simulated.maker(), count=1, ray=SMALL) as pool, pytest.raises(ValueError, match="Ray actors"):
        pool.add_engine(SimulatedEngine())


def descendants(process: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    found, new = set[int](), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_no_process_is_left_behind(killed: bool) -> None:
    """When a pool with a Ray of its own is closed. When its driver is killed, the actors go at once; two of Ray's own
    processes (the node's agents) take a minute to see it, and do nothing meanwhile."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, simulated.__file__, "owner"], **pipes) as driver:
        assert driver.stdout is not None and driver.stdin is not None
        actors = json.loads(driver.stdout.readline())
        started = descendants(driver.pid)
        assert len(actors) == 2 and started > set(actors)
        if killed:
            driver.kill()
        else:
            driver.stdin.write("\n")
    assert driver.returncode == (-signal.SIGKILL if killed else 0)
    watched = set(actors) if killed else started
    ended = until(lambda: not any(map(is_running, watched)), 60.0)
    for process in filter(is_running, started):
        os.kill(process, signal.SIGKILL)
    assert ended
