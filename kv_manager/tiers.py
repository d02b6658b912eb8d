"""Where saved KV lives below the device: in host memory and on disk, each within a budget of bytes.

    device (KVManager) --save--> host --write behind--> disk
                       <-restore-     <----prefetch----

The unit is a *part*: a run of consecutive blocks of one sequence, never changed once it is made. The samples of a group
share the part that holds their prompt. Threads write and read files (reads do not queue behind writes), so that no step
waits for a disk. A part in host memory may be evicted when it is whole on disk and nobody has pinned it.

A part lives as long as somebody refers to it. Its file goes with it, unless it was *kept* for a later process
(`Part.keep`): then it is a store's, until that gives it back. Files of a process that was killed stay behind.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from longtail.errors import SnapshotCorrupt, SnapshotMismatch
from longtail.kv_manager.host_memory import HostMemory, footprint
from longtail.kv_manager.part import Part, Stored
from longtail.kv_manager.part_name import new_part_name
from longtail.kv_manager.snapshot_file import PartHeader, part_tensors, read_part, write_part
from longtail.kv_manager.tier_config import TierConfig


class Tiers:
    """Owns the parts' memory and files. Thread-safe; not for use in a forked child."""

    def __init__(self, config: TierConfig | None = None) -> None:
        self.config = config = TierConfig() if config is None else config
        self.directory = None if config.disk is None else Path(config.disk)
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        self.failures: deque[str] = deque(maxlen=100)
        """The last ones of all parts: what could not be written, read or found room for, in words."""
        self.changes = 0
        """Grows whenever a write or a read has ended."""
        self._changed = threading.Condition(threading.RLock())
        self._memory = HostMemory()
        self._host_used = self._disk_used = 0
        self._working = {"write": 0, "read": 0}
        self._stored: set[Stored] = set()
        self._resident: OrderedDict[Stored, None] = OrderedDict()
        """In host memory; the least recently used first."""
        self._unsaved: OrderedDict[Stored, None] = OrderedDict()
        """To be written when the disk tier has room."""
        self._found: weakref.WeakValueDictionary[PartHeader | Path, Part] = weakref.WeakValueDictionary()
        self._dropped: queue.SimpleQueue[Stored] = queue.SimpleQueue()
        """Of parts that nobody refers to any more. The garbage collector may find them anywhere, also while this thread
        holds a lock; this queue's `put` is safe there, and nothing else would be."""
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._removing = 0
        weakref.finalize(self, _remove_files, self._stored, os.getpid())  # at the latest at the end of the process

    # -- in ------------------------------------------------------------------------------------------------------------

    def put(
        self,
        header: PartHeader,
        fill: Callable[[Mapping[str, torch.Tensor]], None],
        *,
        shared: bool = False,
        remaining: int = 0,
        wait: bool = True,
    ) -> Part | None:
        """Takes a part in; `fill` copies its blocks to the tensors it is given, and is called only if there is room.
        shared: if the same part is here already, that one. wait: for room that work in progress will make.

        None if there is no room: the caller goes on without."""
        with self._changed:
            self._settle()
            part = self.find(header) if shared else None
            if part is not None:
                self._touch(part._stored)
                part._stored.remaining = min(part._stored.remaining, remaining)  # whoever comes back first needs it
                if part.file is None and not part._stored.work:
                    part._stored.failure = None  # the disk was full, and may not be any more
                    self._write_behind(part._stored)
                return part
            if not self._reserve(footprint(header.nbytes), wait):
                self.failures.append(self.no_room(header.nbytes))
                return None
        stored = Stored(header, remaining)
        try:
            stored.tensors = self._allocate(header)
            fill(stored.tensors)
        except BaseException:
            with self._changed:
                self._host_used -= stored.host_bytes
            raise
        with self._changed:
            self._resident[stored] = None
            part = self._add(stored)
            if shared:
                self._found[header] = part
            self._write_behind(stored)
        return part

    def adopt(self, header: PartHeader, file: Path) -> Part:
        """A part that an earlier process left on disk. Nothing is read before it is needed."""
        with self._changed:
            part = self._found.get(file)
            if part is None or part.header != header:
                stored = Stored(header, 0, file=file, kept=True)
                if file.is_symlink() or not file.is_file() or file.stat().st_size < header.nbytes:
                    stored.file, stored.failure = None, f"{file}: is missing, or not as long as its record says"
                else:
                    self._disk_used += header.nbytes
                part = self._found[file] = self._add(stored)
                if not header.sample_id and self.find(header) is None:
                    self._found[header] = part
            return part

    def find(self, header: PartHeader) -> Part | None:
        """The shared part of this header, if it is here and not known to be lost."""
        with self._changed:
            part = self._found.get(header)
            lost = part is not None and part._stored.tensors is None and part._stored.failure is not None
            return None if lost else part

    def use_disk(self, directory: Path) -> None:
        """The disk tier, where none was configured: a store's directory. What is in host memory is written too.
        ValueError if saved KV goes to another directory."""
        with self._changed:
            if self.directory is not None and self.directory.absolute() != directory.absolute():
                raise ValueError(
                    f"saved KV goes to {self.directory} already, a store keeps it in {directory}: leave TierConfig.disk"
                    " out, and close the store that uses this engine before another one does"
                )
            if self.directory is None:
                directory.mkdir(parents=True, exist_ok=True)
                self.directory = directory
                for stored in self._resident:
                    self._write_behind(stored)

    def leave_disk(self) -> None:
        """Takes `use_disk` back, when all that is to be written or removed is. Files of parts that live on stay."""
        self.flush()
        with self._changed:
            while self._removing:
                self._changed.wait()
            self.directory = None if self.config.disk is None else Path(self.config.disk)
            if self.directory is None:
                self._unsaved.clear()

    # -- out -----------------------------------------------------------------------------------------------------------

    def prefetch(self, parts: Iterable[Part]) -> bool:
        """Pins all of these and starts to read what is not in memory. False, with nothing done, if there is no room for
        all of them now. Does not wait."""
        wanted = list(dict.fromkeys(parts))
        assert all(part.tiers is self for part in wanted), "parts of other tiers"
        with self._changed:
            self._settle()
            for part in wanted:
                part._stored.pins += 1  # first, so that none makes room for another
            missing = [s for p in wanted if (s := p._stored).tensors is None and not s.work and not s.failure]
            if not self._reserve(sum(s.host_bytes for s in missing), wait=False):
                for part in wanted:
                    part._stored.pins -= 1
                return False
            for part in wanted:
                self._touch(part._stored)
            for stored in missing:
                self._start("read", stored, self._read)
            return True

    def unpin(self, parts: Iterable[Part]) -> None:
        """Takes one successful `prefetch` back."""
        with self._changed:
            for part in dict.fromkeys(parts):
                assert part._stored.pins > 0, "unpinned more often than pinned"
                part._stored.pins -= 1

    def wait(self, seen: int) -> bool:
        """Until a write or read has ended since `changes` was `seen`. False if none has and none is in progress."""
        with self._changed:
            while self.changes == seen and any(self._working.values()):
                self._changed.wait()
            return self.changes != seen

    def load(self, part: Part) -> dict[str, torch.Tensor]:
        """The part's tensors; waits for the disk if need be. They stay as they are while the caller has them, evicted
        or not. SnapshotCorrupt if they are lost, SnapshotMismatch if there is no room for them."""
        assert part.tiers is self, "a part of other tiers"
        stored = part._stored
        with self._changed:
            while stored.tensors is None:
                if stored.failure is not None:
                    raise SnapshotCorrupt(stored.failure)
                if not stored.work:
                    assert stored.file is not None, "a part that is nowhere"
                    if not self._reserve(stored.host_bytes, wait=True):
                        raise SnapshotMismatch(self.no_room(part.nbytes))
                    if stored.tensors is not None or stored.work:  # another thread was quicker
                        self._host_used -= stored.host_bytes
                        continue
                    self._start("read", stored, self._read)
                self._changed.wait()
            self._touch(stored)
            return stored.tensors

    def evict(self, parts: Iterable[Part]) -> None:
        """Nobody will need these in host memory soon: frees it, of those that are on disk and not pinned."""
        with self._changed:
            for part in parts:
                if part._stored.evictable:
                    self._evict(part._stored)

    def tidy(self) -> None:
        """Buries what was dropped, and starts to write what there is room for then. Does not wait."""
        with self._changed:
            self._settle()
            self._retry_writes()

    def flush(self) -> None:
        """Waits until everything that is to be written, and has room, is."""
        with self._changed:
            self._settle()
            self._retry_writes()
            while self._working["write"]:
                self._changed.wait()
            self._settle()

    def close(self) -> None:
        """Ends the threads when their work is done. (A later save starts them again.)"""
        self.flush()
        with self._changed:
            threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown(wait=True)
        with self._changed:
            self._settle()

    # -- budgets -------------------------------------------------------------------------------------------------------

    @property
    def host_used(self) -> int:
        """Bytes, those being read included."""
        with self._changed:
            self._settle()
            return self._host_used

    @property
    def disk_used(self) -> int:
        """Bytes, those being written included."""
        with self._changed:
            self._settle()
            return self._disk_used

    @property
    def is_working(self) -> bool:
        """Whether room in host memory may come of itself: what has been written, or read and not pinned, can go."""
        return any(self._working.values())

    def no_room(self, nbytes: int) -> str:
        return f"no room in host memory for {nbytes} bytes of saved KV (host_bytes is {self.config.host_bytes})"

    def check_integrity(self) -> None:
        """AssertionError unless the bytes add up."""
        with self._changed:
            self._settle()
            reading = {s for s in self._stored if s.work == "read"}
            writing = {s for s in self._stored if s.work == "write"}
            assert self._working == {"write": len(writing), "read": len(reading)}
            assert set(self._resident) == {s for s in self._stored if s.tensors is not None}
            assert not reading & set(self._resident), "a part in memory is being read"
            assert self._host_used == sum(s.host_bytes for s in {*self._resident, *reading}), "host bytes"
            assert self._disk_used == sum(s.header.nbytes for s in self._stored if s.file or s in writing), "disk bytes"
            assert self.config.host_bytes is None or self._host_used <= self.config.host_bytes, "host budget"
            assert all(s.pins >= 0 for s in self._stored)
            assert all(s.tensors is not None and s.file is None and not s.work for s in self._unsaved), "unsaved"

    # -- what follows is called with the lock held ---------------------------------------------------------------------

    def _reserve(self, nbytes: int, wait: bool) -> bool:
        """Counts `nbytes` of host memory as used, if need be by evicting. False, with nothing done, if it cannot."""
        budget = self.config.host_bytes
        while budget is not None:
            victims, excess = [], self._host_used + nbytes - budget
            for stored in self._by_eviction() if 0 < excess <= self._host_used else ():
                if excess <= 0:
                    break
                if stored.evictable:
                    victims.append(stored)
                    excess -= stored.host_bytes
            if excess <= 0:
                for stored in victims:
                    self._evict(stored)
                break
            self._retry_writes()
            if nbytes > budget or not wait or not any(self._working.values()):
                return False
            self._changed.wait()
            self._settle()
        self._host_used += nbytes
        return True

    def _by_eviction(self) -> Iterable[Stored]:
        if self.config.eviction == "longest-remaining":
            return sorted(self._resident, key=lambda stored: -stored.remaining)  # stable: then the least recently used
        return self._resident

    def _touch(self, stored: Stored) -> None:
        if stored in self._resident:
            self._resident.move_to_end(stored)

    def _evict(self, stored: Stored) -> None:
        stored.tensors = None
        del self._resident[stored]
        self._host_used -= stored.host_bytes

    def _add(self, stored: Stored) -> Part:
        self._stored.add(stored)
        return Part(self, stored)

    def _settle(self) -> None:
        """Buries the parts that were dropped."""
        while not self._dropped.empty():
            stored = self._dropped.get()
            stored.dropped = True
            if not stored.work:
                self._bury(stored)

    def _bury(self, stored: Stored) -> None:
        if stored.tensors is not None:
            self._evict(stored)
        self._unsaved.pop(stored, None)
        self._stored.discard(stored)
        if stored.file is not None:
            self._disk_used -= stored.header.nbytes
            if not stored.kept:
                try:
                    # In a thread: freeing many blocks takes the system its time.
                    self._thread("write").submit(self._remove, stored.file)
                    self._removing += 1
                except RuntimeError:  # the interpreter is ending
                    _remove(stored.file)

    def _write_behind(self, stored: Stored) -> None:
        if self.directory is None or stored.file is not None or stored.work or stored.failure:
            return
        nbytes, full = stored.header.nbytes, self._disk_is_full(stored.header.nbytes)
        if full is not None:
            if stored not in self._unsaved:
                self._unsaved[stored] = None
                self.failures.append(f"no room on disk for {nbytes} bytes of saved KV ({full})")
            return
        self._unsaved.pop(stored, None)
        self._disk_used += nbytes
        self._start("write", stored, self._write)

    def _disk_is_full(self, nbytes: int) -> str | None:
        """Why there is no room for so many bytes more."""
        assert self.directory is not None
        budget, spare = self.config.disk_bytes, self.config.disk_spare_bytes
        if budget is not None and self._disk_used + nbytes > budget:
            return f"disk_bytes is {budget}"
        if spare == 0:
            return None
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError:  # the write will say what is wrong
            return None
        under_way = sum(s.header.nbytes for s in self._stored if s.work == "write")
        return f"{free} are free, and disk_spare_bytes is {spare}" if free - under_way - nbytes < spare else None

    def _retry_writes(self) -> None:
        for stored in list(self._unsaved):
            self._write_behind(stored)

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _thread(self, name: Literal["write", "read"]) -> ThreadPoolExecutor:
        if name not in self._threads:
            # With two writers, one fills the page cache while the other waits for the disk.
            self._threads[name] = ThreadPoolExecutor(2 if name == "write" else 1, f"longtail-{name}")
        return self._threads[name]

    def _start(self, name: Literal["write", "read"], stored: Stored, work: Callable[[Stored], None]) -> None:
        stored.work = name
        self._working[name] += 1

        def run() -> None:
            try:
                work(stored)
            except Exception as error:  # whatever it is, it is this part's alone, and those who wait must hear of it
                self._failed(stored, f"{error!r}")
            finally:
                with self._changed:
                    stored.work = ""
                    self._working[name] -= 1
                    self.changes += 1
                    if stored.dropped:  # `_settle` has met it, and left it to this thread
                        self._bury(stored)
                    self._settle()
                    self._changed.notify_all()

        self._thread(name).submit(run)

    def _write(self, stored: Stored) -> None:
        directory, tensors, file = self.directory, stored.tensors, None
        assert directory is not None and tensors is not None
        try:
            if not self._is_dropped(stored):
                file = write_part(directory, new_part_name(), stored.header, tensors)
        except OSError as error:
            self._failed(stored, f"saved KV could not be written: {error}")
        finally:
            with self._changed:
                stored.file = file
                if file is None:
                    self._disk_used -= stored.header.nbytes

    def _read(self, stored: Stored) -> None:
        assert stored.file is not None
        tensors = None
        try:
            if not self._is_dropped(stored):
                tensors = read_part(stored.file, stored.header, self._buffer)
        except SnapshotCorrupt as error:
            self._failed(stored, str(error))
        finally:
            with self._changed:
                stored.tensors = tensors
                if tensors is None:
                    self._host_used -= stored.host_bytes
                else:
                    self._resident[stored] = None

    def _remove(self, file: Path) -> None:
        try:
            _remove(file)
        finally:
            with self._changed:
                self._removing -= 1
                self._changed.notify_all()

    def _is_dropped(self, stored: Stored) -> bool:
        with self._changed:
            self._settle()
            return stored.dropped

    def _failed(self, stored: Stored, failure: str) -> None:
        with self._changed:
            stored.failure = failure
            self.failures.append(failure)

    def _allocate(self, header: PartHeader) -> dict[str, torch.Tensor]:
        return part_tensors(header, self._buffer(header.nbytes))

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """For bytes that `_reserve` has counted."""
        idle, budget = self.config.host_idle_bytes, self.config.host_bytes
        return self._memory.take(nbytes, idle if budget is None else min(idle, max(budget - self._host_used, 0)))


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)


def _remove_files(stored: Iterable[Stored], process: int) -> None:
    if os.getpid() == process:  # a forked child has no claim to them
        for one in stored:
            if one.file is not None and not one.kept:
                one.file.unlink(missing_ok=True)
