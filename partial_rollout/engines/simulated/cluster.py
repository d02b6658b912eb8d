"""Many simulated engines behind the engine protocol: instances, one clock, and whoever comes goes where there is room.

    rollout -> cluster -> [route] -> instance 0 |--pass--|--run of passes alike--------|
                                     instance 1 |--run of passes alike--|--pass--|
                                     clock                              ^ the earliest of what happens next

The cluster goes from event to event: a heap holds the instances by the time at which each has something to do
(`Instance.next_time`), and a step touches the first of them and no other. The others stand behind, and are
brought to the clock when somebody comes to them or is taken out of them. A pass that is under way then is finished
first, so that an instance may stand ahead of the clock by less than a pass; what such a pass brought is reported when
the clock is there.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from longtail.errors import LongtailError
from longtail.events import Listener, ignore
from longtail.partial_rollout.engine import EngineStats, StepOutput
from longtail.partial_rollout.engines.base import check_absent, check_distinct, find
from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.cluster_config import Instances, Loss
from longtail.partial_rollout.engines.simulated.instance import Instance
from longtail.partial_rollout.engines.simulated.loads import Loads
from longtail.partial_rollout.engines.simulated.script import Lengths, to_max_tokens
from longtail.partial_rollout.engines.simulated.sequence import SimulatedSnapshot
from longtail.partial_rollout.pool.routing import ROUTINGS, SPREAD
from longtail.sample import FinishReason, Sample
from longtail.version import PolicyVersion


class SimulatedCluster:
    """An `Engine` of many. instances: kinds of them; their numbers count through.

    affinity: a paused sample goes back to the instance that saved its KV, if that has a free slot and no more than
    `spread` samples more than the least loaded one; else, and if not, it goes to the least loaded one with memory for
    it, and its KV is transferred (`transfer_seconds`). siblings: as `EnginePool` has it, one without saved KV goes to
    where it ran last, and a new one to where the last of its group was sent, on the same terms. routing="group": each
    group is bound to an instance, in turn, and waits for it even if others are free, as where prompts are dealt out
    before the rollout. faults: losses of instances, in virtual time.

    `step` ends with the first event that the caller has to hear of. Between two events the output of running samples
    is as of their instance's last event. horizon: the step ends before so many tokens can be exceeded by more than
    those that the passes of the moment make.
    """

    def __init__(
        self,
        instances: Sequence[Instances],
        *,
        lengths: Lengths = to_max_tokens,
        clock: VirtualClock | None = None,
        name: str = "cluster",
        version: int = 0,
        listener: Listener = ignore,
        affinity: bool = True,
        siblings: bool = False,
        routing: Literal["load", "group"] = "load",
        spread: int = SPREAD,
        faults: Sequence[Loss] = (),
    ) -> None:
        kinds = [kind for kind in instances for _ in range(kind.count)]
        if not kinds:
            raise ValueError("instances is empty; give at least one")
        if isinstance(spread, bool) or not isinstance(spread, int) or spread < 0:
            raise ValueError(f"spread must be an integer of at least 0, not {spread!r}")
        if bad := [fault.instance for fault in faults if not 0 <= fault.instance < len(kinds)]:
            raise ValueError(f"faults: there is no instance {bad[0]}; they are 0 to {len(kinds) - 1}")
        self.name = name
        self.clock = VirtualClock() if clock is None else clock
        if routing not in ("load", "group"):
            raise ValueError(f'routing must be "load" or "group", not {routing!r}')
        self.affinity, self.siblings, self.routing, self.spread = affinity, siblings, routing, spread
        self._route = ROUTINGS["group" if routing == "group" else "affinity"]
        self._bound: dict[str, int] = {}
        """Instance of each group, where they are bound."""
        self._homes: dict[tuple[str, str], int] = {}
        """siblings: the instance that each group ("group", id) and each unfinished sample ("sample", id) came to
        last."""
        self.alarm: float | None = None  # `step` goes no further than this time either
        self.last_left = self.clock.time  # when a sample left its slot last
        self._version = PolicyVersion(version)
        self.instances = [
            Instance(
                cost=kind.cost,
                lengths=lengths,
                clock=VirtualClock(self.clock.time),
                name=f"{name}-{number}",
                version=version,
                listener=listener,
                **{"materialise": False, **kind.settings},
            )
            for number, kind in enumerate(kinds)
        ]
        self._numbers = {instance.name: number for number, instance in enumerate(self.instances)}
        firsts = itertools.accumulate((kind.count for kind in instances[:-1]), initial=0)
        self._kinds = [self.instances[first] for first in firsts]
        """One instance of each kind."""
        self._where: dict[str, int] = {}
        """Instance of each sample."""
        self._loads = Loads([instance.config.slots for instance in self.instances])
        self._agenda: list[tuple[float, int, int, int]] = []
        """Heap of (time, instance, stamp, passes alike up to then); an older stamp does not count."""
        self._stamps = [0] * len(kinds)
        self._changed: dict[int, None] = {}
        """Instances whose place in the agenda is to be found anew."""
        self._held: dict[int, StepOutput] = {}
        """What instances ahead of the clock have to report."""
        self._faults = sorted(
            [(f.time, f.instance, False) for f in faults]
            + [(f.back, f.instance, True) for f in faults if f.back is not None]
        )
        self._unreported = 0
        """Output tokens that instances made when they were brought to the clock between steps."""
        self._made = 0
        """Output tokens that were reported."""
        self._look = (-1, 0, 0.0)
        """Of a horizon, as a number of tokens reported: so many samples may run, and until then, before it needs
        another look."""
        self.clock.join(self)

    # -- the engine protocol ------------------------------------------------------------------------------------------

    @property
    def listener(self) -> Listener:
        return self.instances[0].listener

    @listener.setter
    def listener(self, listener: Listener) -> None:
        for instance in self.instances:
            instance.listener = listener

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def tiers(self) -> None:
        """Its snapshots are counts, which no store needs to keep."""
        return None

    @property
    def num_free_slots(self) -> int:
        return self._loads.free

    @property
    def max_model_len(self) -> int | None:
        """Of the instance that takes the shortest: a sample may come to any."""
        lengths = (engine.max_model_len for engine in self.instances)
        return min((n for n in lengths if n is not None), default=None)

    @property
    def has_work(self) -> bool:
        return bool(self._where or self._held)

    def now(self) -> float:
        return self.clock.time

    @property
    def slot_seconds(self) -> float:
        """That samples have held slots, up to when they left them last."""
        return sum(instance.slot_seconds for instance in self.instances)

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample: it must fit every kind of instance."""
        check_absent(sample, self._where)
        for kind in self._kinds:
            kind.check(sample)

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        batch = samples if isinstance(samples, tuple) else tuple(samples)
        if len(batch) > 1 or len(self._kinds) > 1:
            for sample in batch:
                self.check(sample)
            check_distinct(batch)
        for sample in batch:
            self._place(sample, limit)

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        number = find(self._where, sample_id)
        self._catch_up(number)
        self.instances[number].set_limit(sample_id, limit)
        self._changed[number] = None

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """To the next event that says something (a finish as long as there are `finishes`), to `until`, or until
        `horizon` output tokens are made."""
        out = StepOutput(self._version, num_output_tokens=self._unreported)
        self._unreported = 0
        stop = math.inf if until is None else until
        if self.alarm is not None:
            stop = min(stop, self.alarm)
        stop = max(stop, self.clock.time)
        target = None if horizon is None else self._made + horizon
        faults = self._faults
        while self._where or self._held:
            if horizon is not None and out.num_output_tokens >= horizon:
                break
            self._replan()
            first = self._next_time()
            fault = faults[0][0] if faults else math.inf
            first = min(first, fault)
            if target is not None and self._counted(target, min(first, stop), out):
                continue
            if first > stop:
                self.clock.advance_to(stop)
                break
            if fault <= first:
                self._fault(*faults.pop(0))
                continue
            self.clock.advance_to(first)
            urgent = self._run(heapq.heappop(self._agenda), out)
            if urgent or len(out.finished) >= finishes:
                break
        self._made += out.num_output_tokens
        out.num_seqs = len(self._where)
        return out

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        return self._take(sample_ids, lambda engine, ids: engine.pause(ids, snapshot=snapshot))

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        return self._take(sample_ids, lambda engine, ids: engine.abort(ids, reason=reason))

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Of all instances at once, each when its pass of the moment is done. Where nothing runs, the caller waits."""
        if isinstance(version, bool) or not isinstance(version, int) or version <= self._version:
            raise ValueError(f"version must be an integer above the current {self._version}, not {version!r}")
        for number, instance in enumerate(self.instances):
            self._catch_up(number)
            instance.update_weights(weights, version)
            self._changed[number] = None
        self._version = PolicyVersion(version)
        if not self._where:
            self.clock.advance_to(max(i.now() for i in self.instances))

    def stats(self) -> EngineStats:
        """Sums over the instances, each as of its last event."""
        each = [instance.stats() for instance in self.instances]
        return EngineStats(*(sum(getattr(s, f.name) for s in each) for f in dataclasses.fields(EngineStats)))

    def check_integrity(self) -> None:
        """AssertionError if instances, loads, slots or the agenda do not add up. Call between steps."""
        self._replan()
        for number, instance in enumerate(self.instances):
            instance.check_integrity()
            assert instance.num_sequences == self._loads.of[number], instance.name
            assert self._loads.alive[number] or not instance.num_sequences, instance.name
        inside = {sample_id: n for n, i in enumerate(self.instances) for sample_id in i.sample_ids()}
        assert inside == self._where
        self._loads.check_integrity()
        planned = {n for _, n, stamp, _ in self._agenda if stamp == self._stamps[n]}
        assert planned == {n for n, i in enumerate(self.instances) if i.num_sequences or n in self._held}

    # -- time ---------------------------------------------------------------------------------------------------------

    def _replan(self) -> None:
        if not self._changed:
            return
        stamps, held = self._stamps, self._held
        for number in self._changed:
            stamp = stamps[number] = stamps[number] + 1
            instance = self.instances[number]
            plan = (instance.now(), 0) if number in held else instance.plan()
            if plan is not None:
                heapq.heappush(self._agenda, (plan[0], number, stamp, plan[1]))
        self._changed.clear()

    def _next_time(self) -> float:
        agenda = self._agenda
        while agenda and agenda[0][2] != self._stamps[agenda[0][1]]:
            heapq.heappop(agenda)
        return agenda[0][0] if agenda else math.inf

    def _run(self, entry: tuple[float, int, int, int], out: StepOutput) -> bool:
        """What an instance has at this moment. -> whether the caller has to hear of it at once."""
        time, number, _, passes = entry
        self._changed[number] = None
        instance = self.instances[number]
        known, turns = len(out.finished), len(out.turns)
        if passes:  # they end now: nothing of them is to be held
            instance.leap(passes, time, out)
            for sample in out.finished[known:]:
                self._left(number, sample.id, time)
            for sample in out.turns[turns:]:
                self._left(number, sample.id, time)
        elif (held := self._held.pop(number, None)) is not None:
            _merge(out, held)
        else:
            self._bring(number, instance.advance(), out)
        for sample in out.finished[known:]:
            if sample.status == "failed":
                return True
        return bool(out.at_limit or out.turns)

    def _bring(self, number: int, made: StepOutput, out: StepOutput | None) -> None:
        """Of what an instance has made: tokens count at once, the rest is held if it stands ahead of the clock, or if
        nobody asks (out: None)."""
        if out is None:
            self._unreported += made.num_output_tokens
        else:
            out.num_output_tokens += made.num_output_tokens
        if not (made.finished or made.at_limit or made.turns):
            return
        now = self.instances[number].now()
        for sample in (*made.finished, *made.turns):
            self._left(number, sample.id, now)
        made.num_output_tokens = 0
        if out is None or now > self.clock.time:
            _merge(self._held.setdefault(number, StepOutput(self._version)), made)
        else:
            _merge(out, made)

    def _catch_up(self, number: int, out: StepOutput | None = None) -> None:
        """Brings an instance to the clock."""
        instance, now = self.instances[number], self.clock.time
        if instance.now() >= now:
            return
        if not instance.has_work:
            instance.wait_until(now)
            return
        self._bring(number, instance.step(until=now), out)
        self._changed[number] = None

    # -- counting tokens towards a horizon ----------------------------------------------------------------------------

    def _counted(self, target: int, end: float, out: StepOutput) -> bool:
        """Counts the tokens that are made before `end`, if they may reach the target: by halves, as often as the number
        has binary digits, and pass by pass when less than a token of each sample is wanting. -> whether it did."""
        wanting = target - self._made - out.num_output_tokens
        if wanting <= len(self._where):
            return self._pass_by_pass(wanting, end, out)
        known, running, look = self._look
        if known != target or len(self._where) > running:
            look = self._next_look(target, wanting)
        if look >= end:
            return False
        self.clock.advance_to(look)
        for number, instance in enumerate(self.instances):
            if instance.has_work:
                self._catch_up(number, out)
        self._look = (-1, 0, 0.0)
        return True

    def _next_look(self, target: int, wanting: int) -> float:
        """When half of the tokens are made at the rates of the moment."""
        rate = sum(instance.pace() for instance in self.instances)
        look = self.clock.time + wanting / (2.0 * rate) if rate else math.inf
        self._look = (target, 3 * len(self._where) // 2, look)
        return look

    def _pass_by_pass(self, wanting: int, end: float, out: StepOutput) -> bool:
        """The passes that begin before `end`, in the order of their beginnings."""
        goal = out.num_output_tokens + wanting
        starts = [(max(i.now(), self.clock.time), n) for n, i in enumerate(self.instances) if i.has_work]
        heapq.heapify(starts)
        did = False
        while starts and out.num_output_tokens < goal:
            time, number = heapq.heappop(starts)
            if time >= end or number in self._held:
                break
            self.clock.advance_to(time)
            instance = self.instances[number]
            self._bring(number, instance.step(until=instance.now()), out)
            self._changed[number] = None
            did = True
            if number in self._held or out.finished or out.at_limit or out.turns:
                break
            if instance.has_work:
                heapq.heappush(starts, (instance.now(), number))
        return did

    # -- places -------------------------------------------------------------------------------------------------------

    def _left(self, number: int, sample_id: str, time: float) -> None:
        del self._where[sample_id]
        self._loads.left(number)
        if time > self.last_left:
            self.last_left = time

    def _place(self, sample: Sample, limit: int | None) -> None:
        number = self._route(sample, self)
        if self.siblings:
            self._homes["group", sample.group_id] = self._homes["sample", sample.id] = number
        self._catch_up(number)
        self.instances[number].add((sample,), limit=limit)
        self._where[sample.id] = number
        self._loads.came(number)
        self._changed[number] = None

    # What the rules of routing ask (`pool/routing.py::Fleet`).

    def load(self, number: int) -> int:
        return self._loads.of[number]

    def open_slots(self, number: int) -> int:
        return self._loads.open_slots(number)

    def home(self, sample: Sample) -> int | None:
        """The instance that saved its KV; siblings: or that it ran in, or the last of its group."""
        snapshot, number = sample.snapshot, None
        if snapshot is not None and self.affinity and isinstance(snapshot, SimulatedSnapshot):
            number = self._numbers.get(snapshot.engine)
        if number is None and self.siblings:
            number = self._homes.get(("sample", sample.id), self._homes.get(("group", sample.group_id)))
        return number if number is not None and self._loads.alive[number] else None

    def bound(self, sample: Sample) -> int | None:
        number = self._bound.setdefault(sample.group_id, len(self._bound) % len(self.instances))
        return number if self._loads.alive[number] else None

    def least_loaded(self, sample: Sample) -> int:
        instances = self.instances
        least = self._loads.least(lambda number: instances[number].has_room_for(sample))
        if least is None:
            raise LongtailError(f"cluster {self.name}: all instances are lost; give their faults a time to be back")
        return least

    def _take(
        self, sample_ids: Iterable[str] | None, take: Callable[[Instance, list[str]], list[Sample]]
    ) -> list[Sample]:
        """Takes samples out of their instances, in the order of the ids."""
        ids = list(self._where if sample_ids is None else dict.fromkeys(sample_ids))
        by_instance: dict[int, list[str]] = {}
        for sample_id in ids:
            by_instance.setdefault(find(self._where, sample_id), []).append(sample_id)
        taken: dict[str, Sample] = {}
        latest = self.clock.time
        for number, own in by_instance.items():
            self._catch_up(number)
            instance = self.instances[number]
            for sample in take(instance, [i for i in own if i in self._where]):
                taken[sample.id] = sample
                self._left(number, sample.id, instance.now())
            self._changed[number] = None
            latest = max(latest, instance.now())
            if (held := self._held.get(number)) is not None:
                held.at_limit = [s for s in held.at_limit if s.id in self._where]
        if not self._where:  # the caller waits for the passes of the moment
            self.clock.advance_to(max([latest, *(self.instances[n].now() for n in self._held)]))
            self._unreported = 0
        return [taken[i] for i in ids if i in taken]

    # -- faults -------------------------------------------------------------------------------------------------------

    def _fault(self, time: float, number: int, back: bool) -> None:
        self.clock.advance_to(time)
        instance = self.instances[number]
        if back:
            instance.wait_until(self.clock.time)
            self._loads.restore(number)
            return
        self._catch_up(number)
        limits = {sample_id: instance.limit_left(sample_id) for sample_id in instance.sample_ids()}
        lost = instance.pause(list(limits), snapshot=False)
        self._loads.lose(number)
        self._changed[number] = None
        for sample in lost:
            del self._where[sample.id]
        for sample in lost:
            self._place(sample, limits[sample.id])


def _merge(out: StepOutput, more: StepOutput) -> None:
    out.finished += more.finished
    out.at_limit += more.at_limit
    out.turns += more.turns
    out.num_output_tokens += more.num_output_tokens
