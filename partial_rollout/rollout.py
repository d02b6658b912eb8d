"""The rollout: prompts in, complete groups out, unfinished work kept.

rollout = Rollout(engine, strategy=TokenBudget(8_000))
rollout.submit(prompts, SamplingParams(n=8, temperature=0.7, max_tokens=1024))
groups = rollout.collect()                 # complete groups only
rollout.update_weights(weights, version)   # the next collect() resumes what was paused
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longtail.errors import LongtailError, StoreFull
from longtail.events import Event, EventKind, Listener, ignore
from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.repetition import RepetitionDetector
from longtail.partial_rollout.store import SampleStore
from longtail.partial_rollout.strategies import RolloutState, Strategy, Sync
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams


class Rollout:
    """Drives one engine under one strategy.

    store: a directory (made if need be) in which samples outlive the process: opened again, the rollout continues
    where the last commit left it (submit only what `id in rollout.store` denies; see `SampleStore` for what a trainer
    does that was killed itself). A `SampleStore` for its settings; None: in memory. `close`, or leaving a
    `with Rollout(...)`, closes it.
    snapshots: keep the KV of paused samples (else they continue from their tokens, to the same result); with a store on
    disk, there too, in `<store>/kv`, so that they continue from it in a later process.
    repetition: end looping responses early, with finish_reason "repetition".
    """

    def __init__(
        self,
        engine: Engine,
        *,
        strategy: Strategy | None = None,
        store: SampleStore | str | Path | None = None,
        snapshots: bool = True,
        repetition: RepetitionDetector | None = None,
        listener: Listener = ignore,
    ) -> None:
        self.engine = engine
        self.strategy: Strategy = Sync() if strategy is None else strategy
        self.store = store if isinstance(store, SampleStore) else SampleStore(store)
        try:
            if snapshots and engine.tiers is not None:
                self.store.use_tiers(engine.tiers)
        except BaseException:
            if self.store is not store:
                self.store.close()
            raise
        self.snapshots = snapshots
        self.repetition = repetition
        self.listener = listener
        self.iteration = self.store.iteration
        self._named = self.store.num_submitted
        self._counted = engine.stats()
        """What the ledger knows of the engine's counts."""

    def close(self) -> None:
        """Closes the store, when the KV of paused samples is on its disk. The engine stays the caller's."""
        self.store.close()

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, prompts: Iterable[Group | Sequence[int]], params: SamplingParams | None = None) -> list[Group]:
        """prompts: token ids (params.n samples each), or groups made by the caller. Any number, any time.

        ValueError if the engine cannot run a sample (empty or too long a prompt, unknown token ids, ...) or a group id
        was used before; then none of them is taken.
        """
        groups: list[Group] = []
        number = self._named
        for prompt in prompts:
            if isinstance(prompt, Group):
                groups.append(prompt)
                continue
            while f"g{number}" in self.store:
                number += 1
            groups.append(Group.from_prompt(f"g{number}", prompt, params or SamplingParams()))
            number += 1
        for group in groups:
            for sample in group.samples:
                self.engine.check(sample)
        self.store.add(groups)
        self._named = number
        for group in groups:
            for sample in group.samples:
                sample.timings.submitted = self.engine.now()
                self._emit("submit", sample, num_tokens=len(sample.prompt_ids))
        return groups

    def collect(self, *, wait: bool = False) -> list[Group]:
        """Generates until the strategy stops waiting (wait=True: until everything is finished), pauses what is left,
        and hands over the groups that are complete. Each group is handed over once."""
        strategy: Strategy = Sync() if wait else self.strategy
        unfinished = self.store.unfinished()
        state = RolloutState(
            iteration=self.iteration,
            paused=[s for s in unfinished if s.status == "paused"],
            fresh=[s for s in unfinished if s.status != "paused"],
            running={},
            started_with={},
        )
        self._counted = self.engine.stats()
        self._mark("iteration_start", value=float(self.engine.version))
        try:
            self._generate(strategy, state)
        finally:  # also after an error or an interrupt: the engine is empty again, and nothing is lost
            self._pause([s for s in state.running.values() if not s.is_done], state)
            self._commit()
        groups = self.store.complete()
        for group in groups:
            tokens = sum(len(s.output_ids) for s in group.samples)
            self.listener(
                Event(
                    "hand_over",
                    self.engine.now(),
                    group=group.id,
                    iteration=self.iteration,
                    num_seqs=len(group.samples),
                    num_tokens=tokens,
                )
            )
        total = sum(len(s.output_ids) for g in groups for s in g.samples)
        self._mark("iteration_end", num_seqs=len(groups), num_tokens=total)
        self.store.hand_over(groups, self.iteration)  # last: whatever raised above, no complete group is lost
        self.iteration += 1
        return groups

    def _generate(self, strategy: Strategy, state: RolloutState) -> None:
        while True:
            self._admit(strategy, state)
            if not state.running:
                if (state.paused or state.fresh) and self.engine.num_free_slots == 0:
                    raise LongtailError(
                        f"engine {self.engine.name} has no free slot: somebody else's samples hold all of them; "
                        "finish, pause or abort those first"
                    )
                return
            out = self.engine.step()
            if self.store.commit_due:
                self._commit()
            state.num_output_tokens += out.num_output_tokens
            for sample in out.finished:
                state.running.pop(sample.id, None)
            self._end_loops(state)
            if strategy.stop_waiting(state):
                return
            self._pause(strategy.to_pause(state), state)

    def _commit(self) -> None:
        before, self._counted = self._counted, self.engine.stats()
        self.store.count(
            recomputed=self._counted.num_recomputed_tokens - before.num_recomputed_tokens,
            restored=self._counted.num_restored_tokens - before.num_restored_tokens,
            rejected_drafts=self._counted.num_rejected_tokens - before.num_rejected_tokens,
        )
        self.store.commit()

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Between collects. Paused samples keep their tokens, with the version that made each."""
        with contextlib.suppress(StoreFull):  # the next commit says so; this one records the KV that is on disk by now
            self.store.commit()
        self.engine.update_weights(weights, version)

    def _admit(self, strategy: Strategy, state: RolloutState) -> None:
        for _ in range(self.engine.num_free_slots):
            sample = strategy.next_sample(state)
            if sample is None:
                break
            queue = state.paused if sample.status == "paused" else state.fresh
            self.store.watch([sample])
            self.engine.add([sample])
            queue.remove(sample)
            state.started_with[sample.id] = len(sample.output_ids)
            state.running[sample.id] = sample

    def _pause(self, samples: list[Sample], state: RolloutState) -> None:
        if not samples:
            return
        for sample in self.engine.pause([s.id for s in samples], snapshot=self.snapshots):
            del state.running[sample.id]
            # A sample that never got a token is as fresh as before.
            if not sample.output_ids and sample.snapshot is None:
                sample.status = "waiting"
                self.store.unwatch([sample])
                state.fresh.append(sample)
            else:
                state.paused.append(sample)

    def _end_loops(self, state: RolloutState) -> None:
        if self.repetition is None:
            return
        loops = [s.id for s in state.running.values() if self.repetition(s.output_ids)]
        for sample in self.engine.abort(loops, reason="repetition") if loops else ():
            del state.running[sample.id]

    def _emit(self, kind: EventKind, sample: Sample, **fields: Any) -> None:
        now = self.engine.now()
        self.listener(Event(kind, now, sample=sample.id, group=sample.group_id, iteration=self.iteration, **fields))

    def _mark(self, kind: EventKind, **fields: Any) -> None:
        self.listener(Event(kind, self.engine.now(), iteration=self.iteration, **fields))
