"""Samples on disk: the tables, written through by `SampleStore` and read when a store is opened again.

    groups --< samples --< chunks        a chunk: consecutive output tokens with their log-probabilities
                    --< routing          consecutive positions with the experts that computed them (routing_rows.py)
                    --< grades           rewards that other graders gave later (grade_rows.py)
                    --< cuts             output that was dropped again, by line of the ledger
    removed                              samples that were taken out of their group, by line of the ledger
    deliveries                           one row for each hand-over
    ledger                               running totals, kept beside the rows that they must equal

A store in memory has `memory_tables.MemoryTables` in its place.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from longtail.errors import StoreCorrupt, StoreError
from longtail.partial_rollout import grade_rows, routing_rows
from longtail.partial_rollout.collector import quiet_collector
from longtail.partial_rollout.grade_rows import Regrade
from longtail.partial_rollout.ledger import BESIDE, LINES, Ledger, Line
from longtail.partial_rollout.records import (
    BLANK_STATE,
    ID_BYTES,
    IDENTITY,
    STATE,
    Damage,
    checksum_of,
    checksum_of_bytes,
    identity_of,
    pack_ids,
    pack_logprobs,
    params_json,
    params_of,
    restore,
    state_of,
    task_json,
    unpack_ids,
)
from longtail.partial_rollout.schema import APPLICATION, MIGRATIONS, SCHEMA_VERSION, create
from longtail.partial_rollout.sqlite_file import Schema, SqliteFile
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

PRUNABLE = "(delivery = 0 OR delivery IN (SELECT number FROM deliveries WHERE number <= ?))"
CHECK_AT_ONCE = 1000
"""Groups in memory at once during a check."""
INSERT_CHUNK = "INSERT INTO chunks VALUES (?, ?, ?, ?, ?)"
UPDATE_STATE = f"UPDATE samples SET {', '.join(f'{column} = ?' for column in (*STATE, 'checksum'))} WHERE id = ?"
UNREADABLE: tuple[tuple[int, ...], SamplingParams, bool] = ((), SamplingParams(), False)


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """One hand-over of complete groups."""

    number: int
    """1, 2, ... in order."""
    iteration: int
    time: float
    """Seconds since the epoch."""
    groups: list[Group]


class Database(SqliteFile):
    """The tables. Every method that writes is called inside a `transaction`; what it changes in memory is nothing."""

    def __init__(self, directory: Path | None, *, read_only: bool = False) -> None:
        super().__init__(directory, Schema(SCHEMA_VERSION, APPLICATION, create, MIGRATIONS), read_only=read_only)

    # -- writing, inside a transaction ---------------------------------------------------------------------------------

    def add_groups(self, groups: Iterable[Group]) -> None:
        """Their samples have no tokens yet on this side: `save` brings those."""
        execute, keep = self.connection.execute, self.directory is not None
        (group_id,) = execute("SELECT coalesce(max(id), 0) FROM groups").fetchone()
        group_rows, sample_rows, blank = [], [], checksum_of(BLANK_STATE)
        for group in groups:
            group_id += 1
            prompt, params = group.samples[0].prompt_ids, group.samples[0].params
            record = (
                (group.id, pack_ids(prompt), params_json(params), task_json(group)) if keep else (group.id, b"", "", "")
            )
            group_rows.append((group_id, *record, checksum_of(record)))
            for sample in group.samples:
                identity = identity_of(sample, prompt, params) if keep else (sample.id, sample.index, 0, None, None, 0)
                sample_rows.append((group_id, *identity, checksum_of(identity), *BLANK_STATE, blank))
        self.connection.executemany(
            "INSERT INTO groups (id, name, prompt, params, task, checksum) VALUES (?, ?, ?, ?, ?, ?)", group_rows
        )
        self.connection.executemany(
            f"INSERT INTO samples (group_id, {', '.join(IDENTITY)}, identity, {', '.join(STATE)}, checksum, line)"
            f" VALUES ({', '.join('?' * (len(IDENTITY) + len(STATE) + 3))}, 'pending')",
            sample_rows,
        )

    def save(self, samples: Iterable[Sample]) -> None:
        """What they have gained since they were saved last, on the ledger too: observations are not generated. A sample
        that is done becomes one chunk."""
        find = "SELECT id, num_tokens, num_observed FROM samples WHERE name = ?"
        rows, chunks, whole, routed, gained = [], [], [], [], 0
        for sample in samples:
            row, saved, observed = self.connection.execute(find, (sample.id,)).fetchone()
            length = len(sample.output_ids)
            assert length >= saved, f"sample {sample.id} has lost tokens: {length} of {saved}"
            gained += sample.num_generated - (saved - observed)
            state = state_of(sample)
            rows.append((*state, checksum_of(state), row))
            if length == saved or self.directory is None:
                continue
            if saved and sample.is_done:
                whole.append((row,))
                saved = 0
            chunks.append(_chunk(row, sample, saved))
            routed.append((row, sample, saved == 0))
        self.connection.executemany("DELETE FROM chunks WHERE sample_id = ?", whole)
        self.connection.executemany(INSERT_CHUNK, chunks)
        routing_rows.save(self.connection, routed)
        self.connection.executemany(UPDATE_STATE, rows)
        self.count({"generated": gained})

    def cut(self, cuts: Iterable[tuple[Sample, Sample, Line]]) -> None:
        """Samples whose output is dropped from some position on: as they are, saved to the last token, as they will be,
        and the line on which the tokens stay that the policy had written. Their saved KV is the caller's to forget."""
        execute = self.connection.execute
        insert = "INSERT INTO cuts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens"
        for before, after, line in cuts:
            (row,) = execute("SELECT id FROM samples WHERE name = ?", (before.id,)).fetchone()
            for table in ("chunks", "routing"):
                execute(f"DELETE FROM {table} WHERE sample_id = ?", (row,))
            grade_rows.forget(self.connection, row)
            if after.output_ids and self.directory is not None:
                execute(INSERT_CHUNK, _chunk(row, after, 0))
                routing_rows.save(self.connection, [(row, after, True)])
            state = state_of(after)
            execute(UPDATE_STATE, (*state, checksum_of(state), row))
            if tokens := before.num_generated - after.num_generated:
                execute(insert, (row, line, tokens))
                self.count({line: tokens})

    def remove(self, samples: Iterable[Sample], line: Line) -> None:
        """Takes samples, saved to the last token, out of their groups. Their names stay taken, their tokens stay on the
        line."""
        execute = self.connection.execute
        insert = "INSERT INTO removed VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens"
        for sample in samples:
            (row, lost) = execute("SELECT id, lost FROM samples WHERE name = ?", (sample.id,)).fetchone()
            gone = execute("SELECT line, tokens FROM cuts WHERE sample_id = ?", (row,)).fetchall()
            for name, tokens in ((line, sample.num_generated), ("failed", lost), *gone):
                execute(insert, (sample.id, name, tokens))
            for table in ("chunks", "routing", "grades", "cuts"):
                execute(f"DELETE FROM {table} WHERE sample_id = ?", (row,))
            execute("DELETE FROM samples WHERE id = ?", (row,))
            self.count({line: sample.num_generated})

    def save_kv(self, records: Mapping[str, str | None]) -> None:
        """samples.snapshot, by sample."""
        changes = [(text, name) for name, text in records.items()]
        self.connection.executemany("UPDATE samples SET snapshot = ? WHERE name = ?", changes)

    def save_grades(self, regrades: Iterable[Regrade]) -> None:
        """What graders gave samples after their rollout, beside the reward that they were trained with."""
        grade_rows.save(self.connection, regrades)

    def count(self, tokens: Mapping[Any, int]) -> None:
        """Adds to the ledger, by name."""
        changes = [(n, name) for name, n in tokens.items() if n]
        add = "ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens"
        self.connection.executemany(f"INSERT INTO ledger (tokens, name) VALUES (?, ?) {add}", changes)

    def leave(self, groups: Sequence[Group], lines: Mapping[str, Line], iteration: int | None) -> int:
        """Hands groups over in this iteration (None: throws them away). lines: of each sample, by id. -> number of
        the delivery; 0 if there is none."""
        number = 0
        if iteration is not None:
            self.set_meta("iteration", str(iteration + 1))
        if iteration is not None and groups:
            insert = "INSERT INTO deliveries (iteration, time) VALUES (?, ?)"
            number = int(self.connection.execute(insert, (iteration, time.time())).lastrowid or 0)
        names = [(number, group.id) for group in groups]
        self.connection.executemany("UPDATE groups SET delivery = ? WHERE name = ?", names)
        settled, tokens = [], dict.fromkeys(("pending", *LINES), 0)
        for group in groups:
            for sample in group.samples:
                length, line = sample.num_generated, lines[sample.id]
                settled.append((line, sample.id))
                (before,) = self.connection.execute("SELECT line FROM samples WHERE name = ?", (sample.id,)).fetchone()
                for name, n in _standing(before, length, sample.num_masked).items():
                    tokens[name] -= n  # not pending if an interrupt came right after this had been written
                for name, n in _standing(line, length, sample.num_masked).items():
                    tokens[name] += n
        del tokens["pending"]  # what stands on no other line
        self.connection.executemany("UPDATE samples SET line = ?, snapshot = NULL WHERE name = ?", settled)
        self.count(tokens)
        return number

    def settle(self, sample_id: str, line: Line) -> bool:
        """Moves the tokens of a sample to another line. False if it is not known or still pending."""
        query = "SELECT id, line, num_tokens - num_observed, num_masked FROM samples WHERE name = ?"
        found = self.connection.execute(query, (sample_id,)).fetchone()
        if found is None or found[1] == "pending":
            return False
        self.connection.execute("UPDATE samples SET line = ? WHERE id = ?", (line, found[0]))
        self.count({name: -n for name, n in _standing(*found[1:]).items()})
        self.count(_standing(line, *found[2:]))
        return True

    def write_off(self, damages: Iterable[Damage]) -> None:
        """Brings the rows to what is left of these samples. Their lost tokens failed."""
        execute = self.connection.execute
        for damage in damages:
            sample, row = damage.sample, damage.row
            execute("DELETE FROM chunks WHERE sample_id = ?", (row,))
            execute("DELETE FROM routing WHERE sample_id = ?", (row,))
            grade_rows.forget(self.connection, row)
            settings = "lost = lost + ?, num_tokens = 0, num_observed = 0, snapshot = NULL"
            execute(f"UPDATE samples SET {settings} WHERE id = ?", (damage.lost, row))
            self.count({"failed": damage.lost, "generated": -sample.num_generated})  # `save` counts these again
            if not sample.prompt_ids:  # what cannot be read is emptied, so that the rest of the row can be
                self._empty_group(row)
                identity = identity_of(sample, (), sample.params)
                settings = ", ".join(f"{column} = ?" for column in (*IDENTITY, "identity"))
                execute(f"UPDATE samples SET {settings} WHERE id = ?", (*identity, checksum_of(identity), row))
            self.save([sample])

    def _empty_group(self, row: int) -> None:
        """Empties the record of a sample's group if it is damaged."""
        query = "SELECT id, checksum, name, prompt, params, task FROM groups WHERE id ="
        query += " (SELECT group_id FROM samples WHERE id = ?)"
        group, checksum, *record = self.connection.execute(query, (row,)).fetchone()
        if checksum_of(record) != checksum:
            empty = (record[0], b"", "{}", "null")
            columns = "name = ?, prompt = ?, params = ?, task = ?, checksum = ?"
            self.connection.execute(f"UPDATE groups SET {columns} WHERE id = ?", (*empty, checksum_of(empty), group))

    def set_meta(self, key: str, value: str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def prune(self, last: int) -> int:
        """Removes what deliveries up to number `last`, and what was thrown away, held. Names and counts stay.
        -> groups pruned."""
        gone = self.query(f"SELECT id FROM groups WHERE {PRUNABLE}", (last,))
        execute = self.connection.executemany
        for table in ("chunks", "routing"):
            execute(f"DELETE FROM {table} WHERE sample_id IN (SELECT id FROM samples WHERE group_id = ?)", gone)
        execute("UPDATE samples SET prompt = NULL, params = NULL, segments = '[]' WHERE group_id = ?", gone)
        execute(
            "UPDATE groups SET prompt = x'', params = '{}', task = 'null', delivery = iif(delivery = 0, -1, delivery)"
            " WHERE id = ?",
            gone,
        )
        self.connection.execute("DELETE FROM deliveries WHERE number <= ?", (last,))
        self.set_meta("pruned", str(max(min(last, self.last_delivery()), self.last_pruned())))
        return len(gone)

    # -- reading -------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        rows = self.query("SELECT value FROM meta WHERE key = ?", (key,))
        return str(rows[0][0]) if rows else None

    def knows(self, table: Literal["groups", "samples"], name: str) -> bool:
        tables = (table, "removed") if table == "samples" else (table,)
        return any(self.query(f"SELECT 1 FROM {one} WHERE name = ?", (name,)) for one in tables)

    def num_groups(self) -> int:
        """Ever submitted."""
        return int(self.query("SELECT coalesce(max(id), 0) FROM groups")[0][0])

    def last_delivery(self) -> int:
        return int(self.query("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'deliveries'")[0][0])

    def last_pruned(self) -> int:
        return int(self.meta("pruned") or 0)

    def prunable(self, last: int) -> tuple[int, int]:
        """Groups that `prune` would empty, and their output tokens."""
        query = "SELECT count(DISTINCT g.id), coalesce(sum(s.num_tokens), 0) FROM groups g JOIN samples s"
        groups, tokens = self.query(f"{query} ON s.group_id = g.id WHERE {PRUNABLE}", (last,))[0]
        return groups, tokens

    def ledger(self) -> Ledger:
        """Older stores have no rows of what was not counted beside then."""
        tokens = dict(self.query("SELECT name, tokens FROM ledger"))
        lines = {line: tokens[line] for line in LINES}
        return Ledger(tokens["generated"], lines, {name: tokens.get(name, 0) for name in BESIDE})

    def counted(self) -> dict[str, int]:
        """Tokens that the policy wrote by line, counted from the samples."""
        with self.reading():
            kept = "SELECT line, sum(num_tokens - num_observed), sum(num_masked) FROM samples GROUP BY line"
            standing = [_standing(*row) for row in self.query(kept)]
            gone = [pair for counts in standing for pair in counts.items()]
            for table in ("cuts", "removed"):
                gone += self.query(f"SELECT line, sum(tokens) FROM {table} GROUP BY line")
            gone += [("failed", self.query("SELECT coalesce(sum(lost), 0) FROM samples")[0][0])]
        counts: dict[str, int] = {}
        for line, tokens in gone:
            counts[line] = counts.get(line, 0) + tokens
        return counts

    def num_saved(self) -> dict[str, tuple[int, int]]:
        """Output tokens of every sample of an open group, and those of them that are observations, by name."""
        query = "SELECT s.name, s.num_tokens, s.num_observed FROM groups g JOIN samples s ON s.group_id = g.id"
        return {name: (n, observed) for name, n, observed in self.query(f"{query} WHERE g.delivery IS NULL")}

    def saved_kv(self) -> dict[str, bytes]:
        """samples.snapshot by sample, of those that have any; as bytes, for it may be damaged."""
        query = "SELECT name, CAST(snapshot AS BLOB) FROM samples WHERE snapshot IS NOT NULL"
        return dict(self.query(query))

    def open_groups(self) -> tuple[list[Group], list[Damage]]:
        """Groups that are not handed over, in order of submission."""
        return self.load("g.delivery IS NULL")

    def deliveries(self, after: int) -> Iterator[Delivery]:
        query = "SELECT number, iteration, time FROM deliveries WHERE number > ? ORDER BY number"
        for number, iteration, at in self.query(query, (after,)):
            groups, damages = self.load("g.delivery = ?", (number,))
            if damages:
                raise StoreCorrupt(f"{self.directory}: delivery {number}: {damages[0].found}")
            yield Delivery(number, iteration, at, groups)

    def load(self, where: str, values: Sequence[Any] = ()) -> tuple[list[Group], list[Damage]]:
        """The groups for which `where` (of groups g) holds, and what is damaged in them."""
        try:
            return self._load(where, values)
        except StoreError as error:
            if not isinstance(error.__cause__, sqlite3.OperationalError) or "UTF-8" not in str(error):
                raise
        # A damaged text that is no text any more. With this it is a wrong text, which its checksum tells.
        self.connection.text_factory = lambda data: data.decode(errors="replace")
        return self._load(where, values)

    def _load(self, where: str, values: Sequence[Any]) -> tuple[list[Group], list[Damage]]:
        groups: dict[int, Group] = {}
        prompts: dict[int, tuple[tuple[int, ...], SamplingParams, bool]] = {}
        damages = []
        with self.reading(), quiet_collector():
            outputs = self._outputs(where, values)
            routing = routing_rows.load(self.connection, where, values)
            query = f"SELECT id, checksum, name, prompt, params, task FROM groups g WHERE {where} ORDER BY id"
            for group, checksum, *record in self.connection.execute(query, values):
                name, prompt, params, task = record
                whole = checksum_of(record) == checksum
                groups[group] = Group(name, [], json.loads(task) if whole and task != "null" else None)
                prompts[group] = (tuple(unpack_ids(prompt)), params_of(params), True) if whole else UNREADABLE
            columns = ", ".join(f"s.{column}" for column in (*IDENTITY, *STATE))
            query = (
                f"SELECT s.id, s.group_id, s.identity, s.checksum, {columns} FROM groups g JOIN samples s"
                f" ON s.group_id = g.id WHERE {where} ORDER BY s.id"
            )
            for row, group, identity, checksum, *record in self.connection.execute(query, values):
                prompt, params, whole = prompts[group]
                whole = whole and checksum_of(record[: len(IDENTITY)]) == identity
                readable = whole, checksum_of(record[len(IDENTITY) :]) == checksum
                output = outputs.get(row) or (b"", b"")
                sample, damage = restore(row, record, readable, groups[group].id, prompt, params, output)
                groups[group].samples.append(sample)
                unrouted = routing_rows.attach(sample, routing.get(row) if whole else None)
                if damage is None and unrouted is not None:
                    damage = Damage(sample, row, 0, *unrouted)
                if damage is not None:
                    damages.append(damage)
        return list(groups.values()), damages

    def grades(self, where: str = "true", values: Sequence[Any] = ()) -> dict[str, list[Regrade]]:
        """By sample, oldest first; of the groups g for which `where` holds. What is damaged is left out (`check`)."""
        with self.reading():
            return grade_rows.load(self.connection, where, values)[0]

    def _outputs(self, where: str, values: Sequence[Any]) -> dict[int, tuple[bytes, bytes]]:
        """Packed output ids and log-probabilities by row of the sample, up to the first chunk that is missing or
        damaged."""
        outputs: dict[int, tuple[bytes, bytes]] = {}
        more: dict[int, tuple[list[bytes], list[bytes], int]] = {}
        query = (
            "SELECT c.sample_id, c.start, c.tokens, c.logprobs, c.checksum FROM groups g JOIN samples s"
            f" ON s.group_id = g.id JOIN chunks c ON c.sample_id = s.id WHERE {where} ORDER BY g.id, s.id, c.start"
        )
        for row, start, tokens, logprobs, checksum in self.connection.execute(query, values):
            if checksum_of_bytes(tokens, logprobs) != checksum:
                continue
            if start == 0:
                outputs[row] = tokens, logprobs
            elif row in outputs:
                first, _ = outputs[row]
                parts = more.setdefault(row, ([], [], len(first) // ID_BYTES))
                if start == parts[2]:
                    parts[0].append(tokens)
                    parts[1].append(logprobs)
                    more[row] = (*parts[:2], start + len(tokens) // ID_BYTES)
        for row, (tokens, logprobs, _) in more.items():
            first, second = outputs[row]
            outputs[row] = b"".join([first, *tokens]), b"".join([second, *logprobs])
        return outputs

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """What is wrong with the file: SQLite's own check, every checksum, every conservation law. Nothing if it is
        sound. Beside a writer it sees one moment."""
        with self.reading():
            problems = [row[0] for row in self.query("PRAGMA integrity_check") if row[0] != "ok"]
            problems += [
                f"table {row[0]}, row {row[1]} belongs to nothing" for row in self.query("PRAGMA foreign_key_check")
            ]
            kept = "(g.delivery IS NULL OR g.delivery = 0 OR g.delivery IN (SELECT number FROM deliveries))"
            for first in range(0, self.num_groups() + 1, CHECK_AT_ONCE):
                some = f"g.id >= {first} AND g.id < {first + CHECK_AT_ONCE} AND {kept}"
                groups, damages = self.load(some)
                problems += [damage.found for damage in damages]
                problems += grade_rows.load(self.connection, some, ())[1]
                problems += [f"group {group.id} has no samples" for group in groups if not group.samples]
                for sample in (s for group in groups for s in group.samples):
                    try:
                        sample.check_integrity()
                    except AssertionError as error:
                        problems.append(f"sample {sample.id}: versions or segments do not fit its tokens ({error})")
            ledger, counted = self.ledger(), self.counted()
            for line, tokens in ledger.places.items():
                if tokens != counted.get(line, 0):
                    problems.append(f"ledger: {line} says {tokens}, the samples say {counted.get(line, 0)}")
            for line in sorted(counted.keys() - ledger.places.keys()):
                problems.append(f"ledger: no line is called {line!r}, but samples stand on it")
            settled = "SELECT s.name FROM samples s JOIN groups g ON g.id = s.group_id WHERE"
            for condition, what in (
                ("g.delivery IS NULL AND s.line != 'pending'", "is settled, but its group was not handed over"),
                ("g.delivery IS NOT NULL AND s.line = 'pending'", "is pending, but its group was handed over"),
            ):
                problems += [f"sample {name} {what}" for (name,) in self.query(f"{settled} {condition}")]
            unknown = "SELECT name FROM groups WHERE delivery > ?"
            problems += [f"group {name} is in no delivery" for (name,) in self.query(unknown, (self.last_delivery(),))]
        return problems


def _standing(line: str, tokens: int, masked: int) -> dict[str, int]:
    """Where tokens of a sample on this line stand: those that are left out of the loss are not trained on."""
    return {"trained": tokens - masked, "stale": masked} if line == "trained" else {line: tokens}


def _chunk(row: int, sample: Sample, start: int) -> tuple[Any, ...]:
    """A row of `chunks`: the output from position `start` on."""
    tokens, logprobs = pack_ids(sample.output_ids[start:]), pack_logprobs(sample, start)
    return row, start, tokens, logprobs, checksum_of_bytes(tokens, logprobs)
