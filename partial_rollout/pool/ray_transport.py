"""The engines of a pool as Ray actors (extra `ray`).

    driver: pool ----call, in order----> actor: RayHost ----> engine
                 ----check, export-----> (a thread beside it, so that a step in progress delays neither)

An actor's calls are its queue: what is sent during a step comes after it. Saved KV goes from actor to actor through the
object store; weights are put there once for all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from longtail.errors import LongtailError
from longtail.partial_rollout.pool.host import EngineFactory, Host
from longtail.partial_rollout.pool.member import EngineLost, Member, Transport
from longtail.partial_rollout.pool.messages import About, Reply, pack_gains, record_of, unpack_gains
from longtail.partial_rollout.pool.settings import RayConfig
from longtail.sample import Sample

OLDEST = (2, 50)
"""Version of Ray."""
ASIDE = "aside"
"""Concurrency group of calls that do not wait for a step."""
ASIDE_SECONDS = 60.0
"""That such a call may take before its engine counts as lost."""
ANSWER_SECONDS = 1.0
"""After which another engine is asked too."""
READINGS = 5
"""Of an actor's clock; the quickest counts."""


class RayHost(Host):
    """The actor. fetch_seconds: that it waits for saved KV of another one, and its queue with it."""

    def __init__(self, factory: EngineFactory, name: str, fetch_seconds: float) -> None:
        super().__init__(factory(name=name))
        self._fetch_seconds = fetch_seconds
        self._silent: set[str] = set()
        """Engines whose KV did not come in time: behind a link that is cut, perhaps."""

    def call(self, method: str, drop: Sequence[int], *arguments: Any) -> Reply:
        reply = super().call(method, drop, *arguments)
        reply.gains = pack_gains(reply.gains)
        return reply

    def _restorable(self, saved: Any) -> Any:
        return super()._restorable(self._fetched(*saved) if isinstance(saved, Elsewhere) else saved)

    def _fetched(self, home: str, reference: Any) -> Any:
        import ray

        try:
            saved = ray.get(reference, timeout=0.1 if home in self._silent else self._fetch_seconds)
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.GetTimeoutError):
                self._silent.add(home)
            raise LongtailError(f"saved KV could not be fetched ({type(error).__name__})") from error
        self._silent.discard(home)
        if saved is None:
            raise LongtailError("saved KV is not there any more")
        return saved

    def _weights(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        from longtail.partial_rollout.pool.packed import unpack_weights

        return unpack_weights(weights)


class Elsewhere(NamedTuple):
    """Saved KV in the object store. (A reference inside of something is not fetched before the call.)"""

    home: str
    """Whose it is."""
    reference: Any


class RayMember(Member):
    def __init__(self, about: About, offset: float, actor: Any) -> None:
        super().__init__(about, offset)
        self.actor = actor

    def _start(self, method: str, drop: Sequence[int], arguments: Sequence[Any]) -> Any:
        return self.actor.call.remote(method, list(drop), *arguments)

    def _finish(self, handle: Any) -> Reply:
        reply: Reply = _get(handle)
        reply.gains = unpack_gains(reply.gains)
        return reply

    def export(self, key: int, to: Member) -> Any:
        return None if self.lost is not None else Elsewhere(self.name, self.aside("export", key))

    def fetch(self, key: int) -> Any:
        if self.lost is not None:
            raise EngineLost(self.lost)
        return _get(self.aside("export", key), ASIDE_SECONDS)

    def aside(self, method: str, *arguments: Any) -> Any:
        return getattr(self.actor, method).options(concurrency_group=ASIDE).remote(*arguments)

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)


def _get(handle: Any, timeout: float | None = None) -> Any:
    """EngineLost if the actor is gone, or does not answer in time."""
    import ray

    try:
        return ray.get(handle, timeout=timeout)
    except ray.exceptions.RayError as error:
        raise EngineLost(f"{type(error).__name__}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """In a line. What was raised while an actor was made stands at the end of its traceback."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if "creation task" in lines[0] else lines[0]


class RayTransport(Transport):
    """Starts Ray, or joins the one that runs, and makes the actors. A Ray that this process has joined already is used
    as it is. LongtailError if Ray is missing or too old, or cannot be reached."""

    def __init__(self, factory: EngineFactory, config: RayConfig, deadline: float | None) -> None:
        super().__init__(factory, keeps_weights=True)
        self.config = config
        self._fetch_seconds = config.fetch_seconds if deadline is None else min(config.fetch_seconds, deadline / 2)
        try:
            import ray
        except ImportError as error:
            raise LongtailError("engines on Ray need it: pip install 'longtail[ray]'") from error
        if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
            raise LongtailError(
                f"Ray {ray.__version__} is too old, {OLDEST[0]}.{OLDEST[1]} is needed: pip install -U 'longtail[ray]'"
            )
        self._ray = ray
        self._has_started = False
        self._made: list[RayMember] = []

    def _connect(self, count: int) -> None:
        ray, address = self._ray, self.config.address
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address == "local":  # as many as are asked for, on however few cores
            cpus = max(os.cpu_count() or 1, math.ceil(count * self.config.num_cpus))
            quiet |= {"num_cpus": cpus, "include_dashboard": False}
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LongtailError(
                f'Ray cannot be reached at {address!r} ({error}); "local" starts one, `ray start --head` another'
            ) from error
        self._has_started = True

    def make(self, names: Sequence[str], now: Callable[[], float]) -> list[Member]:
        self._connect(len(names))
        ray, config = self._ray, self.config
        actors = [self._actor(name) for name in names]
        try:
            ray.get([actor.about.remote() for actor in actors], timeout=config.ready_seconds)
            made = [RayMember(*_about(ray, actor, now), actor) for actor in actors]
        except BaseException as error:
            for actor in actors:
                ray.kill(actor)
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise LongtailError(
                    f"{len(names)} actors were not there in {config.ready_seconds:g} s: the cluster has "
                    f"{ray.cluster_resources()}, each asks for num_cpus={config.num_cpus:g}, "
                    f"num_gpus={config.num_gpus:g}, {dict(config.resources)}"
                ) from error
            if isinstance(error, ray.exceptions.RayError):
                raise LongtailError(f"an engine could not be made: {_reason(error)}") from error
            raise
        self._made += made
        return list(made)

    def _actor(self, name: str) -> Any:
        kind = self._ray.remote(concurrency_groups={ASIDE: 2}, **self.config.options())(RayHost)
        return kind.remote(self.factory, name, self._fetch_seconds)

    def begin(self, name: str, now: Callable[[], float]) -> None:
        actor = self._actor(name)
        self._coming.append((actor, actor.about.remote()))

    def made(self, now: Callable[[], float], wait: bool) -> list[Any]:
        ray, found = self._ray, list[Any]()
        if not self._coming:
            return found
        handles = [handle for _, handle in self._coming]
        ray.wait(handles, num_returns=1, timeout=self.config.ready_seconds if wait else 0)
        ready = set(ray.wait(handles, num_returns=len(handles), timeout=0)[0])
        if wait and not ready:
            ready = set(handles)  # they will not come: `_get` says so
        coming, self._coming = self._coming, []
        for actor, handle in coming:
            if handle not in ready:
                self._coming.append((actor, handle))
                continue
            try:
                _get(handle, 0)
                member = RayMember(*_about(ray, actor, now), actor)
            except (EngineLost, ray.exceptions.RayError) as error:
                ray.kill(actor)
                found.append(LongtailError(_reason(error)))
            else:
                self._made.append(member)
                found.append(member)
        return found

    def adopt(self, engine: Any, now: Callable[[], float]) -> Member:
        raise ValueError("engine: this pool's engines are Ray actors; add_engine() makes one")

    def check(self, sample: Sample, members: Sequence[Any]) -> tuple[str | None, dict[Any, str]]:
        """They are alike: the first that answers, in case the link to one is cut. LongtailError if none does, and not
        all are lost."""
        record, asked, lost = record_of(sample), dict[Any, Any](), dict[Any, str]()
        for number, member in enumerate(members, 1):
            asked[member.aside("check", record)] = member
            seconds = ANSWER_SECONDS if number < len(members) else ASIDE_SECONDS
            while asked and (answers := self._ray.wait(list(asked), timeout=seconds)[0]):
                answering = asked.pop(answers[0])
                try:
                    problem: str | None = _get(answers[0])
                except EngineLost as error:
                    lost[answering] = str(error)
                    continue
                return problem, lost
        if asked:
            raise LongtailError("no engine answers")
        return None, lost

    def broadcast(self, weights: Mapping[str, Any]) -> Any:
        from longtail.partial_rollout.pool.packed import pack_weights

        return self._ray.put(pack_weights(weights))

    def saved(self, snapshot: Any) -> Any:
        from longtail.partial_rollout.pool.packed import pack_snapshot

        return Elsewhere("", self._ray.put(pack_snapshot(snapshot)))

    def wait(self, members: Sequence[Any], timeout: float | None) -> list[Any]:
        """Asked without a timeout, which of them; else the first. (Each call of Ray takes 0.1 ms and more.)"""
        calls = {member.outstanding[0].handle: member for member in members}
        count = len(calls) if timeout == 0.0 else 1
        return [calls[handle] for handle in self._ray.wait(list(calls), num_returns=count, timeout=timeout)[0]]

    def close(self) -> None:
        for member in self._made:
            if member.lost is None:
                member.kill()
        for actor, _ in self._coming:
            self._ray.kill(actor)
        self._made.clear()
        self._coming.clear()
        if self._has_started:
            self._has_started = False
            self._ray.shutdown()


def _about(ray: Any, actor: Any, now: Callable[[], float]) -> tuple[About, float]:
    """And the offset of our clock over the actor's, 0 if they may be one: on one machine they are."""
    best, about, offset = math.inf, None, 0.0
    for _ in range(READINGS):
        start = now()
        about = ray.get(actor.about.remote(), timeout=ASIDE_SECONDS)
        took = now() - start
        if took < best:
            best, offset = took, start + took / 2 - about.now
    assert about is not None
    return about, 0.0 if abs(offset) <= best else offset
