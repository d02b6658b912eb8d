"""An engine of a pool, as the pool calls it: in this process, or as a Ray actor.

It runs copies of the pool's samples. After each call it looks what has changed since it told last, so that nothing is
told twice or forgotten, whatever raised in between.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longtail.errors import LongtailError
from longtail.events import Event
from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.pool.messages import About, Gain, Reply, Saved
from longtail.sample import FinishReason, Sample

if TYPE_CHECKING:
    from longtail.kv_manager.snapshot import Snapshot
    from longtail.partial_rollout.pool.packed import PackedSnapshot

EngineFactory = Callable[..., Engine]
"""Called with `name=`, in the process where the engine is to live."""


class _Told:
    """What the pool knows of a sample."""

    __slots__ = ("last", "num_output", "num_routed", "sample")

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.num_output = len(sample.output_ids)
        routed = sample.routed_experts if sample.output_ids else None  # without output it starts anew
        self.num_routed = 0 if routed is None else len(routed)
        self.last: Any = None


class Host:
    """Owns an engine, which nobody else may use meanwhile, and the saved KV of samples that have left it."""

    def __init__(self, engine: Engine) -> None:
        if engine.has_work:
            raise ValueError(f"engine {engine.name} has samples; pause or abort them before it joins a pool")
        self.engine = engine
        self._told: dict[str, _Told] = {}
        self._saved: dict[int, Any] = {}
        self._next_key = 0
        self._events: list[Event] = []
        engine.listener = self._events.append  # type: ignore[attr-defined]

    def about(self) -> About:
        engine = self.engine
        return About(
            name=engine.name,
            version=engine.version,
            slots=engine.num_free_slots,
            max_model_len=engine.max_model_len,
            has_tiers=engine.tiers is not None,
            host=socket.gethostname(),
            process=os.getpid(),
            now=engine.now(),
            shares_drafts=self._shares_drafts,
        )

    @property
    def _shares_drafts(self) -> bool:
        speculation = getattr(self.engine, "speculation", None)
        return speculation is not None and bool(speculation.hears)

    # -- calls that a step in progress does not delay ------------------------------------------------------------------

    def check(self, sample: Sample) -> str | None:
        """-> what is wrong with it."""
        try:
            self.engine.check(sample)
        except ValueError as error:
            return str(error)
        return None

    def export(self, key: int) -> PackedSnapshot | None:
        """Saved KV, for another engine; None if it is not here any more."""
        from longtail.errors import SnapshotMismatch
        from longtail.kv_manager.snapshot import Snapshot
        from longtail.partial_rollout.pool.packed import pack_snapshot

        saved = self._saved.get(key)
        try:
            return pack_snapshot(saved) if isinstance(saved, Snapshot) else saved
        except SnapshotMismatch:
            return None

    def peek(self, key: int) -> Any:
        """As it lies here, for engines of the same process."""
        return self._saved.get(key)

    # -- calls in order ------------------------------------------------------------------------------------------------

    def call(self, method: str, drop: Sequence[int], *arguments: Any) -> Reply:
        """drop: keys of saved KV that nobody needs any more. Errors are in the reply."""
        for key in drop:
            self._saved.pop(key, None)
        reply = Reply(self.engine.version, self.engine.stats(), 0.0)
        try:
            getattr(self, f"_{method}")(reply, *arguments)
        except ValueError as error:
            reply.misuse = str(error)
        except Exception as error:  # of this engine, whatever it is: the pool goes on without it
            reply.failure = f"{type(error).__name__}: {error}"
        self._report(reply)
        return reply

    def _add(self, reply: Reply, record: Sample, limit: int | None, saved: Any) -> None:
        """saved: a key of `Saved`, or KV from elsewhere, or None."""
        refused = None
        try:
            record.snapshot = self._restorable(saved)
        except LongtailError as error:
            refused = str(error)
        told = _Told(record)
        try:
            self.engine.add([record], limit=limit)
        except ValueError:
            reply.refused.append(record.id)
            raise
        self._told[record.id] = told
        if refused is not None or (saved is not None and record.snapshot is None):
            detail = f"refused: {refused or 'saved KV is not there any more'}"
            event = Event("restore", self.engine.now(), engine=self.engine.name, detail=detail)
            event.sample, event.group = record.id, record.group_id
            self._events.append(event)

    def _restorable(self, saved: Any) -> Any:
        if isinstance(saved, int):
            return self._saved.get(saved)
        if saved is None or self.engine.tiers is None:
            return saved
        from longtail.partial_rollout.pool.packed import PackedSnapshot, unpack_snapshot

        return unpack_snapshot(saved, self.engine.tiers) if isinstance(saved, PackedSnapshot) else saved

    def _step(self, reply: Reply, horizon: int | None, refilled: bool, news: bytes | None) -> None:
        """news: what siblings of its samples wrote elsewhere (`sharing.News`, pickled)."""
        if news is not None and self._shares_drafts:
            for sample_id, heard in pickle.loads(news):
                if sample_id in self._told:
                    prompt_ids = self._told[sample_id].sample.prompt_ids
                    for part in heard:
                        self.engine.speculation.hear(prompt_ids, part)  # type: ignore[attr-defined]
        out = self.engine.step(horizon=horizon, refilled=refilled)
        reply.num_seqs = out.num_seqs
        reply.at_limit = [s.id for s in out.at_limit]

    def _pause(self, reply: Reply, sample_ids: Iterable[str], snapshot: bool) -> None:
        """Of those that are still here."""
        self.engine.pause(self._present(sample_ids), snapshot=snapshot)

    def _abort(self, reply: Reply, sample_ids: Iterable[str], reason: FinishReason) -> None:
        self.engine.abort(self._present(sample_ids), reason=reason)

    def _set_limit(self, reply: Reply, sample_id: str, limit: int | None) -> None:
        for present in self._present([sample_id]):
            self.engine.set_limit(present, limit)

    def _update(self, reply: Reply, weights: Mapping[str, Any], version: int) -> None:
        self.engine.update_weights(self._weights(weights), version)

    def _weights(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        return weights

    def _do(self, reply: Reply, method: str, arguments: Sequence[Any]) -> None:
        """Of the engine, beyond the protocol (`use_drafter`, say)."""
        reply.value = getattr(self.engine, method)(*arguments)

    def _drafting(self, reply: Reply) -> None:
        speculation = getattr(self.engine, "speculation", None)
        reply.value = None if speculation is None else speculation.report()

    def _inventory(self, reply: Reply) -> None:
        """-> output tokens of the samples that are here."""
        check = getattr(self.engine, "check_integrity", None)
        if check is not None:
            check()
        reply.value = {told.sample.id: len(told.sample.output_ids) for told in self._told.values()}

    def _present(self, sample_ids: Iterable[str]) -> list[str]:
        here = self._told
        return [i for i in sample_ids if i in here and here[i].sample.status in ("waiting", "running")]

    # -- what changed --------------------------------------------------------------------------------------------------

    def _report(self, reply: Reply) -> None:
        reply.version, reply.stats, reply.now = self.engine.version, self.engine.stats(), self.engine.now()
        for told in list(self._told.values()):
            gain = self._gain(told)
            if gain is not None:
                reply.gains.append(gain)
        reply.shares_drafts = self._shares_drafts
        reply.events = self._events[:]
        self._events.clear()

    def _gain(self, told: _Told) -> Gain | None:
        sample = told.sample
        state = (sample.status, sample.snapshot is None)
        if state == told.last and len(sample.output_ids) == told.num_output:
            return None
        start, told.num_output, told.last = told.num_output, len(sample.output_ids), state
        runs = []
        for segment in sample.segments:
            if segment.end > start:
                count = segment.end - max(segment.start, start)
                runs.append((count, segment.version, segment.engine, segment.kv))
        gain = Gain(
            sample_id=sample.id,
            start=start,
            tokens=list(sample.output_ids[start:]),
            logprobs=list(sample.logprobs[start:]),
            runs=runs,
            status=sample.status,
            admitted=sample.status == "running",
            turn_ended=sample.turn_ended,
            stop_reason=sample.stop_reason,
            timings=sample.timings,
            finish_reason=sample.finish_reason,
            failure=sample.failure,
            routed=self._routed(told),
        )
        if sample.status not in ("waiting", "running"):  # it has left
            del self._told[sample.id]
            if sample.snapshot is not None:
                gain.saved = self._keep(sample.snapshot)
        return gain

    def _routed(self, told: _Told) -> tuple[int, int, int, bytes] | None:
        routed = told.sample.routed_experts
        if routed is None or len(routed) == told.num_routed:
            return None
        first, told.num_routed = min(told.num_routed, len(routed)), len(routed)
        return routed.layers, routed.top_k, first, bytes(routed.data[first * routed.row_bytes :])

    def _keep(self, snapshot: Snapshot | Any) -> Saved:
        key, self._next_key = self._next_key, self._next_key + 1
        self._saved[key] = snapshot
        return Saved(key, snapshot.num_tokens, snapshot.nbytes)
