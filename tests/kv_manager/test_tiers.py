"""Tiers by hand: budgets, what is evicted, what is shared, what happens to parts that are dropped in the middle of it.

`Hand` stands for the writing and the reading thread: work is done when the test says so. A part of one block has
LAYERS * 2 * HEADS * SIZE * DIM * 4 = 2048 bytes.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kv_manager.conftest import DIM, HEADS, LAYERS, LAYOUT, SIZE, A

from longtail.errors import SnapshotCorrupt, SnapshotMismatch
from longtail.kv_manager import tiers
from longtail.kv_manager.part import Part
from longtail.kv_manager.snapshot_file import PartHeader, write_part
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers

BLOCK = 2048


class Hand:
    """An executor whose work is done by hand, in order."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        self.queue.append(lambda: work(*args))

    def run(self, count: int | None = None) -> None:
        for _ in range(len(self.queue) if count is None else count):
            self.queue.popleft()()

    def shutdown(self, wait: bool) -> None:
        self.run()


def by_hand(path: Path | None, **config: Any) -> tuple[Tiers, Hand, Hand]:
    made = Tiers(TierConfig(disk=path, **config))
    writer, reader = Hand(), Hand()
    made._threads = {"write": writer, "read": reader}  # type: ignore[dict-item]
    return made, writer, reader


def header(name: str, blocks: int = 1, shared: bool = False) -> PartHeader:
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return PartHeader("" if shared else name, A, 0, LAYOUT, "float32", 0, blocks, blocks * SIZE, digest)


def put(to: Tiers, name: str, blocks: int = 1, number: float = 0.0, **fields: Any) -> Part | None:
    def fill(out: Mapping[str, torch.Tensor]) -> None:
        out["kv"].fill_(number)

    return to.put(header(name, blocks, fields.get("shared", False)), fill, **{"wait": False} | fields)


def must(part: Part | None) -> Part:
    assert part is not None
    return part


def where(**parts: Part) -> dict[str, str]:
    return {name: ("h" if p.in_memory else "") + ("d" if p.file else "") for name, p in parts.items()}


# ---- budgets


def test_full_is_a_value_and_nothing_is_touched() -> None:
    t, _, _ = by_hand(None, host_bytes=2 * BLOCK)
    a, b = must(put(t, "a")), must(put(t, "b"))
    called: list[Any] = []
    assert t.put(header("c"), called.append, wait=True) is None  # nothing to wait for
    assert t.put(header("d", blocks=3), called.append, wait=True) is None  # never
    assert not called
    assert where(a=a, b=b) == {"a": "h", "b": "h"}
    assert t.failures[-1] == "no room in host memory for 6144 bytes of saved KV (host_bytes is 4096)"
    assert t.host_used == 2 * BLOCK
    del a
    assert t.host_used == BLOCK
    must(put(t, "c"))
    t.check_integrity()


def test_a_fill_that_fails_gives_its_room_back() -> None:
    t, _, _ = by_hand(None, host_bytes=BLOCK)
    with pytest.raises(MemoryError):
        t.put(header("a"), lambda out: (_ for _ in ()).throw(MemoryError()))
    assert t.host_used == 0
    assert put(t, "a")


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    t, writer, reader = by_hand(tmp_path, host_bytes=3 * BLOCK)
    a, b, c = (must(put(t, name, number=i)) for i, name in enumerate("abc"))
    assert put(t, "d") is None  # nothing is on disk yet
    writer.run(2)
    t.load(a)
    assert where(a=a, b=b, c=c) == {"a": "hd", "b": "hd", "c": "h"}
    d = must(put(t, "d"))
    assert where(a=a, b=b, c=c, d=d) == {"a": "hd", "b": "d", "c": "h", "d": "h"}
    e = must(put(t, "e"))  # c is older than a and not on disk
    assert where(a=a, c=c, d=d, e=e) == {"a": "d", "c": "h", "d": "h", "e": "h"}
    assert put(t, "f") is None
    writer.run()
    assert t.prefetch([a])
    reader.run()
    assert where(a=a, b=b, c=c, d=d, e=e) == {"a": "hd", "b": "d", "c": "d", "d": "hd", "e": "hd"}
    assert torch.equal(t.load(a)["kv"], torch.zeros(1, LAYERS, 2, HEADS, SIZE * DIM))
    t.check_integrity()


def test_the_one_that_may_grow_longest_goes_first(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path, host_bytes=3 * BLOCK, eviction="longest-remaining")
    a, b, c = (must(put(t, n, remaining=r)) for n, r in (("a", 5), ("b", 9), ("c", 9)))
    writer.run()
    t.load(b)
    d = must(put(t, "d", remaining=1))  # b and c may both grow by 9: the least recently used of them
    assert where(a=a, b=b, c=c, d=d) == {"a": "hd", "b": "hd", "c": "d", "d": "h"}
    writer.run()
    e = must(put(t, "e", remaining=99))
    assert where(a=a, b=b, e=e) == {"a": "hd", "b": "d", "e": "h"}


def test_a_shared_part_counts_for_the_sample_that_is_back_first(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path, host_bytes=2 * BLOCK, eviction="longest-remaining")
    prompt, other = must(put(t, "p", shared=True, remaining=90)), must(put(t, "x", remaining=50))
    assert put(t, "p", shared=True, remaining=3) is prompt
    writer.run()
    must(put(t, "y"))
    assert where(p=prompt, x=other) == {"p": "hd", "x": "d"}


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    t, writer, reader = by_hand(tmp_path, host_bytes=2 * BLOCK)
    a, b = must(put(t, "a")), must(put(t, "b"))
    writer.run()
    assert t.prefetch([a, b])
    assert put(t, "c") is None
    t.unpin([b])
    c = must(put(t, "c"))
    assert where(a=a, b=b, c=c) == {"a": "hd", "b": "d", "c": "h"}
    assert not t.prefetch([a, b])  # no room for b: a keeps its one pin
    t.unpin([a])
    with pytest.raises(AssertionError, match="unpinned more often"):
        t.unpin([a])
    assert not t.prefetch([a, b])  # c is not on disk
    assert not reader.queue
    writer.run()
    assert t.prefetch([a, b])
    reader.run()
    assert where(a=a, b=b, c=c) == {"a": "hd", "b": "hd", "c": "d"}


def test_room_being_read_into_is_taken(tmp_path: Path) -> None:
    t, writer, reader = by_hand(tmp_path, host_bytes=2 * BLOCK)
    a = must(put(t, "a", number=7))
    writer.run()
    b, c = must(put(t, "b")), must(put(t, "c"))
    writer.run()
    assert t.prefetch([a])
    assert where(a=a, b=b, c=c) == {"a": "d", "b": "d", "c": "hd"}
    assert t.host_used == 2 * BLOCK
    assert not a.is_ready
    assert t.prefetch([a])  # the second pin does not read it again
    assert len(reader.queue) == 1
    d = must(put(t, "d"))
    assert put(t, "e") is None
    reader.run()
    assert a.is_ready
    assert where(a=a, c=c, d=d) == {"a": "hd", "c": "d", "d": "h"}
    assert t.load(a)["kv"].unique().tolist() == [7]
    t.check_integrity()


def test_a_full_disk_tier_is_tried_again_when_it_has_room(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path, host_bytes=2 * BLOCK, disk_bytes=BLOCK)
    a, b = must(put(t, "a")), must(put(t, "b"))
    writer.run()
    assert where(a=a, b=b) == {"a": "hd", "b": "h"}
    assert t.failures[-1] == "no room on disk for 2048 bytes of saved KV (disk_bytes is 2048)"
    assert t.disk_used == BLOCK
    c = must(put(t, "c"))
    assert where(a=a, b=b, c=c) == {"a": "d", "b": "h", "c": "h"}
    del a
    assert put(t, "d") is None  # b begins to be written
    writer.run()
    assert where(b=b, c=c) == {"b": "hd", "c": "h"}
    assert put(t, "d") is not None
    t.check_integrity()


def test_put_waits_for_room_that_a_write_makes(tmp_path: Path) -> None:
    t = Tiers(TierConfig(disk=tmp_path, host_bytes=BLOCK))
    parts = [must(put(t, str(i), number=i, wait=True)) for i in range(20)]
    for i, part in enumerate(parts):
        assert t.load(part)["kv"].unique().tolist() == [i]
        assert t.host_used <= BLOCK
    t.close()
    t.check_integrity()


# ---- parts that are dropped


def test_files_go_with_their_parts_unless_kept(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path)
    a, b, c = (must(put(t, name)) for name in "abc")
    b.keep()  # before it is written
    writer.run()
    c.keep()  # after
    assert b.file is not None
    assert c.file is not None
    kept = {b.file.name, c.file.name}
    assert len(os.listdir(tmp_path)) == 3
    assert t.disk_used == 3 * BLOCK
    del a, b, c
    assert (t.host_used, t.disk_used) == (0, 0)
    writer.run()
    assert set(os.listdir(tmp_path)) == kept


@pytest.mark.parametrize("noticed", [True, False])
def test_a_part_dropped_before_or_during_its_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """noticed: while the writer is still at work, or when it has ended."""
    t, writer, _ = by_hand(tmp_path, host_bytes=2 * BLOCK)
    a, b = must(put(t, "a")), must(put(t, "b"))

    def drop_b(*args: Any) -> Path:
        nonlocal b
        del b
        if noticed:
            assert t.host_used == BLOCK  # the writer still reads it
        return write_part(*args)

    monkeypatch.setattr(tiers, "write_part", drop_b)
    del a
    assert t.host_used == 2 * BLOCK  # its bytes are there as long as the writer may read them
    writer.run(1)
    assert os.listdir(tmp_path) == []
    writer.run(1)
    writer.run()
    assert (t.host_used, t.disk_used, os.listdir(tmp_path)) == (0, 0, [])
    t.check_integrity()


def test_a_part_dropped_during_its_read_leaves_nothing(tmp_path: Path) -> None:
    """An abort during a load: the room comes back, and the late completion is harmless."""
    t, writer, reader = by_hand(tmp_path, host_bytes=BLOCK)
    a = must(put(t, "a"))
    writer.run()
    b = must(put(t, "b"))
    writer.run()
    assert t.prefetch([a])
    assert b.file is not None
    t.unpin([a])
    del a
    assert t.host_used == BLOCK
    reader.run()
    writer.run()
    assert t.host_used == 0
    assert os.listdir(tmp_path) == [b.file.name]
    t.check_integrity()


def test_files_go_with_the_tiers(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path)
    a, b = must(put(t, "a")), must(put(t, "b"))
    b.keep()
    writer.run()
    del a, b, t
    gc.collect()
    assert len(os.listdir(tmp_path)) == 1


LEAVES = """
import os, sys
from tests.kv_manager.test_tiers import must, put
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
t = Tiers(TierConfig(disk=sys.argv[1]))
a, b = must(put(t, "a")), must(put(t, "b"))
b.keep()
t.flush()
if os.fork() == 0:
    sys.exit()  # with everything that is done at the end of a process
os.wait()
print(len(os.listdir(sys.argv[1])), b.file.name)
"""


def test_what_is_left_at_the_end_of_the_process(tmp_path: Path) -> None:
    """Files that are kept, and no others; a forked child removes nothing."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    count, kept = done.stdout.split()
    assert count == "2"
    assert os.listdir(tmp_path) == [kept]


# ---- damage


def test_a_real_full_disk(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small tmpfs")
    try:
        t = Tiers(TierConfig(disk=tmp_path, disk_spare_bytes=0))
        parts = [must(put(t, str(i), blocks=8, number=i)) for i in range(6)]  # 16 KiB each
        t.flush()
        written = [p for p in parts if p.file is not None]
        assert 0 < len(written) < 6
        assert {p.failure for p in parts if p.file is None} == {
            "saved KV could not be written: [Errno 28] No space left on device"
        }
        assert sorted(os.listdir(tmp_path)) == sorted(p.file.name for p in written if p.file)
        for i, part in enumerate(parts):
            assert t.load(part)["kv"].unique().tolist() == [i]
        t.check_integrity()
        t.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_failed_write_is_the_parts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t, writer, _ = by_hand(tmp_path, host_bytes=2 * BLOCK)
    a, b = must(put(t, "a", number=3)), must(put(t, "b"))

    def full(*args: Any) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "write_part", full)
        writer.run(1)
    writer.run()
    assert a.failure == "saved KV could not be written: [Errno 28] No space left on device"
    assert b.failure is None
    assert where(a=a, b=b) == {"a": "h", "b": "hd"}
    assert t.disk_used == BLOCK
    must(put(t, "c"))
    assert where(a=a, b=b) == {"a": "h", "b": "d"}  # what is nowhere else is not evicted
    assert a.is_ready
    assert t.load(a)["kv"].unique().tolist() == [3]
    t.check_integrity()


@pytest.mark.parametrize("damage", ["missing", "flipped", "unexpected error"])
def test_a_lost_part_says_so_and_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    t, writer, reader = by_hand(tmp_path, host_bytes=BLOCK)
    a = must(put(t, "a", shared=True))
    writer.run()
    b = must(put(t, "b"))
    writer.run()
    assert a.file is not None
    if damage == "missing":
        a.file.unlink()
    elif damage == "flipped":
        data = bytearray(a.file.read_bytes())
        data[-1] ^= 1
        a.file.write_bytes(data)
    else:
        monkeypatch.setattr(tiers, "read_part", lambda *args: 1 / 0)
    assert t.prefetch([a])
    reader.run()
    assert a.is_ready
    with pytest.raises(SnapshotCorrupt, match={"missing": "No such file", "flipped": "checksum"}.get(damage, "Zero")):
        t.load(a)
    assert t.host_used == 0
    assert t.find(a.header) is None
    again = must(put(t, "a", shared=True))
    assert again is not a
    t.unpin([a])
    del a, b
    t.check_integrity()


def test_load_without_room_is_refused(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path, host_bytes=BLOCK)
    a = must(put(t, "a"))
    writer.run()
    b = must(put(t, "b"))
    writer.run()
    assert t.prefetch([b])
    with pytest.raises(SnapshotMismatch, match="no room in host memory"):
        t.load(a)
    t.check_integrity()


def test_an_adopted_part_is_missing_at_once(tmp_path: Path) -> None:
    t, _, _ = by_hand(tmp_path)
    part = t.adopt(header("a"), tmp_path / "nothing")
    assert part.file is None
    assert part.is_ready
    with pytest.raises(SnapshotCorrupt, match="is missing"):
        t.load(part)


def test_threads_that_load_and_put_at_once(tmp_path: Path) -> None:
    """Eight threads, room for three parts: everyone reads what was written, and the bytes add up."""
    t = Tiers(TierConfig(disk=tmp_path, host_bytes=3 * BLOCK))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[Part, int]] = []
        for i in range(60):
            number = seed * 1000 + i
            part = put(t, f"{number}", number=number, wait=True)
            if part is not None:
                held.append((part, number))
            for part, number in held[-3:]:
                try:
                    if t.load(part)["kv"].unique().tolist() != [number]:
                        wrong.append(number)
                except SnapshotMismatch as error:
                    if isinstance(error, SnapshotCorrupt):
                        wrong.append(error)
            if torch.rand((), generator=generator) < 0.5 and held:
                held.pop(0)
            if t.host_used > 3 * BLOCK:
                wrong.append("budget")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    t.close()
    t.check_integrity()
    assert (t.host_used, t.disk_used) == (0, 0)
    t.close()
    assert os.listdir(tmp_path) == []
