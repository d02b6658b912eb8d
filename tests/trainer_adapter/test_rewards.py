"""Graders by hand-computed cases; names and versions; settings that are wrong; a pool's processes."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import pickle
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from longtail.errors import GradeError
from longtail.partial_rollout.grading import Grade, GradeRequest, GraderPool
from longtail.trainer_adapter.rewards import (
    answers,
    combine,
    grader,
    gym,
    math_answers,
    patterns,
    programs,
    rooms,
    units,
)
from longtail.trainer_adapter.rewards.answers import behind, last_boxed, marked_answer
from longtail.trainer_adapter.rewards.combine import CombinedGrader, Part
from longtail.trainer_adapter.rewards.exams import exams, mixed, ranges
from longtail.trainer_adapter.rewards.grader import Score, label_of
from longtail.trainer_adapter.rewards.gym import ReasoningGymGrader
from longtail.trainer_adapter.rewards.math_answers import MathGrader
from longtail.trainer_adapter.rewards.patterns import FormatGrader, RegexGrader, number_of
from longtail.trainer_adapter.rewards.specs import make_grader
from longtail.trainer_adapter.rewards.units import UnitsGrader


@dataclasses.dataclass
class Ask:
    text: str
    task: Any = None


def request(text: str, task: Any, sample: str = "s") -> GradeRequest:
    return GradeRequest(
        sample_id=sample, group_id="g", task=task, prompt_ids=(1,), output_ids=(2,), text=text, finish_reason="stop"
    )


# ---- scores and answers


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match=f"a reward of {value}"):
        Score(value)


def test_a_score_is_a_float_with_details() -> None:
    score = Score(0.5, answer="x")
    assert score == 0.5 and isinstance(score, float) and score.details == {"answer": "x"}


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2", "1"),
        (r"{\boxed {a}}", "a"),
        (r"\boxed{a \boxed{b} c}", "b"),
        ("none }{", None),
        (r"\boxed{" * 20000, None),
    ],
)
def test_last_boxed(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_marks() -> None:
    assert marked_answer("<answer>1</answer> \\boxed{2}\n#### 3") == "1"
    assert marked_answer("\\boxed{2}\n#### 3") == "2"
    assert marked_answer("so\n#### 3") == " 3"
    assert behind("a</think>b</think>c", "</think>") == "c" and behind("abc", "</think>") == ""


# ---- math


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("1/2", r"so $\boxed{\frac{1}{2}}$", 1.0),
        ("1/2", "The final answer is 0.5.", 1.0),
        (r"\frac{1}{2}", "<answer>1/2</answer>", 1.0),
        ("1/2", r"\boxed{\frac{1}{3}}", 0.0),
        ("1/2", r"first \boxed{\frac12}, no: \boxed{2}", 0.0),
        ("2", r"first \boxed{\frac12}, no: \boxed{2}", 1.0),
        ("14", "9 + 5 = 14", 1.0),
        (14, "We get 13, and then one more: 14", 1.0),
        ("14", "It is 15.", 0.0),
        ("1,234", r"\boxed{1234}", 1.0),
        (r"$x = 3$", r"\boxed{3}", 1.0),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", 1.0),
        (r"(x+1)^2", r"\boxed{x^2 + 2x + 1}", 1.0),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1.0),
        ("0.3333333", r"\boxed{\frac{1}{3}}", 1.0),
        ("0.33", r"\boxed{\frac{1}{3}}", 0.0),
        ("5", "I do not know", 0.0),
        ("5", "", 0.0),
        ("5", r"\boxed{}", 0.0),
        ("5", "\\boxed{" + "(" * 3000 + "}", 0.0),
        ("5", "<answer>" + "5" * 5000 + "</answer>", 0.0),
    ],
)
def test_math(gold: Any, text: str, reward: float) -> None:
    score = MathGrader()(Ask(text, {"answer": gold}))
    assert score == reward, score.details
    assert reward or score.details["reason"]


@pytest.mark.parametrize("gold", ["", "   ", None, True, ["5"], "$$", "\\frac{"])
def test_a_gold_answer_that_cannot_be_read_is_an_error(gold: Any) -> None:
    with pytest.raises(GradeError, match="answer"):
        MathGrader()(Ask(r"\boxed{5}", {"answer": gold}))


def test_a_task_without_the_field_names_what_it_has() -> None:
    with pytest.raises(GradeError, match=r"has no 'answer' \(there is: gold\)"):
        MathGrader()(Ask("5", {"gold": "5"}))
    assert MathGrader(gold="entry.gold")(Ask("5", {"entry": {"gold": "5"}})) == 1.0


def test_math_reads_marks_only_where_asked() -> None:
    assert MathGrader(marked=True)(Ask("it is 5", {"answer": 5})) == 0.0
    assert MathGrader(marked=True)(Ask(r"\boxed{5}", {"answer": 5})) == 1.0
    thinking = Ask(r"\boxed{5}</think> \boxed{6}", {"answer": 5})
    assert MathGrader()(thinking) == MathGrader(after="</think>")(thinking) == 0.0
    assert MathGrader(after="</think>")(Ask(r"\boxed{5}", {"answer": 5})) == 0.0  # still thinking when it ended


def test_math_in_a_thread_needs_no_timeout() -> None:
    results: list[Any] = []

    def work(made: MathGrader) -> None:
        try:
            results.append(made(Ask("5", {"answer": 5})))
        except ValueError as error:
            results.append(str(error))

    for made in (MathGrader(), MathGrader(timeout=None)):
        thread = threading.Thread(target=work, args=(made,))
        thread.start()
        thread.join()
    assert "timeout=None" in results[0] and results[1] == 1.0


def test_an_alarm_of_the_caller_goes_on() -> None:
    before = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    rang: list[int] = []
    try:
        signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
        signal.setitimer(signal.ITIMER_REAL, 600.0)
        MathGrader()(Ask("5", {"answer": 5}))
        assert 590 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
        assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, before[1])
        signal.setitimer(signal.ITIMER_REAL, *before[0])


# ---- patterns


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", "12"), ("-1,234.5", "-2469/2"), ("3/4", "3/4"), ("50%", "1/2"), ("2e3", "2000"), ("$7", "7"),
        (".5", "1/2"), ("5.", "5"), ("\u22123", "-3"), ("1/0", None), ("1,23", None),
        ("10**9", None), ("nan", None), ("", None),
    ],
)  # fmt: skip
def test_number_of(text: str, value: str | None) -> None:
    found = number_of(text)
    assert (None if found is None else str(found)) == value


@pytest.mark.parametrize(
    ("settings", "text", "gold", "reward"),
    [
        ({"pattern": r"= (\d+)"}, "2 = 2, 3 = 3", "3", 1.0),
        ({"pattern": r"= (\d+)", "which": "first"}, "2 = 2, 3 = 3", "3", 0.0),
        ({"pattern": r"\d+"}, "7 or 8", "8", 1.0),
        ({"pattern": r"(?P<a>\w+) (?P<b>\w+)", "group": "b"}, "one two", "two", 1.0),
        ({"pattern": r"is (\w+)", "compare": "casefold"}, "It is PARIS", "Paris", 1.0),
        ({"pattern": r"is (\w+)"}, "It is PARIS", "Paris", 0.0),
        ({"pattern": r"is (\S+)", "compare": "numeric"}, "It is 0.50", "1/2", 1.0),
        ({"pattern": r"is (\S+)", "compare": "numeric"}, "It is much", "1/2", 0.0),
        ({"pattern": r"is (\S+)", "compare": "numeric", "tolerance": 0.01}, "It is 3.14", "3.1416", 1.0),
        ({"pattern": r"is (\S+)", "compare": "numeric"}, "It is 3.14", "3.1416", 0.0),
        ({"pattern": r"is (\S+)"}, "nothing", "5", 0.0),
        ({"pattern": r"(a)|(b)"}, "b", "b", 0.0),
    ],
)
def test_regex(settings: dict, text: str, gold: str, reward: float) -> None:
    assert RegexGrader(**settings)(Ask(text, {"answer": gold})) == reward


def test_a_gold_number_that_is_none_is_an_error() -> None:
    with pytest.raises(GradeError, match="'x' is no number"):
        RegexGrader(pattern=".", compare="numeric")(Ask("5", {"answer": "x"}))


FORMAT = FormatGrader(tags=("think", "answer"), only_tags=True, max_characters=60, credit="share")


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("so <think>a</think><answer>b</answer>", 2 / 3),
        ("<answer>b</answer><think>a</think>", 1 / 3),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 1 / 3),
        ("<think><answer>b</answer></think>", 1 / 3),
        ("<think>a</think><answer>" + "b" * 60 + "</answer>", 2 / 3),
        ("", 1 / 3),
    ],
)
def test_format(text: str, share: float) -> None:
    score = FORMAT(Ask(text))
    assert score == pytest.approx(share, abs=1e-12)
    assert dataclasses.replace(FORMAT, credit="all")(Ask(text)) == float(share == 1.0)
    assert set(score.details["met"]) == {"tags", "only_tags", "length"}


def test_json() -> None:
    schema = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    made = FormatGrader(json_in="fence", json_schema=schema)
    assert made(Ask('so\n```json\n{"x": 1}\n```')) == 1.0
    assert made(Ask('so\n```json\n{"x": "1"}\n```')) == 0.0
    assert made(Ask('{"x": 1}')) == 0.0
    assert FormatGrader(json_in="all")(Ask('{"x": NaN}')) == 0.0
    assert FormatGrader(json_in="all")(Ask("[" * 100000)) == 0.0
    assert FormatGrader(json_in="answer", json_schema=schema)(Ask('<answer>{"x": 2}</answer>')) == 1.0


# ---- reasoning-gym


def test_reasoning_gym_keeps_partial_credit() -> None:
    import reasoning_gym

    entry = dict(reasoning_gym.create_dataset("countdown", seed=3, size=1)[0])
    made = ReasoningGymGrader()
    for task in (entry, {"entry": entry, "dataset": "countdown"}):
        assert made(Ask(f"<answer>{entry['answer']}</answer>", task)) == 1.0
        assert 0.0 < made(Ask("<answer>1 + 1</answer>", task)) < 0.5
    total = {"question": "9 + 5 =", "answer": "14", "metadata": {"source_dataset": "chain_sum"}}
    assert made(Ask("14", total)) == 1.0 and made(Ask("-14", total)) == 0.0
    assert ReasoningGymGrader(strict_numbers=False)(Ask("-14", total)) > 0.0


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"entry": {"answer": "1"}, "dataset": "chain_sums"}, "did you mean chain_sum"),
        ({"entry": {"question": "?"}, "dataset": "chain_sum"}, "has no answer"),
        ({"entry": [], "dataset": "chain_sum"}, "must be reasoning-gym's record"),
        ({"question": "?"}, "has no 'entry'"),
    ],
)
def test_an_entry_that_cannot_be_graded_is_an_error(task: dict, says: str) -> None:
    with pytest.raises(GradeError, match=says):
        ReasoningGymGrader()(Ask("1", task))


# ---- sums


def both(weight: float = 0.25) -> CombinedGrader:
    parts = (Part(name="answer", grader=MathGrader()), Part(name="form", grader=FORMAT, weight=weight))
    return CombinedGrader(parts=parts)


def test_a_sum_keeps_its_parts() -> None:
    score = both()(Ask("<think>a</think><answer>5</answer>", {"answer": 5}))
    assert score == 1.25
    parts = score.details["parts"]
    assert (parts["answer"]["value"], parts["form"]["value"], parts["form"]["weight"]) == (1.0, 1.0, 0.25)
    assert parts["answer"]["grader"] == MathGrader().label
    json.dumps(score.details)
    with pytest.raises(GradeError, match="part answer: the task has no 'answer'"):
        both()(Ask("5", {}))


class Broken:
    name, version = "broken", "1"

    def __call__(self, request: Any) -> float:
        return math.nan


def test_a_part_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="part x: a reward of nan"):
        CombinedGrader(parts=(Part(name="x", grader=Broken()),))(Ask(""))


# ---- names and versions


def test_versions_change_with_every_setting_and_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    graders = [MathGrader(), MathGrader(digits=5), MathGrader(strict=False), both(), both(0.5), FORMAT]
    graders += [RegexGrader(pattern="a"), RegexGrader(pattern="b"), UnitsGrader(), ReasoningGymGrader()]
    labels = [made.label for made in graders]
    assert len(set(labels)) == len(labels)
    assert all(pickle.loads(pickle.dumps(made)).label == label for made, label in zip(graders, labels, strict=True))
    monkeypatch.setattr(MathGrader, "revision", 99)
    assert MathGrader().version.startswith("99-") and both().label != labels[3] and FORMAT.label == labels[5]
    monkeypatch.undo()
    monkeypatch.setattr(grader, "library_version", lambda name: "0.0")
    assert MathGrader().label != labels[0] and both().label != labels[3]


def test_a_version_is_the_same_in_every_process() -> None:
    import subprocess
    import sys

    code = "from longtail.trainer_adapter.rewards import FormatGrader; print(FormatGrader(tags=('a', 'b')).label)"
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert found == {FormatGrader(tags=("a", "b")).label + "\n"}


def test_the_package_is_light() -> None:
    import subprocess
    import sys

    heavy = {"torch", "sympy", "pint", "reasoning_gym", "jsonschema"}
    code = f"import sys, longtail.trainer_adapter.rewards; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def code_of(module: Any) -> str:
    """Hash of a module's code without comments and docstrings."""
    tree = ast.parse(Path(module.__file__).read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=4).hexdigest()


MODULES = (answers, math_answers, gym, patterns, units, combine, programs, rooms)
CODE = {
    "answers": "435b55ef",
    "math_answers": "c6df4633",
    "gym": "50e742ba",
    "patterns": "4e56f7aa",
    "units": "8e837542",
    "combine": "2d57061c",
    "programs": "e25bbeff",
    "rooms": "54feaf15",
}
"""A change of this code may change rewards. If it does, raise `revision` of the graders in it; then write the hash that
the test names here."""


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_a_change_of_a_graders_code_is_noticed(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    assert CODE.get(name) == code_of(module), (
        f"{name}: raise its graders' revision if rewards change; then {code_of(module)}"
    )


# ---- exams


def test_mixed_exams_are_named() -> None:
    found = exams([(0, "a@1"), (1, "a@1"), (2, "a@2"), (3, "a@2"), (5, None)])
    assert found == {"a@1": (0, 1), "a@2": (2, 3), "unknown grader": (5,)}
    text = mixed(found)
    assert text is not None and "a@1 graded policy versions 0 to 1; a@2 graded policy versions 2 to 3" in text
    assert mixed(exams([(0, "a@1"), (9, "a@1")])) is None and mixed({}) is None
    assert ranges([3, 1, 2, 7, 9, 8]) == "1 to 3, 7 to 9"


# ---- in a pool


def test_in_a_pools_processes() -> None:
    with GraderPool(both(), workers=1, timeout=60.0) as pool:
        assert pool.grader == both().label
        pool.submit(request("<think>a</think><answer>5</answer>", {"answer": "5"}, "right"))
        pool.submit(request("<think>a</think><answer>5</answer>", {"answer": "\\frac{"}, "gold"))
        grades: dict[str, Grade] = {}
        while pool.num_pending:
            grades |= {grade.sample_id: grade for grade in pool.wait()}
    right, gold = grades["right"], grades["gold"]
    assert (right.reward, right.failure, right.grader) == (1.25, None, both().label)
    assert right.details is not None and right.details["parts"]["answer"]["value"] == 1.0
    assert (
        gold.reward is None and gold.failure is not None and "GradeError: part answer: the gold answer" in gold.failure
    )


# ---- wrong settings


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RegexGrader(pattern="("), "is no regular expression"),
        (lambda: RegexGrader(pattern="a", group=1), "group 1 is not in pattern"),
        (lambda: RegexGrader(pattern="a", compare="close"), "compare must be one of"),  # type: ignore[arg-type]
        (lambda: RegexGrader(pattern="a", tolerance=0.1), "tolerance is for"),
        (lambda: RegexGrader(pattern="a", compare="numeric", tolerance=math.nan), "tolerance must be"),
        (lambda: MathGrader(digits=-1), "digits"),
        (lambda: MathGrader(timeout=0), "timeout"),
        (lambda: MathGrader(after=""), "after"),
        (lambda: FormatGrader(), "without a requirement"),
        (lambda: FormatGrader(tags=("<a>",)), "no tag's name"),
        (lambda: FormatGrader(tags=("a", "a")), "twice"),
        (lambda: FormatGrader(only_tags=True), "needs tags"),
        (lambda: FormatGrader(min_characters=5, max_characters=3), "leave no length"),
        (lambda: FormatGrader(json_schema={}), "needs json_in"),
        (lambda: FormatGrader(json_in="all", json_schema={"type": "nonsense"}), "no JSON Schema"),
        (lambda: UnitsGrader(tolerance=-1.0), "tolerance"),
        (lambda: CombinedGrader(parts=()), "parts is empty"),
        (lambda: CombinedGrader(parts=(Part(name="a", grader=FORMAT, weight=math.inf),)), "must be finite"),
        (lambda: CombinedGrader(parts=(Part(name="a", grader=FORMAT), Part(name="a", grader=FORMAT))), "differ"),
        (lambda: CombinedGrader(parts=(Part(name="a", grader=len),)), "has no name"),
        (lambda: make_grader("maths"), "did you mean math"),
        (lambda: make_grader("math:gold=x"), "no JSON"),
        (lambda: make_grader('math:["x"]'), "JSON object"),
        (lambda: make_grader('math:{"golden": "x"}'), "did you mean gold"),
        (lambda: make_grader("regex"), "needs pattern"),
        (lambda: make_grader("combine"), "parts must have"),
        (lambda: make_grader("nothing.toml"), "is no file"),
        (lambda: make_grader("no.such.module"), "cannot be imported"),
        (lambda: make_grader("math.pi"), "must be a function"),
        (lambda: make_grader({}), "name none"),
    ],
)
def test_wrong_settings(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnitsGrader, "libraries", ("no-such-distribution",))
    with pytest.raises(ValueError, match=r"no-such-distribution is not installed; pip install 'longtail\[rewards\]'"):
        _ = UnitsGrader().version


def test_specs(tmp_path: Path) -> None:
    assert make_grader("math") == MathGrader()
    assert make_grader('math:{"digits": 3}') == MathGrader(digits=3)
    file = tmp_path / "both.toml"
    file.write_text(
        'grader = "combine"\n[parts.answer]\ngrader = "math"\n[parts.form]\ngrader = "format"\nweight = 0.25\n'
        'tags = ["think", "answer"]\nonly_tags = true\nmax_characters = 60\ncredit = "share"\n'
    )
    assert make_grader(str(file)) == both() and make_grader(str(file)).label == both().label
    nested = make_grader('code:{"sandbox": {"limits": {"seconds": 2.5}}}')
    assert nested.sandbox.limits.seconds == 2.5
    with pytest.raises(ValueError, match=r"grader code.sandbox.limits has no setting 'second'; did you mean seconds"):
        make_grader('code:{"sandbox": {"limits": {"second": 2.5}}}')
    assert label_of(make_grader("tests.trainer_adapter.test_rewards.BROKEN")) == "broken@1"


BROKEN = Broken()
