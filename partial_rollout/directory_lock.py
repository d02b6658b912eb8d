"""A directory that one process at a time writes in: an advisory lock on a file in it, which the kernel gives back when
its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from longtail.errors import DirectoryLocked

LOCK = "lock"
LINGER_SECONDS = 2.0
"""For which the lock of a dead process is waited for: one that was killed while it started another program leaves a
copy of itself, which holds the lock until it has become that program."""


def take_lock(directory: Path) -> int:
    """-> a file descriptor: closing it gives the lock back, as does the end of the process. DirectoryLocked, which says
    who has it; also if that is this process."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    give_up = time.monotonic() + LINGER_SECONDS
    try:
        while not _locks(descriptor):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            if _lives(holder) or time.monotonic() > give_up:
                who = "this process" if holder == str(os.getpid()) else f"process {holder or 'unknown'}"
                raise DirectoryLocked(f"{directory} is open in {who}; one at a time: close it there first")
            time.sleep(0.01)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """The directory, which is made if it is not there, is ours inside the block. DirectoryLocked."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = take_lock(directory)
    try:
        yield
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
