"""The KV of running sequences: block tables, prefix sharing, copy-on-write, snapshots.

Region of one sequence in one group of layers (block size 4, 9 known tokens, 7 computed):

    tokens   0 1 2 3 | 4 5 6 . | . . . .
    blocks   [  17  ]  [  3   ]  (not yet)
              full, may   partly filled: written next, so it must be this
              be shared   sequence's alone (copied first if it is shared)

A group with a window lets go of the blocks before it. Layers with a state have slots instead (`states.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import torch

from longtail.kv_manager.block_pool import BlockHash, chain_hash, root_hash
from longtail.kv_manager.encoding import Encoding, decode, encode, encoding_of
from longtail.kv_manager.group import NONE, PagedGroup
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.part import Part
from longtail.kv_manager.snapshot import Snapshot, token_digest
from longtail.kv_manager.snapshot_file import PartHeader
from longtail.kv_manager.states import StateSlots
from longtail.kv_manager.tiers import Tiers
from longtail.sequence import Sequence
from longtail.version import Fingerprint


@dataclasses.dataclass(frozen=True, slots=True)
class _Prefix:
    """Computed work of others that a sequence can start from."""

    keys: list[BlockHash]
    """Of its whole blocks."""
    tail: BlockHash | None = None
    """Of a partly filled block after them."""
    state: BlockHash | None = None
    """Of the state after all of it."""


class KVManager:
    """Owns the caches, the pools, the slots of states and every block table. Exhausted memory is a returned False,
    never an exception.

    layouts, num_blocks: of each paged group; at least one. states: of the layers that keep a state, if there are any.
    prefix_caching: find computed prefixes of other sequences (the prompt of a group is computed once).
    tiers: where saved KV goes; encoding: how (`kv_manager/encoding.py`).
    """

    def __init__(
        self,
        layouts: SequenceOf[Layout],
        num_blocks: SequenceOf[int],
        *,
        fingerprint: Fingerprint,
        states: StateSlots | None = None,
        prefix_caching: bool = True,
        tiers: Tiers | None = None,
        encoding: Encoding = "exact",
    ) -> None:
        self.tiers = Tiers() if tiers is None else tiers
        self.encoding: Encoding = encoding
        self.groups = [PagedGroup(layout, n) for layout, n in zip(layouts, num_blocks, strict=True)]
        self.states = states
        self.layouts = (*layouts, *([states.layout] if states is not None else []))
        self.block_size = layouts[0].block_size
        self._dtype = str(self.groups[0].cache.dtype).removeprefix("torch.")
        self.prefix_caching = prefix_caching
        self.fingerprint = fingerprint
        self._root = root_hash(fingerprint)
        self._hashes: dict[Sequence, list[BlockHash]] = {}
        """Chain hashes of each held sequence's registered full blocks; sequences in here hold blocks."""
        self._made_by: dict[Sequence, Fingerprint] = {}
        """Weights that made a held sequence's KV; not the present ones if the user chose to keep older KV."""

    @property
    def num_blocks(self) -> int:
        return sum(group.pool.num_blocks for group in self.groups)

    @property
    def num_free(self) -> int:
        """Blocks, cached ones included, over all groups."""
        return sum(group.pool.num_free for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Of one block in each group."""
        return sum(group.layout.block_bytes for group in self.groups)

    def attach(self, seq: Sequence) -> None:
        """Starts a sequence on the longest cached prefix of its tokens; sets num_computed_tokens.

        The last known token is always left to compute: its logits are needed. Takes no memory from the free lists
        that is not already cached, and so cannot fail.
        """
        assert seq not in self._hashes and not seq.block_tables, seq.sample.id
        prefix = self._find(seq) if self.prefix_caching else _Prefix([])
        whole = len(prefix.keys) * self.block_size
        seq.num_computed_tokens = self._tail_end(seq) if prefix.tail is not None else whole
        for group in self.groups:
            first = group.layout.first_kept(seq.num_computed_tokens)
            table = [NONE] * min(first, len(prefix.keys))
            for key in prefix.keys[first:]:
                group.adopt(table, key)
            if prefix.tail is not None:
                group.adopt(table, prefix.tail)
            seq.block_tables.append(table)
        if self.states is not None:
            self.states.hold(seq, prefix.state)
        self._hashes[seq] = prefix.keys
        self._made_by[seq] = self.fingerprint

    def _find(self, seq: Sequence) -> _Prefix:
        limit = seq.num_tokens - 1
        keys = self._found_prefix(seq.token_ids[:limit])
        if self.states is None:
            tail = seq.token_ids[len(keys) * self.block_size : limit]
            if 0 < len(tail) < self.block_size:
                key = _tail_hash(keys[-1] if keys else self._root, tail)
                if all(group.pool.find(key) is not None for group in self.groups):
                    return _Prefix(keys, key)
            return _Prefix(keys)
        # Only where somebody left the state: at the end of the prompt.
        end = min(self._tail_end(seq), limit)
        whole, size = end // self.block_size, self.block_size
        if end == 0 or len(keys) < whole:
            return _Prefix([])
        keys = keys[:whole]
        if end % size == 0:
            return _Prefix(keys, None, keys[-1]) if self.states.find(keys[-1]) and self._has(keys) else _Prefix([])
        key = _tail_hash(keys[-1] if keys else self._root, seq.token_ids[whole * size : end])
        found = self.states.find(key) and all(group.pool.find(key) is not None for group in self.groups)
        return _Prefix(keys, key, key) if found and self._has(keys) else _Prefix([])

    def _tail_end(self, seq: Sequence) -> int:
        """Where a found tail ends: without states, before the last known token (a tail is found by all of it)."""
        return seq.num_tokens - 1 if self.states is None else len(seq.sample.prompt_ids) - 1

    def _has(self, keys: list[BlockHash]) -> bool:
        """Whether every group has all that it needs of this prefix of whole blocks."""
        end = len(keys) * self.block_size
        return all(g.pool.find(key) is not None for g in self.groups for key in keys[g.layout.first_kept(end) :])

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Makes positions num_computed_tokens .. num_tokens-1 writable: own blocks, copied where they were shared.
        False, with nothing changed, if a pool is exhausted."""
        first = seq.num_computed_tokens // self.block_size
        covered = seq.num_computed_tokens - first * self.block_size
        plans = [g.missing(t, first, num_tokens) for g, t in zip(self.groups, seq.block_tables, strict=True)]
        if any(n + len(shared) > g.pool.num_free for g, (n, shared) in zip(self.groups, plans, strict=True)):
            return False
        for group, table, (count, shared) in zip(self.groups, seq.block_tables, plans, strict=True):
            group.extend(table, first, covered, shared, count)
        return True

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """A pass has computed so many tokens more: they count from here on, and others can find them."""
        limit = len(seq.sample.prompt_ids) - 1
        before = seq.num_computed_tokens
        seq.num_computed_tokens += num_tokens
        if self.states is not None:
            self.states.advance(seq)
        if before < limit <= seq.num_computed_tokens:
            self.commit_prompt(seq)
        else:
            self.commit(seq)
        needed = seq.num_computed_tokens // self.block_size + 1
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if len(table) > needed:  # for drafts that were rejected
                group.pool.free(table[needed:])
                del table[needed:]
            if group.layout.window:
                group.trim(table, group.layout.first_kept(before), group.layout.first_kept(seq.num_computed_tokens))

    def chunk(self, seq: Sequence, count: int) -> int:
        """Tokens, of `count`, for the next pass: with states, a prompt that is to be shared is computed up to where
        its state is kept."""
        limit = len(seq.sample.prompt_ids) - 1
        if self.states is None or not self.prefix_caching or seq.num_computed_tokens >= limit:
            return count
        return min(count, limit - seq.num_computed_tokens)

    def commit(self, seq: Sequence) -> None:
        """Registers what has been computed since the last call, for other sequences to find."""
        if not self.prefix_caching or self._made_by[seq] != self.fingerprint:
            return
        hashes, size = self._hashes[seq], self.block_size
        while (len(hashes) + 1) * size <= seq.num_computed_tokens:
            i = len(hashes)
            parent = hashes[-1] if hashes else self._root
            key = chain_hash(parent, seq.token_ids[i * size : (i + 1) * size])
            self._register(seq, i, key, size)
            hashes.append(key)

    def commit_prompt(self, seq: Sequence) -> None:
        """Call once when a prompt is computed: its partly filled last block becomes findable too (siblings copy it)."""
        self.commit(seq)
        limit, size = len(seq.sample.prompt_ids) - 1, self.block_size
        full = limit // size
        own = self._made_by[seq] == self.fingerprint
        if not self.prefix_caching or not own or seq.num_computed_tokens < limit or limit == 0:
            return
        key = self._hashes[seq][full - 1] if full else self._root
        if limit % size:
            key = _tail_hash(key, seq.token_ids[full * size : limit])
            self._register(seq, full, key, limit % size)
        if self.states is not None and seq.num_computed_tokens == limit:
            self.states.keep(seq, key)

    def _register(self, seq: Sequence, place: int, key: BlockHash, num_tokens: int) -> None:
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if table[place] != NONE:
                group.pool.register(key, table[place], num_tokens)

    def release(self, seq: Sequence) -> None:
        """Gives the blocks back; committed ones stay findable until their memory is needed."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            group.release(table)
        seq.block_tables.clear()
        if self.states is not None:
            self.states.release(seq)
        seq.num_computed_tokens = 0
        del self._hashes[seq], self._made_by[seq]

    def save(self, seq: Sequence, *, wait: bool = True) -> Snapshot | None:
        """A copy of the computed KV and state in the lower tiers. The samples of a group share the part that holds the
        full blocks of their prompt (where no window cuts it). None if nothing is computed, or if there is no room
        (wait: for writes to make some)."""
        n = seq.num_computed_tokens
        if n == 0:
            return None
        total = -(-n // self.block_size)
        shared = min(len(seq.sample.prompt_ids), n) // self.block_size
        if not self.prefix_caching or self._made_by[seq] != self.fingerprint:  # siblings' may be of other weights
            shared = 0
        parts = []
        for i, layout in enumerate(self.layouts):
            if layout.kind == "state":
                runs = [(0, 1)]
            elif layout.window:
                runs = [(layout.first_kept(n), total)]
            else:
                runs = [(0, shared), (shared, total)]
            for first, last in runs:
                if first < last:
                    is_shared = last == shared and layout.kind != "state" and not layout.window
                    part = self._save_part(seq, self._header(seq, i, first, last, is_shared), wait)
                    if part is None:
                        return None
                    parts.append(part)
        digest = token_digest(seq.token_ids[:n])
        return Snapshot(seq.sample.id, self._made_by[seq], self.layouts, n, digest, tuple(parts))

    def _save_part(self, seq: Sequence, header: PartHeader, wait: bool) -> Part | None:
        cap = seq.sample.params.max_tokens
        remaining = max(cap - len(seq.sample.output_ids), 0) if cap is not None else 1 << 30

        def fill(out: Mapping[str, torch.Tensor]) -> None:
            if header.layout.kind == "state":
                assert self.states is not None
                self.states.save(seq, out["state"][0])
            else:
                blocks = seq.block_tables[header.group][header.first_block : header.last_block]
                encode(self.groups[header.group].cache, blocks, header.layout, out)

        return self.tiers.put(header, fill, shared=not header.sample_id, remaining=remaining, wait=wait)

    def _header(self, seq: Sequence, group: int, first: int, last: int, shared: bool) -> PartHeader:
        num_tokens = last * self.block_size if shared else seq.num_computed_tokens
        layout = self.layouts[group]
        return PartHeader(
            sample_id="" if shared else seq.sample.id,
            fingerprint=self.fingerprint if shared else self._made_by[seq],
            group=group,
            layout=layout,
            dtype=self._dtype,
            first_block=first,
            num_blocks=last - first,
            num_tokens=num_tokens,
            digest=token_digest(seq.token_ids[:num_tokens]).hex(),
            encoding=encoding_of(layout, self.encoding),
        )

    def can_use(self, snapshot: Snapshot) -> bool:
        """Whether the present weights made it, and only with such loss as the settings ask for."""
        if snapshot.is_exact and snapshot.fingerprint == self.fingerprint:
            return True
        return self.encoding != "exact" and snapshot.fingerprint in (self.fingerprint, approximate(self.fingerprint))

    def restore(self, seq: Sequence, snapshot: Snapshot) -> bool:
        """Brings an attached sequence up to the snapshot's tokens; what it found by prefix is kept, not rewritten.
        False, with nothing changed, if a pool is exhausted. SnapshotMismatch if it is not this sequence's, or if its
        data are lost; then nothing is changed either. Whose weights made it is the caller's to ask (`can_use`)."""
        snapshot.check(seq.sample.id, seq.token_ids, self.layouts, self._dtype)
        n = snapshot.num_tokens
        if min(n, seq.num_tokens - 1) <= seq.num_computed_tokens:  # a found tail is not rewritten
            return True
        found, covered = divmod(seq.num_computed_tokens, self.block_size)
        last = -(-n // self.block_size)
        firsts = [group.layout.first_kept(n) for group in self.groups]
        if any(
            last - max(len(table), first) > group.pool.num_free  # before anything is loaded
            for group, table, first in zip(self.groups, seq.block_tables, firsts, strict=True)
        ):
            return False
        loaded = []
        for part in snapshot.parts:
            i, start = part.header.group, part.header.first_block
            if part.header.layout.kind == "state":
                loaded.append((i, 0, 1, part.tiers.load(part)["state"]))
                continue
            low, high = max(found, start), min(last, part.header.last_block)
            if low < high:
                data = decode(part.tiers.load(part), part.header.layout, low - start, high - start)
                loaded.append((i, low, high, data))
        skipped = [max(first - len(t), 0) for first, t in zip(firsts, seq.block_tables, strict=True)]
        for table, count in zip(seq.block_tables, skipped, strict=True):
            table.extend([NONE] * count)  # before the window: neither loaded nor allocated
        if not self.reserve(seq, n):
            for table, count in zip(seq.block_tables, skipped, strict=True):
                del table[len(table) - count :]
            return False
        for i, low, high, data in loaded:
            if i < len(self.groups):
                self.groups[i].write(seq.block_tables[i], low, high, data, keep=covered if low == found else 0)
            else:
                assert self.states is not None
                self.states.restore(seq, data[0])
        seq.num_computed_tokens = n
        made_by = snapshot.fingerprint if snapshot.is_exact else approximate(snapshot.fingerprint)
        if self.can_use(snapshot):
            self._made_by[seq] = made_by  # if approximate, no other sequence may find it
        else:
            self._made_by[seq] = mixed(made_by, self.fingerprint)
        for group, table, first in zip(self.groups, seq.block_tables, firsts, strict=True):
            group.trim(table, 0, first)  # before the commit: a found tail before the window was not filled up
        self.commit(seq)
        return True

    def saved_prompt(self, seq: Sequence) -> Snapshot | None:
        """A snapshot of a sequence's prompt that a sibling left in the lower tiers, if it holds more than the device
        has. The sequence need not be attached. None if a layer needs more than the blocks of the prompt."""
        whole = len(seq.sample.prompt_ids) // self.block_size
        blocks = min(whole, (seq.num_tokens - 1) // self.block_size)
        if not self.prefix_caching or self.encoding != "exact" or blocks == 0:
            return None
        if self.states is not None or any(layout.window for layout in self.layouts):
            return None
        if len(self._found_prefix(seq.token_ids[: blocks * self.block_size])) >= blocks:
            return None
        parts = []
        for i in range(len(self.groups)):
            part = self.tiers.find(self._header(seq, i, 0, whole, shared=True))
            if part is None:
                return None
            parts.append(part)
        num_tokens = blocks * self.block_size
        digest = token_digest(seq.token_ids[:num_tokens])
        return Snapshot(seq.sample.id, self.fingerprint, self.layouts, num_tokens, digest, tuple(parts))

    def _found_prefix(self, token_ids: list[int]) -> list[BlockHash]:
        """Keys of the longest prefix of whole blocks of which every group has what it needs."""
        keys: list[BlockHash] = []
        parent, size = self._root, self.block_size
        unlimited = [group.pool for group in self.groups if not group.layout.window]
        limited = [group for group in self.groups if group.layout.window]
        for start in range(0, len(token_ids) - size + 1, size):
            parent = chain_hash(parent, token_ids[start : start + size])
            if any(pool.find(parent) is None for pool in unlimited):
                break
            keys.append(parent)
        runs = [_runs([group.pool.find(key) is not None for key in keys]) for group in limited]
        for count in range(len(keys), 0, -1):
            end = count * size
            if all(run[count - 1] >= count - g.layout.first_kept(end) for g, run in zip(limited, runs, strict=True)):
                return keys[:count]
        return []

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """New weights: nothing made by the old ones is found from here on. Held sequences keep their blocks (the
        caller releases them, or keeps older KV by choice), but those are no longer offered to others."""
        self.fingerprint = fingerprint
        self._root = root_hash(fingerprint)
        self.forget_all()
        for seq, made_by in self._made_by.items():
            self._made_by[seq] = mixed(made_by, fingerprint)

    def forget_all(self) -> None:
        """Empties the prefix index."""
        for group in self.groups:
            group.pool.forget_all()
        if self.states is not None:
            self.states.forget_all()

    def slots(self, seq: Sequence, start: int, stop: int, group: int = 0) -> list[int]:
        """Slot of each position start .. stop-1 in a group."""
        size, table = self.block_size, seq.block_tables[group]
        return [table[p // size] * size + p % size for p in range(start, stop)]

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """AssertionError unless blocks and slots balance and exactly these sequences hold them."""
        held = list(sequences)
        assert set(held) == set(self._hashes), "sequences that hold blocks differ from those that run"
        for seq in held:
            assert seq.num_computed_tokens <= seq.num_tokens, seq.sample.id
            for group, table in zip(self.groups, seq.block_tables, strict=True):
                assert len(table) * self.block_size >= seq.num_computed_tokens, seq.sample.id
                first = group.layout.first_kept(seq.num_computed_tokens)
                assert all((block == NONE) == (i < first) for i, block in enumerate(table)), (seq.sample.id, table)
        for i, group in enumerate(self.groups):
            group.pool.check_integrity([[b for b in seq.block_tables[i] if b != NONE] for seq in held])
        if self.states is not None:
            self.states.check_integrity(held)


def _runs(present: list[bool]) -> list[int]:
    """How many in a row are present, up to and including each."""
    out, run = [], 0
    for one in present:
        run = run + 1 if one else 0
        out.append(run)
    return out


def _tail_hash(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    """Key of a partly filled block; the marker keeps it apart from full ones."""
    return chain_hash(BlockHash(parent + b"tail"), token_ids)


def approximate(fingerprint: Fingerprint) -> Fingerprint:
    """Fingerprint of KV that is not quite what these weights made: a snapshot compressed with loss, and what was
    computed on it."""
    return Fingerprint(fingerprint.removesuffix("~") + "~")


def mixed(older: Fingerprint, newer: Fingerprint) -> Fingerprint:
    """Fingerprint of KV that several weights made: equal to that of none of them."""
    return Fingerprint(f"{older}+{newer}")
