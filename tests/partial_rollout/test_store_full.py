"""A full disk: a named error, everything still in memory, and all of it written when there is space again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, prompt
from tests.partial_rollout.store_helpers import finish, grow, make, records

from longtail import Rollout, SampleStore, StoreError, StoreFull
from longtail.partial_rollout.database import Database


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of sixteen megabytes, where it may be mounted."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(mounted)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("may not mount a file system here")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill(file: Path) -> None:
    with open(file, "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while True:
            ballast.write(bytes(4096))


class Full:
    """A disk that can be filled and freed."""

    def __init__(self, store: SampleStore, disk: Path | None) -> None:
        self.store, self.disk = store, disk
        self.pages = int(store._database.query("PRAGMA max_page_count")[0][0])

    def fill(self) -> None:
        if self.disk is None:  # SQLite's own limit: the same error as that of the disk
            used = int(self.store._database.query("PRAGMA page_count")[0][0])
            self.store._database.query(f"PRAGMA max_page_count = {used}")
            return
        fill(self.disk / "ballast")

    def free(self) -> None:
        if self.disk is None:
            self.store._database.query(f"PRAGMA max_page_count = {self.pages}")
        else:
            (self.disk / "ballast").unlink()


@pytest.fixture(params=["page limit", "file system"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Full]:
    disk = request.getfixturevalue("small_disk") if request.param == "file system" else None
    with SampleStore((disk or tmp_path) / "store", commit_every=0.0) as store:
        yield Full(store, disk)


def big(name: str, n: int = 4) -> list:
    """More than the free rest of a page or two."""
    return [make(f"{name}{i}", n=n, stop=("x" * 5000,)) for i in range(20)]


def test_every_call_on_a_full_disk_changes_nothing_and_can_be_repeated(full: Full) -> None:
    store = full.store
    store.add([make("a"), make("b", n=2), make("c"), *big("old")])
    a, b, c = list(store)[:3]
    for sample in (*a.samples, *b.samples):
        finish(sample, 300)
    store.watch([*a.samples, *b.samples])
    store.commit()
    assert store.hand_over([a]) == 1
    grow(c.samples[0], 20_000)
    store.watch(c.samples)
    store.count(recomputed=5)
    full.fill()
    before, held, in_memory = store.ledger, records(list(store)), len(c.samples[0].output_ids)
    for call in (
        store.commit,
        lambda: store.add(big("new")),
        lambda: store.discard([c], "stale"),
        store.commit,
    ):
        with pytest.raises(StoreFull, match=r"the disk is full.*nothing is lost"):
            call()
        assert store.ledger == before and records(list(store)) == held and "new0" not in store
        assert len(c.samples[0].output_ids) == in_memory and store.last_delivery == 1
        store.check_balance()
    full.free()
    store.add(big("new"))
    store.commit()
    store.hand_over([b])
    store.discard([c], "stale")
    expected = before.places | {"trained": 900, "stale": 20_000, "pending": 0}
    assert store.ledger.places == expected and store.ledger.beside["recomputed"] == 5
    assert store.last_delivery == 2 and "new19" in store
    store.check_integrity()
    assert store._database.check() == []


def test_a_rollout_on_a_full_disk_goes_on_when_there_is_space(full: Full, make_engine: EngineMaker) -> None:
    def batch() -> list:
        return [group(f"g{i}", prompt(20, i), n=2, max_tokens=150) for i in range(3)]

    plain = {s.id: s for s in generate(make_engine(), *batch())}
    engine = make_engine(max_num_seqs=4)
    rollout = Rollout(engine, store=full.store)
    rollout.submit(batch())
    step, steps = engine.step, []

    def filling(**asked):
        steps.append(1)
        if len(steps) == 10:
            full.fill()
        return step(**asked)

    engine.step = filling  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(StoreFull):
            rollout.collect()
        assert len(rollout.store) == 3 and not engine.has_work
        rollout.store.check_balance()
    full.free()
    groups = rollout.collect()
    assert len(groups) == 3
    for sample in (s for g in groups for s in g.samples):
        assert_same(sample, plain[sample.id])
    assert rollout.store.ledger.lines["trained"] == 900 == rollout.store.ledger.generated
    rollout.store.check_integrity()


def test_opening_on_a_full_disk(small_disk: Path) -> None:
    with SampleStore(small_disk / "store") as store:
        store.add([make("a")])
    shutil.copytree(small_disk / "store", small_disk / "copy")
    fill(small_disk / "ballast")
    for name in ("store", "copy", "new"):
        with pytest.raises(StoreFull, match="the disk is full"), SampleStore(small_disk / name) as store:
            store.add(big("b"))
    (small_disk / "ballast").unlink()
    for name in ("store", "copy"):
        with SampleStore(small_disk / name) as store:
            assert [g.id for g in store] == ["a"]


def test_a_directory_that_cannot_be_written_can_be_read(small_disk: Path) -> None:
    with SampleStore(small_disk / "store") as store:
        store.add([make("a")])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="Read-only file system"):
        SampleStore(small_disk / "store")
    reader = Database(small_disk / "store", read_only=True)
    assert reader.check() == [] and [g.id for g in reader.open_groups()[0]] == ["a"]
    reader.close()
