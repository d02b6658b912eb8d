"""Programs, graded by tests that they cannot see, in a sandbox (sandbox.py)."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.answers import behind
from longtail.trainer_adapter.rewards.grader import Grader, Request, Score, check_choice, check_tolerance, task_field
from longtail.trainer_adapter.rewards.rooms import DRIVER, EXAMINER
from longtail.trainer_adapter.rewards.sandbox import Outcome, Sandbox


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeGrader(Grader):
    """The share of tests that a Python program passes, or (credit="all") 1.0 for all of them and 0.0 otherwise.

    The program is the last fenced block of the response (```python ... ```), else all of it. The task's tests, of one
    kind or mixed:

        {"stdin": "3\\n", "stdout": "6\\n"}                 the program is run; this process compares what it prints
        {"call": "add", "args": [1, 2], "returns": 3}     its function is called (kwargs too); lists equal tuples
        "assert add(1, 2) == 3"                           statements; the names that they neither define nor import are
                                                          the program's functions. HumanEval: test + "check(solve)"

    Calls and statements run in a sandbox of their own, which asks the program's sandbox for one result after another
    (rooms.py): arguments and results go by value, as Python literals. One sandbox serves all calls, each stdin test has
    one; the limit on seconds is that of each.

    A task whose tests cannot be run is a GradeError; a machine without bubblewrap is SandboxUnavailable."""

    name: ClassVar[str] = "code"
    revision: ClassVar[int] = 1

    tests: str = "tests"
    """Field of the task."""
    credit: Literal["all", "share"] = "all"
    after: str | None = None
    """As of `MathGrader`."""
    fenced: bool = False
    """A program must stand in a fenced block."""
    compare: Literal["lines", "exact"] = "lines"
    """Standard output: without white space at the ends of lines and empty lines at the end, or byte for byte."""
    tolerance: float = 1e-9
    """Relative, for floats that calls return."""
    sandbox: Sandbox = dataclasses.field(default_factory=Sandbox)

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("all", "share"))
        check_choice("compare", self.compare, ("lines", "exact"))
        check_tolerance("tolerance", self.tolerance)

    def surroundings(self) -> dict[str, Any]:
        return {"python": self.sandbox.check()}

    def __call__(self, request: Request) -> Score:
        tests = self._tests(request.task)
        program = program_of(behind(request.text, self.after), fenced=self.fenced)
        if not program.strip():
            return Score(0.0, passed=0, tests=len(tests), reason="no program")
        faults: list[str] = []
        passed = 0
        printed = [test for test in tests if isinstance(test, dict) and "stdin" in test]
        called = [test for test in tests if not (isinstance(test, dict) and "stdin" in test)]
        for test in printed:
            fault = self._run(program, test)
            passed += fault is None
            faults += [] if fault is None else [fault]
            if faults and self.credit == "all":
                break
        if called and not (faults and self.credit == "all"):
            found, more = self._examine(program, called)
            passed += found
            faults += more
        value = passed / len(tests) if self.credit == "share" else float(passed == len(tests))
        details: dict[str, Any] = {"passed": passed, "tests": len(tests)}
        if faults:
            details["reason"] = faults[0]
        return Score(value, **details)

    def _run(self, program: str, test: dict[str, str]) -> str | None:
        outcome = self.sandbox.run(program, stdin=test["stdin"].encode())
        if outcome.failure is not None:
            return outcome.failure
        given, wanted = outcome.stdout.decode(errors="replace"), test["stdout"]
        equal = given == wanted if self.compare == "exact" else _lines(given) == _lines(wanted)
        return None if equal else "printed something else"

    def _examine(self, program: str, tests: Sequence[Any]) -> tuple[int, list[str]]:
        """-> tests passed, and what went wrong."""
        self.sandbox.check()
        given = {"tests": tests, "tolerance": self.tolerance, "stop": self.credit == "all"}
        outcome, exit_code = self._both(program, json.dumps(given).encode())
        lines = [json.loads(line) for line in outcome.stdout.splitlines() if line.endswith(b"}")]
        verdicts = [line for line in lines if "test" in line]
        faults = [f"test {line['test']}: {line['why']}" for line in verdicts if not line["passed"]]
        if outcome.stopped is not None:
            faults.append(f"test {len(verdicts)}: stopped: {outcome.stopped}")
        elif not any("done" in line for line in lines):
            raise GradeError(f"the tests did not run to their end ({outcome.failure})")
        elif not faults and not any(line["calls"] for line in verdicts):
            raise GradeError("no test calls the program: they say nothing of it")
        if faults and exit_code:
            faults[0] += f" (the program's process ended with {exit_code})"
        return sum(line["passed"] for line in verdicts), faults

    def _both(self, program: str, tests: bytes) -> tuple[Outcome, int | None]:
        """The examiner's outcome, and the exit code of the candidate's room if that ended by itself."""
        with contextlib.ExitStack() as ends:
            asked, asks = os.pipe()
            answered, answers = os.pipe()
            pipes = ends.enter_context(contextlib.ExitStack())
            for descriptor in (asked, asks, answered, answers):
                pipes.callback(os.close, descriptor)
            candidate = ends.enter_context(
                self.sandbox.start(
                    "driver.py",
                    str(asked),
                    str(answers),
                    files={"driver.py": DRIVER.encode(), "program.py": program.encode(errors="surrogatepass")},
                    descriptors=(asked, answers),
                    keep_output=False,
                )
            )
            examiner = ends.enter_context(
                self.sandbox.start(
                    "examiner.py",
                    str(asks),
                    str(answered),
                    files={"examiner.py": EXAMINER.encode(), "tests.json": tests},
                    descriptors=(asks, answered),
                )
            )
            pipes.close()  # so that each room sees the end of the other
            outcome = examiner.wait(candidate)
            return outcome, candidate.own_exit_code

    def _tests(self, task: Any) -> list[Any]:
        tests = task_field(task, self.tests)
        if not isinstance(tests, list | tuple) or not tests:
            raise GradeError(f"the task's {self.tests!r} must be a list of tests, not {tests!r:.80}")
        for number, test in enumerate(tests):
            if isinstance(test, str):
                try:
                    ast.parse(test)
                except (SyntaxError, ValueError) as error:
                    raise GradeError(f"{self.tests}[{number}] is no Python: {error}") from error
                continue
            known = isinstance(test, dict) and (
                (test.keys() == {"stdin", "stdout"} and all(isinstance(text, str) for text in test.values()))
                or ({"call", "returns"} <= test.keys() <= {"call", "args", "kwargs", "returns"})
            )
            if not known:
                raise GradeError(
                    f"{self.tests}[{number}] must be stdin and stdout (texts), or call, args, kwargs and returns, or "
                    f"statements, not {test!r:.80}"
                )
        return list(tests)


def program_of(text: str, *, fenced: bool = False) -> str:
    """The last fenced block that names Python, else the last one, else (unless fenced) all of the text. A block that is
    not closed goes to the end."""
    blocks = re.findall(
        r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", text, flags=re.DOTALL | re.MULTILINE
    )
    named = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    if named or blocks:
        return named[-1] if named else blocks[-1][1]
    return "" if fenced else text


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
