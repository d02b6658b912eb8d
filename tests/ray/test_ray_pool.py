"""Real Ray actors: the samples of the single engine, bit for bit, whoever is killed."""

from __future__ import annotations

import functools
import itertools
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'longtail[ray]'")

from tests.partial_rollout.conftest import assert_same, group, make_model, prompt  # noqa: E402
from tests.partial_rollout.pool_helpers import STRATEGIES, balance, batch, collect_all  # noqa: E402
from tests.ray import simulated  # noqa: E402

from longtail import LongtailError, NativeEngine, Rollout, Sample  # noqa: E402
from longtail.events import Event  # noqa: E402
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine  # noqa: E402
from longtail.partial_rollout.ledger import LINES  # noqa: E402
from longtail.partial_rollout.pool import EnginePool, RayConfig  # noqa: E402
from longtail.partial_rollout.pool.member import HeldKV  # noqa: E402
from longtail.partial_rollout.store import SampleStore  # noqa: E402

SMALL = RayConfig(num_cpus=0.1)


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, Sample]:
    engine = NativeEngine(model, kv_cache_bytes=4 << 20, max_num_seqs=8, block_size=16, threads=1)
    return collect_all(Rollout(engine), batch())


def native_maker(directory: Path, **settings: Any) -> Any:
    fields = {"kv_cache_bytes": 2 << 20, "max_num_seqs": 4, "block_size": 16, "threads": 1} | settings
    return functools.partial(NativeEngine, str(directory), **fields)


def check_all_strategies(pool: EnginePool, model: Any, expected: dict[str, Sample]) -> None:
    for name, strategy in STRATEGIES.items():
        before = pool.stats().num_output_tokens
        rollout = Rollout(pool, strategy=strategy)
        got = collect_all(rollout, batch(), dict(model.state_dict()))
        assert got.keys() <= expected.keys()
        assert len(got) == len(expected) or name in ("over-issue", "tail-rounds")
        for sample_id, sample in got.items():
            assert_same(sample, expected[sample_id])
        assert rollout.store.ledger.generated == pool.stats().num_output_tokens - before


def test_two_and_four_actors(cluster: str, model: Any, model_directory: Path, expected: dict[str, Sample]) -> None:
    """Every strategy on two (the others are released), and on four. Then one is killed in the middle of a step, and a
    sample moves with its KV."""
    events: list[Event] = []
    with EnginePool(native_maker(model_directory), count=4, ray=SMALL) as pool:
        pool.release("pool-1")
        pool.release("pool-2")
        check_all_strategies(pool, model, expected)
        assert [m.stats.num_output_tokens > 0 for m in pool._crew.members if m.stats] == [True, False, False, True]
        pool.recall("pool-1")
        pool.recall("pool-2")
        pool.listener = events.append
        check_all_strategies(pool, model, expected)
        steps = [e for e in events if e.kind == "step"]
        assert {e.engine for e in steps} == {f"pool-{i}" for i in range(4)}
        spans = sorted((e.time, e.time + e.duration, e.engine) for e in steps)
        overlapping = [a for a, b in itertools.pairwise(spans) if b[0] < a[1] and a[2] != b[2]]
        assert overlapping  # they step at once
        kills_one(pool, expected)
        moves_one(pool, model)
        with pytest.raises(ValueError, match="weights"):
            pool.update_weights({"a": 1}, pool.version + 1)
        other = make_model("llama", seed=5)
        pool.update_weights(dict(other.state_dict()), pool.version + 1)
        alone = NativeEngine(other, block_size=16, threads=1)
        for engine in (pool, alone):
            assert not engine.has_work
        (one,), (wanted,) = (group("w", prompt(30)).samples for _ in range(2))
        for engine, sample in ((pool, one), (alone, wanted)):
            engine.add([sample])
            while engine.has_work:
                engine.step()
        assert_same(one, wanted)
        assert set(one.versions) == {pool.version}


def kills_one(pool: EnginePool, expected: dict[str, Sample]) -> None:
    samples = [s for g in batch() for s in g.samples]
    pool.add(samples)
    for _ in range(6):
        pool.step()
    victim = pool._crew.alive[1]
    assert victim.load
    ray.kill(victim.actor)  # type: ignore[attr-defined]
    while pool.has_work:
        pool.step()
    for sample in samples:
        assert_same(sample, expected[sample.id])
    assert [why for why in pool.failures if victim.name in why and "ActorDiedError" in why]
    assert pool.engines[victim.name].startswith("lost")
    pool.check_integrity()


def moves_one(pool: EnginePool, model: Any) -> None:
    (one,) = group("move", prompt(60)).samples
    pool.add([one])
    while len(one.output_ids) < 5:
        pool.step()
    pool.pause([one.id])
    assert isinstance(one.snapshot, HeldKV)
    home = one.snapshot.member
    pool.release(home.name)  # so that it must go elsewhere
    before = pool.stats()
    pool.add([one])
    while pool.has_work:
        pool.step()
    pool.recall(home.name)
    after = pool.stats()
    assert after.num_recomputed_tokens == before.num_recomputed_tokens
    assert after.num_restored_tokens - before.num_restored_tokens >= 60
    assert [s.kv for s in one.segments] == ["computed", "restored"]
    alone = NativeEngine(model, block_size=16, threads=1)
    (wanted,) = group("move", prompt(60)).samples
    alone.add([wanted])
    while alone.has_work:
        alone.step()
    assert_same(one, wanted)


@pytest.fixture(scope="module")
def simulated_samples() -> dict[str, Any]:
    rollout = Rollout(SimulatedEngine(slots=8))
    rollout.submit(simulated.groups())
    return {g.id: simulated.record(g) for g in rollout.collect()}


@pytest.mark.slow
def test_ten_kills(cluster: str, simulated_samples: dict[str, Any]) -> None:
    """At random moments between the calls of a step and their replies; other actors take the places."""
    rng = random.Random(3)
    with EnginePool(simulated.maker(), count=3, ray=SMALL, restarts=20) as pool:
        wait, killed = pool._transport.wait, list[Any]()

        def killing(members: Any, timeout: float | None) -> None:
            left = [m for m in members if m not in killed]
            if len(killed) < 10 and left and rng.random() < 0.3:
                time.sleep(rng.uniform(0, 3 * simulated.SECONDS))
                killed.append(rng.choice(left))
                ray.kill(killed[-1].actor)
            wait(members, timeout)

        pool._transport.wait = killing  # type: ignore[method-assign]
        rollout = Rollout(pool, strategy="token-budget:tokens=120")
        got = collect_all(rollout, simulated.groups(), {})
        pool.check_integrity()  # asks every engine, so that the last one is missed too
        assert len(killed) == 10 and len(pool.failures) == 10
        assert all("ActorDiedError" in why for why in pool.failures)
        balance(pool, rollout)
    records: dict[str, list[Any]] = {name: [] for name in simulated_samples}
    for sample in got.values():
        records[sample.group_id].append([sample.output_ids, [x.hex() for x in sample.logprobs]])
    assert records == simulated_samples


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

    with EnginePool(make, count=2, ray=SMALL, deadline=2.0) as pool:
        rollout = Rollout(pool)
        got = collect_all(rollout, simulated.groups())
        assert Path(flag).exists()
        assert list(pool.failures) == ["pool-1: hangs: step has taken more than 2 s"]
        balance(pool, rollout)
    assert {s.id: s.output_ids for s in got.values()} == {
        f"{name}/{i}": tokens for name, samples in simulated_samples.items() for i, (tokens, _) in enumerate(samples)
    }


@pytest.mark.slow
def test_the_driver_is_killed(cluster: str, simulated_samples: dict[str, Any], tmp_path: Path) -> None:
    """Again and again; the next one goes on from the store. Every group comes once, with the same bits."""
    command = [sys.executable, simulated.__file__, cluster, str(tmp_path / "store"), str(tmp_path / "log")]
    kills, rng = 0, random.Random(1)
    log = tmp_path / "log"
    while True:
        driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if kills < 2:
            before = log.stat().st_size if log.exists() else 0
            while driver.poll() is None and not (log.exists() and log.stat().st_size > before):
                time.sleep(0.01)  # until it has got something
            time.sleep(rng.uniform(0.0, 0.3))
            driver.send_signal(signal.SIGKILL)
        _, errors = driver.communicate(timeout=120)
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
