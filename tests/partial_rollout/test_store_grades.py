"""Who graded a sample, and what other graders gave it later, in a store on disk."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from tests.partial_rollout.store_helpers import FILE, finish, flip, make, opened, raw, record

from longtail import SampleStore, StoreError
from longtail.partial_rollout.database import Database
from longtail.partial_rollout.grade_rows import Regrade
from longtail.partial_rollout.store_view import details

SCHEMA_3 = Path(__file__).with_name("data") / "store_schema_3.sqlite.gz"
"""Made by longtail with schema 3: group a (2 samples of 4 and 6 tokens, rewards 1.0 and NaN, delivery 1), b (open: 5
tokens finished with reward 0.5; 3 tokens with a failed grade; 2 running) and damaged (3 tokens, open)."""
MATH, MATH_2 = "math@1-0d9c4e21", "math@2-aabbccdd"


def new(sample: str, reward: float | None, grader: str = MATH_2, **settings: object) -> Regrade:
    failure = "timed out" if reward is None else None
    return Regrade(sample_id=sample, grader=grader, reward=reward, failure=failure, **settings)  # type: ignore[arg-type]


def build(directory: Path) -> None:
    with SampleStore(directory) as store:
        store.add([make("a", n=2), make("b")])
        for i, sample in enumerate(store.unfinished()[:2]):
            finish(sample, 4 + i)
            sample.reward, sample.grader, sample.grade_details = float(i), MATH, {"answer": "\u00e9", "parts": [1, 2.5]}
        store.watch([s for g in store for s in g.samples])
        store.commit()


def regrade(directory: Path, *regrades: Regrade) -> None:
    database = Database(directory)
    try:
        with database.transaction(durable=True):
            database.save_grades(regrades)
    finally:
        database.close()


def stored(directory: Path) -> dict[str, list[Regrade]]:
    database = Database(directory, read_only=True)
    try:
        return database.grades()
    finally:
        database.close()


def test_the_grader_is_part_of_the_sample(tmp_path: Path) -> None:
    build(tmp_path)
    with opened(tmp_path) as store:
        first, second = next(iter(store)).samples
        assert (first.grader, first.grade_details) == (MATH, {"answer": "\u00e9", "parts": [1, 2.5]})
        want = record(first), record(second)
        store.hand_over(store.complete())
        (delivery,) = store.deliveries()
        assert tuple(map(record, delivery.groups[0].samples)) == want


def test_both_rewards_are_kept(tmp_path: Path) -> None:
    build(tmp_path)
    failed = new("a/1", None, time=2.0)
    again = new("a/0", 0.25, time=1.0, details={"answer": "x"})
    third = new("a/0", -0.0, "other@1", time=3.0)
    regrade(tmp_path, new("a/0", 0.75), failed, again, third)  # a grader's later word replaces its earlier one
    assert stored(tmp_path) == {"a/0": [again, third], "a/1": [failed]}
    negative = stored(tmp_path)["a/0"][1].reward
    assert negative is not None and math.copysign(1.0, negative) == -1.0
    with opened(tmp_path) as store:
        assert [s.reward for s in next(iter(store)).samples] == [0.0, 1.0]
        shown = details(store._database, "a/0")
    assert shown is not None and shown["grader"] == MATH
    assert [(one["grader"], one["reward"]) for one in shown["regrades"]] == [(MATH_2, 0.25), ("other@1", 0.0)]


def test_what_is_cut_is_not_what_was_graded(tmp_path: Path) -> None:
    build(tmp_path)
    regrade(tmp_path, new("a/0", 1.0), new("a/1", 1.0))
    with opened(tmp_path) as store:
        first, second = next(iter(store)).samples
        store.cut(first, 2, "stale")
        assert (first.reward, first.grader, first.grade_details) == (None, None, None)
        assert list(store._database.grades()) == ["a/1"]
        store.remove([second], "stale")
        assert store._database.grades() == {}


def test_grades_outlive_the_tokens(tmp_path: Path) -> None:
    build(tmp_path)
    regrade(tmp_path, new("a/0", 1.0))
    with opened(tmp_path) as store:
        store.prune(store.hand_over(store.complete()))
        assert list(store._database.grades()) == ["a/0"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward": math.nan}, "the reward is nan"),
        ({"reward": math.inf}, "the reward is inf"),
        ({"reward": None}, "give a reward or a failure"),
        ({"reward": 1.0, "failure": "why"}, "give a reward or a failure"),
        ({"reward": 1.0, "grader": ""}, "name the grader"),
    ],
)
def test_a_grade_that_is_none(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Regrade(**{"sample_id": "a/0", "grader": MATH, **settings})


def test_a_sample_that_is_not_there(tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(ValueError, match="no sample of this name"):
        regrade(tmp_path, new("a/0", 1.0), new("x/0", 1.0))
    assert stored(tmp_path) == {}  # all or none


@pytest.mark.parametrize("column", ["grader", "reward", "failure", "details", "time", "checksum"])
def test_damage_is_noticed(column: str, tmp_path: Path) -> None:
    build(tmp_path)
    regrade(tmp_path, new("a/0", None, details={"a": 1}, time=4.0))
    with raw(tmp_path) as connection:
        value = {"grader": "math@9", "reward": 0.5, "failure": "no", "details": "{}", "time": 5.0, "checksum": 1}[
            column
        ]
        connection.execute(f"UPDATE grades SET {column} = ?", (value,))
    assert stored(tmp_path) == {}
    database = Database(tmp_path, read_only=True)
    try:
        assert ["its grade by" in problem for problem in database.check()] == [True]
    finally:
        database.close()


@pytest.mark.parametrize("column", ["grader", "grade_details"])
def test_a_damaged_grader_is_a_damaged_record(column: str, tmp_path: Path) -> None:
    build(tmp_path)
    flip(tmp_path, "samples", column, "name = 'a/0'", byte=3)
    with SampleStore(tmp_path) as store:
        assert store.damages == ["sample a/0: its record is damaged; it starts again"]
        assert next(iter(store)).samples[0].grader is None


# ---- from schema 3


def old_store(directory: Path) -> Path:
    directory.mkdir()
    (directory / FILE).write_bytes(gzip.decompress(SCHEMA_3.read_bytes()))
    return directory


def test_a_store_of_schema_3_is_brought_up(tmp_path: Path) -> None:
    directory = old_store(tmp_path / "store")
    with pytest.raises(StoreError, match="has schema 3: open it for writing once to bring it to 4"):
        Database(directory, read_only=True)
    with opened(directory) as store:
        assert store.damages == []
        by = {s.id: s for g in store for s in g.samples}
        assert {name: len(s.output_ids) for name, s in by.items()} == {"b/0": 5, "b/1": 3, "b/2": 2, "damaged/0": 3}
        assert (by["b/0"].reward, by["b/1"].grade_failure) == (0.5, "timed out")
        assert all(s.grader is None and s.grade_details is None for s in by.values())
        (delivery,) = store.deliveries()
        one, other = delivery.groups[0].samples
        assert one.reward == 1.0 and other.reward != other.reward
        by["b/0"].grader = MATH
        store.watch([by["b/0"]])
        store.commit()
    regrade(directory, new("a/0", 0.0))
    with opened(directory) as store:
        assert next(iter(store)).samples[0].grader == MATH
        assert list(store._database.grades()) == ["a/0"]


def test_damage_in_a_store_of_schema_3_is_still_damage(tmp_path: Path) -> None:
    directory = old_store(tmp_path / "store")
    flip(directory, "samples", "status", "name = 'damaged/0'")
    with opened(directory) as store:
        assert store.damages == ["sample damaged/0: its record is damaged; it starts again"]
