"""vLLM behind the engine protocol.

    add -> a request of vLLM's [admit: prefix cache, or KV brought by a connector] -> step* -> finished
                ^                                                                     |
                +---- another request, from its tokens: pause, update, lost step -----+

A sample's state is its tokens. Whatever takes it off its KV (a pause, other weights, a step that broke) ends its
request and starts another from all the tokens it has; what of its KV is still good is found in the prefix cache, under
a salt that names the weights. vLLM schedules and computes (`core`); tokens are drawn by our sampler in its workers
(`sampling`); what ends a sample, and its records, are decided here, as in the native engine (`ModelEngine`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from longtail.events import Listener, ignore
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engine import EngineStats, StepOutput
from longtail.partial_rollout.engines.model_engine import ModelEngine
from longtail.partial_rollout.engines.native.sampler import check_end
from longtail.partial_rollout.engines.native.stepper import Outcome, PassResult, commit
from longtail.partial_rollout.engines.native.stop_text import StopText
from longtail.partial_rollout.engines.vllm.config import VllmSettings
from longtail.partial_rollout.engines.vllm.core import Core, Emitted, LocalCore, Pass, check_directory
from longtail.partial_rollout.engines.vllm.drafters import Drafting
from longtail.partial_rollout.engines.vllm.kv_link import Admission
from longtail.partial_rollout.engines.vllm.saver import make_saver
from longtail.partial_rollout.engines.vllm.stay import Stay, verdict_of
from longtail.partial_rollout.engines.vllm.weights import Updater
from longtail.sample import Sample
from longtail.sampling_params import check_known_fields
from longtail.version import PolicyVersion


class VllmEngine(Drafting, ModelEngine[Stay]):
    """Runs models on vLLM, in this process or with its core in another (`VllmSettings.core`).

    model: a directory or hub id. tokenizer: needed for stop strings only; loaded from the model's directory when the
    first sample asks for one. version: of the model's weights. tiers: where saved KV goes (by default to host memory,
    without limit). Settings: `VllmSettings`.
    Thread-safe: calls wait for the step in flight.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Any = None,
        name: str = "vllm",
        version: int = 0,
        listener: Listener = ignore,
        clock: Callable[[], float] = time.perf_counter,
        tiers: TierConfig | None = None,
        **settings: Any,
    ) -> None:
        check_known_fields(VllmSettings, settings)
        self.config = config = VllmSettings(**settings)
        super().__init__(name, version, config.max_num_seqs, listener, clock)
        source = check_directory(model)
        self.saver = make_saver(config, tiers, clock)
        self._stop_text = StopText(tokenizer, source)
        self.core = _core_of(config)(source, config, {} if self.saver is None else self.saver.engine_args())
        self.vocab_size, self.eos_token_ids = self.core.vocab_size, self.core.eos_token_ids
        self.vocabulary = self
        self.max_model_len = self.core.max_model_len
        if config.sampling == "counter":
            self.core.sample_by_counter(config.logprobs_mode == "raw")
        self._start_drafting(self.core.make_proposer(version), config)
        if self.saver is not None:
            self.saver.start(self.core, version)
        self._updater = Updater(self.core)
        self.core.set_weight_version(str(version))
        self._held = StepOutput(self._version)
        """Of passes that were told of outside of `step`: the next one reports them."""
        self._epoch = 0
        """Of the prefix cache: a new one finds nothing of those before it."""
        self._left: dict[str, str] = {}
        """Salts of paused samples whose KV is to be kept over updates, by sample; the latest of them."""

    # -- the engine protocol ------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> Tiers | None:
        """None where no KV is saved: `save_kv`, several workers, a model whose layers keep different things."""
        return None if self.saver is None or self.saver.unavailable is not None else self.saver.tiers

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._held.finished or self._held.turns)

    def check(self, sample: Sample) -> None:
        self.core.check_alive()
        super().check(sample)
        if self.config.sampling == "vllm" and sample.params.min_tokens:
            raise ValueError(
                f"sample {sample.id}: min_tokens needs sampling='counter': vLLM's own sampler forgets it at a resume"
            )

    def stats(self) -> EngineStats:
        running = sum(stay.admitted_at is not None for stay in self._sequences.values())
        return self._stats(running, self.core.num_free_blocks, self.core.num_blocks)

    def reset_prefix_cache(self) -> None:
        """Forgets what finished and paused samples left behind."""
        with self._lock:
            self._left.clear()
            self._epoch += 1

    # -- passes -------------------------------------------------------------------------------------------------------

    def _sequence(self, sample: Sample) -> Stay:
        return Stay(sample)

    def _enter(self, seq: Stay, is_full: bool) -> None:
        if not is_full:
            self._submit(seq)

    def _step(self, out: StepOutput, refilled: bool) -> None:
        """If vLLM raises, KV of that moment is not trusted, and is computed again."""
        if self.proposer is not None:
            self.proposer.refilled = refilled
        held, self._held = self._held, StepOutput(self._version)
        # A caller that saw how they had ended, and has cut or answered them, hears no more of it.
        out.finished += [sample for sample in held.finished if sample.is_done]
        out.turns += [sample for sample in held.turns if sample.turn_ended]
        out.num_output_tokens, out.num_seqs = held.num_output_tokens, held.num_seqs
        if not self._sequences:
            return
        try:
            if self._updater.is_broken:
                raise RuntimeError(
                    f"engine {self.name}: an update of the weights failed half-way; repeat update_weights before the "
                    "next step"
                )
            for done in self.core.step(wait=not (out.finished or out.turns)):
                self._book(done, out)
        except BaseException:
            self._held = out
            if not self._updater.is_broken:
                self._start_over()
            raise

    @contextlib.contextmanager
    def _between_passes(self) -> Iterator[None]:
        try:
            try:
                for done in self.core.freeze():
                    self._book(done, self._held)
            except BaseException:
                self._start_over()
                raise
            yield
        finally:
            if not self._updater.is_broken:  # what it would make now is nothing
                self.core.thaw()

    def _book(self, done: Pass, out: StepOutput) -> None:
        offset = self.now() - time.perf_counter()  # 0 on the clock that an engine has by default
        start, end = done.started + offset, done.ended + offset
        result = self._settle_step(done, start, out)
        if done.counts:
            self._journal.step(start, out.num_seqs, result, end)
        out.num_output_tokens += result.num_output_tokens

    def _settle_step(self, done: Pass, start: float, out: StepOutput) -> PassResult:
        """Books what vLLM did in a pass. What it made for requests that were withdrawn meanwhile is in no sample: one
        token of each is overrun, their drafts are rejected."""
        stays = {stay.request_id: stay for stay in self._sequences.values()}
        for request_id in done.preempted:
            if request_id in stays:
                self._preempted(stays[request_id])
        emitted = [(stays[e.request_id], e) for e in done.emitted if e.request_id in stays]
        gone = sum(bool(e.token_ids) for e in done.emitted if e.request_id not in stays)
        self._journal.counts["overrun"] += gone
        decoding = sum(bool(stay.sample.output_ids) for stay, _ in emitted)
        for request_id, before in done.starts.items():
            if request_id not in stays:
                continue
            stay = stays[request_id]
            stay.num_computed_tokens = before
            if stay.admitted_at is None:
                self._admit(stay, start, done.admissions.get(request_id))
            stay.num_computed_tokens += done.counts[request_id]
        outcomes = []
        for stay, e in emitted:
            outcomes.append(outcome := Outcome(stay))
            stay.num_computed_tokens = done.computed.get(e.request_id, stay.num_computed_tokens)
            stay.has_ended = e.finish_reason is not None
            version = self._version if done.version is None else done.version
            commit(outcome, verdict_of(e), version, self.name, self._end_of)
            self._take(outcome, stay, e, out)
        out.num_seqs = len(done.counts)
        known = sum(done.counts.values())
        return PassResult(
            outcomes,
            num_tokens=known + done.num_drafts,
            num_prefill_tokens=known - decoding,
            num_context_tokens=sum(done.starts.values()) + known,
            num_draft_tokens=done.num_drafts,
            draft_seconds=done.draft_seconds,
            model_seconds=max(done.ended - done.started - done.sample_seconds, 0.0),
            sample_seconds=done.sample_seconds,
        )

    def _take(self, outcome: Outcome, stay: Stay, e: Emitted, out: StepOutput) -> None:
        """Its tokens are in the sample, up to what ends it."""
        sample = stay.sample
        self._settle(outcome)
        if sample.turn_ended:
            self._take_out(stay, "park", snapshot=True)
            out.turns.append(sample)
        elif e.finish_reason is not None and not sample.is_done:
            position = len(sample.output_ids)
            self._fail(stay, f"computing output token {position}: vLLM ended the request ({e.finish_reason})")
        if sample.is_done:
            out.finished.append(sample)

    def _end_of(self, sample: Sample) -> Any:
        return check_end(sample, self.eos_token_ids, self.max_model_len, self._stop_text.decode_of(sample))

    def _update(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        checked = self._updater.check(weights)
        self._updater.load(checked, version)
        self._version = version
        if self.proposer is not None:
            self.proposer.weights_updated(version)
        if self.saver is not None:
            self.saver.update_weights(checked, version)
        for stay in list(self._sequences.values()):
            if self.config.kv_on_update == "keep" and stay.admitted_at is not None:
                stay.kv = "kept"
            elif stay.request_id and not (self._finds_older and stay.sample.output_ids):
                if stay.admitted_at is not None:
                    self._back_to_waiting(stay, "weight update")
                self._resubmit(stay)

    def check_integrity(self) -> None:
        """AssertionError if blocks, requests or samples do not add up. Call between steps."""
        with self._lock, self._between_passes():
            requests = {stay.request_id for stay in self._sequences.values() if stay.request_id}
            known = self.core.requests()
            assert set(known) == requests, "vLLM's requests are not those of the samples"
            if self.saver is not None:
                self.saver.check_integrity([i for i, stay in self._sequences.items() if stay.request_id])
            assert requests or self.core.num_free_blocks == self.core.num_blocks, "blocks are held by nobody"
            full = {id(stay) for stay in self._full}
            for stay in self._sequences.values():
                stay.sample.check_integrity()
                assert stay.token_ids == [*stay.sample.prompt_ids, *stay.sample.output_ids], stay.sample.id
                assert bool(stay.request_id) != (id(stay) in full), f"{stay.sample.id} has no request"
                if stay.request_id:
                    assert known[stay.request_id] == stay.token_ids, stay.sample.id

    def close(self) -> None:
        """Gives back what vLLM holds of this process. The engine is of no use afterwards; samples are paused."""
        with self._lock:
            self.pause(snapshot=False)
            self.core.close()

    # -- requests and leaving -----------------------------------------------------------------------------------------

    def _submit(self, stay: Stay) -> None:
        salt, params, by_counter = f"{self._version}.{self._epoch}", None, self.config.sampling == "counter"
        if self.saver is None:
            stay.salt = self._left.pop(stay.sample.id, salt)
        else:
            params = self.saver.offer(stay.sample)
            stay.salt = f"{salt}.{self.saver.salt(stay.sample.id)}"
        stay.request_id = self.core.submit(stay.sample, stay.salt, by_counter, params)
        stay.num_computed_tokens, stay.kv = 0, "computed"

    @property
    def _finds_older(self) -> bool:
        """Whether KV of older weights is found in the prefix cache; where KV is saved, it is what the snapshot has."""
        return self.config.kv_on_update == "keep" and self.saver is None

    def _withdraw(self, stay: Stay) -> None:
        if stay.request_id:
            if (did := self.drafted(stay.request_id)).drafted:
                self._journal.add(did.event(self.now(), self.name, stay.sample))
            self.core.withdraw(stay.request_id)
            if self.saver is not None:
                self.saver.leave(stay.sample.id)
            stay.request_id = ""

    def _resubmit(self, stay: Stay) -> None:
        """As a request of the weights and KV that count from here on, behind those that were resubmitted before."""
        self._withdraw(stay)
        self._submit(stay)

    def _start_over(self) -> None:
        """A step broke off: vLLM counts tokens as computed that may not be. All that it has is dropped."""
        if not self.core.is_alive:
            return
        self.core.step_lost()
        self._left.clear()
        self._epoch += 1
        for stay in self._sequences.values():
            if stay.request_id:
                if stay.admitted_at is not None:
                    self._back_to_waiting(stay, "lost step")
                self._resubmit(stay)

    def _admit(self, stay: Stay, at: float, told: Admission | None) -> None:
        """It has its slot and its blocks, and `num_computed_tokens` says how many of its tokens came with them."""
        sample = stay.sample
        stay.num_restored_tokens, stay.restore_seconds, stay.refused = 0, 0.0, None
        if self.saver is not None:
            admission = self.saver.admitted(stay, told)
            stay.kv, stay.num_restored_tokens = admission.kv, admission.num_restored_tokens
            stay.restore_seconds, stay.refused = admission.seconds, admission.refused
        else:
            stay.kv = "recomputed" if sample.output_ids else "computed"
            if stay.num_computed_tokens and not stay.salt.startswith(f"{self._version}."):
                stay.kv = "kept"
            if sample.snapshot is not None:
                stay.refused = "this engine saves no KV (save_kv, or several workers)"
        stay.num_cached_tokens = stay.num_computed_tokens - stay.num_restored_tokens
        self._admitted(stay, at + stay.restore_seconds)

    def _preempted(self, stay: Stay) -> None:
        """By vLLM, for lack of blocks. It keeps its request."""
        self._journal.counts["preemptions"] += 1
        self._back_to_waiting(stay, "out of blocks")

    def _saved(self, stay: Stay, wait: bool) -> Snapshot | None:
        assert self.saver is not None
        return self.saver.save_request(stay)

    def _take_out(self, stay: Stay, kind: Literal["pause", "park"], snapshot: bool) -> Sample:
        sample = stay.sample
        if snapshot and self._finds_older and stay.request_id and (stay.admitted_at is not None or sample.output_ids):
            self._left[sample.id] = stay.salt
            while len(self._left) > self.core.num_blocks:  # of more there cannot be a block left
                del self._left[next(iter(self._left))]
        return super()._take_out(stay, kind, snapshot)

    def _can_save(self, stay: Stay) -> bool:
        has_blocks = stay.admitted_at is not None and not stay.has_ended
        return self.tiers is not None and has_blocks and self.core.is_alive

    def _remove(self, stay: Stay) -> None:
        if stay.admitted_at is not None:
            self._leave_slot(stay)
        self._withdraw(stay)
        del self._sequences[stay.sample.id]


def _core_of(config: VllmSettings) -> type[Core]:
    if config.core == "local":
        return LocalCore
    from longtail.partial_rollout.engines.vllm.process_core import ProcessCore

    return ProcessCore
