"""Where samples live between iterations: in memory, or in a directory that outlives the process.

    add -> open groups -> hand_over -> the caller's, exactly once
             |   ^
             |   +- tokens, as an engine makes them (watch, commit), and less of them (cut)
             +----> discard (thrown away, for a named reason)

On disk nothing that was committed is lost to `kill -9`: a store that is opened again holds the same open groups, and
unfinished samples go on from their last committed token, to the same end. A group is handed over in one transaction,
under a delivery number. A trainer saves `last_delivery` in its checkpoint, beside the weights that it has made of
everything up to there. When it comes back, `deliveries(after=number)` has what those weights have not seen, and nothing
twice; then it goes on with `collect`. `prune(number)` forgets what no checkpoint will ask for again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.errors import StoreError
from longtail.partial_rollout.database import Database, Delivery
from longtail.partial_rollout.ledger import BESIDE, CUT, LINES, WASTED, Beside, CutLine, Ledger, Line, line_of
from longtail.partial_rollout.memory_tables import MemoryTables
from longtail.partial_rollout.records import Damage, copied
from longtail.partial_rollout.saved_kv import FOLDER, SavedKV, record_of
from longtail.partial_rollout.sqlite_file import named
from longtail.sample import Group, Sample
from longtail.version import check_version

if TYPE_CHECKING:
    from longtail.kv_manager.snapshot import Snapshot
    from longtail.kv_manager.tiers import Tiers


class SampleStore:
    """Owns every group from submission until it is handed over, which happens exactly once, and the ledger.

    directory: None keeps everything in memory. commit_every: seconds of generated tokens that a killed process may
    have to make again.
    Raises StoreLocked if another process has the directory open, StoreCorrupt if it holds something else, StoreFull
    if the disk is full; what a call that raises was to change is as before. For one thread.
    """

    def __init__(self, directory: str | Path | None = None, *, commit_every: float = 0.5) -> None:
        if not commit_every >= 0:
            raise ValueError(f"commit_every must be at least 0 seconds, not {commit_every}")
        self.directory = None if directory is None else Path(directory)
        self.commit_every = commit_every
        self._database: Any
        groups: list[Group] = []
        damages: list[Damage] = []
        self._saved_kv: SavedKV | None = None
        if self.directory is None:
            self._database = MemoryTables()
        else:
            self._database = database = Database(self.directory)
            try:
                groups, damages = database.open_groups()
                if damages:
                    with database.transaction(durable=True):
                        database.write_off(damages)
                self._saved_kv = self._open_kv(self.directory)
            except BaseException:
                database.close()
                raise
        self._groups = {group.id: group for group in groups}
        self._watched: dict[str, Sample] = {}
        """Samples that an engine may be changing, or has changed since the last commit."""
        self._beside: dict[Beside, int] = dict.fromkeys(BESIDE, 0)
        """What the next commit adds to the ledger."""
        self._last_commit = time.monotonic()
        self.damages = [f"{damage.found}; {damage.done}" for damage in damages]
        """What was found damaged when the store was opened, or an engine came to it, and what was done about it."""
        self._name_kv_faults(())

    def _open_kv(self, directory: Path) -> SavedKV:
        saved = SavedKV(directory / FOLDER, self._database.saved_kv())
        with named(directory):
            saved.sweep()
        return saved

    def _name_kv_faults(self, named_before: Collection[str]) -> None:
        for sample_id, fault in ({} if self._saved_kv is None else self._saved_kv.faults).items():
            if sample_id not in named_before:
                self.damages.append(f"sample {sample_id}: {fault}; it continues from its tokens")

    def use_tiers(self, tiers: Tiers) -> None:
        """An engine with these tiers runs the samples: their saved KV goes to the store's directory, and what is there
        comes back. A store in memory keeps none. ValueError if the tiers write to another directory."""
        if self._saved_kv is not None:
            before = set(self._saved_kv.faults)
            with named(self.directory):
                self._saved_kv.use(tiers, self.unfinished())
            self._name_kv_faults(before)

    def close(self) -> None:
        """Commits, with all saved KV that the disk takes, and gives the directory back. May be called again."""
        if self._database.is_open:
            try:
                self.flush()
            finally:
                try:
                    if self._saved_kv is not None:
                        self._saved_kv.close()
                finally:
                    self._database.close()

    @property
    def is_open(self) -> bool:
        return self._database.is_open

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- groups in and out ---------------------------------------------------------------------------------------------

    def add(self, groups: Iterable[Group]) -> None:
        """All or none. ValueError if an id was used before, or a group is empty, mislabelled, or (on disk) has a task
        that JSON cannot say. Tokens that a sample brings count as generated."""
        batch = list(groups)
        names: set[str] = set()
        samples: dict[str, Sample] = {}
        for group in batch:
            if group.id in self or group.id in names:
                raise ValueError(f"group id {group.id!r} was submitted before; every group needs its own id")
            if not group.samples:
                raise ValueError(f"group {group.id!r} has no samples; n must be at least 1")
            names.add(group.id)
            for sample in group.samples:
                if sample.id in samples or self._database.knows("samples", sample.id):
                    raise ValueError(f"sample id {sample.id!r} was submitted before; every sample needs its own id")
                if sample.group_id != group.id:
                    raise ValueError(f"sample {sample.id!r} has group_id {sample.group_id!r}, not {group.id!r}")
                samples[sample.id] = sample
        with self._transaction(()):
            self._database.add_groups(batch)
            self._database.save(s for s in samples.values() if s.output_ids or s.is_done)
        self._groups |= {group.id: group for group in batch}

    def __contains__(self, group_id: str) -> bool:
        """Whether a group of this id was ever submitted."""
        return group_id in self._groups or self._database.knows("groups", group_id)

    def __len__(self) -> int:
        """Groups not handed over yet."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def num_submitted(self) -> int:
        """Groups ever submitted."""
        return self._database.num_groups()

    def unfinished(self) -> list[Sample]:
        return [sample for group in self._groups.values() for sample in group.samples if not sample.is_done]

    def complete(self) -> list[Group]:
        """The groups whose samples are all done."""
        return [group for group in self._groups.values() if group.is_complete]

    def hand_over(self, groups: Iterable[Group], iteration: int | None = None) -> int:
        """These groups are the caller's now. On the ledger their tokens are trained, but for samples that failed, were
        aborted or ran in circles; `settle` corrects that. iteration: that this ends; None: the current one.
        -> number of the delivery, 0 for no groups.

        ValueError if one is not complete or not here."""
        batch = self._own(groups)
        for group in batch:
            if not group.is_complete:
                raise ValueError(f"group {group.id!r} is not complete; hand over what complete() lists")
        lines = {s.id: line_of(s) for group in batch for s in group.samples}
        return self._leave(batch, lines, self.iteration if iteration is None else iteration)

    def discard(self, groups: Iterable[Group], line: Line) -> None:
        """Throws groups away, finished or not: nobody will ask for them again. line: why. No engine may be running
        them."""
        if line not in WASTED:
            raise ValueError(f"line must be one of {', '.join(WASTED)}, not {line!r}")
        batch = self._own(groups)
        self._leave(batch, {s.id: line for group in batch for s in group.samples}, None)

    def _own(self, groups: Iterable[Group]) -> list[Group]:
        batch = {group.id: group for group in groups}
        for group in batch.values():
            if self._groups.get(group.id) is not group:
                raise ValueError(f"group {group.id!r} is not in the store; was it handed over or thrown away before?")
        return list(batch.values())

    def _leave(self, groups: list[Group], lines: Mapping[str, Line], iteration: int | None) -> int:
        samples = [s for group in groups for s in group.samples]
        with self._transaction(samples, leaving=samples):
            self._database.save(samples)
            number = self._database.leave(groups, lines, iteration)
        for sample in samples:
            self._watched.pop(sample.id, None)
            sample.snapshot = None  # nobody will continue it
        for group in groups:
            del self._groups[group.id]
        return number

    def cut(self, sample: Sample, length: int, line: CutLine) -> int:
        """Drops a sample's output from position `length` on (`Sample.cut`), for a named reason: the dropped tokens stay
        on that line of the ledger. Durable on return, before it nothing has changed. -> tokens dropped that the policy
        wrote.

        ValueError for a sample that is in an engine, or not in an open group of this store."""
        return self._cut([(sample, length)], line)

    def rewind_to(self, version: int) -> int:
        """For a trainer that fell back to the weights of `version`: cuts every open sample, finished or not, before its
        first token of newer ones (line stale). All or none. -> tokens dropped."""
        check_version(version)
        return self._cut(newer_parts(self._groups.values(), version), "stale")

    def remove(self, samples: Iterable[Sample], line: CutLine) -> None:
        """Takes samples out of their open groups for good: nobody will continue them, or train on them. Their tokens
        stay on that line of the ledger. Durable on return.

        ValueError for a sample that is in an engine, or not in an open group of this store, and if a group would have
        none left."""
        batch = list(samples)
        self._check_open(batch)
        gone = {id(sample) for sample in batch}
        for group in {id(g): g for g in (self._groups[s.group_id] for s in batch)}.values():
            if all(id(sample) in gone for sample in group.samples):
                raise ValueError(f"group {group.id!r} would have no samples left; discard it")
        if line not in CUT:
            raise ValueError(f"line must be one of {', '.join(CUT)}, not {line!r}")
        with self._transaction((), leaving=batch):
            self._database.save(batch)
            self._database.remove(batch, line)
        for sample in batch:
            group = self._groups[sample.group_id]
            group.samples = [one for one in group.samples if one is not sample]
            self._watched.pop(sample.id, None)
            sample.snapshot = None

    def _check_open(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            group = self._groups.get(sample.group_id)
            if group is None or not any(sample is one for one in group.samples):
                raise ValueError(f"sample {sample.id!r} is not in an open group of the store")
            if sample.status == "running":
                raise ValueError(f"sample {sample.id!r} is in an engine; pause or abort it there first")

    def _cut(self, cuts: Sequence[tuple[Sample, int]], line: CutLine) -> int:
        if line not in CUT:
            raise ValueError(f"line must be one of {', '.join(CUT)}, not {line!r}")
        self._check_open(sample for sample, _ in cuts)
        changes = []
        for sample, length in cuts:
            after = copied(sample)
            after.cut(length)
            changes.append((sample, after, line))
        samples = [sample for sample, _ in cuts]
        with self._transaction((), leaving=samples):  # their saved KV leaves: it is of tokens that are gone
            self._database.save(samples)
            self._database.cut(changes)
        dropped = 0
        for sample, length in cuts:
            dropped += sample.cut(length)
            self._watched.pop(sample.id, None)
        return dropped

    def settle(self, sample_ids: Iterable[str], line: Line) -> None:
        """Moves samples that were handed over to another line of the ledger (a trainer dropped them, say). All or
        none. What was cut off them before stays where it is."""
        if line not in LINES:
            raise ValueError(f"line must be one of {', '.join(LINES)}, not {line!r}")
        with self._database.transaction(durable=True):
            for sample_id in dict.fromkeys(sample_ids):
                if not self._database.settle(sample_id, line):
                    raise ValueError(f"sample_ids: {sample_id!r} was not handed over by this store")

    @property
    def last_delivery(self) -> int:
        """Number of the latest hand-over; 0 before the first. Numbers are never used again."""
        return self._database.last_delivery()

    def deliveries(self, *, after: int | None = None) -> Iterator[Delivery]:
        """Groups that were handed over since delivery number `after` (None: all that are kept), as they were then. On
        disk only.

        StoreError if some of them were pruned or never were, StoreCorrupt if one is damaged."""
        if self.directory is None:
            raise ValueError("a store in memory keeps no deliveries; give it a directory")
        first, last = self._database.last_pruned(), self.last_delivery
        if after is not None and after < first:
            raise StoreError(f"{self.directory}: deliveries {after + 1} to {first} were pruned")
        if after is not None and after > last:
            raise StoreError(f"{self.directory}: the last delivery is {last}, not {after}; is this the right store?")
        return self._database.deliveries(first if after is None else after)

    def prune(self, last: int) -> int:
        """Forgets the tokens of deliveries up to number `last`, and of what was thrown away. Ids stay taken, and the
        ledger stays as it is. -> groups forgotten."""
        with self._database.transaction(durable=True):
            return self._database.prune(last)

    # -- progress ------------------------------------------------------------------------------------------------------

    def watch(self, samples: Iterable[Sample]) -> None:
        """An engine runs these from here on: what it adds to them is written with each commit."""
        for sample in samples:
            if sample.group_id in self._groups:
                self._watched[sample.id] = sample

    def unwatch(self, samples: Iterable[Sample]) -> None:
        """An engine has given these back as it got them. (What it finishes or pauses is written once more, and then
        no longer watched.)"""
        for sample in samples:
            self._watched.pop(sample.id, None)

    @property
    def commit_due(self) -> bool:
        """Never in memory, which a kill takes anyway: there whoever wants the ledger commits."""
        return self.directory is not None and time.monotonic() - self._last_commit >= self.commit_every

    def count(self, **tokens: int) -> None:
        """Counts for the ledger's `beside`, with _ for -: the next commit that succeeds writes them."""
        for name in BESIDE:
            self._beside[name] += tokens.pop(name.replace("-", "_"), 0)
        if tokens:
            raise ValueError(f"the ledger counts no {', '.join(tokens)}; it counts {', '.join(BESIDE)}")

    @contextlib.contextmanager
    def _transaction(
        self, samples: Iterable[Sample], leaving: Iterable[Sample] = (), *, durable: bool = True
    ) -> Iterator[None]:
        """All or nothing; records the saved KV that is whole on disk. samples: that an engine may have changed."""
        saved = self._saved_kv
        changes: dict[str, Snapshot | None] = {} if saved is None else saved.changes(samples, leaving)
        with self._database.transaction(durable=durable):
            yield
            self._database.save_kv({name: record_of(snapshot) for name, snapshot in changes.items()})
        if saved is not None:
            saved.committed(changes, durable=durable)

    def flush(self) -> None:
        """Commits to the disk, and waits for the saved KV that is on its way there: after it, neither a kill nor a
        power cut costs anything. (`commit` waits for neither.) For a trainer that has a long step ahead."""
        self.commit()
        if self._saved_kv is not None:
            self._saved_kv.flush()
        self.commit(durable=True)

    def commit(self, *, durable: bool = False) -> None:
        """Writes what has changed, from the thread that runs the engine. durable: see `flush`; without, a power cut may
        take the last commits (a kill does not).

        StoreFull and other StoreErrors leave the samples as they are; the next commit tries again."""
        samples, beside = list(self._watched.values()), dict(self._beside)
        with self._transaction(samples, durable=durable):
            self._database.save(samples)
            self._database.count(beside)
        self._beside = dict.fromkeys(BESIDE, 0)
        for sample in samples:
            if sample.status not in ("running", "waiting"):  # no engine has it any more
                del self._watched[sample.id]
        self._last_commit = time.monotonic()

    @property
    def ledger(self) -> Ledger:
        """As of the last commit."""
        return self._database.ledger()

    @property
    def iteration(self) -> int:
        """The rollout's next iteration."""
        return int(self._database.meta("iteration") or 0)

    # -- checks --------------------------------------------------------------------------------------------------------

    def snapshot_bytes(self) -> int:
        """Of snapshots of paused samples, wherever they are."""
        return sum(s.snapshot.nbytes for s in self.unfinished() if s.snapshot is not None)

    def check_balance(self) -> None:
        """AssertionError unless every generated token stands in exactly one line. At any moment."""
        ledger, counted, saved = self.ledger, self._database.counted(), self._database.num_saved()
        for line, tokens in ledger.places.items():
            assert counted.get(line, 0) == tokens, (line, counted, ledger)
        pending = sum(tokens - observed for tokens, observed in saved.values())
        assert pending == ledger.pending, (pending, ledger)
        samples = {s.id: s for group in self._groups.values() for s in group.samples}
        assert samples.keys() == saved.keys(), samples.keys() ^ saved.keys()
        for name, sample in samples.items():
            length = len(sample.output_ids)
            assert length >= saved[name][0], f"{name} has lost tokens"
            assert length == saved[name][0] or name in self._watched, f"{name} grew unseen"

    def check_integrity(self, extra: Iterable[Group] = ()) -> None:
        """AssertionError if a sample stands twice or a record does not add up."""
        seen: set[str] = set()
        for group in [*self._groups.values(), *extra]:
            for sample in group.samples:
                assert sample.id not in seen, f"sample {sample.id} is in two groups"
                seen.add(sample.id)
                sample.check_integrity()
                assert sample.is_done == (sample.finish_reason is not None or sample.status == "failed"), sample.id
        if self._saved_kv is not None:
            self._saved_kv.check_integrity(self._database.saved_kv())
        self.check_balance()


def newer_parts(groups: Iterable[Group], version: int) -> list[tuple[Sample, int]]:
    """The samples that have tokens of policies newer than `version`, and the output position of the first of them."""
    parts = []
    for sample in (sample for group in groups for sample in group.samples):
        first = next((segment.start for segment in sample.segments if segment.version > version), None)
        if first is not None:
            parts.append((sample, first))
    return parts
