"""The tables of a store (see `database.py`), and what brings those of an older longtail up to them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from longtail.partial_rollout import grade_rows, routing_rows
from longtail.partial_rollout.ledger import BESIDE, LINES
from longtail.partial_rollout.records import checksum_of

SCHEMA_VERSION = 4
APPLICATION = 0x6C746C73  # "ltls"

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,     -- in order of submission
    name TEXT NOT NULL UNIQUE,
    prompt BLOB NOT NULL,       -- int32
    params TEXT NOT NULL,       -- JSON
    task TEXT NOT NULL,         -- JSON
    checksum INTEGER NOT NULL,  -- CRC-32 of the four above
    delivery INTEGER            -- NULL: not handed over; 0: thrown away; -1: thrown away and forgotten
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
    multi_turn INTEGER NOT NULL DEFAULT 0,
    identity INTEGER NOT NULL,  -- CRC-32 of name, position, seed, prompt, params, multi_turn
    status TEXT NOT NULL,
    finish_reason TEXT,
    stop_reason TEXT,           -- JSON
    failure TEXT,
    num_tokens INTEGER NOT NULL,  -- of the output
    segments TEXT NOT NULL,     -- JSON: [start, end, version, engine, kv] each; of an observation the version is -1
    submitted REAL,             -- these four: seconds on the clock of the process that ran it
    first_token REAL,
    finished REAL,
    running REAL NOT NULL,
    reward,                     -- a number; "nan" and "-0.0" as text, which SQLite would change
    num_observed INTEGER NOT NULL DEFAULT 0,  -- of the output tokens those that an environment wrote
    turn_ended INTEGER NOT NULL DEFAULT 0,
    masked INTEGER NOT NULL DEFAULT 0,
    num_masked INTEGER NOT NULL DEFAULT 0,    -- of the masked tokens those that the policy wrote
    attempts INTEGER NOT NULL DEFAULT 0,
    grade_failure TEXT,
    grader TEXT,                -- name and version
    grade_details TEXT,         -- JSON
    checksum INTEGER NOT NULL,  -- CRC-32 of status to grade_details
    lost INTEGER NOT NULL DEFAULT 0,  -- tokens that were found damaged: on the ledger they failed
    snapshot TEXT,              -- JSON: checksum and record of its saved KV (saved_kv.py), NULL: none
    line TEXT NOT NULL          -- of the ledger
);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE INDEX samples_with_kv ON samples (name) WHERE snapshot IS NOT NULL;
CREATE TABLE chunks (
    sample_id INTEGER NOT NULL REFERENCES samples (id),
    start INTEGER NOT NULL,     -- output position of the first token
    tokens BLOB NOT NULL,       -- int32
    logprobs BLOB NOT NULL,     -- float64; 1.0 marks a token of an observation
    checksum INTEGER NOT NULL,  -- CRC-32 of both
    PRIMARY KEY (sample_id, start)
);
CREATE TABLE cuts (
    sample_id INTEGER NOT NULL REFERENCES samples (id),
    line TEXT NOT NULL,         -- of the ledger
    tokens INTEGER NOT NULL,    -- written by the policy, and dropped
    PRIMARY KEY (sample_id, line)
) WITHOUT ROWID;
CREATE TABLE removed (
    name TEXT NOT NULL,         -- of a sample that was taken out of its group
    line TEXT NOT NULL,         -- of the ledger
    tokens INTEGER NOT NULL,
    PRIMARY KEY (name, line)
) WITHOUT ROWID;
CREATE TABLE deliveries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again, also when its row is pruned
    iteration INTEGER NOT NULL,
    time REAL NOT NULL
);
CREATE TABLE ledger (name TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;
"""

ROWS_AT_ONCE = 10_000
"""In memory during a migration."""


def create(connection: sqlite3.Connection) -> None:
    _run(connection, TABLES)
    routing_rows.create(connection)
    grade_rows.create(connection)
    connection.execute("INSERT INTO meta VALUES ('created', ?)", (str(time.time()),))
    names = ["generated", *LINES, *BESIDE]
    connection.executemany("INSERT INTO ledger VALUES (?, 0)", [(name,) for name in names])


def add_turns_and_cuts(connection: sqlite3.Connection) -> None:
    """From schema 2 to 3."""
    _run(
        connection,
        """
ALTER TABLE samples ADD COLUMN multi_turn INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN num_observed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN turn_ended INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN masked INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN num_masked INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE samples ADD COLUMN grade_failure TEXT;
CREATE TABLE cuts (
    sample_id INTEGER NOT NULL REFERENCES samples (id),
    line TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (sample_id, line)
) WITHOUT ROWID;
CREATE TABLE removed (
    name TEXT NOT NULL,
    line TEXT NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (name, line)
) WITHOUT ROWID;
""",
    )
    _extend(connection, "identity", "name, position, seed, prompt, params", (0,))
    _extend(connection, "checksum", _STATE_2, (0, 0, 0, 0, 0, None))


def add_graders(connection: sqlite3.Connection) -> None:
    """From schema 3 to 4."""
    connection.execute("ALTER TABLE samples ADD COLUMN grader TEXT")
    connection.execute("ALTER TABLE samples ADD COLUMN grade_details TEXT")
    grade_rows.create(connection)
    columns = f"{_STATE_2}, num_observed, turn_ended, masked, num_masked, attempts, grade_failure"
    _extend(connection, "checksum", columns, (None, None))


_STATE_2 = (
    "status, finish_reason, stop_reason, failure, num_tokens, segments, submitted, first_token, finished, running,"
    " reward"
)


def _extend(connection: sqlite3.Connection, checksum: str, columns: str, added: tuple[Any, ...]) -> None:
    """Makes a checksum of samples anew that covers further columns, whose values are `added`. Rows that are damaged
    stay so."""
    select = f"SELECT id, {checksum}, {columns} FROM samples WHERE id > ? ORDER BY id LIMIT ?"
    factory = connection.text_factory
    connection.text_factory = lambda data: data.decode(errors="replace")  # a damaged text may be no text any more
    try:
        last = 0
        while rows := connection.execute(select, (last, ROWS_AT_ONCE)).fetchall():
            whole = [(row, values) for row, found, *values in rows if checksum_of(values) == found]
            changes = [(checksum_of((*values, *added)), row) for row, values in whole]
            connection.executemany(f"UPDATE samples SET {checksum} = ? WHERE id = ?", changes)
            last = rows[-1][0]
    finally:
        connection.text_factory = factory


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {
    1: routing_rows.create,
    2: add_turns_and_cuts,
    3: add_graders,
}
"""What brings a store of schema version n to n + 1, inside a transaction. Each names its columns itself: those of today
are not those of then."""


def _run(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        connection.execute(statement)
