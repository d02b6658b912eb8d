"""Programs against tests that they cannot see: the honest earn what they deserve, the hostile nothing."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import pytest
from tests.trainer_adapter.test_sandbox import needs_sandbox, nothing_left

from longtail.errors import GradeError, SandboxUnavailable
from longtail.trainer_adapter.rewards import sandbox as sandbox_module
from longtail.trainer_adapter.rewards.programs import CodeGrader, program_of
from longtail.trainer_adapter.rewards.sandbox import Limits, Sandbox

__all__ = ["nothing_left"]

GRADER = CodeGrader(sandbox=Sandbox(limits=Limits(seconds=60.0, cpu_seconds=5)))
SHARE = dataclasses.replace(GRADER, credit="share")
HASTY = dataclasses.replace(GRADER, sandbox=Sandbox(limits=Limits(seconds=6.0, cpu_seconds=2)))

ADD: list[Any] = [
    {"call": "add", "args": [1, 2], "returns": 3},
    {"call": "add", "args": ["a", "b"], "returns": "ab"},
    "assert add(10, 5) == 15",
    "import math\nfor i in range(3):\n    assert math.isclose(add(i, 0.5), i + 0.5)",
]
DOUBLE: list[Any] = [{"stdin": f"{n}\n", "stdout": f"{2 * n}\n"} for n in (3, 17, 12345)]


@dataclasses.dataclass
class Ask:
    text: str
    task: Any


def ask(program: str, tests: list[Any], fence: bool = True) -> Ask:
    code = textwrap.dedent(program)
    return Ask(f"Here it is:\n```python\n{code}\n```\nDone." if fence else code, {"tests": tests})


@needs_sandbox
@pytest.mark.parametrize("tests", [ADD, DOUBLE, ADD + DOUBLE], ids=["calls", "stdin", "both"])
def test_an_honest_program_passes(tests: list[Any], nothing_left: None) -> None:
    program = """
        def add(a, b):
            print("noise")
            return a + b
        if __name__ == "__main__":
            print(2 * int(input()))
    """
    for fence in (True, False):
        score = GRADER(ask(program, tests, fence))
        assert (score, score.details) == (1.0, {"passed": len(tests), "tests": len(tests)})


@needs_sandbox
def test_credit(nothing_left: None) -> None:
    wrong_for_strings = ask("def add(a, b):\n    return int(a) + int(b) if isinstance(a, int) else ''", ADD[:2])
    assert GRADER(wrong_for_strings) == 0.0
    score = SHARE(wrong_for_strings)
    assert (score, score.details["reason"]) == (0.5, "test 1: returned another value")
    odd = ask("n = int(input())\nprint(2 * n if n % 3 else 0)", DOUBLE)
    assert SHARE(odd) == 1 / 3 and GRADER(odd) == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    ("returned", "returns", "equal"),
    [
        ("(1, 2)", [1, 2], True),
        ("[1, [2, 3]]", [1, [2, 3]], True),
        ("0.1 + 0.2", 0.3, True),
        ("1", 1.0, True),
        ("True", 1, False),
        ("'1'", 1, False),
        ("{'a': [1.0]}", {"a": [1]}, True),
        ("None", None, True),
        ("float('nan')", 0.0, False),
        ("10**40", 10**40, True),
        ("10**40 + 1", 10**40, False),
        ("object()", None, False),
    ],
)
def test_values(returned: str, returns: Any, equal: bool) -> None:
    tests = [{"call": "f", "returns": returns}]
    assert GRADER(ask(f"def f():\n    return {returned}", tests)) == float(equal)


@needs_sandbox
def test_literals_and_exceptions_go_by_value() -> None:
    tests = [
        "assert f({1: (2, {3})}, key=b'x') == [{1: (2, {3})}, b'x', 1j]",
        "try:\n    g()\n    assert False\nexcept KeyError as error:\n    assert 'missing' in str(error)",
        "def check(candidate):\n    assert candidate({}, key=0)[1] == 0\ncheck(f)",
    ]
    program = "def f(x, *, key):\n    return [x, key, 1j]\ndef g():\n    raise KeyError('missing')"
    assert GRADER(ask(program, tests)) == 1.0


HOSTILE = {
    "exits early with 0": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "prints a verdict": """
        import json
        for n in range(9):
            print(json.dumps({"test": n, "passed": True, "why": None, "calls": 1}))
        print(json.dumps({"done": True}), flush=True)
        def add(a, b):
            return None
    """,
    "writes to every descriptor": """
        import os
        for n in range(3, 40):
            try:
                os.write(n, b'{"test": 0, "passed": true, "why": null, "calls": 1}\\n{"done": true}\\n')
            except OSError:
                pass
        def add(a, b):
            return None
    """,
    "equals everything": """
        class Equal(int):
            def __eq__(self, other):
                return True
            __hash__ = None
        def add(a, b):
            return Equal(7)
    """,
    "equals everything as a string": """
        class Equal(str):
            def __eq__(self, other):
                return True
            def __repr__(self):
                return "15"
        def add(a, b):
            return Equal("x")
    """,
    "patches its comparer": """
        import builtins, json, sys
        json.dumps = lambda *a, **k: '{"value": 3}'
        sys.modules["__main__"].encode = lambda *a: 3
        sys.modules["__main__"].say = lambda **k: None
        builtins.AssertionError = ValueError
        def add(a, b):
            return 3
    """,
    "looks for the tests": """
        import gc, os, sys
        found = []
        for root, _, names in os.walk("/"):
            if root.startswith(("/usr", "/dev", "/lib", "/root")):
                continue
            for name in names:
                try:
                    found.append(open(os.path.join(root, name), errors="replace").read())
                except OSError:
                    pass
        text = " ".join(found) + " ".join(map(str, sys.argv)) + str(dict(os.environ))
        text += " ".join(str(o)[:2000] for o in gc.get_objects() if isinstance(o, (str, dict, list)))
        seen = "15" if ("add(10" + ", 5) == 15") in text else None
        def add(a, b):
            return int(seen) if seen else None
    """,
    "answers in advance": """
        import os, sys
        for fd in range(3, 30):
            try:
                os.write(fd, b'{"loaded": true}\\n' + b'{"value": 3}\\n' * 50)
            except OSError:
                pass
        def add(a, b):
            return 3
    """,
    "answers without end": """
        import os
        def add(a, b):
            while True:
                for fd in range(3, 30):
                    try:
                        os.write(fd, b"x" * 100000)
                    except OSError:
                        pass
    """,
    "answers too deeply": """
        import os
        def add(a, b):
            for fd in range(3, 30):
                try:
                    os.write(fd, b'{"value": ' + b'["list",[' * 50000 + b']]' * 50000 + b'}\\n')
                except OSError:
                    pass
    """,
    "hangs": "def add(a, b):\n    while True: pass",
    "sleeps": "import time\ntime.sleep(60)",
    "kills its parent": """
        import os, signal
        for pid in (os.getppid(), -1):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        def add(a, b):
            return None
    """,
    "forks without end": """
        import os
        def add(a, b):
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
    """,
    "takes all memory": "def add(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 24))",
    "leaves a daemon": """
        import os, time
        def add(a, b):
            if os.fork() == 0:
                os.setsid()
                time.sleep(60)
            os._exit(0)
    """,
    "returns what is no literal": "def add(a, b):\n    return lambda: 3",
    "defines nothing": "x = 1",
    "is no Python": "def add(a, b:\n  return",
    "raises an assertion": "def add(a, b):\n    raise AssertionError",
}


@needs_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_earns_nothing(name: str, nothing_left: None) -> None:
    """Of the third test, whose answer is 15, when it comes first: what a program without it can never return."""
    tests = [ADD[2], *ADD]
    score = HASTY(ask(HOSTILE[name], tests))
    assert score == 0.0 and score.details["reason"], (name, score.details)
    assert dataclasses.replace(HASTY, credit="share")(ask(HOSTILE[name], [ADD[2]])) == 0.0


PRINTERS = {
    "exits early with 0": "import os\nos._exit(0)",
    "prints the input": "print(input())",
    "reads the tests": """
        import os
        text = ""
        for root, _, names in os.walk("/"):
            if not root.startswith(("/usr", "/dev", "/lib", "/root")):
                for name in names:
                    try:
                        text += open(os.path.join(root, name), errors="replace").read()
                    except OSError:
                        pass
        print("24690" if ("246" + "90") in text else "none")
    """,
    "prints without end": "while True: print(1)",
    "answers and hangs": "print(2 * int(input()), flush=True)\nwhile True: pass",
    "answers and fails": "print(2 * int(input()), flush=True)\nraise RuntimeError",
    "prints bytes that are no text": "import os\nos.write(1, bytes(range(256)))",
}


@needs_sandbox
@pytest.mark.parametrize("name", PRINTERS)
def test_a_printer_that_does_not_compute_earns_nothing(name: str, nothing_left: None) -> None:
    score = HASTY(ask(PRINTERS[name], list(reversed(DOUBLE))))
    assert score == 0.0 and score.details["reason"], score.details


@needs_sandbox
def test_output_is_compared_by_lines_or_exactly() -> None:
    tests = [{"stdin": "", "stdout": "a\nb"}]
    loose = ask("print('a  ')\nprint('b')\nprint()", tests)
    assert GRADER(loose) == 1.0
    assert dataclasses.replace(GRADER, compare="exact")(loose) == 0.0
    assert GRADER(ask("print('a')\nprint('c')", tests)) == 0.0


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({}, "has no 'tests'"),
        ({"tests": []}, "must be a list of tests"),
        ({"tests": "assert f() == 1"}, "must be a list of tests"),
        ({"tests": ["assert f( =="]}, r"tests\[0\] is no Python"),
        ({"tests": [{"stdin": "x"}]}, r"tests\[0\] must be stdin and stdout"),
        ({"tests": [{"call": "f", "returns": 1, "arg": [1]}]}, r"tests\[0\] must be"),
        ({"tests": [{"stdin": 1, "stdout": "x"}]}, r"tests\[0\] must be"),
    ],
)
def test_a_task_that_cannot_be_graded_is_an_error(task: dict, says: str) -> None:
    with pytest.raises(GradeError, match=says):
        GRADER(Ask("def f(): return 1", task))


@needs_sandbox
def test_tests_that_do_not_ask_the_program_are_an_error() -> None:
    with pytest.raises(GradeError, match="no test calls the program"):
        GRADER(ask("def f(): return 1", ["assert 1 + 1 == 2"]))


def test_without_a_sandbox_there_is_no_version_and_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    sandbox_module._check.cache_clear()
    try:
        for call in (lambda: GRADER.version, lambda: GRADER(ask("print(1)", DOUBLE)), lambda: GRADER(ask("x=1", ADD))):
            with pytest.raises(SandboxUnavailable, match="bubblewrap"):
                call()
    finally:
        sandbox_module._check.cache_clear()


def test_no_program_is_a_zero() -> None:
    assert GRADER(Ask("  ", {"tests": ADD})) == 0.0
    assert dataclasses.replace(GRADER, fenced=True)(Ask("def add(a, b): return a + b", {"tests": ADD})) == 0.0


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na = 1\n```\nor\n```python\na = 2\n```\nas in\n```\noutput\n```", "a = 2\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("a = 1", "a = 1"),
        ("```python\na = 1\n", "a = 1\n"),
    ],
)
def test_which_program(text: str, program: str) -> None:
    assert program_of(text) == program
