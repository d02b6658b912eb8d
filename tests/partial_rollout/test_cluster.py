"""The simulated cluster: makespans by hand, routing, horizons, losses, and equality with one engine."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from longtail.errors import LongtailError
from longtail.partial_rollout.engines.simulated import (
    Instances,
    Length,
    LinearCost,
    Loss,
    SimulatedCluster,
    SimulatedEngine,
    scripted,
)
from longtail.partial_rollout.engines.simulated.loads import Loads
from longtail.partial_rollout.pool import EnginePool
from longtail.partial_rollout.rollout import Rollout
from longtail.partial_rollout.strategies import STRATEGIES, make_strategy
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")


def group(name: str, n: int = 1, prompt: int = 1, cap: int = 10_000) -> Group:
    return Group.from_prompt(name, [7] * prompt, SamplingParams(n=n, max_tokens=cap))


def cluster(lengths: Mapping[str, int], *kinds: Instances, **fields: object) -> SimulatedCluster:
    return SimulatedCluster(kinds or (Instances(count=2, settings={"slots": 2}),), lengths=scripted(lengths), **fields)  # type: ignore[arg-type]


def finish_times(rollout: Rollout) -> dict[str, float | None]:
    return {s.id: s.timings.finished for g in rollout.collect() for s in g.samples}


def test_one_instance_by_hand() -> None:
    """A pass takes a second. Two slots; a and b begin at 0, c takes b's slot when b ends at 3."""
    engine = cluster({"a/0": 10, "b/0": 3, "c/0": 4}, Instances(count=1, settings={"slots": 2}))
    with Rollout(engine) as rollout:
        rollout.submit([group("a"), group("b"), group("c")])
        assert finish_times(rollout) == {"a/0": 10.0, "b/0": 3.0, "c/0": 7.0}
        assert engine.now() == 10.0
        rollout.check_integrity()


def test_two_instances_by_hand() -> None:
    """Costs of 1 s and 2 s a pass; one slot each. a -> 0 and b -> 1 (least loaded, lowest number). a ends at 5; c
    takes its place until 8; b ends at 2 x 6 = 12. d takes c's slot from 8 on: 8 + 4 = 12."""
    engine = cluster(
        {"a/0": 5, "b/0": 6, "c/0": 3, "d/0": 4},
        Instances(count=1, cost=LinearCost(1.0), settings={"slots": 1}),
        Instances(count=1, cost=LinearCost(2.0), settings={"slots": 1}),
    )
    with Rollout(engine) as rollout:
        rollout.submit([group(name) for name in "abcd"])
        assert finish_times(rollout) == {"a/0": 5.0, "b/0": 12.0, "c/0": 8.0, "d/0": 12.0}
        assert engine.now() == 12.0


def test_batch_size_costs_by_hand() -> None:
    """1 s and 0.5 s for each sequence: two instances of two slots. Instance 0: a (4) and c (2), 1: b (6) and d (6).
    a and c: 2 passes of 2 s, then 2 of 1.5 s: 7 s. b and d: 6 of 2 s: 12 s."""
    lengths = {"a/0": 4, "b/0": 6, "c/0": 2, "d/0": 6}
    engine = cluster(lengths, Instances(count=2, cost=LinearCost(1.0, per_seq=0.5), settings={"slots": 2}))
    with Rollout(engine) as rollout:
        rollout.submit([group(name) for name in "abcd"])
        assert finish_times(rollout) == {"a/0": 7.0, "b/0": 12.0, "c/0": 4.0, "d/0": 12.0}


def random_lengths(count: int, n: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    return {f"g{g}/{i}": min(1 + int(rng.lognormvariate(3.0, 1.0)), 300) for g in range(count) for i in range(n)}


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_cluster_of_one_is_an_engine(name: str) -> None:
    """Under every strategy: the same hand-overs at the same times, the same ledger."""
    settings = {"token-budget": {"tokens": 3_000}, "tail-rounds": {"groups": 4, "samples": 4}, "sync": {"groups": 4}}
    lengths = random_lengths(24, 5, seed=3)
    runs = []
    for make in (
        lambda: SimulatedEngine(
            lengths=scripted(lengths), cost=LinearCost(1.0, 0.1), slots=8, name="cluster-0", materialise=False
        ),
        lambda: cluster(lengths, Instances(count=1, cost=LinearCost(1.0, 0.1), settings={"slots": 8})),
    ):
        fields = settings.get(name, {"groups": 4})
        with Rollout(make(), strategy=make_strategy((STRATEGIES[name], fields))) as rollout:
            rollout.submit([group(f"g{i}", 5) for i in range(24)])
            seen = []
            while len(rollout.store):
                done = rollout.collect()
                seen.append((rollout.engine.now(), [g.id for g in done]))
                rollout.update_weights({}, rollout.engine.version + 1)
                rollout.check_integrity()
            runs.append((seen, rollout.store.ledger.as_dict()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_many_instances_lose_nothing(name: str) -> None:
    """With memory that is short, weight updates, and losses of instances in the middle."""
    settings = {"token-budget": {"tokens": 2_000}, "tail-rounds": {"groups": 4, "samples": 4}, "sync": {"groups": 4}}
    lengths = random_lengths(30, 5, seed=5)
    kinds = (
        Instances(count=3, cost=LinearCost(1.0, 0.1), settings={"slots": 4, "kv_tokens": 700}),
        Instances(count=2, cost=LinearCost(0.5, 0.3), settings={"slots": 8, "kv_tokens": 900}),
    )
    faults = [Loss(time=30.0, instance=0, back=90.0), Loss(time=45.5, instance=4)]
    engine = cluster(lengths, *kinds, faults=faults)
    fields = settings.get(name, {"groups": 4})
    with Rollout(engine, strategy=make_strategy((STRATEGIES[name], fields))) as rollout:
        rollout.submit([group(f"g{i}", 5, prompt=10) for i in range(30)])
        handed: list[Group] = []
        while len(rollout.store):
            handed += rollout.collect()
            engine.check_integrity()
            rollout.update_weights({}, engine.version + 1)
            rollout.check_integrity()
        assert sorted(g.id for g in handed) == sorted(f"g{i}" for i in range(30))
        for sample in (s for g in handed for s in g.samples):
            assert len(sample.output_ids) == lengths[sample.id]
        ledger = rollout.store.ledger
        assert ledger.generated == engine.stats().num_output_tokens == sum(ledger.places.values())


def test_a_lost_instance_by_hand() -> None:
    """One slot each, a second a pass. Instance 1 is lost at 4: b (4 of 6 tokens) waits for a's slot until 10, is
    computed again in the pass that makes its next token (11), and ends at 12."""
    lengths = {"a/0": 10, "b/0": 6}
    engine = cluster(lengths, Instances(count=2, settings={"slots": 1}), faults=[Loss(time=4.0, instance=1)])
    with Rollout(engine) as rollout:
        rollout.submit([group("a"), group("b")])
        assert finish_times(rollout) == {"a/0": 10.0, "b/0": 12.0}
        assert engine.stats().num_recomputed_tokens == 4


def test_all_lost_is_an_error() -> None:
    engine = cluster({"a/0": 10}, Instances(count=1, settings={"slots": 1}), faults=[Loss(time=4.0, instance=0)])
    with Rollout(engine) as rollout, pytest.raises(LongtailError, match="all instances are lost"):
        rollout.submit([group("a")])
        rollout.collect()


def run_to(engine: SimulatedCluster, tokens: int) -> None:
    while tokens > 0:
        tokens -= engine.step(horizon=tokens).num_output_tokens


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_horizon_is_overshot_by_less_than_a_pass(count: int) -> None:
    samples = [s for i in range(4 * count) for s in group(f"g{i}").samples]
    for tokens in (1, 5, 100, 999, 4_321):
        lengths = {s.id: 5_000 for s in samples}
        engine = cluster(lengths, Instances(count=count, cost=LinearCost(0.1, 0.01), settings={"slots": 4}))
        for sample in [s for i in range(4 * count) for s in group(f"g{i}").samples]:
            engine.add([sample])
        run_to(engine, tokens)
        assert tokens <= engine.stats().num_output_tokens < tokens + 4 * count
        engine.check_integrity()


@pytest.mark.parametrize("affinity", [True, False])
def test_saved_kv_is_transferred_only_elsewhere(affinity: bool) -> None:
    """Paused on instance 1 with 10 tokens. Back there nothing is transferred; on 0 it is, for 1 s a token."""
    settings = {"slots": 4, "transfer_seconds": 1.0}
    engine = cluster({"a/0": 50, "b/0": 20}, Instances(count=2, settings=settings), affinity=affinity)
    a, b = (Group.from_prompt(n, [1], SamplingParams(max_tokens=99)).samples[0] for n in "ab")
    engine.add([a])
    engine.add([b])
    while len(b.output_ids) < 10:
        engine.step(until=engine.now() + 1.0)
        engine.set_limit("b/0", None)  # brings it up to date
    engine.pause(["a/0"])
    engine.pause(["b/0"])
    assert (a.snapshot.engine, b.snapshot.engine) == ("cluster-0", "cluster-1")
    engine.add([b])
    start, moved = engine.now(), b.snapshot.num_tokens
    while engine.has_work:
        engine.step()
    assert b.segments[-1].engine == ("cluster-1" if affinity else "cluster-0")
    assert engine.now() == start + 10 + (0 if affinity else moved)


def test_groups_that_are_bound_wait_for_their_instance() -> None:
    """One slot each; a and c belong to instance 0, b to 1. c waits for a although 1 is free from 2 on."""
    engine = cluster({"a/0": 10, "b/0": 2, "c/0": 3}, Instances(count=2, settings={"slots": 1}), routing="group")
    with Rollout(engine) as rollout:
        rollout.submit([group("a"), group("b"), group("c")])
        assert finish_times(rollout) == {"a/0": 10.0, "b/0": 2.0, "c/0": 13.0}
        engine.check_integrity()


def test_siblings_go_where_a_pool_sends_them() -> None:
    """New ones, and those that were paused without their KV: the order is one that spreads them otherwise."""

    def groups() -> list[Sample]:
        return [s for i in range(5) for s in group(f"g{i}", n=3 - i % 2).samples]

    pool = EnginePool(lambda name: SimulatedEngine(name=name, slots=7), count=3)
    fleet = SimulatedCluster([Instances(count=3, settings={"slots": 7})], siblings=True)
    placed = []
    for engine in (pool, fleet):
        samples = groups()
        engine.add(samples)
        paused = engine.pause([s.id for s in samples[::2]], snapshot=False)
        engine.add(reversed(paused))
        engine.add(group("g0-more").samples)
        engine.check_integrity()
        if engine is pool:
            entries = pool._crew.entries
            placed.append({name: int(e.member.name[-1]) for name, e in entries.items() if e.member is not None})
    assert fleet._where == placed[0]
    assert {fleet._where[f"g0/{i}"] for i in range(3)} == {0} and {fleet._where[f"g1/{i}"] for i in range(2)} == {1}


def test_finishes_are_reported_together_if_the_caller_does_not_mind() -> None:
    lengths = {"a/0": 2, "b/0": 5, "c/0": 9, "d/0": 11}
    engine = cluster(lengths)
    engine.add([s for name in "abcd" for s in group(name).samples])
    out = engine.step(finishes=3)
    assert ([s.id for s in out.finished], engine.now()) == (["a/0", "b/0", "c/0"], 9.0)
    rest = engine.step(finishes=3)
    assert ([s.id for s in rest.finished], engine.now()) == (["d/0"], 11.0)
    assert out.num_output_tokens + rest.num_output_tokens == sum(lengths.values())


def test_a_failure_is_reported_at_once() -> None:
    script = {"a/0": Length(2), "b/0": Length(3, failure="no"), "c/0": Length(9)}
    engine = SimulatedCluster((Instances(count=2, settings={"slots": 2}),), lengths=scripted(script))
    engine.add([s for name in "abc" for s in group(name).samples])
    out = engine.step(finishes=3)
    assert ([(s.id, s.status) for s in out.finished], engine.now()) == ([("a/0", "finished"), ("b/0", "failed")], 4.0)


def test_loads_by_brute_force() -> None:
    """The least loaded that fits, whatever came and went between two looks."""
    rng = random.Random(11)
    slots = [rng.randint(1, 5) for _ in range(12)]
    loads = Loads(slots)
    for _ in range(4_000):
        number = rng.randrange(len(slots))
        action = rng.choice(("came", "came", "left", "lose", "restore", "look", "look"))
        if action == "came" and loads.alive[number]:
            loads.came(number)
        elif action == "left" and loads.of[number]:
            loads.left(number)
        elif action == "lose" and loads.alive[number] and rng.random() < 0.2:
            loads.lose(number)
        elif action == "restore" and not loads.alive[number]:
            loads.restore(number)
        elif action == "look":
            fit = {n for n in range(len(slots)) if rng.random() < 0.5}
            shares = sorted((loads.of[n] / slots[n], n) for n in range(len(slots)) if loads.alive[n])
            expected = [n for share, n in shares if share < 1.0 and n in fit] + [n for _, n in shares]
            assert loads.least(fit.__contains__) == (expected[0] if expected else None)
        loads.check_integrity()


def test_until_and_empty_steps() -> None:
    engine = cluster({"a/0": 50})
    assert engine.step(until=5.0).num_output_tokens == 0 and engine.now() == 0.0
    sample = Group.from_prompt("a", [1], SamplingParams(max_tokens=99)).samples[0]
    engine.add([sample])
    out = engine.step(until=7.5)
    assert engine.now() == 7.5 and not out.finished
    engine.pause(["a/0"])
    assert (engine.now(), len(sample.output_ids)) == (8.0, 8)  # the pass of the moment is finished first


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SimulatedCluster([]), "instances is empty"),
        (lambda: Instances(count=0), "count must be"),
        (lambda: Instances(count=1, settings={"slot": 2}), "slot"),
        (lambda: Loss(time=-1.0, instance=0), "time must be"),
        (lambda: Loss(time=3.0, instance=0, back=3.0), "back must be after"),
        (lambda: SimulatedCluster([Instances(count=1)], faults=[Loss(time=1.0, instance=1)]), "no instance 1"),
        (lambda: SimulatedCluster([Instances(count=1)], spread=-1), "spread must be"),
    ],
)
def test_bad_settings(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


def test_bad_samples() -> None:
    engine = cluster({"a/0": 5}, Instances(count=1, settings={"slots": 2, "kv_tokens": 4}))
    sample: Sample = group("a").samples[0]
    with pytest.raises(ValueError, match="kv_tokens 4 does not hold them"):
        engine.add([sample])
    with pytest.raises(ValueError, match="not in the engine"):
        engine.pause(["b/0"])
