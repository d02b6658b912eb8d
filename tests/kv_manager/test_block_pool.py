"""BlockPool: schedules with the block ids that a reader can follow, and random ones against a plain model."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longtail.kv_manager.block_pool import BlockHash, BlockPool, chain_hash, root_hash


def key(name: str | int) -> BlockHash:
    return BlockHash(str(name).encode())


# ---- hashes


def test_chain_hash_depends_on_weights_position_order_and_tokens() -> None:
    a, b = root_hash("A"), root_hash("B")
    first = chain_hash(a, [1, 2])
    others = [
        a,
        b,
        chain_hash(b, [1, 2]),  # other weights
        chain_hash(a, [2, 1]),  # another order
        chain_hash(a, [1, 2, 0]),
        chain_hash(a, [1]),
        chain_hash(first, [1, 2]),  # the same tokens one block later
        chain_hash(chain_hash(a, [1]), [2]),  # the same tokens cut elsewhere
    ]
    assert len({first, *others}) == 9
    assert chain_hash(root_hash("A"), (1, 2)) == first


def test_chain_hash_of_large_token_ids() -> None:
    assert chain_hash(root_hash("A"), [1]) != chain_hash(root_hash("A"), [1 + 2**32])


# ---- allocate, free, share


def test_blocks_are_handed_out_in_order_and_reused_oldest_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [2]
    assert pool.num_free == 1
    pool.free([0, 1])  # deepest first: 1, then 0
    assert pool.allocate(3) == [3, 1, 0]
    assert pool.num_free == 0
    pool.check_integrity([[2], [3, 1, 0]])


def test_exhausted_is_none_and_takes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [0]
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.check_integrity([[0]])
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_exhausted_evicts_no_cached_prefix() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.register(key("p"), 0, 16)
    pool.free([0])
    assert pool.allocate(2) is None
    assert pool.find(key("p")) == 0


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.share(0)
    pool.share(0)
    assert pool.ref_counts == [3, 0]
    pool.check_integrity([[0], [0], [0]])
    pool.free([0])
    pool.free([0])
    assert pool.num_free == 1
    pool.free([0])
    assert pool.num_free == 2
    pool.check_integrity([])


def test_freeing_twice_is_an_assertion() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free([0])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=r"^num_blocks must be at least 1.*raise kv_cache_bytes"):
        BlockPool(num_blocks)


# ---- the prefix index


def test_a_freed_block_stays_findable_and_is_brought_back_by_share() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.register(key("p"), 1, 16)
    pool.free([0, 1])
    assert pool.find(key("p")) == 1
    pool.share(1)
    assert pool.ref_counts == [0, 1, 0]
    pool.check_integrity([[1]])
    assert pool.allocate(2) == [2, 0]
    assert pool.find(key("p")) == 1


def test_blocks_without_a_prefix_are_taken_first_then_the_one_freed_longest_ago() -> None:
    pool = BlockPool(5)
    assert pool.allocate(5) == [0, 1, 2, 3, 4]
    for block in (0, 1, 2, 3):
        pool.register(key(block), block, 16)
    pool.free([2])
    pool.free([0, 1])  # 1 before 0: prefixes outlive their continuations
    pool.free([4])  # nothing cached
    pool.free([3])
    assert pool.allocate(1) == [4]
    assert [pool.find(key(i)) for i in range(4)] == [0, 1, 2, 3]
    assert pool.allocate(1) == [2]
    assert [pool.find(key(i)) for i in range(4)] == [0, 1, None, 3]
    pool.share(1)  # used again: it is young once more
    pool.free([1])
    assert pool.allocate(3) == [0, 3, 1]
    assert [pool.find(key(i)) for i in range(4)] == [None] * 4
    pool.check_integrity([[4, 2, 0, 3, 1]])


def test_the_first_block_under_a_key_stays() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.register(key("p"), 0, 16)
    pool.register(key("p"), 1, 16)
    assert pool.find(key("p")) == 0
    pool.free([0, 1])
    assert pool.allocate(1) == [1]  # block 1 had no key, so it is plain
    assert pool.find(key("p")) == 0


def test_registering_a_free_block_is_an_assertion() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is not held"):
        pool.register(key("p"), 1, 16)


def test_evicting_a_block_forgets_all_of_its_keys() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.register(key("tail"), 0, 3)
    pool.register(key("full"), 0, 16)
    pool.free([0])
    assert pool.allocate(1) == [0]
    assert pool.find(key("tail")) is None
    assert pool.find(key("full")) is None
    pool.check_integrity([[0]])


def test_truncate_forgets_exactly_the_keys_that_cover_more() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    for covered in (3, 5, 16):
        pool.register(key(covered), 0, covered)
    pool.truncate(0, 16)
    assert [pool.find(key(c)) for c in (3, 5, 16)] == [0, 0, 0]
    pool.truncate(0, 5)
    assert [pool.find(key(c)) for c in (3, 5, 16)] == [0, 0, None]
    pool.truncate(0, 4)
    assert [pool.find(key(c)) for c in (3, 5, 16)] == [0, None, None]
    pool.truncate(0, 0)
    assert pool.find(key(3)) is None
    pool.check_integrity([[0]])
    pool.free([0])
    assert pool.allocate(2) == [1, 0]  # no key is left: plain, behind block 1 in the order of freeing


def test_a_truncated_key_can_be_registered_for_another_block() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.register(key("p"), 0, 16)
    pool.truncate(0, 3)
    pool.register(key("p"), 1, 16)
    assert pool.find(key("p")) == 1


@pytest.mark.parametrize("holders", [0, 2])
def test_truncate_is_for_the_only_holder(holders: int) -> None:
    pool = BlockPool(1)
    for _ in range(holders):
        pool.share(0) if pool.ref_counts[0] else pool.allocate(1)
    with pytest.raises(AssertionError, match=f"block 0 has {holders} holders; copy it first"):
        pool.truncate(0, 3)


def test_forget_all_keeps_what_is_held() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    for block in range(3):
        pool.register(key(block), block, 16)
    pool.free([0])
    pool.forget_all()
    assert [pool.find(key(i)) for i in range(3)] == [None] * 3
    pool.check_integrity([[1, 2]])
    pool.free([1, 2])
    assert pool.allocate(4) == [3, 0, 2, 1]  # all plain


# ---- check_integrity


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda p: p.ref_counts.__setitem__(0, 2), id="a reference too many"),
        pytest.param(lambda p: p.ref_counts.__setitem__(1, 0), id="a reference lost"),
        pytest.param(lambda p: p._free_plain.__setitem__(0, None), id="held and free"),
        pytest.param(lambda p: p._free_plain.pop(4), id="a block leaked"),
        pytest.param(lambda p: p._free_plain.__setitem__(2, None), id="free twice"),
        pytest.param(lambda p: p._free_cached.__setitem__(4, p._free_plain.pop(4)), id="cached without a key"),
        pytest.param(lambda p: p._free_plain.__setitem__(2, p._free_cached.pop(2)), id="plain with a key"),
        pytest.param(lambda p: p._block_of.pop(key("two")), id="a key lost"),
        pytest.param(lambda p: p._block_of.__setitem__(key("x"), 3), id="a key too many"),
        pytest.param(lambda p: p._block_of.__setitem__(key("zero"), 2), id="a key of another block"),
        pytest.param(lambda p: p._keys_of[0].__setitem__(key("y"), 4), id="a key without a way back"),
        pytest.param(lambda p: p._keys_of.__setitem__(3, {}), id="an empty set of keys"),
    ],
)
def test_check_integrity_catches(fault: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    pool.register(key("zero"), 0, 16)
    pool.register(key("one"), 0, 5)
    pool.register(key("two"), 2, 16)
    pool.free([2])
    pool.check_integrity([[0, 1]])
    fault(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity([[0, 1]])


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1], [0]], [[0, 1], [2]], [[0, 1, 1]]], ids=str)
def test_check_integrity_catches_other_tables(tables: list[list[int]]) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.check_integrity([[0, 1]])
    pool.check_integrity([[0], [1]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


# ---- against a plain model


class PoolMachine(RuleBasedStateMachine):
    """The model: a list of tables, one list of free blocks in order of freeing, one dict key -> (block, covered)."""

    SIZE = 6

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(self.SIZE)
        self.tables: list[list[int]] = []
        self.free = list(range(self.SIZE))
        self.index: dict[int, tuple[int, int]] = {}

    def cached(self, block: int) -> bool:
        return any(block == b for b, _ in self.index.values())

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            assert self.pool.allocate(count) is None
            return
        expected = []
        for _ in range(count):
            block = next((b for b in self.free if not self.cached(b)), self.free[0])
            self.free.remove(block)
            self.index = {k: v for k, v in self.index.items() if v[0] != block}
            expected.append(block)
        assert self.pool.allocate(count) == expected
        if expected:
            self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.free += [block for block in reversed(table) if not self.holders(block)]

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def find_and_share(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.index)))
        block = self.pool.find(key(name))
        assert block == self.index[name][0]
        self.pool.share(block)
        if block in self.free:
            self.free.remove(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.integers(0, 9), covered=st.integers(1, 16))
    def register(self, data: st.DataObject, name: int, covered: int) -> None:
        block = data.draw(st.sampled_from(sorted({b for table in self.tables for b in table})))
        self.pool.register(key(name), block, covered)
        self.index.setdefault(name, (block, covered))

    @precondition(lambda self: any(self.holders(b) == 1 for b in range(self.SIZE)))
    @rule(data=st.data(), offset=st.integers(0, 16))
    def truncate(self, data: st.DataObject, offset: int) -> None:
        block = data.draw(st.sampled_from([b for b in range(self.SIZE) if self.holders(b) == 1]))
        self.pool.truncate(block, offset)
        self.index = {k: (b, c) for k, (b, c) in self.index.items() if b != block or c <= offset}

    @rule()
    def forget_all(self) -> None:
        # Cached free blocks join the plain ones, behind them, in their order.
        self.free = [b for b in self.free if not self.cached(b)] + [b for b in self.free if self.cached(b)]
        self.index.clear()
        self.pool.forget_all()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == len(self.free)
        assert self.pool.ref_counts == [self.holders(b) for b in range(self.SIZE)]
        assert [self.pool.find(key(name)) for name in range(10)] == [self.index.get(n, (None,))[0] for n in range(10)]


TestBlockPoolAgainstAModel = PoolMachine.TestCase
TestBlockPoolAgainstAModel.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
