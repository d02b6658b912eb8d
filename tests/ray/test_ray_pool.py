"""Real Ray actors with a tiny model: the samples of the single engine, bit for bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'longtail[ray]'")

from tests.partial_rollout.conftest import assert_same, group, make_model, prompt  # noqa: E402
from tests.partial_rollout.pool_helpers import STRATEGIES, batch, collect_all  # noqa: E402

from longtail import NativeEngine, Rollout, Sample  # noqa: E402
from longtail.events import Event  # noqa: E402
from longtail.partial_rollout.pool import EnginePool, RayConfig  # noqa: E402
from longtail.partial_rollout.pool.member import HeldKV  # noqa: E402

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
