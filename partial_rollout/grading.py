"""Rewards beside generation: graders run in processes of their own while the engine decodes.

    with GraderPool(grade, workers=4, timeout=30.0) as graders:     # grade(request) -> float, at a module's top level
        graders.submit(GradeRequest.of(sample, group.task, text))
        for grade in graders.poll(): ...                            # Grade(sample_id, reward, failure, ...)

Each worker is a fresh Python (fork and exec through `subprocess`), never a fork of this process: a forked copy of a
process whose other threads (torch's, numba's, CUDA's) hold locks can hang for good. It is started with its own small
main module, where multiprocessing's spawn and forkserver would import the program's, torch with it, in each worker.
Workers share nothing: one connection each, one request at a time, so that a worker which hangs or dies, also with the
interpreter's lock in its hands or halfway through a message, takes no other one along. It is ended by SIGKILL together
with the processes that its grader started, and replaced when the next request needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import math
import os
import pickle
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Pipe
from typing import Any

from longtail.partial_rollout import grader_worker
from longtail.partial_rollout.background import Arrivals, check_submit, describe
from longtail.sample import FinishReason, Sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradeRequest:
    """What a grader sees of a finished sample."""

    sample_id: str
    group_id: str
    task: Any
    """`Group.task`. Must be picklable."""
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    """The output, decoded by the caller."""
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, sample: Sample, task: Any, text: str) -> GradeRequest:
        return cls(
            sample_id=sample.id,
            group_id=sample.group_id,
            task=task,
            prompt_ids=sample.prompt_ids,
            output_ids=fixed(sample.output_ids),
            text=text,
            finish_reason=sample.finish_reason,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A reward, or why there is none: exactly one of the two."""

    sample_id: str
    reward: float | None
    """Finite."""
    failure: str | None
    """Timed out (and where), raised, crashed (and by which signal), or returned what is not a finite number."""
    seconds: float
    """From the moment when a worker got the request; 0.0 if none could be started."""
    grader: str
    """Name and version of the grader."""
    details: Mapping[str, Any] | None = None
    """What the grader said beside the reward."""

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.failure is None):
            raise ValueError(f"grade of {self.sample_id}: give a reward or a failure, not both or neither")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"grade of {self.sample_id}: the reward is {self.reward}; make it finite or a failure")


Grader = Callable[[GradeRequest], float]
"""Deterministic in its request, if runs are to be repeatable. May have attributes `name` and `version` (str). What it
returns may have an attribute `details`: a dict that JSON can say."""


class GraderPool:
    """Runs a grader in up to `workers` processes. A `Background[GradeRequest, Grade]`.

    grader: picklable; the first worker loads it before the constructor returns. timeout: seconds a request may take,
    the start of a worker not counted. workers: None is half of the usable cores, at least 1. version: recorded with
    each grade; None is `name@version` of the grader's attributes or the version alone, else its qualified name.

    What goes wrong with one request is its Grade: the others neither fail nor wait for it longer than its `timeout`.
    A worker's standard output goes to standard error. ValueError if the grader cannot be pickled here or loaded there.
    """

    START_SECONDS = 120.0
    """A worker that has not loaded the grader by then is ended, and its request fails."""

    def __init__(
        self, grader: Grader, *, workers: int | None = None, timeout: float = 30.0, version: str | None = None
    ) -> None:
        if grader_worker.is_worker:
            raise ValueError(
                "a grader's worker imports the program's main module, which makes a GraderPool at once: put what it "
                'does under `if __name__ == "__main__":`, or the grader into a module of its own'
            )
        if not callable(grader):
            raise ValueError(f"grader must be a function of a GradeRequest, not {grader!r}")
        if not (math.isfinite(timeout) and 0 < timeout <= threading.TIMEOUT_MAX):
            raise ValueError(f"timeout must be a finite number of seconds above 0, not {timeout}")
        workers = max(1, len(os.sched_getaffinity(0)) // 2) if workers is None else workers
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"workers must be an integer of at least 1, not {workers!r}")
        self.workers = workers
        self.timeout = float(timeout)
        self.grader = grader_name(grader) if version is None else version
        self._hello = pickle.dumps(
            {
                "timeout": self.timeout,
                "start": self.START_SECONDS,
                "main": grader_worker.main_module(),
                "grader": _pickle_grader(grader),
            }
        )
        self._grades: Arrivals[_Job, Grade] = Arrivals()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Of `_live`, `_closed` and the fields of jobs that several threads write."""
        self._live: set[_Worker] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        atexit.register(self.close)
        try:
            first = self._start()
        except BaseException as error:
            self.close()
            if isinstance(error, _NoAnswer):
                raise ValueError(f"grader {self.grader} cannot run in a worker process: {error}. {_FIX}") from error
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(first if i == 0 else None,), name=f"grader-{i}", daemon=True)
            for i in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_pending(self) -> int:
        return len(self._grades.pending)

    def submit(self, request: GradeRequest) -> None:
        check_submit(request.sample_id, self._grades.pending, self._closed)
        try:
            payload = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # the task's own methods run here
            raise ValueError(
                f"task of {request.sample_id} cannot be sent to a worker ({describe(error)}): make it "
                "plain data, or of a class at the top level of an importable module"
            ) from error
        job = self._grades.pending[request.sample_id] = _Job(request.sample_id, payload)
        self._jobs.put(job)

    def poll(self) -> list[Grade]:
        return self._grades.poll()

    def wait(self) -> list[Grade]:
        return self._grades.wait()

    def next_time(self) -> None:
        return None

    def cancel(self, sample_ids: Iterable[str]) -> None:
        """A request that runs loses its worker, by SIGKILL."""
        for sample_id in sample_ids:
            job = self._grades.pending.pop(sample_id, None)
            if job is None:
                continue
            with self._lock:
                job.is_cancelled = True
                if job.worker is not None:
                    job.worker.kill()

    def close(self) -> None:
        if os.getpid() != self._pid:  # a forked copy: the workers are not its own
            return
        with self._lock:
            self._closed = True
            for worker in self._live:
                worker.kill()
        self._grades.pending.clear()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(5.0)  # it has seen its worker die; longer than a moment only where the kernel cannot kill
        atexit.unregister(self.close)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows runs in the threads, one for each worker.

    def _serve(self, worker: _Worker | None) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            result: Grade | BaseException
            try:
                result, worker = self._grade(job, worker)
            except BaseException as error:  # a bug of ours: poll() and wait() raise it
                self._end(worker)
                result, worker = error, None
            job.payload = b""
            self._grades.put(job, result)
        self._end(worker)

    def _grade(self, job: _Job, worker: _Worker | None) -> tuple[Grade, _Worker | None]:
        """The grade, and the worker if it can take another request."""
        if worker is not None and worker.has_ended():  # while it was idle: no request's doing
            self._end(worker)
            worker = None
        if worker is None and not job.is_cancelled:
            try:
                worker = self._start()
            except (OSError, _NoAnswer) as error:
                return self._failed(job, 0.0, f"worker of the grader could not be started: {error}"), None
        with self._lock:
            if job.is_cancelled or worker is None:
                return self._failed(job, 0.0, "cancelled"), worker
            job.worker = worker
        start = time.monotonic()
        try:
            answer = worker.ask(job.payload, self.timeout)
        except _NoAnswer as error:
            seconds = time.monotonic() - start
            self._end(worker)
            return self._failed(job, seconds, f"grader {error}"), None
        finally:
            with self._lock:
                job.worker = None
        seconds = time.monotonic() - start
        if answer["failure"] is not None:
            return self._failed(job, seconds, answer["failure"]), worker
        grade = Grade(
            sample_id=job.sample_id,
            reward=answer["reward"],
            failure=None,
            seconds=seconds,
            grader=self.grader,
            details=answer["details"],
        )
        return grade, worker

    def _failed(self, job: _Job, seconds: float, failure: str) -> Grade:
        return Grade(sample_id=job.sample_id, reward=None, failure=failure, seconds=seconds, grader=self.grader)

    def _start(self) -> _Worker:
        """A worker that has loaded the grader."""
        worker = _Worker()
        with self._lock:
            self._live.add(worker)
            if self._closed:
                worker.kill()
        try:
            failure = worker.ask(self._hello, self.START_SECONDS)["failure"]
            if failure is not None:
                raise _NoAnswer(failure)
        except BaseException:
            self._end(worker)
            raise
        return worker

    def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._live.discard(worker)
            worker.end()


class _Job:
    __slots__ = ("is_cancelled", "payload", "sample_id", "worker")

    def __init__(self, sample_id: str, payload: bytes) -> None:
        self.sample_id = sample_id
        self.payload = payload
        self.is_cancelled = False
        self.worker: _Worker | None = None
        """Whose request it is now: the one to end when the job is cancelled."""


class _NoAnswer(Exception):
    """The worker gave none: what happened to it."""


class _Worker:
    """A worker process, from this side. Of one thread, but for `kill`, which any may call before `end`."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._stack, stack = os.pipe()
        command = [sys.executable, "-P", "-c", grader_worker.BOOT, json.dumps([str(path) for path in sys.path])]
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(stack)],
                pass_fds=(theirs.fileno(), stack),
                stdin=subprocess.DEVNULL,
                stdout=2,  # ours may be read by a program
                start_new_session=True,  # Ctrl-C is ours; and a process group holds what a grader starts
            )
        except BaseException:
            self._connection.close()
            os.close(self._stack)
            raise
        finally:
            theirs.close()
            os.close(stack)
        self._reaping = threading.Lock()
        """Held to signal the process and to reap it: afterwards its number may be another's."""

    def ask(self, payload: bytes, seconds: float) -> dict[str, Any]:
        """Its answer. _NoAnswer if there is none in time, or it ended."""
        try:
            self._connection.send_bytes(payload)
            if not self._connection.poll(seconds):
                raise _NoAnswer(f"timed out after {seconds:g} s{self._place()}")
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
            return answer
        except (EOFError, OSError, ValueError) as error:
            raise _NoAnswer(self._ending()) from error

    def has_ended(self) -> bool:
        """Asked between two requests, when it says nothing: what can be read is its end."""
        return self._connection.poll(0)

    def kill(self) -> None:
        with self._reaping:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills it, with what its grader started, and frees what it holds here."""
        self.kill()
        with self._reaping, contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._connection.close()
        os.close(self._stack)

    def _ending(self) -> str:
        """How it ended by itself. Leaves it to be reaped."""
        for _ in range(200):
            info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if info is not None:
                break
            time.sleep(0.005)
        else:
            return "closed its worker's connection"
        if info.si_code == os.CLD_EXITED:
            return f"ended its process with exit code {info.si_status}"
        name = signal.Signals(info.si_status).name
        hint = " (out of memory?)" if info.si_status == signal.SIGKILL else ""
        return f"crashed its process: {name}{hint}"

    def _place(self) -> str:
        """Where it is, ` (check.py:12 in check)`, by its own account; empty if it gives none."""
        os.kill(self._process.pid, signal.SIGUSR1)
        if select.select([self._stack], [], [], 0.5)[0]:
            time.sleep(0.01)  # its lines are written one by one
            for path, line, name in _FRAME.findall(os.read(self._stack, 1 << 16).decode(errors="replace")):
                if not path.startswith("<"):  # <frozen runpy>, <string>
                    return f" ({os.path.basename(path)}:{line} in {name})"
        return ""


_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


def fixed(token_ids: Any) -> tuple[int, ...]:
    """That nothing changes any more; those of a simulated sample stay rules to compute them from."""
    frozen = getattr(token_ids, "frozen", None)
    return tuple(token_ids) if frozen is None else frozen()


def grader_name(grader: Grader) -> str:
    """`name@version` of its attributes, or the version alone; else its qualified name (of a partial its function's)."""
    name, version = getattr(grader, "name", None), getattr(grader, "version", None)
    if isinstance(version, str):
        return f"{name}@{version}" if isinstance(name, str) else version
    while isinstance(grader, functools.partial):
        grader = grader.func
    named = grader if hasattr(grader, "__qualname__") else type(grader)
    return f"{named.__module__}.{named.__qualname__}"


def _pickle_grader(grader: Grader) -> bytes:
    try:
        return pickle.dumps(grader, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # its own methods run here
        why = describe(error)
        raise ValueError(f"grader {grader_name(grader)} cannot be sent to a worker process: {why}. {_FIX}") from error


_FIX = (
    "Define it at the top level of an importable module (no lambda, no inner function, not in a notebook), or pass an "
    "object of such a class whose attributes can be pickled"
)
