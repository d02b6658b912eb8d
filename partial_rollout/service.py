"""An engine behind a thread of its own, for callers in other threads and in event loops: servers, trainers' plugins.

    with RolloutService(engine) as service:
        request = service.generate(prompt_ids, SamplingParams(temperature=0.7), max_new_tokens=512)
        completion = await request                  # or request.result(), or chunk by chunk
        service.abort_all()                         # each request ends with the tokens that it has ...
        service.update_weights(weights, version)
        service.generate([*prompt_ids, *completion.token_ids], ...)    # ... and goes on from its kept KV

Whoever aborts requests at a weight update sends them again as a longer prompt, under another name. Such a request is
recognised by its tokens: where they equal prompt + output of an aborted sample, this very sample goes on, with its
seed, the position of its noise, its penalty counts, min_tokens and half-matched stop strings, and with its KV where the
engine can use that. The tokens are those of an undisturbed run. Samples of equal tokens are a multiset: any is as good.
Each token comes with the version that made it and the log-probability that it had: importance weights come from the
latter, never from versions.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from longtail.partial_rollout.engine import Engine, EngineStats
from longtail.partial_rollout.kept_samples import KeptConfig, KeptSamples
from longtail.partial_rollout.service_request import Chunk, Completion, EndReason, Request
from longtail.partial_rollout.service_thread import ServiceStopped, ServiceThread
from longtail.sample import FinishReason, Sample, sample_seed
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

PauseMode = Literal["keep", "abort", "wait"]
TOKEN_ID_LIMIT = 1 << 31

__all__ = ["Chunk", "Completion", "KeptConfig", "Request", "RolloutService", "ServiceStats", "ServiceStopped"]

_END: dict[FinishReason | None, EndReason] = {"stop": "stop", "length": "length", "repetition": "repetition"}


class ServedEngine(Engine, Protocol):
    def reset_prefix_cache(self) -> None:
        """Forgets the KV that finished samples left behind."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceStats:
    """As it was after the last step, or call."""

    version: PolicyVersion
    is_paused: bool
    num_requests: int
    """Accepted and not ended;"""
    num_queued: int
    """of these, those that wait for `resume`."""
    num_completed: int
    """Ended by themselves (stop, length),"""
    num_aborted: int
    """by an abort,"""
    num_cancelled: int
    """because nobody wanted them any more,"""
    num_failed: int
    """or because something went wrong with them."""
    num_resumed: int
    """Requests that continued an aborted sample."""
    num_output_tokens: int
    """Generated for requests;"""
    num_discarded_tokens: int
    """of these, those of cancelled requests."""
    num_kept: int
    """Aborted samples that may come back,"""
    kept_bytes: int
    """the bytes of their saved KV,"""
    num_evicted: int
    """samples that went, because there were too many or they were too old,"""
    num_evicted_kv: int
    """and those that lost their KV for its bytes."""
    engine: EngineStats


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """A request that has not ended, and its sample."""

    request: Request
    sample: Sample
    base: int
    """Output tokens that the sample had when the request came,"""
    seen: int
    """and those that the request knows."""


class RolloutService:
    """Owns the thread that alone touches the engine. The engine is the caller's, before and after.

    seed: of the samples whose requests name none, which get noise of their own each; None: another one in every
    service. kept: what becomes of aborted samples. clock: of their age, in seconds.

    What acts on the engine returns a `Future` (in an event loop: `await asyncio.wrap_future(...)`) and happens between
    two steps, in the order of the calls. A wrong call is a ValueError; anything else that the engine raises ends the
    service, and whoever waits gets `ServiceStopped`.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        seed: int | None = None,
        kept: KeptConfig | None = None,
        name: str = "served",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.name = name
        self.seed = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        self._keeps = kept is None or kept.max_samples > 0
        # What follows is the thread's own.
        self._kept = KeptSamples(KeptConfig() if kept is None else kept, clock)
        self._entries: dict[str, _Entry] = {}
        """By the id of the sample; also the queued ones."""
        self._by_request: dict[str, _Entry] = {}
        self._queued: list[_Entry] = []
        """Not in the engine: they came while it was paused."""
        self._paused: PauseMode | None = None
        self._stills: list[Future[None]] = []
        """Of calls of `pause("wait")` whose time has not come."""
        self._num_samples = 0
        self._counts = dict.fromkeys(
            ("completed", "aborted", "cancelled", "failed", "resumed", "output_tokens", "discarded_tokens"), 0
        )
        self._stats = self._make_stats()
        self._thread = ServiceThread(name, _Work(self))
        self._thread.start()

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        request_id: str | None = None,
        index: int = 0,
    ) -> Request:
        """Starts a request, or queues it while the service is paused. Never blocks.

        params: as for any sample, over all of its output: of one that is resumed, `max_tokens` and `min_tokens` count
        from where its own prompt ended; its other settings are those of the newest request. max_new_tokens: of this
        request alone (both may be given). params.seed: with `index` the seed of the sample, that of sample `index` of a
        group; an aborted sample is resumed by requests that name the same seed as the one before, or none as it did.
        request_id: for `abort`; None: a random one.

        ValueError for token ids that are none, and for `params.n` other than 1: one request makes one sample. What the
        engine has to say against it comes with `Request.accepted`. ServiceStopped if it is closed or has failed."""
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise ValueError(f"n must be 1, not {params.n}: make a request, with its index, for each sample")
        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
            raise ValueError(f"max_new_tokens must be an integer of at least 1, not {max_new_tokens!r}")
        if type(index) is not int or index < 0:
            raise ValueError(f"index must be an integer of at least 0, not {index!r}")
        prompt = tuple(prompt_ids)
        if not prompt:
            raise ValueError("prompt_ids is empty; a request needs at least one prompt token (for example BOS)")
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= TOKEN_ID_LIMIT:
            wrong = next(i for i in prompt if type(i) is not int or not 0 <= i < TOKEN_ID_LIMIT)
            raise ValueError(f"prompt_ids must be non-negative integers below 2^31, not {wrong!r}")
        request_id = f"{self.name}-{os.urandom(8).hex()}" if request_id is None else request_id
        request = Request(request_id, prompt, params, max_new_tokens, index, self._cancel)
        self._thread.submit(lambda: self._accept(request), lambda error: self._reject(request, error))
        return request

    def abort(self, request_ids: Iterable[str]) -> Future[int]:
        """Ends these requests with the tokens that they have, and keeps their samples. -> how many it ended: an id that
        is not known, or has ended, is none."""
        ids = list(dict.fromkeys(request_ids))
        return self._thread.call(lambda: self._abort([self._by_request[i] for i in ids if i in self._by_request]))

    def abort_all(self) -> Future[int]:
        """`abort` for all requests, those that are queued included."""
        return self._thread.call(lambda: self._abort(list(self._entries.values())))

    # -- the engine ---------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> Future[None]:
        """Nothing is generated from here until `resume`; requests that come are queued. What becomes of those that run:
        keep: they stand still, and go on with `resume`. abort: `abort_all`. wait: they are finished first, and this is
        done when they are. May be called again, with another mode too."""
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"mode must be keep, abort or wait, not {mode!r}")
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        self._thread.submit(lambda: self._pause(mode, future), future.set_exception)
        return future

    def resume(self) -> Future[None]:
        return self._thread.call(self._resume)

    def update_weights(self, weights: Mapping[str, Any], version: int | None = None) -> Future[PolicyVersion]:
        """Between two steps, paused or not: later tokens are of the new version, and KV that older weights made is
        dealt with as the engine is set to. version: None: the next one. -> the version."""

        def update() -> PolicyVersion:
            self.engine.update_weights(weights, self.engine.version + 1 if version is None else version)
            self._settle()
            return self.engine.version

        return self._thread.call(update)

    def reset_prefix_cache(self) -> Future[None]:
        """Forgets the KV of finished samples. That of kept ones stays: it says which weights made it."""
        return self._thread.call(self.engine.reset_prefix_cache)

    def drop_kept(self) -> Future[int]:
        """Forgets the aborted samples: what is sent again is a fresh prompt. -> how many there were."""

        def drop() -> int:
            count = len(self._kept)
            self._kept.clear()
            return count

        return self._thread.call(drop)

    def stats(self) -> ServiceStats:
        """Never waits for a step."""
        return self._stats

    @property
    def stopped(self) -> ServiceStopped | None:
        """Why nothing is answered any more; None: all is well."""
        return self._thread.stopped

    def close(self) -> None:
        """Ends all requests as an abort does, forgets the kept samples, and ends the thread after the step in hand. May
        be called twice."""
        self._thread.close()

    def __enter__(self) -> RolloutService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_integrity(self) -> None:
        """AssertionError if requests, samples and kept samples do not add up. Waits for the step in hand."""
        self._thread.call(self._check_integrity).result()

    # -- calls, on the thread -----------------------------------------------------------------------------------------

    def _accept(self, request: Request) -> None:
        if request.id in self._by_request:
            raise ValueError(f"request_id {request.id!r} is that of a request that has not ended; give each its own")
        entry = self._continued(request) or self._fresh(request)
        if self._paused is None:
            self.engine.add([entry.sample])
        else:
            self._queued.append(entry)
        self._entries[entry.sample.id] = self._by_request[request.id] = entry
        self._thread.answer_later(request.accepted, None)

    def _reject(self, request: Request, error: BaseException) -> None:
        request.accepted.set_exception(error)
        request.completion.set_exception(error)
        self._thread.wake_later(request._publish(None, ended=True))

    def _continued(self, request: Request) -> _Entry | None:
        """A kept sample of these tokens, unless by what is asked for it has ended already."""
        sample = self._kept.find(request.prompt_ids, request.params.seed)
        if sample is None:
            return None
        before = sample.params
        try:
            sample.params = request.params_after(len(sample.output_ids))
            self.engine.check(sample)
        except ValueError:
            sample.params = before
            return None
        self._kept.take(sample)
        self._counts["resumed"] += bool(sample.output_ids)
        return _Entry(request, sample, len(sample.output_ids), len(sample.output_ids))

    def _fresh(self, request: Request) -> _Entry:
        number, params = self._num_samples, request.params_after(0)
        named = params.seed is not None
        sample = Sample(
            id=f"{self.name}/{number}",
            group_id=f"{self.name}/{hash(request.prompt_ids):x}",  # equal prompts: their KV is computed once
            index=request.index,
            prompt_ids=request.prompt_ids,
            params=params,
            seed=sample_seed(params.seed, "", request.index) if named else sample_seed(self.seed, "", number),
        )
        self.engine.check(sample)
        self._num_samples += 1
        return _Entry(request, sample, 0, 0)

    def _abort(self, entries: list[_Entry]) -> int:
        self._take_out(entries, lambda ids: self.engine.pause(ids, snapshot=self._keeps))
        self._settle()
        aborted = [entry for entry in entries if entry.sample.id in self._entries]  # the others had ended by then
        for entry in aborted:
            self._finish(entry, "abort", "aborted")
            if self._keeps:
                self._kept.put(entry.sample)
        return len(aborted)

    def _cancel(self, request: Request) -> None:
        def cancel() -> None:
            entry = self._by_request.get(request.id)
            if entry is not None and entry.request is request:
                self._take_out([entry], self.engine.abort)
                if len(entry.sample.output_ids) > entry.seen:
                    self._publish(entry)
                self._counts["discarded_tokens"] += len(entry.sample.output_ids) - entry.base
                self._finish(entry, "abort", "cancelled")
                self._settle()

        try:
            self._thread.call(cancel)
        except ServiceStopped:
            return  # then it has been answered

    def _take_out(self, entries: list[_Entry], how: Callable[[list[str]], object]) -> None:
        """Out of the engine, or of the queue."""
        queued = set(self._queued).intersection(entries)
        self._queued = [entry for entry in self._queued if entry not in queued]
        if inside := [entry.sample.id for entry in entries if entry not in queued]:
            how(inside)

    def _pause(self, mode: PauseMode, future: Future[None]) -> None:
        if mode == "abort":
            self._abort(list(self._entries.values()))
        self._paused = mode
        self._stills.append(future)
        if mode != "wait" or not self._num_inside:
            self._stand_still()

    def _resume(self) -> None:
        self._paused = None
        self._stand_still()  # for those who waited for it, it is over
        queued, self._queued = self._queued, []
        for entry in queued:
            try:
                self.engine.add([entry.sample])
            except ValueError as error:  # it could be run when it came
                entry.sample.status, entry.sample.failure = "failed", str(error)
                self._finish(entry, "error", "failed")

    def _stand_still(self) -> None:
        stills, self._stills = self._stills, []
        for future in stills:
            self._thread.answer_later(future, None)

    # -- tokens out ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self.engine.step()
        self._settle()
        if self._stills and not self._num_inside:
            self._stand_still()

    def _settle(self) -> None:
        """Tells what samples have gained, and which have ended: in a step, or where an engine that runs ahead says in
        another call what it has made."""
        for entry in list(self._entries.values()):
            sample = entry.sample
            if len(sample.output_ids) > entry.seen:
                self._publish(entry)
            if sample.is_done:
                failed = sample.status == "failed"
                reason = "error" if failed else _END[sample.finish_reason]
                self._finish(entry, reason, "failed" if failed else "completed")

    def _publish(self, entry: _Entry) -> None:
        sample, start = entry.sample, entry.seen
        entry.seen = len(sample.output_ids)
        self._counts["output_tokens"] += entry.seen - start
        chunk = Chunk(sample.output_ids[start:], sample.logprobs[start:], sample.versions[start:])
        self._thread.wake_later(entry.request._publish(chunk))

    def _finish(self, entry: _Entry, reason: EndReason, count: str) -> None:
        request, sample, base = entry.request, entry.sample, entry.base
        del self._entries[sample.id], self._by_request[request.id]
        self._counts[count] += 1
        completion = Completion(
            request_id=request.id,
            token_ids=sample.output_ids[base:],
            logprobs=sample.logprobs[base:],
            versions=sample.versions[base:],
            kv=[s.kv for s in sample.segments for i in range(s.start, s.end) if i >= base],
            finish_reason=reason,
            stop_reason=sample.stop_reason,
            failure=sample.failure,
            version=self.engine.version,
            num_prompt_tokens=len(request.prompt_ids),
            num_resumed_tokens=base,
            routed_experts=sample.routed_experts,
        )
        self._thread.answer_later(request.completion, completion)
        self._thread.wake_later(request._publish(None, ended=True))

    # -- counts -------------------------------------------------------------------------------------------------------

    @property
    def _num_inside(self) -> int:
        return len(self._entries) - len(self._queued)

    def _make_stats(self) -> ServiceStats:
        return ServiceStats(
            version=self.engine.version,
            is_paused=self._paused is not None,
            num_requests=len(self._entries),
            num_queued=len(self._queued),
            num_kept=len(self._kept),
            kept_bytes=self._kept.nbytes,
            num_evicted=self._kept.num_evicted,
            num_evicted_kv=self._kept.num_evicted_kv,
            engine=self.engine.stats(),
            **{f"num_{name}": count for name, count in self._counts.items()},
        )

    def _check_integrity(self) -> None:
        self._kept.check_integrity()
        assert {id(e) for e in self._entries.values()} == {id(e) for e in self._by_request.values()}
        assert all(e.sample.id == key and not e.sample.is_done for key, e in self._entries.items())
        assert not any(sample_id in self._kept for sample_id in self._entries), "kept and running"
        assert self._paused is not None or not self._queued, "queued, and not paused"
        stats = self.engine.stats()
        assert stats.num_running + stats.num_waiting == self._num_inside
        for entry in self._entries.values():
            assert entry.base <= entry.seen == len(entry.sample.output_ids), entry.sample.id
            entry.sample.check_integrity()


class _Work:
    """What the thread does for the service."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service

    def is_ready(self) -> bool:
        return self._service._paused in (None, "wait") and self._service.engine.has_work

    def step(self) -> None:
        self._service._kept.expire()
        if self.is_ready():
            self._service._step()

    def seconds_left(self) -> float | None:
        return self._service._kept.seconds_left()

    def record(self) -> None:
        self._service._stats = self._service._make_stats()

    def finish(self) -> None:
        self._service._abort(list(self._service._entries.values()))

    def give_up(self, reason: ServiceStopped) -> None:
        service, thread = self._service, self._service._thread
        queued = set(service._queued)
        inside = [entry.sample.id for entry in service._entries.values() if entry not in queued]
        for future in service._stills:
            thread.refuse_later(future.set_exception, reason)
        for entry in service._entries.values():
            thread.refuse_later(entry.request.completion.set_exception, reason)
            thread.wake_later(entry.request._publish(None, ended=True))
        service._entries, service._by_request, service._queued, service._stills = {}, {}, [], []
        service._kept.clear()
        service._stats = dataclasses.replace(service._stats, num_requests=0, num_queued=0, num_kept=0, kept_bytes=0)
        try:
            service.engine.pause(inside, snapshot=False)  # one that has failed gives its blocks back if it can
        except Exception as error:
            reason.add_note(f"and could not be emptied: {error!r}")
