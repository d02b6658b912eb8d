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
from typing import TYPE_CHECKING, Any

from longtail.errors import StoreError, StoreFull
from longtail.events import Event, EventKind, Listener, ignore
from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.generation import Generation, Refill
from longtail.partial_rollout.groups import GroupRules, GroupState
from longtail.partial_rollout.length_bias import LengthBias, LengthBiasWarning
from longtail.partial_rollout.length_estimates import LengthEstimates
from longtail.partial_rollout.loop import Loop, Turn
from longtail.partial_rollout.repetition import RepetitionDetector
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.store import SampleStore
from longtail.partial_rollout.strategies import Strategy, Sync, make_strategy
from longtail.partial_rollout.workers import Decode, Workers
from longtail.sample import Group
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longtail.partial_rollout import environment as environments
    from longtail.partial_rollout.background import Background
    from longtail.partial_rollout.grading import Grade, GradeRequest


class Rollout:
    """Drives one engine under one strategy.

    strategy: an object, or a name with its settings ("token-budget:8000", "over-issue:groups=32,extra=8",
    "my_package.my_module:MyStrategy"); None: `Sync`.
    store: a directory (made if need be) in which samples outlive the process: opened again, the rollout continues
    where the last commit left it (submit only what `id in rollout.store` denies; see `SampleStore` for what a trainer
    does that was killed itself). A `SampleStore` for its settings; None: in memory. `close`, or leaving a
    `with Rollout(...)`, closes it.
    snapshots: keep the KV of paused samples (else they continue from their tokens, to the same result); with a store on
    disk, there too, in `<store>/kv`, so that they continue from it in a later process.
    grader: scores finished samples while others decode (`GraderPool`, say); a group is complete when all are scored. It
    stays the caller's, as the engine does.
    environment: what samples with `multi_turn` talk to (`EnvironmentRunner`).
    decode: token ids -> text, for graders and environments that want text.
    rules: what becomes of failed samples and of groups with equal rewards. refill: gives a fresh group (or None) in the
    place of one that was dropped. staleness: how old a token may be (None: however old).
    repetition: end looping responses early, with finish_reason "repetition".
    background: generate in a thread between `collect`s too; for strategies that keep samples running. The thread ends
    with `close`; what it raises, the next `collect` raises.

    Calls from several threads wait for each other.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        strategy: Strategy | str | None = None,
        store: SampleStore | str | Path | None = None,
        snapshots: bool = True,
        grader: Background[GradeRequest, Grade] | None = None,
        environment: Background[environments.TurnRequest, environments.Turn] | None = None,
        decode: Decode | None = None,
        rules: GroupRules | None = None,
        refill: Refill | None = None,
        staleness: StalenessRule | None = None,
        repetition: RepetitionDetector | None = None,
        background: bool = False,
        listener: Listener = ignore,
    ) -> None:
        rules = rules or GroupRules()
        if rules.zero_variance == "drop" and grader is None:
            raise ValueError('zero_variance="drop" compares rewards; give the rollout a grader')
        self.engine = engine
        self.strategy = make_strategy(strategy)
        if background and not self.strategy.keeps_running:
            raise ValueError(
                f"background: {self.strategy.name} pauses everything between collects; take a strategy that keeps "
                'samples running ("bounded-staleness"), or background=False'
            )
        self.store = store if isinstance(store, SampleStore) else SampleStore(store)
        self.listener = listener
        self.staleness = staleness
        self.length_bias = LengthBias()
        self._warning: LengthBiasWarning | None = None
        self._loop: Loop | None = None
        self._interrupted = False
        try:
            if snapshots and engine.tiers is not None:
                self.store.use_tiers(engine.tiers)
            self.iteration = self.store.iteration
            self._named = self.store.num_submitted
            self._generation = Generation(
                engine,
                self.store,
                self.strategy,
                rules=rules,
                staleness=staleness,
                workers=Workers(grader, environment, decode),
                repetition=repetition,
                snapshots=snapshots,
                submit=lambda group: self._submit([group]),
                refill=refill,
                listener=listener,
            )
            self.turn = Turn(self._generation.rescue)
            """`with rollout.turn`: nothing is generated inside. For what a trainer does with the store (settle, prune,
            flush, ledger) while a thread generates (`background`)."""
            if background:
                self._generation.begin(self.strategy, self.iteration)
                self._loop = Loop(self._work, self.turn)
        except BaseException:
            if self.store is not store:
                self.store.close()
            raise

    def close(self) -> None:
        """Stops generating and closes the store, when the KV of paused samples is on its disk. The engine, graders and
        environments stay the caller's. What the thread of a background rollout raised, and no `collect` has told, is
        raised here in the end."""
        error = None if self._loop is None else self._loop.stop()
        with self.turn:
            try:
                if self.store.is_open:
                    self._generation.halt()
            finally:
                self.store.close()
        if error is not None:
            raise error

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lengths(self) -> LengthEstimates:
        """What is known of how long responses get."""
        return self._generation.state.lengths

    # -- prompts in ---------------------------------------------------------------------------------------------------

    def submit(self, prompts: Iterable[Group | Sequence[int]], params: SamplingParams | None = None) -> list[Group]:
        """prompts: token ids (params.n samples each), or groups made by the caller. Any number, any time.

        ValueError if the engine cannot run a sample (empty or too long a prompt, unknown token ids, ...) or a group id
        was used before; then none of them is taken.
        """
        with self.turn:
            return self._submit(prompts, params)

    def _submit(self, prompts: Iterable[Group | Sequence[int]], params: SamplingParams | None = None) -> list[Group]:
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
            now = self.engine.now()
            for sample in group.samples:
                sample.timings.submitted = now
            self._generation.open(group)
        for group in groups if self.listener is not ignore else ():
            for sample in group.samples:
                self._emit("submit", sample=sample.id, group=group.id, num_tokens=len(sample.prompt_ids))
        return groups

    def cancel(self, group_ids: Iterable[str]) -> None:
        """Throws groups away, whatever their samples are doing. ValueError for one that is not here; then none is."""
        with self.turn:
            groups = [self._group(group_id) for group_id in dict.fromkeys(group_ids)]
            for group in groups:
                self._generation.drop(group, "aborted")

    def _group(self, group_id: str) -> GroupState:
        group = self._generation.state.groups.get(group_id)
        if group is None:
            raise ValueError(f"group_ids: {group_id!r} is not in the rollout (handed over, dropped, never submitted)")
        return group

    # -- groups out ---------------------------------------------------------------------------------------------------

    def collect(self, *, wait: bool = False) -> list[Group]:
        """Generates until the strategy stops waiting (wait=True: until everything is finished), pauses what is left
        (or lets it run, as the strategy has it), and hands over complete groups, oldest first. Each group is handed
        over once."""
        strategy: Strategy = Sync() if wait else self.strategy
        generation = self._generation
        with self.turn:
            self._begin(strategy)
        if self._loop is not None:
            self._loop.wait(lambda: self._interrupted or self._is_over(strategy))
        with self.turn:
            self._check_open()
            try:
                while not (self._interrupted or self._is_over(strategy)) and generation.advance():
                    pass
                if not strategy.keeps_running:
                    generation.halt()
            except BaseException:  # the engine is empty, and nothing is lost
                self._stop_after_error()
                raise
            generation.commit()
            self._interrupted = False
            groups = self._hand_over()
            if self._loop is not None:
                generation.begin(self.strategy, self.iteration)
            elif not strategy.keeps_running:
                generation.end()
            return groups

    def interrupt(self) -> None:
        """From any thread: the `collect` that is running ends after the step in hand, with the groups that are complete
        by then; if none is, the next one does. For a trainer that stops."""
        self._interrupted = True

    def _stop_after_error(self) -> None:
        self._generation.rescue()
        self._generation.empty_engine()
        self._generation.commit()

    def _check_open(self) -> None:
        if not self.store.is_open:
            raise StoreError("the rollout is closed; make another one, with the same store directory")

    def _begin(self, strategy: Strategy) -> None:
        self._check_open()
        warning, self._warning = self._warning, None
        if warning is not None:
            raise warning
        self._emit("iteration_start", value=float(self.engine.version))
        if self._loop is None:
            self._generation.recount()
        if self._loop is None or strategy is not self.strategy:
            self._generation.begin(strategy, self.iteration)

    def _is_over(self, strategy: Strategy) -> bool:
        return strategy.stop_waiting(self._generation.state) and not self._generation.is_awaiting

    def _hand_over(self) -> list[Group]:
        generation = self._generation
        leaving = generation.leaving()
        groups = [group.group for group in leaving]
        if self.listener is not ignore:
            self._tell_hand_over(groups)
        self.store.hand_over(groups, self.iteration)  # last: whatever raised above, no complete group is lost
        generation.leave(leaving)
        self.iteration += 1
        try:
            self._measure(groups)
        except LengthBiasWarning as warning:  # by the caller's filter an error: the next collect raises it
            self._warning = warning
        return groups

    def _tell_hand_over(self, groups: list[Group]) -> None:
        total = 0
        for group in groups:
            tokens = sum(len(s.output_ids) for s in group.samples)
            detail = self._generation.staleness_of(group)
            self._emit("hand_over", group=group.id, num_seqs=len(group.samples), num_tokens=tokens, detail=detail)
            total += tokens
        self._emit("iteration_end", num_seqs=len(groups), num_tokens=total)

    def _measure(self, groups: list[Group]) -> None:
        trained = [s for g in groups for s in g.samples]
        stay = [s for g in self._generation.state.groups.values() if g.started for s in g.samples]
        dropped, self._generation.dropped = self._generation.dropped, []
        self.length_bias.observe(self.iteration - 1, trained, stay, dropped)

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """At any time, between two steps. Samples keep their tokens, with the version that made each; what is too old
        now is dealt with as the staleness rule says."""
        with self.turn:
            with contextlib.suppress(StoreFull):  # the next commit says so; this one records what is on disk by now
                self.store.commit()
            self.engine.update_weights(weights, version)
            self._generation.weights_updated()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _work(self) -> bool:
        """One turn of the thread. -> False if there is nothing to do for the time being."""
        try:
            return self._generation.advance(patient=False)
        except BaseException:
            self._stop_after_error()
            raise

    def work(self) -> bool:
        """Generates between `collect`s, one step: what `background=True` does in a thread, for callers with a loop (or
        a virtual clock) of their own. For strategies that keep samples running. -> False if there is nothing to do."""
        if not self.strategy.keeps_running:
            raise ValueError(f"work: {self.strategy.name} pauses everything between collects")
        with self.turn:
            return self._work()

    @property
    def num_started(self) -> int:
        """Groups that are not handed over and of which at least one sample was ever admitted."""
        return self._generation.state.num_started

    def check_integrity(self) -> None:
        """AssertionError if samples, groups, store and ledger do not add up. Call between steps."""
        with self.turn:
            self._generation.check_integrity()
            self.store.check_balance()

    def _emit(self, kind: EventKind, **fields: Any) -> None:
        if self.listener is not ignore:
            self.listener(Event(kind, self.engine.now(), iteration=self.iteration, **fields))
