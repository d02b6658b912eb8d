"""What all engines do alike: who is in one, and what its calls ask of their arguments."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol, TypeVar

from longtail.events import Listener
from longtail.partial_rollout.engine import EngineStats
from longtail.sample import FinishReason, Sample
from longtail.version import PolicyVersion, check_version


class HasSample(Protocol):
    sample: Sample


class Tells(Protocol):
    """A journal: what an engine tells of its work."""

    listener: Listener
    counts: dict[str, int]

    def telling(self) -> AbstractContextManager[None]: ...


S = TypeVar("S", bound=HasSample)
T = TypeVar("T")


def check_absent(sample: Sample, inside: Container[str]) -> None:
    """inside: ids of the samples in the engine."""
    if sample.id in inside:
        raise ValueError(f"sample {sample.id} is already in the engine; pause or abort it first")


def check_distinct(batch: Sequence[Sample]) -> None:
    if len(batch) > 1 and len({s.id for s in batch}) < len(batch):
        raise ValueError("samples: two samples have the same id; every sample needs its own")


def find(inside: Mapping[str, T], sample_id: str) -> T:
    """What the engine has of a sample."""
    if sample_id not in inside:
        raise ValueError(f"sample_ids: {sample_id!r} is not in the engine (finished, paused, or never added)")
    return inside[sample_id]


class EngineBase(Generic[S]):
    """Owns who is in an engine, the version and the lock. Subclasses say what it is to end one."""

    def __init__(self, name: str, version: int, journal: Tells) -> None:
        check_version(version)
        self.name = name
        self._version = PolicyVersion(version)
        self._journal = journal
        self._sequences: dict[str, S] = {}
        """What is in it, by sample, in the order in which it came."""
        self._lock = threading.RLock()

    @property
    def listener(self) -> Listener:
        return self._journal.listener

    @listener.setter
    def listener(self, listener: Listener) -> None:
        self._journal.listener = listener

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        with self._lock, self._journal.telling():
            ending = [find(self._sequences, i) for i in dict.fromkeys(sample_ids)]
            with self._between_passes():
                still = self._still_here(ending)
                for seq in still:
                    self._finish(seq, reason)
                    self._forget(seq.sample)
            return [seq.sample for seq in still]

    def _between_passes(self) -> AbstractContextManager[None]:
        """No pass is made meanwhile, and those made before are in the samples: which may have ended by that."""
        return nullcontext()

    def _still_here(self, sequences: Iterable[S]) -> list[S]:
        return [seq for seq in sequences if self._sequences.get(seq.sample.id) is seq]

    def _finish(self, seq: S, reason: FinishReason) -> None:
        raise NotImplementedError

    def _forget(self, sample: Sample) -> None:
        """It will not come back, or not as it was."""

    def _stats(self, num_running: int, num_free_blocks: int, num_blocks: int) -> EngineStats:
        c = self._journal.counts
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            num_free_blocks=num_free_blocks,
            num_blocks=num_blocks,
            num_steps=c["steps"],
            num_output_tokens=c["output"],
            num_recomputed_tokens=c["recomputed"],
            num_restored_tokens=c["restored"],
            num_cached_tokens=c["cached"],
            num_preemptions=c["preemptions"],
            num_draft_tokens=c["drafted"],
            num_accepted_tokens=c["accepted"],
            num_overrun_tokens=c["overrun"],
        )
