"""Samples on disk: one SQLite file, written through by `SampleStore` and read when a store is opened again.

    groups --< samples --< chunks        a chunk: consecutive output tokens with their log-probabilities
    deliveries                           one row for each hand-over
    ledger                               running totals, kept beside the rows that they must equal

Write-ahead logging: a process that is killed at any moment leaves the last commit behind, whole. Progress is committed
without waiting for the disk (a power cut may take the last commits, never their order); submissions, hand-overs and
settlements wait for it. One process at a time: an advisory lock on `lock` beside the file, which the kernel gives back
when its holder dies. Nothing is pickled: numbers, JSON, and arrays of int32 and float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from longtail.errors import StoreCorrupt, StoreError, StoreFull, StoreLocked
from longtail.partial_rollout.ledger import BESIDE, LINES, Ledger, Line
from longtail.partial_rollout.records import (
    checksum_of,
    cut_short,
    pack_floats,
    pack_ids,
    params_json,
    params_of,
    sample_of,
    signed,
    state_of,
    task_json,
    unpack_floats,
    unpack_ids,
)
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

SCHEMA_VERSION = 1
FILE = "samples.sqlite"

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    prompt BLOB NOT NULL,       -- int32
    params TEXT NOT NULL,       -- JSON
    task TEXT NOT NULL,         -- JSON
    delivery INTEGER            -- NULL: not handed over; 0: thrown away
);
CREATE INDEX groups_by_delivery ON groups (delivery);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    group_id INTEGER NOT NULL REFERENCES groups (id),
    position INTEGER NOT NULL,  -- in the group
    seed INTEGER NOT NULL,      -- as a signed number
    prompt BLOB,                -- NULL: the group's
    params TEXT,                -- NULL: the group's
    status TEXT NOT NULL,
    finish_reason TEXT,
    stop_reason TEXT,           -- JSON
    failure TEXT,
    num_tokens INTEGER NOT NULL,
    lost INTEGER NOT NULL DEFAULT 0,  -- tokens that were found damaged, and made again
    segments TEXT NOT NULL,     -- JSON: [start, end, version, engine, kv] each
    timings TEXT NOT NULL,      -- JSON: seconds on the clock of the process that ran it
    reward REAL,
    snapshot TEXT,              -- JSON of the KV files, NULL: none
    line TEXT NOT NULL          -- of the ledger
);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE TABLE chunks (
    sample_id INTEGER NOT NULL REFERENCES samples (id),
    start INTEGER NOT NULL,     -- output position of the first token
    tokens BLOB NOT NULL,       -- int32
    logprobs BLOB NOT NULL,     -- float64
    checksum INTEGER NOT NULL,  -- CRC-32 of both
    PRIMARY KEY (sample_id, start)
);
CREATE TABLE deliveries (number INTEGER PRIMARY KEY, iteration INTEGER NOT NULL, time REAL NOT NULL);
CREATE TABLE ledger (name TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;
"""

MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""What brings a store of schema version n to n + 1, inside a transaction."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """One hand-over of complete groups."""

    number: int
    """1, 2, ... in order."""
    iteration: int
    time: float
    """Seconds since the epoch."""
    groups: list[Group]


class Database:
    """Owns the file, the connection and the lock. Everything it raises is a `StoreError`.

    directory: None keeps the tables in memory."""

    def __init__(self, directory: Path | None, *, read_only: bool = False) -> None:
        self.directory = directory
        self._lock: int | None = None
        self._ids: dict[str, int] = {}
        """Row of each sample that is not handed over."""
        if read_only and (directory is None or not (directory / FILE).is_file()):
            raise StoreError(f"{directory} holds no sample store (no {FILE})")
        with _named(directory):
            if directory is not None and not read_only:
                directory.mkdir(parents=True, exist_ok=True)
                self._lock = _take_lock(directory)
            try:
                self._open(read_only)
            except BaseException:
                self.close()
                raise

    def _open(self, read_only: bool) -> None:
        uri = "file::memory:"
        if self.directory is not None:
            uri = f"{(self.directory / FILE).absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self.connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        if not read_only:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA foreign_keys = ON")
        self._check_schema(read_only)

    def _check_schema(self, read_only: bool) -> None:
        execute = self.connection.execute
        version = execute("PRAGMA user_version").fetchone()[0]
        tables = execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version == 0 and tables == 0 and not read_only:
            with self.transaction(durable=True):
                for statement in SCHEMA.split(";\n"):
                    execute(statement)
                execute("INSERT INTO meta VALUES ('created', ?)", (str(time.time()),))
                names = ["generated", *LINES, *BESIDE]
                self.connection.executemany("INSERT INTO ledger VALUES (?, 0)", [(name,) for name in names])
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            return
        if not 0 < version <= SCHEMA_VERSION:
            newer = "was made by a newer longtail; upgrade" if version > SCHEMA_VERSION else "is not a sample store"
            raise StoreCorrupt(f"{self.directory}/{FILE} (schema {version}) {newer}")
        if version < SCHEMA_VERSION and read_only:
            raise StoreError(f"{self.directory}/{FILE} has schema {version}: open it for writing once to bring it up")
        while version < SCHEMA_VERSION:
            with self.transaction(durable=True):
                MIGRATIONS[version](self.connection)
                version += 1
                execute(f"PRAGMA user_version = {version}")

    @contextlib.contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        """All or nothing. durable: on return it is on the disk."""
        execute = self.connection.execute
        with _named(self.directory):
            execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            execute("BEGIN IMMEDIATE")
            try:
                yield
                execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    execute("ROLLBACK")
                raise

    def close(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- writing, inside a transaction ---------------------------------------------------------------------------------

    def add_groups(self, groups: Iterable[Group]) -> None:
        execute = self.connection.execute
        for group in groups:
            prompt, params = group.samples[0].prompt_ids, group.samples[0].params
            task = "null" if self.directory is None else task_json(group)  # in memory the group itself has it
            cursor = execute(
                "INSERT INTO groups (name, prompt, params, task) VALUES (?, ?, ?, ?)",
                (group.id, pack_ids(prompt), params_json(params), task),
            )
            group_id = int(cursor.lastrowid or 0)
            for sample in group.samples:
                own_prompt = None if sample.prompt_ids == prompt else pack_ids(sample.prompt_ids)
                own_params = None if sample.params == params else params_json(sample.params)
                cursor = execute(
                    "INSERT INTO samples (name, group_id, position, seed, prompt, params, status, num_tokens, segments,"
                    " timings, line) VALUES (?, ?, ?, ?, ?, ?, 'waiting', 0, '[]', '[]', 'pending')",
                    (sample.id, group_id, sample.index, signed(sample.seed), own_prompt, own_params),
                )
                self._ids[sample.id] = int(cursor.lastrowid or 0)

    def save(self, samples: Iterable[tuple[Sample, int]]) -> None:
        """samples: each with the number of its output tokens that are saved already. A sample that no engine runs
        becomes one chunk."""
        rows, chunks, whole = [], [], []
        for sample, saved in samples:
            row = self._ids[sample.id]
            rows.append((*state_of(sample), row))
            if saved and len(sample.output_ids) > saved and sample.status not in ("running", "waiting"):
                whole.append((row,))
                saved = 0
            if len(sample.output_ids) > saved:
                tokens, logprobs = pack_ids(sample.output_ids[saved:]), pack_floats(sample.logprobs[saved:])
                chunks.append((row, saved, tokens, logprobs, checksum_of(tokens, logprobs)))
        self.connection.executemany("DELETE FROM chunks WHERE sample_id = ?", whole)
        self.connection.executemany("INSERT INTO chunks VALUES (?, ?, ?, ?, ?)", chunks)
        self.connection.executemany(
            "UPDATE samples SET status = ?, finish_reason = ?, stop_reason = ?, failure = ?, num_tokens = ?,"
            " segments = ?, timings = ?, reward = ? WHERE id = ?",
            rows,
        )

    def leave(self, groups: Sequence[Group], lines: dict[str, Line], iteration: int | None) -> int:
        """Hands groups over in this iteration (None: throws them away). lines: of each sample, by id. -> number of
        the delivery; 0 if there is none."""
        number = 0
        if iteration is not None:
            self.set_meta("iteration", str(iteration + 1))
        if iteration is not None and groups:
            cursor = self.connection.execute(
                "INSERT INTO deliveries (iteration, time) VALUES (?, ?)", (iteration, time.time())
            )
            number = int(cursor.lastrowid or 0)
        for group in groups:
            (row,) = self.connection.execute("SELECT id FROM groups WHERE name = ?", (group.id,)).fetchone()
            self.connection.execute("UPDATE groups SET delivery = ? WHERE id = ?", (number, row))
            settled = [(lines[s.id], self._ids[s.id]) for s in group.samples]
            self.connection.executemany("UPDATE samples SET line = ?, snapshot = NULL WHERE id = ?", settled)
        return number

    def settle(self, sample_id: str, line: Line) -> tuple[Line, int] | None:
        """-> the line that the sample stood on, and its tokens; None if it is not known or still pending."""
        query = "SELECT id, line, num_tokens FROM samples WHERE name = ?"
        found = self.connection.execute(query, (sample_id,)).fetchone()
        if found is None or found[1] == "pending":
            return None
        self.connection.execute("UPDATE samples SET line = ? WHERE id = ?", (line, found[0]))
        return found[1], found[2]

    def write_off(self, lost: Iterable[tuple[Sample, int]]) -> None:
        """lost: samples that were cut short by damage, each with the number of tokens that it had."""
        for sample, recorded in lost:
            row, kept = self._ids[sample.id], len(sample.output_ids)
            self.connection.execute("DELETE FROM chunks WHERE sample_id = ?", (row,))
            self.connection.execute("UPDATE samples SET lost = lost + ? WHERE id = ?", (recorded - kept, row))
        self.save([(sample, 0) for sample, _ in lost])

    def save_ledger(self, ledger: Ledger) -> None:
        values = [("generated", ledger.generated), *ledger.lines.items(), *ledger.beside.items()]
        self.connection.executemany("UPDATE ledger SET tokens = ? WHERE name = ?", [(n, name) for name, n in values])

    def set_meta(self, key: str, value: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def prune(self, last: int) -> int:
        """Removes the tokens of deliveries up to number `last`, and of what was thrown away. -> groups pruned."""
        which = "delivery <= ? AND EXISTS (SELECT 1 FROM chunks c JOIN samples s ON s.id = c.sample_id"
        which += " WHERE s.group_id = groups.id)"
        gone = self.connection.execute(f"SELECT id FROM groups WHERE {which}", (last,)).fetchall()
        of_group = "sample_id IN (SELECT id FROM samples WHERE group_id = ?)"
        self.connection.executemany(f"DELETE FROM chunks WHERE {of_group}", gone)
        self.connection.execute("DELETE FROM deliveries WHERE number <= ?", (last,))
        return len(gone)

    # -- reading -------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def knows(self, table: Literal["groups", "samples"], name: str) -> bool:
        return self.connection.execute(f"SELECT 1 FROM {table} WHERE name = ?", (name,)).fetchone() is not None

    def last_delivery(self) -> int:
        return int(self.connection.execute("SELECT coalesce(max(number), 0) FROM deliveries").fetchone()[0])

    def ledger(self) -> Ledger:
        tokens = dict(self.connection.execute("SELECT name, tokens FROM ledger"))
        return Ledger(tokens["generated"], {line: tokens[line] for line in LINES}, {b: tokens[b] for b in BESIDE})

    def counted(self) -> dict[str, int]:
        """Tokens by line, counted from the samples."""
        execute = self.connection.execute
        counts = dict(execute("SELECT line, sum(num_tokens) FROM samples GROUP BY line"))
        (lost,) = execute("SELECT coalesce(sum(lost), 0) FROM samples").fetchone()
        return counts | {"failed": counts.get("failed", 0) + lost}

    def open_groups(self) -> tuple[list[Group], list[tuple[Sample, int]]]:
        """Groups that are not handed over, in order of submission; and the samples in them that were cut short by
        damage, each with the number of tokens that it had."""
        groups, lost = self._load("g.delivery IS NULL", ())
        query = "SELECT s.name, s.id FROM samples s JOIN groups g ON g.id = s.group_id WHERE g.delivery IS NULL"
        self._ids = dict(self.connection.execute(query))
        return groups, lost

    def deliveries(self, after: int) -> Iterator[Delivery]:
        query = "SELECT number, iteration, time FROM deliveries WHERE number > ? ORDER BY number"
        for number, iteration, at in self.connection.execute(query, (after,)).fetchall():
            groups, lost = self._load("g.delivery = ?", (number,))
            if lost:
                name = lost[0][0].id
                raise StoreCorrupt(f"{self.directory}: tokens of sample {name} (delivery {number}) are damaged")
            yield Delivery(number, iteration, at, groups)

    def _load(self, where: str, values: Sequence[Any]) -> tuple[list[Group], list[tuple[Sample, int]]]:
        lost = []
        with _named(self.directory):
            outputs = self._outputs(where, values)
            prompts: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
            groups: dict[int, Group] = {}
            query = f"SELECT id, name, prompt, params, task FROM groups g WHERE {where} ORDER BY id"
            for group_id, name, prompt, params, task in self.connection.execute(query, values):
                prompts[group_id] = (tuple(unpack_ids(prompt)), params_of(params))
                groups[group_id] = Group(name, [], json.loads(task))
            query = (
                "SELECT s.id, s.group_id, s.num_tokens, s.name, s.position, s.seed, s.prompt, s.params, s.status,"
                " s.finish_reason, s.stop_reason, s.failure, s.segments, s.timings, s.reward FROM samples s"
                f" JOIN groups g ON g.id = s.group_id WHERE {where} ORDER BY s.id"
            )
            for row_id, group_id, recorded, *values_of_sample in self.connection.execute(query, values):
                group = groups[group_id]
                sample = sample_of(values_of_sample, group.id, *prompts[group_id], outputs.get(row_id))
                if len(sample.output_ids) < recorded:
                    cut_short(sample)
                    lost.append((sample, recorded))
                group.samples.append(sample)
        return list(groups.values()), lost

    def _outputs(self, where: str, values: Sequence[Any]) -> dict[int, tuple[list[int], list[float]]]:
        """Output ids and log-probabilities by row of the sample, up to the first chunk that is missing or damaged."""
        outputs: dict[int, tuple[list[int], list[float]]] = {}
        query = (
            "SELECT c.sample_id, c.start, c.tokens, c.logprobs, c.checksum FROM chunks c JOIN samples s"
            f" ON s.id = c.sample_id JOIN groups g ON g.id = s.group_id WHERE {where} ORDER BY c.sample_id, c.start"
        )
        for row, start, tokens, logprobs, checksum in self.connection.execute(query, values):
            ids, floats = outputs.setdefault(row, ([], []))
            if start == len(ids) and checksum_of(tokens, logprobs) == checksum:
                ids.extend(unpack_ids(tokens))
                floats.extend(unpack_floats(logprobs))
        return outputs

    def check(self) -> list[str]:
        """What is wrong with the file: SQLite's own check, every checksum, every conservation law. Nothing if it is
        sound."""
        with _named(self.directory):
            problems = [row[0] for row in self.connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
            kept_groups = "g.delivery IS NULL OR g.delivery IN (SELECT number FROM deliveries)"
            for sample, recorded in self._load(kept_groups, ())[1]:
                kept = len(sample.output_ids)
                problems.append(f"sample {sample.id}: output tokens {kept} to {recorded - 1} are damaged")
            ledger, counted = self.ledger(), self.counted()
            pending = counted.pop("pending", 0)
            for line in LINES:
                if ledger.lines[line] != counted.get(line, 0):
                    problems.append(f"ledger: {line} says {ledger.lines[line]}, the samples say {counted.get(line, 0)}")
            if ledger.pending != pending:
                problems.append(f"ledger: pending says {ledger.pending}, the samples say {pending}")
            open_but_settled = "SELECT s.name FROM samples s JOIN groups g ON g.id = s.group_id WHERE"
            for condition, what in (
                ("g.delivery IS NULL AND s.line != 'pending'", "is settled, but its group was not handed over"),
                ("g.delivery IS NOT NULL AND s.line = 'pending'", "is pending, but its group was handed over"),
            ):
                for (name,) in self.connection.execute(f"{open_but_settled} {condition}"):
                    problems.append(f"sample {name} {what}")
        return problems


# ---- errors and the lock


@contextlib.contextmanager
def _named(directory: Path | None) -> Iterator[None]:
    """SQLite's and the system's errors under our names."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # our own mistake
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise StoreFull(f"{directory}: the disk is full ({error}); free some space, nothing is lost yet") from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreCorrupt(f"{directory}/{FILE} is damaged ({error}); see `longtail store verify`") from error
        raise StoreError(f"{directory}/{FILE}: {error}") from error
    except OSError as error:
        raise StoreError(f"{directory}: {error}") from error


def _take_lock(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise StoreLocked(f"{directory} is open in process {holder or 'unknown'}; one process at a time") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor
