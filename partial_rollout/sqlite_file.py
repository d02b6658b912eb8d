"""One SQLite file and the directory that it has to itself: opening, locking, transactions, schema, named errors.

Write-ahead logging: a process that is killed at any moment leaves the last commit behind, whole. One process at a time
writes: an advisory lock on the file `lock`, which the kernel gives back when its holder dies (a child that was forked
meanwhile lets go of it at once, and cannot use the store). Readers take no lock, work beside a writer, and change
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longtail.errors import DirectoryLocked, StoreCorrupt, StoreError, StoreFull, StoreLocked
from longtail.partial_rollout.directory_lock import take_lock

FILE = "samples.sqlite"
PAGE_BYTES = 1 << 14
"""Several samples to a page: with SQLite's 4 KiB, a sample of 200 tokens would leave a page nearly half empty."""
CACHE_BYTES = 32 << 20
LOG_BYTES = 4 << 20
"""From this size on the log is written back into the file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    version: int
    application: int
    """SQLite's application_id: tells our files from those of other programs."""
    create: Callable[[sqlite3.Connection], None]
    migrations: Mapping[int, Callable[[sqlite3.Connection], None]]
    """What brings a file of version n to n + 1, inside a transaction."""


class SqliteFile:
    """Owns the file, the connection and the lock. What goes wrong with them is a `StoreError`.

    directory: None keeps the tables in memory. Not for several threads at once."""

    def __init__(self, directory: Path | None, schema: Schema, *, read_only: bool = False) -> None:
        self.directory = directory
        self.read_only = read_only
        self._schema = schema
        self._connection: sqlite3.Connection | None = None
        self._unlock: Callable[[], object] | None = None
        with named(directory):
            try:
                if directory is not None:
                    self._prepare(directory)
                self._connection = self._connect()
                self._check_schema()
            except BaseException:
                self.close()
                raise
        _open_files.add(self)

    def _prepare(self, directory: Path) -> None:
        file = directory / FILE
        if self.read_only and not file.is_file():
            raise StoreError(f"{directory} holds no sample store (no {FILE})")
        if file.is_symlink():  # two directories with one file would have two locks
            raise StoreError(f"{file} is a symbolic link; open the directory that it leads to")
        if not self.read_only:
            directory.mkdir(parents=True, exist_ok=True)
            self._unlock = _take_lock(self, directory)

    def _connect(self) -> sqlite3.Connection:
        uri = "file::memory:"
        if self.directory is not None:
            file = (self.directory / FILE).absolute()
            log = file.with_name(f"{FILE}-wal")
            # Reading beside a writer needs SQLite's shared index; where none can be made, nobody can be writing.
            still = self.read_only and not os.access(self.directory, os.W_OK) and not log.exists()
            uri = f"{file.as_uri()}?mode={'ro' if self.read_only else 'rwc'}{'&immutable=1' if still else ''}"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)

    def _check_schema(self) -> None:
        """Changes nothing in a file that is not ours."""
        schema, execute = self._schema, self.connection.execute
        version, application = (execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id"))
        tables = execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        fresh = (version, application, tables) == (0, 0, 0)
        where = "memory" if self.directory is None else self.directory / FILE
        if application != schema.application and not (fresh and not self.read_only):
            raise StoreCorrupt(f"{where} is not a sample store")
        if version > schema.version:
            raise StoreCorrupt(f"{where} (schema {version}) was made by a newer longtail; upgrade")
        if version < schema.version and self.read_only:
            raise StoreError(f"{where} has schema {version}: open it for writing once to bring it to {schema.version}")
        if self.read_only:
            return
        if fresh:
            execute(f"PRAGMA page_size = {PAGE_BYTES}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA foreign_keys = ON")
        execute(f"PRAGMA cache_size = {-CACHE_BYTES // 1024}")
        execute(f"PRAGMA wal_autocheckpoint = {LOG_BYTES // PAGE_BYTES}")
        if fresh:
            with self.transaction(durable=True):
                schema.create(self.connection)
                execute(f"PRAGMA application_id = {schema.application}")
                execute(f"PRAGMA user_version = {schema.version}")
            return
        while version < schema.version:
            if version not in schema.migrations:
                raise StoreError(f"{where} has schema {version}, from which there is no way to {schema.version}")
            with self.transaction(durable=True):
                schema.migrations[version](self.connection)
                version += 1
                execute(f"PRAGMA user_version = {version}")

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"the store {self.directory or 'in memory'} is closed in this process; open it again")
        return self._connection

    @contextlib.contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        """All or nothing. durable: on return it is on the disk (a power cut may take the last commits that are not,
        never their order)."""
        with named(self.directory):
            execute = self.connection.execute
            execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            execute("BEGIN IMMEDIATE")
            try:
                yield
                execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Everything that is read inside is of one moment, whatever a writer does meanwhile."""
        with named(self.directory):
            if self.connection.in_transaction:
                yield
                return
            self.connection.execute("BEGIN")
            try:
                yield
            finally:
                self._roll_back()

    def _roll_back(self) -> None:
        """After some errors SQLite has done it by itself; and no error of this may hide the first one."""
        with contextlib.suppress(sqlite3.Error):
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with named(self.directory):
            return self.connection.execute(sql, values).fetchall()

    def vacuum(self) -> None:
        """Gives the space of what was removed back to the file system."""
        with named(self.directory):
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def size(self) -> int:
        """Bytes on disk."""
        if self.directory is None:
            return 0
        return sum(f.stat().st_size for f in self.directory.glob(f"{FILE}*"))

    def close(self) -> None:
        """May be called again."""
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                with named(self.directory):
                    connection.close()
        finally:
            if self._unlock is not None:
                self._unlock()
                self._unlock = None

    def _forked(self) -> None:
        """In a child process: the lock and the connection are the parent's. Memory is its own."""
        if self.directory is None:
            return
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        if self._connection is not None:
            _parents.append(self._connection)
            self._connection = None


# ---- the lock


_open_files: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_parents: list[sqlite3.Connection] = []
"""Connections of the parent process. Never closed here: closing one could remove the log that the parent writes."""


def _after_fork() -> None:
    for file in list(_open_files):
        file._forked()


os.register_at_fork(after_in_child=_after_fork)


def _take_lock(owner: SqliteFile, directory: Path) -> Callable[[], object]:
    """-> what gives it back; also called when the owner is garbage."""
    try:
        descriptor = take_lock(directory)
    except DirectoryLocked as error:
        raise StoreLocked(str(error)) from None
    return weakref.finalize(owner, os.close, descriptor)


# ---- errors


@contextlib.contextmanager
def named(directory: Path | None) -> Iterator[None]:
    """SQLite's and the system's errors under our names."""
    where = "the store in memory" if directory is None else str(directory)
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_full(directory)):
            raise StoreFull(
                f"{where}: the disk is full ({error}); free some space and repeat, nothing is lost"
            ) from error
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreCorrupt(f"{where}/{FILE} is damaged, or no SQLite file ({error})") from error
        raise StoreError(f"{where}/{FILE}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"{where}: the disk is full ({error}); free some space and repeat, nothing is lost"
            ) from error
        raise StoreError(f"{where}: {error}") from error


def _is_full(directory: Path | None) -> bool:
    """SQLite calls some writes that found no space (of its shared index) an I/O error."""
    try:
        return directory is not None and shutil.disk_usage(directory).free < 1 << 16
    except OSError:
        return False
