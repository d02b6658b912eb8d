"""Rewards that other graders gave later, as rows of a store (table `grades`): beside what a sample was trained with,
which stays in its own row."""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from longtail.partial_rollout.records import checksum_of, storable

TABLE = """
CREATE TABLE grades (
    sample_id INTEGER NOT NULL REFERENCES samples (id),
    grader TEXT NOT NULL,       -- name and version
    reward,                     -- a number; as text where SQLite would change it; NULL: the failure says why
    failure TEXT,
    details TEXT,               -- JSON
    time REAL NOT NULL,         -- seconds since the epoch
    checksum INTEGER NOT NULL,  -- CRC-32 of these five
    PRIMARY KEY (sample_id, grader)
) WITHOUT ROWID;
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Regrade:
    """What a grader gave a sample after its rollout."""

    sample_id: str
    grader: str
    """Name and version."""
    reward: float | None
    """Finite; None: `failure` says why."""
    failure: str | None = None
    details: dict[str, Any] | None = None
    time: float = 0.0
    """Seconds since the epoch."""

    def __post_init__(self) -> None:
        if not self.grader:
            raise ValueError(f"regrade of {self.sample_id}: grader is empty; name the grader and its version")
        if (self.reward is None) == (self.failure is None):
            raise ValueError(f"regrade of {self.sample_id}: give a reward or a failure, not both or neither")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"regrade of {self.sample_id}: the reward is {self.reward}; make it finite or a failure")


def create(connection: sqlite3.Connection) -> None:
    connection.execute(TABLE)


def save(connection: sqlite3.Connection, regrades: Iterable[Regrade]) -> None:
    """A grader's later word on a sample takes the place of its earlier one. ValueError for a sample that is not in the
    store."""
    for one in regrades:
        found = connection.execute("SELECT id FROM samples WHERE name = ?", (one.sample_id,)).fetchone()
        if found is None:
            raise ValueError(f"regrade of {one.sample_id}: the store has no sample of this name")
        reward = None if one.reward is None else storable(float(one.reward))
        failure = None if one.failure is None else one.failure.encode(errors="backslashreplace").decode()
        details = None if one.details is None else json.dumps(one.details)
        values = (one.grader, reward, failure, details, one.time)
        connection.execute(
            "INSERT OR REPLACE INTO grades VALUES (?, ?, ?, ?, ?, ?, ?)", (*found, *values, checksum_of(values))
        )


def forget(connection: sqlite3.Connection, row: int) -> None:
    """Of a sample whose output is not what was graded any more."""
    connection.execute("DELETE FROM grades WHERE sample_id = ?", (row,))


def load(
    connection: sqlite3.Connection, where: str, values: Sequence[Any]
) -> tuple[dict[str, list[Regrade]], list[str]]:
    """Of the groups g for which `where` holds: by sample, oldest first, and which are damaged (they are left out)."""
    query = (
        "SELECT s.name, r.checksum, r.grader, r.reward, r.failure, r.details, r.time FROM groups g JOIN samples s"
        f" ON s.group_id = g.id JOIN grades r ON r.sample_id = s.id WHERE {where} ORDER BY s.id, r.time, r.grader"
    )
    found: dict[str, list[Regrade]] = {}
    damaged = []
    for name, checksum, *record in connection.execute(query, values):
        if checksum_of(record) != checksum:
            damaged.append(f"sample {name}: its grade by {record[0]} is damaged")
            continue
        grader, reward, failure, details, time = record
        one = Regrade(
            sample_id=name,
            grader=grader,
            reward=None if reward is None else float(reward),
            failure=failure,
            details=None if details is None else json.loads(details),
            time=time,
        )
        found.setdefault(name, []).append(one)
    return found, damaged
