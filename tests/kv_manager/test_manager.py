"""KVManager: prefixes found, copies made before writing, and what is left behind. What KV is written: see conftest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.kv_manager.conftest import PROMPT, SIZE, compute, make_kv, make_seq, numbers, read, start, state, write

from longtail.kv_manager.manager import KVManager
from longtail.sequence import Sequence

# ---- attach


def test_attach_finds_full_blocks_and_the_siblings_partial_tail() -> None:
    kv = make_kv()
    first = start(kv, make_seq(PROMPT))
    assert first.block_tables[0] == [0, 1, 2]
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert second.block_tables[0] == [0, 1, 2]
    assert second.num_computed_tokens == 39  # the last token's logits are needed
    assert kv.groups[0].pool.ref_counts[:4] == [2, 2, 2, 0]
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
    assert (second.block_tables[0], second.num_computed_tokens) == ([], 0)


def test_without_commit_prompt_only_full_blocks_are_found() -> None:
    kv = make_kv()
    first, second = make_seq(PROMPT), make_seq(PROMPT, name="g/1")
    kv.attach(first)
    assert kv.reserve(first, 40)
    first.num_computed_tokens = 40
    kv.commit(first)
    kv.attach(second)
    assert (second.block_tables[0], second.num_computed_tokens) == ([0, 1], 32)


def test_commit_prompt_before_the_prompt_is_computed_offers_no_tail() -> None:
    kv = make_kv()
    first, second = make_seq(PROMPT), make_seq(PROMPT, name="g/1")
    kv.attach(first)
    assert kv.reserve(first, 40)
    first.num_computed_tokens = 38
    kv.commit_prompt(first)
    kv.attach(second)
    assert second.num_computed_tokens == 32


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (PROMPT, 39),  # the same prompt: all but the last token
        ([*PROMPT[:39], 7], 39),  # differs in the last token only, which is computed anyway
        ([*PROMPT[:38], 7, 8], 32),  # differs within the tail: full blocks only
        (PROMPT[:39], 32),  # a shorter prompt wants 38: the tail's key covers 39
        ([*PROMPT, 7], 32),
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
    assert len(seq.block_tables[0]) == -(-found // SIZE)
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
    assert (second.num_computed_tokens, second.block_tables[0]) == (48, [0, 1, 2])


def test_attach_takes_no_memory_that_is_not_cached() -> None:
    kv = make_kv(3)
    first = start(kv, make_seq(PROMPT))
    assert kv.groups[0].pool.num_free == 0
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
    assert (second.block_tables[0], second.num_computed_tokens) == ([], 0)
    start(kv, make_seq(PROMPT, name="g/2"))
    assert kv.groups[0].pool.num_free == 2


# ---- reserve


def test_reserve_takes_blocks_for_the_positions_asked() -> None:
    kv = make_kv()
    seq = make_seq(PROMPT)
    kv.attach(seq)
    assert kv.reserve(seq, 16)
    assert seq.block_tables[0] == [0]
    assert kv.reserve(seq, 16)
    assert seq.block_tables[0] == [0]
    assert kv.reserve(seq, 17)
    assert seq.block_tables[0] == [0, 1]
    assert kv.reserve(seq, 5)  # already there
    assert seq.block_tables[0] == [0, 1]
    assert kv.slots(seq, 14, 18) == [14, 15, 16, 17]


def test_copy_on_write_keeps_the_siblings_data() -> None:
    kv = make_kv()
    first = start(kv, make_seq(PROMPT))
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    assert kv.reserve(second, 40)
    assert second.block_tables[0] == [0, 1, 3]  # the full blocks are shared, the one to be written is a copy
    assert read(kv, second) == numbers((0, 39, 0))  # with its content
    write(kv, second, 39, 40, base=1000)
    second.num_computed_tokens = 40
    assert read(kv, first) == numbers((0, 40, 0))
    assert read(kv, second) == numbers((0, 39, 0), (39, 40, 1000))
    assert kv.groups[0].pool.ref_counts[:4] == [2, 2, 1, 1]
    kv.check_integrity([first, second])


def test_the_owner_copies_too_when_a_sibling_holds_its_tail() -> None:
    """Whoever writes first copies; the one left alone with the block writes in place."""
    kv = make_kv()
    first = start(kv, make_seq(PROMPT, [1]), upto=40)
    second = make_seq(PROMPT, name="g/1")
    kv.attach(second)
    compute(kv, first, base=1000)
    assert first.block_tables[0] == [0, 1, 3]
    assert second.block_tables[0] == [0, 1, 2]
    compute(kv, second, base=2000)
    assert second.block_tables[0] == [0, 1, 2]
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
    assert second.block_tables[0] == [0, 1, 3]


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
    block. A sibling finds it by the tail, is its only holder, and writes another continuation from offset 4 on. The
    full key must go: a third sequence with the first one's tokens would read the second one's KV."""
    kv = make_kv()
    prompt, ours, theirs = PROMPT[:21], [1] * 20, [2] * 20
    first = start(kv, make_seq(prompt), upto=21)
    first.token_ids += ours
    compute(kv, first)
    kv.release(first)

    second = make_seq(prompt, name="g/1")
    kv.attach(second)
    assert (second.num_computed_tokens, second.block_tables[0]) == (20, [0, 1])
    second.token_ids += theirs
    compute(kv, second, base=1000)
    assert second.block_tables[0] == [0, 1, 3]  # written in place, not copied

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


def test_the_full_key_goes_also_when_only_the_last_token_of_the_block_is_written_anew() -> None:
    """The tail covers offsets 0-14 of block 1, the full key one position more."""
    kv = make_kv()
    kv.release(start(kv, make_seq(PROMPT[:32])))
    other = make_seq([*PROMPT[:31], 7], name="g/1")
    kv.attach(other)
    assert other.num_computed_tokens == 31
    compute(kv, other, base=1000)
    third = make_seq(PROMPT[:33], name="g/2")
    kv.attach(third)
    assert third.num_computed_tokens == 16
    fourth = make_seq([*PROMPT[:31], 7, 8], name="g/3")
    kv.attach(fourth)
    assert read(kv, fourth) == numbers((0, 31, 0), (31, 32, 1000))


def test_a_tail_key_goes_when_an_earlier_position_is_written_anew() -> None:
    """A sequence falls back within a block that it holds alone (its caller lowers num_computed_tokens)."""
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))
    seq.num_computed_tokens = 36
    assert kv.reserve(seq, 40)
    write(kv, seq, 36, 40, base=1000)
    twin = make_seq(PROMPT, name="g/1")
    kv.attach(twin)
    assert twin.num_computed_tokens == 32


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
    assert kv.groups[0].pool.num_free == 4
    kv.check_integrity([])
    again = make_seq(PROMPT)
    kv.attach(again)
    assert again.num_computed_tokens == 39
    kv.release(again)
    other = start(kv, make_seq([7] * 33, name="h/0"))  # takes block 3, then the deepest ones: 2, 1
    assert other.block_tables[0] == [3, 2, 1]
    kv.attach(again)
    assert again.num_computed_tokens == 16
    assert read(kv, again) == numbers((0, 16, 0))


def test_release_forgets_the_sequence() -> None:
    kv = make_kv()
    seq = start(kv, make_seq(PROMPT))
    kv.release(seq)
    assert (seq.block_tables, seq.num_computed_tokens) == ([], 0)
    kv.attach(seq)  # may come back
    assert seq.num_computed_tokens == 39


# ---- check_integrity


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda kv, seq: seq.block_tables[0].pop(), id="a table lost a block"),
        pytest.param(lambda kv, seq: seq.block_tables[0].append(5), id="a block that is not held"),
        pytest.param(lambda kv, seq: setattr(seq, "num_computed_tokens", 41), id="computed beyond known"),
        pytest.param(lambda kv, seq: kv._hashes.pop(seq), id="a holder unknown"),
        pytest.param(lambda kv, seq: kv._hashes.__setitem__(make_seq([1]), []), id="a holder that does not run"),
        pytest.param(lambda kv, seq: kv.groups[0].pool.ref_counts.__setitem__(0, 0), id="a reference lost"),
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
