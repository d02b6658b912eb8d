"""Graders for the tests of the pool. Worker processes import this file by its bare name (see `test_grading.graders`).

`task` of a request says what to do with it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longtail.partial_rollout.grading import GradeRequest


def length(request: GradeRequest) -> float:
    return float(len(request.output_ids))


def obey(request: GradeRequest) -> Any:
    """task: (verb, argument)."""
    verb, argument = request.task
    return VERBS[verb](argument)


def hang(path: str | None) -> float:
    if path:
        Path(path).write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


class Fatal:
    """Loading it kills the process that started this one, and does not end."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _fatal, (self.path,)

    def __call__(self, request: GradeRequest) -> float:
        raise AssertionError


def _fatal(path: str) -> Any:
    with open(path, "a") as file:
        print(os.getpid(), file=file)
    os.kill(os.getppid(), signal.SIGKILL)
    return hang(None)


def hang_in_c(_: Any) -> Any:
    """Holds the interpreter's lock for ever: no handler of Python's, and no other thread, runs again."""
    return sum(itertools.repeat(0))


def hang_with_signals_blocked(path: str | None) -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return hang(path)


def hang_with_child(path: str) -> float:
    """A child of the grader that would outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    return hang(None)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def segfault(_: Any) -> float:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)
    return 0.0


def kill_self(number: int) -> float:
    os.kill(os.getpid(), number)
    return hang(None)


def hog(_: Any) -> float:
    """Out of memory as Python sees it."""
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    return float(len(bytearray(2**32)))


def die_soon(seconds: float) -> float:
    """Answers, and dies while its worker is idle."""
    threading.Timer(seconds, os._exit, (9,)).start()
    return 1.0


def fork(_: Any) -> float:
    """The child returns as well."""
    pid = os.fork()
    if pid == 0:
        return -1.0
    os.waitpid(pid, 0)
    return 2.0


def talk(text: str) -> float:
    print(text, flush=True)
    return 1.0


def read_input(_: Any) -> float:
    return float(len(sys.stdin.read()))


def fail(text: str) -> float:
    raise ValueError(text)


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("none")


class NeedsTwo(Exception):
    """Cannot be unpickled by the default rule."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_oddly(kind: str) -> float:
    raise {"no text": NoText(), "needs two": NeedsTwo(1, 2), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[
        kind
    ]


def modules(_: Any) -> Any:
    """Fails, naming the heavy modules that its worker has loaded."""
    heavy = {"torch", "numpy", "numba", "pandas", "transformers", "triton", "pytest"} & set(sys.modules)
    raise ValueError(f"heavy: {sorted(heavy)}")


VERBS: dict[str, Callable[[Any], Any]] = {
    "call": lambda argument: argument,
    "hang": hang,
    "hang_in_c": hang_in_c,
    "hang_with_signals_blocked": hang_with_signals_blocked,
    "hang_with_child": hang_with_child,
    "sleep": sleep,
    "exit": os._exit,
    "segfault": segfault,
    "kill": kill_self,
    "hog": hog,
    "die_soon": die_soon,
    "fork": fork,
    "talk": talk,
    "read_input": read_input,
    "fail": fail,
    "fail_oddly": fail_oddly,
    "modules": modules,
    "pid": lambda _: os.getpid(),
}


class Detailed(float):
    details: Any


class Named:
    """A grader with a name and a version, whose rewards have details: those that the task says."""

    name, version = "named", "3"

    def __call__(self, request: GradeRequest) -> float:
        reward = Detailed(0.5)
        reward.details = object() if request.task == "an object" else request.task
        if request.task == "a set":
            reward.details = {"a": {1, 2}}
        return reward


class Threshold:
    """A grader with a version, and with state."""

    version = "threshold-2"

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, request: GradeRequest) -> bool:
        return len(request.output_ids) > self.length


class Locked(Threshold):
    def __init__(self) -> None:
        super().__init__(0)
        self.lock = threading.Lock()


def _elsewhere(pid: int) -> OnlyHere:
    if os.getpid() != pid:
        raise ImportError("this model is only where it was made")
    return OnlyHere()


class OnlyHere:
    """Can be pickled here and not be loaded there. As a grader or a task."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _elsewhere, (os.getpid(),)

    def __call__(self, request: GradeRequest) -> float:
        return 0.0


above_two = functools.partial(Threshold(2))
