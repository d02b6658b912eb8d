"""The native engine: continuous batching over a paged KV cache, exact across any cut.

    add -> waiting -> [admit: prefix or snapshot] -> running -> step* -> finished
                 ^                                     |  |
                 +---- preempt (snapshot to host) -----+  +-> pause (with or without KV), or park where a turn ended
                                                              -> the caller's

Model code is `decoder` (what a forward pass computes), memory is `KVManager`, order is `Scheduler`, tokens are
`Sampler`, records are `ModelEngine`'s; this class only connects them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
import torch

from longtail.events import Listener, ignore
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engine import EngineStats, StepOutput
from longtail.partial_rollout.engines.model_engine import ModelEngine
from longtail.partial_rollout.engines.native import loader
from longtail.partial_rollout.engines.native.admission import Admission
from longtail.partial_rollout.engines.native.cache import make_kv
from longtail.partial_rollout.engines.native.config import NativeConfig
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.drafters import speculate
from longtail.partial_rollout.engines.native.sampler import Sampler
from longtail.partial_rollout.engines.native.scheduler import Scheduled, Scheduler
from longtail.partial_rollout.engines.native.stepper import Stepper
from longtail.partial_rollout.engines.native.stop_text import StopText
from longtail.partial_rollout.engines.native.target import Target
from longtail.partial_rollout.engines.native.verification import verification
from longtail.sample import Sample
from longtail.sampling_params import check_known_fields
from longtail.sequence import Sequence
from longtail.spec_decode.controller import Controller, ControllerConfig
from longtail.spec_decode.drafter import Drafter
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost
from longtail.version import Fingerprint, PolicyVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class NativeEngine(ModelEngine[Sequence]):
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
        self.config = config = NativeConfig(**settings)
        super().__init__(name, version, config.max_num_seqs, listener, clock)
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
        self.spec = self.vocabulary = spec = self.decoder.spec
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
            on_admit=self._admit,
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
            cost=StepCost(self.row_rule.multiple),  # the machine's and the model's: a new drafter keeps it
            decode_of=self._stop_text.decode_of,
            clock=clock,
        )
        self.use_drafter(drafter, controller)

    # -- the engine protocol ------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> Tiers:
        """Where the KV of paused and preempted samples lives."""
        return self.kv.tiers

    def check(self, sample: Sample) -> None:
        super().check(sample)
        self.stepper.routing.check(sample)

    def reset_prefix_cache(self) -> None:
        """Forgets what finished sequences left behind, so that a measurement does not live on an earlier one's work."""
        with self._lock:
            self.kv.forget_all()

    def stats(self) -> EngineStats:
        return self._stats(len(self.scheduler.running), self.kv.num_free, self.kv.num_blocks)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _sequence(self, sample: Sample) -> Sequence:
        return Sequence(sample)

    def _enter(self, seq: Sequence, is_full: bool) -> None:
        self.scheduler.waiting.append(seq)
        self.admission.arrive(seq)
        if self.speculation is not None and seq.sample.snapshot is None:
            self.speculation.enter(seq.sample.id)

    def _step(self, out: StepOutput, refilled: bool) -> None:
        with torch.inference_mode():
            self._park(out)  # of a step that was interrupted
            if scheduled := self._schedule():
                self._run(scheduled, out, refilled)

    def _schedule(self) -> list[Scheduled]:
        while True:
            seen = self.admission.progress()
            self.admission.prefetch()
            scheduled = self.scheduler.schedule()
            if scheduled or any(map(self.admission.is_ready, self.scheduler.waiting)):
                return scheduled
            if not any(tiers.wait(changes) for tiers, changes in seen):  # nothing can run: time to wait for the disk
                return scheduled

    def _run(self, scheduled: list[Scheduled], out: StepOutput, refilled: bool) -> None:
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

    def _park(self, out: StepOutput) -> None:
        """Takes those out whose turn has ended. They may not come back here: an environment may have the last word."""
        for seq in [seq for seq in self._sequences.values() if seq.sample.turn_ended]:
            self._take_out(seq, "park", snapshot=True)
            self._forget(seq.sample)
            out.turns.append(seq.sample)

    def _update(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        checked = loader.check_weights(self.decoder.parameter_shapes(), weights)
        with torch.no_grad():
            self.decoder.load_weights(checked)
        self._version = version
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
            self.stepper.speculation = speculate(drafter, target, controller, self.now, self.stepper.cost)

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

    def _admit(self, seq: Sequence) -> None:
        self._admitted(seq, self.now())
        self.admission.leave(seq)
        self.stepper.routing.admit(seq.sample)

    def _preempt(self, seq: Sequence) -> None:
        self._journal.counts["preemptions"] += 1
        # Not waiting for room: other sequences are in the middle of a step.
        seq.sample.snapshot = self._save(seq, wait=False) if self.config.preemption == "snapshot" else None
        self._back_to_waiting(seq, "out of blocks")
        self.admission.arrive(seq, first=True)

    def _back_to_waiting(self, seq: Sequence, cause: str) -> None:
        super()._back_to_waiting(seq, cause)
        self.kv.release(seq)

    def _saved(self, seq: Sequence, wait: bool) -> Snapshot | None:
        self.admission.yield_room()
        return self.kv.save(seq, wait=wait)

    def _remove(self, seq: Sequence) -> None:
        if seq in self.scheduler.running:
            self.scheduler.running.remove(seq)
            self._leave_slot(seq)
            self.kv.release(seq)
        else:
            self.scheduler.waiting.remove(seq)
            self.admission.leave(seq)
        del self._sequences[seq.sample.id]

    def _leave_slot(self, seq: Sequence) -> None:
        self.stepper.routing.record(seq, seq.num_computed_tokens)
        super()._leave_slot(seq)

    def _forget(self, sample: Sample) -> None:
        """The sample is done, or a turn of it: what was kept to draft for it goes."""
        if self.speculation is not None and (did := self.speculation.forget(sample.id)).drafted:
            self._journal.add(did.event(self.now(), self.name, sample))
