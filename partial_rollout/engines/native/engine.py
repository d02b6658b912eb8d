"""The native engine: continuous batching over a paged KV cache, exact across any cut.

    add -> waiting -> [admit: prefix or snapshot] -> running -> step* -> finished
                 ^                                     |  |
                 +---- preempt (snapshot to host) -----+  +-> pause (with or without KV), or park where a turn ended
                                                              -> the caller's

Model code is `decoder` (what a forward pass computes), memory is `KVManager`, order is `Scheduler`, tokens are
`Sampler`; this class only connects them and keeps the records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numba
import torch

from longtail.events import Event, Listener, ignore
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engine import EngineStats, StepOutput
from longtail.partial_rollout.engines.native import loader
from longtail.partial_rollout.engines.native.admission import Admission
from longtail.partial_rollout.engines.native.cache import make_kv
from longtail.partial_rollout.engines.native.config import NativeConfig
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.drafters import speculate
from longtail.partial_rollout.engines.native.journal import Journal
from longtail.partial_rollout.engines.native.sampler import Sampler, check_sample, is_full
from longtail.partial_rollout.engines.native.scheduler import Scheduled, Scheduler
from longtail.partial_rollout.engines.native.stepper import Outcome, Stepper
from longtail.partial_rollout.engines.native.stop_text import StopText
from longtail.partial_rollout.engines.native.target import Target
from longtail.partial_rollout.engines.native.verification import verification
from longtail.sample import FinishReason, Sample
from longtail.sampling_params import check_known_fields
from longtail.sequence import Sequence
from longtail.spec_decode.controller import Controller, ControllerConfig
from longtail.spec_decode.drafter import Drafter
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost
from longtail.version import Fingerprint, PolicyVersion, check_newer, check_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NativeEngine:
    """Runs `transformers` decoders on the CPU in float32.

    model: a directory, a hub id, or a model object (copied, never changed). tokenizer: needed for stop strings only;
    loaded from the model's directory when the first sample asks for one. version: of the model's weights; a trainer
    that comes back with weights of version k says so, or samples that version k made are refused. tiers: where saved KV
    goes (by default to host memory, without limit). drafter, controller: see `use_drafter`. Settings: `NativeConfig`.
    Thread-safe: calls wait for the step in flight.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        name: str = "native",
        version: int = 0,
        listener: Listener = ignore,
        clock: Callable[[], float] = time.perf_counter,
        tiers: TierConfig | None = None,
        drafter: str | Drafter | None = None,
        controller: Controller | ControllerConfig | None = None,
        **settings: Any,
    ) -> None:
        check_known_fields(NativeConfig, settings)
        check_version(version)
        self.config = config = NativeConfig(**settings)
        self.name = name
        self.now = clock
        self._journal = Journal(name, listener, clock)
        if config.threads is not None:
            # In this order: where numba starts its threads, it sets the number of OpenMP's, torch's among them.
            numba.set_num_threads(min(config.threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            torch.set_num_threads(config.threads)
        loaded, source = loader.load_model(model)
        self._stop_text = StopText(tokenizer, source)
        weights = weights_of(loaded)
        self.decoder, self.row_rule = loader.build_decoder(
            loaded,
            config.numerics,
            fused=config.fused,
            block_size=config.block_size,
            record_routing=config.record_routing,
        )
        self._arithmetic = loader.arithmetic_of(loaded.config, self.decoder, self.row_rule, config.numerics)
        fingerprint = self._fingerprint(weights, 0)
        del loaded, weights
        self.spec = spec = self.decoder.spec
        self.max_model_len = min(config.max_model_len or spec.max_positions, spec.max_positions)
        self.kv = make_kv(
            spec,
            budget=config.kv_cache_bytes,
            block_size=config.block_size,
            longest=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_rows=config.max_num_batched_tokens,
            fingerprint=fingerprint,
            prefix_caching=config.enable_prefix_caching,
            tiers=Tiers(tiers),
            encoding=config.snapshot_encoding,
        )
        self.admission = Admission(self.kv, clock, config.kv_on_update == "keep")
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            is_ready=self.admission.is_ready,
            attach=self.admission.attach,
            on_admit=self._admitted,
            on_preempt=self._preempt,
        )
        self.stepper = Stepper(
            self.decoder,
            self.kv,
            self.row_rule,
            verification(config.verification, Sampler(spec.eos_token_ids, config.logprobs_mode == "raw")),
            engine=name,
            max_model_len=self.max_model_len,
            max_rows=config.max_num_batched_tokens,
            decode_of=self._stop_text.decode_of,
            clock=clock,
        )
        self._version = PolicyVersion(version)
        self._sequences: dict[str, Sequence] = {}
        self._full: list[Sequence] = []
        """Came with an observation that leaves no room for a token: the next step finishes them."""
        self._lock = threading.RLock()
        self._step_cost = StepCost(self.row_rule.multiple)  # the machine's and the model's: a new drafter keeps it
        self.use_drafter(drafter, controller)

    # -- the engine protocol ------------------------------------------------------------------------------------------

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
    def tiers(self) -> Tiers:
        """Where the KV of paused and preempted samples lives."""
        return self.kv.tiers

    @property
    def num_free_slots(self) -> int:
        return max(self.config.max_num_seqs - len(self._sequences), 0)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample."""
        if sample.id in self._sequences:
            raise ValueError(f"sample {sample.id} is already in the engine; pause or abort it first")
        decode = self._stop_text.decode_of(sample)  # fails now, not in the middle of a run, if there is no tokenizer
        check_sample(sample, self.spec, self.max_model_len, self._version, decode)
        self.stepper.routing.check(sample)

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        with self._lock:
            batch = list(samples)
            for sample in batch:
                self.check(sample)
            if len({s.id for s in batch}) < len(batch):
                raise ValueError("samples: two samples have the same id; every sample needs its own")
            arriving = [Sequence(sample) for sample in batch]
            for seq in arriving:
                seq.set_limit(limit)
            for seq in arriving:
                sample = seq.sample
                self._sequences[sample.id] = seq
                self.scheduler.waiting.append(seq)
                self.admission.arrive(seq)
                sample.status = "waiting"
                if is_full(sample, self.max_model_len):
                    self._full.append(seq)
                if self.speculation is not None and sample.snapshot is None:
                    self.speculation.enter(sample.id)

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        with self._lock:
            self._get(sample_id).set_limit(limit)

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """One forward pass over what the scheduler chose: a new token per sequence, with drafts perhaps several.

        If it raises (a listener, an interrupt), samples keep what they had, and the next step continues from there.
        """
        with self._lock:
            with self._journal.telling(), torch.inference_mode():
                out = StepOutput(self._version)
                self._finish_full(out)
                self._park(out)  # of a step that was interrupted
                if scheduled := self._schedule():
                    self._step(scheduled, out, refilled)
            for sample in out.at_limit:  # the caller will hear of it: no listener has raised
                self._sequences[sample.id].limit = None
            return out

    def _schedule(self) -> list[Scheduled]:
        while True:
            seen = self.admission.progress()
            self.admission.prefetch()
            scheduled = self.scheduler.schedule()
            if scheduled or any(map(self.admission.is_ready, self.scheduler.waiting)):
                return scheduled
            if not any(tiers.wait(changes) for tiers, changes in seen):  # nothing can run: time to wait for the disk
                return scheduled

    def _step(self, scheduled: list[Scheduled], out: StepOutput, refilled: bool) -> None:
        start = self.now()
        refilled = refilled or bool(self.scheduler.waiting)
        result = self.stepper.run(scheduled, self._version, self._settle, refilled=refilled)
        self._journal.step(start, len(scheduled), result)
        done = [outcome.seq.sample for outcome in result.outcomes if outcome.seq.sample.is_done]
        for sample in done:
            self._forget(sample)
        self._park(out)
        out.finished += done
        out.num_output_tokens, out.num_seqs = result.num_output_tokens, len(scheduled)
        out.at_limit = [seq.sample for seq in self._sequences.values() if seq.is_at_limit]

    def _settle(self, outcome: Outcome) -> None:
        sample = outcome.seq.sample
        if outcome.emitted and sample.timings.first_token is None:
            sample.timings.first_token = self.now()
            self._journal.emit("first_token", outcome.seq)
        if outcome.failure is not None:
            self._fail(outcome.seq, outcome.failure)
        elif outcome.end is not None:
            sample.stop_reason = outcome.end.stop_reason
            if outcome.ends_turn:
                sample.turn_ended = True  # and is parked when the pass is done with
            else:
                self._finish(outcome.seq, outcome.end.reason)

    def _park(self, out: StepOutput) -> None:
        """Takes those out whose turn has ended. They may not come back here: an environment may have the last word."""
        for seq in [seq for seq in self._sequences.values() if seq.sample.turn_ended]:
            self._take_out(seq, "park", snapshot=True)
            self._forget(seq.sample)
            out.turns.append(seq.sample)

    def _finish_full(self, out: StepOutput) -> None:
        full, self._full = self._full, []
        for seq in full:
            if self._sequences.get(seq.sample.id) is seq:
                self._finish(seq, "length")
                out.finished.append(seq.sample)

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        with self._lock, self._journal.telling():
            ids = list(self._sequences if sample_ids is None else dict.fromkeys(sample_ids))
            return [self._take_out(seq, "pause", snapshot) for seq in [self._get(i) for i in ids]]

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        with self._lock, self._journal.telling():
            aborted = []
            for seq in [self._get(i) for i in dict.fromkeys(sample_ids)]:
                self._finish(seq, reason)
                self._forget(seq.sample)
                aborted.append(seq.sample)
            return aborted

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """weights: a complete state dict of the model (a tied LM head may be left out). Nothing changes if it does not
        fit. KV made by older weights is dropped, or kept if `kv_on_update` says so."""
        with self._lock, self._journal.telling():
            check_newer(version, self._version)
            start = self.now()
            checked = loader.check_weights(self.decoder.parameter_shapes(), weights)
            with torch.no_grad():
                self.decoder.load_weights(checked)
            self._version = PolicyVersion(version)
            self.kv.set_fingerprint(self._fingerprint(checked, version))
            if self.config.kv_on_update == "keep":
                for seq in self.scheduler.running:
                    seq.kv = "kept"
            else:
                for seq in reversed(list(self.scheduler.running)):
                    self.scheduler.running.remove(seq)
                    self._back_to_waiting(seq, "weight update")
                    self.scheduler.waiting.appendleft(seq)
            self.admission.restart(self.scheduler.waiting)
            if self.speculation is not None:
                self.speculation.weights_updated(version)
            self._journal.add(Event("update", start, self.now() - start, self.name, value=version))

    def _fingerprint(self, weights: Mapping[str, torch.Tensor], version: int) -> Fingerprint:
        suffix = f" version {version}" if self.config.fingerprint_versions else ""
        return loader.fingerprint(weights, self._arithmetic + suffix)

    @property
    def speculation(self) -> Speculation | None:
        """What drafts, and what came of it (`report()`); None while drafting is off."""
        return self.stepper.speculation

    def use_drafter(
        self, drafter: str | Drafter | None, controller: Controller | ControllerConfig | None = None
    ) -> None:
        """Drafts from here on with this drafter ("ngram", "group", "self", "model:DIRECTORY", "group>self": the first
        that has something to say, or an object); None: no drafts. Not one token depends on it, nor on when it changes
        (verified by rejection: no distribution does). controller: how many drafts (`spec_decode/controller.py`); by
        default one that knows what steps cost from the drafters before, and learns the acceptance anew.
        ValueError for a name that is not known, and for a drafter that does not fit the model."""
        with self._lock:
            if drafter is None:
                self.stepper.speculation = None
                return
            target = Target(self.decoder, self.row_rule, self.kv, self.config, self.max_model_len)
            self.stepper.speculation = speculate(drafter, target, controller, self.now, self._step_cost)

    def reset_prefix_cache(self) -> None:
        """Forgets what finished sequences left behind, so that a measurement does not live on an earlier one's work."""
        with self._lock:
            self.kv.forget_all()

    def stats(self) -> EngineStats:
        c = self._journal.counts
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_free_blocks=self.kv.num_free,
            num_blocks=self.kv.num_blocks,
            num_steps=c["steps"],
            num_output_tokens=c["output"],
            num_recomputed_tokens=c["recomputed"],
            num_restored_tokens=c["restored"],
            num_cached_tokens=c["cached"],
            num_preemptions=c["preemptions"],
            num_draft_tokens=c["drafted"],
            num_accepted_tokens=c["accepted"],
        )

    def check_integrity(self) -> None:
        """AssertionError if blocks, sequences or samples do not add up. Call between steps."""
        with self._lock:
            self.kv.check_integrity(self.scheduler.running)
            queued = [*self.scheduler.running, *self.scheduler.waiting]
            self.admission.check_integrity(self.scheduler.waiting)
            assert len(queued) == len(self._sequences) and set(queued) == set(self._sequences.values())
            for seq in queued:
                assert seq.num_uncomputed_tokens >= 1, f"{seq.sample.id} has nothing to compute"
                assert seq.token_ids == [*seq.sample.prompt_ids, *seq.sample.output_ids], seq.sample.id
                seq.sample.check_integrity()

    # -- admission and leaving ----------------------------------------------------------------------------------------

    def _admitted(self, seq: Sequence) -> None:
        """The sequence has its slot and its blocks: records it."""
        sample = seq.sample
        if seq.kv in ("restored", "kept", "approximate") or seq.refused is not None:
            detail = "" if seq.refused is None else f"refused: {seq.refused}"
            at, took = self.now() - seq.restore_seconds, seq.restore_seconds
            self._journal.emit(
                "restore", seq, time=at, duration=took, num_tokens=seq.num_restored_tokens, detail=detail
            )
        sample.snapshot = None
        self.admission.leave(seq)
        self.stepper.routing.admit(sample)
        if sample.output_ids:
            again = seq.num_tokens - 1 - sample.num_unread - seq.num_computed_tokens
            self._journal.counts["recomputed"] += max(again, 0)
        self._journal.counts["cached"] += seq.num_cached_tokens
        self._journal.counts["restored"] += seq.num_restored_tokens
        seq.admitted_at = self.now()
        sample.status = "running"
        if sample.timings.submitted is None:
            sample.timings.submitted = seq.admitted_at
        self._journal.emit("admit", seq, num_tokens=seq.num_computed_tokens, value=seq.num_tokens)

    def _preempt(self, seq: Sequence) -> None:
        self._journal.counts["preemptions"] += 1
        # Not waiting for room: other sequences are in the middle of a step.
        seq.sample.snapshot = self._save(seq, wait=False) if self.config.preemption == "snapshot" else None
        self._back_to_waiting(seq, "out of blocks")
        self.admission.arrive(seq, first=True)

    def _back_to_waiting(self, seq: Sequence, cause: str) -> None:
        self._leave_slot(seq)
        self._journal.emit("preempt", seq, num_tokens=seq.num_computed_tokens, detail=cause)
        self.kv.release(seq)
        seq.sample.status = "waiting"

    def _save(self, seq: Sequence, *, wait: bool = True) -> Snapshot | None:
        start = self.now()
        self.admission.yield_room()
        snapshot = self.kv.save(seq, wait=wait)
        n, failed = seq.num_computed_tokens, snapshot is None and seq.num_computed_tokens > 0
        detail = "failed: no room in host memory" if failed else ""
        self._journal.emit(
            "save", seq, time=start, duration=self.now() - start, num_tokens=0 if failed else n, detail=detail
        )
        return snapshot

    def _take_out(self, seq: Sequence, kind: Literal["pause", "park"], snapshot: bool) -> Sample:
        """Unfinished, with its KV or without."""
        sample = seq.sample
        if seq in self.scheduler.running:
            sample.snapshot = self._save(seq) if snapshot else None
        elif not snapshot:
            sample.snapshot = None
        self._remove(seq)
        sample.status = "paused"
        kept = float(sample.snapshot is not None)
        detail = "" if sample.stop_reason is None else str(sample.stop_reason)
        self._journal.emit(kind, seq, num_tokens=len(sample.output_ids), value=kept, detail=detail)
        return sample

    def _remove(self, seq: Sequence) -> None:
        """Out of the engine, whether it runs or waits."""
        if seq in self.scheduler.running:
            self.scheduler.running.remove(seq)
            self._leave_slot(seq)
            self.kv.release(seq)
        else:
            self.scheduler.waiting.remove(seq)
            self.admission.leave(seq)
        del self._sequences[seq.sample.id]

    def _leave_slot(self, seq: Sequence) -> None:
        assert seq.admitted_at is not None, seq.sample.id
        self.stepper.routing.record(seq, seq.num_computed_tokens)
        seq.sample.timings.running += self.now() - seq.admitted_at
        seq.admitted_at = None

    def _get(self, sample_id: str) -> Sequence:
        if sample_id not in self._sequences:
            raise ValueError(f"sample_ids: {sample_id!r} is not in the engine (finished, paused, or never added)")
        return self._sequences[sample_id]

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        sample = seq.sample
        self._remove(seq)
        sample.status = "finished"
        sample.finish_reason = reason
        sample.snapshot = None
        sample.timings.finished = self.now()
        self._journal.emit("finish", seq, num_tokens=len(sample.output_ids), detail=reason)

    def _fail(self, seq: Sequence, failure: str) -> None:
        """A failed sample is data: it keeps its tokens and says at which boundary it failed, and the run goes on."""
        seq.sample.failure = failure
        self._finish(seq, "error")
        seq.sample.status = "failed"

    def _forget(self, sample: Sample) -> None:
        """The sample is done, or a turn of it: what was kept to draft for it goes."""
        if self.speculation is not None and (did := self.speculation.forget(sample.id)).drafted:
            self._journal.add(did.event(self.now(), self.name, sample))
