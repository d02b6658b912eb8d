"""What engines that run a model do alike, whoever computes: the native one and vLLM.

    add -> waiting -> [admitted] -> running -> step* -> finished, failed
                ^                     |  |
                +---- [preempted] ----+  +-> pause (with or without KV), or park where a turn ended -> the caller's

A subclass computes, and says how a sequence enters and leaves what it computes with (`_enter`, `_remove`); the records
of the samples, their ends and the events are made here.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from longtail.events import Event, Listener, ignore
from longtail.kv_manager.snapshot import Snapshot
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.engines.base import EngineBase, check_absent, check_distinct, find
from longtail.partial_rollout.engines.journal import Journal
from longtail.partial_rollout.engines.native.sampler import Vocabulary, check_sample, is_full
from longtail.partial_rollout.engines.native.stepper import Outcome
from longtail.partial_rollout.engines.native.stop_text import StopText
from longtail.sample import FinishReason, Sample
from longtail.sequence import Sequence
from longtail.version import PolicyVersion, check_newer

S = TypeVar("S", bound=Sequence)


class ModelEngine(EngineBase[S], abc.ABC):
    """Owns the records of the samples that are in the engine. Thread-safe: calls wait for the step in flight."""

    vocabulary: Vocabulary
    max_model_len: int
    _journal: Journal
    _stop_text: StopText

    def __init__(
        self,
        name: str,
        version: int,
        max_num_seqs: int,
        listener: Listener = ignore,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(name, version, Journal(name, listener, clock))
        self.now = clock
        self._max_num_seqs = max_num_seqs
        self._full: list[S] = []
        """Came with an observation that leaves no room for a token: the next step finishes them."""

    # -- the engine protocol ------------------------------------------------------------------------------------------

    @property
    def num_free_slots(self) -> int:
        return max(self._max_num_seqs - len(self._sequences), 0)

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample."""
        check_absent(sample, self._sequences)
        decode = self._stop_text.decode_of(sample)  # fails now, not in the middle of a run, if there is no tokenizer
        check_sample(sample, self.vocabulary, self.max_model_len, self._version, decode)

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        with self._lock:
            batch = list(samples)
            for sample in batch:
                self.check(sample)
            check_distinct(batch)
            arriving = [self._sequence(sample) for sample in batch]
            for seq in arriving:
                seq.set_limit(limit)
            for seq in arriving:
                sample = seq.sample
                self._sequences[sample.id] = seq
                sample.status = "waiting"
                if full := is_full(sample, self.max_model_len):
                    self._full.append(seq)
                self._enter(seq, full)

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        with self._lock:
            find(self._sequences, sample_id).set_limit(limit)

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """One forward pass over what the scheduler chose: a new token per sequence, with drafts perhaps several.

        If it raises (a listener, an interrupt), samples keep what they had, and the next step continues from there.
        """
        with self._lock:
            with self._journal.telling():
                out = StepOutput(self._version)
                full, self._full = self._full, []
                for seq in self._still_here(full):
                    self._finish(seq, "length")
                    self._forget(seq.sample)
                    out.finished.append(seq.sample)
                self._step(out, refilled)
                out.at_limit = [seq.sample for seq in self._sequences.values() if seq.is_at_limit]
            for sample in out.at_limit:  # the caller will hear of it: no listener has raised
                self._sequences[sample.id].limit = None
            return out

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        with self._lock, self._journal.telling():
            ids = list(self._sequences if sample_ids is None else dict.fromkeys(sample_ids))
            leaving = [find(self._sequences, i) for i in ids]
            with self._between_passes():
                return [self._take_out(seq, "pause", snapshot) for seq in self._still_here(leaving)]

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """weights: a complete state dict of the model as `transformers` names it (a tied LM head may be left out).
        Nothing changes if it does not fit. KV made by older weights is dropped, or, of the samples that run, kept if
        `kv_on_update` says so; no other sample finds it."""
        with self._lock, self._journal.telling():
            check_newer(version, self._version)
            start = self.now()
            with self._between_passes():
                self._update(weights, PolicyVersion(version))
            self._journal.add(Event("update", start, self.now() - start, self.name, value=version))

    # -- what subclasses say ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _sequence(self, sample: Sample) -> S: ...

    @abc.abstractmethod
    def _enter(self, seq: S, is_full: bool) -> None:
        """It waits from now on. is_full: it leaves again before the next pass."""

    @abc.abstractmethod
    def _step(self, out: StepOutput, refilled: bool) -> None:
        """One pass, if there is anything to compute."""

    @abc.abstractmethod
    def _update(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        """Checks the weights, puts them in place, and sets the version."""

    @abc.abstractmethod
    def _saved(self, seq: S, wait: bool) -> Snapshot | None:
        """Its KV, saved; None if there is none, or no room for it. wait: for room."""

    @abc.abstractmethod
    def _remove(self, seq: S) -> None:
        """Out of the engine, whether it runs or waits."""

    def _can_save(self, seq: S) -> bool:
        """Whether it has KV, and there is somewhere to save it."""
        return seq.admitted_at is not None

    # -- admission and leaving ----------------------------------------------------------------------------------------

    def _admitted(self, seq: S, at: float) -> None:
        """The sequence has its slot and its blocks since then, and says what it found computed: records it."""
        sample, took = seq.sample, seq.restore_seconds
        if seq.num_restored_tokens or seq.kv == "restored" or seq.refused is not None:
            detail = "" if seq.refused is None else f"refused: {seq.refused}"
            self._journal.emit(
                "restore", seq, time=at - took, duration=took, num_tokens=seq.num_restored_tokens, detail=detail
            )
        sample.snapshot = None
        counts = self._journal.counts
        if sample.output_ids:
            again = seq.num_tokens - 1 - sample.num_unread - seq.num_computed_tokens
            counts["recomputed"] += max(again, 0)
        counts["cached"] += seq.num_cached_tokens
        counts["restored"] += seq.num_restored_tokens
        seq.admitted_at = at
        sample.status = "running"
        if sample.timings.submitted is None:
            sample.timings.submitted = at
        self._journal.emit("admit", seq, time=at, num_tokens=seq.num_computed_tokens, value=seq.num_tokens)

    def _back_to_waiting(self, seq: S, cause: str) -> None:
        self._leave_slot(seq)
        self._journal.emit("preempt", seq, num_tokens=seq.num_computed_tokens, detail=cause)
        seq.sample.status = "waiting"

    def _settle(self, outcome: Outcome) -> None:
        """Its tokens are in the sample. One whose turn has ended is marked, to be parked when the pass is done with."""
        sample = outcome.seq.sample
        seq = self._sequences[sample.id]
        if outcome.emitted and sample.timings.first_token is None:
            sample.timings.first_token = self.now()
            self._journal.emit("first_token", seq)
        if outcome.failure is not None:
            self._fail(seq, outcome.failure)
        elif outcome.end is not None:
            sample.stop_reason = outcome.end.stop_reason
            if outcome.ends_turn:
                sample.turn_ended = True
            else:
                self._finish(seq, outcome.end.reason)

    def _save(self, seq: S, *, wait: bool = True) -> Snapshot | None:
        start, n = self.now(), seq.num_computed_tokens
        snapshot = self._saved(seq, wait)
        failed = snapshot is None and n > 0
        detail = "failed: no room in host memory" if failed else ""
        self._journal.emit(
            "save", seq, time=start, duration=self.now() - start, num_tokens=0 if failed else n, detail=detail
        )
        return snapshot

    def _take_out(self, seq: S, kind: Literal["pause", "park"], snapshot: bool) -> Sample:
        """Unfinished, with its KV or without."""
        sample = seq.sample
        if not snapshot:
            sample.snapshot = None
        elif self._can_save(seq):
            sample.snapshot = self._save(seq)
        self._remove(seq)
        sample.status = "paused"
        kept = float(sample.snapshot is not None)
        detail = "" if sample.stop_reason is None else str(sample.stop_reason)
        self._journal.emit(kind, seq, num_tokens=len(sample.output_ids), value=kept, detail=detail)
        return sample

    def _leave_slot(self, seq: S) -> None:
        assert seq.admitted_at is not None, seq.sample.id
        seq.sample.timings.running += self.now() - seq.admitted_at
        seq.admitted_at = None

    def _finish(self, seq: S, reason: FinishReason) -> None:
        sample = seq.sample
        self._remove(seq)
        sample.status = "finished"
        sample.finish_reason = reason
        sample.snapshot = None
        sample.timings.finished = self.now()
        self._journal.emit("finish", seq, num_tokens=len(sample.output_ids), detail=reason)

    def _fail(self, seq: S, failure: str) -> None:
        """A failed sample is data: it keeps its tokens and says at which boundary it failed, and the run goes on."""
        seq.sample.failure = failure
        self._finish(seq, "error")
        seq.sample.status = "failed"
