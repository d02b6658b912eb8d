"""The simulated engine: every rule of the native one on a virtual clock, and no model.

    add -> waiting -> [admit: prompt of the group, snapshot] -> running -> step* -> finished, or a turn has ended
                 ^                                               |  |
                 +---- preempt (out of memory, new weights) -----+  +-> pause (with or without KV) -> the caller's

How long a sample gets and how it ends is the script's (`script.Length`), what a pass takes is the cost model's
(`cost.StepSeconds`). A step goes on until there is something to report, and passes that are alike are made at once:
what it costs grows with what happens, not with the tokens or with the sequences that run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from longtail.events import Listener, ignore
from longtail.partial_rollout.engine import EngineStats, StepOutput
from longtail.partial_rollout.engines.base import EngineBase, check_absent, check_distinct, find
from longtail.partial_rollout.engines.simulated.checks import check_sample
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.config import SimulatedConfig
from longtail.partial_rollout.engines.simulated.cost import LinearCost, StepSeconds, total_context
from longtail.partial_rollout.engines.simulated.faults import Faults
from longtail.partial_rollout.engines.simulated.journal import Journal, Span
from longtail.partial_rollout.engines.simulated.memory import Memory
from longtail.partial_rollout.engines.simulated.records import Columns, Lists, Records
from longtail.partial_rollout.engines.simulated.scheduler import Chunk, Scheduler
from longtail.partial_rollout.engines.simulated.script import Ending, Lengths, to_max_tokens
from longtail.partial_rollout.engines.simulated.sequence import SimulatedSequence, SimulatedSnapshot
from longtail.partial_rollout.engines.simulated.timing import Timing
from longtail.sample import FinishReason, Sample
from longtail.sampling_params import check_known_fields
from longtail.sequence import limit_after
from longtail.version import PolicyVersion, check_newer


class SimulatedEngine(EngineBase[SimulatedSequence]):
    """Runs samples without a model, in virtual time.

    cost: seconds of a pass; by default each takes a second. lengths: of a sample, a function of nothing but it (asked
    at `check` and at `add`); by default max_tokens. clock: shared with other engines and with what works beside them;
    None: its own. faults: what is to go wrong. Settings: `SimulatedConfig`. For one thread.

    Stop strings, stop ids, ignore_eos and min_tokens mean nothing here: the script says how a sample ends. A `step`
    event stands for `num_passes` passes that are alike: its token counts are their sums, `num_seqs` is that of each.
    """

    def __init__(
        self,
        *,
        cost: StepSeconds | None = None,
        lengths: Lengths = to_max_tokens,
        clock: VirtualClock | None = None,
        name: str = "simulated",
        version: int = 0,
        listener: Listener = ignore,
        faults: Faults | None = None,
        **settings: Any,
    ) -> None:
        check_known_fields(SimulatedConfig, settings)
        self.config = config = SimulatedConfig(**settings)
        self._journal: Journal = Journal(name, listener, self.now)
        super().__init__(name, version, self._journal)
        self.lengths = lengths
        self.clock = VirtualClock() if clock is None else clock
        self.faults = Faults() if faults is None else faults
        self.scheduler = Scheduler(
            Memory(config.kv_tokens, config.enable_prefix_caching),
            slots=config.slots,
            max_num_batched_tokens=config.max_num_batched_tokens,
            attach=self._attach,
            on_admit=self._admitted,
            on_preempt=self._preempt,
        )
        self.records: Records = (Lists if config.materialise else Columns)(name, config.vocab_size)
        self._used_up: dict[str, SimulatedSequence] = {}
        """Of these, those whose last observation left no room for output."""
        self._at_limit: dict[str, SimulatedSequence] = {}
        """Of these, those at a limit that the caller has not heard of."""
        self._ended: list[SimulatedSequence] = []
        """Of these, those whose turn has ended in the pass in hand."""
        self.slot_seconds = 0.0
        """That samples have held slots, up to when they left them."""
        self._new_weights = False
        """Running sequences go on under other weights than those of their last token."""
        self._timing = Timing(self.clock, LinearCost() if cost is None else cost)
        self.clock.join(self)

    # -- the engine protocol ------------------------------------------------------------------------------------------

    @property
    def tiers(self) -> None:
        """Its snapshots are counts, which no store needs to keep."""
        return None

    @property
    def num_free_slots(self) -> int:
        return max(self.config.slots - len(self._sequences), 0)

    @property
    def max_model_len(self) -> int | None:
        return self.config.max_model_len

    def now(self) -> float:
        """Where this engine stands; the clock, if that is later."""
        return self._timing.now()

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample."""
        self._ending(sample)

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        batch = samples if isinstance(samples, tuple) else tuple(samples)
        self.faults.begin_add(batch)
        limit_after(0, limit)
        endings = [self._ending(sample) for sample in batch]
        check_distinct(batch)
        for sample, ending in zip(batch, endings, strict=True):
            length = len(sample.output_ids)
            known = len(sample.prompt_ids) + length
            seq = SimulatedSequence(sample, self.scheduler.passes, ending, self._version, known)
            seq.limit = limit_after(length, limit)
            self._sequences[sample.id] = seq
            if ending.emission <= length:
                self._used_up[sample.id] = seq
            else:
                self.scheduler.wait(seq)
            sample.status = "waiting"

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        seq = find(self._sequences, sample_id)
        seq.limit = limit_after(seq.num_output_tokens, limit)
        self._at_limit.pop(sample_id, None)
        self.scheduler.plan(seq)

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """Passes until a sample finishes, ends its turn or reaches its limit, until `horizon` output tokens are made,
        or until it is `until`: the pass that gets there is the last. One pass at least, if there is work.

        If it raises, samples keep what they had, and the next step continues from there."""
        self.faults.begin_step()
        out = StepOutput(self._version)
        with self._journal.telling():
            try:
                self._run(out, horizon, until)
            finally:
                self.records.catch_up()
                self.clock.ran(self)
            self.faults.end_step()
        out.at_limit = [seq.sample for seq in self._at_limit.values()]
        self._at_limit.clear()  # only now is it sure that the caller hears of it
        return out

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        with self._journal.telling():
            ids = list(self._sequences if sample_ids is None else dict.fromkeys(sample_ids))
            paused = [self._take_out(seq, "pause", snapshot) for seq in [find(self._sequences, i) for i in ids]]
            self.clock.ran(self)
            return paused

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """weights: anything. KV made by older weights is dropped, or kept if `kv_on_update` says so."""
        check_newer(version, self._version)
        with self._journal.telling():
            start = self.now()
            self._timing.spend(self.config.update_seconds)
            self._version = PolicyVersion(version)
            running = list(self.scheduler.running.values())
            if self.config.kv_on_update == "keep":
                for seq in running:
                    self.records.end(seq, seq.num_output_tokens)
                    seq.kv = "kept"
                self._new_weights = True
            else:
                for seq in reversed(running):
                    self._back_to_waiting(seq, "weight update")
                    self.scheduler.give_way(seq)
            self.scheduler.reconsider()
            self._journal.add("update", start, self.now(), value=version)
            self.clock.ran(self)

    def stats(self) -> EngineStats:
        """A block is a token; without `kv_tokens` there are none."""
        capacity = self.config.kv_tokens
        free = 0 if capacity is None else self.scheduler.num_free
        return self._stats(len(self.scheduler.running), free, capacity or 0)

    # -- beyond the protocol ------------------------------------------------------------------------------------------

    def fail(self, sample_id: str, failure: str = "ordered to fail", *, after: int = 0) -> None:
        """The sample fails when it has this many more output tokens and the next is due, unless it ends or leaves
        before."""
        seq = find(self._sequences, sample_id)
        if isinstance(after, bool) or not isinstance(after, int) or after < 0:
            raise ValueError(f"after must be an integer of at least 0 output tokens, not {after!r}")
        ending = Ending(seq.num_output_tokens + after, "failure", "error", failure)
        if ending.emission <= seq.ending.emission:
            seq.ending = ending
            self.scheduler.plan(seq)

    def check_integrity(self) -> None:
        """AssertionError if memory, sequences or samples do not add up. Call between steps."""
        self.scheduler.check_integrity()
        queued = [*self.scheduler.running.values(), *self.scheduler.waiting, *self._used_up.values()]
        assert len(queued) == len(self._sequences) and set(queued) == set(self._sequences.values())
        for name, seq in (self._used_up | self._at_limit).items():
            assert self._sequences.get(name) is seq, name
        for seq in queued:
            sample = seq.sample
            assert sample.status == ("running" if seq.is_running else "waiting"), sample.id
            assert len(sample.output_ids) == seq.num_output_tokens, sample.id
            sample.check_integrity()

    # -- passes -------------------------------------------------------------------------------------------------------

    def _finish_used_up(self, out: StepOutput) -> None:
        for seq in list(self._used_up.values()):
            self._finish(seq, "length")
            out.finished.append(seq.sample)

    def _run(self, out: StepOutput, horizon: int | None, until: float | None) -> None:
        self._finish_used_up(out)
        if self._at_limit:  # an earlier step made them, and raised: one pass, and the caller hears of it
            until = self.now()
        while self._sequences and not out.finished:
            self._turn(out, horizon, until)
            if out.turns or self._at_limit:
                return
            if horizon is not None and out.num_output_tokens >= horizon:
                return
            if until is not None and self.now() >= until:
                return

    def _turn(self, out: StepOutput, horizon: int | None, until: float | None) -> None:
        """A run of passes that are alike, or one pass that is not."""
        if self._new_weights:
            self._begin_versions()
        most = self.scheduler.num_alike()
        if most:
            if horizon is not None:
                most = min(most, max(1, -(-(horizon - out.num_output_tokens) // len(self.scheduler.running))))
            self._decode(most, until, out)
        else:
            self._mixed(out)

    def _begin_versions(self) -> None:
        """What runs goes on under new weights."""
        self._new_weights = False
        for seq in self.scheduler.running.values():
            if seq.decoding:
                self.records.begin(seq, seq.num_output_tokens, self._version)

    def _decode(self, most: int, until: float | None, out: StepOutput) -> None:
        """Passes that are alike: `most` of them, or as many as get to `until`."""
        scheduler = self.scheduler
        n, context = len(scheduler.running), scheduler.num_decoding_tokens
        passes, start, end = self._timing.decode(n, context, scheduler.passes.count, most, until)
        self._decoded(passes, (start, end), context, out)

    def _decoded(self, passes: int, span: Span, context: int, out: StepOutput) -> None:
        """Passes that are alike have been made. context: KV tokens that the first of them read."""
        scheduler = self.scheduler
        n = len(scheduler.running)
        scheduler.passes.count += passes
        made = n * passes - self._settle(scheduler.due(), out)
        self._passed(out, span, n, made, passes, n * passes, 0, total_context(n, context, passes))

    def _mixed(self, out: StepOutput) -> None:
        """One pass as the scheduler has it: decodes, chunks of prefills, admissions."""
        scheduler = self.scheduler
        chunks = scheduler.schedule()
        if not scheduler.running:  # all have given way
            chunks = scheduler.schedule()
            assert chunks, "nobody can be admitted into empty memory"
        n, decoded = scheduler.num_decoding, scheduler.num_decoding_tokens
        prefill = last = resumed = 0
        context = decoded
        for seq, tokens in chunks:
            prefill += tokens
            context += seq.computed + tokens
            if seq.computed + tokens == seq.known:
                last += 1
                resumed += seq.num_output_tokens > 0
        span = self._timing.mixed(n + len(chunks), n + prefill, context)
        scheduler.passes.count += 1
        failed = self._settle(scheduler.due(), out)
        for chunk in chunks:
            failed += self._computed(chunk, out)
        made = n + last - failed
        rows = n + prefill
        prefill -= resumed
        self._passed(out, span, n + len(chunks), made, 1, rows, prefill, context)

    def _passed(
        self, out: StepOutput, span: Span, num_seqs: int, made: int, passes: int, rows: int, prefill: int, context: int
    ) -> None:
        """As the journal's."""
        out.num_output_tokens += made
        out.num_seqs = num_seqs
        self._journal.passed(span, passes, num_seqs, rows, prefill, context, made)
        if self._ended:
            ended, self._ended = self._ended, []
            for seq in ended:
                out.turns.append(self._take_out(seq, "park", snapshot=True))

    def _computed(self, chunk: Chunk, out: StepOutput) -> int:
        """A chunk has been computed. -> failures."""
        seq = chunk.seq
        if not self.scheduler.compute(chunk):
            return 0
        length, timings = seq.num_output_tokens, seq.sample.timings
        if seq.ending.kind != "failure" or length < seq.ending.emission:
            self.records.begin(seq, length - 1, self._version)
            if timings.first_token is None:
                timings.first_token = self._timing.now()
                self._journal.emit("first_token", seq.sample)
        if seq.next_emission <= length:
            return self._settle([seq], out)
        self.scheduler.plan(seq)
        return 0

    def _settle(self, due: list[SimulatedSequence], out: StepOutput) -> int:
        """What happens to these in the pass just made. -> failures."""
        failures = 0
        for seq in due:
            ending = seq.ending
            if seq.limit is not None and seq.num_output_tokens < ending.emission:
                seq.limit = None
                self._at_limit[seq.sample.id] = seq
                self.scheduler.plan(seq)
            elif ending.kind == "turn":
                self._ended.append(seq)  # it is parked when the pass is done with
            else:
                self._finish(seq, ending.reason, ending)
                failures += ending.kind == "failure"
                out.finished.append(seq.sample)
        return failures

    # -- admission and leaving ----------------------------------------------------------------------------------------

    def _attach(self, seq: SimulatedSequence) -> None:
        sample, shared = seq.sample, self.scheduler.memory.shared(seq, self._version)
        seq.num_cached_tokens = seq.computed = 0 if shared is None else len(shared)
        seq.num_restored_tokens, seq.refused, seq.kv_version = 0, None, self._version
        seq.kv = "recomputed" if seq.known > len(sample.prompt_ids) else "computed"
        snapshot = sample.snapshot
        if snapshot is None:
            return
        if not isinstance(snapshot, SimulatedSnapshot):
            seq.refused = f"saved KV of {sample.id} is no simulated engine's"
        elif snapshot.version != self._version and self.config.kv_on_update != "keep":
            seq.refused = f"saved KV of {sample.id} is of other weights"
        else:
            seq.num_restored_tokens = max(snapshot.num_tokens - seq.num_cached_tokens, 0)
            seq.computed += seq.num_restored_tokens
            if seq.num_restored_tokens:
                seq.kv_version = snapshot.version
            seq.kv = "restored" if seq.kv_version == self._version else "kept"

    def _admitted(self, seq: SimulatedSequence) -> None:
        sample = seq.sample
        self.scheduler.memory.enter(seq, self._version)
        if seq.kv in ("restored", "kept") or seq.refused is not None:
            detail = "" if seq.refused is None else f"refused: {seq.refused}"
            start = self.now()
            moved = sample.snapshot is not None and getattr(sample.snapshot, "engine", self.name) != self.name
            each = self.config.restore_seconds + (self.config.transfer_seconds if moved else 0.0)
            self._timing.spend(each * seq.num_restored_tokens)
            self._journal.emit("restore", sample, start, num_tokens=seq.num_restored_tokens, detail=detail)
        sample.snapshot = None
        counts = self._journal.counts
        if seq.known > len(sample.prompt_ids):
            again = seq.known - 1 - sample.num_unread - seq.computed
            counts["recomputed"] += max(again, 0)
        counts["cached"] += seq.num_cached_tokens
        counts["restored"] += seq.num_restored_tokens
        seq.admitted_at = self._timing.now()
        sample.status = "running"
        if sample.timings.submitted is None:
            sample.timings.submitted = seq.admitted_at
        if self._journal.listener is not ignore:
            self._journal.emit("admit", seq.sample, num_tokens=seq.computed, value=seq.known)

    def _preempt(self, seq: SimulatedSequence) -> None:
        self._journal.counts["preemptions"] += 1
        seq.sample.snapshot = self._save(seq) if self.config.preemption == "snapshot" else None
        self._back_to_waiting(seq, "out of blocks")

    def _back_to_waiting(self, seq: SimulatedSequence, cause: str) -> None:
        self._leave_slot(seq, seq.num_output_tokens)
        self._journal.emit("preempt", seq.sample, num_tokens=seq.num_computed_tokens, detail=cause)
        seq.sample.status = "waiting"

    def _save(self, seq: SimulatedSequence) -> SimulatedSnapshot | None:
        start, n = self.now(), seq.num_computed_tokens
        self._timing.spend(self.config.save_seconds * n)
        self._journal.emit("save", seq.sample, start, num_tokens=n)
        return SimulatedSnapshot(n, seq.kv_version, n * self.config.bytes_per_token, self.name) if n else None

    def _leave_slot(self, seq: SimulatedSequence, length: int) -> None:
        self.records.end(seq, length)
        held = self._timing.now() - seq.admitted_at
        seq.sample.timings.running += held
        self.slot_seconds += held

    def _remove(self, seq: SimulatedSequence, length: int | None = None) -> None:
        """Out of the engine, whether it runs or waits. length: of its output, if a failure cut it."""
        name = seq.sample.id
        if self._used_up and name in self._used_up:
            del self._used_up[name]
        else:
            if seq.order >= 0:
                self._leave_slot(seq, seq.num_output_tokens if length is None else length)
            self.scheduler.remove(seq)
        del self._sequences[name]
        if self._at_limit:
            self._at_limit.pop(name, None)

    def _finish(self, seq: SimulatedSequence, reason: FinishReason, ending: Ending | None = None) -> None:
        sample = seq.sample
        failed = ending is not None and ending.kind == "failure"
        self._remove(seq, ending.length if ending is not None else None)
        sample.status = "failed" if failed else "finished"
        sample.finish_reason = reason
        sample.failure = ending.failure if failed and ending is not None else None
        sample.snapshot = None
        sample.timings.finished = self._timing.now()
        if self._journal.listener is not ignore:
            self._journal.emit("finish", seq.sample, num_tokens=len(sample.output_ids), detail=reason)

    def _take_out(self, seq: SimulatedSequence, kind: Literal["pause", "park"], snapshot: bool) -> Sample:
        """Unfinished, with its KV or without."""
        sample = seq.sample
        if seq.is_running:
            sample.snapshot = self._save(seq) if snapshot else None
        elif not snapshot:
            sample.snapshot = None
        self._remove(seq)
        sample.status = "paused"
        sample.turn_ended = kind == "park"
        kept = float(sample.snapshot is not None)
        self._journal.emit(kind, sample, num_tokens=len(sample.output_ids), value=kept)
        return sample

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _ending(self, sample: Sample) -> Ending:
        check_absent(sample, self._sequences)
        return check_sample(sample, self.lengths, self.config, self._version)
