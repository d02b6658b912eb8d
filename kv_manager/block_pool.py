"""Ids of KV blocks: who holds them, which hold a reusable prefix. Knows nothing of tensors.

    free, nothing cached  ->  held (ref >= 1)  ->  free, still cached  ->  reused (its keys are forgotten)

Free blocks are handed out oldest-freed first, those without a cached prefix before those with one (LRU eviction).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""Identity of a block's content: weights, every token before it, and its own tokens."""


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of a block given its predecessor's hash (the root's is that of the weight fingerprint)."""
    return BlockHash(hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest())


def root_hash(fingerprint: str) -> BlockHash:
    return BlockHash(hashlib.blake2b(fingerprint.encode(), digest_size=16).digest())


class BlockPool:
    """Owns ref counts, the free list and the prefix index."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}; raise kv_cache_bytes")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free_plain: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[BlockHash, int] = {}
        self._keys_of: dict[int, dict[BlockHash, int]] = {}
        """Keys of a block, with how many of its tokens each covers."""

    @property
    def num_free(self) -> int:
        return len(self._free_plain) + len(self._free_cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None if there are not so many (then nothing is taken)."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            if self._free_plain:
                block, _ = self._free_plain.popitem(last=False)
            else:
                block, _ = self._free_cached.popitem(last=False)
                self._forget(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more holder; brings a free but cached block back."""
        if self.ref_counts[block] == 0:
            self._free_cached.pop(block)
        self.ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each. Deepest block first, so that prefixes outlive their continuations."""
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} freed twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                (self._free_cached if block in self._keys_of else self._free_plain)[block] = None

    def register(self, key: BlockHash, block: int, num_tokens: int) -> None:
        """Makes the first `num_tokens` of a held block findable under `key`; the first block under a key stays."""
        assert self.ref_counts[block] > 0, f"block {block} is not held"
        if key not in self._block_of:
            self._block_of[key] = block
            self._keys_of.setdefault(block, {})[key] = num_tokens

    def truncate(self, block: int, num_tokens: int) -> None:
        """Its only holder is about to write from offset `num_tokens` on: forgets every key that covers more."""
        assert self.ref_counts[block] == 1, f"block {block} has {self.ref_counts[block]} holders; copy it first"
        keys = self._keys_of.get(block, {})
        for key in [key for key, covered in keys.items() if covered > num_tokens]:
            del keys[key]
            del self._block_of[key]
        if block in self._keys_of and not keys:
            del self._keys_of[block]

    def find(self, key: BlockHash) -> int | None:
        return self._block_of.get(key)

    def forget_all(self) -> None:
        """Empties the prefix index (held blocks stay held)."""
        self._block_of.clear()
        self._keys_of.clear()
        self._free_plain.update(self._free_cached)
        self._free_cached.clear()

    def _forget(self, block: int) -> None:
        for key in self._keys_of.pop(block, ()):
            del self._block_of[key]

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Free + held = all, and the ref counts are exactly the block tables' references. AssertionError if not."""
        references = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block in table:
                references[block] += 1
        assert references == self.ref_counts, "ref counts differ from the block tables' references"
        free = [*self._free_plain, *self._free_cached]
        assert len(set(free)) == len(free), "a block is free twice"
        held = {block for block, count in enumerate(self.ref_counts) if count}
        assert held.isdisjoint(free) and len(held) + len(free) == self.num_blocks, "free + held != all"
        inverse = sorted((key, block) for block, keys in self._keys_of.items() for key in keys)
        assert inverse == sorted(self._block_of.items()), "prefix index and its inverse differ"
        assert all(self._keys_of.values()), "a block has an empty set of keys"
        assert not set(self._free_plain) & set(self._keys_of), "a cached block lies among the plain ones"
        assert set(self._free_cached) <= set(self._keys_of), "a plain block lies among the cached ones"
