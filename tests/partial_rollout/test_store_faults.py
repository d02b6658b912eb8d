"""Damaged, foreign, full, locked: a named error or a sample that says what happened to it. Nothing silently wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, prompt
from tests.partial_rollout.store_helpers import FILE, flip, grow, make, raw

from longtail import Rollout, SampleStore, StoreCorrupt, StoreError, StoreLocked, TokenBudget
from longtail.partial_rollout import database as database_module
from longtail.partial_rollout.database import Database
from longtail.partial_rollout.directory_lock import LOCK


@pytest.fixture
def stored(make_engine: EngineMaker, tmp_path: Path) -> Path:
    """A store in which a group of two samples stands paused at 20 tokens each, in chunks of four; and delivery 1,
    a group of one sample."""
    directory = tmp_path / "store"
    with Rollout(
        make_engine(), strategy=TokenBudget(4, per="sample"), store=SampleStore(directory, commit_every=3600)
    ) as rollout:
        rollout.submit([group("done", prompt(5), max_tokens=3)])
        assert len(rollout.collect()) == 1
        rollout.submit([group("a", prompt(9), n=2, max_tokens=40)])
        for _ in range(5):
            rollout.collect()
        assert [len(s.output_ids) for s in rollout.store.unfinished()] == [20, 20]
    return directory


@pytest.fixture
def plain(make_engine: EngineMaker) -> list:
    return generate(make_engine(), group("a", prompt(9), n=2, max_tokens=40))


SKIPPED = (LOCK, f"{FILE}-shm")


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the lock's (it names the last holder) and SQLite's index of the log. An empty log is none."""
    files = {f.name: f.read_bytes() for f in directory.iterdir() if f.is_file() and f.name not in SKIPPED}
    return {name: data for name, data in files.items() if data or name == FILE}


# ---- damage


@pytest.mark.parametrize("column", ["tokens", "logprobs", "checksum"])
@pytest.mark.parametrize("chunk", [0, 2])
def test_a_damaged_chunk_cuts_the_sample_short(
    stored: Path, plain: list, make_engine: EngineMaker, column: str, chunk: int
) -> None:
    with raw(stored) as connection:
        query = (
            "SELECT c.sample_id, start FROM chunks c JOIN samples s ON s.id = c.sample_id WHERE name = 'a/1' ORDER BY 2"
        )
        rows = connection.execute(query).fetchall()
    row, start = rows[chunk]
    flip(stored, "chunks", column, f"sample_id = {row} AND start = {start}", byte=1, bit=1)
    database = Database(stored, read_only=True)
    assert database.check() == [f"sample a/1: output tokens {start} to 19 are damaged"]
    database.close()
    with Rollout(make_engine(), store=stored) as rollout:
        store = rollout.store
        text = f"sample a/1: output tokens {start} to 19 are damaged; it continues from token {start}"
        assert store.damages == [text]
        assert [len(s.output_ids) for s in store.unfinished()] == [20, start]
        assert store.ledger.lines["failed"] == 20 - start and store.ledger.pending == 20 + start
        assert store._database.check() == []
        store.check_integrity()
        (g,) = rollout.collect()
        for got, expected in zip(g.samples, plain, strict=True):
            assert_same(got, expected)
        assert store.ledger.lines["trained"] == 83 and store.ledger.generated == 83 + 20 - start
    with SampleStore(stored) as again:
        assert again.damages == []  # it was written off once
        assert again.ledger.lines["failed"] == 20 - start
        again.check_integrity()


def test_a_missing_chunk_is_damage(stored: Path) -> None:
    with raw(stored) as connection:
        connection.execute("DELETE FROM chunks WHERE start BETWEEN 1 AND 12 AND sample_id = 2")
    with SampleStore(stored) as store:
        assert len(store.damages) == 1 and "sample a/0: output tokens" in store.damages[0]
        store.check_integrity()


@pytest.mark.parametrize("column", ["status", "segments", "num_tokens", "running", "checksum"])
def test_a_damaged_record_starts_again(stored: Path, plain: list, make_engine: EngineMaker, column: str) -> None:
    if column == "running":
        with raw(stored) as connection:
            connection.execute("UPDATE samples SET running = running + 1 WHERE name = 'a/0'")
    else:
        flip(stored, "samples", column, "name = 'a/0'")
    with Rollout(make_engine(), store=stored) as rollout:
        assert rollout.store.damages == ["sample a/0: its record is damaged; it starts again"]
        assert rollout.store.ledger.lines["failed"] == 20
        rollout.store.check_integrity()
        (g,) = rollout.collect()
        for got, expected in zip(g.samples, plain, strict=True):
            assert_same(got, expected)
        assert rollout.store._database.check() == []


@pytest.mark.parametrize(
    ("table", "column", "lost"),
    [("groups", "prompt", 2), ("groups", "params", 2), ("groups", "task", 2), ("samples", "seed", 1)],
)
def test_a_damaged_prompt_is_never_continued(
    stored: Path, make_engine: EngineMaker, table: str, column: str, lost: int
) -> None:
    flip(stored, table, column, "name = 'a'" if table == "groups" else "name = 'a/0'")
    for damages in (lost, 0):
        with SampleStore(stored) as store:
            assert len(store.damages) == damages
            for i, text in enumerate(store.damages):
                assert text == (
                    f"sample a/{i}: its prompt or its parameters are damaged; it cannot go on, and counts as failed"
                )
            samples = [s for g in store for s in g.samples]
            assert [s.status for s in samples] == ["failed"] * lost + ["paused"] * (2 - lost)
            assert "its prompt or its parameters were damaged" in str(samples[0].failure)
            assert len(samples[0].output_ids) == 20
            store.check_integrity()
            assert store._database.check() == []
    with Rollout(make_engine(), store=stored) as rollout:
        assert [g.id for g in rollout.collect()] == ["a"]  # handed over, as failed: data, and no end of the run
        assert rollout.store.ledger.lines["failed"] == 20 * lost


@pytest.mark.parametrize("text", ["params", "task"])
def test_a_text_that_is_no_text_any_more(stored: Path, text: str) -> None:
    with raw(stored) as connection:
        connection.execute(f"UPDATE groups SET {text} = CAST(x'7bff7d' AS TEXT) WHERE name = 'a'")
    with SampleStore(stored) as store:
        assert len(store.damages) == 2 and all(s.status == "failed" for g in store for s in g.samples)


def test_a_damaged_delivery_names_the_sample(stored: Path) -> None:
    flip(stored, "chunks", "tokens", "sample_id = 1")
    with SampleStore(stored) as store:
        assert store.damages == [] and len(store) == 1
        with pytest.raises(StoreCorrupt, match="delivery 1: sample done/0: output tokens 0 to 2 are damaged"):
            list(store.deliveries(after=0))
        assert store._database.check() == ["sample done/0: output tokens 0 to 2 are damaged"]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE ledger SET tokens = tokens + 2 WHERE name = 'trained'", "ledger: trained says 5, the samples say 3"),
        (
            "UPDATE ledger SET tokens = tokens + 1 WHERE name = 'generated'",
            "ledger: pending says 41, the samples say 40",
        ),
        ("UPDATE samples SET line = 'trained' WHERE name = 'a/0'", "sample a/0 is settled, but its group was not"),
        ("UPDATE samples SET line = 'pending' WHERE name = 'done/0'", "sample done/0 is pending, but its group was"),
        ("UPDATE samples SET line = 'lost' WHERE name = 'a/0'", "no line is called 'lost'"),
        ("UPDATE groups SET delivery = 7 WHERE name = 'done'", "group done is in no delivery"),
        ("DELETE FROM samples WHERE name = 'a/0'", "belongs to nothing"),
        ("DELETE FROM samples WHERE group_id = 2", "group a has no samples"),
    ],
)
def test_check_finds_what_contradicts_itself(stored: Path, statement: str, problem: str) -> None:
    with raw(stored) as connection:
        connection.execute(statement)
    database = Database(stored, read_only=True)
    assert any(problem in found for found in database.check()), database.check()
    database.close()


# ---- not a store


def sqlite_of_others(file: Path, version: int) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE samples (id)")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def truncated(file: Path) -> None:
    with SampleStore(file.parent) as store:
        store.add([make(f"g{i}") for i in range(400)])
    os.truncate(file, os.path.getsize(file) // 2)


NOT_A_STORE: dict[str, tuple[Callable[[Path], object], type[StoreError], str]] = {
    "text": (lambda f: f.write_bytes(b"no database " * 500), StoreCorrupt, "is damaged, or no SQLite file"),
    "foreign": (lambda f: sqlite_of_others(f, 0), StoreCorrupt, "is not a sample store"),
    "foreign-with-a-version": (lambda f: sqlite_of_others(f, 1), StoreCorrupt, "is not a sample store"),
    "truncated": (truncated, StoreCorrupt, "is damaged, or no SQLite file"),
    "directory": (lambda f: f.mkdir(), StoreError, "unable to open database file"),
    "link": (lambda f: f.symlink_to("elsewhere.sqlite"), StoreError, "is a symbolic link"),
}


@pytest.mark.parametrize("kind", NOT_A_STORE)
@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_store_is_named_and_left_alone(kind: str, read_only: bool, tmp_path: Path) -> None:
    put, error, message = NOT_A_STORE[kind]
    put(tmp_path / FILE)
    before = {} if kind == "directory" else contents(tmp_path) if kind != "link" else {}
    if read_only and kind in ("directory", "link"):
        message = "holds no sample store"
    with pytest.raises(error, match=message):
        Database(tmp_path, read_only=read_only).open_groups()
    if before:
        assert contents(tmp_path) == before
    else:
        assert (tmp_path / FILE).is_dir() or (tmp_path / FILE).is_symlink()
    if not read_only:
        with pytest.raises(error, match=message):  # the lock is free again
            SampleStore(tmp_path)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=str(path)):
            SampleStore(path)


def test_the_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / LOCK).symlink_to(victim)
    with pytest.raises(StoreError, match="symbolic links"):
        SampleStore(tmp_path / "store")
    assert victim.read_text() == "precious"


def test_reading_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no sample store"):
        Database(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("moment", ["empty file", "no tables yet"])
def test_a_store_that_was_killed_while_it_was_made(moment: str, tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    if moment == "no tables yet":
        with sqlite3.connect(tmp_path / FILE) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
    with SampleStore(tmp_path) as store:
        store.add([make("a")])
    with SampleStore(tmp_path) as store:
        assert "a" in store


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SampleStore(tmp_path)
    store.close()
    store.close()
    for call in (store.commit, lambda: store.add([make("a")]), lambda: "a" in store, lambda: store.ledger):
        with pytest.raises(StoreError, match="is closed in this process; open it again"):
            call()


# ---- versions of the schema


def test_a_newer_schema_is_refused(stored: Path) -> None:
    with raw(stored) as connection:
        connection.execute("PRAGMA user_version = 5")
    before = contents(stored)
    for read_only in (True, False):
        with pytest.raises(StoreCorrupt, match=r"schema 5\) was made by a newer longtail; upgrade"):
            Database(stored, read_only=read_only)
    assert contents(stored) == before


def test_an_older_schema_is_brought_up(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def to_5(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE groups ADD COLUMN note TEXT")

    def to_6(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE groups SET note = 'of ' || name")
        if fails:
            raise OSError(errno.EIO, "broken step")

    monkeypatch.setattr(database_module, "SCHEMA_VERSION", 6)
    with pytest.raises(StoreError, match="has schema 4, from which there is no way to 6"):
        SampleStore(stored)
    monkeypatch.setattr(database_module, "MIGRATIONS", {4: to_5, 5: to_6})
    with pytest.raises(StoreError, match="has schema 4: open it for writing once to bring it to 6"):
        Database(stored, read_only=True)
    fails = True
    with pytest.raises(StoreError, match="broken step"):
        SampleStore(stored)
    with raw(stored) as connection:  # the step that failed left nothing; the one before it stands
        assert connection.execute("PRAGMA user_version").fetchone() == (5,)
        assert connection.execute("SELECT DISTINCT note FROM groups").fetchall() == [(None,)]
    fails = False
    with SampleStore(stored) as store:
        assert [len(s.output_ids) for s in store.unfinished()] == [20, 20] and store.last_delivery == 1
        assert store._database.query("SELECT note FROM groups ORDER BY id") == [("of done",), ("of a",)]
        assert store._database.query("PRAGMA user_version") == [(6,)]


# ---- one process


HOLDER = """
import os, sys, time
from longtail import SampleStore
store = SampleStore(sys.argv[1])
child = os.fork() if sys.argv[2] == "fork" else 1
if child == 0:  # a child that outlives its parent
    print("child", os.getpid(), flush=True)
    try:
        store.commit()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    time.sleep(60)
time.sleep(0.5)
print("held", os.getpid(), flush=True)
time.sleep(60)
"""


DEAD_HOLDER = """
import os, subprocess, sys
from longtail import SampleStore
store = SampleStore(sys.argv[1])
lock = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}").endswith("/lock")]
child = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=lock, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_was_starting_gives_the_lock_back(tmp_path: Path) -> None:
    """A copy of the holder, not yet the program that it becomes, has the lock for a moment longer."""
    command = [sys.executable, "-c", DEAD_HOLDER, str(tmp_path)]
    int(subprocess.run([*command, "0.5"], stdout=subprocess.PIPE, text=True, check=False).stdout)
    with SampleStore(tmp_path) as store:
        store.add([make("a")])
    child = int(subprocess.run([*command, "600"], stdout=subprocess.PIPE, text=True, check=False).stdout)
    try:
        with pytest.raises(StoreLocked, match="one at a time"):
            SampleStore(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
    with SampleStore(tmp_path) as store:
        assert [group.id for group in store] == ["a"]


@pytest.mark.parametrize("fork", ["alone", "fork"])
def test_two_processes(tmp_path: Path, fork: str) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), fork]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert holder.stdout is not None
        if fork == "fork":
            child = int(holder.stdout.readline().split()[1])
            assert holder.stdout.readline().startswith("StoreError the store")
        assert holder.stdout.readline() == f"held {holder.pid}\n"
        with pytest.raises(StoreLocked, match=f"is open in process {holder.pid}; one at a time"):
            SampleStore(tmp_path)
        Database(tmp_path, read_only=True).close()  # reading takes no lock
        holder.kill()
        holder.wait()
        with SampleStore(tmp_path) as store:  # free at once, whatever the child does
            store.add([make("a")])
            with pytest.raises(StoreLocked, match="is open in this process"):
                SampleStore(tmp_path)
    finally:
        holder.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        holder.communicate()


def test_a_store_that_is_garbage_gives_its_lock_back(tmp_path: Path) -> None:
    import gc

    store = SampleStore(tmp_path)
    del store
    gc.collect()
    SampleStore(tmp_path).close()
    assert (tmp_path / LOCK).exists()


def test_a_reader_sees_one_moment_beside_a_writer(tmp_path: Path) -> None:
    """Its queries follow one another while the writer goes on; a check that saw two moments would find faults."""
    with SampleStore(tmp_path) as store:
        store.add([make(f"g{i}") for i in range(50)])
        samples = store.unfinished()
        store.watch(samples)
        reader = Database(tmp_path, read_only=True)
        query, calls = reader.query, []

        def between(sql: str, values: tuple = ()) -> list:
            calls.append(sql)
            for sample in samples:
                grow(sample, 1)
            store.commit()
            return query(sql, values)

        reader.query = between  # type: ignore[method-assign,assignment]
        assert reader.check() == [] and len(calls) > 5
        reader.close()
        assert store._database.check() == []


def test_a_reader_sees_what_a_killed_writer_left(tmp_path: Path) -> None:
    with SampleStore(tmp_path / "live") as store:
        store.add([make("a")])
        (tmp_path / "copy").mkdir()
        for name in (FILE, f"{FILE}-wal"):  # as after a restart of the machine, without the shared index
            shutil.copy(tmp_path / "live" / name, tmp_path / "copy")
    before = contents(tmp_path / "copy")
    reader = Database(tmp_path / "copy", read_only=True)
    assert [g.id for g in reader.open_groups()[0]] == ["a"] and reader.check() == []
    reader.close()
    assert contents(tmp_path / "copy") == before


def test_a_child_has_its_own_copy_of_a_store_in_memory() -> None:
    with SampleStore() as store:
        store.add([make("a")])
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                store.add([make("b")])
                code = 0 if len(store) == 2 else 1
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(store) == 1 and "b" not in store


def test_a_reader_changes_nothing(stored: Path) -> None:
    before = (stored / FILE).read_bytes()
    reader = Database(stored, read_only=True)
    assert reader.check() == [] and len(reader.open_groups()[0]) == 1
    with pytest.raises(StoreError, match="readonly"), reader.transaction(durable=True):
        reader.set_meta("a", "b")
    reader.close()
    assert (stored / FILE).read_bytes() == before
