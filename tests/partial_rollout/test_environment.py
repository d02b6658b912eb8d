"""Environments of multi-turn samples: what they are asked, hundreds at once, and what can go wrong with one."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import until

from longtail import LongtailError, PolicyVersion, Sample, SamplingParams
from longtail.partial_rollout.background import Background
from longtail.partial_rollout.environment import (
    Environment,
    EnvironmentRunner,
    Observation,
    Turn,
    TurnRequest,
    turn_tokens,
)

Make = Callable[..., EnvironmentRunner]


class Scripted:
    """Does what a request's task says: (verb, argument). Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.active: dict[str, str] = {}
        """Sample -> the call that runs: one at a time for each sample."""
        self.most = 0
        self.cancelled: list[str] = []

    async def reset(self, request: TurnRequest) -> None:
        await self._call("reset", request.sample_id, request.turn, request.task.get("reset"))

    async def step(self, request: TurnRequest) -> Any:
        return await self._call("step", request.sample_id, request.turn, request.task.get("step"))

    async def release(self, sample_id: str) -> None:
        await self._call("release", sample_id, -1, None)

    async def _call(self, kind: str, sample_id: str, turn: int, what: Any) -> Any:
        assert sample_id not in self.active, (sample_id, self.active[sample_id], kind)
        self.active[sample_id] = kind
        self.most = max(self.most, len(self.active))
        self.calls.append((kind, sample_id, turn))
        try:
            await asyncio.sleep(0)
            return await self._do(what, sample_id)
        except asyncio.CancelledError:
            self.cancelled.append(sample_id)
            raise
        finally:
            del self.active[sample_id]

    async def _do(self, what: Any, sample_id: str) -> Any:
        verb: str
        argument: Any
        verb, argument = what or ("give", Observation((1,)))
        if verb == "give":
            return argument
        if verb == "raise":
            raise argument
        if verb == "sleep":
            await asyncio.sleep(argument)
        elif verb == "block":
            time.sleep(argument)
        elif verb == "thread":
            await asyncio.to_thread(time.sleep, argument)
        elif verb == "stubborn":  # does not heed its cancellation
            end = time.monotonic() + argument
            while time.monotonic() < end:
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    self.cancelled.append(sample_id)
        elif verb == "cancel":
            raise asyncio.CancelledError
        return Observation((2,))


@pytest.fixture
def environment() -> Scripted:
    return Scripted()


@pytest.fixture
def make(environment: Scripted) -> Iterator[Make]:
    runners: list[EnvironmentRunner] = []

    def make(env: Environment = environment, **options: Any) -> EnvironmentRunner:
        runners.append(EnvironmentRunner(env, **options))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
        assert not runner._thread.is_alive()


def ask(name: str, turn: int = 0, **task: Any) -> TurnRequest:
    return TurnRequest(sample_id=name, group_id="g", task=task, prompt_ids=(1,), output_ids=(2,), text="two", turn=turn)


def only(runner: EnvironmentRunner, request: TurnRequest) -> Turn:
    runner.submit(request)
    (turn,) = runner.wait()
    assert turn.sample_id == request.sample_id
    assert runner.num_pending == 0 and runner.poll() == [] and runner.wait() == []
    return turn


def rest(runner: EnvironmentRunner) -> dict[str, Turn]:
    turns: dict[str, Turn] = {}
    while runner.num_pending:
        for turn in runner.wait():
            assert turn.sample_id not in turns
            turns[turn.sample_id] = turn
    return turns


# ---- records


def test_a_request_is_what_the_environment_sees_of_a_sample() -> None:
    sample = Sample(id="g/0", group_id="g", index=0, prompt_ids=(9,), params=SamplingParams(), seed=1, multi_turn=True)
    for turn, (written, seen) in enumerate([((10, 11), (20,)), ((12,), (21, 22, 23))]):
        for token in written:
            sample.append(token, -1.0, PolicyVersion(turn), "native", "computed")
        sample.status, sample.turn_ended = "paused", True
        assert turn_tokens(sample) == list(written)
        request = TurnRequest.of(sample, "task", "text")
        assert (request.turn, request.output_ids) == (turn, tuple(sample.output_ids))
        sample.append_observation(seen)
        assert turn_tokens(sample) == []
    assert request == TurnRequest(
        sample_id="g/0",
        group_id="g",
        task="task",
        prompt_ids=(9,),
        output_ids=(10, 11, 20, 12),
        text="text",
        turn=1,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.turn = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "token_ids is empty"),
        ({"token_ids": (1, -2)}, "non-negative integers, not -2"),
        ({"token_ids": (1.0,)}, "non-negative integers, not 1.0"),
        ({"token_ids": (1,), "reward": 1.0}, "done=False"),
        ({"done": True, "reward": math.nan}, "finite"),
    ],
)
def test_what_an_observation_refuses(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Observation(**fields)


def test_what_a_turn_refuses() -> None:
    for observation, failure in ((None, None), (Observation((1,)), "also")):
        with pytest.raises(ValueError, match="turn of s"):
            Turn(sample_id="s", observation=observation, failure=failure, seconds=0.0)


# ---- turns


def test_reset_comes_before_the_first_step_only(make: Make, environment: Scripted) -> None:
    runner = make()
    assert only(runner, ask("a")).observation == Observation((1,))
    assert only(runner, ask("a", 1)).observation == Observation((1,))
    assert only(runner, ask("b", 3)).observation == Observation((1,))  # a store brought it back in its fourth turn
    assert environment.calls == [
        ("reset", "a", 0),
        ("step", "a", 0),
        ("step", "a", 1),
        ("reset", "b", 3),
        ("step", "b", 3),
    ]


def test_a_sample_that_is_done_is_released(make: Make, environment: Scripted) -> None:
    last = Observation((5,), done=True, reward=0.5)
    runner = make()
    assert only(runner, ask("a", step=("give", last))).observation == last
    assert until(lambda: ("release", "a", -1) in environment.calls, 10.0)
    only(runner, ask("a"))
    assert environment.calls.count(("reset", "a", 0)) == 2


def test_hundreds_wait_at_once(make: Make, environment: Scripted) -> None:
    """800 turns of 0.3 s each, two for each of 400 samples: 240 s one after another."""
    runner: Background[TurnRequest, Turn] = make()
    start = time.monotonic()
    again = 400
    for i in range(400):
        runner.submit(ask(f"s{i}", step=("sleep", 0.3)))
    assert runner.num_pending == 400 and runner.next_time() is None
    while runner.num_pending:
        for turn in runner.wait():
            assert turn.observation == Observation((2,)) and turn.seconds >= 0.29
            if again:
                again -= 1
                runner.submit(ask(turn.sample_id, 1, step=("sleep", 0.3)))
    assert time.monotonic() - start < 30.0
    assert environment.most > 200
    assert len(environment.calls) == 1200 and len(set(environment.calls)) == 1200


def test_hundreds_of_tools_that_block_a_thread(make: Make) -> None:
    """asyncio's own threads are 4 more than the cores: 200 turns of 0.3 s would take 10 s, and time out at 3."""
    runner = make(timeout=3.0)
    for i in range(200):
        runner.submit(ask(f"s{i}", step=("thread", 0.3)))
    assert all(turn.observation is not None for turn in rest(runner).values())


def test_max_concurrency(make: Make, environment: Scripted) -> None:
    """Waiting for a place counts towards no timeout."""
    runner = make(max_concurrency=3, timeout=0.4)
    for i in range(12):
        runner.submit(ask(f"s{i}", step=("sleep", 0.15)))
    turns = rest(runner)
    assert len(turns) == 12 and all(turn.failure is None and turn.seconds < 0.4 for turn in turns.values())
    assert environment.most == 3


# ---- what is data


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("what", "failure"),
    [
        (("raise", ValueError("no such tool")), "environment raised ValueError: no such tool (test_environment.py:"),
        (("raise", SystemExit(3)), "environment raised SystemExit: 3"),
        (("raise", KeyboardInterrupt()), "environment raised KeyboardInterrupt"),
        (("sleep", 60.0), "environment timed out after 0.3 s (test_environment.py:"),
        (("stubborn", 1.0), "environment timed out after 0.3 s (test_environment.py:"),
        (("thread", 5.0), "environment timed out after 0.3 s (test_environment.py:"),
        (("cancel", None), "environment cancelled its own call"),
    ],
)
def test_a_failure_is_its_sample_s_alone(
    make: Make, environment: Scripted, what: tuple[str, Any], failure: str, where: str
) -> None:
    runner = make(timeout=0.3)
    runner.submit(dataclasses.replace(ask("bad"), task={where: what}))
    for i in range(5):
        runner.submit(ask(f"s{i}", step=("sleep", 0.02)))
    turns = rest(runner)
    bad = turns.pop("bad")
    assert bad.observation is None and str(bad.failure).startswith(failure)
    assert len(turns) == 5 and all(turn.observation == Observation((2,)) for turn in turns.values())
    # Its state is unknown: released when the call has ended, and reset again.
    runner.timeout = runner._work._timeout = 5.0
    assert only(runner, ask("bad", 4)).observation == Observation((1,))
    of_bad = [(kind, turn) for kind, name, turn in environment.calls if name == "bad"]
    assert of_bad[-3:] == [("release", -1), ("reset", 4), ("step", 4)]


@pytest.mark.parametrize("value", [None, (1, 2), "text"])
def test_what_is_no_observation(make: Make, value: Any) -> None:
    turn = only(make(), ask("s", step=("give", value)))
    assert turn.failure == f"environment returned {value!r}, not an Observation"


def test_a_blocked_loop_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnvironmentRunner, "GRACE_SECONDS", 0.3)
    runner = make(timeout=0.2)
    runner.submit(ask("s", step=("block", 1.5)))
    runner.submit(ask("t"))
    with pytest.raises(
        LongtailError, match=r"Scripted blocks the event loop \(test_environment.py:\d+ in _do\).* 2 turns"
    ):
        runner.wait()
    assert runner.num_pending == 2
    assert until(lambda: not runner._turns._arrived.empty(), 10.0)
    monkeypatch.undo()
    rest(runner)


# ---- cancel, close, misuse


def test_cancel(make: Make, environment: Scripted) -> None:
    """One that runs, one that waits for a place, one between two turns, and one that nobody knows."""
    runner = make(max_concurrency=1)
    only(runner, ask("between"))
    runner.submit(ask("runs", step=("sleep", 60.0)))
    runner.submit(ask("waits"))
    runner.submit(ask("other"))
    assert until(lambda: ("step", "runs", 0) in environment.calls, 10.0)
    runner.cancel(["runs", "waits", "between", "unknown"])
    runner.cancel(["runs"])  # does not cancel its release
    assert runner.num_pending == 1
    assert rest(runner).keys() == {"other"}
    assert until(lambda: environment.calls.count(("release", "runs", -1)) == 1, 10.0)
    assert {name for kind, name, _ in environment.calls if kind == "release"} == {"runs", "between"}
    assert not any(name in ("waits", "unknown") for _, name, _ in environment.calls)
    assert environment.cancelled == ["runs"]


def test_a_cancelled_sample_can_be_submitted_again(make: Make, environment: Scripted) -> None:
    """Its new turn waits until the old call has ended."""
    runner = make()
    runner.submit(ask("s", step=("stubborn", 0.3)))
    assert until(lambda: ("step", "s", 0) in environment.calls, 10.0)
    runner.cancel(["s"])
    assert only(runner, ask("s", 7)).observation == Observation((1,))
    assert environment.calls == [
        ("reset", "s", 0),
        ("step", "s", 0),
        ("release", "s", -1),
        ("reset", "s", 7),
        ("step", "s", 7),
    ]


def test_a_late_answer_is_not_taken_for_the_next(make: Make) -> None:
    runner = make()
    runner.submit(ask("s", step=("give", Observation((1,)))))
    assert until(lambda: not runner._turns._arrived.empty(), 10.0)
    runner.cancel(["s"])
    runner.submit(ask("s", step=("give", Observation((2,)))))
    assert [turn.observation for turn in runner.wait()] == [Observation((2,))]
    assert runner.num_pending == 0 and runner.wait() == []


def test_close_releases_and_does_not_wait(make: Make, environment: Scripted) -> None:
    runner = make()
    only(runner, ask("between"))
    runner.submit(ask("runs", step=("sleep", 60.0)))
    assert until(lambda: ("step", "runs", 0) in environment.calls, 10.0)
    start = time.monotonic()
    runner.close()
    assert time.monotonic() - start < 2.0
    assert sorted(name for kind, name, _ in environment.calls if kind == "release") == ["between", "runs"]
    assert runner.num_pending == 0 and runner.wait() == [] and runner.poll() == []
    runner.cancel(["between"])
    with pytest.raises(ValueError, match="closed"):
        runner.submit(ask("s"))
    runner.close()


def test_a_failing_release_is_reported(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(Scripted):
        async def release(self, sample_id: str) -> None:
            raise OSError("the sandbox is gone")

    runner = make(Failing())
    only(runner, ask("s"))
    messages: list[Any] = []
    runner._work.call(runner._work._loop.set_exception_handler, lambda _, context: messages.append(context))
    runner.cancel(["s"])
    assert until(lambda: len(messages) == 1, 10.0)
    assert "release" in messages[0]["message"] and str(messages[0]["exception"]) == "the sandbox is gone"


def test_misuse(make: Make) -> None:
    runner = make()
    runner.submit(ask("s", step=("sleep", 0.1)))
    with pytest.raises(ValueError, match="submit s: it has a request pending"):
        runner.submit(ask("s"))
    rest(runner)
    for timeout in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="timeout must be"):
            make(timeout=timeout)
    with pytest.raises(ValueError, match="max_concurrency must be"):
        make(max_concurrency=0)
    with pytest.raises(ValueError, match="object has no method reset"):
        make(object())


@pytest.mark.parametrize("verb", ["sleep", "stubborn", "block", "thread"])
def test_the_interpreter_ends_while_an_environment_hangs(tmp_path: Path, verb: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"""
import asyncio, os, signal, threading, time
from longtail.partial_rollout.environment import EnvironmentRunner, Observation, TurnRequest

class Hanging:
    async def reset(self, request):
        return None

    async def step(self, request):
        if {verb!r} == "block":
            time.sleep(600)
        if {verb!r} == "thread":
            await asyncio.to_thread(time.sleep, 600)
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if {verb!r} != "stubborn":
                    raise

EnvironmentRunner.GRACE_SECONDS = 1.0
runner = EnvironmentRunner(Hanging())
runner.submit(TurnRequest(sample_id="s", group_id="g", task=None, prompt_ids=(1,), output_ids=(2,), text="", turn=0))
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
runner.wait()
""")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, -2) and "KeyboardInterrupt" in done.stderr


def test_nothing_runs_on_the_caller_s_thread(make: Make) -> None:
    threads: list[int] = []

    class Where(Scripted):
        async def step(self, request: TurnRequest) -> Observation:
            threads.append(threading.get_ident())
            return Observation((1,))

    only(make(Where()), ask("s"))
    assert threads and threading.get_ident() not in threads
