"""The KV of running sequences: block tables, prefix sharing, copy-on-write, snapshots.

Region of one sequence (block size 4, 9 known tokens, 7 computed):

    tokens   0 1 2 3 | 4 5 6 . | . . . .
    blocks   [  17  ]  [  3   ]  (not yet)
              full, may   partly filled: written next, so it must be this
              be shared   sequence's alone (copied first if it is shared)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from longtail.kernels.kv import copy_blocks, empty_kv, scatter_blocks
from longtail.kv_manager.block_pool import BlockHash, BlockPool, chain_hash, root_hash
from longtail.kv_manager.encoding import Encoding, decode, encode
from longtail.kv_manager.part import Part
from longtail.kv_manager.snapshot import Snapshot, token_digest
from longtail.kv_manager.snapshot_file import PartHeader
from longtail.kv_manager.tiers import Tiers
from longtail.sequence import Sequence
from longtail.version import Fingerprint


class KVManager:
    """Owns the cache tensor, the pool and every block table. Exhausted memory is a returned False, never an exception.

    prefix_caching: find computed prefixes of other sequences (the prompt of a group is computed once).
    tiers: where saved KV goes; encoding: how (`kv_manager/encoding.py`).
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        layers: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        fingerprint: Fingerprint,
        prefix_caching: bool = True,
        tiers: Tiers | None = None,
        encoding: Encoding = "exact",
    ) -> None:
        self.tiers = Tiers() if tiers is None else tiers
        self.encoding: Encoding = encoding
        self.block_size = block_size
        self.layout = (layers, kv_heads, block_size, head_dim)
        self.kv = empty_kv(num_blocks, layers, kv_heads, block_size, head_dim)
        self._dtype = str(self.kv.dtype).removeprefix("torch.")
        self.pool = BlockPool(num_blocks)
        self.prefix_caching = prefix_caching
        self.fingerprint = fingerprint
        self._root = root_hash(fingerprint)
        self._hashes: dict[Sequence, list[BlockHash]] = {}
        """Chain hashes of each held sequence's registered full blocks; sequences in here hold blocks."""
        self._made_by: dict[Sequence, Fingerprint] = {}
        """Weights that made a held sequence's KV; not the present ones if the user chose to keep older KV."""

    @property
    def bytes_per_block(self) -> int:
        return self.kv[0].nbytes

    def attach(self, seq: Sequence) -> None:
        """Starts a sequence on the longest cached prefix of its tokens; sets num_computed_tokens.

        The last known token is always left to compute: its logits are needed. Takes no memory from the free list
        that is not already cached, and so cannot fail.
        """
        assert seq not in self._hashes and not seq.block_table, seq.sample.id
        hashes: list[BlockHash] = []
        self._hashes[seq] = hashes
        self._made_by[seq] = self.fingerprint
        seq.num_computed_tokens = 0
        if not self.prefix_caching:
            return
        limit, size = seq.num_tokens - 1, self.block_size
        for key, found in self._found_prefix(seq.token_ids[:limit]):
            self.pool.share(found)
            seq.block_table.append(found)
            hashes.append(key)
        parent = hashes[-1] if hashes else self._root
        seq.num_computed_tokens = len(hashes) * size
        tail = seq.token_ids[seq.num_computed_tokens : limit]
        if 0 < len(tail) < size:
            block = self.pool.find(_tail_hash(parent, tail))
            if block is not None:
                self.pool.share(block)
                seq.block_table.append(block)
                seq.num_computed_tokens = limit

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes positions num_computed_tokens .. num_tokens-1 writable: own blocks, copied where they were shared.
        False, with nothing changed, if the pool is exhausted."""
        size = self.block_size
        first = seq.num_computed_tokens // size
        needed = -(-num_tokens // size) - len(seq.block_table)
        shared = [i for i in range(first, len(seq.block_table)) if self.pool.ref_counts[seq.block_table[i]] > 1]
        blocks = self.pool.allocate(max(needed, 0) + len(shared))
        if blocks is None:
            return False
        for i in shared:
            source, copy = seq.block_table[i], blocks.pop()
            copy_blocks(self.kv, [(source, copy)])
            seq.block_table[i] = copy
            self.pool.free([source])
        for i in range(first, len(seq.block_table)):
            self.pool.truncate(seq.block_table[i], seq.num_computed_tokens - first * size if i == first else 0)
        seq.block_table.extend(blocks)
        return True

    def commit(self, seq: Sequence) -> None:
        """Registers what has been computed since the last call, for other sequences to find."""
        if not self.prefix_caching or self._made_by[seq] != self.fingerprint:
            return
        hashes, size = self._hashes[seq], self.block_size
        while (len(hashes) + 1) * size <= seq.num_computed_tokens:
            i = len(hashes)
            parent = hashes[-1] if hashes else self._root
            key = chain_hash(parent, seq.token_ids[i * size : (i + 1) * size])
            self.pool.register(key, seq.block_table[i], size)
            hashes.append(key)

    def commit_prompt(self, seq: Sequence) -> None:
        """Call once when a prompt is computed: its partly filled last block becomes findable too (siblings copy it)."""
        self.commit(seq)
        limit, size = len(seq.sample.prompt_ids) - 1, self.block_size
        full = limit // size
        own = self._made_by[seq] == self.fingerprint
        if self.prefix_caching and own and limit % size and seq.num_computed_tokens >= limit:
            parent = self._hashes[seq][full - 1] if full else self._root
            key = _tail_hash(parent, seq.token_ids[full * size : limit])
            self.pool.register(key, seq.block_table[full], limit % size)

    def release(self, seq: Sequence) -> None:
        """Gives the blocks back; committed ones stay findable until their memory is needed."""
        self.pool.free(seq.block_table)
        seq.block_table.clear()
        seq.num_computed_tokens = 0
        del self._hashes[seq], self._made_by[seq]

    def save(self, seq: Sequence, *, wait: bool = True) -> Snapshot | None:
        """A copy of the computed KV in the lower tiers. The samples of a group share the part that holds the full
        blocks of their prompt. None if nothing is computed, or if there is no room (wait: for writes to make some)."""
        n = seq.num_computed_tokens
        if n == 0:
            return None
        total = -(-n // self.block_size)
        shared = min(len(seq.sample.prompt_ids), n) // self.block_size
        if not self.prefix_caching or self._made_by[seq] != self.fingerprint:  # siblings' may be of other weights
            shared = 0
        parts = []
        for first, last in ((0, shared), (shared, total)):
            if first < last:
                part = self._save_part(seq, first, last, shared=last == shared, wait=wait)
                if part is None:
                    return None
                parts.append(part)
        digest = token_digest(seq.token_ids[:n])
        return Snapshot(seq.sample.id, self._made_by[seq], self.layout, n, digest, tuple(parts))

    def _save_part(self, seq: Sequence, first: int, last: int, *, shared: bool, wait: bool) -> Part | None:
        blocks, cap = seq.block_table[first:last], seq.sample.params.max_tokens
        remaining = max(cap - len(seq.sample.output_ids), 0) if cap is not None else 1 << 30

        def fill(out: Mapping[str, torch.Tensor]) -> None:
            encode(self.kv, blocks, self.layout, out)

        header = self._header(seq, first, last, shared)
        return self.tiers.put(header, fill, shared=shared, remaining=remaining, wait=wait)

    def _header(self, seq: Sequence, first: int, last: int, shared: bool) -> PartHeader:
        num_tokens = last * self.block_size if shared else seq.num_computed_tokens
        made_by = self.fingerprint if shared else self._made_by[seq]
        return PartHeader(
            sample_id="" if shared else seq.sample.id,
            fingerprint=made_by,
            layout=self.layout,
            dtype=self._dtype,
            first_block=first,
            num_blocks=last - first,
            num_tokens=num_tokens,
            digest=token_digest(seq.token_ids[:num_tokens]).hex(),
            encoding=self.encoding,
        )

    def can_use(self, snapshot: Snapshot) -> bool:
        """Whether the present weights made it, and only with such loss as the settings ask for."""
        if snapshot.is_exact and snapshot.fingerprint == self.fingerprint:
            return True
        return self.encoding != "exact" and snapshot.fingerprint in (self.fingerprint, _approximate(self.fingerprint))

    def restore(self, seq: Sequence, snapshot: Snapshot) -> bool:
        """Brings an attached sequence up to the snapshot's tokens; blocks it found by prefix are kept, not rewritten.
        False, with nothing changed, if the pool is exhausted. SnapshotMismatch if it is not this sequence's, or if its
        data are lost; then nothing is changed either. Whose weights made it is the caller's to ask (`can_use`)."""
        snapshot.check(seq.sample.id, seq.token_ids, self.layout, self._dtype)
        if min(snapshot.num_tokens, seq.num_tokens - 1) <= seq.num_computed_tokens:  # a found tail is not rewritten
            return True
        first = seq.num_computed_tokens // self.block_size
        last = -(-snapshot.num_tokens // self.block_size)
        if last - len(seq.block_table) > self.pool.num_free:  # before anything is loaded
            return False
        loaded = []
        for part in snapshot.parts:
            start = part.header.first_block
            low, high = max(first, start), min(last, part.header.last_block)
            if low < high:
                loaded.append((low, high, decode(part.tiers.load(part), self.layout, low - start, high - start)))
        if not self.reserve(seq, snapshot.num_tokens):
            return False
        for low, high, data in loaded:
            scatter_blocks(self.kv, seq.block_table[low:high], data)
        seq.num_computed_tokens = snapshot.num_tokens
        made_by = snapshot.fingerprint if snapshot.is_exact else _approximate(snapshot.fingerprint)
        if self.can_use(snapshot):
            self._made_by[seq] = made_by  # if approximate, no other sequence may find it
        else:
            self._made_by[seq] = _mixed(made_by, self.fingerprint)
        self.commit(seq)
        return True

    def saved_prompt(self, seq: Sequence) -> Snapshot | None:
        """A snapshot of a sequence's prompt that a sibling left in the lower tiers, if it holds more than the device
        has. The sequence need not be attached."""
        whole = len(seq.sample.prompt_ids) // self.block_size
        blocks = min(whole, (seq.num_tokens - 1) // self.block_size)
        if not self.prefix_caching or self.encoding != "exact" or blocks == 0:
            return None
        prefix = self._found_prefix(seq.token_ids[: blocks * self.block_size])
        part = self.tiers.find(self._header(seq, 0, whole, shared=True)) if len(prefix) < blocks else None
        if part is None:
            return None
        num_tokens = blocks * self.block_size
        digest = token_digest(seq.token_ids[:num_tokens])
        return Snapshot(seq.sample.id, self.fingerprint, self.layout, num_tokens, digest, (part,))

    def _found_prefix(self, token_ids: list[int]) -> list[tuple[BlockHash, int]]:
        """Keys and blocks of the longest cached prefix of whole blocks."""
        found: list[tuple[BlockHash, int]] = []
        parent = self._root
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            parent = chain_hash(parent, token_ids[start : start + self.block_size])
            block = self.pool.find(parent)
            if block is None:
                break
            found.append((parent, block))
        return found

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """New weights: nothing made by the old ones is found from here on. Held sequences keep their blocks (the
        caller releases them, or keeps older KV by choice), but those are no longer offered to others."""
        self.fingerprint = fingerprint
        self._root = root_hash(fingerprint)
        self.pool.forget_all()
        for seq, made_by in self._made_by.items():
            self._made_by[seq] = _mixed(made_by, fingerprint)

    def slots(self, seq: Sequence, start: int, stop: int) -> list[int]:
        """Slot of each position start .. stop-1."""
        size, table = self.block_size, seq.block_table
        return [table[p // size] * size + p % size for p in range(start, stop)]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """AssertionError unless blocks balance and exactly these sequences hold them."""
        held = list(sequences)
        assert set(held) == set(self._hashes), "sequences that hold blocks differ from those that run"
        for seq in held:
            assert len(seq.block_table) * self.block_size >= seq.num_computed_tokens, seq.sample.id
            assert seq.num_computed_tokens <= seq.num_tokens, seq.sample.id
        self.pool.check_integrity([seq.block_table for seq in held])


def _tail_hash(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    """Key of a partly filled block; the marker keeps it apart from full ones."""
    return chain_hash(BlockHash(parent + b"tail"), token_ids)


def _approximate(fingerprint: Fingerprint) -> Fingerprint:
    """Fingerprint of KV that is not quite what these weights made: a snapshot compressed with loss, and what was
    computed on it."""
    return Fingerprint(fingerprint.removesuffix("~") + "~")


def _mixed(older: Fingerprint, newer: Fingerprint) -> Fingerprint:
    """Fingerprint of KV that several weights made: equal to that of none of them."""
    return Fingerprint(f"{older}+{newer}")


def blocks_for(kv_cache_bytes: int, layout: tuple[int, int, int, int]) -> int:
    """How many float32 blocks of (layers, kv heads, block size, head dim) fit."""
    layers, kv_heads, block_size, head_dim = layout
    return kv_cache_bytes // (layers * 2 * kv_heads * block_size * head_dim * torch.float32.itemsize)
