"""The ASGI application: both dialects over one service, a key, and errors that say what is wrong."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from longtail.errors import LongtailError
from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.fields import BadRequest
from longtail.trainer_adapter.server.front import ClientGone, Front
from longtail.trainer_adapter.server.openai import OpenAI
from longtail.trainer_adapter.server.protocol import Service
from longtail.trainer_adapter.server.sglang import SGLang
from longtail.trainer_adapter.server.text import Text
from longtail.trainer_adapter.server.vllm import VLLM

OPEN = ("/health", "/ping")
"""Asked by load balancers, which have no key."""


def make_app(
    service: Service,
    config: ServerConfig | None = None,
    *,
    tokenizer: Any = None,
    about: Mapping[str, Any] | None = None,
) -> Starlette:
    """service: stays the caller's. tokenizer: of `transformers`, for clients that want text; None: token ids only.
    about: of the engine, for /server_info."""
    config = ServerConfig() if config is None else config
    front = Front(service, config, Text(tokenizer), about or {})
    sglang = SGLang(front)

    async def health(http: HTTPRequest) -> Response:
        front.check_alive()
        return Response(status_code=200)

    routes = [Route(path, health, methods=["GET"]) for path in OPEN]
    routes += [Route("/server_info", sglang.server_info, methods=["GET"]), *OpenAI(front).routes()]
    if config.dialect in ("sglang", "both"):
        routes += sglang.routes()
    if config.dialect in ("vllm", "both"):
        routes += VLLM(front).routes()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            front.text.close()

    handlers = {
        BadRequest: _bad_request,
        ClientGone: _client_gone,
        ClientDisconnect: _client_gone,  # within its body
        HTTPException: _no_route,
        LongtailError: _stopped,
    }
    middleware = [Middleware(_NoPages) if config.api_key is None else Middleware(_Key, key=config.api_key)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)  # type: ignore[arg-type]
    app.state.front = front
    return app


class _NoPages:
    """Refuses what a page in a browser sends. To a loopback address any page on the web can send, if only blindly, and
    without a key that would be enough to change the weights. Browsers name the page in `Origin`, nobody else does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or b"origin" not in dict(scope["headers"]):
            await self._app(scope, receive, send)
            return
        error = BadRequest("pages in a browser are not served without a key (api_key)", "Origin", 403)
        await JSONResponse(error.body(), 403)(scope, receive, send)


class _Key:
    """Lets those in who have the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):  # the time that it takes says nothing of the key
            await self._app(scope, receive, send)
            return
        error = BadRequest("the key is missing or wrong: send Authorization: Bearer KEY", "Authorization", 401)
        headers = {"www-authenticate": "Bearer"}
        await JSONResponse(error.body(), 401, headers)(scope, receive, send)


async def _bad_request(http: HTTPRequest, error: BadRequest) -> Response:
    headers = {"retry-after": "1"} if error.status == 503 else {}
    if error.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error.body(), error.status, headers)


async def _client_gone(http: HTTPRequest, error: Exception) -> Response:
    return Response(status_code=499)


async def _no_route(http: HTTPRequest, error: HTTPException) -> Response:
    problem = BadRequest(f"{http.method} {http.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(problem.body(), error.status_code, error.headers)


async def _stopped(http: HTTPRequest, error: LongtailError) -> Response:
    return JSONResponse(BadRequest(str(error), status=503).body(), 503)
