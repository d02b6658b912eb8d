"""The saved KV of a store's samples: which file is whose, from its first byte to its last.

    name in kv/     row in samples.snapshot   owner           after a kill here
    x.tmp           -                         writing thread  removed when the store is opened again
    x, being kept   -                         tiers           the same
    x, kept         sample(s) name it         this store      found again
    x, given back   -                         tiers           removed when the store is opened again

A snapshot is recorded when all its files are whole on disk, by the transaction that commits its sample: files first,
then rows. What rows no longer name is given back to the tiers (and goes with the last reference in this process) after
the next durable transaction: rows first, then files. So a row never names a file that is gone, not even after a power
cut. The samples of a group share the file of their prompt: it goes when the last row that names it does.

A row keeps naming a snapshot while its sample runs on, for it stays a valid prefix, until a newer one is on disk, or
the sample ends, or its group leaves.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.errors import SnapshotCorrupt, SnapshotMismatch, StoreError
from longtail.kv_manager.part_name import TEMPORARY, is_part_name

if TYPE_CHECKING:
    from longtail.kv_manager.part import Part
    from longtail.kv_manager.snapshot import Snapshot
    from longtail.kv_manager.snapshot_file import PartHeader
    from longtail.kv_manager.tiers import Tiers
    from longtail.partial_rollout.database import Database
    from longtail.sample import Sample

FOLDER = "kv"
"""Of the store's directory."""


class SavedKV:
    """Owns the files that rows name. Not for several threads.

    directory: of the files; the caller holds the store's lock. texts: samples.snapshot by sample.
    StoreError if the directory is a link."""

    def __init__(self, directory: Path, texts: Mapping[str, bytes]) -> None:
        check_folder(directory)
        self.directory = directory
        self.faults: dict[str, str] = {}
        """Samples whose saved KV is of no use, and why. The next transaction clears their rows."""
        self._records: dict[str, Any] = {}
        """As read, until there are tiers to make snapshots of them."""
        self._names: dict[str, tuple[str, ...]] = {}
        """Files that the row of a sample names."""
        self._references: Counter[str] = Counter()
        """Rows by file."""
        self._parts: dict[str, Part] = {}
        """Of these files. They keep the file accounted for in the tiers, and not in host memory."""
        self._pending: dict[str, tuple[Sample, Snapshot]] = {}
        """Saved, and not whole on disk yet."""
        self._unreferenced: set[str] = set()
        self._tiers: Tiers | None = None
        for sample_id, text in texts.items():
            try:
                record = parse(text)
                for name in (names := names_in(record)):
                    if not is_file(directory / name):
                        raise SnapshotCorrupt(f"{directory / name} is missing")
            except SnapshotCorrupt as error:
                self.faults[sample_id] = str(error)
            else:
                self._records[sample_id] = record
                self._refer(sample_id, names)

    def use(self, tiers: Tiers, samples: Iterable[Sample]) -> None:
        """Saved KV of these tiers is written to the store from here on, and what earlier processes left of these
        samples is theirs again. ValueError if the tiers write elsewhere."""
        from longtail.kv_manager.snapshot import Snapshot

        if self._tiers is tiers:
            return
        tiers.use_disk(self.directory)
        if self._tiers is not None:
            self._tiers.leave_disk()
        self._tiers = tiers
        for sample in samples:
            record = self._records.pop(sample.id, None)
            if record is None or sample.is_done:
                continue
            try:
                sample.snapshot = Snapshot.from_record(sample.id, record, self.directory, tiers)
            except SnapshotCorrupt as error:
                self.faults[sample.id] = str(error)
            else:
                self._parts |= by_name(sample.snapshot)
        self._records.clear()

    def sweep(self) -> list[Path]:
        """Removes the files that no row names: call it when none of this process can be there. -> which."""
        found = orphans(self.directory, self._references)
        for file in found:
            file.unlink(missing_ok=True)
        return found

    # -- around a transaction ------------------------------------------------------------------------------------------

    def changes(self, samples: Iterable[Sample], leaving: Iterable[Sample] = ()) -> dict[str, Snapshot | None]:
        """What the next transaction is to record. samples: what an engine may have changed. leaving: what the store
        will not have any more. Files of what is in the answer are kept from here on, also if the transaction fails: the
        next one tries again."""
        out: dict[str, Snapshot | None] = dict.fromkeys(self.faults)
        running = []
        for sample in samples:
            if sample.is_done:
                self._pending.pop(sample.id, None)
                if sample.id in self._names:
                    out[sample.id] = None
            elif hasattr(sample.snapshot, "parts") and self._tiers is not None:  # not what an engine of a pool holds
                self._pending[sample.id] = sample, sample.snapshot
            elif sample.id in self._names:
                running.append(sample.id)
        for sample in leaving:
            self._pending.pop(sample.id, None)
            if sample.id in self._names:
                out[sample.id] = None
        for sample_id, (sample, snapshot) in list(self._pending.items()):
            if all(self._is_ours(part) for part in snapshot.parts):
                parts = by_name(snapshot)
                if self._names.get(sample_id) == tuple(parts):
                    del self._pending[sample_id]
                    continue
                snapshot.keep()
                self._parts |= parts
                self._unreferenced |= parts.keys() - self._references.keys()  # until the transaction has succeeded
                out[sample_id] = snapshot
            elif not snapshot.is_being_written and (sample.snapshot is not snapshot or snapshot.failure is not None):
                del self._pending[sample_id]
        self._evict(running)
        return out

    def committed(self, changes: Mapping[str, Snapshot | None], *, durable: bool) -> None:
        """The transaction that wrote these has succeeded."""
        for sample_id, snapshot in changes.items():
            for name in self._names.pop(sample_id, ()):
                self._references[name] -= 1
                if not self._references[name]:
                    del self._references[name]
                    self._unreferenced.add(name)
            self.faults.pop(sample_id, None)
            self._records.pop(sample_id, None)
            if snapshot is not None:
                self._pending.pop(sample_id, None)
                self._refer(sample_id, tuple(by_name(snapshot)))
        if durable:
            self._let_go()

    def flush(self) -> None:
        """Waits until what is to be written is."""
        if self._tiers is not None:
            self._tiers.flush()

    def close(self) -> None:
        """The files that rows name stay."""
        tiers, self._tiers = self._tiers, None
        self._pending.clear()
        self._parts.clear()
        if tiers is not None:
            tiers.leave_disk()

    def check_integrity(self, rows: Mapping[str, bytes]) -> None:
        """AssertionError unless this is what the rows (samples.snapshot by sample) say."""
        known = dict(self._names)
        assert known.keys() | self.faults.keys() == rows.keys(), known.keys() ^ rows.keys()
        assert all(names_in(parse(rows[sample_id])) == names for sample_id, names in known.items())
        assert self._references == Counter(name for names in known.values() for name in names)
        assert not self._unreferenced & self._references.keys()

    # -- what only this class does -------------------------------------------------------------------------------------

    def _refer(self, sample_id: str, names: tuple[str, ...]) -> None:
        self._names[sample_id] = names
        self._references.update(names)
        self._unreferenced.difference_update(names)

    def _is_ours(self, part: Part) -> bool:
        """Whether it is whole on disk, in the store's directory."""
        return part.file is not None and part.file.parent == self.directory

    def _let_go(self) -> None:
        for name in self._unreferenced:
            part = self._parts.pop(name, None)
            if part is None:  # no engine has had anything to do with it
                (self.directory / name).unlink(missing_ok=True)
            else:
                part.give_back()
                del part
        self._unreferenced.clear()
        if self._tiers is not None:
            self._tiers.tidy()  # removes them, and writes what there was no room for

    def _evict(self, sample_ids: Iterable[str]) -> None:
        """Samples that run have their KV on the device: no need of a copy in host memory. (Siblings may need the
        prompt's.)"""
        for sample_id in sample_ids:
            for name in self._names[sample_id]:
                part = self._parts.get(name)
                if part is not None and part.header.sample_id:
                    part.tiers.evict([part])


# ---- rows


def record_of(snapshot: Snapshot | None) -> str | None:
    """The text of samples.snapshot."""
    if snapshot is None:
        return None
    text = json.dumps(snapshot.to_record())
    return json.dumps({"checksum": zlib.crc32(text.encode()), "snapshot": text})


def parse(text: bytes) -> dict[str, Any]:
    """A record, as `Snapshot.from_record` takes it. SnapshotCorrupt if the text is damaged."""
    try:
        outer = json.loads(text)
        inner = outer["snapshot"]
        if zlib.crc32(inner.encode()) != outer["checksum"]:
            raise SnapshotCorrupt("the record of its saved KV is damaged")
        record: dict[str, Any] = json.loads(inner)
        names_in(record)
        int(record["num_tokens"])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotCorrupt("the record of its saved KV is damaged") from error
    return record


def names_in(record: Mapping[str, Any]) -> tuple[str, ...]:
    names = tuple(part["file"] for part in record["parts"])
    for name in names:
        if not is_part_name(name):
            raise SnapshotCorrupt(f"{name!r} is not the name of a KV file")
    return names


def by_name(snapshot: Snapshot) -> dict[str, Part]:
    """Its parts by the names of their files, in order."""
    return {part.file.name: part for part in snapshot.parts if part.file is not None}


# ---- what `longtail store` asks


def problems(database: Database) -> list[str]:
    """What is wrong with the saved KV of a store: records, files, and whether they fit each other and the samples.
    Beside a run, what it changes meanwhile is no problem."""
    found: list[str] = []
    whole: dict[str, PartHeader] = {}
    for sample_id, text in database.saved_kv().items():
        try:
            _check(database, sample_id, text, whole)
        except (SnapshotMismatch, StoreError) as error:
            if database.saved_kv().get(sample_id) == text:
                found.append(f"sample {sample_id}: {error}")
    return found


def _check(database: Database, sample_id: str, text: bytes, whole: dict[str, PartHeader]) -> None:
    """whole: headers of the files that were checked, by name."""
    from longtail.kv_manager.snapshot import Snapshot
    from longtail.kv_manager.snapshot_file import check_part
    from longtail.kv_manager.tiers import Tiers

    directory, record = folder_of(database), parse(text)
    check_folder(directory)
    snapshot = Snapshot.from_record(sample_id, record, directory, Tiers())
    for name, part in zip(names_in(record), snapshot.parts, strict=True):
        if name not in whole:
            whole[name] = check_part(directory / name)
        if whole[name] != part.header:
            raise SnapshotCorrupt(f"{directory / name}: holds something else than its record says")
    groups, _ = database.load("g.id = (SELECT group_id FROM samples WHERE name = ?)", (sample_id,))
    (sample,) = (s for group in groups for s in group.samples if s.id == sample_id)
    if sample.is_done:
        raise SnapshotMismatch("it is finished, and its row still names saved KV")
    header = snapshot.parts[0].header if snapshot.parts else None
    known = [*sample.prompt_ids, *sample.output_ids]
    snapshot.check(sample_id, known, snapshot.layouts, "" if header is None else header.dtype)


def unnamed(database: Database) -> list[Path]:
    """Files that no row names: what a killed process left, or what a running one has not recorded yet."""
    names: set[str] = set()
    for text in database.saved_kv().values():
        with contextlib.suppress(SnapshotCorrupt):
            names.update(names_in(parse(text)))
    return orphans(folder_of(database), names)


def overview(database: Database) -> dict[str, dict[str, Any]]:
    """Of each sample that has saved KV: how many tokens it covers, its files, and their bytes on disk."""
    out: dict[str, dict[str, Any]] = {}
    for sample_id, text in database.saved_kv().items():
        try:
            record = parse(text)
            files = [folder_of(database) / name for name in names_in(record)]
            size = sum(file.stat().st_size for file in files)
        except (SnapshotCorrupt, OSError) as error:
            out[sample_id] = {"tokens": 0, "bytes": 0, "files": [], "damage": str(error)}
        else:
            out[sample_id] = {"tokens": record["num_tokens"], "bytes": size, "files": [str(f) for f in files]}
    return out


def folder_of(database: Database) -> Path:
    assert database.directory is not None
    return database.directory / FOLDER


# ---- files


def check_folder(directory: Path) -> None:
    if directory.is_symlink():  # what is removed there must be ours
        raise StoreError(f"{directory} is a symbolic link; put the whole store where its saved KV is to be")


def is_file(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()


def orphans(directory: Path, names: Iterable[str]) -> list[Path]:
    """KV files, whole ones and those that were being written, that are none of these names. Nothing of another name."""
    check_folder(directory)
    if not directory.is_dir():
        return []
    known = set(names)
    return sorted(
        file
        for file in directory.iterdir()
        if is_part_name(file.name.removesuffix(TEMPORARY)) and file.name not in known and is_file(file)
    )
