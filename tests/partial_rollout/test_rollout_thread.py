"""`Rollout(background=True)`: a thread generates between the collects; simulated and real engines."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt

from longtail import Event, Group, Rollout, SampleStore, SamplingParams
from longtail.errors import LongtailError, StoreError
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.script import log_normal
from longtail.partial_rollout.grading import GradeRequest
from longtail.partial_rollout.groups import GroupRules
from longtail.partial_rollout.loop import Loop, Turn
from longtail.partial_rollout.staleness import StalenessRule

SPEC = "bounded-staleness:groups=3,eta=2"


def simulated(**settings: Any) -> SimulatedEngine:
    return SimulatedEngine(lengths=log_normal(12, 1.0, longest=90), slots=6, **settings)


def prompts(count: int, first: int = 0) -> list[Group]:
    return [Group.from_prompt(f"p{first + i}", [5], SamplingParams(n=2, max_tokens=90)) for i in range(count)]


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_it_generates_between_collects_and_hands_over_each_group_once() -> None:
    handed: list[str] = []
    with Rollout(simulated(), strategy=SPEC, background=True, staleness=StalenessRule(max_staleness=3)) as rollout:
        rollout.submit(prompts(30))
        until(lambda: len(rollout._generation.state.ready) >= 3)  # nobody has called collect
        for version in range(1, 40):
            handed += [g.id for g in rollout.collect()]
            rollout.update_weights({}, version)
            rollout.check_integrity()
            if not len(rollout.store):
                break
        with rollout.turn:
            assert rollout.store.ledger.pending == 0
    assert sorted(handed) == sorted(f"p{i}" for i in range(30))


def test_admission_stays_bounded_after_everything_was_waited_for() -> None:
    """collect(wait=True) is `Sync`'s for one iteration only: afterwards the thread asks the strategy again."""
    with Rollout(simulated(), strategy="bounded-staleness:groups=1,eta=1", background=True) as rollout:
        rollout.submit(prompts(3))
        assert len(rollout.collect(wait=True)) == 3
        rollout.submit(prompts(9, first=3))
        until(lambda: len(rollout._generation.state.ready) == 2)
        time.sleep(0.05)
        assert rollout._generation.state.num_started == 2


def test_real_engine_same_samples(make_engine: EngineMaker, tmp_path: Path) -> None:
    def groups() -> list[Group]:
        return [group(f"g{i}", prompt(7 + i, i), n=2, max_tokens=9 + 5 * i) for i in range(5)]

    plain = {s.id: s for s in generate(make_engine(), *groups())}
    made: dict[str, Any] = {}
    store = SampleStore(tmp_path / "store", commit_every=0.0)
    with Rollout(make_engine(max_num_seqs=3), strategy=SPEC, store=store, background=True) as rollout:
        rollout.submit(groups())
        while len(rollout.store):
            for done in rollout.collect():
                made |= {s.id: s for s in done.samples}
        rollout.check_integrity()
    assert made.keys() == plain.keys()
    for name, sample in made.items():
        assert_same(sample, plain[name])
    with SampleStore(tmp_path / "store") as again:
        again.check_integrity()
        assert again.ledger.pending == 0


@pytest.mark.parametrize("background", [False, True])
def test_interrupt_ends_a_collect_after_the_step_in_hand(make_engine: EngineMaker, background: bool) -> None:
    """From another thread, in the middle of it; nothing is lost, and the samples become what they would have."""

    def groups() -> list[Group]:
        return [group(f"g{i}", prompt(7 + i, i), n=2, max_tokens=40) for i in range(6)]

    plain = {s.id: s for s in generate(make_engine(), *groups())}
    made: dict[str, Any] = {}
    with Rollout(
        make_engine(max_num_seqs=2), strategy="bounded-staleness:groups=6,eta=1", background=background
    ) as rollout:
        rollout.submit(groups())
        start = rollout.engine.stats().num_output_tokens

        def interrupt() -> None:
            until(lambda: rollout.engine.stats().num_output_tokens > start + 10)
            rollout.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        early = rollout.collect()
        thread.join()
        assert len(early) < 6
        rollout.check_integrity()
        rollout.interrupt()  # nobody collects: the next one ends at once
        early += rollout.collect()
        assert len(early) < 6
        for done in [*early, *rollout.collect(wait=True)]:
            made |= {s.id: s for s in done.samples}
        rollout.check_integrity()
    assert made.keys() == plain.keys()
    for name, sample in made.items():
        assert_same(sample, plain[name])


def test_real_engine_takes_weights_and_cancels_meanwhile(make_engine: EngineMaker) -> None:
    weights = make_model("llama", seed=1).state_dict()
    with Rollout(make_engine(max_num_seqs=4), strategy=SPEC, background=True) as rollout:
        rollout.submit(group(f"g{i}", prompt(6, i), n=2, max_tokens=60) for i in range(6))
        until(lambda: any(s.output_ids for g in rollout.store for s in g.samples))
        rollout.cancel(["g4"])
        rollout.update_weights(weights, 1)
        handed = [*rollout.collect(), *rollout.collect(wait=True)]
        rollout.check_integrity()
        assert sorted(g.id for g in handed) == ["g0", "g1", "g2", "g3", "g5"]
        versions = {v for g in handed for s in g.samples for v in s.versions}
        assert versions == {0, 1}


def test_many_callers() -> None:
    """Submitting, cancelling, updating and collecting from threads of their own."""
    engine = simulated()
    handed: list[str] = []
    failures: list[BaseException] = []
    with Rollout(engine, strategy=SPEC, background=True, staleness=StalenessRule(max_staleness=2)) as rollout:

        def run(work: Any) -> threading.Thread:
            def guarded() -> None:
                try:
                    work()
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=guarded)
            thread.start()
            return thread

        def submit() -> None:
            for i in range(30):
                rollout.submit(prompts(2, first=2 * i))

        def update() -> None:
            for version in range(1, 25):
                rollout.update_weights({}, version)
                time.sleep(0.002)

        def check() -> None:
            for _ in range(25):
                rollout.check_integrity()

        threads = [run(submit), run(update), run(check)]
        while any(thread.is_alive() for thread in threads) or len(rollout.store):
            handed += [g.id for g in rollout.collect()]
        for thread in threads:
            thread.join()
    assert not failures
    assert sorted(handed) == sorted(f"p{i}" for i in range(60))


def test_what_the_thread_raises_the_next_collect_raises() -> None:
    engine = simulated()
    step, broken = engine.step, threading.Event()

    def raising(**options: Any) -> Any:
        if broken.is_set():
            raise LongtailError("planted")
        return step(**options)

    engine.step = raising  # type: ignore[method-assign]
    broken.set()
    with Rollout(engine, strategy=SPEC, background=True) as rollout:
        rollout.submit(prompts(6))
        time.sleep(0.05)
        with pytest.raises(LongtailError, match="planted"):
            rollout.collect()
        broken.clear()
        rollout.check_integrity()
        assert len(rollout.collect(wait=True)) == 6


def test_what_nobody_has_heard_of_close_raises() -> None:
    engine = simulated()

    def broken(**options: Any) -> Any:
        raise ZeroDivisionError

    engine.step = broken  # type: ignore[method-assign]
    rollout = Rollout(engine, strategy=SPEC, background=True)
    rollout.submit(prompts(2))
    until(lambda: rollout._loop is not None and rollout._loop._error is not None)
    with pytest.raises(ZeroDivisionError):
        rollout.close()
    assert not rollout.store.is_open
    rollout.close()


def test_close_while_another_thread_collects() -> None:
    engine = simulated()
    rollout = Rollout(engine, strategy="bounded-staleness:groups=99", background=True)
    raised: list[BaseException] = []

    def collect() -> None:
        try:
            while True:
                rollout.submit([[5]], SamplingParams(max_tokens=9))
                rollout.collect()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    time.sleep(0.1)
    rollout.close()
    thread.join(5.0)
    assert not thread.is_alive() and isinstance(raised[0], StoreError)
    with pytest.raises(StoreError, match="closed"):
        rollout.collect()


def test_a_slow_grader_holds_up_nobody() -> None:
    class Never:
        """Takes requests and answers none until it is told to."""

        def __init__(self) -> None:
            self.pending: set[str] = set()

        num_pending = property(lambda self: len(self.pending))

        def submit(self, request: GradeRequest) -> None:
            self.pending.add(request.sample_id)

        def poll(self) -> list[Any]:
            return []

        def wait(self) -> list[Any]:
            time.sleep(30.0)
            return []

        def next_time(self) -> None:
            return None

        def cancel(self, sample_ids: Any) -> None:
            self.pending -= set(sample_ids)

        def close(self) -> None: ...

    grader: Any = Never()
    engine = simulated()
    with Rollout(engine, strategy=SPEC, background=True, grader=grader) as rollout:
        rollout.submit(prompts(2))
        until(lambda: grader.num_pending == 4)
        start = time.monotonic()
        rollout.update_weights({}, 1)
        rollout.cancel(["p0", "p1"])
        assert time.monotonic() - start < 5.0 and grader.num_pending == 0


def test_idle_costs_next_to_nothing() -> None:
    with Rollout(simulated(), strategy=SPEC, background=True):
        time.sleep(0.1)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.25


def test_an_interrupt_while_waiting_for_the_lock_leaves_it_usable() -> None:
    turn = Turn(lambda: None)

    class Interrupted:
        def acquire(self) -> None:
            raise KeyboardInterrupt

    lock, turn._lock = turn._lock, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), turn:
        pass
    turn._lock = lock
    worked = threading.Event()

    def work() -> bool:
        worked.set()
        return True

    loop = Loop(work, turn)
    assert worked.wait(5.0)
    loop.stop()


def test_the_ledger_counts_what_the_thread_recomputes(make_engine: EngineMaker) -> None:
    """All of it, whoever drove the engine when."""
    engine, weights = make_engine(max_num_seqs=2), make_model("llama", seed=1).state_dict()
    with Rollout(engine, strategy=SPEC, background=True) as rollout:
        rollout.submit(group(f"g{i}", prompt(6, i), max_tokens=90) for i in range(3))
        until(lambda: any(len(s.output_ids) > 3 for g in rollout.store for s in g.samples))
        rollout.update_weights(weights, 1)
        time.sleep(0.3)
        while len(rollout.store):
            rollout.collect()
        with rollout.turn:
            assert rollout.store.ledger.beside["recomputed"] == engine.stats().num_recomputed_tokens > 0


def test_only_for_strategies_that_keep_samples_running() -> None:
    with pytest.raises(ValueError, match="pauses everything between collects"):
        Rollout(simulated(), strategy="sync", background=True)
    events: list[Event] = []
    with Rollout(
        simulated(), strategy=SPEC, background=True, rules=GroupRules(retries=0), listener=events.append
    ) as rollout:
        assert rollout.collect() == []
