"""Samples move between the engines of a pool with their KV; engines come and go; weights reach all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import assert_same, generate, group, make_model, prompt
from tests.partial_rollout.pool_helpers import batch, maker

from longtail import LongtailError, NativeEngine, Rollout, Sample
from longtail.events import Event
from longtail.partial_rollout.pool import EnginePool
from longtail.partial_rollout.pool.member import HeldKV


def finish(pool: EnginePool) -> None:
    for _ in range(1000):
        if not pool.has_work:
            return
        pool.step()
        pool.check_integrity()
    raise AssertionError("does not come to an end")


def step_until(pool: EnginePool, is_so: Callable[[], bool]) -> None:
    for _ in range(200):
        if is_so():
            return
        pool.step()
    raise AssertionError("does not come to be so")


@pytest.mark.parametrize("over_wire", [False, True])
def test_a_sample_moves_with_its_kv(llama: Any, over_wire: bool) -> None:
    """Its first engine is full when it comes back: it goes on in the other one, from its KV, to the same bits."""
    (alone,) = generate(NativeEngine(llama, block_size=16), group("a", prompt(40)))
    events: list[Event] = []
    pool = EnginePool(
        maker(llama, max_num_seqs=1), count=2, over_wire=over_wire, listener=events.append, routing="affinity"
    )
    (one,) = group("a", prompt(40)).samples
    pool.add([one])
    step_until(pool, lambda: len(one.output_ids) >= 10)
    pool.pause([one.id])
    assert isinstance(one.snapshot, HeldKV) and one.snapshot.num_tokens == one.num_tokens - 1
    home = one.snapshot.member.name
    before = pool.stats()
    first = group("b", prompt(9, seed=1), max_tokens=60).samples
    pool.add(first)
    assert pool._crew.of(pool._crew.members[0])[0].sample is first[0] and home == "pool-0"
    pool.add([one])
    finish(pool)
    assert_same(one, alone)
    assert [s.engine for s in one.segments] == ["pool-0", "pool-1"]
    assert [s.kv for s in one.segments] == ["computed", "restored"]
    after = pool.stats()
    assert after.num_recomputed_tokens == before.num_recomputed_tokens == 0
    assert after.num_restored_tokens > 40
    assert [e.engine for e in events if e.kind == "restore"] == ["pool-1"]


def test_affinity_brings_it_home(llama: Any) -> None:
    """Both engines have room: a resumed sample goes to its KV, siblings go to their prompt's."""
    pool = EnginePool(maker(llama), count=2, routing="affinity")
    samples = [s for g in batch(2, 2) for s in g.samples]
    pool.add(samples)
    where = {s.id: pool._crew.entries[s.id].member.name for s in samples}  # type: ignore[union-attr]
    assert where == {"p0/0": "pool-0", "p0/1": "pool-0", "p1/0": "pool-1", "p1/1": "pool-1"}
    pool.step()
    pool.pause()
    pool.add(reversed(samples))
    assert {s.id: pool._crew.entries[s.id].member.name for s in samples} == where  # type: ignore[union-attr]
    finish(pool)
    stats = pool.stats()
    assert stats.num_recomputed_tokens == 0


def test_saved_kv_goes_when_nobody_needs_it(llama: Any) -> None:
    pool = EnginePool(maker(llama), count=2)
    samples = [s for g in batch(3, 2) for s in g.samples]
    pool.add(samples)
    pool.step()
    pool.step()
    pool.pause()
    hosts = [m.host for m in pool._crew.members]  # type: ignore[attr-defined]
    assert sum(len(host._saved) for host in hosts) == len(samples)
    samples[0].snapshot = None  # cut, say
    pool.add(samples[1:])
    finish(pool)
    pool.add(group("last", prompt(5)).samples * 1)
    finish(pool)
    pool.check_integrity()
    assert sum(len(host._saved) for host in hosts) == 0


def test_the_tail_is_gathered(llama: Any, alone: dict[str, Sample]) -> None:
    """When so few are left that one engine takes them, the other is released, and comes back with new work."""
    events: list[Event] = []
    pool = EnginePool(maker(llama), count=2, repack=4, listener=events.append, over_wire=True)
    samples = [s for g in batch(2, 4) for s in g.samples]  # caps 9 and 17
    pool.add(samples)
    step_until(pool, lambda: "released" in pool.engines.values())
    assert len(pool._crew.entries) <= 4
    finish(pool)
    plain = {s.id: s for s in generate(NativeEngine(llama, block_size=16), *batch(2, 4))}
    for sample in samples:
        assert_same(sample, plain[sample.id])
    assert pool.stats().num_recomputed_tokens == 0  # they moved with their KV
    released = [e for e in events if e.kind == "engine" and e.detail == "released"]
    assert len(released) == 1
    pool.add([s for g in batch(3, 3) for s in g.samples][:8])
    assert list(pool.engines.values()) == ["active", "active"]


def test_weights_and_versions(llama: Any) -> None:
    """Each engine has new weights before its next step; every token says whose it is, and is of those weights."""
    other = make_model("llama", seed=5)
    single = NativeEngine(llama, block_size=16, max_num_seqs=16)
    pool = EnginePool(maker(llama), count=3)

    def run(engine: Any) -> list[Sample]:
        samples = [s for g in batch(4, 3, max_tokens=24) for s in g.samples]
        engine.add(samples)
        for _ in range(4):
            engine.step()
        # The pool's engines have made as many passes as the single one, though not of the same samples.
        engine.pause()
        lengths.append([len(s.output_ids) for s in samples])
        for sample in samples:
            sample.cut(min(len(sample.output_ids), 3))
        engine.update_weights(dict(other.state_dict()), 1)
        engine.add(samples)
        while engine.has_work:
            engine.step()
        return samples

    lengths: list[list[int]] = []
    for got, wanted in zip(run(pool), run(single), strict=True):
        assert_same(got, wanted)
        assert got.versions == wanted.versions and set(got.versions) == {0, 1}
    assert pool.version == 1 and {m.version for m in pool._crew.members} == {1}
    assert pool.behind == {}


def test_weights_that_do_not_fit_change_nothing(llama: Any) -> None:
    pool = EnginePool(maker(llama), count=2)
    with pytest.raises(ValueError, match="weights"):
        pool.update_weights({"a": 1}, 1)
    with pytest.raises(ValueError, match="above the current 0"):
        pool.update_weights(dict(llama.state_dict()), 0)
    assert pool.version == 0 and list(pool.engines.values()) == ["active", "active"]
    pool.add(group("a", prompt(5)).samples)
    finish(pool)


def test_engines_come_and_go(llama: Any, alone: dict[str, Sample]) -> None:
    """One is taken away with work in it, two are added: they take what waits for slots."""
    make = maker(llama, max_num_seqs=3)
    pool = EnginePool(make, count=2, keep_weights=True)
    pool.update_weights(dict(llama.state_dict()), 1)
    samples = [s for g in batch() for s in g.samples]
    pool.add(samples)
    for _ in range(3):
        pool.step()
    pool.remove_engine("pool-0")
    assert pool.engines["pool-0"] == "lost: removed"
    assert {e.member.name for e in pool._crew.entries.values() if e.member} == {"pool-1"}
    assert pool.add_engine() == "pool-2"
    third = make("mine")
    with pytest.raises(ValueError, match="two are called 'pool-1'"):
        pool.add_engine(make("pool-1"))
    pool.add_engine(third)
    pool.step()
    assert {e.member.name for e in pool._crew.entries.values() if e.member} == {"pool-1", "pool-2", "mine"}
    finish(pool)
    for sample in samples:
        assert_same(sample, alone[sample.id])
        assert set(sample.versions) == {1}
    assert pool.stats().num_recomputed_tokens == 0 and not pool.failures


def test_all_engines_lost(llama: Any, alone: dict[str, Sample]) -> None:
    """The pool says so; nothing is lost, and it goes on when there is an engine again."""
    make = maker(llama)
    pool = EnginePool([make("a")])
    rollout = Rollout(pool)
    groups = batch()
    rollout.submit(groups)
    pool._crew.members[0].host.engine.step = lambda **_: 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(LongtailError, match=r"all engines are lost \(step: ZeroDivisionError.*add_engine"):
        rollout.collect()
    rollout.check_integrity()
    pool.add_engine(make("b"))
    got = {s.id: s for g in rollout.collect() for s in g.samples}
    for name, sample in alone.items():
        assert_same(got[name], sample)


def test_all_engines_lost_over_a_move(llama: Any, alone: dict[str, Sample]) -> None:
    """The samples wait in the pool for an engine."""
    make = maker(llama)
    pool = EnginePool(make, count=2)
    samples = [s for g in batch() for s in g.samples]
    pool.add(samples)
    for _ in range(3):
        pool.step()
    first, second = pool._crew.members

    def dying(*arguments: Any, **options: Any) -> Any:
        pool._lose(second, "planted")
        raise ZeroDivisionError

    first.host.engine.pause = dying  # type: ignore[attr-defined]
    pool.release(first.name)
    assert list(pool.engines.values()) == ["lost: planted", "lost: pause: ZeroDivisionError: "][::-1]
    assert {entry.member for entry in pool._crew.entries.values()} == {None}
    assert pool.has_work and len(pool._crew.entries) == len(samples)
    with pytest.raises(LongtailError, match="all engines are lost"):
        pool.step()
    pool.add_engine(make("b"))
    finish(pool)
    for sample in samples:
        assert_same(sample, alone[sample.id])


def test_a_store_on_disk_keeps_the_kv(llama: Any, alone: dict[str, Sample], tmp_path: Path) -> None:
    """Another process (a pool of other engines, a store opened again) goes on from the KV on disk."""
    pool = EnginePool(maker(llama), count=2, over_wire=True)
    with pool, Rollout(pool, strategy="token-budget:tokens=60", store=tmp_path) as rollout:
        rollout.submit(batch())
        got = {s.id: s for g in rollout.collect() for s in g.samples}
        assert any(s.snapshot is not None for s in rollout.store.unfinished())
    with EnginePool(maker(llama), count=3, over_wire=True) as pool, Rollout(pool, store=tmp_path) as rollout:
        resumed = [s for s in rollout.store.unfinished() if s.snapshot is not None]
        assert resumed and rollout.store.damages == []
        got |= {s.id: s for g in rollout.collect() for s in g.samples}
        assert pool.stats().num_recomputed_tokens == 0
        assert pool.stats().num_restored_tokens + pool.stats().num_cached_tokens > 0
        rollout.check_integrity()
    assert got.keys() == alone.keys()
    for name, sample in got.items():
        assert_same(sample, alone[name])
    assert not list((tmp_path / "kv").iterdir())
