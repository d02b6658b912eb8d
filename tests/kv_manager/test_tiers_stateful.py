"""Tiers under random use, against a plain model of what is in host memory: a list in the order of use.

Writes and reads happen when a rule says so. What is on disk, and what is being worked on, is looked up; what has to
leave host memory for whom, and what is refused, the model says by itself.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kv_manager.test_tiers import BLOCK, by_hand, put

from longtail.kv_manager.part import Part


@dataclasses.dataclass(eq=False)
class Record:
    name: str
    blocks: int
    number: int
    remaining: int
    part: Part
    pins: int = 0


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        host=st.sampled_from([4, 6, 8]),
        disk=st.sampled_from([None, None, 8]),
        eviction=st.sampled_from(["lru", "longest-remaining"]),
    )
    def start(self, host: int, disk: int | None, eviction: str) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.host, self.disk, self.eviction = host, disk, eviction
        disk_bytes = None if disk is None else disk * BLOCK
        self.tiers, self.writer, self.reader = by_hand(
            self.path, host_bytes=host * BLOCK, disk_bytes=disk_bytes, eviction=eviction
        )
        self.records: list[Record] = []
        self.memory: list[Record] = []
        """In host memory, the least recently used first."""
        self.reading: list[Record] = []
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "path"):
            for r in self.records:
                del r.part
            self.writer.run()
            self.reader.run()
            assert self.tiers.host_used == self.tiers.disk_used == 0
            self.writer.run()  # the files' removal
            assert not list(self.path.iterdir())
            shutil.rmtree(self.path)

    # ---- what the model knows

    def used(self) -> int:
        return sum(r.blocks for r in [*self.memory, *self.reading])

    def make_room(self, blocks: int, busy: int) -> list[Record] | None:
        """Who has to leave; None if that is not enough. busy: blocks that are in nobody's list."""
        order = self.memory
        if self.eviction == "longest-remaining":
            order = sorted(self.memory, key=lambda r: -r.remaining)
        victims: list[Record] = []
        excess = self.used() + busy + blocks - self.host
        for r in order:
            if excess > 0 and r.part.file is not None and not r.pins:
                victims.append(r)
                excess -= r.blocks
        return victims if excess <= 0 else None

    def busy(self) -> int:
        """Blocks of dropped parts that a thread is not done with."""
        return self.tiers.host_used // BLOCK - self.used()

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "records"):
            return
        self.tiers.check_integrity()
        assert self.tiers.host_used <= self.host * BLOCK
        assert self.disk is None or self.tiers.disk_used <= self.disk * BLOCK
        assert self.busy() >= 0
        for r in self.records:
            assert r.part.in_memory == (r in self.memory), r.name
            assert r.part.in_memory or r.part.file is not None or r in self.reading, f"{r.name} is nowhere"
            assert r.part._stored.pins == r.pins

    # ---- what happens

    @rule(blocks=st.integers(1, 4), remaining=st.integers(0, 9))
    def put(self, blocks: int, remaining: int) -> None:
        self.count += 1
        victims = self.make_room(blocks, self.busy())
        part = put(self.tiers, str(self.count), blocks, self.count, remaining=remaining)
        assert (part is None) == (victims is None)
        if part is not None:
            self.memory = [r for r in self.memory if r not in (victims or [])]
            self.records.append(Record(str(self.count), blocks, self.count, remaining, part))
            self.memory.append(self.records[-1])

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(self.records))
        if r.pins:
            return
        for held in (self.records, self.memory, self.reading):
            if r in held:
                held.remove(r)
        del r.part  # Hypothesis may keep the record

    @rule()
    def write(self) -> None:
        if self.writer.queue:
            self.writer.run(1)

    @rule()
    def read(self) -> None:
        if self.reader.queue:
            self.reader.run(1)
            for r in [r for r in self.reading if r.part.in_memory]:
                self.reading.remove(r)
                self.memory.append(r)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.sampled_from(self.records), min_size=1, max_size=3, unique=True))
        for r in wanted:
            r.pins += 1
        missing = [r for r in wanted if r not in self.memory and r not in self.reading]
        victims = self.make_room(sum(r.blocks for r in missing), self.busy())
        assert self.tiers.prefetch([r.part for r in wanted]) == (victims is not None)
        if victims is None:
            for r in wanted:
                r.pins -= 1
            return
        self.memory = [r for r in self.memory if r not in victims]
        for r in wanted:
            if r in self.memory:
                self.memory.remove(r)
                self.memory.append(r)
        self.reading += missing

    @precondition(lambda self: any(r.pins for r in self.records))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from([r for r in self.records if r.pins]))
        r.pins -= 1
        self.tiers.unpin([r.part])

    @precondition(lambda self: self.memory)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        r = data.draw(st.sampled_from(self.memory))
        assert torch.equal(self.tiers.load(r.part)["kv"].unique(), torch.tensor([float(r.number)]))
        self.memory.remove(r)
        self.memory.append(r)


TestTiersAgainstAModel = TiersMachine.TestCase
TestTiersAgainstAModel.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
