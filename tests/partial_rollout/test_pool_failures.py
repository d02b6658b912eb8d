"""What a pool does with engines that hang, lag or are killed by a sample, and where its rules send samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.partial_rollout.conftest import assert_same, group, prompt
from tests.partial_rollout.pool_helpers import balance, batch, collect_all, maker

from longtail import Group, LongtailError, NativeEngine, Rollout, Sample, SamplingParams
from longtail.partial_rollout.background import VirtualBackground
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.partial_rollout.pool import EnginePool, PoolConfig, RayConfig
from longtail.partial_rollout.pool.host import Host
from longtail.partial_rollout.pool.member import LocalMember, Member
from longtail.partial_rollout.pool.routing import expected_tokens, keep_packed


class Held(LocalMember):
    """Its replies to calls of some methods do not come while `held` says so. (They are made: what they tell is lost if
    nobody hears of it.)"""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held: set[str] = set()

    def ready(self) -> bool:
        return bool(self.outstanding) and self.outstanding[0].method not in self.held


def pool_of_held(llama: Any, count: int = 2, **settings: Any) -> tuple[EnginePool, list[Held]]:
    pool = EnginePool([maker(llama)(f"pool-{i}") for i in range(count)], **settings)
    for number, member in enumerate(pool._crew.members):
        assert isinstance(member, LocalMember)
        held = Held(Host(member.host.engine), pool.now(), over_wire=True)
        pool._crew.members[number] = held
    return pool, [m for m in pool._crew.members if isinstance(m, Held)]


def test_a_slow_engine_holds_nobody_up(llama: Any) -> None:
    """A step returns with what has come; the slow one's samples stand still, and go on when its reply is there."""
    pool, (slow, _) = pool_of_held(llama)
    samples = [s for g in batch(2, 2, max_tokens=30) for s in g.samples]
    pool.add(samples)
    pool.step()
    slow.held = {"step"}
    before = [len(s.output_ids) for s in samples]
    for _ in range(5):
        out = pool.step()
        assert out.num_output_tokens == 2 and out.num_seqs == 2
    assert [len(s.output_ids) - n for s, n in zip(samples, before, strict=True)] == [0, 0, 5, 5]
    slow.held = set()
    pool.step()
    assert [len(s.output_ids) - n for s, n in zip(samples, before, strict=True)] == [1, 1, 6, 6]


def test_nobody_waits_for_a_step_to_share_samples(llama: Any) -> None:
    """Two wait behind the slots of an engine whose step does not end; the other one has room, and goes on. They move
    when the step has ended."""
    pool, (slow, quick) = pool_of_held(llama, routing="load", deadline=20.0)
    pool.add(s for i in range(12) for s in group(f"g{i}", prompt(5 + i), max_tokens=5 if i % 2 else 20).samples)
    assert (slow.load, quick.load) == (6, 6)
    slow.held = {"step"}
    while quick.load:
        pool.step()
    assert slow.load == 6
    slow.held = set()
    pool.step()
    pool.step()
    assert (slow.load, quick.load) == (4, 2) and not pool.failures


def test_nobody_waits_for_a_step_to_gather_the_tail(llama: Any) -> None:
    """An engine that is to be released keeps its samples until its step has ended; the other one goes on."""
    pool, (slow, quick) = pool_of_held(llama, routing="load", repack=4, deadline=20.0)
    samples = [s for i in range(4) for s in group(f"g{i}", prompt(5 + i), max_tokens=2 if i == 2 else 30).samples]
    pool.config = dataclasses.replace(pool.config, repack=None)
    pool.add(samples)
    pool.step()
    pool.step()
    slow.held = {"step"}
    pool.step()
    pool.config = dataclasses.replace(pool.config, repack=4)
    assert (slow.load, quick.load) == (1, 2)
    before = len(samples[3].output_ids)
    for _ in range(8):
        pool.step()
    assert len(samples[3].output_ids) == before + 8 and (slow.load, quick.load) == (1, 2)
    assert pool.engines == {"pool-0": "released", "pool-1": "active"}
    slow.held = set()
    pool.step()
    pool.step()
    assert (slow.load, quick.load) == (0, 3) and not pool.failures
    while pool.has_work:
        pool.step()
    assert all(len(s.output_ids) == s.params.max_tokens for s in samples)


def test_a_hung_engine_is_given_up(llama: Any, alone: dict[str, Sample]) -> None:
    pool, (hung, _) = pool_of_held(llama, deadline=0.2)
    rollout = Rollout(pool, strategy="context-aware:chunk=7")
    rollout.submit(batch())
    step, steps = pool.step, 0

    def counting(**options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 9:
            hung.held = {"step"}
        return step(**options)

    pool.step = counting  # type: ignore[method-assign]
    got = {s.id: s for g in rollout.collect() for s in g.samples}
    for name, sample in alone.items():
        assert_same(got[name], sample)
    assert list(pool.failures) == ["pool-0: hangs: step has taken more than 0.2 s"]
    balance(pool, rollout)
    rollout.check_integrity()


def test_lagging_engines_are_known_and_bounded(llama: Any) -> None:
    """`update_weights` does not wait for the last engine's confirmation until it is two behind; that one makes no token
    of older weights all the same."""
    pool, (_, lagging) = pool_of_held(llama, deadline=0.3, most_behind=1)
    weights = dict(llama.state_dict())
    samples = [s for g in batch(2, 2, max_tokens=12) for s in g.samples]
    pool.add(samples)
    pool.step()
    pool.step()
    lagging.held = {"update"}
    pool.update_weights(weights, 1)
    assert pool.behind == {"pool-1": 1} and pool.version == 1 and lagging.version == 0
    pool.step()
    lagging.held = set()
    while pool.has_work:
        pool.step()
    assert pool.behind == {} and lagging.version == 1
    assert {tuple(sorted(set(s.versions))) for s in samples} == {(0, 1)} and pool.behind == {}
    assert [sum(v == 0 for v in s.versions) for s in samples] == [2, 1, 2, 1]  # siblings wait for their prompt
    lagging.held = {"update"}
    pool.update_weights(weights, 2)
    pool.update_weights(weights, 3)  # waits, in vain
    assert list(pool.failures) == ["pool-1: hangs: update has taken more than 0.3 s"]
    assert pool.engines["pool-1"].startswith("lost") and pool.behind == {}


def test_a_sample_that_kills_engines_fails(llama: Any, alone: dict[str, Sample]) -> None:
    """It is found out, and fails as data; those that were with it do not."""

    class Poisoned(NativeEngine):
        def step(self, **options: Any) -> Any:
            if any(name == "poison/0" for name in self._sequences):
                raise MemoryError("planted")
            return super().step(**options)

    pool = EnginePool(maker(llama, Poisoned), count=2, restarts=20)
    rollout = Rollout(pool)
    got = collect_all(rollout, [group("poison", prompt(9)), *batch()])
    bad = got.pop("poison/0")
    assert bad.status == "failed" and "5 engines were lost over it" in (bad.failure or "")
    assert "MemoryError: planted" in (bad.failure or "")
    for name, sample in alone.items():
        assert_same(got[name], sample)
    balance(pool, rollout)


def leaving(model: Any, *names: str) -> Callable[..., NativeEngine]:
    """What makes engines, of which these are lost when they are to pause their samples."""

    class Leaving(NativeEngine):
        def pause(self, *arguments: Any, **options: Any) -> Any:
            if self.name in names:
                raise MemoryError("planted")
            return super().pause(*arguments, **options)

    return maker(model, Leaving)


def test_all_engines_are_lost_between_two_iterations(llama: Any, alone: dict[str, Sample]) -> None:
    """While nothing runs: those that come in their places are waited for. Without any it is said."""
    make = leaving(llama, "pool-0", "pool-1")
    pool = EnginePool(make, count=2, restarts=2)
    rollout = Rollout(pool, strategy="token-budget:tokens=120")
    rollout.submit(batch())
    got = {s.id: s for g in rollout.collect() for s in g.samples}
    assert set(pool.engines.values()) == {"lost: pause: MemoryError: planted"} and not pool.has_work
    assert pool.num_free_slots > 0 and "active" in pool.engines.values()
    got |= collect_all(rollout, [])
    assert got.keys() == alone.keys()
    for name, sample in alone.items():
        assert_same(got[name], sample)
    balance(pool, rollout)

    rollout = Rollout(EnginePool(make, count=2), strategy="token-budget:tokens=120")
    rollout.submit(batch())
    rollout.collect()
    with pytest.raises(LongtailError, match=r"all engines are lost .*MemoryError: planted"):
        rollout.collect()
    rollout.engine.add_engine(maker(llama)("another"))  # type: ignore[attr-defined]
    assert collect_all(rollout, [])


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_released_engine_is_taken_back_when_the_last_is_lost(
    llama: Any, alone: dict[str, Sample], restarts: int
) -> None:
    """While nothing runs."""
    pool = EnginePool(leaving(llama, "pool-1"), count=2, restarts=restarts)
    rollout = Rollout(pool, strategy="token-budget:tokens=120")
    rollout.submit(batch())
    pool.release("pool-0")
    got = {s.id: s for g in rollout.collect() for s in g.samples}
    assert pool.engines == {"pool-0": "released", "pool-1": "lost: pause: MemoryError: planted"}
    got |= collect_all(rollout, [])
    for name, sample in alone.items():
        assert_same(got[name], sample)
    assert pool.engines["pool-0"] == ("active" if restarts == 0 else "released")


def test_an_engine_that_dies_idle_is_found_when_samples_are_checked(llama: Any) -> None:
    """As one of vLLM does whose core has a process of its own. Another one takes its place."""

    class Dying(NativeEngine):
        is_dead = False

        def check(self, sample: Sample) -> None:
            if self.is_dead:
                raise LongtailError("planted")
            super().check(sample)

    pool = EnginePool(maker(llama, Dying), count=2, restarts=1)
    for member in pool._crew.members:
        assert isinstance(member, LocalMember)
        member.host.engine.is_dead = True  # type: ignore[attr-defined]
    rollout = Rollout(pool)
    assert collect_all(rollout, batch(2, 2))
    assert set(pool.failures) == {f"pool-{i}: check: LongtailError: planted" for i in range(2)}
    assert pool.engines["pool-2"] == "active"


def test_grades_come_though_all_engines_are_lost(llama: Any) -> None:
    """What is done with its engine needs none."""

    class Leaving(NativeEngine):
        def reset_prefix_cache(self) -> None:
            raise MemoryError("planted")

    def grade(request: GradeRequest, seconds: float) -> Grade:
        if not pool.failures:
            pool.reset_prefix_cache()  # the engine dies while the other one waits for its grade
        return Grade(sample_id=request.sample_id, reward=1.0, failure=None, seconds=seconds, grader="toy")

    clock = VirtualClock()
    pool = EnginePool(maker(llama, Leaving), count=1, clock=clock.now)
    grader = VirtualBackground(clock, grade, lambda request: 10.0, workers=1)
    rollout = Rollout(pool, grader=grader, decode=lambda ids: "")
    rollout.submit(batch(1, 2))
    (done,) = rollout.collect()
    assert [s.reward for s in done.samples] == [1.0, 1.0] and len(pool.failures) == 1


def test_a_reported_end_waits_for_its_step(llama: Any) -> None:
    """What ends in a step that a pause had to wait for is not paused: the next step reports it, once."""
    pool, (slow, _) = pool_of_held(llama)
    samples = [s for g in batch(2, 1, max_tokens=2) for s in g.samples]
    pool.add(samples)
    pool.step()
    slow.held = {"step"}
    assert pool.step().finished == [samples[1]]
    slow.held = set()
    assert pool.pause([samples[0].id]) == [] and samples[0].status == "finished"
    assert pool.has_work
    assert pool.step().finished == [samples[0]]
    assert not pool.has_work and pool.step().finished == []


# ---- the rules


@pytest.mark.parametrize(
    ("loads", "most", "kept"),
    [
        ([4, 4], 8, [0]),
        ([4, 5], 8, [0, 1]),
        ([1, 5, 2], 8, [1]),
        ([1, 5, 3], 8, [1, 2]),
        ([0, 0, 1, 0], 4, [2]),
        ([2, 2, 2, 2], 3, [0, 1, 2]),
        ([2, 2, 2, 2], 2, [0, 1, 2, 3]),
        ([9, 9], 4, [0, 1]),
    ],
)
def test_keep_packed(loads: list[int], most: int, kept: list[int]) -> None:
    assert keep_packed(loads, most) == kept


def test_expected_tokens() -> None:
    (one,) = Group.from_prompt("a", [1] * 10, SamplingParams(max_tokens=50)).samples
    assert expected_tokens(one, None, 100) == 50
    assert expected_tokens(one, 20, 100) == 20
    one.output_ids = [5] * 15
    assert expected_tokens(one, 20, 100) == 5
    one.output_ids = [5] * 30  # longer than any sibling: the cap again
    assert expected_tokens(one, 20, 100) == 20
    (two,) = Group.from_prompt("b", [1] * 10, SamplingParams()).samples
    assert expected_tokens(two, None, 100) == 90


def where(pool: EnginePool, groups: list[Group]) -> dict[str, str]:
    pool.add([s for g in groups for s in g.samples])
    return {name: entry.member.name[-1] for name, entry in pool._crew.entries.items() if entry.member is not None}


def test_where_samples_go(llama: Any) -> None:
    """Slots: 4 each. Caps of the groups: 40, 10, 10, 10."""

    def groups() -> list[Group]:
        caps = (40, 10, 10, 10)
        return [group(f"p{i}", prompt(5, seed=i), max_tokens=cap, n=2 - (i > 1)) for i, cap in enumerate(caps)]

    assert where(EnginePool(maker(llama), count=2, routing="load"), groups()) == {
        "p0/0": "0", "p0/1": "1", "p1/0": "0", "p1/1": "1", "p2/0": "0", "p3/0": "1"
    }  # fmt: skip
    assert where(EnginePool(maker(llama), count=2, routing="affinity"), groups()) == {
        "p0/0": "0", "p0/1": "0", "p1/0": "1", "p1/1": "1", "p2/0": "0", "p3/0": "1"
    }  # fmt: skip
    assert where(EnginePool(maker(llama), count=2, routing="affinity", spread=0), groups()) == {
        "p0/0": "0", "p0/1": "1", "p1/0": "0", "p1/1": "1", "p2/0": "0", "p3/0": "1"
    }  # fmt: skip
    assert where(EnginePool(maker(llama), count=2, routing="length"), groups()) == {
        "p0/0": "0", "p0/1": "1", "p1/0": "0", "p1/1": "1", "p2/0": "0", "p3/0": "1"
    }  # fmt: skip
    assert where(EnginePool(maker(llama), count=3, routing="group"), groups()) == {
        "p0/0": "0", "p0/1": "0", "p1/0": "1", "p1/1": "1", "p2/0": "2", "p3/0": "0"
    }  # fmt: skip


def test_length_balanced(llama: Any) -> None:
    """One with 60 tokens before it on the one engine, three with 15 each on the other; then a sibling that has ended
    after 20 tells that the others of its group will be short."""
    pool = EnginePool(maker(llama, max_num_seqs=8), count=2, routing="length")
    caps = {"a": 60, "b": 15, "c": 15, "d": 15, "e": 15, "f": 15}
    placed = where(pool, [group(name, prompt(5, seed=i), max_tokens=cap) for i, (name, cap) in enumerate(caps.items())])
    assert placed == {"a/0": "0", "b/0": "1", "c/0": "1", "d/0": "1", "e/0": "1", "f/0": "0"}
    assert pool._crew.expected(pool._crew.entries["a/0"].sample) == 60
    pool._crew._longest["a"] = 20
    assert pool._crew.expected(pool._crew.entries["a/0"].sample) == 20


# ---- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: EnginePool([]), "engines is empty"),
        (lambda m: EnginePool(maker(m)), "count must be a number of engines"),
        (lambda m: EnginePool(maker(m), count=0), "count must be a number of engines"),
        (lambda m: EnginePool([maker(m)("a")], count=2), "count, ray: give a function"),
        (lambda m: EnginePool([maker(m)("a"), maker(m)("a")]), "two are called 'a'"),
        (lambda m: EnginePool([maker(m)("a"), maker(m, version=1)("b")]), "weights of version 1, the pool of 0"),
        (lambda m: EnginePool(maker(m), count=1, spred=3), "spred"),
        (lambda m: PoolConfig(routing="best"), "routing must be one of load, affinity, length, group"),
        (lambda m: PoolConfig(deadline=0), "deadline must be"),
        (lambda m: PoolConfig(repack=0), "repack must be"),
        (lambda m: PoolConfig(restarts=True), "restarts must be"),
        (lambda m: RayConfig(address=""), "address must be"),
        (lambda m: RayConfig(placement="NEAR"), "placement must be"),
        (lambda m: RayConfig(num_gpus=-1), "num_gpus must be"),
    ],
)
def test_bad_input(llama: Any, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(llama)


def test_an_engine_with_samples_does_not_join(llama: Any) -> None:
    engine = maker(llama)("a")
    engine.add(group("g", prompt(5)).samples)
    with pytest.raises(ValueError, match="engine a has samples"):
        EnginePool([engine])


def test_bad_samples_and_limits(llama: Any) -> None:
    pool = EnginePool(maker(llama), count=2)
    (one,) = group("g", prompt(5)).samples
    with pytest.raises(ValueError, match="limit must be"):
        pool.add([one], limit=0)
    with pytest.raises(ValueError, match="same id"):
        pool.add([one, one])
    long = group("long", prompt(300)).samples
    with pytest.raises(ValueError, match="long/0"):
        pool.add([one, *long])
    assert not pool.has_work
    pool.add([one])
    with pytest.raises(ValueError, match="already in the engine"):
        pool.add([one])
    with pytest.raises(ValueError, match="not in the engine"):
        pool.pause(["nobody"])
    with pytest.raises(ValueError, match="not in the engine"):
        pool.set_limit("nobody", 3)
    with pytest.raises(ValueError, match="the last one that works"):
        EnginePool(maker(llama), count=1).remove_engine("pool-0")
    assert isinstance(pool._crew.members[0], Member)


def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LongtailError, match=r"pip install 'longtail\[ray\]'"):
        EnginePool(lambda name: None, count=1, ray="local")  # type: ignore[arg-type, return-value]
