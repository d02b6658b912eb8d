"""Environments of multi-turn samples: tools and simulators, hundreds of them awaited at once while the engine decodes.

    runner = EnvironmentRunner(Calculator(tokenizer), timeout=60.0)
    runner.submit(TurnRequest.of(sample, group.task, text))     # a sample that the engine gave back with turn_ended
    for turn in runner.poll():
        if turn.observation is not None and not turn.observation.done:
            sample.append_observation(turn.observation.token_ids)   # and back to the engine
    runner.cancel([sample.id])                                  # it is over for another reason (a length cap, an abort)

One asyncio loop runs in a thread of its own, which never sees a `Sample`: a turn leaves as a frozen record.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from longtail.errors import LongtailError
from longtail.partial_rollout.background import Arrivals, check_submit, describe, shorten
from longtail.sample import OBSERVATION, Sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What an environment sees of a sample whose turn has ended."""

    sample_id: str
    group_id: str
    task: Any
    """`Group.task`."""
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Of all turns, the observations among them."""
    text: str
    """What the policy wrote in this turn, that is after the last observation, decoded by the caller (`turn_tokens`)."""
    turn: int
    """Observations before it: 0 in the first turn."""

    @classmethod
    def of(cls, sample: Sample, task: Any, text: str) -> TurnRequest:
        return cls(
            sample_id=sample.id,
            group_id=sample.group_id,
            task=task,
            prompt_ids=sample.prompt_ids,
            output_ids=tuple(sample.output_ids),
            text=text,
            turn=sum(segment.version == OBSERVATION for segment in sample.segments),
        )


def turn_tokens(sample: Sample) -> list[int]:
    """The output tokens behind the last observation: the turn that runs, or that has just ended."""
    start = max((segment.end for segment in sample.segments if segment.version == OBSERVATION), default=0)
    return sample.output_ids[start:]


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer to a turn."""

    token_ids: tuple[int, ...] = ()
    """Appended to the sample, not trained on. At least one unless `done`; those of a last observation are appended
    nowhere."""
    done: bool = False
    """The sample is finished."""
    reward: float | None = None
    """Of the whole sample, with `done`: it then needs no grader. Finite."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        for token in self.token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"token_ids of an observation must be non-negative integers, not {token!r}")
        if not self.token_ids and not self.done:
            raise ValueError("token_ids is empty: an observation that adds nothing must be done")
        if self.reward is not None and not self.done:
            raise ValueError(
                "reward is given with done=False: an environment rewards the whole sample, when it is done"
            )
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward of an observation must be finite, not {self.reward}")


class Environment(Protocol):
    """Holds what it knows of each sample under its `sample_id`; many samples at once, one call at a time for each.

    Its methods run on an event loop: work that does not await (a CPU-bound simulator, blocking I/O) belongs into
    `asyncio.to_thread` or a subprocess, else it holds up every other sample. An environment whose samples hold
    something (a sandbox, a connection) also has `async def release(self, sample_id: str) -> None`: the sample is over
    by `done`, a failure, `cancel` or the runner's end. A call for it that still ran was cancelled, and has ended.
    """

    async def reset(self, request: TurnRequest) -> None:
        """Before the first step of a sample that the runner does not know. `turn` may be above 0, of a sample that a
        store brought back, or that failed here: rebuild its state from the tokens and the task, or raise."""
        ...

    async def step(self, request: TurnRequest) -> Observation:
        """The answer to the turn that has ended. An exception is a failure of this turn; what the policy is to learn
        from (a tool that says no) is an observation."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An observation, or why there is none: exactly one of the two."""

    sample_id: str
    observation: Observation | None
    failure: str | None
    seconds: float
    """From the moment when the environment got the request."""

    def __post_init__(self) -> None:
        if (self.observation is None) == (self.failure is None):
            raise ValueError(f"turn of {self.sample_id}: give an observation or a failure, not both or neither")


class EnvironmentRunner:
    """Awaits an environment's answers. A `Background[TurnRequest, Turn]`.

    timeout: seconds for a turn, its reset included. max_concurrency: so many turns at once, the rest wait, which counts
    towards no timeout; None: all. After a failure the environment's state of the sample is unknown: it is released,
    and the next turn of the sample, if the caller submits one, starts with a reset.
    """

    GRACE_SECONDS = 5.0
    """`wait` takes the loop for blocked when so much more than `timeout` passes without any result."""

    def __init__(self, environment: Environment, *, timeout: float = 60.0, max_concurrency: int | None = None) -> None:
        if not (math.isfinite(timeout) and 0 < timeout <= threading.TIMEOUT_MAX - self.GRACE_SECONDS):
            raise ValueError(f"timeout must be a finite number of seconds above 0, not {timeout}")
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, or None for no limit, not {max_concurrency}")
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise ValueError(f"environment {type(environment).__name__} has no method {method}; see Environment")
        self.environment = environment
        self.timeout = float(timeout)
        self.max_concurrency = max_concurrency
        self._turns: Arrivals[TurnRequest, Turn] = Arrivals()
        self._closed = False
        self._work = _Work(environment, self.timeout, max_concurrency, self._turns.put)
        self._thread = threading.Thread(target=self._work.run, name="environment", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def num_pending(self) -> int:
        return len(self._turns.pending)

    def submit(self, request: TurnRequest) -> None:
        check_submit(request.sample_id, self._turns.pending, self._closed)
        self._turns.pending[request.sample_id] = request
        self._work.call(self._work.begin, request)

    def poll(self) -> list[Turn]:
        return self._turns.poll()

    def wait(self) -> list[Turn]:
        """LongtailError, naming the place, if the environment's code blocks the loop."""
        try:
            return self._turns.wait(self.timeout + self.GRACE_SECONDS)
        except TimeoutError:
            raise LongtailError(
                f"environment {type(self.environment).__name__} blocks the event loop{self._place()}, so that "
                f"{self.num_pending} turns wait for it: let it await, or use asyncio.to_thread"
            ) from None

    def next_time(self) -> None:
        return None

    def cancel(self, sample_ids: Iterable[str]) -> None:
        """The samples are over: their turns are cancelled, if one is pending, and the environment releases them."""
        ids = tuple(sample_ids)
        for sample_id in ids:
            self._turns.pending.pop(sample_id, None)
        if ids and not self._closed:
            self._work.call(self._work.forget, *ids)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._turns.pending.clear()
        atexit.unregister(self.close)
        self._work.call(self._work.stop)
        self._thread.join(self.GRACE_SECONDS)  # a daemon: if its loop is blocked it is left behind

    def __enter__(self) -> EnvironmentRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return ""
        return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name})"


class _Work:
    """What lives on the loop. Everything but `call` runs in its thread."""

    STOP_SECONDS = 3.0
    """What cancelled calls and releases may take at the end."""

    def __init__(
        self,
        environment: Environment,
        timeout: float,
        max_concurrency: int | None,
        put: Callable[[TurnRequest, Turn | BaseException], None],
    ) -> None:
        self._environment = environment
        self._timeout = timeout
        self._put = put
        self._slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._known: set[str] = set()
        """Samples that the environment was asked to reset, and not to release."""
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._calls: dict[str, set[asyncio.Task[Any]]] = {}
        """The environment's calls for each sample that have not ended."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads())

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(function, *args)

    def begin(self, request: TurnRequest) -> None:
        def ended(turn: asyncio.Task[None]) -> None:
            if not turn.cancelled() and (error := turn.exception()) is not None:  # a bug of ours: poll() raises it
                self._put(request, error)

        turn = self._loop.create_task(self._turn(request))
        self._turns[request.sample_id] = turn
        turn.add_done_callback(ended)

    def forget(self, *sample_ids: str) -> None:
        for sample_id in sample_ids:
            self._forget(sample_id)

    def _forget(self, sample_id: str) -> None:
        turn = self._turns.pop(sample_id, None)
        if turn is not None:
            turn.cancel()
        if sample_id in self._known:
            self._known.remove(sample_id)
            release = getattr(self._environment, "release", None)
            if release is not None:
                self._after_others(sample_id, lambda: release(sample_id)).add_done_callback(self._released)

    def stop(self) -> None:
        self.forget(*{**self._turns, **dict.fromkeys(self._known)})
        self._ending = self._loop.create_task(self._stop())

    async def _stop(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=self.STOP_SECONDS)
        self._loop.stop()

    async def _turn(self, request: TurnRequest) -> None:
        async with self._slots:
            start = time.monotonic()
            call = self._after_others(request.sample_id, lambda: self._answer(request))
            try:  # not asyncio.timeout, which would wait for a call that does not heed its cancellation
                await asyncio.wait({call}, timeout=self._timeout)
                place = _place(call)
            finally:
                call.cancel()
        seconds = time.monotonic() - start
        observation, failure = None, None
        if not call.done():
            failure = f"environment timed out after {self._timeout:g} s{place}"
        elif call.cancelled():
            failure = "environment cancelled its own call"
        else:
            observation, failure = call.result()
        del self._turns[request.sample_id]
        if observation is None or observation.done:
            self._forget(request.sample_id)
        turn = Turn(sample_id=request.sample_id, observation=observation, failure=failure, seconds=seconds)
        self._put(request, turn)

    async def _answer(self, request: TurnRequest) -> tuple[Observation | None, str | None]:
        try:
            if request.sample_id not in self._known:
                self._known.add(request.sample_id)
                await self._environment.reset(request)
            observation = await self._environment.step(request)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too, which would end the loop: whatever it raises is data
            return None, f"environment raised {describe(error)}"
        if not isinstance(observation, Observation):
            return None, f"environment returned {shorten(repr(observation))}, not an Observation"
        return observation, None

    def _after_others(self, sample_id: str, function: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        """A call of the environment that begins when all earlier ones for this sample have ended."""
        calls = self._calls.setdefault(sample_id, set())
        others = set(calls)

        async def run() -> Any:
            if others:
                await asyncio.wait(others)
            return await function()

        def ended(call: asyncio.Task[Any]) -> None:
            calls.discard(call)
            if not calls and self._calls.get(sample_id) is calls:
                del self._calls[sample_id]

        call = self._loop.create_task(run())
        calls.add(call)
        call.add_done_callback(ended)
        return call

    def _released(self, call: asyncio.Task[Any]) -> None:
        if not call.cancelled() and (error := call.exception()) is not None:
            self._loop.call_exception_handler({"message": "environment failed in release", "exception": error})


class _DaemonThreads(ThreadPoolExecutor):
    """What `asyncio.to_thread` runs on: a thread for each call, so that hundreds of tools can block at once, and none
    that hangs keeps the interpreter from ending (it joins the threads of the usual executor)."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=run, name="environment-call", daemon=True).start()
        return future


def _place(task: asyncio.Task[Any]) -> str:
    """Where it waits: ` (tool.py:12 in ask)`, the innermost coroutine outside of asyncio."""
    place = ""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if os.path.dirname(frame.f_code.co_filename) != os.path.dirname(asyncio.__file__):
            place = f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name})"
        coroutine = coroutine.cr_await
    return place
