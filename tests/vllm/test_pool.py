"""Two vLLM engines as Ray actors: the samples of one engine, whatever moves between them or is killed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import assert_same
from tests.vllm.kv_helpers import SETTINGS, group, make_model
from typer.testing import CliRunner

from longtail import Group, Rollout, Sample
from longtail.bench.engines import make_engine
from longtail.partial_rollout.pool import EnginePool, RayConfig
from longtail.partial_rollout.pool.member import HeldKV

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.update({"RAY_memory_monitor_refresh_ms": "0"})


def groups() -> list[Group]:
    return [group(f"g{i}", range(10, 40 + 9 * i), n=3, max_tokens=20 + 8 * i, seed=i) for i in range(4)]


@pytest.mark.slow
def test_bench(tmp_path: Path) -> None:
    """`longtail bench`, from the command to the summary. First, while no other pool has the cores of this Ray."""
    from longtail.bench.cli import app

    settings = {"engine": "vllm", "engines": 2, "ray": "local", "drafter": "group", "out": tmp_path}
    settings |= {"strategies": "sync", "iterations": 1, "prompts": 3, "group-size": 2, "max-tokens": 16, "slots": 6}
    done = CliRunner().invoke(app, ["bench", "--json", *(f"--{name}={value}" for name, value in settings.items())])
    assert done.exit_code == 0, done.output
    run = json.loads(done.stdout.splitlines()[-1])["runs"]["sync"]
    assert run["samples_trained"] == 6 and run["ledger"]["pending"] == 0
    assert set(run["speculation_by_engine"]) == {"pool-0", "pool-1"}


@pytest.fixture(scope="module")
def pool(saving_model: Path) -> Iterator[EnginePool]:
    factory = functools.partial(make_engine, "vllm", str(saving_model), drafter="group", **SETTINGS)
    ray = RayConfig(num_cpus=1, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    with EnginePool(factory, count=2, ray=ray, routing="load", restarts=1) as pool:
        yield pool


def by_id(engine: Any, strategy: str) -> dict[str, Sample]:
    rollout = Rollout(engine, strategy=strategy)
    rollout.submit(groups())
    got: dict[str, Sample] = {}
    while len(rollout.store):
        for done in rollout.collect():
            got |= {sample.id: sample for sample in done.samples}
    rollout.check_integrity()
    ledger = rollout.store.ledger
    assert ledger.pending == 0 and ledger.generated == sum(len(s.output_ids) for s in got.values())
    return got


@pytest.fixture(scope="module")
def expected(saving_engine: Any) -> dict[str, Sample]:
    return by_id(saving_engine, "sync")


@pytest.mark.parametrize("strategy", ["sync", "token-budget:tokens=60"])
def test_the_samples_of_one_engine(pool: EnginePool, expected: dict[str, Sample], strategy: str) -> None:
    got = by_id(pool, strategy)
    assert got.keys() == expected.keys()
    for name, sample in got.items():
        assert_same(sample, expected[name])
    assert {segment.engine for sample in got.values() for segment in sample.segments} == {"pool-0", "pool-1"}
    pool.check_integrity()
    assert pool.stats().num_news > 0 and not pool.failures
    assert all(report["failure"] is None for report in pool.drafting().values())


@pytest.mark.parametrize("kept", [True, False], ids=["with its KV", "from its tokens"])
def test_a_sample_moves(pool: EnginePool, saving_engine: Any, kept: bool) -> None:
    pool.reset_prefix_cache()
    (one,), (wanted,) = (group("move", max_tokens=60, seed=3).samples for _ in range(2))
    saving_engine.add([wanted])
    while saving_engine.has_work:
        saving_engine.step()
    pool.add([one])
    while len(one.output_ids) < 20:
        pool.step()
    home = one.segments[-1].engine
    pool.pause([one.id], snapshot=kept)
    assert isinstance(one.snapshot, HeldKV) == kept
    before = pool.stats()
    pool.release(home)
    pool.add([one])
    while pool.has_work:
        pool.step()
    pool.recall(home)
    after = pool.stats()
    assert_same(one, wanted)
    assert [s.engine for s in one.segments] == [home, "pool-1" if home == "pool-0" else "pool-0"]
    assert [s.kv for s in one.segments] == ["computed", "restored" if kept else "recomputed"]
    assert (after.num_recomputed_tokens > before.num_recomputed_tokens) != kept
    assert (after.num_restored_tokens > before.num_restored_tokens) == kept


def test_new_weights_and_a_kill(pool: EnginePool, saving_engine: Any) -> None:
    """Of weights that both have taken, an actor is killed; its samples go on from their tokens."""
    import ray

    for engine in (saving_engine, pool):
        engine.update_weights(dict(make_model(seed=4).state_dict()), engine.version + 1)
    expected = by_id(saving_engine, "sync")
    saving_engine.update_weights(dict(make_model().state_dict()), saving_engine.version + 1)  # other tests have it too
    samples = [s for g in groups() for s in g.samples]
    pool.add(samples)
    for _ in range(6):
        pool.step()
    victim: Any = pool._crew.alive[1]
    assert victim.load
    ray.kill(victim.actor)
    while pool.has_work:
        pool.step()
    for sample in samples:
        assert_same(sample, expected[sample.id])
        assert set(sample.versions) == {pool.version}
    assert len(pool.failures) == 1 and "ActorDiedError" in pool.failures[0]
    pool.check_integrity()
