"""`longtail regrade`: another exam, both rewards kept, and no changed exam taken for a better model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.store_helpers import make
from typer.testing import CliRunner, Result

from longtail import Group, SampleStore, StoreLocked
from longtail.bench.cli import app
from longtail.partial_rollout.database import Database
from longtail.trainer_adapter.rewards.patterns import RegexGrader
from longtail.version import PolicyVersion

OLD, OTHER = "math@1-old", "math@2-old"
LAST = RegexGrader(pattern=r"\d+", compare="numeric")
SPEC = 'regex:{"pattern": "\\\\d+", "compare": "numeric"}'


class Words:
    """A tokenizer whose tokens are code points."""

    @classmethod
    def from_pretrained(cls, source: Any) -> Words:
        return cls()

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "AutoTokenizer", Words)
    monkeypatch.setattr("longtail.bench.models.resolve_model", lambda name, progress: name)


def answered(group: Group, rows: list[tuple[str, float | None, int, str | None]]) -> Group:
    """rows: text, recorded reward, policy version, recorded grader."""
    for sample, (text, reward, version, grader) in zip(group.samples, rows, strict=True):
        ids = [ord(c) for c in text]
        sample.extend(ids, [-1.0] * len(ids), PolicyVersion(version), "native", "computed")
        sample.status, sample.finish_reason, sample.reward, sample.grader = "finished", "stop", reward, grader
    return group


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Version 0: right (old 1), right (old 0), wrong (old 1). Version 1: right (old 0), and one that was not graded. An
    open group has a finished sample of version 1 and an unfinished one; one is pruned."""
    tasks = {name: {"answer": "12"} for name in ("a", "b", "c", "gone")}
    groups = {name: Group(name, make(name, n=n).samples, tasks[name]) for name, n in (("a", 3), ("b", 2), ("c", 2))}
    with SampleStore(tmp_path / "store") as store:
        gone = Group("gone", make("gone").samples, tasks["gone"])
        store.add([answered(gone, [("12", 1.0, 0, OLD)])])
        store.prune(store.hand_over(store.complete()))
        answered(groups["a"], [("is 12", 1.0, 0, OLD), ("so 12.", 0.0, 0, OLD), ("13", 1.0, 0, OLD)])
        answered(groups["b"], [("12", 0.0, 1, OLD), ("12", None, 1, OLD)])
        groups["b"].samples[1].grade_failure = "timed out"
        store.add([groups["a"], groups["b"]])
        store.hand_over(store.complete())
        sample = groups["c"].samples[0]
        sample.extend([49, 50], [-1.0] * 2, PolicyVersion(1), "native", "computed")
        sample.status, sample.finish_reason, sample.reward, sample.grader = "finished", "stop", 1.0, OLD
        store.add([groups["c"]])
    return tmp_path / "store"


def call(directory: Path, *arguments: object, grader: str = SPEC) -> Result:
    given = ["regrade", directory, "--grader", grader, "--tokenizer", "none", "--workers", 1, *arguments]
    return CliRunner().invoke(app, [*map(str, given)], env={"COLUMNS": "200"})


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout.splitlines()[-1])


def rewards(directory: Path) -> dict[str, list[tuple[str | None, float | None]]]:
    """The recorded reward of each sample, then the others."""
    database = Database(directory, read_only=True)
    try:
        recorded = database.query("SELECT name, grader, reward FROM samples WHERE status = 'finished' ORDER BY id")
        others = database.grades()
        assert database.check() == []
    finally:
        database.close()
    return {name: [(g, r), *((o.grader, o.reward) for o in others.get(name, []))] for name, g, r in recorded}


def test_both_are_kept_and_compared(directory: Path) -> None:
    before = rewards(directory)
    result = found(call(directory, "--json"))
    assert (result["grader"], result["graded"], result["known"]) == (LAST.label, 6, 0)
    zero, one = result["versions"]
    assert zero == {
        "version": 0,
        "graders": [OLD],
        "samples": 3,
        "compared": 3,
        "old_mean": 2 / 3,
        "new_mean": 2 / 3,
        "up": 1,
        "down": 1,
        "failures": 0,
    }
    assert (one["samples"], one["compared"], one["old_mean"], one["new_mean"], one["up"]) == (3, 2, 0.5, 1.0, 1)
    assert result["warnings"] == []
    after = rewards(directory)
    new = {"a/0": 1.0, "a/1": 1.0, "a/2": 0.0, "b/0": 1.0, "b/1": 1.0, "c/0": 1.0}
    assert after == {name: [*before[name], *([(LAST.label, new[name])] if name in new else [])] for name in before}


def test_again_grades_nothing_again(directory: Path) -> None:
    first, again = found(call(directory, "--json")), found(call(directory, "--json"))
    assert (again["graded"], again["known"]) == (0, 6)
    assert again["versions"] == first["versions"]
    other = found(call(directory, "--json", grader='regex:{"pattern": "\\\\d\\\\d\\\\d"}'))
    assert (other["graded"], other["all"]["new_mean"]) == (6, 0.0)
    assert all(len(kept) == 3 for name, kept in rewards(directory).items() if name != "gone/0")


def test_a_dry_run_writes_nothing_and_works_beside_a_run(directory: Path) -> None:
    before = rewards(directory)
    with SampleStore(directory):
        result = found(call(directory, "--json", "--dry-run"))
        locked = call(directory)
        assert isinstance(locked.exception, StoreLocked)
    assert result["graded"] == 6 and rewards(directory) == before


def test_out(directory: Path, tmp_path: Path) -> None:
    found(call(directory, "--json", "--dry-run", "--out", tmp_path / "pairs.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert rows[2] == {
        "sample": "a/2",
        "version": 0,
        "recorded": {"grader": OLD, "reward": 1.0},
        "new": {
            "grader": LAST.label,
            "reward": 0.0,
            "failure": None,
            "details": {"answer": "13", "reason": "not the gold answer"},
        },
    }


def test_a_changed_exam_is_named(directory: Path) -> None:
    with SampleStore(directory) as store:
        group = Group("d", make("d", n=2).samples, {"answer": "12"})
        store.add([answered(group, [("12", 1.0, 2, OTHER), ("12", 1.0, 2, None)])])
    result = call(directory, "--dry-run")
    assert result.exit_code == 0
    text = " ".join(result.stderr.split())
    assert "these rewards are of 3 exams" in text
    assert f"{OLD} graded policy versions 0 to 1" in text and f"{OTHER} graded policy versions 2" in text


def test_failures_are_no_zeros(directory: Path) -> None:
    result = found(call(directory, "--json", grader='regex:{"pattern": "x", "gold": "gold"}'))
    assert result["all"]["failures"] == 6 and result["all"]["new_mean"] is None
    assert "6 of 6 samples got no reward" in result["warnings"][-1] and "has no 'gold'" in result["warnings"][-1]
    assert rewards(directory)["a/0"][1][1] is None
    again = found(call(directory, "--json", grader='regex:{"pattern": "x", "gold": "gold"}'))
    assert again["graded"] == 6  # a failure is tried again


@pytest.mark.parametrize(
    ("grader", "says"),
    [
        ("maths", "did you mean math"),
        ("tests.bench.test_regrade_cli.unversioned", "has no version"),
        ("regex", "needs pattern"),
    ],
)
def test_wrong_graders(directory: Path, grader: str, says: str) -> None:
    result = call(directory, grader=grader)
    assert isinstance(result.exception, ValueError) and says in str(result.exception)


def unversioned(request: Any) -> float:
    return 1.0


def test_a_store_without_samples(tmp_path: Path) -> None:
    SampleStore(tmp_path / "store").close()
    result = call(tmp_path / "store")
    assert isinstance(result.exception, ValueError) and "holds no finished samples" in str(result.exception)
