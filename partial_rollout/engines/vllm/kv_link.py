"""Saved KV between a vLLM engine and its connector (`connector.py`), which live in one process.

    pause    engine: save: blocks are copied to the tiers -> Snapshot; then vLLM aborts the request -> leave
    resume   engine: offer -> vLLM schedules the request -> connector: find (verified, in host memory), admit
             -> load (into the request's blocks, before the forward pass) -> engine: admission

The link owns what samples in the engine bring along; the tiers own the bytes. It has no vLLM in it.

A snapshot is verified (its tokens, layout, weights; the checksums of its files) and brought to host memory before vLLM
is told that its tokens need no computing. So nothing can go wrong after that: what is refused is recomputed by vLLM,
and the admission says why.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

import torch

from longtail.errors import SnapshotMismatch
from longtail.kv_manager.encoding import Encoding, decode, encoding_of
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.manager import approximate, mixed
from longtail.kv_manager.part import Part
from longtail.kv_manager.snapshot import Snapshot, token_digest
from longtail.kv_manager.snapshot_file import PartHeader
from longtail.kv_manager.tiers import Tiers
from longtail.sample import KVSource, Sample
from longtail.version import Fingerprint

CONNECTOR = "longtail.partial_rollout.engines.vllm.connector"
PARAMETER = "longtail_sample"
"""In a request's kv_transfer_params: the id of its sample."""
SNAPSHOT = "longtail_snapshot"
"""There too, on the way to another process: its snapshot, packed."""
AHEAD = 8
"""So many waiting samples that have saved KV get it brought to host memory before vLLM asks for it."""

_LINKS: weakref.WeakValueDictionary[str, KVLink] = weakref.WeakValueDictionary()


class DeviceKV(Protocol):
    """The KV caches of an engine, in kv_manager's layout (`kv_cache.py`)."""

    @property
    def layout(self) -> Layout: ...

    @property
    def dtype(self) -> str: ...

    def blocks_of(self, table: SequenceOf[int]) -> list[int]:
        """The blocks, as the layout has them, of a request's block table."""
        ...

    def read(self, blocks: list[int], out: Mapping[str, torch.Tensor]) -> None:
        """Copies blocks into tensors of `encoded_shapes`."""
        ...

    def write(self, blocks: list[int], data: torch.Tensor) -> None:
        """data: [blocks, *layout.block_shape]."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """A request has been given blocks."""

    num_known_tokens: int
    num_cached_tokens: int
    """Found in vLLM's prefix cache."""
    num_restored_tokens: int
    """Brought by the snapshot, beyond these."""
    kv: KVSource
    """What the segments of tokens made from here on record."""
    refused: str | None
    """Why there was a snapshot and it was not used."""
    seconds: float
    """That reading and verifying it took."""


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """A sample in the engine."""

    sample: Sample
    snapshot: Snapshot | None
    salt: str = ""
    """If its snapshot is to be used and is not quite what the present weights make: what keeps its blocks its own."""
    pinned: bool = False
    data: list[tuple[Part, Mapping[str, torch.Tensor]]] | None = None
    """Of the snapshot, verified and pinned: from `find` to `load`."""
    refused: str | None = None
    seconds: float = 0.0
    found: tuple[int, int] = (0, 0)
    """At the last `find`: tokens in the prefix cache, and known ones."""
    made_by: Fingerprint | None = None
    """The weights that made what it has on the device; None: it has no blocks."""
    admission: Admission | None = None


class KVLink:
    """tiers: where saved KV goes. encoding: how (`kv_manager/encoding.py`). keep_older: use KV that other weights made
    (`kv_on_update="keep"`). fingerprint: of the present weights and the engine's arithmetic.

    `config()` is vLLM's kv_transfer_config; make the engine with it, and keep the link as long as the engine lives.
    Not for several threads at once: calls come from the engine's own thread, or under its lock."""

    def __init__(
        self,
        tiers: Tiers,
        fingerprint: Fingerprint,
        *,
        encoding: Encoding = "exact",
        keep_older: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        name: str | None = None,
    ) -> None:
        self.tiers, self.encoding, self.keep_older, self.now = tiers, encoding, keep_older, clock
        self.fingerprint = fingerprint
        self.name = name or uuid.uuid4().hex
        self.unavailable: str | None = "no vLLM engine has been made with this link's config()"
        """Why no KV can be saved or loaded; None: it can."""
        self.device: DeviceKV | None = None
        self._numbers = itertools.count()
        self._entries: dict[str, _Entry] = {}
        _LINKS[self.name] = self

    def config(self) -> dict[str, Any]:
        return {
            "kv_connector": "LongtailConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"link": self.name},
        }

    # -- the engine's side ---------------------------------------------------------------------------------------------

    def offer(self, sample: Sample, refused: str | None = None) -> dict[str, Any]:
        """A sample is about to become a request. -> its kv_transfer_params. Its snapshot is used if it can be. refused:
        why it had one and has it no more."""
        assert sample.id not in self._entries, sample.id
        snapshot = sample.snapshot
        self._entries[sample.id] = entry = _Entry(sample, snapshot, refused=refused)
        is_plain = snapshot is None or (snapshot.is_exact and snapshot.fingerprint == self.fingerprint)
        if not is_plain and self._can_use(snapshot):
            entry.salt = f"{sample.id}.{next(self._numbers)}"
        return {PARAMETER: sample.id}

    def salt(self, sample_id: str) -> str:
        """For the request's cache_salt, beside what the engine puts there: KV that is not what the present weights
        make is found by no other request."""
        return self._entries[sample_id].salt

    def admission(self, sample_id: str) -> Admission:
        """The last one: of a request that vLLM has given blocks."""
        admission = self._entries[sample_id].admission
        assert admission is not None, sample_id
        return admission

    def save(self, sample: Sample, table: SequenceOf[int], num_tokens: int) -> Snapshot | None:
        """A copy of the KV of a request's first `num_tokens` tokens, between two steps, before it is aborted. The
        samples of a group share the part that holds the full blocks of their prompt. table: the request's blocks, as
        vLLM counts them. None if nothing is computed, or if there is no room."""
        made_by, device = self._entries[sample.id].made_by, self.device
        if device is None or made_by is None or num_tokens == 0:
            return None
        blocks = device.blocks_of(table)
        layout, size = device.layout, device.layout.block_size
        token_ids = [*sample.prompt_ids, *sample.output_ids][:num_tokens]  # without what came behind a stop
        num_tokens = len(token_ids)
        total = -(-num_tokens // size)
        if len(blocks) < total:  # vLLM has ended the request itself
            return None
        shared = min(len(sample.prompt_ids), num_tokens) // size if made_by == self.fingerprint else 0
        cap = sample.params.max_tokens
        remaining = max(cap - len(sample.output_ids), 0) if cap is not None else 1 << 30
        self._yield_room()
        parts = []
        for first, last in ((0, shared), (shared, total)):
            if first == last:
                continue
            end = min(last * size, num_tokens)
            header = PartHeader(
                sample_id="" if last == shared else sample.id,
                fingerprint=made_by,
                group=0,
                layout=layout,
                dtype=device.dtype,
                first_block=first,
                num_blocks=last - first,
                num_tokens=end,
                digest=token_digest(token_ids[:end]).hex(),
                encoding=encoding_of(layout, self.encoding),
            )
            fill = functools.partial(device.read, blocks[first:last])
            part = self.tiers.put(header, fill, shared=last == shared, remaining=remaining)
            if part is None:
                return None
            parts.append(part)
        return Snapshot(sample.id, made_by, (layout,), num_tokens, token_digest(token_ids), tuple(parts))

    def leave(self, sample_id: str) -> None:
        """Its request has ended."""
        self._unpin(self._entries.pop(sample_id))

    def weights_updated(self, fingerprint: Fingerprint) -> None:
        """What runs goes on with KV of several weights, unless the engine has it computed again (it is given blocks
        anew then)."""
        self.fingerprint = fingerprint
        for entry in self._entries.values():
            if entry.made_by is not None:
                entry.made_by = mixed(entry.made_by, fingerprint)

    def check_integrity(self, sample_ids: SequenceOf[str]) -> None:
        """AssertionError unless exactly these samples are in the engine, and nothing but waiting ones holds data."""
        assert set(self._entries) == set(sample_ids), set(self._entries) ^ set(sample_ids)
        for sample_id, entry in self._entries.items():
            assert entry.made_by is None or (entry.data is None and entry.snapshot is None), sample_id
        self.tiers.check_integrity()

    # -- the connector's side ------------------------------------------------------------------------------------------

    def find(self, sample_id: str, token_ids: SequenceOf[int], num_cached_tokens: int, *, wait: bool) -> int | None:
        """Tokens beyond the cached ones that the sample's snapshot brings; at least one of `token_ids` is left to
        compute. None: not known yet, ask again (wait: never that). Changes nothing that a second call would find
        changed."""
        entry = self._entries.get(sample_id)
        if entry is None:
            return 0
        entry.found = num_cached_tokens, len(token_ids)
        if entry.snapshot is None:
            return 0
        start = self.now()
        ready = self._prepare(entry, entry.snapshot, token_ids, wait)
        entry.seconds += self.now() - start
        if not ready:
            return None
        if entry.refused is not None:
            return 0
        return max(min(entry.snapshot.num_tokens, len(token_ids) - 1) - num_cached_tokens, 0)

    def refuse(self, sample_id: str, why: str) -> None:
        """The sample's snapshot, if it has one, will not be used."""
        entry = self._entries.get(sample_id)
        if entry is not None and entry.snapshot is not None:
            self._refuse(entry, why)

    def admit(self, sample_id: str, num_loaded_tokens: int) -> None:
        """The request has got its blocks; so many tokens will be loaded into them (`load`, before the next pass)."""
        entry = self._entries.get(sample_id)
        if entry is None:
            return
        snapshot, (cached, known) = entry.snapshot, entry.found
        kv: KVSource = "recomputed" if entry.sample.output_ids else "computed"
        if entry.made_by not in (None, self.fingerprint) and cached:  # preempted, and a part of its KV found again
            kv = "approximate" if entry.made_by == approximate(self.fingerprint) else "kept"
        else:
            entry.made_by = self.fingerprint
        if snapshot is not None and entry.refused is None:
            if num_loaded_tokens == 0:  # the device had all of it
                kv = "restored"
            elif not self._is_of_present_weights(snapshot):
                kv, entry.made_by = "kept", mixed(snapshot.fingerprint, self.fingerprint)
            elif snapshot.is_exact:
                kv = "restored"
            else:
                kv, entry.made_by = "approximate", approximate(self.fingerprint)
        if num_loaded_tokens == 0:
            self._release(entry)
        entry.admission = Admission(known, cached, num_loaded_tokens, kv, entry.refused, entry.seconds)
        entry.seconds, entry.refused = 0.0, None

    def load(self, sample_id: str, table: SequenceOf[int], num_cached_tokens: int, num_tokens: int) -> None:
        """Writes the snapshot into the request's blocks, behind those of cached tokens, up to token `num_tokens`.
        table: all of the request's blocks, as vLLM counts them."""
        entry, device = self._entries[sample_id], self.device
        assert entry.data is not None and device is not None, sample_id
        layout, blocks = device.layout, device.blocks_of(table)
        first, last = num_cached_tokens // layout.block_size, -(-num_tokens // layout.block_size)
        for part, tensors in entry.data:
            low, high = max(first, part.header.first_block), min(last, part.header.last_block)
            if low < high:
                start = part.header.first_block
                device.write(blocks[low:high], decode(tensors, layout, low - start, high - start))
        self._release(entry)

    def prefetch(self) -> None:
        """Brings what the next waiting samples need to host memory, in a thread."""
        waiting = [(e, e.snapshot) for e in self._entries.values() if e.snapshot is not None and e.snapshot.parts]
        for entry, snapshot in waiting[:AHEAD]:
            if not entry.pinned and entry.data is None and entry.refused is None and self._can_use(snapshot):
                entry.pinned = snapshot.parts[0].tiers.prefetch(snapshot.parts)
                if not entry.pinned:
                    return

    # -- what only this class does -------------------------------------------------------------------------------------

    def _is_of_present_weights(self, snapshot: Snapshot) -> bool:
        return snapshot.fingerprint in (self.fingerprint, approximate(self.fingerprint))

    def _can_use(self, snapshot: Snapshot) -> bool:
        """Whether the present weights made it, and only with such loss as the settings ask for; or older ones did and
        the user chose so."""
        lossy = not snapshot.is_exact or snapshot.fingerprint == approximate(self.fingerprint)
        if lossy and self.encoding == "exact":
            return False
        return self._is_of_present_weights(snapshot) or self.keep_older

    def _prepare(self, entry: _Entry, snapshot: Snapshot, token_ids: SequenceOf[int], wait: bool) -> bool:
        """Brings the snapshot to host memory, or finds out why it cannot be used. -> whether that is settled."""
        sample_id = entry.sample.id
        if entry.refused is not None:
            return True
        if not self._can_use(snapshot):
            what = "of other weights" if snapshot.is_exact else "of other weights, or less exact than the settings ask"
            return self._refuse(entry, f"saved KV of {sample_id} is {what}")
        if not self._is_of_present_weights(snapshot) and not entry.salt:
            return self._refuse(entry, f"saved KV of {sample_id} is of weights that were updated while it waited")
        if self.device is None:
            return self._refuse(entry, f"saved KV cannot be used: {self.unavailable}")
        if entry.data is not None:
            return True
        try:
            snapshot.check(sample_id, list(token_ids), (self.device.layout,), self.device.dtype)
            if not self._ready(entry, snapshot, wait):
                return False
            entry.data = [(part, part.tiers.load(part)) for part in snapshot.parts]
        except SnapshotMismatch as error:
            return self._refuse(entry, str(error))
        return True

    def _ready(self, entry: _Entry, snapshot: Snapshot, wait: bool) -> bool:
        """Whether its parts are in host memory, or known to be lost. wait: until they are."""
        tiers = snapshot.parts[0].tiers
        while True:
            seen, is_working = tiers.changes, tiers.is_working
            if not entry.pinned:
                entry.pinned = tiers.prefetch(snapshot.parts)
            if entry.pinned and all(part.is_ready for part in snapshot.parts):
                return True
            if not entry.pinned and not is_working:  # no room, and none will come of itself
                if not any(other.pinned for other in self._entries.values()):
                    raise SnapshotMismatch(tiers.no_room(snapshot.nbytes))
                if wait:
                    self._yield_room()
                    continue
            if not wait:
                return False
            tiers.wait(seen)

    def _refuse(self, entry: _Entry, why: str) -> bool:
        entry.refused = why
        self._unpin(entry)
        return True

    def _unpin(self, entry: _Entry) -> None:
        if entry.pinned and entry.snapshot is not None:
            entry.snapshot.parts[0].tiers.unpin(entry.snapshot.parts)
            entry.pinned = False

    def _yield_room(self) -> None:
        """What waiting samples will need is on disk, and is read again when their turn comes."""
        for entry in self._entries.values():
            self._unpin(entry)

    def _release(self, entry: _Entry) -> None:
        """The device has it, or will have it computed."""
        self._unpin(entry)
        entry.data = entry.snapshot = None


def link_of(name: Any) -> KVLink:
    """The link of an engine's config. ValueError if it is not in this process."""
    link = _LINKS.get(name) if isinstance(name, str) else None
    if link is None:
        raise ValueError(
            f"kv_connector_extra_config: link is {name!r}, and there is no such KVLink in this process; pass "
            "KVLink.config() as kv_transfer_config, keep the link, and set VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    return link
