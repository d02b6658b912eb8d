"""The native engine: continuous batching over a paged KV cache, exact across any cut.

    add -> waiting -> [admit: prefix or snapshot] -> running -> step* -> finished
                 ^                                     |  |
                 +---- preempt (snapshot to host) -----+  +-> pause (with or without KV) -> the caller's

Model code is `decoder` (what a forward pass computes), memory is `KVManager`, order is `Scheduler`, tokens are
`Sampler`; this class only connects them and keeps the records.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import torch

from longtail.events import Event, EventKind, Listener, ignore
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
from longtail.partial_rollout.engines.native.sampler import Decode, Sampler, check_sample
from longtail.partial_rollout.engines.native.scheduler import Scheduled, Scheduler
from longtail.partial_rollout.engines.native.stepper import Outcome, Stepper
from longtail.partial_rollout.engines.native.target import Target
from longtail.partial_rollout.engines.native.verification import verification
from longtail.sample import FinishReason, Sample
from longtail.sampling_params import check_known_fields
from longtail.sequence import Sequence
from longtail.spec_decode.controller import Controller, ControllerConfig
from longtail.spec_decode.drafter import Drafter
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost
from longtail.version import PolicyVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


COUNTS = ("steps", "output", "recomputed", "restored", "cached", "preemptions", "drafted", "accepted")


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
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(f"version must be an integer of at least 0, not {version!r}")
        self.config = config = NativeConfig(**settings)
        self.name = name
        self.listener = listener
        self.now = clock
        if config.threads is not None:
            # In this order: where numba starts its threads, it sets the number of OpenMP's, torch's among them.
            numba.set_num_threads(min(config.threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            torch.set_num_threads(config.threads)
        loaded, self._source = loader.load_model(model)
        self._tokenizer = tokenizer
        weights = weights_of(loaded)
        self.decoder, self.row_rule = loader.build_decoder(
            loaded,
            config.numerics,
            fused=config.fused,
            block_size=config.block_size,
            record_routing=config.record_routing,
        )
        self._arithmetic = loader.arithmetic_of(loaded.config, self.decoder, self.row_rule, config.numerics)
        fingerprint = loader.fingerprint(weights, self._arithmetic)
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
            decode_of=self._decode_or_none,
            clock=clock,
        )
        self._version = PolicyVersion(version)
        self._sequences: dict[str, Sequence] = {}
        self._lock = threading.RLock()
        self._queue: deque[Event] = deque()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._step_cost = StepCost(self.row_rule.multiple)  # the machine's and the model's: a new drafter keeps it
        self.use_drafter(drafter, controller)

    # -- the engine protocol ------------------------------------------------------------------------------------------

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
        decode = self._decode_or_none(sample)  # fails now, not in the middle of a run, if there is no tokenizer
        check_sample(sample, self.spec, self.max_model_len, self._version, decode)
        self.stepper.routing.check(sample)

    def add(self, samples: Iterable[Sample]) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        with self._lock:
            batch = list(samples)
            for sample in batch:
                self.check(sample)
            if len({s.id for s in batch}) < len(batch):
                raise ValueError("samples: two samples have the same id; every sample needs its own")
            for sample in batch:
                seq = Sequence(sample)
                self._sequences[sample.id] = seq
                self.scheduler.waiting.append(seq)
                self.admission.arrive(seq)
                sample.status = "waiting"

    def step(self) -> StepOutput:
        """One forward pass over what the scheduler chose: a new token per sequence, with drafts perhaps several.

        If it raises (a listener, an interrupt), samples keep what they had, and the next step continues from there.
        """
        with self._lock, self._events(), torch.inference_mode():
            scheduled = self._schedule()
            if not scheduled:
                return StepOutput(self._version, [], 0, 0)
            return self._step(scheduled)

    def _schedule(self) -> list[Scheduled]:
        while True:
            seen = self.admission.progress()
            self.admission.prefetch()
            scheduled = self.scheduler.schedule()
            if scheduled or any(map(self.admission.is_ready, self.scheduler.waiting)):
                return scheduled
            if not any(tiers.wait(changes) for tiers, changes in seen):  # nothing can run: time to wait for the disk
                return scheduled

    def _step(self, scheduled: list[Scheduled]) -> StepOutput:
        start, version = self.now(), self._version
        result = self.stepper.run(scheduled, version, self._settle, refilled=bool(self.scheduler.waiting))
        finished = [outcome.seq.sample for outcome in result.outcomes if outcome.seq.sample.is_done]
        made = result.num_output_tokens
        for name, count in (
            ("steps", 1),
            ("output", made),
            ("drafted", result.num_draft_tokens),
            ("accepted", result.num_accepted_tokens),
        ):
            self._counts[name] += count
        self._queue.append(
            Event(
                "step",
                start,
                self.now() - start,
                self.name,
                num_seqs=len(scheduled),
                num_tokens=result.num_tokens,
                num_prefill_tokens=result.num_prefill_tokens,
                num_context_tokens=result.num_context_tokens,
                num_output_tokens=made,
                num_draft_tokens=result.num_draft_tokens,
                num_accepted_tokens=result.num_accepted_tokens,
                draft_seconds=result.draft_seconds,
                model_seconds=result.model_seconds,
                sample_seconds=result.sample_seconds,
            )
        )
        for sample in finished:
            self._forget(sample)
        return StepOutput(version, finished, made, len(scheduled))

    def _settle(self, outcome: Outcome) -> None:
        sample = outcome.seq.sample
        if outcome.emitted and sample.timings.first_token is None:
            sample.timings.first_token = self.now()
            self._emit("first_token", outcome.seq)
        if outcome.failure is not None:
            self._fail(outcome.seq, outcome.failure)
        elif outcome.end is not None:
            sample.stop_reason = outcome.end.stop_reason
            self._finish(outcome.seq, outcome.end.reason)

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        with self._lock, self._events():
            ids = list(self._sequences if sample_ids is None else dict.fromkeys(sample_ids))
            paused = []
            for seq in [self._get(i) for i in ids]:
                if seq in self.scheduler.running:
                    seq.sample.snapshot = self._save(seq) if snapshot else None
                elif not snapshot:
                    seq.sample.snapshot = None
                self._remove(seq)
                seq.sample.status = "paused"
                kept = float(seq.sample.snapshot is not None)
                self._emit("pause", seq, num_tokens=len(seq.sample.output_ids), value=kept)
                paused.append(seq.sample)
            return paused

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        with self._lock, self._events():
            aborted = []
            for seq in [self._get(i) for i in dict.fromkeys(sample_ids)]:
                self._finish(seq, reason)
                self._forget(seq.sample)
                aborted.append(seq.sample)
            return aborted

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """weights: a complete state dict of the model (a tied LM head may be left out). Nothing changes if it does not
        fit. KV made by older weights is dropped, or kept if `kv_on_update` says so."""
        with self._lock, self._events():
            if isinstance(version, bool) or not isinstance(version, int):
                raise ValueError(f"version must be an integer, not {version!r}")
            if version <= self._version:
                raise ValueError(
                    f"version must be above the current {self._version}, not {version}; versions only grow"
                )
            start = self.now()
            checked = loader.check_weights(self.decoder.parameter_shapes(), weights)
            with torch.no_grad():
                self.decoder.load_weights(checked)
            self._version = PolicyVersion(version)
            self.kv.set_fingerprint(loader.fingerprint(checked, self._arithmetic))
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
            self._queue.append(Event("update", start, self.now() - start, self.name, value=version))

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
        c = self._counts
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
            self._emit("restore", seq, time=at, duration=took, num_tokens=seq.num_restored_tokens, detail=detail)
        sample.snapshot = None
        self.admission.leave(seq)
        self.stepper.routing.admit(sample)
        if sample.output_ids:
            self._counts["recomputed"] += seq.num_tokens - 1 - seq.num_computed_tokens
        self._counts["cached"] += seq.num_cached_tokens
        self._counts["restored"] += seq.num_restored_tokens
        seq.admitted_at = self.now()
        sample.status = "running"
        if sample.timings.submitted is None:
            sample.timings.submitted = seq.admitted_at
        self._emit("admit", seq, num_tokens=seq.num_computed_tokens, value=seq.num_tokens)

    def _preempt(self, seq: Sequence) -> None:
        self._counts["preemptions"] += 1
        # Not waiting for room: other sequences are in the middle of a step.
        seq.sample.snapshot = self._save(seq, wait=False) if self.config.preemption == "snapshot" else None
        self._back_to_waiting(seq, "out of blocks")
        self.admission.arrive(seq, first=True)

    def _back_to_waiting(self, seq: Sequence, cause: str) -> None:
        self._leave_slot(seq)
        self._emit("preempt", seq, num_tokens=seq.num_computed_tokens, detail=cause)
        self.kv.release(seq)
        seq.sample.status = "waiting"

    def _save(self, seq: Sequence, *, wait: bool = True) -> Snapshot | None:
        start = self.now()
        self.admission.yield_room()
        snapshot = self.kv.save(seq, wait=wait)
        n, failed = seq.num_computed_tokens, snapshot is None and seq.num_computed_tokens > 0
        detail = "failed: no room in host memory" if failed else ""
        self._emit("save", seq, time=start, duration=self.now() - start, num_tokens=0 if failed else n, detail=detail)
        return snapshot

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
        self._emit("finish", seq, num_tokens=len(sample.output_ids), detail=reason)

    def _fail(self, seq: Sequence, failure: str) -> None:
        """A failed sample is data: it keeps its tokens and says at which boundary it failed, and the run goes on."""
        seq.sample.failure = failure
        self._finish(seq, "error")
        seq.sample.status = "failed"

    def _forget(self, sample: Sample) -> None:
        """The sample is done: what was kept to draft for it goes."""
        if self.speculation is not None and (did := self.speculation.forget(sample.id)).drafted:
            self._queue.append(did.event(self.now(), self.name, sample))

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _emit(self, kind: EventKind, seq: Sequence, time: float | None = None, **fields: Any) -> None:
        at = self.now() if time is None else time
        self._queue.append(Event(kind, at, engine=self.name, sample=seq.sample.id, group=seq.sample.group_id, **fields))

    @contextlib.contextmanager
    def _events(self) -> Iterator[None]:
        """The listener hears of a call's events when its work is done, so that it cannot leave it half done by raising.
        It hears of every event; the first error is raised in the end."""
        yield
        failure: BaseException | None = None
        while self._queue:
            try:
                self.listener(self._queue.popleft())
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _decode(self) -> Decode:
        if self._tokenizer is None:
            if self._source is None:
                raise ValueError("stop strings need a tokenizer; pass tokenizer= to the engine or use stop_token_ids")
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._source)
            except (OSError, ValueError, ImportError) as error:
                raise ValueError(
                    f"stop strings need a tokenizer, and {self._source} has none ({error}); pass tokenizer= to the "
                    "engine or use stop_token_ids"
                ) from error
        decode: Decode = self._tokenizer.decode
        return decode

    def _decode_or_none(self, sample: Sample) -> Decode | None:
        return self._decode() if sample.params.stop else None
