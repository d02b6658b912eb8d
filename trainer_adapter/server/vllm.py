"""The part of vLLM's control API that prime-rl and SkyRL use: pause, resume, weights from a directory, what it is."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longtail.trainer_adapter.server.fields import BadRequest, Fields, check_ids
from longtail.trainer_adapter.server.front import Front
from longtail.trainer_adapter.server.protocol import PauseMode

MODES: dict[str, PauseMode] = {"keep": "keep", "abort": "abort", "wait": "wait"}
DIRECTORIES = ("weight_dir", "weights_path", "model_path", "path")


class VLLM:
    """The routes, over one front."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def routes(self) -> list[Route]:
        posts = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/update_weights": self.update_weights,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets = {"/v1/models": self.models, "/is_paused": self.is_paused, "/get_world_size": self.world_size}
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        return [*routes, *(Route(path, handler, methods=["GET"]) for path, handler in gets.items())]

    async def pause(self, http: HTTPRequest) -> Response:
        """mode: abort (vLLM's default), keep, or wait, which is answered when all requests have ended."""
        await self.front.body(http)
        mode = http.query_params.get("mode", "abort")
        if http.query_params.get("wait_for_inflight_requests", "false").lower() == "true":
            mode = "wait"
        if mode not in MODES:
            raise BadRequest(f"mode must be one of {', '.join(MODES)}, not {mode!r}", "mode")
        await asyncio.wrap_future(self.front.service.pause(MODES[mode]))
        return JSONResponse({"status": "paused"})

    async def resume(self, http: HTTPRequest) -> Response:
        await self.front.body(http)
        await asyncio.wrap_future(self.front.service.resume())
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, http: HTTPRequest) -> Response:
        return JSONResponse({"is_paused": self.front.service.stats().is_paused})

    async def update_weights(self, http: HTTPRequest) -> Response:
        """{"weight_dir": ...}, as prime-rl has it, or {"update_info": {"path": ...}}. version: None: the next one."""
        fields = Fields(await self.front.body(http))
        where, info = fields, fields.object("update_info")
        # A cache of other weights is never found.
        fields.ignore("skip_prefix_cache_reset", "reset_prefix_cache", "step")
        version = fields.integer("version")
        if info:
            fields.done()
            where = Fields(info, "update_info.")
        given = {name: path for name in DIRECTORIES if (path := where.string(name)) is not None}
        where.done()
        if len(given) != 1:
            where.fail("weight_dir", "is missing: the directory of the weights, on the server's machine")
        ((name, directory),) = given.items()
        updated = await self.front.update_weights(directory, where.named(name), version)
        return JSONResponse({"status": "ok", "message": "Weights updated", "weight_version": str(updated)})

    async def reset_prefix_cache(self, http: HTTPRequest) -> Response:
        await self.front.body(http)
        await asyncio.wrap_future(self.front.service.reset_prefix_cache())
        return Response(status_code=200)

    async def world_size(self, http: HTTPRequest) -> Response:
        return JSONResponse({"world_size": 1})

    async def models(self, http: HTTPRequest) -> Response:
        card: dict[str, Any] = {
            "id": self.front.config.model_name,
            "object": "model",
            "created": int(self.front.started),
            "owned_by": "longtail",
            "root": self.front.about.get("model_path", self.front.config.model_name),
            "parent": None,
            "max_model_len": self.front.service.engine.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        prompt, special = fields.string("prompt"), fields.flag("add_special_tokens", True)
        fields.ignore("model", "return_token_strs")
        fields.done()
        if prompt is None:
            fields.fail("prompt", "is missing: the text")
        ids = await self.front.text.encode(prompt, "prompt", special=special)
        longest = self.front.service.engine.max_model_len
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": longest, "token_strs": None})

    async def detokenize(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        tokens = fields.any("tokens")
        fields.ignore("model")
        fields.done()
        if not self.front.text:
            fields.fail("tokens", "cannot be decoded: this model has no tokenizer")
        ids = () if tokens == [] else check_ids("tokens", tokens)
        return JSONResponse({"prompt": self.front.text.decode(ids, skip_special=False)})
