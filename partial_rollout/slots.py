"""Who waits, who runs: samples between the queue and the engine's slots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.length_estimates import LengthEstimates
from longtail.partial_rollout.queue import SampleQueue
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.store import SampleStore
from longtail.partial_rollout.strategies.base import Admit, RolloutState, Strategy
from longtail.partial_rollout.workers import Workers
from longtail.sample import Sample

UNBOUNDED = 2**31 - 1
"""Tokens that a response is taken for where neither its parameters nor the engine bound it."""


class Slots:
    """Every sample of a group that is not handed over is in one place: the queue, `running`, with a worker, or among
    those of its group that have ended. What has ended or is at the end of a turn, and was not dealt with, stands in
    `running` meanwhile."""

    def __init__(
        self,
        engine: Engine,
        store: SampleStore,
        strategy: Strategy,
        workers: Workers,
        staleness: StalenessRule | None,
        snapshots: bool,
    ) -> None:
        self.engine, self.store, self.strategy, self.workers = engine, store, strategy, workers
        self.staleness, self.snapshots = staleness, snapshots
        queue = SampleQueue(self._order, self._age, self._stands)
        self.state = RolloutState(LengthEstimates(context=engine.max_model_len or UNBOUNDED), queue)
        self.begun = False
        """Whether an iteration is under way: else the strategy is asked nothing."""
        self.unsettled = False
        """Whether something in `running` was not dealt with."""
        self.awaited: set[str] = set()
        """Groups that the iteration has to finish, whatever the strategy says (staleness)."""

    def _order(self, sample: Sample) -> tuple[Any, ...] | None:
        if not self.begun:
            return None
        if sample.group_id in self.awaited:
            return (0, self.state.group(sample).number, sample.index)
        order = self.strategy.order(sample, self.state)
        return None if order is None else (1, *order)

    def _age(self, sample: Sample) -> tuple[int, int]:
        return self.state.groups[sample.group_id].number, sample.index

    def _stands(self, sample: Sample) -> bool:
        return self.strategy.fresh_stand and not self.state.groups[sample.group_id].started

    def wait_for(self, group_ids: Iterable[str]) -> None:
        """The iteration has to finish them, whatever the strategy says."""
        for group_id in group_ids:
            self.awaited.add(group_id)
            self.state.queue.reorder(self.state.groups[group_id].samples)

    def admit(self) -> None:
        """Fills the free slots."""
        state, queue, free = self.state, self.state.queue, self.engine.num_free_slots
        refused: set[str] = set()
        while free > 0 and (first := queue.first()) is not None:
            chosen = Admit(first) if first.group_id in self.awaited else self.strategy.admit(first, state)
            if chosen is None:
                if first.id in refused:
                    return
                refused.add(first.id)
                queue.reorder((first,))
                if queue.first() is first:
                    return
                continue
            free -= 1
            sample, group = chosen.sample, state.groups[chosen.sample.group_id]
            self.store.watch((sample,))
            state.lengths.admit(sample)
            self.engine.add((sample,), limit=chosen.limit)
            queue.remove(sample)
            state.running[sample.id] = sample
            state.started_with.setdefault(sample.id, len(sample.output_ids))
            state.num_admissions += 1
            if not group.started:
                group.started = True
                queue.stir(group.samples)
                group.first_iteration = state.iteration
                state.num_started += 1
                if self.staleness is not None and self.staleness.is_due_at_once:
                    self.wait_for([group.id])

    def pause(self, samples: list[Sample]) -> None:
        """Takes them out of the engine, to wait again."""
        if not samples:
            return
        for sample in self.engine.pause([s.id for s in samples], snapshot=self.snapshots):
            self.state.running.pop(sample.id, None)
            if not sample.output_ids and sample.snapshot is None:  # as fresh as before
                sample.status = "waiting"
                self.store.unwatch([sample])
            self.state.queue.add(sample)

    def renew(self, samples: list[Sample]) -> None:
        """They are at their limits: a further one, or a pause."""
        spent = []
        for sample in samples:
            more = None if sample.group_id in self.awaited else self.strategy.at_limit(sample, self.state)
            if more is None and sample.group_id not in self.awaited:
                spent.append(sample)
            else:
                self.engine.set_limit(sample.id, more)
        self.pause(spent)

    def in_engine(self, samples: Iterable[Sample]) -> list[Sample]:
        return [s for s in samples if s.id in self.state.running and s.status in ("waiting", "running")]

    def forget(self, samples: Iterable[Sample]) -> None:
        """From here on nothing works on them. None is in the engine."""
        batch = list(samples)
        for sample in batch:
            self.state.queue.discard(sample)
            self.state.running.pop(sample.id, None)
        self.workers.forget(batch)

    def place(self, sample: Sample) -> None:
        """One that is nowhere."""
        if sample.is_done or sample.turn_ended:
            self.state.running[sample.id] = sample
            self.unsettled = True
        else:
            self.state.queue.add(sample)

    def places(self, sample: Sample) -> int:
        """In how many places it is: one."""
        state, group = self.state, self.state.groups.get(sample.group_id)
        places = (sample in state.queue, sample.id in state.running, sample in self.workers)
        return sum(places) + (group is not None and sample in group.ended)

    def rescue(self) -> None:
        """After an error, wherever it was raised: every sample of every group is in one place again. What was not
        dealt with is dealt with by the next `advance`."""
        self.unsettled = True
        for sample in list(self.state.running.values()):
            if sample.status == "paused" and not sample.turn_ended:  # the engine has let go of it
                del self.state.running[sample.id]
        for group in self.state.groups.values():
            for sample in group.samples:
                if not self.places(sample):
                    self.place(sample)
