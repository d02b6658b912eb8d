"""A pool's side of one of its engines: calls in order, their replies in order, and what lies there."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from longtail.errors import LongtailError
from longtail.partial_rollout.engine import EngineStats
from longtail.partial_rollout.pool.host import Host
from longtail.partial_rollout.pool.messages import About, Reply, Saved
from longtail.sample import Sample
from longtail.version import PolicyVersion


class EngineLost(LongtailError):
    """An engine of a pool has died, hangs, or has failed. Its samples go on elsewhere."""


class HeldKV:
    """Saved KV that lies with an engine of a pool: what `sample.snapshot` is then. It goes there when nobody refers to
    it any more."""

    __slots__ = ("__weakref__", "key", "member", "nbytes", "num_tokens")

    def __init__(self, member: Member, saved: Saved) -> None:
        self.member, self.key = member, saved.key
        self.num_tokens, self.nbytes = saved.num_tokens, saved.nbytes
        # The collector may find it anywhere; a deque's append is safe there.
        weakref.finalize(self, member.dropped.append, saved.key).atexit = False

    def __repr__(self) -> str:
        return f"HeldKV({self.num_tokens} tokens, in {self.member.name})"


@dataclasses.dataclass(slots=True)
class Outstanding:
    """A call whose reply has not been taken."""

    method: str
    handle: Any
    since: float


class Member:
    """One engine. Subclasses say how it is called; `handle` is theirs."""

    def __init__(self, about: About, offset: float) -> None:
        self.name = about.name
        self.about = about
        self.offset = offset
        """Of the pool's clock over the engine's."""
        self.version: PolicyVersion = about.version
        """That it has in place, as far as is known."""
        self.stats: EngineStats | None = None
        self.shares_drafts = about.shares_drafts
        self.outstanding: deque[Outstanding] = deque()
        self.dropped: deque[int] = deque()
        """Keys of saved KV that nobody refers to any more; the next call tells."""
        self.lost: str | None = None
        """Why it is not to be used any more."""
        self.released: Literal["", "tail", "request"] = ""
        """It gets no samples for the time being: by tail repacking, or on request."""
        self.load = 0
        """Samples of the pool that are in it."""

    def send(self, method: str, *arguments: Any) -> None:
        """Calls it behind what was called before."""
        drop = [self.dropped.popleft() for _ in range(len(self.dropped))]
        self.outstanding.append(Outstanding(method, self._start(method, drop, arguments), time.monotonic()))

    @property
    def is_stepping(self) -> bool:
        return any(call.method == "step" for call in self.outstanding)

    @property
    def num_updates_due(self) -> int:
        """Weight updates that it was told of and has not confirmed."""
        return sum(call.method == "update" for call in self.outstanding)

    def take(self) -> tuple[str, Reply]:
        """The oldest call, which is done, and its reply. EngineLost if it has died."""
        call = self.outstanding.popleft()
        if self.outstanding:
            self.outstanding[0].since = time.monotonic()  # it begins now
        return call.method, self._finish(call.handle)

    # -- what subclasses do --------------------------------------------------------------------------------------------

    def _start(self, method: str, drop: Sequence[int], arguments: Sequence[Any]) -> Any:
        raise NotImplementedError

    def _finish(self, handle: Any) -> Reply:
        raise NotImplementedError

    def export(self, key: int, to: Member) -> Any:
        """Saved KV that lies here, as `add` of another engine takes it. Does not wait for steps."""
        raise NotImplementedError

    def fetch(self, key: int) -> Any:
        """`PackedSnapshot` of saved KV that lies here, None if it is gone. EngineLost."""
        raise NotImplementedError

    def kill(self) -> None:
        """Ends it, whatever it does."""


class LocalMember(Member):
    """An engine of this process, called in this thread.

    over_wire: everything it is told and tells is pickled, as on the way to another process."""

    def __init__(self, host: Host, now: float, *, over_wire: bool = False) -> None:
        self.host, self.over_wire = host, over_wire
        about = host.about()
        # Two readings of one clock differ by the time between them.
        offset = now - about.now
        super().__init__(about, 0.0 if abs(offset) < 1e-3 else offset)

    def _pass(self, what: Any) -> Any:
        return pickle.loads(pickle.dumps(what)) if self.over_wire else what

    def _start(self, method: str, drop: Sequence[int], arguments: Sequence[Any]) -> Any:
        try:
            return self._pass(self.host.call(method, drop, *map(self._pass, arguments)))
        except Exception as error:
            return EngineLost(f"{type(error).__name__}: {error}")

    def _finish(self, handle: Any) -> Reply:
        if isinstance(handle, EngineLost):
            raise handle
        reply: Reply = handle
        return reply

    def ready(self) -> bool:
        """Whether the oldest call is done."""
        return bool(self.outstanding)

    def check(self, sample: Sample) -> str | None:
        try:
            return self.host.check(sample)
        except LongtailError as error:  # of an engine whose core has died, say
            raise EngineLost(f"check: {type(error).__name__}: {error}") from error

    def export(self, key: int, to: Member) -> Any:
        if self.lost is not None:
            return None
        return self.host.export(key) if self.over_wire else self.host.peek(key)

    def fetch(self, key: int) -> Any:
        if self.lost is not None:
            raise EngineLost(self.lost)
        return self.host.export(key)


class Transport:
    """How the engines of a pool are made and called: here, in this process.

    keeps_weights: what `broadcast` gives stays as it is, whatever the caller does with the weights: a copy."""

    def __init__(self, factory: Any = None, *, over_wire: bool = False, keeps_weights: bool = False) -> None:
        self.factory, self.over_wire, self.keeps_weights = factory, over_wire, keeps_weights
        self._coming: list[Any] = []

    def make(self, names: Sequence[str], now: Any) -> list[Member]:
        if self.factory is None:
            raise ValueError("this pool was given its engines; give add_engine another one")
        return [self.adopt(self.factory(name=name), now) for name in names]

    def begin(self, name: str, now: Any) -> None:
        """Makes one without waiting for it, if that takes long: `made` has it then."""
        try:
            self._coming += self.make([name], now)
        except Exception as error:  # whatever the factory raises, the others go on
            self._coming.append(LongtailError(f"{type(error).__name__}: {error}"))

    @property
    def is_making(self) -> bool:
        return bool(self._coming)

    def made(self, now: Any, wait: bool) -> list[Any]:
        """Members that `begin` has made by now, or LongtailErrors. wait: for one at least."""
        coming, self._coming = self._coming, []
        return coming

    def adopt(self, engine: Any, now: Any) -> Member:
        return LocalMember(Host(engine), now(), over_wire=self.over_wire)

    def check(self, sample: Sample, members: Sequence[Any]) -> tuple[str | None, dict[Any, str]]:
        """-> what is wrong with it, for any of these engines: it may come to each; and those of them that turned out to
        be lost, and why."""
        lost = dict[Any, str]()
        for member in members:
            try:
                if problem := member.check(sample):
                    return problem, lost
            except EngineLost as error:
                lost[member] = str(error)
        return None, lost

    def broadcast(self, weights: Mapping[str, Any]) -> Any:
        """What `update` takes, once for all engines."""
        return copy.deepcopy(dict(weights)) if self.keeps_weights else weights

    def saved(self, snapshot: Any) -> Any:
        """KV that the pool has in its tiers, as `add` takes it. SnapshotMismatch if it is lost."""
        if not self.over_wire:
            return snapshot
        from longtail.partial_rollout.pool.packed import pack_snapshot

        return pack_snapshot(snapshot)

    def wait(self, members: Sequence[Any], timeout: float | None) -> list[Any]:
        """-> those of these, all of which were called, whose oldest call is done: at least one, if one is done in so
        many seconds (None: however many)."""
        return [member for member in members if member.ready()]

    def close(self) -> None:
        """Ends the engines that the pool has made."""


