"""Where saved KV lives below the device: in host memory and on disk, each within a budget of bytes.

    device (KVManager) --save--> host --write behind--> disk
                       <-restore-     <----prefetch----

The unit is a *part*: a run of consecutive blocks of one sequence, never changed once it is made. The samples of a group
share the part that holds their prompt. One thread writes and reads files, so that no step waits for a disk; a part that
it is working on, and one that a sequence about to run needs (`pin`), is not evicted.

A part lives as long as somebody refers to it. Its file goes with it, unless it was *kept* for a later process
(`Part.keep`), whose store then owns the file.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Literal

import torch

from longtail.errors import SnapshotCorrupt
from longtail.kv_manager.snapshot_file import PartHeader, new_part_name, read_part, write_part

Eviction = Literal["lru", "longest-remaining"]
_clock = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Checked at construction."""

    host_bytes: int | None = None
    """Host memory for saved KV; None: no limit."""
    disk: str | Path | None = None
    """Directory for what host memory has no room for, and for what is to outlive the process; None: no disk tier."""
    disk_bytes: int | None = None
    """None: until the disk is full."""
    eviction: Eviction = "lru"
    """What leaves host memory first: the least recently used, or the sample that may still grow longest."""

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} must be a number of bytes or None, not {value!r}")
        if self.eviction not in ("lru", "longest-remaining"):
            raise ValueError(f'eviction must be "lru" or "longest-remaining", not {self.eviction!r}')


class Part:
    """A run of blocks in host memory, on disk, or both. Owned by its `Tiers`."""

    __slots__ = (
        "__weakref__",
        "_finalizer",
        "file",
        "header",
        "kept",
        "nbytes",
        "pins",
        "remaining",
        "tensors",
        "used",
        "work",
    )

    def __init__(self, header: PartHeader, tensors: dict[str, torch.Tensor] | None, nbytes: int) -> None:
        self.header = header
        self.tensors = tensors
        """In host memory; None: on disk only."""
        self.nbytes = nbytes
        self.file: Path | None = None
        """Set when it is whole on the disk."""
        self.kept = False
        self.pins = 0
        self.remaining = 0
        """Tokens that its sample may still make."""
        self.used = next(_clock)
        self.work: Future[None] | None = None
        """The write or read in progress."""
        self._finalizer: weakref.finalize[..., Part] | None = None

    def keep(self) -> None:
        """The file is somebody else's to remove."""
        self.kept = True
        if self._finalizer is not None:
            self._finalizer.detach()


class Tiers:
    """Owns the parts' memory and files. Thread-safe."""

    def __init__(self, config: TierConfig | None = None) -> None:
        self.config = config = TierConfig() if config is None else config
        self.directory = None if config.disk is None else Path(config.disk)
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        self.failures: list[str] = []
        """What could not be written, read or found room for, in words."""
        self._lock = threading.RLock()
        self._parts: weakref.WeakSet[Part] = weakref.WeakSet()
        self._shared: weakref.WeakValueDictionary[str, Part] = weakref.WeakValueDictionary()
        self._executor: ThreadPoolExecutor | None = None

    # -- in ------------------------------------------------------------------------------------------------------------

    def put(
        self,
        header: PartHeader,
        make: Callable[[], dict[str, torch.Tensor]],
        nbytes: int,
        *,
        shared: bool = False,
        remaining: int = 0,
        wait: bool = True,
    ) -> Part | None:
        """Takes a part in; `make` copies its blocks to host memory and is called only if there is room. shared: if the
        same part is here already, that one. wait: for room that a write in progress will make.

        None if there is no room: the caller goes on without."""
        key = f"{header}"
        with self._lock:
            part = self._shared.get(key) if shared else None
            if part is not None and (part.tensors is not None or part.file is not None):
                part.used = next(_clock)
                return part
        if not self._make_room(nbytes, wait):
            self._fail(f"no room in host memory for {nbytes} bytes of saved KV")
            return None
        part = Part(header, make(), nbytes)
        part.remaining = remaining
        with self._lock:
            self._parts.add(part)
            if shared:
                self._shared[key] = part
        if self.directory is not None:
            self._write_behind(part)
        return part

    def adopt(self, header: PartHeader, nbytes: int, file: Path) -> Part:
        """A part that an earlier process left on disk. Nothing is read before it is needed."""
        with self._lock:
            part = self._shared.get(str(file))
            if part is None:
                part = Part(header, None, nbytes)
                part.file, part.kept = file, True
                self._parts.add(part)
                self._shared[str(file)] = part
            return part

    def find(self, header: PartHeader) -> Part | None:
        """The shared part of this header, if it is here."""
        with self._lock:
            return self._shared.get(f"{header}")

    def use_disk(self, directory: Path) -> None:
        """The disk tier, where none was configured: a store's directory."""
        if self.directory is None:
            directory.mkdir(parents=True, exist_ok=True)
            self.directory = directory

    # -- out -----------------------------------------------------------------------------------------------------------

    def pin(self, parts: Iterable[Part]) -> None:
        """These are about to be needed: they come to host memory and stay until `unpin`. Does not wait."""
        for part in parts:
            with self._lock:
                part.pins += 1
                part.used = next(_clock)
            self._read_ahead(part)

    def unpin(self, parts: Iterable[Part]) -> None:
        with self._lock:
            for part in parts:
                assert part.pins > 0, "unpinned more often than pinned"
                part.pins -= 1

    def is_ready(self, parts: Iterable[Part]) -> bool:
        """Whether `load` would not wait: all are in memory, or have turned out to be lost."""
        return all(part.tensors is not None or part.work is None or part.work.done() for part in parts)

    def wait(self, parts: Iterable[Part]) -> None:
        """Until `is_ready`."""
        wait_for([part.work for part in parts if part.tensors is None and part.work is not None])

    def load(self, part: Part) -> dict[str, torch.Tensor]:
        """The part's tensors; waits for the disk if need be. SnapshotCorrupt if they are lost."""
        tensors = part.tensors
        if tensors is None:
            self._read_ahead(part)
            work = part.work
            if work is not None:
                work.result()
            tensors = part.tensors
        if tensors is None:  # evicted again, or never read: not for want of trying
            tensors = self._read(part)
        part.used = next(_clock)
        return tensors

    def flush(self) -> None:
        """Waits until everything that is to be written is."""
        while True:
            with self._lock:
                pending = [p.work for p in self._parts if p.work is not None and not p.work.done()]
            if not pending:
                return
            wait_for(pending)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None

    # -- budgets -------------------------------------------------------------------------------------------------------

    @property
    def host_used(self) -> int:
        """Bytes."""
        with self._lock:
            return sum(part.nbytes for part in self._parts if part.tensors is not None)

    @property
    def disk_used(self) -> int:
        """Bytes, those being written included."""
        with self._lock:
            busy = {p for p in self._parts if p.work is not None and not p.work.done()}
            return sum(p.nbytes for p in self._parts if p.file is not None or p in busy)

    def _make_room(self, nbytes: int, wait: bool) -> bool:
        budget = self.config.host_bytes
        if budget is None:
            return True
        if nbytes > budget:
            return False
        while True:
            with self._lock:
                excess = self.host_used + nbytes - budget
                for part in self._evictable():
                    if excess <= 0:
                        break
                    part.tensors = None
                    excess -= part.nbytes
                if excess <= 0:
                    return True
                writes = [p.work for p in self._parts if p.file is None and p.work is not None and not p.work.done()]
            if not (wait and writes):
                return False
            wait_for(writes, return_when="FIRST_COMPLETED")

    def _evictable(self) -> list[Part]:
        """In host memory and safely on disk, not in use; first to go first."""
        parts = [p for p in self._parts if p.tensors is not None and p.file is not None and not p.pins]
        if self.config.eviction == "longest-remaining":
            return sorted(parts, key=lambda p: (-p.remaining, p.used))
        return sorted(parts, key=lambda p: p.used)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "longtail-tiers")
        return self._executor.submit(work)

    def _write_behind(self, part: Part) -> None:
        assert self.directory is not None
        with self._lock:
            budget = self.config.disk_bytes
            if budget is not None and self.disk_used + part.nbytes > budget:
                self._fail(f"no room on disk for {part.nbytes} bytes of saved KV (disk_bytes {budget})")
                return
            weak, tensors = weakref.ref(part), part.tensors
            assert tensors is not None
            directory, name, header = self.directory, new_part_name(), part.header

            def work() -> None:
                if weak() is None:  # nobody wants it any more
                    return
                try:
                    file = write_part(directory, name, header, tensors)
                except OSError as error:
                    self._fail(f"saved KV could not be written: {error}")
                    return
                with self._lock:
                    part = weak()
                    if part is None:
                        file.unlink(missing_ok=True)
                        return
                    part.file = file
                    part._finalizer = weakref.finalize(part, _unlink, file)

            part.work = self._submit(work)

    def _read_ahead(self, part: Part) -> None:
        with self._lock:
            busy = part.work is not None and not part.work.done()
            if part.tensors is not None or part.file is None or busy:
                return
            weak = weakref.ref(part)

            def work() -> None:
                part = weak()
                if part is None or part.tensors is not None or not self._make_room(part.nbytes, wait=False):
                    return
                try:
                    part.tensors = self._read(part)
                except SnapshotCorrupt:
                    part.file = None  # `load` says what became of it

            part.work = self._submit(work)

    def _read(self, part: Part) -> dict[str, torch.Tensor]:
        if part.file is None:
            raise SnapshotCorrupt("the saved KV is lost: " + (self.failures[-1] if self.failures else "never written"))
        try:
            return read_part(part.file, part.header)
        except SnapshotCorrupt as error:
            self._fail(str(error))
            raise

    def _fail(self, failure: str) -> None:
        self.failures.append(failure)
        del self.failures[:-100]


def _unlink(file: Path) -> None:
    file.unlink(missing_ok=True)
