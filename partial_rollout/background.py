"""Work beside the engine: graders and environments behind one protocol, and the same on a virtual clock.

    background.submit(request)      # the engine goes on
    for result in background.poll(): ...
    background.wait()               # nothing else to do: until there is a result

One thread owns a `Background`: the one that drives the engine. A request leaves as a frozen record, so that nothing
outside that thread reads or writes a `Sample`.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import math
import os
import queue
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")
Request_contra = TypeVar("Request_contra", contravariant=True)


class Background(Protocol[Request_contra, Result]):
    """Takes requests, each for one sample (it has a `sample_id`), and gives one result for each."""

    @property
    def num_pending(self) -> int:
        """Requests that were submitted and whose results were neither returned nor cancelled."""
        ...

    def submit(self, request: Request_contra) -> None:
        """Never blocks on the work. ValueError if the sample has a request pending, or after `close`."""
        ...

    def poll(self) -> list[Result]:
        """The results that are there; never blocks."""
        ...

    def wait(self) -> list[Result]:
        """Blocks until there is a result; [] if none is pending."""
        ...

    def next_time(self) -> float | None:
        """Engine time at which the next result is due. None: nothing is pending, or real time decides."""
        ...

    def cancel(self, sample_ids: Iterable[str]) -> None:
        """Ends the work of these samples, of which no result will come. Ids that are not known are left alone."""
        ...

    def close(self) -> None:
        """Ends everything; what is pending gets no result. Does not wait for work that hangs. May be called twice."""
        ...


class Job(Protocol):
    @property
    def sample_id(self) -> str: ...


JobT = TypeVar("JobT", bound=Job)


class Arrivals(Generic[JobT, Result]):
    """What other threads bring for the jobs of the thread that owns it. A result counts while its job is pending: one
    that was cancelled, and perhaps submitted again, gets none. An exception in its place is raised by who takes it."""

    def __init__(self) -> None:
        self.pending: dict[str, JobT] = {}
        """By sample; the owner's."""
        self._arrived: queue.SimpleQueue[tuple[JobT, Result | BaseException]] = queue.SimpleQueue()

    def put(self, job: JobT, result: Result | BaseException) -> None:
        """From any thread."""
        self._arrived.put((job, result))

    def poll(self) -> list[Result]:
        results: list[Result] = []
        with contextlib.suppress(queue.Empty):
            while True:
                results += self._taken(*self._arrived.get_nowait())
        return results

    def wait(self, seconds: float | None = None) -> list[Result]:
        """Blocks until there is a result; [] if none is pending. TimeoutError where nothing comes for so long."""
        results = self.poll()
        while self.pending and not results:
            try:
                results += self._taken(*self._arrived.get(timeout=seconds))
            except queue.Empty:
                raise TimeoutError from None
        return results + self.poll()

    def _taken(self, job: JobT, result: Result | BaseException) -> list[Result]:
        if self.pending.get(job.sample_id) is not job:
            return []
        del self.pending[job.sample_id]
        if isinstance(result, BaseException):
            raise result
        return [result]


class Clock(Protocol):
    """Virtual time in seconds."""

    def now(self) -> float: ...

    def advance_to(self, time: float) -> None:
        """`time` is not before `now()`."""
        ...


class _Work(Generic[Request]):
    def __init__(self, request: Request, sample_id: str, seconds: float) -> None:
        self.request = request
        self.sample_id = sample_id
        self.seconds = seconds


class VirtualBackground(Generic[Request, Result]):
    """Graders or environments on a virtual clock: no process, no thread, the same schedule in every run.

    seconds: how long the work on a request takes, >= 0. run: its result, of the request and its seconds; called when
    the result is due. workers: so many requests at once, the rest wait in order of submission; None: all at once.
    Results come in order of their times, equal times in the order in which the work began.
    """

    def __init__(
        self,
        clock: Clock,
        run: Callable[[Request, float], Result],
        seconds: Callable[[Request], float],
        *,
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, or None for no limit, not {workers}")
        self._clock = clock
        self._run = run
        self._seconds = seconds
        self._workers = workers
        self._running: list[tuple[float, int, _Work[Request]]] = []
        """A heap of (due, place in the order of beginning, work)."""
        self._queued: collections.deque[_Work[Request]] = collections.deque()
        self._num_begun = 0
        self._due: list[_Work[Request]] = []
        """Done, and not returned."""
        self._pending: set[str] = set()
        self._closed = False

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def submit(self, request: Request) -> None:
        sample_id: str = getattr(request, "sample_id")  # noqa: B009  (Request is anything that has one)
        check_submit(sample_id, self._pending, self._closed)
        seconds = self._seconds(request)
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds of {sample_id} must be finite and >= 0, not {seconds}")
        self._finish_due()
        self._pending.add(sample_id)
        self._queued.append(_Work(request, sample_id, seconds))
        self._begin(self._clock.now())

    def poll(self) -> list[Result]:
        self._finish_due()
        due, self._due = self._due, []
        self._pending.difference_update(work.sample_id for work in due)
        return [self._run(work.request, work.seconds) for work in due]

    def wait(self) -> list[Result]:
        """Advances the clock to the next due time, if nothing is due by now."""
        time = self.next_time()
        if time is not None and time > self._clock.now():
            self._clock.advance_to(time)
        return self.poll()

    def next_time(self) -> float | None:
        """At or before now: a result is there."""
        self._finish_due()
        if self._due:
            return self._clock.now()
        return self._running[0][0] if self._running else None

    def cancel(self, sample_ids: Iterable[str]) -> None:
        self._finish_due()
        gone = self._pending.intersection(sample_ids)
        self._pending -= gone
        self._due = [work for work in self._due if work.sample_id not in gone]
        self._running = [entry for entry in self._running if entry[2].sample_id not in gone]
        heapq.heapify(self._running)
        self._queued = collections.deque(work for work in self._queued if work.sample_id not in gone)
        self._begin(self._clock.now())

    def close(self) -> None:
        self.cancel(tuple(self._pending))
        self._closed = True

    def _begin(self, now: float) -> None:
        while self._queued and (self._workers is None or len(self._running) < self._workers):
            work = self._queued.popleft()
            heapq.heappush(self._running, (now + work.seconds, self._num_begun, work))
            self._num_begun += 1

    def _finish_due(self) -> None:
        """What is due by now, in order: each frees its worker for the next at its own time, not when we look."""
        while self._running and self._running[0][0] <= self._clock.now():
            due, _, work = heapq.heappop(self._running)
            self._due.append(work)
            self._begin(due)


def check_submit(sample_id: str, pending: Any, closed: bool) -> None:
    """What every `submit` refuses. pending: a container of sample ids."""
    if closed:
        raise ValueError(f"submit {sample_id}: this background is closed")
    if sample_id in pending:
        raise ValueError(f"submit {sample_id}: it has a request pending; wait for its result or cancel it first")


def describe(error: BaseException) -> str:
    """`ValueError: what it says (check.py:12 in check)`, in a bounded number of characters."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name})"
    return f"{type(error).__name__}: {shorten(text)}{place}" if text else f"{type(error).__name__}{place}"


def shorten(text: str, length: int = 500) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"
