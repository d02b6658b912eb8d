"""One request of a `RolloutService`: its tokens as they come, and what it ends with.

    |<-- prompt_ids of the request -->|<-- its tokens -->|
    | prompt_ids of the sample |   output_ids of the sample   |      a request that resumes a sample
    |     prompt_ids of the sample    |    output_ids     |          a fresh one

What is not read yet is not queued: a reader that is slow gets more tokens at once, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Literal

from longtail.routing import RoutedExperts
from longtail.sample import KVSource
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

EndReason = Literal["stop", "length", "repetition", "abort", "error"]
Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens since the chunk before, with the log-probability and the policy version of each."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[PolicyVersion]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a request ended with. token_ids, logprobs, versions and kv have an entry for each token of this request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    versions: list[PolicyVersion]
    kv: list[KVSource]
    """Where the KV came from on which each token stands (`Segment.kv`): with "kept" or "approximate" KV the present
    version of a token does not mean that the present policy gives it this log-probability."""
    finish_reason: EndReason
    """abort: it can go on, by a request with prompt_ids + token_ids. error: see `failure`."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended it; None for EOS."""
    failure: str | None
    version: PolicyVersion
    """The engine's when the request ended."""
    num_prompt_tokens: int
    num_resumed_tokens: int
    """Of the prompt, so many were output of the sample that this request resumed; 0: a fresh one, or one that had none.
    """
    routed_experts: RoutedExperts | None
    """Where they are recorded: of all positions of prompt and output but the last."""


class Request:
    """Made by `RolloutService.generate`. Of `async for`, `for` and `await`, use one at a time; each ends (and raises
    what went wrong) when the request has ended.

        completion = await request                    # or request.result(timeout) in a thread
        async for chunk in request: ...               # or `for chunk in request` in a thread
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        max_new_tokens: int | None,
        index: int,
        cancel: Callable[[Request], object],
    ) -> None:
        self.id = request_id
        self.prompt_ids, self.params, self.max_new_tokens, self.index = prompt_ids, params, max_new_tokens, index
        self.accepted: Future[None] = Future()
        """Done when the engine takes the request; ValueError if it cannot run it."""
        self.completion: Future[Completion] = Future()
        for future in (self.accepted, self.completion):
            future.set_running_or_notify_cancel()  # a reader that is cancelled does not end it, `cancel` does
        self._cancel = cancel
        self._changed = threading.Condition()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[PolicyVersion] = []
        self._read = 0
        self._ended = False
        self._waiter: Waiter | None = None

    def params_after(self, num_output_tokens: int) -> SamplingParams:
        """For a sample that has so many output tokens: `max_new_tokens` counts from there. ValueError as
        `SamplingParams`."""
        if self.max_new_tokens is None:
            return self.params
        most, cap = self.params.max_tokens, num_output_tokens + self.max_new_tokens
        return dataclasses.replace(self.params, max_tokens=cap if most is None else min(most, cap))

    def result(self, timeout: float | None = None) -> Completion:
        """Blocks until it has ended. TimeoutError after so many seconds (the request goes on)."""
        return self.completion.result(timeout)

    def __await__(self) -> Generator[Any, None, Completion]:
        return asyncio.wrap_future(self.completion).__await__()

    def cancel(self) -> None:
        """Nobody wants it any more: its sample is dropped. Nothing happens if it has ended."""
        if not self.completion.done():
            self._cancel(self)

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._read < len(self._token_ids))
                chunk = self._take()
            if chunk is None:
                self.completion.result()
                return
            yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        while True:
            waiter = None
            with self._changed:
                chunk = self._take()
                if chunk is None and not self._ended:
                    waiter = loop.create_future()
                    self._waiter = (loop, waiter)
            if chunk is not None:
                yield chunk
            elif waiter is not None:
                await waiter
            else:
                await self
                return

    def _take(self) -> Chunk | None:
        """What is not read yet. With the lock."""
        start, self._read = self._read, len(self._token_ids)
        if start == self._read:
            return None
        return Chunk(self._token_ids[start:], self._logprobs[start:], self._versions[start:])

    # -- of the service's thread --------------------------------------------------------------------------------------

    def _publish(self, chunk: Chunk | None, *, ended: bool = False) -> Waiter | None:
        """New tokens, or the end. -> who waits for it and is to be woken."""
        with self._changed:
            if chunk is not None:
                self._token_ids += chunk.token_ids
                self._logprobs += chunk.logprobs
                self._versions += chunk.versions
            self._ended = self._ended or ended
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
            return waiter


def wake(waiters: list[Waiter]) -> None:
    """Wakes readers in their event loops: one call a loop, however many they are."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for loop, future in waiters:
        by_loop.setdefault(loop, []).append(future)
    for loop, futures in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set, futures)
        except RuntimeError:  # the loop is closed, and its readers are gone
            continue


def _set(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
