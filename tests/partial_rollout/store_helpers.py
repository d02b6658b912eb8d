"""What the store's tests share: tokens without an engine, and faults in a file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from longtail import Group, Sample, SampleStore, SamplingParams
from longtail.sample import FinishReason, Segment
from longtail.version import PolicyVersion

FILE = "samples.sqlite"
TURNS = ("multi_turn", "turn_ended", "masked", "attempts", "loss_mask", "num_generated")
GRADE = ("grade_failure", "grader", "grade_details")


def make(name: str, n: int = 1, **params: object) -> Group:
    settings: dict = {"n": n, "max_tokens": 100} | params
    return Group.from_prompt(name, [5, 6, 7], SamplingParams(**settings))


def grow(sample: Sample, tokens: int, version: int = 0, engine: str = "native") -> None:
    """What an engine adds: token ids and log-probabilities that depend on the position alone."""
    for _ in range(tokens):
        at = len(sample.output_ids)
        sample.append(100 + at, -1.0 / (at + 3), PolicyVersion(version), engine, "computed")
    sample.status = "running"


def finish(sample: Sample, tokens: int = 0, reason: FinishReason = "stop") -> Sample:
    grow(sample, tokens)
    sample.status, sample.finish_reason = "finished", reason
    return sample


def record(sample: Sample) -> dict[str, object]:
    """Everything of a sample that a store must give back."""
    fields = ("id", "group_id", "index", "prompt_ids", "params", "seed", "output_ids", "versions", "status")
    values: dict[str, object] = {
        f: getattr(sample, f) for f in (*fields, "finish_reason", "stop_reason", "failure", *TURNS, *GRADE)
    }
    values["logprobs"] = [x.hex() for x in sample.logprobs]
    values["segments"] = [(s.start, s.end, s.version, s.engine, s.kv) for s in sample.segments]
    values["reward"] = None if sample.reward is None else sample.reward.hex()
    t = sample.timings
    values["timings"] = (t.submitted, t.first_token, t.finished, t.running)
    assert all(isinstance(s, Segment) for s in sample.segments)
    return values


def observe(sample: Sample, tokens: int) -> None:
    """What a rollout does around a turn's end: the engine gives the sample back, the environment answers."""
    sample.status, sample.turn_ended = "paused", True
    sample.append_observation(range(300, 300 + tokens))


def records(groups: list[Group]) -> dict[str, list[dict[str, object]]]:
    return {g.id: [record(s) for s in g.samples] for g in groups}


@contextlib.contextmanager
def raw(directory: Path) -> Iterator[sqlite3.Connection]:
    """The file under the store, to look into it or to damage it."""
    connection = sqlite3.connect(directory / FILE, isolation_level=None)
    try:
        yield connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()


def flip(directory: Path, table: str, column: str, where: str, byte: int = 0, bit: int = 0) -> None:
    """Flips one bit of one value."""
    with raw(directory) as connection:
        rows = connection.execute(f"SELECT rowid, {column} FROM {table} WHERE {where}").fetchall()
        assert len(rows) == 1, rows
        value = rows[0][1]
        data = bytearray(value if isinstance(value, bytes) else str(value).encode())
        data[byte] ^= 1 << bit
        new = bytes(data) if isinstance(value, bytes) else data.decode()
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, rows[0][0]))


@contextlib.contextmanager
def opened(directory: Path | None) -> Iterator[SampleStore]:
    """Sound at the end."""
    with SampleStore(directory) as store:
        yield store
        store.check_integrity()
        if directory is not None:
            assert store._database.check() == []
