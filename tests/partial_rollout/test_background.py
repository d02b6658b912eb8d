"""Background work on a virtual clock: schedules by hand, and conservation under random use."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from longtail.partial_rollout.background import Background, VirtualBackground, describe


@dataclasses.dataclass(frozen=True)
class Ask:
    sample_id: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Done:
    sample_id: str
    seconds: float
    time: float


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance_to(self, time: float) -> None:
        assert time >= self.time
        self.time = time


def make(workers: int | None = None) -> tuple[Clock, Background[Ask, Done], VirtualBackground[Ask, Done]]:
    clock = Clock()
    background: VirtualBackground[Ask, Done] = VirtualBackground(
        clock,
        lambda request, seconds: Done(request.sample_id, seconds, clock.now()),
        lambda request: request.seconds,
        workers=workers,
    )
    return clock, background, background


def test_without_a_limit_all_run_at_once() -> None:
    """a: 0 to 5, b: 0 to 2, c (from 1): 1 to 3."""
    clock, _, background = make()
    background.submit(Ask("a", 5.0))
    background.submit(Ask("b", 2.0))
    assert background.next_time() == 2.0 and background.poll() == [] and clock.now() == 0.0
    clock.advance_to(1.0)
    background.submit(Ask("c", 2.0))
    assert background.num_pending == 3
    assert background.wait() == [Done("b", 2.0, 2.0)]
    assert background.wait() == [Done("c", 2.0, 3.0)]
    assert background.next_time() == 5.0
    assert background.wait() == [Done("a", 5.0, 5.0)]
    assert background.num_pending == 0 and background.next_time() is None and background.wait() == []
    assert clock.now() == 5.0


def test_two_workers_in_order_of_submission() -> None:
    """Worker 1: a 0-5, then d 5-6. Worker 2: b 0-2, c 2-6. c begins when b ends, not when somebody looks."""
    clock, _, background = make(workers=2)
    for name, seconds in (("a", 5.0), ("b", 2.0), ("c", 4.0), ("d", 1.0)):
        background.submit(Ask(name, seconds))
    clock.advance_to(4.0)
    assert [done.sample_id for done in background.poll()] == ["b"]
    assert background.next_time() == 5.0
    assert [done.sample_id for done in background.wait()] == ["a"]
    assert [done.sample_id for done in background.wait()] == ["c", "d"]  # both at 6, c began first
    assert clock.now() == 6.0


def test_results_that_came_due_are_kept_in_order() -> None:
    clock, _, background = make()
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 0.0), ("d", 9.0)):
        background.submit(Ask(name, seconds))
    assert background.next_time() == 0.0
    clock.advance_to(4.0)
    assert background.next_time() == 4.0  # something is there
    assert [done.sample_id for done in background.wait()] == ["c", "b", "a"]
    assert clock.now() == 4.0


def test_cancel_frees_the_worker_for_the_next() -> None:
    """One worker. a is cancelled at 2, so b runs from 2 to 5; c waits and is cancelled."""
    clock, _, background = make(workers=1)
    for name in "abc":
        background.submit(Ask(name, 3.0))
    clock.advance_to(2.0)
    background.cancel(["a", "c", "unknown"])
    assert background.num_pending == 1
    assert background.wait() == [Done("b", 3.0, 5.0)]
    background.submit(Ask("a", 1.0))
    clock.advance_to(7.0)
    background.cancel(["a"])  # it was due at 6, and nobody looked
    assert background.poll() == [] and background.num_pending == 0


def test_misuse() -> None:
    _, _, background = make()
    background.submit(Ask("a", 1.0))
    with pytest.raises(ValueError, match="submit a: it has a request pending"):
        background.submit(Ask("a", 1.0))
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="seconds of b must be finite"):
            background.submit(Ask("b", seconds))
    background.close()
    background.close()
    assert background.num_pending == 0 and background.wait() == []
    with pytest.raises(ValueError, match="closed"):
        background.submit(Ask("c", 1.0))
    with pytest.raises(ValueError, match="workers must be"):
        make(workers=0)


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_every_request_has_one_result_or_was_cancelled(workers: int | None) -> None:
    """Random use against the definition: with k workers, work i begins at the later of its submission and the time
    when the k-th last of those before it has freed its worker (no cancelling: that is the next test's)."""
    rng = random.Random(7)
    clock, _, background = make(workers=workers)
    free = [0.0] * (workers or 0)
    due: dict[str, float] = {}
    seen: dict[str, float] = {}
    for i in range(400):
        clock.advance_to(clock.now() + rng.choice([0.0, 0.25, 1.0]))
        seconds = rng.choice([0.0, 0.5, 2.0, 7.0])
        begin = clock.now()
        if workers is not None:
            free.sort()
            begin = max(begin, free[0])
            free[0] = begin + seconds
        due[f"s{i}"] = begin + seconds
        background.submit(Ask(f"s{i}", seconds))
        if rng.random() < 0.3:
            got = background.poll()
            assert {done.sample_id for done in got} == {n for n, t in due.items() if t <= clock.now()} - seen.keys()
            seen |= {done.sample_id: clock.now() for done in got}
        assert background.num_pending == len(due) - len(seen)
    while background.num_pending:
        next_due = min(time for name, time in due.items() if name not in seen)
        assert background.next_time() == max(next_due, clock.now())
        for done in background.wait():
            assert done.sample_id not in seen and due[done.sample_id] <= done.time == max(next_due, clock.now())
            seen[done.sample_id] = done.time
    assert seen.keys() == due.keys()


def test_random_cancelling() -> None:
    rng = random.Random(3)
    clock, _, background = make(workers=2)
    pending: set[str] = set()
    for i in range(1000):
        clock.advance_to(clock.now() + rng.choice([0.0, 0.5]))
        background.submit(Ask(f"s{i}", rng.choice([0.0, 1.0, 3.0])))
        pending.add(f"s{i}")
        gone = set(rng.sample(sorted(pending), k=min(len(pending), rng.choice([0, 0, 1, 2]))))
        background.cancel(gone)
        pending -= gone
        for done in background.poll():
            pending.remove(done.sample_id)  # KeyError: twice, or after it was cancelled
        assert background.num_pending == len(pending)
    while background.num_pending:
        for done in background.wait():
            pending.remove(done.sample_id)
    assert not pending


def test_describe_names_the_innermost_place() -> None:
    def inner() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError) as caught:
        inner()
    assert describe(caught.value).startswith("KeyError: 'k' (test_background.py:")
    assert describe(caught.value).endswith(" in inner)")
    assert describe(ValueError()) == "ValueError"
    assert describe(ValueError("x" * 501)) == f"ValueError: {'x' * 500}... (501 characters)"
