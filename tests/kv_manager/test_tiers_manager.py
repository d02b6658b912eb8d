"""KVManager over tiers: shared prompts, delayed writes, weights in every tier, loss; and the host memory below."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.kv_manager.conftest import PROMPT, B, compute, make_kv, make_seq, read, start
from tests.kv_manager.test_tiers import BLOCK, by_hand, must, put

from longtail.errors import SnapshotMismatch
from longtail.kv_manager import host_memory
from longtail.kv_manager.encoding import Encoding
from longtail.kv_manager.host_memory import HostMemory, footprint
from longtail.kv_manager.snapshot_file import read_part

# ---- through the manager


def test_a_prompt_is_stored_once(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path)
    kv = make_kv(32, tiers=t)
    snapshots = []
    for i in range(8):
        seq = start(kv, make_seq(PROMPT, [i] * 20, name=f"g/{i}"))  # 40 + 20 tokens: 2 blocks of prompt, 2 of its own
        snapshots.append(kv.save(seq))
        kv.release(seq)
    writer.run()
    assert len({s.parts[0] for s in snapshots if s}) == 1
    assert t.host_used == t.disk_used == (2 + 8 * 2) * BLOCK
    assert len(os.listdir(tmp_path)) == 9
    snapshots[1:] = []
    assert t.host_used == (2 + 2) * BLOCK  # the first one still needs the prompt


def test_a_delayed_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    t, writer, _ = by_hand(tmp_path)
    kv = make_kv(3, tiers=t, prefix_caching=False)
    seq = start(kv, make_seq(PROMPT), base=300)
    before = kv.groups[0].cache[seq.block_tables[0]].clone()
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    start(kv, make_seq([9] * 40, name="h/0"), base=7000)  # every block is somebody else's
    writer.run()
    (part,) = snapshot.parts
    assert part.file is not None
    assert torch.equal(read_part(part.file, part.header)["kv"], before)


def test_no_room_for_the_second_part_leaks_nothing() -> None:
    t, _, _ = by_hand(None, host_bytes=2 * BLOCK)
    kv = make_kv(8, tiers=t)
    seq = start(kv, make_seq(PROMPT, [1] * 20))
    assert kv.save(seq) is None
    assert t.host_used == 0
    t.check_integrity()


@pytest.mark.parametrize("place", ["device", "host", "disk"])
@pytest.mark.parametrize("updated", [False, True])
def test_a_prompt_is_found_in_every_tier_and_under_its_own_weights_only(
    tmp_path: Path, place: str, updated: bool
) -> None:
    t, writer, reader = by_hand(tmp_path, host_bytes=5 * BLOCK)
    kv = make_kv(16, tiers=t)
    seq = start(kv, make_seq(PROMPT, [1] * 20), base=300)
    snapshot = kv.save(seq)
    kv.release(seq)
    writer.run()
    assert snapshot is not None
    if place != "device":
        kv.groups[0].pool.forget_all()
    if place == "disk":
        must(put(t, "x", blocks=5))
        assert not any(part.in_memory for part in snapshot.parts)
    if updated:
        kv.set_fingerprint(B)
    sibling = make_seq(PROMPT, name="g/1")
    prompt = kv.saved_prompt(sibling)
    kv.attach(sibling)
    if updated:
        assert prompt is None
        assert sibling.num_computed_tokens == 0
        assert not kv.can_use(snapshot)
    elif place == "device":
        assert prompt is None
        assert sibling.num_computed_tokens == 39
    else:
        assert sibling.num_computed_tokens == 0
        assert prompt is not None
        writer.run()
        assert t.prefetch(prompt.parts)
        reader.run()
        assert kv.restore(sibling, prompt)
        assert read(kv, sibling) == [300.0 + i for i in range(32)]
        compute(kv, sibling, base=300)
    kv.check_integrity([sibling])


def test_a_part_of_other_weights_in_a_snapshot_is_refused() -> None:
    """What a damaged record could ask for: the snapshot says A, one of its parts was made by B."""
    kv = make_kv(16)
    seq = start(kv, make_seq(PROMPT, [1] * 20))
    ours = kv.save(seq)
    kv.release(seq)
    kv.set_fingerprint(B)
    kv.attach(seq)
    compute(kv, seq, base=500)
    theirs = kv.save(seq)
    kv.release(seq)
    assert ours is not None
    assert theirs is not None
    kv.attach(seq)
    first, second = theirs.parts
    for parts in ((ours.parts[0], second), (first,), (second,), (second, first), (first, first, second), ()):
        with pytest.raises(SnapshotMismatch):
            kv.restore(seq, dataclasses.replace(theirs, parts=parts))
    assert kv.restore(seq, theirs)


# ---- int8 and fp8


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_lossy_kv_is_found_by_nobody_else(tmp_path: Path, encoding: Encoding) -> None:
    kv = make_kv(16, encoding=encoding)
    seq = start(kv, make_seq(PROMPT, [1] * 20), upto=50)
    snapshot = kv.save(seq)
    assert snapshot is not None
    assert not snapshot.is_exact
    for _ in range(2):  # and so it stays when it is saved again
        kv.release(seq)
        kv.groups[0].pool.forget_all()
        kv.attach(seq)
        assert kv.can_use(snapshot)
        assert not make_kv(16).can_use(snapshot)  # an engine that was not asked for it
        assert kv.restore(seq, snapshot)
        if seq.num_uncomputed_tokens:
            compute(kv, seq)
        twin = make_seq(PROMPT, [1] * 20, name="g/1")
        assert kv.saved_prompt(twin) is None
        kv.attach(twin)
        assert twin.num_computed_tokens == 0
        kv.release(twin)
        again = kv.save(seq)
        assert again is not None
        assert again.fingerprint == "A~"
        snapshot = again


# ---- host memory


def test_memory_is_used_again_when_nobody_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, size = HostMemory(), host_memory.HUGE_PAGE * 4
    a = memory.take(size - 5, 1 << 40)
    assert a.shape == (size - 5,)
    address, view = a.data_ptr(), a[100:200].view(torch.float32)
    del a
    assert memory.idle_bytes == 0  # the view still reads it
    assert memory.take(size, 1 << 40).data_ptr() != address
    assert memory.idle_bytes == size
    del view
    assert memory.idle_bytes == 2 * size
    assert memory.take(size - 9, 1 << 40).data_ptr() in range(1, 1 << 63)
    memory.trim(size)
    assert memory.idle_bytes == size
    b = memory.take(100, 0)
    assert b.shape == (100,)
    assert memory.idle_bytes == size  # small buffers have nothing to do with it


@pytest.mark.parametrize("nbytes", [0, 1, 4 << 20, (4 << 20) + 1, 100 << 20, (100 << 20) + 1, (1 << 30) - 1])
def test_a_footprint_is_little_more_than_what_it_holds(nbytes: int) -> None:
    size = footprint(nbytes)
    assert nbytes <= size <= max(nbytes * 9 / 8, nbytes + host_memory.HUGE_PAGE)
    assert size == nbytes or size % host_memory.HUGE_PAGE == 0


def test_buffers_are_pinned_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a CUDA that only keeps a record: each buffer is registered once, and given back before it is unmapped."""
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        assert address not in pinned
        pinned[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory, nbytes = HostMemory(), 8 << 20
    first, second = memory.take(nbytes, 1 << 30), memory.take(nbytes, 1 << 30)
    assert pinned == {t.data_ptr(): footprint(nbytes) for t in (first, second)}
    address = first.data_ptr()
    del first
    again = memory.take(nbytes, 1 << 30)  # used again, as it is
    assert again.data_ptr() == address and len(pinned) == 2
    del again, second
    memory.trim(0)
    assert not pinned
