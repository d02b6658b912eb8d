"""A thread that generates while the caller does something else, and the lock that both take turns with."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator

NAP_SECONDS = 0.01
"""Between two looks while there is nothing to do."""


class Turn:
    """A lock that its background thread gives up as soon as a caller wants it. One thread may take it again inside.

    on_error: called, with the lock, where an exception leaves it."""

    def __init__(self, on_error: Callable[[], object]) -> None:
        self._on_error = on_error
        self._lock = threading.RLock()
        self._callers = 0
        self._count = threading.Condition()

    def __enter__(self) -> None:
        with self._count:
            self._callers += 1
        try:
            self._lock.acquire()
        except BaseException:  # Ctrl-C
            self._leave()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._on_error()
        finally:
            self._lock.release()
            self._leave()

    def _leave(self) -> None:
        with self._count:
            self._callers -= 1
            self._count.notify_all()

    @contextlib.contextmanager
    def last(self) -> Iterator[None]:
        """Entered when no caller wants it."""
        with self._count:
            self._count.wait_for(lambda: not self._callers)
        with self._lock:
            yield


class Loop:
    """Works in a thread, until `stop`. After an error it stands still until a caller has heard of it."""

    def __init__(self, work: Callable[[], bool], turn: Turn) -> None:
        self._work, self._turn = work, turn
        self._stopping = False
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._idle = False
        self._thread = threading.Thread(target=self._run, name="longtail-rollout", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # a thread that is in the middle of a step would take the process down

    def _run(self) -> None:
        while not self._stopping:
            error: BaseException | None = None
            did = False
            try:
                with self._turn.last():
                    did = self._stopping or self._work()
            except BaseException as raised:  # told to the caller that waits
                error = raised
            with self._changed:
                self._error, self._idle = error, not did
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._error is None or self._stopping)
                if not did and not self._stopping:
                    self._changed.wait(NAP_SECONDS)

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Until it is over, there is nothing to do, or the thread has ended. What it raised is raised here."""
        with self._changed:
            self._idle = False
        while not self._stopping:
            with self._changed:
                error, self._error = self._error, None
                self._changed.notify_all()
                idle = self._idle
            if error is not None:
                raise error
            with self._turn:
                if idle or is_over():
                    return
            with self._changed:
                if self._error is None and not self._idle:
                    self._changed.wait(0.05)

    def stop(self) -> BaseException | None:
        """Ends the thread after the step in hand. -> what it raised that nobody has heard of."""
        atexit.unregister(self.stop)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        error, self._error = self._error, None
        return error
