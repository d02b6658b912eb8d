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
from longtail.partial_rollout.groups import GroupRules, GroupState, is_zero_variance
from longtail.partial_rollout.ledger import CutLine, Line
from longtail.partial_rollout.length_estimates import LengthEstimates
from longtail.partial_rollout.queue import SampleQueue
from longtail.partial_rollout.repetition import RepetitionDetector
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.store import SampleStore
from longtail.partial_rollout.strategies.base import Admit, RolloutState, Strategy
from longtail.partial_rollout.workers import Workers
from longtail.sample import FinishReason, Group, Sample

Refill = Callable[[], Group | None]


class Generation:
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
        self.engine, self.store, self.strategy = engine, store, strategy
        self.rules, self.staleness, self.repetition = rules, staleness, repetition
        self.workers = workers
        self.snapshots, self.listener = snapshots, listener
        self._submit, self._refill = submit, refill
        queue = SampleQueue(self._order, lambda sample: (self.state.group(sample).number, sample.index))
        self.state = RolloutState(LengthEstimates(), queue)
        self._awaited: set[str] = set()
        """Groups that the iteration has to finish, whatever the strategy says (staleness)."""
        self._counted = engine.stats()
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
        known.needed = self.strategy.needed(known, state)
        state.lengths.add(group)
        for sample in list(samples):
            if sample.is_done:
                self._grade(sample)
            elif sample.turn_ended:
                self._park(sample)
            else:
                state.queue.add(sample)

    def leave(self, groups: Iterable[GroupState]) -> None:
        """They are the trainer's, or nobody's."""
        for group in groups:
            del self.state.groups[group.id]
            self.state.ready.pop(group.id, None)
            self.state.num_started -= group.started
            self.state.lengths.forget(group.id)
            self._awaited.discard(group.id)

    def drop(self, group: GroupState, line: Line) -> None:
        """Throws a group away, whatever its samples are doing."""
        self._pause(self._in_engine(group.samples))
        tokens = sum(s.num_generated for s in group.samples)
        self.store.discard([group.group], line)
        self.dropped += group.samples
        self._forget(group.samples)
        self._emit("discard", group=group.id, num_seqs=len(group.samples), num_tokens=tokens, detail=line)
        self.leave([group])

    def refill(self) -> None:
        """Another group in the place of one that was dropped, unless there are fresh ones anyway."""
        if self._refill is not None and all(group.started for group in self.state.groups.values()):
            group = self._refill()
            if group is not None:
                self._submit(group)

    # -- an iteration -------------------------------------------------------------------------------------------------

    def begin(self, strategy: Strategy, iteration: int) -> None:
        state, self.strategy = self.state, strategy
        state.iteration, state.version = iteration, self.engine.version
        state.num_output_tokens = state.num_admissions = 0
        state.started_with = {s.id: len(s.output_ids) for s in state.running.values()}
        self._counted = self.engine.stats()
        self._left([s for s in state.running.values() if s.is_done or s.turn_ended])  # a step that raised left them
        strategy.begin(state)
        for group in list(state.groups.values()):
            group.needed = strategy.needed(group, state)
            if strategy.restarts(group, state):
                self._restart(group, list(group.samples), "aborted")
            elif group.is_ready and group.id not in state.ready:
                self._complete(group)
        rule = self.staleness
        if rule is not None:
            self._awaited = {g.id for g in state.groups.values() if rule.is_due(g, state.version)}
        state.queue.reorder_all()

    @property
    def is_awaiting(self) -> bool:
        """Whether a group is unfinished that the next update would make too old."""
        return any(group_id not in self.state.ready for group_id in self._awaited)

    def advance(self) -> bool:
        """-> False if nothing more can happen by itself."""
        state = self.state
        if self._collect_background():
            return True  # it may be enough, before anything is admitted or waited for
        self._admit()
        if not state.running:
            if len(self.workers):
                self._wait()
                return True
            if state.queue.num_eligible and not self.engine.num_free_slots:
                raise LongtailError(
                    f"engine {self.engine.name} has no free slot: somebody else's samples hold all of them; "
                    "finish, pause or abort those first"
                )
            return False
        out = self.engine.step(
            horizon=self.strategy.horizon(state),
            until=self.workers.next_time(),
            refilled=state.queue.num_eligible > 0,
        )
        if self.store.commit_due:
            self.commit()
        state.num_output_tokens += out.num_output_tokens
        self._left([*out.finished, *out.turns])
        self._end_loops()
        self._renew([s for s in out.at_limit if s.id in state.running])
        return True

    def halt(self) -> None:
        """Takes everything out of the engine."""
        self._pause(self._in_engine(self.state.running.values()))
        self._left(list(self.state.running.values()))

    def commit(self) -> None:
        before, self._counted = self._counted, self.engine.stats()
        self.store.count(
            recomputed=self._counted.num_recomputed_tokens - before.num_recomputed_tokens,
            restored=self._counted.num_restored_tokens - before.num_restored_tokens,
            rejected_drafts=self._counted.num_rejected_tokens - before.num_rejected_tokens,
        )
        self.store.commit()

    # -- slots --------------------------------------------------------------------------------------------------------

    def _order(self, sample: Sample) -> tuple[Any, ...] | None:
        if sample.group_id in self._awaited:
            return (0, self.state.group(sample).number, sample.index)
        order = self.strategy.order(sample, self.state)
        return None if order is None else (1, *order)

    def _admit(self) -> None:
        state = self.state
        for _ in range(self.engine.num_free_slots):
            first = state.queue.first()
            if first is None:
                return
            chosen = Admit(first) if first.group_id in self._awaited else self.strategy.admit(first, state)
            if chosen is None:
                return
            sample, group = chosen.sample, state.group(chosen.sample)
            self.store.watch([sample])
            state.lengths.admit(sample)
            self.engine.add([sample], limit=chosen.limit)
            state.queue.remove(sample)
            state.running[sample.id] = sample
            state.started_with.setdefault(sample.id, len(sample.output_ids))
            state.num_admissions += 1
            if not group.started:
                group.started = True
                group.first_iteration = state.iteration
                state.num_started += 1

    def _pause(self, samples: list[Sample]) -> None:
        if not samples:
            return
        for sample in self.engine.pause([s.id for s in samples], snapshot=self.snapshots):
            self.state.running.pop(sample.id, None)
            if not sample.output_ids and sample.snapshot is None:  # as fresh as before
                sample.status = "waiting"
                self.store.unwatch([sample])
            self.state.queue.add(sample)

    def _renew(self, samples: list[Sample]) -> None:
        spent = []
        for sample in samples:
            more = None if sample.group_id in self._awaited else self.strategy.at_limit(sample, self.state)
            if more is None and sample.group_id not in self._awaited:
                spent.append(sample)
            else:
                self.engine.set_limit(sample.id, more)
        self._pause(spent)

    def _end_loops(self) -> None:
        if self.repetition is None:
            return
        loops = [s.id for s in self.state.running.values() if self.repetition(s.output_ids)]
        self._left(self.engine.abort(loops, reason="repetition") if loops else [])

    def _in_engine(self, samples: Iterable[Sample]) -> list[Sample]:
        return [s for s in samples if s.id in self.state.running and s.status in ("waiting", "running")]

    def _forget(self, samples: Iterable[Sample]) -> None:
        """From here on nothing works on them. None is in the engine."""
        batch = list(samples)
        for sample in batch:
            self.state.queue.discard(sample)
            self.state.running.pop(sample.id, None)
        self.workers.forget(batch)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _left(self, samples: list[Sample]) -> None:
        """The engine has let go of them, ended or at the end of a turn. If something raises (a full disk), those that
        were not dealt with stay in `running`, and the next iteration begins with them."""
        for sample in samples:
            if self.state.running.pop(sample.id, None) is None:
                continue  # of a group that was dropped a moment ago
            try:
                if sample.is_done:
                    self._ended(sample)
                else:
                    self._park(sample)
            except BaseException:
                if self._places(sample) == 0:
                    self.state.running[sample.id] = sample
                raise

    def _places(self, sample: Sample) -> int:
        """In how many places it is: one."""
        state, group = self.state, self.state.groups.get(sample.group_id)
        places = (sample in state.queue, sample.id in state.running, sample in self.workers)
        return sum(places) + (group is not None and sample in group.ended)

    def _ended(self, sample: Sample) -> None:
        """The engine, or an environment, is done with a sample."""
        if sample.status == "failed":
            self._failed(sample)
            return
        group = self.state.group(sample)
        if sample.id not in group.measured:
            group.measured.add(sample.id)
            self.state.lengths.observe(sample)
        self._grade(sample)
        for sibling in group.samples:
            self.state.queue.reorder(sibling)

    def _failed(self, sample: Sample) -> None:
        group = self.state.group(sample)
        if sample.attempts < self.rules.retries:
            why = sample.failure or ""
            self.store.cut(sample, 0, "failed")
            sample.attempts += 1
            self._emit("retry", sample, value=sample.attempts, detail=why)
            self.state.queue.add(sample)
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
        group = self.state.group(sample)
        if sample not in group.ended:
            group.ended.append(sample)
        if group.is_ready and group.id not in self.state.ready:
            self._complete(group)

    def _complete(self, group: GroupState) -> None:
        if len(group.samples) > group.needed:
            kept = {s.id for s in group.ended[: group.needed]}
            self._remove(group, [s for s in group.samples if s.id not in kept], "surplus")
        self.state.ready[group.id] = group
        if self.rules.zero_variance == "drop" and is_zero_variance(group.group):
            self.drop(group, "zero-variance")
            self.refill()

    def _remove(self, group: GroupState, samples: list[Sample], line: CutLine) -> None:
        """Takes samples out of their group for good."""
        self._pause(self._in_engine(samples))
        self.store.remove(samples, line)
        for sample in samples:
            self._emit("discard", sample, num_seqs=1, num_tokens=sample.num_generated, detail=line)
        self.dropped += samples
        self._forget(samples)
        group.ended = [s for s in group.ended if s not in samples]

    # -- graders and environments -------------------------------------------------------------------------------------

    def _collect_background(self) -> bool:
        """-> whether there was something."""
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
        value = float("nan") if grade.reward is None else grade.reward
        self._emit("grade", sample, value=value, detail=grade.failure or "")
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
            sample.turn_ended = False
            sample.failure, sample.finish_reason, sample.status = turn.failure, "error", "failed"
            self._ended(sample)
            return
        if turn.observation.reward is not None:
            sample.reward = turn.observation.reward
        if turn.observation.done:
            self._finish(sample, "stop")
            return
        length = len(sample.output_ids)
        sample.append_observation(turn.observation.token_ids)
        if not self._has_room(sample):
            sample.cut(length)
            self._finish(sample, "length")
            return
        took, number = turn.seconds, len(sample.output_ids) - length
        self._emit("observe", sample, time=self.engine.now() - took, duration=took, num_tokens=number)
        self.state.queue.add(sample)

    def _has_room(self, sample: Sample) -> bool:
        """For one token more at least."""
        cap = sample.params.max_tokens
        if cap is not None and len(sample.output_ids) >= cap:
            return False
        try:
            self.engine.check(sample)
        except ValueError:
            return False
        return True

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
        """Deals with what the new weights make too old."""
        self.state.version = version = self.engine.version
        rule = self.staleness
        if rule is None:
            return
        for group in list(self.state.groups.values()):
            old = rule.exceeded(group, version)
            if not old:
                continue
            if rule.exceeding == "mask":
                for sample, end in old:
                    sample.masked = max(sample.masked, end)
                    self.store.watch([sample])
            elif rule.exceeding == "drop":
                self._drop_old(group, [sample for sample, _ in old])
            else:  # from the start: before what is too old there is nothing but the prompt
                group.restarted_stale = True
                self._restart(group, [sample for sample, _ in old], "stale")

    def _restart(self, group: GroupState, samples: list[Sample], line: CutLine) -> None:
        self._pause(self._in_engine(samples))
        self.state.ready.pop(group.id, None)
        for sample in samples:
            self._emit("cut", sample, num_tokens=sample.num_generated, detail=line)
            self.store.cut(sample, 0, line)
            self._forget([sample])
            group.ended = [s for s in group.ended if s is not sample]
            self.state.queue.add(sample)

    def _drop_old(self, group: GroupState, samples: list[Sample]) -> None:
        assert self.staleness is not None
        if self.staleness.scope == "group" or len(samples) == len(group.samples):
            self.drop(group, "stale")
            self.refill()
            return
        self._remove(group, samples, "stale")
        if group.is_ready and group.id not in self.state.ready:
            self._complete(group)

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
                assert self._places(sample) == 1, (sample.id, sample.status, self._places(sample))
            assert (group.id in state.ready) <= group.is_ready, group.id
            assert group.is_ready <= (group.id in state.ready), group.id
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
