"""Where samples live between iterations: in memory, or in a directory that outlives the process.

    add -> open groups -> hand_over -> the caller's, exactly once
             |   ^
             |   +- tokens, as an engine makes them (watch, commit)
             +----> discard (thrown away, for a named reason)

On disk nothing that was committed is lost to `kill -9`: a store that is opened again holds the same open groups, and
unfinished samples go on from their last committed token, to the same end. A group is handed over in one transaction,
under a delivery number. A caller that may die between receiving a group and keeping what it made of it notes the number
and asks `deliveries(after=number)` when it is back: what it never saw is there, and nothing twice.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from longtail.partial_rollout.database import Database, Delivery
from longtail.partial_rollout.ledger import BESIDE, LINES, WASTED, Ledger, Line, line_of
from longtail.sample import Group, Sample


class SampleStore:
    """Owns every group from submission until it is handed over, which happens exactly once, and the ledger.

    directory: None keeps everything in memory. commit_every: seconds of generated tokens that a killed process may
    have to make again.
    Raises StoreLocked if another process has the directory open, StoreCorrupt if it holds something else.
    """

    def __init__(self, directory: str | Path | None = None, *, commit_every: float = 0.5) -> None:
        if not commit_every >= 0:
            raise ValueError(f"commit_every must be at least 0 seconds, not {commit_every}")
        self.directory = None if directory is None else Path(directory)
        self.commit_every = commit_every
        self._database = database = Database(self.directory)
        groups, lost = database.open_groups()
        self._groups = {group.id: group for group in groups}
        self._committed = {s.id: len(s.output_ids) for group in groups for s in group.samples}
        """Output tokens that the ledger knows of, for every sample of an open group."""
        self._watched: dict[str, Sample] = {}
        """Samples that an engine may be changing, or has changed since the last commit."""
        self._last_commit = time.monotonic()
        self.ledger = database.ledger()
        """Changes with each commit."""
        self.damages = [
            f"sample {s.id}: output tokens {len(s.output_ids)} to {recorded - 1} were damaged on disk; it continues "
            f"from token {len(s.output_ids)}"
            for s, recorded in lost
        ]
        """What was found damaged when the store was opened, and what was done about it."""
        if lost:
            ledger = copy.deepcopy(self.ledger)
            ledger.lines["failed"] += sum(recorded - len(s.output_ids) for s, recorded in lost)
            with database.transaction(durable=True):
                database.write_off(lost)
                database.save_ledger(ledger)
            self.ledger = ledger

    def close(self) -> None:
        """Commits, and gives the directory back."""
        try:
            self.commit()
        finally:
            self._database.close()

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- groups in and out ---------------------------------------------------------------------------------------------

    def add(self, groups: Iterable[Group]) -> None:
        """All or none. ValueError if an id was used before, or a group is empty, mislabelled, or (on disk) has a task
        that JSON cannot say."""
        batch = list(groups)
        names: set[str] = set()
        tokens: dict[str, int] = {}
        for group in batch:
            if group.id in self or group.id in names:
                raise ValueError(f"group id {group.id!r} was submitted before; every group needs its own id")
            if not group.samples:
                raise ValueError(f"group {group.id!r} has no samples; n must be at least 1")
            names.add(group.id)
            for sample in group.samples:
                if sample.id in tokens or self._database.knows("samples", sample.id):
                    raise ValueError(f"sample id {sample.id!r} was submitted before; every sample needs its own id")
                if sample.group_id != group.id:
                    raise ValueError(f"sample {sample.id!r} has group_id {sample.group_id!r}, not {group.id!r}")
                tokens[sample.id] = len(sample.output_ids)
        ledger = copy.deepcopy(self.ledger)
        ledger.generated += sum(tokens.values())
        with self._database.transaction(durable=True):
            self._database.add_groups(batch)
            self._database.save([(s, 0) for group in batch for s in group.samples])
            self._database.save_ledger(ledger)
        self.ledger = ledger
        self._committed |= tokens
        self._groups |= {group.id: group for group in batch}

    def __contains__(self, group_id: str) -> bool:
        """Whether a group of this id was ever submitted."""
        return group_id in self._groups or self._database.knows("groups", group_id)

    def __len__(self) -> int:
        """Groups not handed over yet."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def unfinished(self) -> list[Sample]:
        return [sample for group in self._groups.values() for sample in group.samples if not sample.is_done]

    def complete(self) -> list[Group]:
        """The groups whose samples are all done."""
        return [group for group in self._groups.values() if group.is_complete]

    def hand_over(self, groups: Iterable[Group], iteration: int = 0) -> int:
        """These groups are the caller's now. On the ledger their tokens are trained, but for samples that failed, were
        aborted or ran in circles; `settle` corrects that. -> number of the delivery.

        StoreError if it cannot be written; then they stay."""
        batch = list(groups)
        return self._leave(batch, {s.id: line_of(s) for group in batch for s in group.samples}, iteration)

    def discard(self, groups: Iterable[Group], line: Line) -> None:
        """Throws groups away, finished or not: nobody will ask for them again. line: why."""
        if line not in WASTED:
            raise ValueError(f"line must be one of {', '.join(WASTED)}, not {line!r}")
        batch = list(groups)
        self._leave(batch, {s.id: line for group in batch for s in group.samples}, None)

    def _leave(self, groups: list[Group], lines: dict[str, Line], iteration: int | None) -> int:
        samples = [s for group in groups for s in group.samples]
        ledger = self._grown(samples)
        for sample in samples:
            ledger.lines[lines[sample.id]] += len(sample.output_ids)
        with self._database.transaction(durable=True):
            self._save(samples)
            number = self._database.leave(groups, lines, iteration)
            self._database.save_ledger(ledger)
            if self.directory is None:  # the groups are the caller's: nothing of them is kept but their names
                self._database.prune(number)
        self.ledger = ledger
        for group in groups:
            del self._groups[group.id]
            for sample in group.samples:
                del self._committed[sample.id]
                self._watched.pop(sample.id, None)
        return number

    def settle(self, sample_ids: Iterable[str], line: Line) -> None:
        """Moves samples that were handed over to another line of the ledger (a trainer dropped them, say)."""
        if line not in LINES:
            raise ValueError(f"line must be one of {', '.join(LINES)}, not {line!r}")
        ledger = copy.deepcopy(self.ledger)
        with self._database.transaction(durable=True):
            for sample_id in dict.fromkeys(sample_ids):
                before = self._database.settle(sample_id, line)
                if before is None:
                    raise ValueError(f"sample_ids: {sample_id!r} was not handed over by this store")
                ledger.lines[before[0]] -= before[1]
                ledger.lines[line] += before[1]
            self._database.save_ledger(ledger)
        self.ledger = ledger

    @property
    def last_delivery(self) -> int:
        """Number of the latest hand-over; 0 before the first."""
        return self._database.last_delivery()

    def deliveries(self, *, after: int = 0) -> Iterator[Delivery]:
        """Groups that were handed over since delivery number `after`, as they were then (on disk only, until
        `prune`). StoreCorrupt if one of them is damaged."""
        return self._database.deliveries(after)

    def prune(self, last: int) -> int:
        """Forgets the tokens of deliveries up to number `last`, and of what was thrown away. Ids stay taken, and the
        ledger stays as it is. -> groups forgotten."""
        with self._database.transaction(durable=True):
            return self._database.prune(last)

    # -- progress ------------------------------------------------------------------------------------------------------

    def watch(self, samples: Iterable[Sample]) -> None:
        """An engine runs these from here on: what it adds to them is written with each commit."""
        self._watched |= {s.id: s for s in samples if s.id in self._committed}

    def unwatch(self, samples: Iterable[Sample]) -> None:
        """An engine has given these back as it got them. (What it finishes or pauses is written once more, and then
        no longer watched.)"""
        for sample in samples:
            self._watched.pop(sample.id, None)

    def commit_if_due(self) -> None:
        """Call as often as you like, from the thread that runs the engine."""
        if time.monotonic() - self._last_commit >= self.commit_every:
            self.commit()

    def commit(self, iteration: int | None = None, **beside: int) -> None:
        """Writes what has changed. beside: counts for the ledger's `beside`, with _ for -.

        StoreFull and other StoreErrors leave the samples as they are; the next commit tries again."""
        samples = list(self._watched.values())
        ledger = self._grown(samples)
        for name in BESIDE:
            ledger.beside[name] += beside.get(name.replace("-", "_"), 0)
        with self._database.transaction(durable=False):
            self._save(samples)
            self._database.save_ledger(ledger)
            if iteration is not None:
                self._database.set_meta("iteration", str(iteration))
        self.ledger = ledger
        for sample in samples:
            self._committed[sample.id] = len(sample.output_ids)
            if sample.status not in ("running", "waiting"):  # no engine has it any more
                del self._watched[sample.id]
        self._last_commit = time.monotonic()

    def _save(self, samples: Iterable[Sample]) -> None:
        self._database.save([(s, self._committed[s.id]) for s in samples])

    def _grown(self, samples: Iterable[Sample]) -> Ledger:
        """The ledger with what these samples have gained since it last looked."""
        ledger = copy.deepcopy(self.ledger)
        ledger.generated += sum(len(s.output_ids) - self._committed[s.id] for s in samples)
        return ledger

    @property
    def iteration(self) -> int:
        """The rollout's next iteration."""
        return int(self._database.meta("iteration") or 0)

    # -- checks --------------------------------------------------------------------------------------------------------

    def snapshot_bytes(self) -> int:
        """Host memory held by snapshots of paused samples."""
        return sum(s.snapshot.nbytes for s in self.unfinished() if s.snapshot is not None)

    def check_balance(self) -> None:
        """AssertionError unless every generated token stands in exactly one line. At any moment."""
        counted = Counter(self._database.counted())
        pending = sum(self._committed.values())
        assert counted["pending"] == pending == self.ledger.pending, (counted["pending"], pending, self.ledger)
        for line in LINES:
            assert counted[line] == self.ledger.lines[line], (line, counted[line], self.ledger)
        assert self.ledger == self._database.ledger(), (self.ledger, self._database.ledger())
        for group in self._groups.values():
            for sample in group.samples:
                known = self._committed[sample.id]
                assert len(sample.output_ids) >= known, sample.id
                assert len(sample.output_ids) == known or sample.id in self._watched, f"{sample.id} grew unseen"

    def check_integrity(self, extra: Iterable[Group] = ()) -> None:
        """AssertionError if a sample stands twice or a record does not add up."""
        seen: set[str] = set()
        for group in [*self._groups.values(), *extra]:
            for sample in group.samples:
                assert sample.id not in seen, f"sample {sample.id} is in two groups"
                seen.add(sample.id)
                sample.check_integrity()
                assert sample.is_done == (sample.finish_reason is not None or sample.status == "failed"), sample.id
        self.check_balance()
