"""Many engines behind the engine protocol.

    rollout -> pool -> [routing] -> engine 0 |==pass==|====pass====|==pass==|
                 ^                  engine 1 |======pass======|==pass==|        (under Ray all at once)
                 +---- replies: what the samples gained -----+

The pool's samples are the caller's; engines work on copies (`pool/host.py`). What an engine made counts when its reply
is applied, so that an engine that dies in the middle of a step takes nothing with it: its samples go on elsewhere from
the tokens that they have here, and make the same ones again.

`step` sets every engine to work that has samples and is idle, and returns as soon as one of them has something, with
all that has come by then. An engine whose step was reported does no other before `step` is called again, so that the
caller's answer to it (a pause, a limit) comes before its next pass. Engines of this process step one after the other,
each once.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longtail.events import Listener, ignore
from longtail.partial_rollout.engine import Engine, EngineStats, StepOutput
from longtail.partial_rollout.engines.base import check_absent, check_distinct, find
from longtail.partial_rollout.engines.telling import tell
from longtail.partial_rollout.pool.crew import Entry
from longtail.partial_rollout.pool.host import EngineFactory
from longtail.partial_rollout.pool.member import Member, Transport
from longtail.partial_rollout.pool.moves import Moves
from longtail.partial_rollout.pool.settings import PoolConfig, RayConfig
from longtail.sample import FinishReason, Sample
from longtail.sampling_params import check_known_fields
from longtail.sequence import limit_after
from longtail.version import PolicyVersion, check_newer

if TYPE_CHECKING:
    from longtail.kv_manager.tier_config import TierConfig
    from longtail.kv_manager.tiers import Tiers


class EnginePool(Moves):
    """An `Engine` of many.

    engines: engines of this process, which nobody else uses meanwhile, with different names; or a function that makes
    one, called with `name=`, `count` times: in this process, or with `ray` in as many Ray actors (it must pickle: a
    module's function, or a functools.partial of a class). ray: "local", "auto", an address, or a `RayConfig`.
    tiers: the pool's own, where saved KV goes that a store on disk is to keep; all other saved KV stays with the engine
    that saved it until another one needs it. clock: by default that of the first engine here, of Ray's driver else.
    over_wire: engines of this process are told everything pickled, as actors are.
    Settings: `PoolConfig`. For one thread.
    """

    def __init__(
        self,
        engines: Sequence[Engine] | EngineFactory,
        *,
        count: int | None = None,
        ray: RayConfig | str | None = None,
        tiers: TierConfig | None = None,
        name: str = "pool",
        listener: Listener = ignore,
        clock: Callable[[], float] | None = None,
        over_wire: bool = False,
        **settings: Any,
    ) -> None:
        check_known_fields(PoolConfig, settings)
        config = PoolConfig(**settings)
        keeps = config.keep_weights or config.restarts > 0
        if callable(engines):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"count must be a number of engines of at least 1, not {count!r}")
            if ray is None:
                transport = Transport(engines, over_wire=over_wire, keeps_weights=keeps)
            else:
                from longtail.partial_rollout.pool.ray_transport import RayTransport

                transport = RayTransport(
                    engines, RayConfig(address=ray) if isinstance(ray, str) else ray, config.deadline
                )
        else:
            if ray is not None or count is not None:
                raise ValueError("count, ray: give a function that makes engines, instead of engines")
            if not engines:
                raise ValueError("engines is empty; give at least one")
            clock = clock or engines[0].now
            transport = Transport(over_wire=over_wire, keeps_weights=keeps)
        super().__init__(name, config, transport, listener, clock or time.perf_counter)
        self._tier_config = tiers
        self._vetted: OrderedDict[Any, None] = OrderedDict()
        """What is known to pass `check`."""
        try:
            if callable(engines):
                joining = transport.make(self._names(count or 1), self.now)
            else:
                joining = [transport.adopt(engine, self.now) for engine in engines]
            self._version = joining[0].version
            for member in joining:
                self._join(member)
        except BaseException:
            transport.close()
            raise

    def close(self) -> None:
        """Ends the actors that it has made, and the Ray that it has started. Engines of this process stay the
        caller's. Samples that are in it keep what they have."""
        self._transport.close()
        if self._tiers is not None:
            self._tiers.close()

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the engine protocol -------------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def num_free_slots(self) -> int:
        if not self._crew.active:  # no step may come that would take them in
            self._welcome()
        return self._crew.num_free

    @property
    def has_work(self) -> bool:
        held = self._held
        return bool(self._crew.entries or held.finished or held.turns)

    @property
    def max_model_len(self) -> int | None:
        """Of the engine that takes the shortest: a sample may come to any."""
        return self._crew.max_model_len

    @property
    def tiers(self) -> Tiers | None:
        """The pool's own, where a store on disk finds saved KV. None where engines have none."""
        if self._tiers is None and all(m.about.has_tiers for m in self._crew.members):
            from longtail.kv_manager.tiers import Tiers

            self._tiers = Tiers(self._tier_config)
        return self._tiers

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample."""
        check_absent(sample, self._crew.entries)
        fresh = not sample.output_ids and sample.routed_experts is None
        key = (sample.prompt_ids, sample.params, sample.multi_turn) if fresh else (sample.id, len(sample.output_ids))
        if key in self._vetted:
            return
        if problem := self._checked(sample):
            raise ValueError(problem)
        self._vet(key)

    def _checked(self, sample: Sample) -> str | None:
        while True:
            self._first()
            problem, lost = self._transport.check(sample, asked := self._crew.alive)
            for member, why in lost.items():
                self._lose(member, why)
            if len(lost) < len(asked):
                return problem

    def _vet(self, key: Any) -> None:
        self._vetted[key] = None
        if len(self._vetted) > 4096:
            self._vetted.popitem(last=False)

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """All or none are taken. ValueError names the sample, the field and the fix."""
        batch = list(samples)
        self._first()  # there is one
        limit_after(0, limit)
        for sample in batch:
            self.check(sample)
        check_distinct(batch)
        for sample in batch:
            self._place(Entry(sample, limit_at=limit_after(len(sample.output_ids), limit)))

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        entry = find(self._crew.entries, sample_id)
        entry.limit_at = limit_after(len(entry.sample.output_ids), limit)
        if entry.member is not None:
            entry.member.send("set_limit", sample_id, limit)

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """Until at least one engine has done a step; with all that has come by then.

        LongtailError if no engine is left; nothing is lost then: `add_engine`, or `pause`."""
        self._give_work(refilled)
        idle = [m for m in self._crew.alive if m.load and not m.is_stepping]
        for member in idle:
            news = self._sharing.news(member, self.now())
            if news is not None:
                self._events.append(news.event)
            message = None if news is None else news.message
            member.send("step", None if horizon is None else max(horizon // len(idle), 1), refilled, message)
        stepped = False if idle else self._collect()
        while not stepped and any(m.is_stepping for m in self._crew.alive):
            stepped = self._wait()
        tell(self._events, self.listener)
        out, self._held = self._held, StepOutput(self._version)
        inside = self._crew.entries
        out.version = self._version
        out.finished = [s for s in out.finished if s.is_done and s.id not in inside]
        out.turns = [s for s in out.turns if s.turn_ended and s.id not in inside]
        out.at_limit = [s for s in out.at_limit if s.id in inside]
        return out

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        """Of these, those that have not ended in a step that was in progress: `step` reports them."""
        paused = self._take_out(sample_ids, "pause", snapshot)
        if not self._crew.entries:
            self._held.num_output_tokens = 0  # of an iteration that is over
        for sample in paused:
            if not snapshot:
                sample.snapshot = None
            self._vet((sample.id, len(sample.output_ids)))
        tell(self._events, self.listener)
        return paused

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        """As `pause`: not what has ended by itself meanwhile."""
        aborted = self._take_out(sample_ids, "abort", reason)
        tell(self._events, self.listener)
        return aborted

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """One broadcast. Waits for the steps in progress, so that every token of older weights is in the samples when
        this returns, and for an engine to find that the weights fit; the others (up to `most_behind` updates) put them
        in place while the caller goes on, before their next step. Nothing changes if they do not fit."""
        check_newer(version, self._version)
        self._collect()
        while any(m.is_stepping for m in self._crew.alive):
            self._wait()
        payload = self._transport.broadcast(weights)
        while not self._answers_to("update", self._first(), payload, version):
            pass  # lost while it tried
        self._version = PolicyVersion(version)
        self._weights = payload if self._transport.keeps_weights else None
        for member in self._crew.alive:
            if member.released == "tail":
                member.released = ""
            if member.version < version:
                member.send("update", payload, version)
        self._collect()
        while any(m.num_updates_due > self.config.most_behind for m in self._crew.alive):
            self._wait()
        tell(self._events, self.listener)

    def stats(self) -> EngineStats:
        """Sums over the engines, each as of its last reply; lost ones count with what they had told. Output tokens are
        those that are in the samples."""
        known = [m.stats for m in self._crew.alive if m.stats is not None]

        def total(field: str) -> int:
            return self._retired.get(field, 0) + sum(getattr(stats, field) for stats in known)

        values = {field.name: total(field.name) for field in dataclasses.fields(EngineStats)}
        traffic = self._sharing.traffic
        own = {
            "num_output_tokens": self._num_output,
            "num_news": traffic.messages,
            "num_news_tokens": traffic.tokens,
            "num_news_bytes": traffic.bytes,
        }
        return EngineStats(**values | own)

    # -- beyond it -----------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> dict[str, str]:
        """What each engine does, by name: "active", "released", or "lost: ..."."""
        return {
            m.name: "active" if not (m.lost or m.released) else f"lost: {m.lost}" if m.lost else "released"
            for m in self._crew.members
        }

    @property
    def behind(self) -> dict[str, int]:
        """Engines that have not confirmed the last weights, and how many updates they are behind."""
        return {m.name: m.num_updates_due for m in self._crew.alive if m.num_updates_due}

    def add_engine(self, engine: Engine | None = None) -> str:
        """Another engine, or the return of one, empty; it takes work at once. None: made as the pool's others are.
        -> its name. ValueError if it has other weights than the pool, and the pool has none to give it."""
        if engine is None:
            (member,) = self._transport.make(self._names(1), self.now)
        else:
            member = self._transport.adopt(engine, self.now)
        self._join(member)
        return member.name

    def release(self, name: str) -> None:
        """Its samples go on elsewhere, with their KV, and it gets no others until `recall` (or until no other engine is
        left): for the trainer, say, or to train a drafter. It has its weights updated. ValueError if it is not here,
        or is the last one that works."""
        member = self._active(name)
        member.released = "request"
        self._tell_of(member, "released", member.load)
        self._move(self._crew.of(member))
        tell(self._events, self.listener)

    def recall(self, name: str) -> None:
        """It gets samples again. ValueError if it is not here."""
        member = next((m for m in self._crew.alive if m.name == name), None)
        if member is None:
            raise ValueError(f"name: {name!r} is not an engine of the pool")
        member.released = ""

    def _active(self, name: str) -> Member:
        member = next((m for m in self._crew.alive if m.name == name), None)
        if member is None or not any(m is not member for m in self._crew.active):
            raise ValueError(f"name: {name!r} is not an engine of the pool, or the last one that works")
        return member

    def remove_engine(self, name: str) -> None:
        """Its samples go on elsewhere, with their KV; saved KV that lies there goes with it. ValueError if it is not
        here, or is the last one that works."""
        member = self._active(name)
        self.release(name)
        self._lose(member, "removed", counts=False)
        tell(self._events, self.listener)

    def use_drafter(self, drafter: Any, controller: Any = None) -> None:
        """As `NativeEngine.use_drafter`, in every engine, also in those that join later. They know nothing yet; a group
        index hears from the other engines (`PoolConfig.share_drafts`)."""
        self._ask("do", "use_drafter", (drafter, controller))
        self._drafter = drafter, controller
        self._sharing.forget_all()

    def reset_prefix_cache(self) -> None:
        self._ask("do", "reset_prefix_cache", ())

    def drafting(self) -> dict[str, Any]:
        """What came of drafting, by engine (`Speculation.report`)."""
        return {m.name: reply.value for m, reply in self._ask("drafting").items()}

    def check_integrity(self) -> None:
        """AssertionError unless every sample is in one engine, with the same tokens here and there."""
        self._drain(self._crew.alive)
        self._sharing.check_integrity({name: entry.sample for name, entry in self._crew.entries.items()})
        self._crew.check_integrity((m, reply.value) for m, reply in self._ask("inventory").items())
