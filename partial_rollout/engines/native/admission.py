"""How a waiting sequence gets its KV: from the prefix cache, from its snapshot, or from a sibling's saved prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from longtail.errors import SnapshotMismatch
from longtail.kv_manager.manager import KVManager
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tiers import Part
from longtail.sequence import Sequence


class Admission:
    """Owns the pins on what waiting sequences have saved.

    keep_older: use KV that older weights made (`kv_on_update="keep"`)."""

    def __init__(self, kv: KVManager, now: Callable[[], float], keep_older: bool) -> None:
        self.kv = kv
        self.now = now
        self.keep_older = keep_older
        self._pinned: dict[Sequence, tuple[Part, ...]] = {}

    def pin(self, seq: Sequence) -> None:
        """A sequence starts to wait: its snapshot comes to host memory and stays there until it is restored."""
        snapshot = seq.sample.snapshot
        if snapshot is not None and self._usable(snapshot):
            self._pinned[seq] = snapshot.parts
            self.kv.tiers.pin(snapshot.parts)

    def unpin(self, seq: Sequence) -> None:
        """It does not wait any more."""
        self.kv.tiers.unpin(self._pinned.pop(seq, ()))

    def repin(self, waiting: Iterable[Sequence]) -> None:
        """After an update of the weights: what they saved may be of no use now, or of use again."""
        for seq in waiting:
            self.unpin(seq)
            self.pin(seq)

    def is_ready(self, seq: Sequence) -> bool:
        return self.kv.tiers.is_ready(self._pinned.get(seq, ()))

    def wait(self) -> bool:
        """Until every pinned snapshot is in memory. False if there is none."""
        for parts in self._pinned.values():
            self.kv.tiers.wait(parts)
        return bool(self._pinned)

    def attach(self, seq: Sequence) -> bool:
        """Gives a waiting sequence its KV. False if blocks are short. Changes nothing but the sequence and the pool, so
        that it can be taken back (`kv.release`) and tried again."""
        self.kv.attach(seq)
        seq.num_cached_tokens = seq.num_computed_tokens
        seq.num_restored_tokens, seq.restore_seconds = 0, 0.0
        seq.kv = "recomputed" if seq.sample.output_ids else "computed"
        seq.refused = None
        snapshot = seq.sample.snapshot
        if snapshot is None or not self._usable(snapshot):
            return self._attach_prompt(seq)
        start = self.now()
        try:
            restored = self.kv.restore(seq, snapshot)
        except SnapshotMismatch as error:
            seq.refused = str(error)
            return self._attach_prompt(seq)
        seq.restore_seconds = self.now() - start
        if not restored:
            self.kv.release(seq)
            return False
        seq.num_restored_tokens = seq.num_computed_tokens - seq.num_cached_tokens
        if snapshot.fingerprint != self.kv.fingerprint:
            seq.kv = "kept"
        else:
            seq.kv = "restored" if snapshot.is_exact else "approximate"
        return True

    def _attach_prompt(self, seq: Sequence) -> bool:
        """Takes the prompt's KV from a snapshot of a sibling, if there is one and it is in memory."""
        prompt = self.kv.saved_prompt(seq)
        if prompt is not None and self.kv.tiers.is_ready(prompt.parts):
            with contextlib.suppress(SnapshotMismatch):
                if not self.kv.restore(seq, prompt):
                    self.kv.release(seq)
                    return False
                seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def _usable(self, snapshot: Snapshot) -> bool:
        return snapshot.fingerprint == self.kv.fingerprint or self.keep_older

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """AssertionError unless only waiting sequences pin anything."""
        assert set(self._pinned) <= set(waiting), "a sequence that does not wait pins its snapshot"
