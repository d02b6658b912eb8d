"""The process in which a grader runs, one request after another: the child's side of `grading.GraderPool`.

It is a Python of its own that imports this module, `grading` (both light) and what the pickled grader names; the
program's main module only if a grader or a task was defined in it. It reads pickles and answers in JSON: a grader that
runs code of the model must not be able to hand a pickle to the trainer.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import io
import json
import math
import numbers
import os
import pickle
import runpy
import signal
import sys
import types
from multiprocessing.connection import Connection
from typing import Any

from longtail.partial_rollout.background import describe, shorten

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from longtail.partial_rollout.grader_worker import serve
serve(*map(int, sys.argv[2:]))
"""
"""`python -P -c BOOT sys_path connection traceback_pipe`"""

DEADLINE_GRACE = 5.0
"""A worker whose parent was killed, and that therefore nobody ends, ends itself this long after the timeout of what it
does (s): of a grading, or of loading its grader."""

is_worker = False
"""This process is a grader's."""

_main: str | None = None
"""The parent's main module: `-m name`, or a path. None: there is none to import, or it was imported."""


def serve(connection_fd: int, traceback_fd: int) -> None:
    """Answers until the parent closes its end."""
    global is_worker, _main
    is_worker = True
    # On SIGUSR1 the stack is written by a C handler, which needs no lock of the interpreter: where does it hang?
    faulthandler.register(signal.SIGUSR1, file=traceback_fd, all_threads=False)
    pid = os.getpid()
    connection = Connection(connection_fd)
    try:
        hello = pickle.loads(connection.recv_bytes())
        timeout, _main = hello["timeout"], hello["main"]
        with open(os.devnull, "w") as null:
            faulthandler.dump_traceback_later(hello["start"] + DEADLINE_GRACE, exit=True, file=null)
            try:
                grader = load(hello["grader"])
            except BaseException as error:
                connection.send_bytes(json.dumps({"failure": describe(error)}).encode())
                return
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(json.dumps({"failure": None}).encode())
            while True:
                payload = connection.recv_bytes()
                faulthandler.dump_traceback_later(timeout + DEADLINE_GRACE, exit=True, file=null)
                answer = grade(grader, payload)
                if os.getpid() != pid:  # the grader forked, and this is the child
                    os._exit(1)
                faulthandler.cancel_dump_traceback_later()
                connection.send_bytes(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def grade(grader: Any, payload: bytes) -> bytes:
    """The answer, as JSON: a reward and its details, or a failure."""
    reward, details, failure = _graded(grader, payload)
    try:
        return json.dumps({"reward": reward, "details": details, "failure": failure}).encode()
    except BaseException as error:  # methods of what the grader returned run here
        why = f"grader returned details that JSON cannot say: {describe(error)}"
        return json.dumps({"reward": None, "details": None, "failure": why}).encode()


def _graded(grader: Any, payload: bytes) -> tuple[float | None, dict[str, Any] | None, str | None]:
    """(reward, details, None) or (None, None, failure)."""
    try:
        request = load(payload)
    except BaseException as error:  # the task's own methods run here
        return None, None, f"request could not be loaded in the grader's worker: {describe(error)}"
    try:
        reward = grader(request)
        details = getattr(reward, "details", None)
        if hasattr(reward, "item"):  # a scalar of numpy or torch
            reward = reward.item()
        if not isinstance(reward, numbers.Real):
            return None, None, f"grader returned {shorten(repr(reward))} ({type(reward).__name__}), not a number"
        reward, details = float(reward), None if details is None else dict(details)
    except BaseException as error:  # SystemExit too: whatever a grader raises is data
        return None, None, f"grader raised {describe(error)}"
    if not math.isfinite(reward):
        return None, None, f"grader returned {reward}, not a finite number"
    return reward, details, None


def load(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            _import_main()
        return super().find_class(module, name)


def _import_main() -> None:
    """The parent's main module under the name __mp_main__, as multiprocessing does, so that what stands under
    `if __name__ == "__main__"` does not run."""
    global _main
    main, _main = _main, None
    if main is None:
        return
    if main.startswith("-m "):
        content = runpy.run_module(main.removeprefix("-m "), run_name="__mp_main__", alter_sys=True)
    else:
        content = runpy.run_path(main, run_name="__mp_main__")
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def main_module() -> str | None:
    """Of this process, for the `main` of a worker's hello. None for a notebook or `python -c`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__" and importlib.util.find_spec(spec.name) is not None:
        return f"-m {spec.name}"
    path = getattr(main, "__file__", None)
    return os.path.abspath(path) if path is not None and os.path.isfile(path) else None
