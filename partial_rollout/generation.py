"""Samples between submission and hand-over: who waits, who runs, who is graded, which groups are complete.

    submit -> queue -> [strategy: order, admit] -> engine -> finished -> grader -> ended -> group complete -> hand-over
                ^                                   |  |
                +------ paused, limit reached ------+  +-> turn ended -> environment -> observation -> queue

`Generation.advance` is one turn of this wheel: it admits, lets the engine step, and deals with what the step, the
graders and the environments brought. It knows nothing of iterations' ends: that is `Rollout`'s.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from longtail.errors import LongtailError
from longtail.events import Event, EventKind, Listener, ignore
from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.environment import Turn
from longtail.partial_rollout.grading import Grade
from longtail.partial_rollout.groups import GroupRules, GroupState
from longtail.partial_rollout.ledger import CutLine, Line
from longtail.partial_rollout.repetition import RepetitionDetector
from longtail.partial_rollout.slots import Slots
from longtail.partial_rollout.staleness import StalenessRule, enforce, hand_over
from longtail.partial_rollout.store import SampleStore
from longtail.partial_rollout.strategies.base import Strategy
from longtail.partial_rollout.workers import Workers
from longtail.sample import ENVIRONMENT, FinishReason, Group, Sample, is_zero_variance

Refill = Callable[[], Group | None]
MOST_FINISHES = 1024
"""That an engine may report at once: other threads want their turn."""


class Generation(Slots):
    """Owns the `RolloutState`. The store and the engine are the rollout's."""

    def __init__(
        self,
        engine: Engine,
        store: SampleStore,
        strategy: Strategy,
        *,
        rules: GroupRules,
        staleness: StalenessRule | None,
        workers: Workers,
        repetition: RepetitionDetector | None,
        snapshots: bool,
        submit: Callable[[Group], object],
        refill: Refill | None,
        listener: Listener,
    ) -> None:
        super().__init__(engine, store, strategy, workers, staleness, snapshots)
        self.rules, self.repetition, self.listener = rules, repetition, listener
        self._submit, self._refill = submit, refill
        self._counted = engine.stats()
        self._ordered_by: Strategy | None = None
        """Whose orders the queue has."""
        self._number = 0
        self.dropped: list[Sample] = []
        """Samples that left otherwise than by hand-over; whoever counts them empties it."""
        for group in store:
            self.open(group)

    # -- groups in and out --------------------------------------------------------------------------------------------

    def open(self, group: Group) -> None:
        """A group that was submitted, now or by an earlier process."""
        state, samples = self.state, group.samples
        known = GroupState(group, self._number, len(samples))
        self._number += 1
        known.started = any(s.output_ids or s.is_done for s in samples)
        state.num_started += known.started
        state.groups[group.id] = known
        state.lengths.add(group)
        for sample in samples:
            self.place(sample)
        if self.begun:
            known.needed = self.strategy.needed(known, state)

    def leaving(self) -> list[GroupState]:
        """What is handed over."""
        chosen, rule = self.strategy.hand_over(self.state), self.staleness
        return chosen if rule is None else hand_over(rule, chosen, self.state.oldest_ready(), self.state.version)

    def leave(self, groups: Iterable[GroupState]) -> None:
        """They are the trainer's, or nobody's."""
        for group in groups:
            del self.state.groups[group.id]
            self.state.ready.pop(group.id, None)
            self.state.num_started -= group.started
            self.state.lengths.forget(group.id)
            self.awaited.discard(group.id)

    def drop(self, group: GroupState, line: Line) -> None:
        """Throws a group away, whatever its samples are doing."""
        self.pause(self.in_engine(group.samples))
        tokens = sum(s.num_generated for s in group.samples)
        self.store.discard([group.group], line)
        self.dropped += group.samples
        self.forget(group.samples)
        self.leave([group])
        self._emit("discard", group=group.id, num_seqs=len(group.samples), num_tokens=tokens, detail=line)

    def refill(self) -> None:
        """Another group in the place of one that was dropped, unless there are fresh ones anyway."""
        if self._refill is not None and self.state.num_started == len(self.state.groups):
            group = self._refill()
            if group is not None:
                self._submit(group)

    # -- an iteration -------------------------------------------------------------------------------------------------

    def begin(self, strategy: Strategy, iteration: int) -> None:
        state, self.strategy, self.begun = self.state, strategy, False
        state.iteration, state.num_output_tokens, state.num_admissions = iteration, 0, 0
        # What the caller ended, in an engine of his own.
        for sample in [s for s in state.queue if s.status in ("finished", "failed")]:
            state.queue.remove(sample)
            self.place(sample)
        self.settle()
        self.weights_updated()  # of an earlier process perhaps, or it raised half-way
        state.started_with = {s.id: len(s.output_ids) for s in state.running.values()}
        strategy.begin(state)
        self.begun = True
        needed, restarts = strategy.needed, strategy.restarts
        for group in list(state.groups.values()):
            group.needed = needed(group, state)
            if restarts(group, state):
                self.restart(group, list(group.samples), "aborted")
            elif group.is_ready and group.id not in state.ready:
                self._complete(group)
        state.queue.reorder_all(strictly=strategy is not self._ordered_by)
        self._ordered_by = strategy

    def end(self) -> None:
        """The iteration is over: until the next one begins, the strategy is asked nothing."""
        self.begun = False

    def recount(self) -> None:
        """What the engine did until now was not for this rollout."""
        self._counted = self.engine.stats()

    @property
    def is_awaiting(self) -> bool:
        """Whether a group is unfinished that the next update would make too old."""
        return bool(self.awaited) and any(group_id not in self.state.ready for group_id in self.awaited)

    def advance(self, *, patient: bool = True) -> bool:
        """patient: wait for graders and environments where nothing else is to do. -> False if nothing more can happen
        by itself (or, not patient, by now)."""
        state = self.state
        if self.unsettled:
            self.settle()
            self.weights_updated()
        if self._collect_background():
            return True  # it may be enough, before anything is admitted or waited for
        is_settled = self.admit()
        if not state.running:
            lacks_slot = state.queue.num_eligible > 0 and not self.engine.num_free_slots
            if lacks_slot and self._engine_comes():
                return True
            if len(self.workers):
                if not patient and self.workers.next_time() is None:
                    return False
                self._wait()
                return True
            if lacks_slot:
                self.engine.add(())  # raises if it has no engines left
                raise LongtailError(
                    f"engine {self.engine.name} has no free slot: somebody else's samples hold all of them; "
                    "finish, pause or abort those first"
                )
            return False
        out = self.engine.step(
            horizon=self.strategy.horizon(state),
            until=self.workers.next_time(),
            refilled=state.queue.num_eligible > 0,
            finishes=self._patience() if is_settled else 1,
        )
        state.num_output_tokens += out.num_output_tokens
        if self.store.commit_due:
            self.commit()
        self._left([*out.finished, *out.turns])
        self._end_loops()
        if out.at_limit:
            self.renew(self.in_engine(out.at_limit))
        return True

    def _engine_comes(self) -> bool:
        """Of a pool whose engines were lost: waits for one that takes their place."""
        wait = getattr(self.engine, "wait_for_engine", None)
        return wait is not None and bool(wait())

    def _patience(self) -> int:
        """So many samples may finish before there may be something to do, where nobody waits for a slot."""
        state, strategy = self.state, self.strategy
        if not strategy.is_patient or self.awaited or self.repetition is not None:
            return 1
        if self.workers.grader is not None or not self.workers.is_idle:
            return 1
        patience = strategy.patience(state)
        return MOST_FINISHES if patience is None else min(max(patience, 1), MOST_FINISHES)

    def halt(self) -> None:
        """Takes everything out of the engine, and deals with what has ended."""
        self.empty_engine()
        self._left(list(self.state.running.values()))

    def empty_engine(self) -> None:
        self.pause(self.in_engine(self.state.running.values()))

    def settle(self) -> None:
        """Deals with what is over, or at the end of a turn, and was not dealt with: an error came between, or another
        process left it."""
        if self.unsettled:
            self._left([s for s in self.state.running.values() if s.is_done or s.turn_ended])
            for group in list(self.state.groups.values()):
                if group.is_ready and group.id not in self.state.ready:
                    self._complete(group)
            self.unsettled = False

    def commit(self) -> None:
        before, self._counted = self._counted, self.engine.stats()
        self.store.count(
            recomputed=self._counted.num_recomputed_tokens - before.num_recomputed_tokens,
            restored=self._counted.num_restored_tokens - before.num_restored_tokens,
            rejected_drafts=self._counted.num_rejected_tokens - before.num_rejected_tokens,
            overrun=self._counted.num_overrun_tokens - before.num_overrun_tokens,
        )
        self.store.commit()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _left(self, samples: list[Sample]) -> None:
        """The engine has let go of them, ended or at the end of a turn."""
        running = self.state.running
        for sample in samples:
            if running.pop(sample.id, None) is None:
                continue  # of a group that was dropped a moment ago
            if sample.is_done:
                self._ended(sample)
            else:
                self._park(sample)

    def _end_loops(self) -> None:
        if self.repetition is None:
            return
        loops = [s.id for s in self.in_engine(self.state.running.values()) if self.repetition(s.output_ids)]
        self._left(self.engine.abort(loops, reason="repetition") if loops else [])

    def _ended(self, sample: Sample) -> None:
        """The engine, or an environment, is done with a sample."""
        if sample.status == "failed":
            self._failed(sample)
            return
        state = self.state
        group = state.groups[sample.group_id]
        if sample.id not in group.measured and sample.output_ids:
            group.measured.add(sample.id)
            state.lengths.observe(sample)
        self._grade(sample)
        state.queue.reorder(group.group.samples)

    def _failed(self, sample: Sample) -> None:
        group = self.state.group(sample)
        if sample.attempts < self.rules.retries and sample.prompt_ids:  # a prompt that a disk has lost is not tried
            why = sample.failure or ""
            sample.attempts += 1  # written with the cut
            try:
                self.store.cut(sample, 0, "failed")
            except BaseException:
                sample.attempts -= 1
                raise
            self.state.started_with.pop(sample.id, None)
            self.state.queue.add(sample)
            self._emit("retry", sample, value=sample.attempts, detail=why)
        elif self.rules.failed == "smaller":
            self._done(sample)
        else:
            self.drop(group, "failed")
            if self.rules.failed == "replace":
                self.refill()

    def _grade(self, sample: Sample) -> None:
        wants = sample.status == "finished" and sample.reward is None and sample.grade_failure is None
        if self.workers.grader is None or not wants:
            self._done(sample)
            return
        self.workers.grade(sample, self.state.group(sample).group.task)

    def _done(self, sample: Sample) -> None:
        group = self.state.groups[sample.group_id]
        if sample not in group.ended:
            group.ended.append(sample)
        if group.is_ready and group.id not in self.state.ready:
            self._complete(group)

    def _complete(self, group: GroupState) -> None:
        if len(group.samples) > group.needed:
            kept = {s.id for s in group.ended[: group.needed]}
            self._take_away(group, [s for s in group.samples if s.id not in kept], "surplus")
        if self.rules.zero_variance == "drop" and is_zero_variance([s.reward for s in group.samples]):
            self.drop(group, "zero-variance")
            self.refill()
        else:
            self.state.ready[group.id] = group

    def remove(self, group: GroupState, samples: list[Sample], line: CutLine) -> None:
        """Takes samples out of their group for good; without them it may be complete."""
        self.state.ready.pop(group.id, None)
        self._take_away(group, samples, line)
        if group.is_ready:
            self._complete(group)

    def _take_away(self, group: GroupState, samples: list[Sample], line: CutLine) -> None:
        self.pause(self.in_engine(samples))
        self.store.remove(samples, line)
        self.dropped += samples
        self.forget(samples)
        group.ended = [s for s in group.ended if s not in samples]
        for sample in samples:
            self._emit("discard", sample, num_seqs=1, num_tokens=sample.num_generated, detail=line)

    # -- graders and environments -------------------------------------------------------------------------------------

    def _collect_background(self) -> bool:
        """-> whether there was something."""
        if self.workers.is_idle:
            return False
        self.workers.poll()
        brought = False
        while (found := self.workers.next()) is not None:
            (sample, result), brought = found, True
            if isinstance(result, Grade):
                self._graded(sample, result)
            else:
                self._answered(sample, result)
        return brought

    def _wait(self) -> None:
        """Nothing runs: waits for what graders and environments do."""
        start, what = self.engine.now(), self.workers.what
        self.workers.wait()
        self._collect_background()
        self._emit("wait", time=start, duration=self.engine.now() - start, detail=what)

    def _graded(self, sample: Sample, grade: Grade) -> None:
        sample.reward, sample.grade_failure = grade.reward, grade.failure
        sample.grader = grade.grader
        sample.grade_details = None if grade.details is None else dict(grade.details)
        value = float("nan") if grade.reward is None else grade.reward
        detail = grade.grader if grade.failure is None else f"{grade.grader}: {grade.failure}"
        self._emit("grade", sample, value=value, detail=detail)
        self.store.watch([sample])
        self._done(sample)

    def _park(self, sample: Sample) -> None:
        if self.workers.environment is None:  # nobody answers: it has ended
            self._finish(sample, "stop")
        else:
            self.workers.take_turn(sample, self.state.group(sample).group.task)

    def _answered(self, sample: Sample, turn: Turn) -> None:
        self.store.watch([sample])
        if turn.observation is None:
            self._fail(sample, turn.failure or "")
            return
        if turn.observation.reward is not None:
            sample.reward, sample.grader = turn.observation.reward, ENVIRONMENT
        if turn.observation.done:
            self._finish(sample, "stop")
            return
        length = len(sample.output_ids)
        sample.append_observation(turn.observation.token_ids)
        if not self._has_room(sample):
            sample.cut(length)
            self._finish(sample, "length")
            return
        try:
            self.engine.check(sample)
        except ValueError as error:
            sample.cut(length)
            self._fail(sample, f"observation: {error}")
            return
        took, number = turn.seconds, len(sample.output_ids) - length
        self.state.queue.add(sample)
        self._emit("observe", sample, time=self.engine.now() - took, duration=took, num_tokens=number)

    def _has_room(self, sample: Sample) -> bool:
        """For one token more at least."""
        cap, longest = sample.params.max_tokens, self.engine.max_model_len
        return (cap is None or len(sample.output_ids) < cap) and (longest is None or sample.num_tokens < longest)

    def _fail(self, sample: Sample, failure: str) -> None:
        """Of a sample that is in no engine."""
        sample.turn_ended, sample.snapshot = False, None
        sample.failure, sample.finish_reason, sample.status = failure, "error", "failed"
        self.store.watch([sample])
        self._ended(sample)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        """Ends a sample that is in no engine."""
        sample.turn_ended = False
        sample.status, sample.finish_reason, sample.snapshot = "finished", reason, None
        sample.timings.finished = self.engine.now()
        self.store.watch([sample])
        self._emit("finish", sample, num_tokens=len(sample.output_ids), detail=reason)
        self._ended(sample)

    # -- staleness ----------------------------------------------------------------------------------------------------

    def weights_updated(self) -> None:
        """Deals with what the engine's weights make too old, and finds what will not wait for the next."""
        state, rule = self.state, self.staleness
        state.version = self.engine.version
        if rule is not None:
            enforce(rule, list(state.groups.values()), state.version, self)
            self.awaited = {g.id for g in state.groups.values() if rule.is_due(g, state.version)}
            if self.begun:
                state.queue.reorder_all()

    def mask(self, sample: Sample, end: int) -> None:
        sample.masked = max(sample.masked, end)
        self.store.watch([sample])

    def restart(self, group: GroupState, samples: list[Sample], line: CutLine) -> None:
        """Throws away what they have, and makes them again."""
        self.pause(self.in_engine(samples))
        self.state.ready.pop(group.id, None)
        for sample in samples:
            tokens = sample.num_generated
            self.store.cut(sample, 0, line)
            self.forget([sample])
            group.ended = [s for s in group.ended if s is not sample]
            self.state.started_with.pop(sample.id, None)
            self.state.queue.add(sample)
            self._emit("cut", sample, num_tokens=tokens, detail=line)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def staleness_of(self, group: Group) -> str:
        """JSON: tokens by staleness, as the hand-over event has it."""
        counts: Counter[int] = Counter()
        for sample in group.samples:
            for segment in sample.segments:
                if segment.version >= 0:
                    counts[self.state.version - segment.version] += len(segment)
        return json.dumps({"staleness": {str(age): n for age, n in sorted(counts.items())}})

    def check_integrity(self) -> None:
        """AssertionError unless every sample of every group is in exactly one place."""
        state = self.state
        assert {group.id for group in self.store} == set(state.groups), "the store holds other groups"
        for group in state.groups.values():
            for sample in group.samples:
                assert self.places(sample) == 1, (sample.id, sample.status, self.places(sample))
            assert group.id not in state.ready or group.is_ready, group.id
            assert group.id in state.ready or not group.is_ready or self.unsettled, group.id
        assert state.num_started == sum(group.started for group in state.groups.values())
        known = {s.id for group in state.groups.values() for s in group.samples}
        held = {s.id for s in (*state.queue, *state.running.values(), *self.workers.samples())}
        assert held <= known, held - known

    def _emit(self, kind: EventKind, sample: Sample | None = None, **fields: Any) -> None:
        if self.listener is ignore:
            return
        if sample is not None:
            fields |= {"sample": sample.id, "group": sample.group_id}
        fields.setdefault("time", self.engine.now())
        self.listener(Event(kind, iteration=self.state.iteration, **fields))
