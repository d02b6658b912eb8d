"""The store under random use, against plain dicts: what is open, what was delivered, where every token stands."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.partial_rollout.store_helpers import finish, flip, grow, make, observe, raw, records

from longtail import Sample, SampleStore, StoreFull
from longtail.partial_rollout.ledger import CUT, LINES, WASTED, CutLine, Line, line_of
from longtail.sample import OBSERVATION

REASONS = st.sampled_from(["stop", "length", "repetition", "aborted", "error"])


class StoreMachine(RuleBasedStateMachine):
    @initialize(on_disk=st.booleans())
    def open(self, on_disk: bool) -> None:
        self.folder = tempfile.TemporaryDirectory() if on_disk else None
        self.directory = Path(self.folder.name) / "store" if self.folder else None
        self.store = SampleStore(self.directory)
        self.named = 0
        self.line_of: dict[str, str] = {}
        self.settled_tokens: dict[str, int] = {}
        self.beside = 0
        self.damaged = 0
        self.cuts: dict[str, int] = dict.fromkeys(LINES, 0)
        self.delivered: dict[int, dict] = {}
        self.pruned = 0

    def samples(self) -> list[Sample]:
        return [s for group in self.store for s in group.samples]

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), brought=st.integers(0, 4))
    def submit(self, sizes: list[int], brought: int) -> None:
        groups = []
        for n in sizes:
            groups.append(make(f"g{self.named}", n=n, seed=self.named))
            for sample in groups[-1].samples:
                sample.multi_turn = bool(self.named % 2)
            self.named += 1
        if brought:
            grow(groups[0].samples[0], brought)
        self.store.add(groups)

    @rule(data=st.data(), tokens=st.integers(0, 5), version=st.integers(0, 2), end=st.none() | REASONS)
    def progress(self, data: st.DataObject, tokens: int, version: int, end: str | None) -> None:
        samples = self.store.unfinished()
        if not samples:
            return
        sample = data.draw(st.sampled_from(samples))
        self.store.watch([sample])
        sample.turn_ended = False
        grow(sample, tokens, version=max([version, *sample.versions]))
        if end is not None:
            finish(sample, 0, end)  # type: ignore[arg-type]
            if end == "error":
                sample.status, sample.failure = "failed", "test"
        elif data.draw(st.booleans()):
            sample.status = "paused"

    @rule(data=st.data(), tokens=st.integers(1, 5), more=st.integers(0, 3))
    def answer(self, data: st.DataObject, tokens: int, more: int) -> None:
        """A turn ends; its environment answers or is still to."""
        samples = [s for s in self.store.unfinished() if s.multi_turn]
        if not samples:
            return
        sample = data.draw(st.sampled_from(samples))
        self.store.watch([sample])
        if not sample.turn_ended:
            grow(sample, 1 + more, version=max([0, *sample.versions]))
            sample.status, sample.turn_ended = "paused", True
        else:
            observe(sample, tokens)

    @rule(data=st.data(), line=st.sampled_from(CUT), masked=st.booleans())
    def cut(self, data: st.DataObject, line: CutLine, masked: bool) -> None:
        samples = [s for s in self.samples() if s.status not in ("running", "waiting")]
        if not samples:
            return
        sample = data.draw(st.sampled_from(samples))
        output, wrote = [*sample.output_ids], [version != OBSERVATION for version in sample.versions]
        if masked:
            sample.masked = data.draw(st.integers(0, len(output)))
        length = data.draw(st.integers(0, len(output)))
        dropped = self.store.cut(sample, length, line)
        kept = len(sample.output_ids)
        assert sample.output_ids == output[:kept]
        assert kept == length or not any(wrote[kept : length + 1])
        assert dropped == sum(wrote[kept:])
        self.cuts[line] += dropped

    @rule(version=st.integers(0, 2))
    def rewind(self, version: int) -> None:
        if any(s.status == "running" for s in self.samples()):
            return
        newer = sum(v > version for s in self.samples() for v in s.versions)
        assert self.store.rewind_to(version) == newer
        assert all(v <= version for s in self.samples() for v in s.versions)
        self.cuts["stale"] += newer

    @rule(recomputed=st.integers(0, 9))
    def commit(self, recomputed: int) -> None:
        self.store.count(recomputed=recomputed)
        self.store.commit()
        self.beside += recomputed

    @rule()
    def hand_over(self) -> None:
        groups = self.store.complete()
        number = self.store.hand_over(groups)
        assert bool(number) == bool(groups)
        if groups:
            assert number == self.store.last_delivery
            self.delivered[number] = records(groups)
        for sample in (s for g in groups for s in g.samples):
            self.settle_in_model(sample, line_of(sample))

    @precondition(lambda self: len(self.store) > 0)
    @rule(data=st.data(), line=st.sampled_from(WASTED))
    def discard(self, data: st.DataObject, line: Line) -> None:
        group = data.draw(st.sampled_from(list(self.store)))
        self.store.discard([group], line)
        for sample in group.samples:
            self.settle_in_model(sample, line)

    def settle_in_model(self, sample: Sample, line: str) -> None:
        assert sample.id not in self.line_of, "left twice"
        self.line_of[sample.id] = line
        self.settled_tokens[sample.id] = sample.num_generated

    @precondition(lambda self: self.line_of)
    @rule(data=st.data(), line=st.sampled_from(LINES))
    def settle(self, data: st.DataObject, line: Line) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.line_of)), max_size=3))
        self.store.settle(ids, line)
        self.line_of |= dict.fromkeys(ids, line)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def prune(self, data: st.DataObject) -> None:
        last = data.draw(st.integers(0, max(self.delivered)))
        self.store.prune(last)
        self.pruned = max(self.pruned, last)
        self.delivered = {n: groups for n, groups in self.delivered.items() if n > last}

    @precondition(lambda self: self.directory is not None and self.store.unfinished())
    @rule()
    def fails_on_a_full_disk(self) -> None:
        query = self.store._database.query
        sample = self.store.unfinished()[0]
        self.store.watch([sample])
        sample.turn_ended = False
        grow(sample, 3000, version=max([0, *sample.versions]))
        before, pages = self.store.ledger, query("PRAGMA max_page_count")[0][0]
        query(f"PRAGMA max_page_count = {query('PRAGMA page_count')[0][0]}")
        try:
            self.store.commit()
        except StoreFull:
            assert self.store.ledger == before
        query(f"PRAGMA max_page_count = {pages}")

    @precondition(lambda self: self.directory is not None)
    @rule(kill=st.booleans())
    def reopen(self, kill: bool) -> None:
        expected = records(list(self.store))
        if kill:  # what a commit has not seen is gone
            self.store._database.close()
            self.store = SampleStore(self.directory)
            got = records(list(self.store))
            assert got.keys() == expected.keys()
            for name, samples in got.items():
                for mine, theirs in zip(samples, expected[name], strict=True):
                    length = len(mine["output_ids"])  # type: ignore[arg-type]
                    assert mine["output_ids"] == theirs["output_ids"][:length]  # type: ignore[index]
        else:
            self.store.close()
            self.store = SampleStore(self.directory)
            for name, samples in records(list(self.store)).items():
                for mine, theirs in zip(samples, expected[name], strict=True):
                    if theirs["status"] in ("running", "waiting", "paused"):
                        theirs["status"] = "paused" if theirs["output_ids"] else "waiting"
                    assert mine == theirs
        assert self.store.damages == []

    @precondition(lambda self: self.directory is not None)
    @rule()
    def damage(self) -> None:
        assert self.directory is not None
        self.store.close()
        with raw(self.directory) as connection:
            open_chunks = (
                "SELECT c.rowid, s.name, c.start FROM chunks c JOIN samples s ON s.id = c.sample_id"
                " JOIN groups g ON g.id = s.group_id WHERE g.delivery IS NULL"
            )
            row = connection.execute(open_chunks).fetchone()
        if row is not None:
            (sample,) = [s for s in self.samples() if s.id == row[1]]
            wrote = [version != OBSERVATION for version in sample.versions]
            flip(self.directory, "chunks", "logprobs", f"rowid = {row[0]}", byte=3, bit=5)
        self.store = SampleStore(self.directory)
        assert len(self.store.damages) == (row is not None)
        if row is not None:
            (sample,) = [s for s in self.samples() if s.id == row[1]]
            kept = len(sample.output_ids)
            assert (kept == row[2] or not any(wrote[kept : row[2] + 1])) and not sample.is_done
            self.damaged += sum(wrote[kept:])

    @rule()
    def check(self) -> None:
        self.store.check_integrity()
        lines: dict[str, int] = dict.fromkeys(LINES, 0)
        for sample_id, line in self.line_of.items():
            lines[line] += self.settled_tokens[sample_id]
        for line, tokens in self.cuts.items():
            lines[line] += tokens
        lines["failed"] += self.damaged
        ledger = self.store.ledger
        assert lines == ledger.lines
        self.store.commit()
        ledger = self.store.ledger
        assert ledger.pending == sum(s.num_generated for s in self.samples())
        assert ledger.beside["recomputed"] == self.beside
        assert self.store.num_submitted == self.named
        if self.directory is not None:
            got = {d.number: records(d.groups) for d in self.store.deliveries(after=self.pruned)}
            assert got == self.delivered
            assert self.store._database.check() == []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.check()
            self.store.close()
            if self.folder:
                self.folder.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStore = pytest.mark.timeout(300)(TestStore)
