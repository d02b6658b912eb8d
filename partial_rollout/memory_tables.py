"""The tables of a store in memory: names and counts, in dictionaries. The groups themselves hold the rest.

Same methods and same sums as `Database`, as far as `SampleStore` asks a store without a directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from longtail.errors import StoreError
from longtail.partial_rollout.ledger import BESIDE, LINES, Ledger, Line
from longtail.sample import Group, Sample


class _Row(NamedTuple):
    """Of a sample."""

    line: str
    tokens: int
    """Of the output,"""
    observed: int
    """of these written by an environment,"""
    masked: int
    """and of the policy's those left out of the loss."""


_BLANK = _Row("pending", 0, 0, 0)
_ABSENT: Any = object()


class MemoryTables:
    """For one thread. Changes are made inside a `transaction`, which takes them back if it raises."""

    def __init__(self) -> None:
        self.is_open = True
        self._groups: dict[str, int | None] = {}
        """Delivery of each group; None: open, 0: thrown away."""
        self._open: dict[str, tuple[str, ...]] = {}
        """Samples of the open groups."""
        self._samples: dict[str, _Row] = {}
        self._cuts: dict[str, dict[str, int]] = {}
        """Tokens that were cut off a sample, by line."""
        self._removed: dict[str, dict[str, int]] = {}
        """Of samples that were taken out of their group, by line."""
        self._tokens: dict[str, int] = dict.fromkeys(("generated", *LINES, *BESIDE), 0)
        self._meta: dict[str, int] = {"iteration": 0, "deliveries": 0, "pruned": 0}
        self._undo: list[tuple[dict[Any, Any], Any, Any]] | None = None

    def close(self) -> None:
        self.is_open = False

    def _check_open(self) -> None:
        if not self.is_open:
            raise StoreError("the store in memory is closed in this process; open it again")

    # -- writing -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        self._check_open()
        undo: list[tuple[dict[Any, Any], Any, Any]] = []
        self._undo = undo
        try:
            yield
        except BaseException:
            for table, key, before in reversed(undo):
                if before is _ABSENT:
                    table.pop(key, None)
                else:
                    table[key] = before
            raise
        finally:
            self._undo = None

    def _set(self, table: dict[Any, Any], key: Any, value: Any = _ABSENT) -> None:
        """No value: out of the table."""
        assert self._undo is not None, "inside a transaction only"
        self._undo.append((table, key, table.get(key, _ABSENT)))
        if value is _ABSENT:
            table.pop(key, None)
        else:
            table[key] = value

    def add_groups(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._set(self._groups, group.id, None)
            self._set(self._open, group.id, tuple(sample.id for sample in group.samples))
            for sample in group.samples:
                self._set(self._samples, sample.id, _BLANK)

    def save(self, samples: Iterable[Sample]) -> None:
        gained = 0
        for sample in samples:
            before, length = self._samples[sample.id], len(sample.output_ids)
            if length == before.tokens and sample.masked == before.masked == 0:
                continue
            generated = sample.num_generated
            assert length >= before.tokens, f"sample {sample.id} has lost tokens: {length} of {before.tokens}"
            gained += generated - (before.tokens - before.observed)
            self._put(sample, before.line, length, generated)
        self.count({"generated": gained})

    def _put(self, sample: Sample, line: str, length: int, generated: int) -> None:
        masked = sample.num_masked if sample.masked else 0
        self._set(self._samples, sample.id, _Row(line, length, length - generated, masked))

    def cut(self, cuts: Iterable[tuple[Sample, Sample, Line]]) -> None:
        for before, after, line in cuts:
            row, generated = self._samples[before.id], after.num_generated
            self._put(after, row.line, len(after.output_ids), generated)
            if tokens := before.num_generated - generated:
                self._more(self._cuts, before.id, line, tokens)
                self.count({line: tokens})

    def remove(self, samples: Iterable[Sample], line: Line) -> None:
        for sample in samples:
            for name, tokens in ((line, sample.num_generated), *self._cuts.get(sample.id, {}).items()):
                self._more(self._removed, sample.id, name, tokens)
            self._set(self._cuts, sample.id)
            self._set(self._samples, sample.id)
            kept = tuple(name for name in self._open[sample.group_id] if name != sample.id)
            self._set(self._open, sample.group_id, kept)
            self.count({line: sample.num_generated})

    def _more(self, table: dict[str, dict[str, int]], name: str, line: str, tokens: int) -> None:
        before = table.get(name, {})
        self._set(table, name, before | {line: before.get(line, 0) + tokens})

    def save_kv(self, records: Mapping[str, str | None]) -> None:
        """No store in memory keeps any."""
        assert not records

    def count(self, tokens: Mapping[Any, int]) -> None:
        for name, number in tokens.items():
            if number:
                self._set(self._tokens, name, self._tokens[name] + number)

    def leave(self, groups: Sequence[Group], lines: Mapping[str, Line], iteration: int | None) -> int:
        number = 0
        if iteration is not None:
            self._set(self._meta, "iteration", iteration + 1)
            if groups:
                number = self._meta["deliveries"] + 1
                self._set(self._meta, "deliveries", number)
        tokens = dict.fromkeys(("pending", *LINES), 0)
        for group in groups:
            self._set(self._groups, group.id, number)
            self._set(self._open, group.id)
            for sample in group.samples:
                row, line = self._samples[sample.id], lines[sample.id]
                before, length, observed, masked = row
                _move(tokens, before, length - observed, masked, -1)
                _move(tokens, line, length - observed, masked, 1)
                self._set(self._samples, sample.id, _Row(line, length, observed, masked))
        del tokens["pending"]
        self.count(tokens)
        return number

    def settle(self, sample_id: str, line: Line) -> bool:
        row = self._samples.get(sample_id)
        if row is None or row.line == "pending":
            return False
        tokens: dict[str, int] = dict.fromkeys(LINES, 0)
        written = row.tokens - row.observed
        _move(tokens, row.line, written, row.masked, -1)
        _move(tokens, line, written, row.masked, 1)
        self._set(self._samples, sample_id, _Row(line, *row[1:]))
        self.count(tokens)
        return True

    def prune(self, last: int) -> int:
        """There is nothing to forget but that it was there."""
        gone = [name for name, number in self._groups.items() if number is not None and 0 <= number <= last]
        for name in gone:
            self._set(self._groups, name, -1)
        self._set(self._meta, "pruned", max(min(last, self._meta["deliveries"]), self._meta["pruned"]))
        return len(gone)

    # -- reading -------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> int:
        self._check_open()
        return self._meta[key]

    def knows(self, table: Literal["groups", "samples"], name: str) -> bool:
        self._check_open()
        return name in self._groups if table == "groups" else name in self._samples or name in self._removed

    def num_groups(self) -> int:
        self._check_open()
        return len(self._groups)

    def last_delivery(self) -> int:
        return self.meta("deliveries")

    def last_pruned(self) -> int:
        return self.meta("pruned")

    def ledger(self) -> Ledger:
        self._check_open()
        tokens = self._tokens
        return Ledger(tokens["generated"], {line: tokens[line] for line in LINES}, {b: tokens[b] for b in BESIDE})

    def counted(self) -> dict[str, int]:
        self._check_open()
        counts: dict[str, int] = dict.fromkeys(("pending", *LINES), 0)
        for row in self._samples.values():
            _move(counts, row.line, row.tokens - row.observed, row.masked, 1)
        for table in (self._cuts, self._removed):
            for lines in table.values():
                for line, tokens in lines.items():
                    counts[line] += tokens
        return counts

    def num_saved(self) -> dict[str, tuple[int, int]]:
        self._check_open()
        rows = self._samples
        return {name: rows[name][1:3] for names in self._open.values() for name in names}


def _move(counts: dict[str, int], line: str, tokens: int, masked: int, sign: int) -> None:
    """Tokens of a sample on this line: those that are left out of the loss are not trained on."""
    if line == "trained" and masked:
        counts["stale"] += sign * masked
        tokens -= masked
    counts[line] += sign * tokens
