"""Scores the finished samples of a store with another grader, and keeps both: what `longtail regrade` does."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from longtail.partial_rollout.database import Database
from longtail.partial_rollout.grade_rows import Regrade
from longtail.partial_rollout.grading import GradeRequest, GraderPool
from longtail.sample import Sample
from longtail.trainer_adapter.rewards.exams import UNKNOWN, exams, mixed

GROUPS_AT_ONCE = 64
KEPT = "(g.delivery IS NULL OR g.delivery = 0 OR g.delivery IN (SELECT number FROM deliveries))"
"""Groups whose tokens were not pruned."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One sample's two grades."""

    sample: str
    version: int
    """Newest policy version among its tokens."""
    recorded: float | None
    recorded_by: str | None
    new: Regrade
    was_known: bool
    """The grader had graded it before, and it was not asked again."""

    @property
    def both(self) -> tuple[float, float] | None:
        return None if self.recorded is None or self.new.reward is None else (self.recorded, self.new.reward)

    def as_dict(self) -> dict[str, Any]:
        return {
            "sample": self.sample,
            "version": self.version,
            "recorded": {"grader": self.recorded_by, "reward": self.recorded},
            "new": {
                "grader": self.new.grader,
                "reward": self.new.reward,
                "failure": self.new.failure,
                "details": self.new.details,
            },
        }


def regrade(
    database: Database,
    grader: Any,
    decode: Callable[[Sequence[int]], str],
    *,
    workers: int | None = None,
    timeout: float = 30.0,
    save: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Pair]:
    """Every finished sample whose tokens are still there, in order. What this very grader (name and version) has given
    a sample before is taken from the store, so that a run that was interrupted goes on where it was. save: each batch
    is written as it is done, in a transaction; what the samples were trained with is never changed."""
    query = f"SELECT count(*) FROM groups g JOIN samples s ON s.group_id = g.id WHERE {KEPT} AND s.status = 'finished'"
    (total,) = database.query(query)[0]
    pairs: list[Pair] = []
    with GraderPool(grader, workers=workers, timeout=timeout) as pool:
        for batch in _batches(database):
            found = dict(_known(database, batch, pool.grader))
            asked = [(sample, task) for sample, task in batch if sample.id not in found]
            grades = _grade(pool, asked, decode)
            if save and grades:
                with database.transaction(durable=True):
                    database.save_grades(grades.values())
            pairs += [_pair(sample, found.get(sample.id), grades.get(sample.id)) for sample, _ in batch]
            progress(len(pairs), total)
    return pairs


def _batches(database: Database) -> Iterator[list[tuple[Sample, Any]]]:
    for first in range(0, database.num_groups() + 1, GROUPS_AT_ONCE):
        groups, damages = database.load(f"g.id >= {first} AND g.id < {first + GROUPS_AT_ONCE} AND {KEPT}")
        damaged = {damage.sample.id for damage in damages}
        batch = [(s, g.task) for g in groups for s in g.samples if s.status == "finished" and s.id not in damaged]
        if batch:
            yield batch


def _known(database: Database, batch: list[tuple[Sample, Any]], label: str) -> Iterator[tuple[str, Regrade]]:
    """What this grader has given before, but its failures."""
    names = [sample.group_id for sample, _ in batch]
    marks = ", ".join("?" * len(set(names)))
    stored = database.grades(f"g.name IN ({marks})", tuple(dict.fromkeys(names)))
    for sample, _ in batch:
        if sample.grader == label and sample.reward is not None and math.isfinite(sample.reward):
            own = Regrade(sample_id=sample.id, grader=label, reward=sample.reward, details=sample.grade_details)
            yield sample.id, own
        for one in stored.get(sample.id, []):
            if one.grader == label and one.reward is not None:
                yield sample.id, one


def _grade(
    pool: GraderPool, asked: list[tuple[Sample, Any]], decode: Callable[[Sequence[int]], str]
) -> dict[str, Regrade]:
    for sample, task in asked:
        pool.submit(GradeRequest.of(sample, task, decode(sample.output_ids)))
    grades = {}
    while pool.num_pending:
        for grade in pool.wait():
            grades[grade.sample_id] = Regrade(
                sample_id=grade.sample_id,
                grader=grade.grader,
                reward=grade.reward,
                failure=grade.failure,
                details=None if grade.details is None else dict(grade.details),
                time=time.time(),
            )
    return grades


def _pair(sample: Sample, known: Regrade | None, new: Regrade | None) -> Pair:
    grade = known or new
    assert grade is not None
    version = max((segment.version for segment in sample.segments), default=0)
    reward = sample.reward if sample.reward is not None and math.isfinite(sample.reward) else None
    return Pair(sample.id, int(version), reward, sample.grader, grade, known is not None)


def summary(pairs: Sequence[Pair], grader: str) -> dict[str, Any]:
    """Means are over the samples that have both rewards, so that they differ by the exam alone. up, down: samples whose
    reward the new grader raised and lowered."""
    by_version: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_version.setdefault(pair.version, []).append(pair)
    found = exams((pair.version, pair.recorded_by) for pair in pairs if pair.recorded is not None)
    failures = [pair.new.failure for pair in pairs if pair.new.failure is not None]
    warnings = []
    if (text := mixed(found)) is not None:
        warnings.append(text)
    if UNKNOWN in found and len(found) == 1:
        warnings.append("it is not recorded which grader gave the rewards of this store; the new ones say it")
    if failures:
        warnings.append(
            f"{len(failures)} of {len(pairs)} samples got no reward from {grader}; the first: {failures[0]}"
        )
    return {
        "grader": grader,
        "exams": {name: list(versions) for name, versions in found.items()},
        "graded": sum(not pair.was_known for pair in pairs),
        "known": sum(pair.was_known for pair in pairs),
        "all": _numbers(pairs),
        "versions": [
            {
                "version": version,
                "graders": sorted({pair.recorded_by or UNKNOWN for pair in own if pair.recorded is not None}),
                **_numbers(own),
            }
            for version, own in sorted(by_version.items())
        ],
        "warnings": warnings,
    }


def _numbers(pairs: Sequence[Pair]) -> dict[str, Any]:
    both = [pair.both for pair in pairs if pair.both is not None]
    return {
        "samples": len(pairs),
        "compared": len(both),
        "old_mean": math.fsum(old for old, _ in both) / len(both) if both else None,
        "new_mean": math.fsum(new for _, new in both) / len(both) if both else None,
        "up": sum(new > old for old, new in both),
        "down": sum(new < old for old, new in both),
        "failures": sum(pair.new.failure is not None for pair in pairs),
    }
