"""Graders in worker processes: what can go wrong with one, and that nothing else notices."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.processes import is_running, until

from longtail import Sample, SamplingParams
from longtail.partial_rollout.background import Background
from longtail.partial_rollout.grading import Grade, Grader, GradeRequest, GraderPool

Make = Callable[..., GraderPool]


@pytest.fixture
def graders(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As a user's module: on sys.path, which workers are told."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("toy_graders")


@pytest.fixture
def make(graders: ModuleType) -> Iterator[Make]:
    """Pools that obey, closed at the end."""
    pools: list[GraderPool] = []

    def make(grader: Grader = graders.obey, **options: Any) -> GraderPool:
        pools.append(GraderPool(grader, **{"workers": 1, "timeout": 60.0, **options}))
        return pools[-1]

    yield make
    for pool in pools:
        start = time.monotonic()
        pool.close()
        assert time.monotonic() - start < 5.0


def ask(name: str, *task: Any, output: int = 3) -> GradeRequest:
    return GradeRequest(
        sample_id=name,
        group_id="g",
        task=task,
        prompt_ids=(1, 2),
        output_ids=tuple(range(output)),
        text="text",
        finish_reason="stop",
    )


def only(pool: GraderPool, request: GradeRequest) -> Grade:
    pool.submit(request)
    (grade,) = pool.wait()
    assert grade.sample_id == request.sample_id
    assert pool.num_pending == 0 and pool.poll() == [] and pool.wait() == []
    return grade


def rest(pool: GraderPool) -> dict[str, Grade]:
    grades: dict[str, Grade] = {}
    while pool.num_pending:
        for grade in pool.wait():
            assert grade.sample_id not in grades
            grades[grade.sample_id] = grade
    return grades


# ---- rewards


def test_a_request_is_what_the_grader_sees_of_a_sample() -> None:
    sample = Sample(id="g/1", group_id="g", index=1, prompt_ids=(5, 6), params=SamplingParams(), seed=1)
    sample.append(7, -0.5, 0, "native", "computed")  # type: ignore[arg-type]
    sample.finish_reason = "stop"
    request = GradeRequest.of(sample, {"answer": 3}, "three")
    sample.append(8, -0.5, 0, "native", "computed")  # type: ignore[arg-type]
    assert request == GradeRequest(
        sample_id="g/1",
        group_id="g",
        task={"answer": 3},
        prompt_ids=(5, 6),
        output_ids=(7,),
        text="three",
        finish_reason="stop",
    )


def test_grades_come_back_under_their_names(make: Make, graders: ModuleType) -> None:
    made = make(graders.length, workers=2)
    pool: Background[GradeRequest, Grade] = made
    for i in range(50):
        pool.submit(ask(f"s{i}", output=i))
    assert pool.num_pending == 50
    assert pool.next_time() is None
    assert {name: grade.reward for name, grade in rest(made).items()} == {f"s{i}": float(i) for i in range(50)}


@pytest.mark.parametrize(("value", "reward"), [(1, 1.0), (True, 1.0), (-2.5, -2.5), ("numpy", 0.25)])
def test_numbers(make: Make, value: Any, reward: float) -> None:
    if value == "numpy":
        np = importlib.import_module("numpy")
        value = np.float32(0.25)
    assert only(make(), ask("s", "call", value)).reward == reward


@pytest.mark.parametrize(
    ("grader", "version", "name"),
    [
        ("length", None, "toy_graders.length"),
        ("length", "v7", "v7"),
        ("Threshold", None, "threshold-2"),
        ("above_two", None, "toy_graders.Threshold"),
    ],
)
def test_the_grader_is_named(make: Make, graders: ModuleType, grader: str, version: str | None, name: str) -> None:
    made = graders.Threshold(2) if grader == "Threshold" else getattr(graders, grader)
    grade = only(make(made, version=version), ask("s"))
    assert grade.grader == name and grade.reward == (3.0 if grader == "length" else 1.0)


def test_details_come_along(make: Make, graders: ModuleType) -> None:
    pool = make(graders.Named())
    assert pool.grader == "named@3"
    details = {"answer": "\u00e9", "parts": {"a": [1, 0.5, None]}}
    grade = only(pool, dataclasses.replace(ask("s"), task=details))
    assert (grade.reward, grade.details, grade.grader) == (0.5, details, "named@3")
    assert only(pool, dataclasses.replace(ask("s"), task=None)).details is None
    for task in ("a set", "an object"):  # what JSON cannot say, and what is no dict
        refused = only(pool, dataclasses.replace(ask("s"), task=task))
        assert refused.reward is None and refused.failure is not None and refused.details is None
        assert "details" in refused.failure or "object" in refused.failure


def test_what_a_grade_refuses() -> None:
    fields: dict[str, Any] = {"sample_id": "s", "seconds": 0.0, "grader": "g"}
    for reward, failure in ((None, None), (1.0, "also"), (math.nan, None), (math.inf, None)):
        with pytest.raises(ValueError, match="grade of s"):
            Grade(reward=reward, failure=failure, **fields)


# ---- what is data


@pytest.mark.parametrize(
    ("task", "failure"),
    [
        (("call", math.nan), "grader returned nan, not a finite number"),
        (("call", math.inf), "grader returned inf, not a finite number"),
        (("call", None), "grader returned None (NoneType), not a number"),
        (("call", "0.5"), "grader returned '0.5' (str), not a number"),
        (("call", 10**400), "grader raised OverflowError: int too large to convert to float"),
        (("fail", "no number"), "grader raised ValueError: no number (toy_graders.py:"),
        (("fail", "x" * 10**6), f"grader raised ValueError: {'x' * 500}... (1000000 characters) (toy_graders.py:"),
        (("fail_oddly", "no text"), "grader raised NoText: (its text cannot be made)"),
        (("fail_oddly", "needs two"), "grader raised NeedsTwo: 1 and 2"),
        (("fail_oddly", "exit"), "grader raised SystemExit: 3"),
        (("fail_oddly", "interrupt"), "grader raised KeyboardInterrupt"),
        (("hog", None), "grader raised MemoryError"),
    ],
)
def test_a_failure_leaves_the_worker_alive(make: Make, task: tuple[Any, ...], failure: str) -> None:
    pool = make()
    pid = only(pool, ask("before", "pid", None)).reward
    grade = only(pool, ask("s", *task))
    assert grade.reward is None and grade.failure is not None and grade.failure.startswith(failure)
    assert len(grade.failure) < 700
    assert only(pool, ask("after", "pid", None)).reward == pid


@pytest.mark.parametrize(
    ("task", "failure"),
    [
        (("exit", 3), "grader ended its process with exit code 3"),
        (("exit", 0), "grader ended its process with exit code 0"),
        (("segfault", None), "grader crashed its process: SIGSEGV"),
        (("kill", signal.SIGKILL), "grader crashed its process: SIGKILL (out of memory?)"),
        (("kill", signal.SIGTERM), "grader crashed its process: SIGTERM"),
    ],
)
def test_a_crash_is_named_and_the_worker_replaced(make: Make, task: tuple[Any, ...], failure: str) -> None:
    pool = make()
    pid = only(pool, ask("before", "pid", None)).reward
    grade = only(pool, ask("s", *task))
    assert grade == Grade(sample_id="s", reward=None, failure=failure, seconds=grade.seconds, grader="toy_graders.obey")
    assert grade.seconds < 30.0
    assert only(pool, ask("after", "pid", None)).reward not in (pid, None)


@pytest.mark.parametrize("verb", ["hang", "hang_in_c", "hang_with_signals_blocked"])
def test_a_hanging_grader_is_ended_at_its_timeout(make: Make, verb: str) -> None:
    pool = make(timeout=0.7)
    pid = only(pool, ask("before", "pid", None)).reward
    grade = only(pool, ask("s", verb, None))
    assert grade.failure is not None and grade.failure.startswith("grader timed out after 0.7 s (toy_graders.py:")
    assert f" in {verb.removesuffix('_with_signals_blocked')})" in grade.failure
    assert 0.7 <= grade.seconds < 20.0
    assert pid is not None and not is_running(int(pid))
    assert only(pool, ask("after", "call", 1.0)).reward == 1.0


def test_a_worker_that_dies_between_requests_takes_none_along(make: Make) -> None:
    pool = make()
    pid = only(pool, ask("before", "pid", None)).reward
    assert only(pool, ask("s", "die_soon", 0.05)).reward == 1.0
    assert pid is not None and until(lambda: not is_running(int(pid)))
    assert only(pool, ask("after", "call", 1.0)).reward == 1.0


def test_a_grader_that_forks_answers_once(make: Make) -> None:
    pool = make()
    assert only(pool, ask("s", "fork", None)).reward == 2.0
    assert only(pool, ask("after", "call", 5.0)).reward == 5.0


def test_standard_streams(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """Our standard output may be read by a program; nobody types into a grader."""
    pool = make()
    assert only(pool, ask("s", "talk", "a grader's word")).reward == 1.0
    assert only(pool, ask("t", "read_input", None)).reward == 0.0
    out, err = capfd.readouterr()
    assert out == "" and "a grader's word" in err


# ---- others go on


def test_hanging_requests_delay_nobody_but_themselves(make: Make) -> None:
    """200 requests of which 5 hang, 3 of them with the interpreter's lock held: while the hanging ones are waited for
    the other worker takes all the rest, and each hanging one costs its timeout, not more."""
    pool = make(workers=2, timeout=1.5)
    hanging = {f"s{i}" for i in (0, 40, 80, 120, 160)}
    for i in range(200):
        name = f"s{i}"
        verb = ("hang" if i % 80 else "hang_in_c") if name in hanging else "call"
        pool.submit(ask(name, verb, None if name in hanging else float(i)))
    # The first blocks one worker, the 40th the other one: the 39 between come back while both are at their first.
    start = time.monotonic()
    early: set[str] = set()
    while len(early) < 39:
        early |= {grade.sample_id for grade in pool.wait()}
    assert early == {f"s{i}" for i in range(1, 40)}
    assert time.monotonic() - start < 1.5
    late = rest(pool)
    assert {name for name, grade in late.items() if grade.reward is None} == hanging
    assert all("timed out after 1.5 s" in str(late[name].failure) for name in hanging)
    assert all(grade.reward == float(name[1:]) for name, grade in late.items() if name not in hanging)
    assert all(grade.seconds < 1.5 for name, grade in late.items() if name not in hanging)
    assert time.monotonic() - start < 5 * 1.5 + 10.0  # one after another at worst, and room for a loaded machine


def test_a_slow_grader_does_not_hold_up_poll(make: Make) -> None:
    pool = make(workers=2)
    pool.submit(ask("slow", "sleep", 1.0))
    assert pool.poll() == []
    pool.submit(ask("quick", "call", 1.0))
    assert [grade.sample_id for grade in pool.wait()] == ["quick"]
    assert [grade.sample_id for grade in pool.wait()] == ["slow"]


# ---- cancel and close


def test_cancel_ends_what_runs_and_what_waits(make: Make, tmp_path: Path) -> None:
    pool = make()
    file = tmp_path / "pid"
    pool.submit(ask("running", "hang", str(file)))
    pool.submit(ask("waiting", "call", 1.0))
    pool.submit(ask("other", "call", 2.0))
    assert until(lambda: file.exists() and file.read_text() != "")
    pool.cancel(["running", "waiting", "unknown"])
    assert pool.num_pending == 1
    assert {name: grade.reward for name, grade in rest(pool).items()} == {"other": 2.0}
    assert not is_running(int(file.read_text()))


def test_a_cancelled_sample_can_be_submitted_again(make: Make) -> None:
    """Its late first grade is not taken for the second."""
    pool = make()
    pool.submit(ask("s", "call", 1.0))
    assert until(lambda: not pool._grades._arrived.empty())
    pool.cancel(["s"])
    pool.submit(ask("s", "call", 2.0))
    assert [grade.reward for grade in pool.wait()] == [2.0]
    assert pool.num_pending == 0 and pool.wait() == []


def test_nothing_outlives_the_pool(make: Make, tmp_path: Path) -> None:
    """Not a hanging grader, nor what it has started."""
    pool = make(workers=2)
    files = [tmp_path / "worker", tmp_path / "child"]
    pool.submit(ask("a", "hang_with_signals_blocked", str(files[0])))
    pool.submit(ask("b", "hang_with_child", str(files[1])))
    assert until(lambda: all(file.exists() and file.read_text() for file in files))
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5.0
    assert until(lambda: not any(is_running(int(file.read_text())) for file in files), 5.0)
    assert pool.num_pending == 0 and pool.wait() == []
    with pytest.raises(ValueError, match="closed"):
        pool.submit(ask("c", "call", 1.0))
    pool.close()


def test_a_child_of_a_grader_ends_with_its_timeout(make: Make, tmp_path: Path) -> None:
    pool = make(timeout=1.5)
    file = tmp_path / "child"
    assert "timed out" in str(only(pool, ask("s", "hang_with_child", str(file))).failure)
    assert until(lambda: not is_running(int(file.read_text())), 5.0)


# ---- misuse


def test_what_cannot_be_sent_is_refused(make: Make, graders: ModuleType) -> None:
    for grader in (lambda request: 1.0, graders.Locked()):
        with pytest.raises(ValueError, match=r"cannot be sent to a worker process: .*Define it at the top level"):
            make(grader)
    pool = make()
    with pytest.raises(ValueError, match=r"task of s cannot be sent to a worker \(TypeError: .*plain data"):
        pool.submit(ask("s", "call", (i for i in range(3))))
    assert pool.num_pending == 0
    assert only(pool, ask("s", "call", 1.0)).reward == 1.0


def test_what_cannot_be_loaded_there(make: Make, graders: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"cannot run in a worker process: ImportError: this model is only where"):
        make(graders.OnlyHere())
    grade = only(make(), ask("s", "call", graders.OnlyHere()))
    assert grade.failure is not None and grade.failure.startswith(
        "request could not be loaded in the grader's worker: ImportError: this model is only"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [({"workers": 0}, "workers"), ({"workers": 1.5}, "workers")]
    + [({"timeout": t}, "timeout") for t in (0.0, -1.0, math.inf, math.nan)],
)
def test_bad_options(make: Make, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says} must be"):
        make(**options)


def test_one_request_for_a_sample(make: Make) -> None:
    pool = make()
    pool.submit(ask("s", "sleep", 0.2))
    with pytest.raises(ValueError, match="submit s: it has a request pending"):
        pool.submit(ask("s", "call", 1.0))
    assert [grade.reward for grade in pool.wait()] == [0.2]


# ---- the process around it


def test_workers_are_light(make: Make) -> None:
    """This process has loaded torch and pytest."""
    assert "torch" in sys.modules
    assert str(only(make(), ask("s", "modules", None)).failure).startswith("grader raised ValueError: heavy: []")


def run(code: str, tmp_path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "program.py"
    file.write_text(code)
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, str(file)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, **options)


PROGRAM = """
import os, sys, time
from longtail.partial_rollout.grading import GraderPool, GradeRequest

def grade(request):
    return float(len(request.text))

def request(task=None):
    return GradeRequest(sample_id="s", group_id="g", task=task, prompt_ids=(1,), output_ids=(2,), text="four",
                        finish_reason="stop")
"""


def test_a_grader_of_the_main_module(tmp_path: Path) -> None:
    code = f"""{PROGRAM}
if __name__ == "__main__":
    with GraderPool(grade, workers=1) as pool:
        pool.submit(request())
        (grade,) = pool.wait()
        print(grade.reward, grade.grader)
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4.0 __main__.grade\n", "")


def test_a_main_module_without_a_guard_is_told_so(tmp_path: Path) -> None:
    done = run(f"{PROGRAM}\npool = GraderPool(grade)", tmp_path)
    assert done.returncode == 1 and 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]


def test_the_main_module_is_not_run_for_a_grader_of_another(tmp_path: Path) -> None:
    """Nor because the text of an answer names it."""
    code = f"""{PROGRAM}
print("once")
import toy_graders
pool = GraderPool(toy_graders.obey, workers=1)
pool.submit(request(("call", 1.0)))
print(pool.wait()[0].reward)
pool.submit(request(("fail", "__main__")))
print(pool.wait()[0].failure[:40])
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "once\n1.0\ngrader raised ValueError: __main__ (toy_\n"


def test_the_interpreter_ends_while_a_grader_hangs(tmp_path: Path) -> None:
    code = f"""{PROGRAM}
import toy_graders
pool = GraderPool(toy_graders.obey, workers=2, timeout=600)
pool.submit(request(("hang", {str(tmp_path / "pid")!r})))
while not os.path.exists({str(tmp_path / "pid")!r}):
    time.sleep(0.01)
raise RuntimeError("the trainer fails")
"""
    done = run(code, tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("RuntimeError: the trainer fails\n")
    assert until(lambda: not is_running(int((tmp_path / "pid").read_text())), 5.0)


def test_an_interrupt_in_wait(tmp_path: Path) -> None:
    """Ctrl-C goes to the process group of the terminal: the program gets it, its workers do not."""
    code = f"""{PROGRAM}
import signal, threading, toy_graders
pool = GraderPool(toy_graders.obey, workers=1, timeout=600)
pool.submit(request(("sleep", 1.0)))
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
threading.Timer(0.3, os.killpg, (os.getpgrp(), signal.SIGINT)).start()
try:
    pool.wait()
except KeyboardInterrupt:
    print("interrupted", pool.num_pending, flush=True)
print(pool.wait()[0].reward)
pool.close()
"""
    done = run(code, tmp_path, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted 1\n1.0\n", "")


def test_workers_end_after_their_parent_was_killed(tmp_path: Path) -> None:
    """At their deadline, by themselves, also with the interpreter's lock held, or loading; idle ones at once."""
    code = f"""{PROGRAM}
import dataclasses, toy_graders
pids = {str(tmp_path / "pids")!r}
with open(pids, "w") as file:
    for verb in ("hang", "hang_in_c", "call"):
        pool = GraderPool(toy_graders.obey, workers=1, timeout=0.6)
        pool.submit(request(("pid", None)))
        print(int(pool.wait()[0].reward), file=file)
        pool.submit(request((verb, None)))
time.sleep(0.3)
GraderPool.START_SECONDS = 1.0
GraderPool(toy_graders.Fatal(pids), workers=1)
"""
    done = run(code, tmp_path)
    assert done.returncode == -9, done.stderr
    hang, hang_in_c, idle, loading = map(int, (tmp_path / "pids").read_text().split())
    assert until(lambda: not is_running(idle), 5.0)
    assert until(lambda: not any(map(is_running, (hang, hang_in_c, loading))), 20.0)
