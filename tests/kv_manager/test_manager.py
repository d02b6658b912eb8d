"""KVManager: prefixes found, copies made before writing, snapshots, and what an update of the weights leaves behind.

Every test writes recognisable KV: the number at a position is a function of its own. Block size 16 throughout:

    tokens  0 .. 15 | 16 .. 31 | 32 ..
    block     [0]        [1]      [2]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from longtail.errors import SnapshotMismatch
from longtail.kernels.kv import store_kv
from longtail.kv_manager.manager import KVManager, blocks_for
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint

LAYERS, HEADS, SIZE, DIM = 2, 2, 16, 4
A, B = Fingerprint("A"), Fingerprint("B")


def make_kv(num_blocks: int = 8, **fields: Any) -> KVManager:
    known: dict[str, Any] = {"layers": LAYERS, "kv_heads": HEADS, "block_size": SIZE, "head_dim": DIM, "fingerprint": A}
    return KVManager(num_blocks, **(known | fields))


def make_seq(prompt: list[int], output: list[int] | None = None, name: str = "g/0") -> Sequence:
    sample = Sample(id=name, group_id="g", index=0, prompt_ids=tuple(prompt), params=SamplingParams(), seed=0)
    for token in output or []:
        sample.append(token, -1.0, 0, "e", "computed")  # type: ignore[arg-type]
    return Sequence(sample, 0)


def write(kv: KVManager, seq: Sequence, start: int, stop: int, base: float = 0.0) -> None:
    """Position p of every layer, head and channel becomes base + p (+ 0.5 in v)."""
    slots = torch.tensor(kv.slots(seq, start, stop))
    numbers = (base + torch.arange(start, stop).float())[:, None, None].expand(-1, HEADS, DIM)
    for layer in range(LAYERS):
        store_kv(numbers, numbers + 0.5, kv.kv, layer, slots, SIZE)


def read(kv: KVManager, seq: Sequence, stop: int | None = None) -> list[float]:
    """The numbers at positions 0 .. stop-1; every layer, head and channel must agree."""
    found = []
    for slot in kv.slots(seq, 0, seq.num_computed_tokens if stop is None else stop):
        block, offset = divmod(slot, SIZE)
        k = kv.kv[block, :, 0].view(LAYERS, HEADS, DIM, SIZE)[..., offset]
        v = kv.kv[block, :, 1].view(LAYERS, HEADS, SIZE, DIM)[:, :, offset]
        assert k.unique().numel() == 1
        assert torch.equal(k + 0.5, v)
        found.append(k.flatten()[0].item())
    return found


def compute(kv: KVManager, seq: Sequence, upto: int | None = None, base: float = 0.0) -> None:
    """What the engine does: reserve, forward, advance, commit; the prompt when it is complete."""
    stop = seq.num_tokens if upto is None else upto
    prompt = len(seq.sample.prompt_ids)
    assert kv.reserve(seq, stop)
    had_prompt = seq.num_computed_tokens >= prompt - 1
    write(kv, seq, seq.num_computed_tokens, stop, base)
    seq.num_computed_tokens = stop
    if not had_prompt and stop >= prompt - 1:
        kv.commit_prompt(seq)
    else:
        kv.commit(seq)


def start(kv: KVManager, seq: Sequence, upto: int | None = None, base: float = 0.0) -> Sequence:
    kv.attach(seq)
    compute(kv, seq, upto, base)
    return seq


def numbers(*spans: tuple[int, int, float]) -> list[float]:
    return [base + p for first, last, base in spans for p in range(first, last)]


def state(kv: KVManager, *seqs: Sequence) -> Any:
    """Everything that an operation without effect must leave alone."""
    pool = kv.pool
    return (
        list(pool.ref_counts),
        list(pool._free_plain),
        list(pool._free_cached),
        dict(pool._block_of),
        {block: dict(keys) for block, keys in pool._keys_of.items()},
        [(list(seq.block_table), seq.num_computed_tokens) for seq in seqs],
        {seq: list(hashes) for seq, hashes in kv._hashes.items()},
        kv.kv.numpy().tobytes(),
    )


PROMPT = list(range(100, 140))  # 40 tokens: two full blocks and eight of the third


# ---- attach


def test_attach_finds_full_blocks_and_the_siblings_partial_tail() -> None:
    kv = make_kv()
    first = start(kv, make_seq(PROMPT))
    assert first.block_table == [0, 1, 2]
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert second.block_table == [0, 1, 2]
    assert second.num_computed_tokens == 39  # the last token's logits are needed
    assert kv.pool.ref_counts[:4] == [2, 2, 2, 0]
    assert read(kv, second) == numbers((0, 39, 0))
    kv.check_integrity([first, second])


def test_attach_finds_nothing_before_it_is_committed() -> None:
    kv = make_kv()
    first, second = make_seq(PROMPT), make_seq(PROMPT, name="g/1")
    kv.attach(first)
    assert kv.reserve(first, 40)
    write(kv, first, 0, 40)
    first.num_computed_tokens = 40
    kv.attach(second)
    assert (second.block_table, second.num_computed_tokens) == ([], 0)


def test_without_commit_prompt_only_full_blocks_are_found() -> None:
    kv = make_kv()
    first, second = make_seq(PROMPT), make_seq(PROMPT, name="g/1")
    kv.attach(first)
    assert kv.reserve(first, 40)
    first.num_computed_tokens = 40
    kv.commit(first)
    kv.attach(second)
    assert (second.block_table, second.num_computed_tokens) == ([0, 1], 32)


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (PROMPT, 39),  # the same prompt: all but the last token
        (PROMPT[:39] + [7], 39),  # differs in the last token only, which is computed anyway
        (PROMPT[:38] + [7, 8], 32),  # differs within the tail: full blocks only
        (PROMPT[:39], 32),  # a shorter prompt wants 38: the tail's key covers 39
        (PROMPT + [7], 32),
        (PROMPT[:33], 32),  # two full blocks and the one token to compute
        (PROMPT[:32], 16),  # the second block holds the last known token
        (PROMPT[:17], 16),
        (PROMPT[:16], 0),
        (PROMPT[:1], 0),
        ([*PROMPT[:20], 7, *PROMPT[21:]], 16),
        ([7, *PROMPT[1:]], 0),  # a block is its tokens and every token before them
        (PROMPT[16:], 0),
        (PROMPT[:16] + PROMPT[32:], 16),
    ],
)
def test_attach_finds_the_longest_prefix(prompt: list[int], found: int) -> None:
    kv = make_kv()
    start(kv, make_seq(PROMPT))
    seq = make_seq(prompt, name="g/1")
    kv.attach(seq)
    assert seq.num_computed_tokens == found
    assert len(seq.block_table) == -(-found // SIZE)
    assert read(kv, seq) == numbers((0, found, 0))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_the_last_known_token_is_always_left_to_compute(length: int) -> None:
    kv = make_kv()
    first = start(kv, make_seq(PROMPT[:length]))
    second = make_seq(PROMPT[:length], name="g/1")
    kv.attach(second)
    assert second.num_computed_tokens == length - 1  # siblings find all the rest, whatever the length
    kv.check_integrity([first, second])


def test_attach_finds_output_tokens_of_full_blocks() -> None:
    """A resumed sequence whose KV still lies in the pool."""
    kv = make_kv()
    first = start(kv, make_seq(PROMPT, [1] * 10))
    kv.release(first)
    second = make_seq(PROMPT, [1] * 10)
    kv.attach(second)
    assert (second.num_computed_tokens, second.block_table) == (48, [0, 1, 2])


def test_attach_takes_no_memory_that_is_not_cached() -> None:
    kv = make_kv(3)
    first = start(kv, make_seq(PROMPT))
    assert kv.pool.num_free == 0
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert second.num_computed_tokens == 39
    kv.check_integrity([first, second])


def test_attach_twice_is_an_assertion() -> None:
    kv = make_kv()
    seq = make_seq(PROMPT)
    kv.attach(seq)
    with pytest.raises(AssertionError, match="g/0"):
        kv.attach(seq)


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = make_kv(prefix_caching=False)
    start(kv, make_seq(PROMPT))
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert (second.block_table, second.num_computed_tokens) == ([], 0)
    start(kv, make_seq(PROMPT, name="g/2"))
    assert kv.pool.num_free == 2


# ---- reserve


def test_reserve_takes_blocks_for_the_positions_asked() -> None:
    kv = make_kv()
    seq = make_seq(PROMPT)
    kv.attach(seq)
    assert kv.reserve(seq, 16)
    assert seq.block_table == [0]
    assert kv.reserve(seq, 16)
    assert seq.block_table == [0]
    assert kv.reserve(seq, 17)
    assert seq.block_table == [0, 1]
    assert kv.reserve(seq, 5)  # already there
    assert seq.block_table == [0, 1]
    assert kv.slots(seq, 14, 18) == [14, 15, 16, 17]


def test_copy_on_write_keeps_the_siblings_data() -> None:
    kv = make_kv()
    first = start(kv, make_seq(PROMPT))
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert kv.reserve(second, 40)
    assert second.block_table == [0, 1, 3]  # the full blocks are shared, the one to be written is a copy
    assert read(kv, second) == numbers((0, 39, 0))  # with its content
    write(kv, second, 39, 40, base=1000)
    second.num_computed_tokens = 40
    assert read(kv, first) == numbers((0, 40, 0))
    assert read(kv, second) == numbers((0, 39, 0), (39, 40, 1000))
    assert kv.pool.ref_counts[:4] == [2, 2, 1, 1]
    kv.check_integrity([first, second])


def test_the_owner_copies_too_when_a_sibling_holds_its_tail() -> None:
    """Whoever writes first copies; the one left alone with the block writes in place."""
    kv = make_kv()
    first = start(kv, make_seq(PROMPT, [1]), upto=40)
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    compute(kv, first, base=1000)
    assert first.block_table == [0, 1, 3]
    assert second.block_table == [0, 1, 2]
    compute(kv, second, base=2000)
    assert second.block_table == [0, 1, 2]
    assert read(kv, first) == numbers((0, 40, 0), (40, 41, 1000))
    assert read(kv, second) == numbers((0, 39, 0), (39, 40, 2000))
    kv.check_integrity([first, second])


def test_reserve_that_fails_changes_nothing() -> None:
    kv = make_kv(4)
    first = start(kv, make_seq(PROMPT))
    second = make_seq(PROMPT + [1] * 30, name="g/1")
    kv.attach(second)
    before = state(kv, first, second)
    assert not kv.reserve(second, 70)  # three blocks more, one is free
    assert state(kv, first, second) == before
    assert kv.reserve(second, 48)
    assert second.block_table == [0, 1, 3]


def test_reserve_that_lacks_only_the_copy_changes_nothing() -> None:
    kv = make_kv(4)
    first = start(kv, make_seq(PROMPT))
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    other = start(kv, make_seq([5], name="h/0"))  # the last free block
    before = state(kv, first, second, other)
    assert not kv.reserve(second, 40)  # no new block is needed, but a copy of the shared one
    assert state(kv, first, second, other) == before
    kv.release(other)
    assert kv.reserve(second, 40)
    kv.check_integrity([first, second])


def test_a_block_found_by_its_tail_and_written_does_not_keep_the_promise_of_its_full_key() -> None:
    """Block 1 is freed with two keys: the prompt's tail (offsets 0-3) and, as the first sequence went on, the full
    block. A sibling finds it by the tail, is its only holder, and writes another continuation from offset 4 on. The full
    key must go: a third sequence with the first one's tokens would read the second one's KV."""
    kv = make_kv()
    prompt, ours, theirs = PROMPT[:21], [1] * 20, [2] * 20
    first = start(kv, make_seq(prompt), upto=21)
    first.token_ids += ours
    compute(kv, first)
    kv.release(first)

    second = make_seq(prompt, name="g/1")
    kv.attach(second)
    assert (second.num_computed_tokens, second.block_table) == (20, [0, 1])
    second.token_ids += theirs
    compute(kv, second, base=1000)
    assert second.block_table == [0, 1, 3]  # written in place, not copied

    third = make_seq(prompt, ours, name="g/2")
    kv.attach(third)
    assert third.num_computed_tokens == 16  # the full block is no longer found
    fourth = make_seq(prompt, theirs, name="g/3")
    kv.attach(fourth)
    assert fourth.num_computed_tokens == 32  # the new content is
    assert read(kv, fourth) == numbers((0, 20, 0), (20, 32, 1000))
    fifth = make_seq(prompt, name="g/4")
    kv.attach(fifth)
    assert fifth.num_computed_tokens == 20  # and the tail still is what it was
    assert read(kv, fifth) == numbers((0, 20, 0))
    kv.check_integrity([second, third, fourth, fifth])


def test_drafts_that_are_rejected_leave_no_trace_in_the_index() -> None:
    """Positions reserved beyond the known tokens are written and abandoned; what is found later is the truth."""
    kv = make_kv()
    first = start(kv, make_seq(PROMPT[:30]))
    assert kv.reserve(first, 36)
    write(kv, first, 30, 36, base=9000)
    first.token_ids += [1] * 6
    compute(kv, first)
    second = make_seq(PROMPT[:30], [1] * 6, name="g/1")
    kv.attach(second)
    assert second.num_computed_tokens == 32
    assert read(kv, second) == numbers((0, 32, 0))


# ---- release and eviction


def test_released_blocks_stay_findable_until_their_memory_is_needed() -> None:
    kv = make_kv(4)
    kv.release(start(kv, make_seq(PROMPT)))
    assert kv.pool.num_free == 4
    kv.check_integrity([])
    again = make_seq(PROMPT)
    kv.attach(again)
    assert again.num_computed_tokens == 39
    kv.release(again)
    other = start(kv, make_seq([7] * 33, name="h/0"))  # takes block 3, then the deepest ones: 2, 1
    assert other.block_table == [3, 2, 1]
    kv.attach(again)
    assert again.num_computed_tokens == 16
    assert read(kv, again) == numbers((0, 16, 0))


def test_release_forgets_the_sequence() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))
    kv.release(seq)
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
    kv.attach(seq)  # may come back
    assert seq.num_computed_tokens == 39


# ---- snapshots


@pytest.mark.parametrize("computed", [1, 15, 16, 17, 39, 40])
def test_save_and_restore_give_identical_bytes(computed: int) -> None:
    kv = make_kv(prefix_caching=False)
    seq = start(kv, make_seq(PROMPT, [1]), upto=computed, base=300)
    snapshot = kv.save(seq)
    assert snapshot is not None
    assert (snapshot.num_tokens, snapshot.sample_id, snapshot.fingerprint) == (computed, "g/0", A)
    assert snapshot.layout == (LAYERS, HEADS, SIZE, DIM)
    blocks = -(-computed // SIZE)
    assert snapshot.data.shape == (blocks, LAYERS, 2, HEADS, SIZE * DIM)
    assert snapshot.nbytes == blocks * kv.bytes_per_block == blocks * 2 * 2 * 2 * 64 * 4
    before = kv.kv[seq.block_table].clone()
    kv.release(seq)
    other = start(kv, make_seq([9] * 20, name="h/0"), base=7000)  # somebody else writes there
    kv.attach(seq)
    assert kv.restore(seq, snapshot)
    assert seq.num_computed_tokens == computed
    assert torch.equal(kv.kv[seq.block_table], before)
    assert read(kv, seq) == numbers((0, computed, 300))
    assert read(kv, other) == numbers((0, 20, 7000))
    kv.check_integrity([seq, other])


def test_a_snapshot_is_a_copy() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.kv.fill_(float("nan"))
    assert snapshot.data.isfinite().all()


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
    kv.pool.forget_all()  # nothing but what the sibling offers from here on
    kv.release(sibling)
    sibling = start(kv, make_seq(PROMPT), base=500)
    kv.attach(seq)
    assert (seq.num_computed_tokens, seq.block_table) == (32, sibling.block_table[:2])
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
    kv.pool.forget_all()
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
        (lambda s: dataclasses.replace(s, layout=(LAYERS, HEADS, SIZE, 8)), "g/0 has layout .* the cache has"),
        (lambda s: dataclasses.replace(s, layout=(LAYERS, HEADS, 32, DIM)), "g/0 has layout .* the cache has"),
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
    kv.pool.forget_all()
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
        assert (seq.num_computed_tokens, seq.block_table) == (0, [])
    assert held.block_table == [0, 1, 2]  # held blocks stay with their holder
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
    assert not kv.pool._block_of
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


# ---- check_integrity, blocks_for


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda kv, seq: seq.block_table.pop(), id="a table lost a block"),
        pytest.param(lambda kv, seq: seq.block_table.append(5), id="a block that is not held"),
        pytest.param(lambda kv, seq: setattr(seq, "num_computed_tokens", 41), id="computed beyond known"),
        pytest.param(lambda kv, seq: kv._hashes.pop(seq), id="a holder unknown"),
        pytest.param(lambda kv, seq: kv._hashes.__setitem__(make_seq([1]), []), id="a holder that does not run"),
        pytest.param(lambda kv, seq: kv.pool.ref_counts.__setitem__(0, 0), id="a reference lost"),
    ],
)
def test_check_integrity_catches(fault: Callable[[KVManager, Sequence], object]) -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))
    kv.check_integrity([seq])
    fault(kv, seq)
    with pytest.raises(AssertionError):
        kv.check_integrity([seq])


def test_check_integrity_wants_a_block_for_every_computed_position() -> None:
    kv = make_kv()
    seq = make_seq(PROMPT)
    kv.attach(seq)
    seq.num_computed_tokens = 1
    with pytest.raises(AssertionError, match="g/0"):
        kv.check_integrity([seq])


def test_blocks_for() -> None:
    """A block of 2 layers x 2 x 2 heads x 16 x 4 floats is 2,048 bytes."""
    assert blocks_for(2048 * 3, (2, 2, 16, 4)) == 3
    assert blocks_for(2048 * 3 - 1, (2, 2, 16, 4)) == 2
    assert blocks_for(100, (2, 2, 16, 4)) == 0
    assert make_kv().bytes_per_block == 2048
