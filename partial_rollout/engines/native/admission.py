"""How a waiting sequence gets its KV: from the prefix cache, from its snapshot, or from a sibling's saved prompt."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable

from longtail.errors import SnapshotMismatch
from longtail.kv_manager.manager import KVManager
from longtail.kv_manager.part import Part
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tiers import Tiers
from longtail.sequence import Sequence

AHEAD = 8
"""So many of the waiting sequences that have saved KV get it brought to host memory before they are admitted."""


class Admission:
    """Owns what waiting sequences hold and want in the lower tiers.

    keep_older: use KV that older weights made (`kv_on_update="keep"`)."""

    def __init__(self, kv: KVManager, now: Callable[[], float], keep_older: bool) -> None:
        self.kv = kv
        self.now = now
        self.keep_older = keep_older
        self._wanted: OrderedDict[Sequence, tuple[Part, ...]] = OrderedDict()
        """Parts that waiting sequences will need, in the order of admission."""
        self._pinned: set[Sequence] = set()
        """Of these sequences, those whose parts are in host memory or on their way to it, all of them."""
        self._refused: dict[Sequence, str] = {}
        """Those for whose parts there will never be room, and why."""

    # -- ahead of admission -------------------------------------------------------------------------------------------

    def arrive(self, seq: Sequence, *, first: bool = False) -> None:
        """A sequence starts to wait."""
        saved = seq.sample.snapshot
        if saved is None or not self._can_use(saved):
            saved = self.kv.saved_prompt(seq)
        if saved is not None and saved.parts:
            self._wanted[seq] = saved.parts
            self._wanted.move_to_end(seq, last=not first)

    def leave(self, seq: Sequence) -> None:
        """It does not wait any more."""
        parts = self._wanted.pop(seq, ())
        self._refused.pop(seq, None)
        if seq in self._pinned:
            self._pinned.remove(seq)
            parts[0].tiers.unpin(parts)

    def restart(self, waiting: Iterable[Sequence]) -> None:
        """After an update of the weights: what they saved may be of no use now, or of use again."""
        for seq in list(self._wanted):
            self.leave(seq)
        for seq in waiting:
            self.arrive(seq)

    def prefetch(self) -> None:
        """Brings what the next sequences need to host memory, in order and in a thread. All parts of a sequence or
        none, so that they never wait for each other."""
        ahead = 0
        for seq, parts in self._wanted.items():
            if ahead == AHEAD:
                break
            ahead += 1
            if seq in self._pinned or seq in self._refused:
                continue
            tiers = parts[0].tiers
            is_working = tiers.is_working  # before, so that no room made in between is missed
            if tiers.prefetch(parts):
                self._pinned.add(seq)
            elif self._pinned or is_working:
                break  # there will be room
            else:
                self._refused[seq] = tiers.no_room(sum(part.nbytes for part in parts))

    def yield_room(self) -> None:
        """A sequence that is to be saved needs the room more than those that wait: what they will need is on disk. The
        next `prefetch` pins again what is still there, and reads the rest."""
        for seq in self._pinned:
            parts = self._wanted[seq]
            parts[0].tiers.unpin(parts)
        self._pinned.clear()

    def is_ready(self, seq: Sequence) -> bool:
        """Whether `attach` will not wait for the disk."""
        return seq in self._refused or all(part.is_ready for part in self._wanted.get(seq, ()))

    def progress(self) -> list[tuple[Tiers, int]]:
        """The tiers that it waits for (a snapshot that another engine made lies in that engine's), as they are now."""
        return [(tiers, tiers.changes) for tiers in {self.kv.tiers, *(p[0].tiers for p in self._wanted.values())}]

    # -- admission ----------------------------------------------------------------------------------------------------

    def attach(self, seq: Sequence) -> bool:
        """Gives a waiting sequence its KV. False if blocks are short. Changes nothing but the sequence and the pool, so
        that it can be taken back (`kv.release`) and tried again."""
        self.kv.attach(seq)
        seq.num_cached_tokens = seq.num_computed_tokens
        seq.num_restored_tokens, seq.restore_seconds = 0, 0.0
        seq.kv = "recomputed" if seq.sample.output_ids else "computed"
        seq.refused = None
        snapshot = seq.sample.snapshot
        if snapshot is None:
            return self._attach_prompt(seq)
        if not self._can_use(snapshot):
            what = "of other weights" if snapshot.is_exact else "of other weights, or less exact than the settings ask"
            seq.refused = f"saved KV of {seq.sample.id} is {what}"
        elif seq in self._refused:
            seq.refused = self._refused[seq]
        if seq.refused is not None:
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
        if seq.num_restored_tokens == 0 or self.kv.can_use(snapshot):
            seq.kv = "restored" if seq.num_restored_tokens == 0 or snapshot.is_exact else "approximate"
        else:
            seq.kv = "kept"
        return True

    def _attach_prompt(self, seq: Sequence) -> bool:
        """Takes the prompt's KV from a snapshot of a sibling, if there is one and it is in memory."""
        prompt = self.kv.saved_prompt(seq)
        if prompt is not None and all(part.in_memory for part in prompt.parts):
            with contextlib.suppress(SnapshotMismatch):
                if not self.kv.restore(seq, prompt):
                    self.kv.release(seq)
                    return False
                seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def _can_use(self, snapshot: Snapshot) -> bool:
        older = self.keep_older and (snapshot.is_exact or self.kv.encoding != "exact")
        return older or self.kv.can_use(snapshot)

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """AssertionError unless only waiting sequences want anything of the lower tiers."""
        assert set(self._wanted) <= set(waiting), "a sequence that does not wait wants its snapshot"
        assert self._pinned <= set(self._wanted) and set(self._refused) <= set(self._wanted)
        self.kv.tiers.check_integrity()
