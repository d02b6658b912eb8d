"""Slots of states, by themselves and where they decide what prefix a sequence can start from."""

from __future__ import annotations

import pytest
import torch
from tests.kv_manager.conftest import DIM, HEADS, LAYERS, SIZE, A, B, make_seq, numbers, read, write

from longtail.kv_manager.block_pool import BlockHash
from longtail.kv_manager.group import PagedGroup
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.manager import KVManager
from longtail.kv_manager.states import StateSlots
from longtail.sequence import Sequence
from longtail.version import Fingerprint

SHAPES = (((2, 3),), ((4,), (1,)))
FULL = Layout("kv", LAYERS, HEADS, SIZE, DIM)


def fill(states: StateSlots, slot: int, number: float) -> None:
    for layer in states.tensors:
        for t in layer:
            t[slot] = number


def number(states: StateSlots, slot: int) -> float:
    (value,) = {x for layer in states.tensors for t in layer for x in t[slot].flatten().tolist()}
    return value


def test_a_pass_that_does_not_count_leaves_the_state() -> None:
    states = StateSlots(SHAPES, 2)
    seq = make_seq([1, 2, 3])
    states.hold(seq, None)
    read, write = states.slots(seq)
    fill(states, write, 5.0)
    assert number(states, states.slots(seq)[0]) == 0.0
    states.advance(seq)
    assert (states.slots(seq), number(states, write)) == ((write, read), 5.0)


def test_a_fresh_sequence_starts_from_nothing() -> None:
    """Whatever the slot held before."""
    states = StateSlots(SHAPES, 1)
    for slot in range(states.num_slots):
        fill(states, slot, float("nan"))
    states.hold(seq := make_seq([1]), None)
    assert number(states, states.slots(seq)[0]) == 0.0


def test_saved_and_restored() -> None:
    states = StateSlots(SHAPES, 2)
    seq = make_seq([1])
    states.hold(seq, None)
    numbers = torch.arange(11.0)
    states.restore(seq, numbers)
    slot = states.slots(seq)[0]
    assert torch.equal(states.tensors[0][0][slot], torch.tensor([[0.0, 1, 2], [3, 4, 5]]))
    assert torch.equal(states.tensors[1][1][slot], torch.tensor([10.0]))
    states.save(seq, out := torch.empty(11))
    assert torch.equal(out, numbers)


def test_copies_give_way_the_least_recently_used_first() -> None:
    """Three slots: a sequence has two, so there is one copy at a time; without a sequence there may be three."""
    states = StateSlots(SHAPES, 1)
    keys = [BlockHash(bytes([i])) for i in range(4)]
    states.hold(seq := make_seq([1]), None)
    for i, key in enumerate(keys):
        fill(states, states.slots(seq)[0], float(i + 1))
        states.keep(seq, key)
        assert [states.find(k) for k in keys] == [k == key for k in keys]
    states.release(seq)
    states.hold(seq, keys[3])
    assert number(states, states.slots(seq)[0]) == 4.0
    states.check_integrity([seq])


def test_the_state_that_is_copied_is_not_what_makes_room() -> None:
    states = StateSlots(SHAPES, 2)
    first, second = make_seq([1]), make_seq([2], name="h/0")
    states.hold(first, None)
    keys = [BlockHash(bytes([i])) for i in range(4)]
    for i, key in enumerate(keys):  # all four free slots hold copies
        fill(states, states.slots(first)[0], float(i + 1))
        states.keep(first, key)
    states.hold(second, keys[0])  # the oldest
    assert number(states, states.slots(second)[0]) == 1.0
    assert [states.find(key) for key in keys] == [True, False, False, True]
    states.check_integrity([first, second])


def compute(kv: KVManager, seq: Sequence, stop: int) -> None:
    assert kv.reserve(seq, stop)
    assert kv.states is not None
    fill(kv.states, kv.states.slots(seq)[1], float(stop))
    kv.advance(seq, stop - seq.num_computed_tokens)


def test_siblings_start_at_the_end_of_the_prompt() -> None:
    kv = KVManager([FULL], [20], fingerprint=A, states=StateSlots(SHAPES, 3))
    first = make_seq(prompt := list(range(40)))
    kv.attach(first)
    assert kv.chunk(first, 40) == 39
    compute(kv, first, 39)
    assert kv.chunk(first, 1) == 1
    compute(kv, first, 40)
    kv.attach(second := make_seq(prompt, name="g/1"))
    assert second.num_computed_tokens == 39
    assert kv.states is not None
    assert number(kv.states, kv.states.slots(second)[0]) == 39.0
    kv.attach(third := make_seq([*prompt[:36], 7, 8, 9, 10], name="h/0"))  # two blocks are the same, and no state
    assert (third.num_computed_tokens, third.block_tables) == (0, [[]])
    kv.check_integrity([first, second, third])


def test_a_prompt_that_ends_with_a_block() -> None:
    kv = KVManager([FULL], [20], fingerprint=A, states=StateSlots(SHAPES, 3))
    kv.attach(first := make_seq(prompt := list(range(33))))
    compute(kv, first, 32)
    kv.attach(second := make_seq(prompt, name="g/1"))
    assert second.num_computed_tokens == 32
    kv.check_integrity([first, second])


def test_a_prompt_whose_window_is_gone_is_not_found() -> None:
    """The sample went on, its window moved past the prompt's end, and other work took those blocks: what is found of a
    longer prefix does not help, for the state is that of the prompt's end."""
    window = FULL._replace(window=4)
    kv = KVManager([window, FULL], [6, 40], fingerprint=A, states=StateSlots(SHAPES, 3))
    seq = make_seq(list(range(33)), [7] * 60)
    kv.attach(seq)
    compute(kv, seq, 32)
    for stop in range(33, 81):
        compute(kv, seq, stop)
    # Three blocks of the window's six were never used: that many are taken first, then the oldest cached ones.
    kv.attach(other := make_seq([9] * 64, name="h/0"))
    assert kv.reserve(other, 64)
    kv.release(seq)
    kv.attach(seq)
    assert len(kv._found_prefix(seq.token_ids[:92])) == 5
    assert seq.num_computed_tokens == 0
    kv.check_integrity([seq, other])


def compute_kv(kv: KVManager, seq: Sequence, stop: int, base: float = 0.0) -> None:
    """As `compute`, and writes the first group's KV."""
    assert kv.reserve(seq, stop)
    write(kv, seq, seq.num_computed_tokens, stop, base)
    compute(kv, seq, stop)


def restored_onto_a_tail(kv: KVManager, newer: Fingerprint, base: float, held: bool) -> Sequence:
    """A sample of 8 prompt tokens and 16 more, saved with 24 computed, restored after a sibling has computed the prompt
    anew (weights `newer`, KV `base`): it finds the sibling's 7 tokens, and the snapshot holds all 24."""
    seq = make_seq(list(range(8)), list(range(8, 25)))
    kv.attach(seq)
    compute_kv(kv, seq, 7)
    compute_kv(kv, seq, 24)
    snapshot = kv.save(seq)
    assert snapshot is not None
    kv.release(seq)
    kv.set_fingerprint(newer)
    kv.attach(sibling := make_seq(list(range(8)), name="g/1"))
    compute_kv(kv, sibling, 7, base)
    if not held:
        kv.release(sibling)
    kv.attach(seq)
    assert seq.num_computed_tokens == 7
    assert kv.restore(seq, snapshot)
    assert seq.num_computed_tokens == 24
    return seq


@pytest.mark.parametrize("held", [False, True])
def test_a_found_tail_before_the_window_is_not_offered_as_a_whole_block(held: bool) -> None:
    """A snapshot holds no KV before the window, so nothing fills up the block of which a tail was found."""
    window = FULL._replace(window=4)
    kv = KVManager([window, FULL], [20, 20], fingerprint=A, states=StateSlots(SHAPES, 5))
    restored_onto_a_tail(kv, A, 0.0, held)
    kv.attach(other := make_seq(list(range(17)), name="h/0"))  # its prompt ends with the block
    assert other.num_computed_tokens == 0
    compute_kv(kv, other, 16)
    kv.attach(last := make_seq(list(range(17)), name="h/1"))
    assert last.num_computed_tokens == 16
    assert read(kv, last) == numbers((0, 16, 0))


@pytest.mark.parametrize("held", [False, True])
def test_older_kv_restored_onto_a_found_tail_does_not_take_its_place(held: bool) -> None:
    """The tail's key promises KV of the present weights, whoever continues the block."""
    kv = KVManager([FULL], [20], fingerprint=A, states=StateSlots(SHAPES, 5))
    seq = restored_onto_a_tail(kv, B, 300.0, held)
    assert read(kv, seq) == numbers((0, 7, 300), (7, 24, 0))
    kv.attach(third := make_seq(list(range(8)), name="g/2"))
    assert third.num_computed_tokens == 7
    assert read(kv, third) == numbers((0, 7, 300))


@pytest.mark.parametrize("layout", [FULL, Layout("latent", LAYERS, 1, SIZE, DIM)])
def test_what_is_kept_of_a_block_is_not_written(layout: Layout) -> None:
    group = PagedGroup(layout, 4)
    group.cache.copy_(before := torch.randn(group.cache.shape))
    data = torch.randn(2, *layout.block_shape)
    saved = data.clone()
    group.write([0, 3, 1], 1, 3, data, keep=5)
    assert torch.equal(data, saved)
    assert torch.equal(group.cache[[0, 2]], before[[0, 2]])
    assert torch.equal(group.cache[1], data[1])

    def tokens(block: torch.Tensor) -> torch.Tensor:
        """[SIZE, numbers of a token]"""
        if layout.kind == "latent":
            return block.transpose(0, 1).flatten(1)
        k = block[:, 0].view(LAYERS, HEADS, DIM, SIZE).permute(3, 0, 1, 2).flatten(1)
        return torch.cat([k, block[:, 1].view(LAYERS, HEADS, SIZE, DIM).permute(2, 0, 1, 3).flatten(1)], 1)

    assert torch.equal(tokens(group.cache[3]), torch.cat([tokens(before[3])[:5], tokens(data[0])[5:]]))
