"""vLLM behind the engine protocol.

    add -> a request of vLLM's [admit: prefix cache, or KV brought by a connector] -> step* -> finished
                ^                                                                     |
                +---- another request, from its tokens: pause, update, lost step -----+

A sample's state is its tokens. Whatever takes it off its KV (a pause, other weights, a step that broke) ends its
request and starts another from all the tokens it has; what of its KV is still good is found in the prefix cache, under
a salt that names the weights. vLLM schedules and computes (`core`); tokens are drawn by our sampler in its workers
(`sampling`); what ends a sample, and its records, are decided here, as in the native engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from longtail.events import Event, Listener, ignore
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engine import EngineStats, StepOutput
from longtail.partial_rollout.engines.native.journal import Journal
from longtail.partial_rollout.engines.native.sampler import check_end, check_sample, is_full
from longtail.partial_rollout.engines.native.stepper import Outcome, PassResult, commit
from longtail.partial_rollout.engines.native.stop_text import StopText
from longtail.partial_rollout.engines.vllm.config import VllmSettings
from longtail.partial_rollout.engines.vllm.core import Core, Emitted, Pass, check_directory
from longtail.partial_rollout.engines.vllm.drafters import Drafting
from longtail.partial_rollout.engines.vllm.saver import make_saver
from longtail.partial_rollout.engines.vllm.stay import Stay, verdict_of
from longtail.partial_rollout.engines.vllm.weights import Updater
from longtail.sample import FinishReason, Sample
from longtail.sampling_params import check_known_fields
from longtail.version import PolicyVersion, check_newer, check_version


class VllmEngine(Drafting):
    """Runs models on vLLM, in this process.

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
        check_version(version)
        self.config = config = VllmSettings(**settings)
        source = check_directory(model)
        self.name = name
        self.now = clock
        self.saver = make_saver(config, tiers, clock)
        self._journal = Journal(name, listener, clock)
        self._stop_text = StopText(tokenizer, source)
        self.core = Core(source, config, {} if self.saver is None else self.saver.engine_args())
        self.vocab_size, self.eos_token_ids = self.core.vocab_size, self.core.eos_token_ids
        self.max_model_len = self.core.max_model_len
        if config.sampling == "counter":
            self.core.sample_by_counter(config.logprobs_mode == "raw")
        self._start_drafting(self.core.runner, config, version)
        if self.saver is not None:
            self.saver.start(self.core)
        self._updater = Updater(self.core, source)
        self._version = PolicyVersion(version)
        self._epoch = 0
        """Of the prefix cache: a new one finds nothing of those before it."""
        self._left: dict[str, str] = {}
        """Salts of paused samples whose KV is to be kept over updates, by sample; the latest of them."""
        self._stays: dict[str, Stay] = {}
        """By sample, in the order in which vLLM has them."""
        self._full: list[Stay] = []
        """Came with an observation that leaves no room for a token: the next step finishes them."""
        self._lock = threading.RLock()

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
    def tiers(self) -> Tiers | None:
        """None where no KV is saved: `save_kv`, several workers, a model whose layers keep different things."""
        return None if self.saver is None or self.saver.unavailable is not None else self.saver.tiers

    @property
    def num_free_slots(self) -> int:
        return max(self.config.max_num_seqs - len(self._stays), 0)

    @property
    def has_work(self) -> bool:
        return bool(self._stays)

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample."""
        if sample.id in self._stays:
            raise ValueError(f"sample {sample.id} is already in the engine; pause or abort it first")
        decode = self._stop_text.decode_of(sample)  # fails now, not in the middle of a run, if there is no tokenizer
        check_sample(sample, self, self.max_model_len, self._version, decode)
        if self.config.sampling == "vllm" and sample.params.min_tokens:
            raise ValueError(
                f"sample {sample.id}: min_tokens needs sampling='counter': vLLM's own sampler forgets it at a resume"
            )

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        with self._lock:
            batch = list(samples)
            for sample in batch:
                self.check(sample)
            if len({s.id for s in batch}) < len(batch):
                raise ValueError("samples: two samples have the same id; every sample needs its own")
            arriving = [Stay(sample) for sample in batch]
            for stay in arriving:
                stay.set_limit(limit)
            for stay in arriving:
                self._stays[stay.sample.id] = stay
                stay.sample.status = "waiting"
                if is_full(stay.sample, self.max_model_len):
                    self._full.append(stay)
                else:
                    self._submit(stay)

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        with self._lock:
            self._get(sample_id).set_limit(limit)

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """One forward pass over what vLLM's scheduler chose: a new token per sequence, with drafts perhaps several.

        If a listener raises, samples keep what they had, and the next step continues from there. If vLLM raises, they
        do as well; KV of that moment is not trusted, and is computed again.
        """
        with self._lock:
            if self.proposer is not None:
                self.proposer.refilled = refilled
            with self._journal.telling():
                out = StepOutput(self._version)
                self._finish_full(out)
                if self._stays:
                    self._step(out)
            for sample in out.at_limit:  # the caller will hear of it: no listener has raised
                self._stays[sample.id].limit = None
            return out

    def _step(self, out: StepOutput) -> None:
        if self._updater.is_broken:
            raise RuntimeError(
                f"engine {self.name}: an update of the weights failed half-way; repeat update_weights before the "
                "next step"
            )
        start = self.now()
        try:
            done = self.core.step()
        except BaseException:
            self._start_over()
            raise
        result = self._settle_step(done, start, out)
        self._journal.step(start, out.num_seqs, result)
        out.num_output_tokens = result.num_output_tokens
        out.at_limit = [stay.sample for stay in self._stays.values() if stay.is_at_limit]

    def _settle_step(self, done: Pass, start: float, out: StepOutput) -> PassResult:
        """Books what vLLM did in a step."""
        stays = {stay.request_id: stay for stay in self._stays.values()}
        for request_id in done.preempted:
            if request_id in stays:
                self._preempted(stays[request_id])
        decoding = sum(bool(self._stays[e.sample_id].sample.output_ids) for e in done.emitted)
        for request_id, before in done.starts.items():
            stay = stays[request_id]
            stay.num_computed_tokens = before
            if stay.admitted_at is None:
                self._admitted(stay, start)
            stay.num_computed_tokens += done.counts[request_id]
        outcomes = []
        for e in done.emitted:
            outcomes.append(outcome := Outcome(self._stays[e.sample_id]))
            self._take(outcome, e, out)
        out.num_seqs = len(done.counts)
        known, sampling = sum(done.counts.values()), self.core.sample_seconds if done.counts else 0.0
        return PassResult(
            outcomes,
            num_tokens=known + done.num_drafts,
            num_prefill_tokens=known - decoding,
            num_context_tokens=sum(done.starts.values()) + known,
            num_draft_tokens=done.num_drafts,
            draft_seconds=0.0 if self.proposer is None else self.proposer.seconds,
            model_seconds=max(self.now() - start - sampling, 0.0),
            sample_seconds=sampling,
        )

    def _take(self, outcome: Outcome, e: Emitted, out: StepOutput) -> None:
        """Tokens of one request: into its sample, up to what ends it."""
        stay, sample = outcome.seq, outcome.seq.sample
        assert isinstance(stay, Stay)
        commit(outcome, verdict_of(e), self._version, self.name, self._end_of)
        if (request := self.core.request(stay.request_id)) is not None:
            stay.num_computed_tokens = request.num_computed_tokens
        if outcome.emitted and sample.timings.first_token is None:
            sample.timings.first_token = self.now()
            self._journal.emit("first_token", stay)
        if outcome.failure is not None:
            self._fail(stay, outcome.failure)
        elif outcome.end is not None:
            sample.stop_reason = outcome.end.stop_reason
            if outcome.ends_turn:
                sample.turn_ended = True
                self._take_out(stay, "park", snapshot=True)
                out.turns.append(sample)
            else:
                self._finish(stay, outcome.end.reason)
        elif e.finish_reason is not None:
            position = len(sample.output_ids)
            self._fail(stay, f"computing output token {position}: vLLM ended the request ({e.finish_reason})")
        if sample.is_done:
            out.finished.append(sample)

    def _end_of(self, sample: Sample) -> Any:
        return check_end(sample, self.eos_token_ids, self.max_model_len, self._stop_text.decode_of(sample))

    def _finish_full(self, out: StepOutput) -> None:
        full, self._full = self._full, []
        for stay in full:
            if self._stays.get(stay.sample.id) is stay:
                self._finish(stay, "length")
                out.finished.append(stay.sample)

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        with self._lock, self._journal.telling():
            ids = list(self._stays if sample_ids is None else dict.fromkeys(sample_ids))
            return [self._take_out(stay, "pause", snapshot) for stay in [self._get(i) for i in ids]]

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        with self._lock, self._journal.telling():
            stays = [self._get(i) for i in dict.fromkeys(sample_ids)]
            for stay in stays:
                self._finish(stay, reason)
            return [stay.sample for stay in stays]

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """weights: a complete state dict of the model as `transformers` names it (a tied LM head may be left out).
        Nothing changes if it does not fit. KV made by older weights is dropped, or, of the samples that run, kept if
        `kv_on_update` says so; no other request finds it."""
        with self._lock, self._journal.telling():
            check_newer(version, self._version)
            start = self.now()
            checked = self._updater.check(weights)
            self._updater.load(checked, version)
            self._version = PolicyVersion(version)
            if self.proposer is not None:
                self.proposer.weights_updated(version)
            if self.saver is not None:
                self.saver.update_weights(checked)
            for stay in list(self._stays.values()):
                if self.config.kv_on_update == "keep" and stay.admitted_at is not None:
                    stay.kv = "kept"
                elif stay.request_id and not (self._finds_older and stay.sample.output_ids):
                    if stay.admitted_at is not None:
                        self._back_to_waiting(stay, "weight update")
                    self._resubmit(stay)
            self._journal.add(Event("update", start, self.now() - start, self.name, value=version))

    def reset_prefix_cache(self) -> None:
        """Forgets what finished and paused samples left behind."""
        with self._lock:
            self._left.clear()
            self._epoch += 1

    def stats(self) -> EngineStats:
        c = self._journal.counts
        running = sum(stay.admitted_at is not None for stay in self._stays.values())
        return EngineStats(
            num_running=running,
            num_waiting=len(self._stays) - running,
            num_free_blocks=self.core.num_free_blocks,
            num_blocks=self.core.num_blocks,
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
        """AssertionError if blocks, requests or samples do not add up. Call between steps."""
        with self._lock:
            requests = {stay.request_id for stay in self._stays.values() if stay.request_id}
            assert set(self.core.scheduler.requests) == requests, "vLLM's requests are not those of the samples"
            assert set(self.core.llm.output_processor.request_states) == requests
            if self.saver is not None:
                self.saver.check_integrity([i for i, stay in self._stays.items() if stay.request_id])
            assert requests or self.core.num_free_blocks == self.core.num_blocks, "blocks are held by nobody"
            full = {id(stay) for stay in self._full}
            for stay in self._stays.values():
                stay.sample.check_integrity()
                assert stay.token_ids == [*stay.sample.prompt_ids, *stay.sample.output_ids], stay.sample.id
                assert bool(stay.request_id) != (id(stay) in full), f"{stay.sample.id} has no request"
                if stay.request_id:
                    request = self.core.request(stay.request_id)
                    assert request is not None and list(request.all_token_ids) == stay.token_ids, stay.sample.id

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
        self.core.step_lost()
        self._left.clear()
        self._epoch += 1
        for stay in self._stays.values():
            if stay.request_id:
                if stay.admitted_at is not None:
                    self._back_to_waiting(stay, "lost step")
                self._resubmit(stay)

    def _admitted(self, stay: Stay, at: float) -> None:
        """The sequence has its slot and its blocks: records it."""
        sample = stay.sample
        restored, took, refused = 0, 0.0, None
        if self.saver is not None:
            admission = self.saver.admission(sample.id)
            stay.kv, restored = admission.kv, admission.num_restored_tokens
            took, refused = admission.seconds, admission.refused
        else:
            stay.kv = "recomputed" if sample.output_ids else "computed"
            if stay.num_computed_tokens and not stay.salt.startswith(f"{self._version}."):
                stay.kv = "kept"
            if sample.snapshot is not None:
                refused = "this engine saves no KV (save_kv, or several workers)"
        if restored or stay.kv == "restored" or refused is not None:
            detail = "" if refused is None else f"refused: {refused}"
            self._journal.emit("restore", stay, time=at, duration=took, num_tokens=restored, detail=detail)
        sample.snapshot = None
        if sample.output_ids:
            again = stay.num_tokens - 1 - sample.num_unread - stay.num_computed_tokens
            self._journal.counts["recomputed"] += max(again, 0)
        self._journal.counts["cached"] += stay.num_computed_tokens - restored
        self._journal.counts["restored"] += restored
        stay.admitted_at = at
        sample.status = "running"
        if sample.timings.submitted is None:
            sample.timings.submitted = at
        self._journal.emit("admit", stay, time=at, num_tokens=stay.num_computed_tokens, value=stay.num_tokens)

    def _preempted(self, stay: Stay) -> None:
        """By vLLM, for lack of blocks. It keeps its request."""
        self._journal.counts["preemptions"] += 1
        self._back_to_waiting(stay, "out of blocks")

    def _back_to_waiting(self, stay: Stay, cause: str) -> None:
        self._leave_slot(stay)
        self._journal.emit("preempt", stay, num_tokens=stay.num_computed_tokens, detail=cause)
        stay.sample.status = "waiting"

    def _take_out(self, stay: Stay, kind: Literal["pause", "park"], snapshot: bool) -> Sample:
        """Unfinished, with its KV or without."""
        sample = stay.sample
        if not snapshot:
            sample.snapshot = None
        elif self._can_save(stay) and self.saver is not None:
            start, n = self.now(), stay.num_computed_tokens
            sample.snapshot = self.saver.save(sample, self.core.block_table(stay.request_id), n)
            failed = sample.snapshot is None and n > 0
            detail = "failed: no room in host memory" if failed else ""
            self._journal.emit(
                "save", stay, time=start, duration=self.now() - start, num_tokens=0 if failed else n, detail=detail
            )
        if snapshot and self._finds_older and stay.request_id and (stay.admitted_at is not None or sample.output_ids):
            self._left[sample.id] = stay.salt
            while len(self._left) > self.core.num_blocks:  # of more there cannot be a block left
                del self._left[next(iter(self._left))]
        self._remove(stay)
        sample.status = "paused"
        kept = float(sample.snapshot is not None)
        detail = "" if sample.stop_reason is None else str(sample.stop_reason)
        self._journal.emit(kind, stay, num_tokens=len(sample.output_ids), value=kept, detail=detail)
        return sample

    def _can_save(self, stay: Stay) -> bool:
        """Whether it has blocks, and there is somewhere to save them."""
        has_blocks = stay.admitted_at is not None and self.core.request(stay.request_id) is not None
        return self.tiers is not None and has_blocks

    def _remove(self, stay: Stay) -> None:
        """Out of the engine, whether it runs or waits."""
        if stay.admitted_at is not None:
            self._leave_slot(stay)
        self._withdraw(stay)
        del self._stays[stay.sample.id]

    def _leave_slot(self, stay: Stay) -> None:
        assert stay.admitted_at is not None, stay.sample.id
        stay.sample.timings.running += self.now() - stay.admitted_at
        stay.admitted_at = None

    def _get(self, sample_id: str) -> Stay:
        if sample_id not in self._stays:
            raise ValueError(f"sample_ids: {sample_id!r} is not in the engine (finished, paused, or never added)")
        return self._stays[sample_id]

    def _finish(self, stay: Stay, reason: FinishReason) -> None:
        sample = stay.sample
        self._remove(stay)
        sample.status = "finished"
        sample.finish_reason = reason
        sample.snapshot = None
        sample.timings.finished = self.now()
        self._journal.emit("finish", stay, num_tokens=len(sample.output_ids), detail=reason)

    def _fail(self, stay: Stay, failure: str) -> None:
        """A failed sample is data: it keeps its tokens and says at which boundary it failed, and the run goes on."""
        stay.sample.failure = failure
        self._finish(stay, "error")
        stay.sample.status = "failed"
