"""KVManager: snapshots, and what an update of the weights leaves behind. What KV is written: see conftest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kv_manager.conftest import (
    DIM,
    HEADS,
    LAYERS,
    LAYOUT,
    PROMPT,
    SIZE,
    A,
    B,
    compute,
    make_kv,
    make_seq,
    numbers,
    read,
    start,
    state,
)

from longtail.errors import SnapshotMismatch
from longtail.kv_manager.manager import KVManager
from longtail.kv_manager.snapshot import Snapshot
from longtail.version import Fingerprint

WIDER, COARSER = LAYOUT._replace(dim=8), LAYOUT._replace(block_size=32)

# ---- snapshots


def data_of(kv: KVManager, snapshot: Snapshot) -> torch.Tensor:
    return torch.cat([kv.tiers.load(part)["kv"] for part in snapshot.parts])


@pytest.mark.parametrize("computed", [1, 15, 16, 17, 39, 40])
def test_save_and_restore_give_identical_bytes(computed: int) -> None:
    kv = make_kv(prefix_caching=False)
    seq = start(kv, make_seq(PROMPT, [1]), upto=computed, base=300)
    snapshot = kv.save(seq)
    assert snapshot is not None
    assert (snapshot.num_tokens, snapshot.sample_id, snapshot.fingerprint) == (computed, "g/0", A)
    assert snapshot.layouts == (LAYOUT,)
    blocks = -(-computed // SIZE)
    assert data_of(kv, snapshot).shape == (blocks, LAYERS, 2, HEADS, SIZE * DIM)
    assert snapshot.nbytes == blocks * kv.bytes_per_block == blocks * 2 * 2 * 2 * 64 * 4
    before = kv.groups[0].cache[seq.block_tables[0]].clone()
    kv.release(seq)
    other = start(kv, make_seq([9] * 20, name="h/0"), base=7000)  # somebody else writes there
    kv.attach(seq)
    assert kv.restore(seq, snapshot)
    assert seq.num_computed_tokens == computed
    assert torch.equal(kv.groups[0].cache[seq.block_tables[0]], before)
    assert read(kv, seq) == numbers((0, computed, 300))
    assert read(kv, other) == numbers((0, 20, 7000))
    kv.check_integrity([seq, other])


def test_a_snapshot_is_a_copy() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.groups[0].cache.fill_(float("nan"))
    assert data_of(kv, snapshot).isfinite().all()


def test_save_of_nothing_is_none() -> None:
    kv = make_kv()
    seq = make_seq(PROMPT)
    kv.attach(seq)
    assert kv.save(seq) is None


def test_restore_onto_a_found_prefix_writes_only_the_rest() -> None:
    """The prefix is shared with a running sibling, so it must not be written, not even with the same bytes."""
    kv = make_kv()
    sibling = start(kv, make_seq(PROMPT))
    seq = start(kv, make_seq(PROMPT, [1] * 21, name="g/1"), upto=60)
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.groups[0].pool.forget_all()  # nothing but what the sibling offers from here on
    kv.release(sibling)
    sibling = start(kv, make_seq(PROMPT), base=500)
    kv.attach(seq)
    assert (seq.num_computed_tokens, seq.block_tables[0]) == (32, sibling.block_tables[0][:2])
    assert kv.restore(seq, snapshot)
    assert read(kv, seq) == numbers((0, 32, 500), (32, 60, 0))
    assert read(kv, sibling) == numbers((0, 40, 500))
    kv.check_integrity([sibling, seq])


def test_restore_that_holds_no_more_than_was_found_does_nothing() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT), upto=20)
    snapshot = kv.save(seq)
    assert snapshot is not None
    compute(kv, seq)
    kv.release(seq)
    kv.attach(seq)
    before = state(kv, seq)
    assert kv.restore(seq, snapshot)
    assert state(kv, seq) == before
    assert seq.num_computed_tokens == 39


def test_restore_that_fails_changes_nothing() -> None:
    kv = make_kv(3)
    seq = start(kv, make_seq(PROMPT))
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    other = start(kv, make_seq([9] * 17, name="h/0"))
    kv.attach(seq)
    before = state(kv, seq, other)
    assert not kv.restore(seq, snapshot)
    assert state(kv, seq, other) == before
    kv.check_integrity([seq, other])


def test_restored_blocks_are_offered_to_others() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT, [1] * 10), upto=49)
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.groups[0].pool.forget_all()
    kv.attach(seq)
    assert seq.num_computed_tokens == 0
    assert kv.restore(seq, snapshot)
    twin = make_seq(PROMPT, [1] * 10, name="g/1")
    kv.attach(twin)
    assert twin.num_computed_tokens == 48


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: dataclasses.replace(s, sample_id="g/1"), "snapshot of sample g/1 offered to sample g/0"),
        (lambda s: dataclasses.replace(s, layouts=(WIDER,)), "g/0 has layout .* the cache has"),
        (lambda s: dataclasses.replace(s, layouts=(COARSER,)), "g/0 has layout .* the cache has"),
        (lambda s: dataclasses.replace(s, num_tokens=41), "g/0 covers other tokens"),
        (lambda s: dataclasses.replace(s, num_tokens=38), "g/0 covers other tokens"),
        (lambda s: dataclasses.replace(s, digest=b"?" * 16), "g/0 covers other tokens"),
    ],
)
def test_a_foreign_snapshot_is_refused_and_changes_nothing(change: Callable[[Any], Any], message: str) -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT), upto=39)
    snapshot = kv.save(seq)
    kv.release(seq)
    kv.groups[0].pool.forget_all()
    kv.attach(seq)
    before = state(kv, seq)
    with pytest.raises(SnapshotMismatch, match=message):
        kv.restore(seq, change(snapshot))
    assert state(kv, seq) == before
    assert kv.restore(seq, snapshot)  # type: ignore[arg-type]


def test_a_snapshot_of_other_tokens_is_refused() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT), upto=39)
    snapshot = kv.save(seq)
    assert snapshot is not None
    other = make_seq([*PROMPT[:5], 7, *PROMPT[6:]])  # the same id
    kv.attach(other)
    with pytest.raises(SnapshotMismatch, match="g/0 covers other tokens"):
        kv.restore(other, snapshot)


# ---- weights


def test_new_weights_find_nothing_of_the_old() -> None:
    kv = make_kv()
    held, gone = start(kv, make_seq(PROMPT)), start(kv, make_seq([7] * 40, name="h/0"))
    kv.release(gone)
    kv.set_fingerprint(B)
    for seq in (make_seq(PROMPT, name="g/1"), make_seq([7] * 40, name="h/1")):
        kv.attach(seq)
        assert (seq.num_computed_tokens, seq.block_tables[0]) == (0, [])
    assert held.block_tables[0] == [0, 1, 2]  # held blocks stay with their holder
    assert read(kv, held) == numbers((0, 40, 0))


def test_new_weights_offer_their_own() -> None:
    kv = make_kv()
    kv.release(start(kv, make_seq(PROMPT)))
    kv.set_fingerprint(B)
    start(kv, make_seq(PROMPT), base=500)
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert read(kv, second) == numbers((0, 39, 500))


@pytest.mark.parametrize("returns_to", [[B], [B, A], [A], [B, B, A]])
def test_kept_kv_of_older_weights_is_never_offered(returns_to: list[Fingerprint]) -> None:
    """Not its old blocks, not those it completes later, not its prompt's tail; and not when the old weights return."""
    kv = make_kv()
    kept = start(kv, make_seq(PROMPT, [1] * 40), upto=20)
    for fingerprint in returns_to:
        kv.set_fingerprint(fingerprint)
    compute(kv, kept, 40, base=1000)
    compute(kv, kept, 79, base=1000)
    twin = make_seq(PROMPT, [1] * 40, name="g/1")
    kv.attach(twin)
    assert twin.num_computed_tokens == 0
    kv.release(kept)
    assert not kv.groups[0].pool._block_of
    kv.check_integrity([twin])


def test_a_snapshot_remembers_which_weights_made_it() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT), upto=20)
    assert kv.save(seq).fingerprint == A  # type: ignore[union-attr]
    kv.set_fingerprint(B)
    mixed = kv.save(seq)
    assert mixed is not None
    assert mixed.fingerprint not in (A, B)
    kv.release(seq)
    kv.set_fingerprint(A)
    kv.attach(seq)
    assert kv.restore(seq, mixed)  # the caller's choice
    compute(kv, seq)
    twin = make_seq(PROMPT, name="g/1")
    kv.attach(twin)
    assert twin.num_computed_tokens == 0  # but nobody else gets it


def test_a_snapshot_of_two_weights_is_not_taken_for_one_of_the_first() -> None:
    """A prefix found under B, the rest restored from a snapshot of A, saved again: when A returns, none of it is
    A's to offer."""
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT, [1] * 20), upto=59)
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.set_fingerprint(B)
    kv.release(start(kv, make_seq(PROMPT), base=500))
    kv.attach(seq)
    assert kv.restore(seq, snapshot)
    assert read(kv, seq) == numbers((0, 32, 500), (32, 59, 0))
    again = kv.save(seq)
    assert again is not None
    kv.release(seq)
    kv.set_fingerprint(A)
    kv.attach(seq)
    assert kv.restore(seq, again)
    twin = make_seq(PROMPT, [1] * 20, name="g/1")
    kv.attach(twin)
    assert twin.num_computed_tokens == 0


@pytest.mark.parametrize("last", [A, B])
def test_an_older_snapshot_restored_onto_new_weights_is_not_offered(last: Fingerprint) -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT, [1] * 20), upto=40)
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.set_fingerprint(B)
    kv.attach(seq)
    assert kv.restore(seq, snapshot)
    compute(kv, seq)
    kv.set_fingerprint(last)
    compute_more = make_seq(PROMPT, [1] * 20, name="g/1")
    kv.attach(compute_more)
    assert compute_more.num_computed_tokens == 0


def test_a_snapshot_of_returning_weights_is_offered_again() -> None:
    """A snapshot is whole: where its fingerprint is the present one, its blocks are as good as computed ones."""
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT), upto=39)
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.set_fingerprint(B)
    kv.set_fingerprint(A)
    kv.attach(seq)
    assert seq.num_computed_tokens == 0
    assert kv.restore(seq, snapshot)
    twin = make_seq(PROMPT, name="g/1")
    kv.attach(twin)
    assert twin.num_computed_tokens == 32


def test_old_weights_full_restore_does_not_spoil_a_tail_found_under_new_weights() -> None:
    """The prompt's tail is found under weights B; a snapshot made under A that reaches further is then restored over
    the same, partly filled block. The tail's key must not promise A's KV to the next sibling."""
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))  # all 40 computed
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.set_fingerprint(B)
    kv.release(start(kv, make_seq(PROMPT, name="g/1"), base=500))
    kv.attach(seq)
    assert seq.num_computed_tokens == 39
    assert kv.restore(seq, snapshot)
    third = make_seq(PROMPT, name="g/2")
    kv.attach(third)
    assert read(kv, third) == numbers((0, third.num_computed_tokens, 500))
