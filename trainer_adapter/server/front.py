"""What both dialects share: samples asked for, answered whole or as a stream, given up when their client is gone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longtail.sampling_params import SamplingParams
from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.fields import BadRequest, bad_value, parse
from longtail.trainer_adapter.server.protocol import Chunk, Completion, Request, Service
from longtail.trainer_adapter.server.text import Text
from longtail.trainer_adapter.server.weights import load_weights


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One sample that is wanted."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int | None
    index: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """What a dialect calls the fields, for messages."""

    prompt: str
    fields: Mapping[str, str]


class Front:
    """Between HTTP and the service. All of it runs in one event loop."""

    def __init__(self, service: Service, config: ServerConfig, text: Text, about: Mapping[str, Any]) -> None:
        self.service, self.config, self.text = service, config, text
        self.about = about
        """Of the engine, for those who ask: model_path and settings."""
        self.started = time.time()
        self._num_samples = 0
        self._ids: dict[str, list[str]] = {}
        """Of the service's requests, by the name that a client gave to them."""
        self._update = asyncio.Lock()

    # -- requests in --------------------------------------------------------------------------------------------------

    async def body(self, http: HTTPRequest) -> dict[str, Any]:
        """413 if it is too long, 408 if it takes too long, 400 if it is no JSON object."""
        limit = self.config.max_body_bytes
        too_long = BadRequest(f"the body is longer than {limit} bytes; ask for less at once", status=413)
        length = http.headers.get("content-length", "")
        if length.isdigit() and int(length) > 2 * limit:
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.config.body_seconds or None):
                async for part in http.stream():
                    size += len(part)
                    if size <= limit:
                        parts.append(part)
                    elif size > 2 * limit:  # up to there it is read, so that its sender reads the answer
                        break
        except TimeoutError:
            seconds = self.config.body_seconds
            raise BadRequest(f"the body has not come within {seconds} seconds", status=408) from None
        if size > limit:
            raise too_long
        return parse(b"".join(parts))

    def check_count(self, samples: int) -> None:
        """Before they are made."""
        most = self.config.max_samples_per_request
        if samples > most:
            raise BadRequest(f"{samples} samples are more than the {most} that a request may ask for", "n")

    def check_alive(self) -> None:
        if (stopped := self.service.stopped) is not None:
            raise BadRequest(str(stopped), status=503)

    @contextlib.asynccontextmanager
    async def asked(self, asks: Sequence[Ask], names: Names, client_id: str | None = None) -> AsyncIterator[Samples]:
        """The samples, all accepted or none: 400 if one cannot be run, 503 if there are too many. Those that have not
        ended when it is left are cancelled. client_id: by which the client may abort them."""
        if self._num_samples + len(asks) > self.config.max_samples:
            raise BadRequest(f"{self._num_samples} samples are in progress; try again later", status=503)
        if client_id is not None and client_id in self._ids:
            raise BadRequest(f"{client_id!r} is the id of a request in progress; give each its own")
        self.check_alive()
        requests: list[Request] = []
        self._num_samples += len(asks)
        try:
            await self._submit(asks, names, client_id, requests)
            yield Samples(requests)
        finally:
            self._num_samples -= len(asks)
            if client_id is not None:
                self._ids.pop(client_id, None)
            for request in requests:
                request.cancel()

    async def _submit(
        self, asks: Sequence[Ask], names: Names, client_id: str | None, requests: list[Request]
    ) -> None:
        ids = [uuid4().hex if client_id is None else f"{client_id}_{i}" for i in range(len(asks))]
        if client_id is not None:
            self._ids[client_id] = ids
        try:
            for ask, request_id in zip(asks, ids, strict=True):
                more: dict[str, Any] = {"max_new_tokens": ask.max_new_tokens, "index": ask.index}
                requests.append(self.service.generate(ask.prompt_ids, ask.params, request_id=request_id, **more))
            for request in requests:
                await asyncio.wrap_future(request.accepted)
        except ValueError as error:
            raise bad_value(error, names.fields, default=names.prompt) from None

    def ids_of(self, client_ids: Iterable[str]) -> list[str]:
        """Of the service's requests."""
        return [i for name in client_ids for i in self._ids.get(name, [])]

    # -- the engine ---------------------------------------------------------------------------------------------------

    async def update_weights(self, directory: str, field: str, version: int | None, *, abort: bool = False) -> int:
        """Reads while the engine goes on, and updates between two of its steps. -> the version. 403 if they are
        outside of where weights may be read, 400 if they cannot be, or the engine will not have them."""
        async with self._update:
            weights = await asyncio.to_thread(load_weights, directory, field, self.config.readable)
            if abort:
                await asyncio.wrap_future(self.service.abort_all())
            try:
                return await asyncio.wrap_future(self.service.update_weights(weights, version))
            except ValueError as error:
                raise BadRequest(str(error), "weight_version" if "version" in str(error)[:8] else field) from None


class Samples:
    """Those of one HTTP request."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    async def whole(self) -> list[Completion]:
        return list(await asyncio.gather(*(_whole(request) for request in self.requests)))

    async def stream(self) -> AsyncIterator[tuple[int, Chunk | None, Completion | None]]:
        """Index of a sample, with new tokens of it or with its end. As they come."""
        ready: asyncio.Queue[tuple[int, Chunk | None, Completion | None] | Exception] = asyncio.Queue(1)

        async def read(index: int, request: Request) -> None:
            try:
                async for chunk in request:
                    await ready.put((index, chunk, None))
                await ready.put((index, None, await request))
            except Exception as error:  # the reader's end raises it
                await ready.put(error)

        readers = [asyncio.ensure_future(read(i, request)) for i, request in enumerate(self.requests)]
        try:
            left = len(readers)
            while left:
                item = await ready.get()
                if isinstance(item, Exception):
                    raise item
                left -= item[2] is not None
                yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _whole(request: Request) -> Completion:
    return await request


# -- answers ----------------------------------------------------------------------------------------------------------


class ClientGone(Exception):
    """Nobody reads the answer any more."""


def dump(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()


async def or_gone(http: HTTPRequest, work: Any) -> Any:
    """Awaits it, unless the client goes away first: then it is cancelled, and ClientGone is raised. The body must have
    been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(http.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, [DONE] behind the last one. stack: what they need is in it, and left at the end, also if
    nobody ever reads. send_seconds: 0 for no limit."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any], stack: contextlib.AsyncExitStack, send_seconds: float) -> None:
        super().__init__(None, media_type=self.media_type)
        self._events, self._stack, self._seconds = events, stack, send_seconds
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(_disconnected(receive))
        write = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait((watch, write), return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()
        finally:
            for task in (watch, write):
                task.cancel()
            await asyncio.gather(watch, write, return_exceptions=True)
            await self._events.aclose()
            await self._stack.aclose()

    async def _write(self, send: Send) -> None:
        async def give(body: bytes, more: bool = True) -> None:
            async with asyncio.timeout(self._seconds or None):  # a client that stops reading is gone
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await give(b"data: " + dump(event) + b"\n\n")
            await give(b"data: [DONE]\n\n")
            await give(b"", more=False)
        except (TimeoutError, OSError):
            return
        except Exception as error:  # the status is out: the reason follows as an event, and no [DONE]
            problem = error if isinstance(error, BadRequest) else BadRequest(str(error) or repr(error), status=500)
            await give(b"data: " + dump(problem.body()) + b"\n\n")
            await give(b"", more=False)
