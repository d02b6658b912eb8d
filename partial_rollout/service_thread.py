"""The thread that alone touches an engine: it does what others ask for between two steps, and tells them when it is
done. It sleeps while there is nothing to do."""

from __future__ import annotations

import atexit
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from longtail.errors import LongtailError
from longtail.partial_rollout.service_request import Waiter, wake

T = TypeVar("T")
Refuse = Callable[[BaseException], object]


class ServiceStopped(LongtailError):
    """The service is closed, or its engine has failed (`__cause__`): nothing will be answered any more."""


class Work(Protocol):
    """What the thread works for. All of it is called on the thread."""

    def is_ready(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def step(self) -> None: ...

    def seconds_left(self) -> float | None:
        """Until `step` has something to do, if nobody calls; None: never."""
        ...

    def record(self) -> None:
        """Something has changed; who is told of it afterwards may ask what."""
        ...

    def finish(self) -> None:
        """The end that was asked for."""
        ...

    def give_up(self, reason: ServiceStopped) -> None:
        """The last call, whatever came before: those who still wait are to be refused (`refuse_later`)."""
        ...


class ServiceThread:
    """A wrong call (ValueError, LongtailError) is its caller's; whatever else is raised ends the thread."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self.stopped: ServiceStopped | None = None
        self._work = work
        self._changed = threading.Condition()
        # These two, with the lock:
        self._calls: deque[tuple[Callable[[], object], Refuse]] = deque()
        self._stopping = False
        # The thread's own:
        self._answers: list[Callable[[], object]] = []
        self._waiters: list[Waiter] = []
        self._thread = threading.Thread(target=self._run, name="longtail-service", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.close)  # a thread that is in the middle of a step would take the process down

    def close(self) -> None:
        """Ends it after the step in hand, and waits for that."""
        atexit.unregister(self.close)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- for other threads --------------------------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Has it called between two steps."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.submit(lambda: self.answer_later(future, function()), future.set_exception)
        return future

    def submit(self, function: Callable[[], object], refuse: Refuse) -> None:
        """As `call`, where the function itself sees to the answers. refuse: told what it raised. ServiceStopped if it
        will not be called."""
        with self._changed:
            if self.stopped is not None or self._stopping:
                raise self.stopped or ServiceStopped(f"{self.name} is closed")
            self._calls.append((function, refuse))
            self._changed.notify_all()

    # -- for the work, on the thread ----------------------------------------------------------------------------------

    def answer_later(self, future: Future[Any], value: Any) -> None:
        """When `record` has been called."""
        self._answers.append(lambda: future.set_result(value))

    def refuse_later(self, refuse: Refuse, error: BaseException) -> None:
        self._answers.append(functools.partial(refuse, error))

    def wake_later(self, waiter: Waiter | None) -> None:
        if waiter is not None:
            self._waiters.append(waiter)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reason = ServiceStopped(f"{self.name} is closed")
        try:
            while self._turn():
                pass
            self._work.finish()
            self._tell()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            reason = ServiceStopped(f"{self.name}: the engine failed: {error!r}")
            reason.__cause__ = error
        with self._changed:
            self.stopped = reason
            calls, self._calls = self._calls, deque()
        for _, refuse in calls:
            self.refuse_later(refuse, reason)
        self._work.give_up(reason)
        self._give()

    def _turn(self) -> bool:
        """The calls that have come, and a step. -> False when it is to end."""
        work = self._work
        with self._changed:
            while not (self._calls or self._stopping or work.is_ready() or work.seconds_left() == 0.0):
                self._changed.wait(work.seconds_left())
            if self._stopping:
                return False
            calls, self._calls = self._calls, deque()
        while calls:
            function, refuse = calls[0]
            try:
                function()
            except (ValueError, LongtailError) as error:
                self.refuse_later(refuse, error)
            except BaseException:
                with self._changed:
                    self._calls.extendleft(reversed(calls))  # they are refused at the end
                raise
            calls.popleft()
        if self._answers:
            self._tell()
        work.step()
        self._tell()
        return True

    def _tell(self) -> None:
        self._work.record()
        self._give()

    def _give(self) -> None:
        answers, self._answers = self._answers, []
        waiters, self._waiters = self._waiters, []
        for answer in answers:
            answer()
        wake(waiters)
