"""The part of SGLang's HTTP API that slime and AReaL use: tokens in, tokens and log-probabilities out.

    POST /generate {"input_ids": [...], "sampling_params": {"max_new_tokens": 512}, "return_logprob": true}
    -> {"text", "output_ids", "meta_info": {"output_token_logprobs": [[logprob, token, null], ...],
        "finish_reason": {"type": "stop" | "length" | "abort", ...}, "weight_version": "3", ...}}

What is ours in meta_info: `output_token_versions`, the version that made each token (weight_version is the engine's
when the request ended), and `resumed_tokens`, the tokens of the prompt that were output of the sample which the request
goes on with. Events of a stream hold all tokens so far, as SGLang's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longtail.trainer_adapter.server.fields import BadRequest, Fields, check_ids, sampling_params
from longtail.trainer_adapter.server.front import Ask, EventStream, Front, Names, or_gone
from longtail.trainer_adapter.server.protocol import Completion, PauseMode
from longtail.trainer_adapter.server.text import TrimmedStream, trimmed

NAMES = Names(
    "input_ids",
    {
        "prompt_ids": "input_ids",
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
    },
)
TOP_K_ALL = 1 << 31
PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
HEALTH_SECONDS = 20.0
NONE: tuple[Any, ...] = (False, [], {}, "")


class Sampling:
    """`sampling_params`, read."""

    def __init__(self, body: dict[str, Any], where: str) -> None:
        fields = Fields(body, where)
        self.n = fields.integer("n", 1) or 0
        if self.n < 1:
            fields.fail("n", f"must be at least 1, not {self.n}")
        self.max_new_tokens = fields.integer("max_new_tokens", 128)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            fields.fail("max_new_tokens", f"must be at least 1, not {self.max_new_tokens}")
        top_k = fields.integer("top_k", -1)
        values = {
            "temperature": fields.number("temperature", 1.0),
            "top_p": fields.number("top_p", 1.0),
            "top_k": -1 if top_k is not None and top_k >= TOP_K_ALL else top_k,
            "min_p": fields.number("min_p", 0.0),
            "min_tokens": fields.integer("min_new_tokens", 0),
            "stop": fields.strings("stop"),
            "stop_token_ids": fields.token_ids("stop_token_ids") if body.get("stop_token_ids") else (),
            "ignore_eos": fields.flag("ignore_eos"),
            "seed": fields.integer("sampling_seed"),
            "presence_penalty": fields.number("presence_penalty", 0.0),
            "frequency_penalty": fields.number("frequency_penalty", 0.0),
            "repetition_penalty": fields.number("repetition_penalty", 1.0),
        }
        self.skip_special = fields.flag("skip_special_tokens", True)
        self.trim = not fields.flag("no_stop_trim")
        fields.ignore("stop_token_ids", "spaces_between_special_tokens", "stream_interval")
        refused = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params", "stop_regex")
        fields.refuse(dict.fromkeys(refused, NONE))
        fields.done()
        self.params = sampling_params(values, NAMES.fields, where)


class Generate:
    """The body of /generate, read. check_count: refuses so many samples."""

    def __init__(self, body: dict[str, Any], check_count: Callable[[int], None]) -> None:
        fields = Fields(body)
        self.input_ids, self.texts = fields.any("input_ids"), fields.any("text")
        if (self.input_ids is None) == (self.texts is None):
            raise BadRequest("give either input_ids or text", "input_ids")
        given = fields.any("sampling_params") or {}
        self.stream = fields.flag("stream")
        self.logprobs = fields.any("return_logprob")
        self.rid = fields.any("rid")
        start = (-1,) if self.input_ids is None else (-1, [-1])
        fields.refuse({"logprob_start_len": start, "top_logprobs_num": (0, [0])}, "is not supported: -1 and 0 are")
        refused = ("token_ids_logprob", "return_hidden_states", "return_routed_experts", "input_embeds")
        fields.refuse(dict.fromkeys(refused, NONE))
        fields.refuse(dict.fromkeys(("image_data", "audio_data", "video_data", "modalities", "lora_path"), NONE))
        fields.refuse(dict.fromkeys(("session_params", "custom_logit_processor", "lora_id"), NONE))
        fields.ignore("log_metrics", "return_text_in_logprobs", "background", "priority", "routing_key", "model")
        fields.ignore("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "stream_options")
        fields.ignore("require_reasoning", "extra_key", "conversation_id", "no_logs", "return_bytes", "return_entropy")
        fields.done()
        prompts = self.texts if self.input_ids is None else self.input_ids
        self.field = "text" if self.input_ids is None else "input_ids"
        one = str if self.input_ids is None else int
        self.batched = isinstance(prompts, list) and bool(prompts) and (one is str or isinstance(prompts[0], list))
        self.prompts: list[Any] = prompts if self.batched else [prompts]
        check_count(len(self.prompts))  # before anything is done for each
        if one is str and not all(isinstance(text, str) for text in self.prompts):
            raise BadRequest("text must be a string or a list of strings", "text")
        if not isinstance(given, list):
            given = [given] * len(self.prompts)
        if len(given) != len(self.prompts) or not all(isinstance(one, dict) for one in given):
            raise BadRequest("sampling_params must be an object, or a list with one for each prompt", "sampling_params")
        self.sampling = [
            Sampling(one, f"sampling_params[{i}]." if self.batched and given[0] is not one else "sampling_params.")
            for i, one in enumerate(given)
        ]
        if isinstance(self.logprobs, list) and len(set(map(str, self.logprobs))) == 1:
            self.logprobs = self.logprobs[0]
        if self.logprobs not in (None, True, False):
            raise BadRequest("return_logprob must be true or false", "return_logprob")
        if isinstance(self.rid, list) and len(self.rid) == len(self.prompts) == 1:
            self.rid = self.rid[0]
        if self.rid is not None and not isinstance(self.rid, str):
            raise BadRequest("rid must be a string: one for the request, all of its samples", "rid")

    async def asks(self, front: Front) -> tuple[list[Ask], list[Sampling]]:
        front.check_count(sum(one.n for one in self.sampling))
        asks, sampling = [], []
        for i, (prompt, one) in enumerate(zip(self.prompts, self.sampling, strict=True)):
            name = f"{self.field}[{i}]" if self.batched else self.field
            ids = await front.text.encode(prompt, name) if self.input_ids is None else check_ids(name, prompt)
            asks += [Ask(ids, one.params, one.max_new_tokens, index) for index in range(one.n)]
            sampling += [one] * one.n
        return asks, sampling

    @property
    def is_single(self) -> bool:
        return not self.batched and self.sampling[0].n == 1


class SGLang:
    """The routes, over one front."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def routes(self) -> list[Route]:
        posts = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
        }
        gets = {
            "/health_generate": self.health_generate,
            "/workers": self.workers,
            "/v1/loads": self.loads,
            "/get_load": self.get_load,
            "/get_server_info": self.server_info,
            "/get_model_info": self.model_info,
            "/model_info": self.model_info,
            "/get_weight_version": self.weight_version,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
        return [*routes, Route("/flush_cache", self.flush_cache, methods=["GET", "POST"])]

    # -- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, http: HTTPRequest) -> Response:
        began = time.time()
        wanted = Generate(await self.front.body(http), self.front.check_count)
        asks, sampling = await wanted.asks(self.front)
        async with contextlib.AsyncExitStack() as stack:
            samples = await stack.enter_async_context(self.front.asked(asks, NAMES, wanted.rid))
            ids = [request.id for request in samples.requests]
            if wanted.rid is not None and wanted.is_single:
                ids = [wanted.rid]
            if wanted.stream:
                events = self._events(samples.stream(), wanted, asks, sampling, ids, began)
                return EventStream(events, stack.pop_all(), self.front.config.send_seconds)
            done = await or_gone(http, samples.whole())
            known = zip(done, sampling, ids, strict=True)
            answers = [self._answer(c, wanted, one, request_id, began) for c, one, request_id in known]
            failed = next((c.failure for c in done if c.finish_reason == "error"), None)
            if failed is not None and wanted.is_single:
                raise BadRequest(failed, status=500)
            return JSONResponse(answers[0] if wanted.is_single else answers)
        raise AssertionError("not reached")

    def _answer(
        self, c: Completion, wanted: Generate, sampling: Sampling, request_id: str, began: float
    ) -> dict[str, Any]:
        reason = c.stop_reason if sampling.trim else None
        text = trimmed(self.front.text, c.token_ids, reason, skip_special=sampling.skip_special)
        meta = {
            "id": request_id,
            "finish_reason": finish_reason(c),
            "prompt_tokens": c.num_prompt_tokens,
            "completion_tokens": len(c.token_ids),
            "weight_version": str(c.version),
            "resumed_tokens": c.num_resumed_tokens,
            "output_token_versions": c.versions,
            "e2e_latency": time.time() - began,
        }
        if wanted.logprobs:
            meta["output_token_logprobs"] = logprob_rows(c.logprobs, c.token_ids)
        return {"text": text, "output_ids": c.token_ids, "meta_info": meta}

    async def _events(
        self,
        stream: Any,
        wanted: Generate,
        asks: list[Ask],
        sampling: list[Sampling],
        ids: list[str],
        began: float,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Each with all that its sample has so far."""
        so_far = [
            _SoFar(TrimmedStream(self.front.text, one.skip_special, one.params.stop if one.trim else ()))
            for one in sampling
        ]
        async with contextlib.aclosing(stream):
            async for i, chunk, completion in stream:
                if completion is not None:
                    event = self._answer(completion, wanted, sampling[i], ids[i], began)
                else:
                    event = so_far[i].event(chunk, wanted, ids[i], len(asks[i].prompt_ids))
                yield event if wanted.is_single else {**event, "index": i}

    # -- control ------------------------------------------------------------------------------------------------------

    async def abort_request(self, http: HTTPRequest) -> Response:
        """Answered when it is done: with the load at zero after `abort_all`."""
        fields = Fields(await self.front.body(http))
        rid, everything = fields.any("rid"), fields.flag("abort_all")
        fields.ignore("abort_message", "finished_reason")
        fields.done()
        if everything:
            count = await asyncio.wrap_future(self.front.service.abort_all())
        else:
            rids = rid if isinstance(rid, list) else [rid]
            if not all(isinstance(one, str) for one in rids):
                raise BadRequest("rid must be a string, or abort_all true", "rid")
            count = await asyncio.wrap_future(self.front.service.abort(self.front.ids_of(rids)))
        return JSONResponse({"status": "ok", "num_aborted": count})

    async def pause_generation(self, http: HTTPRequest) -> Response:
        """abort (SGLang's default): running requests end with what they have; retract, in_place: they stand still."""
        fields = Fields(await self.front.body(http))
        mode = fields.string("mode", "abort")
        fields.done()
        if mode not in PAUSE_MODES:
            fields.fail("mode", f"must be one of {', '.join(PAUSE_MODES)}, not {mode!r}")
        await asyncio.wrap_future(self.front.service.pause(PAUSE_MODES[mode]))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        fields.ignore("torch_empty_cache")
        fields.done()
        await asyncio.wrap_future(self.front.service.resume())
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        path, version = fields.string("model_path"), fields.any("weight_version")
        # AReaL writes the second one in the singular.
        abort = fields.flag("abort_all_requests") | fields.flag("abort_all_request")
        fields.refuse({"load_format": ("auto", "safetensors")}, "must be auto or safetensors")
        # A cache of other weights is never found, and nothing is left half done.
        fields.ignore("flush_cache", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "manifest")
        fields.ignore("token_step")
        fields.done()
        if path is None:
            fields.fail("model_path", "is missing: the directory of the weights, on the server's machine")
        try:
            number = None if version is None else int(str(version))
        except ValueError:
            fields.fail("weight_version", f"must be a whole number, not {version!r}")
        waiting = self.front.service.stats().num_requests
        try:
            updated = await self.front.update_weights(path, "model_path", number, abort=abort)
        except BadRequest as error:
            return JSONResponse({**error.body(), "success": False, "message": error.message}, error.status)
        message = f"Succeeded to update model weights. Weight version updated to {updated}."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0 if abort else waiting})

    async def flush_cache(self, http: HTTPRequest) -> Response:
        await self.front.body(http)
        await asyncio.wrap_future(self.front.service.reset_prefix_cache())
        return Response("Cache flushed.\n", media_type="text/plain")

    # -- what it is ---------------------------------------------------------------------------------------------------

    async def health_generate(self, http: HTTPRequest) -> Response:
        """Whether a token can be made; while it is paused, whether the service is there."""
        self.front.check_alive()
        if not self.front.service.stats().is_paused:
            request = self.front.service.generate((0,), None, max_new_tokens=1)
            try:
                async with asyncio.timeout(HEALTH_SECONDS):
                    await or_gone(http, _awaited(request))
            except TimeoutError:
                raise BadRequest(f"no token within {HEALTH_SECONDS} seconds", status=503) from None
            finally:
                request.cancel()
        return Response(status_code=200)

    async def workers(self, http: HTTPRequest) -> Response:
        """As a router would answer that has this server alone behind it."""
        worker = {
            "id": "longtail-0",
            "url": str(http.base_url).rstrip("/"),
            "model_id": self.front.config.model_name,
            "worker_type": "regular",
            "is_healthy": self.front.service.stopped is None,
            "load": self.front.service.stats().num_requests,
        }
        return JSONResponse({"workers": [worker], "total": 1, "stats": {"prefill_count": 0, "regular_count": 1}})

    def _load(self) -> dict[str, Any]:
        stats = self.front.service.stats()
        running = min(stats.engine.num_running, stats.num_requests)
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": stats.num_requests - running,
            "num_total_reqs": stats.num_requests,
            "token_usage": 1.0 - stats.engine.num_free_blocks / max(stats.engine.num_blocks, 1),
        }

    async def loads(self, http: HTTPRequest) -> Response:
        load = self._load()
        total = {
            "total_running_reqs": load["num_running_reqs"],
            "total_waiting_reqs": load["num_waiting_reqs"],
            "total_reqs": load["num_total_reqs"],
        }
        return JSONResponse({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load], "aggregate": total})

    async def get_load(self, http: HTTPRequest) -> Response:
        load = self._load()
        counts = {"num_reqs": load["num_total_reqs"], "num_waiting_reqs": load["num_waiting_reqs"]}
        return JSONResponse([{"dp_rank": 0, **counts}])

    async def server_info(self, http: HTTPRequest) -> Response:
        stats = self.front.service.stats()
        state = {"is_paused": stats.is_paused, "weight_version": str(stats.version)}
        sizes = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "nnodes": 1, "node_rank": 0}
        return JSONResponse({**self.front.about, **sizes, **state, "internal_states": [self._load()]})

    async def model_info(self, http: HTTPRequest) -> Response:
        path = self.front.about.get("model_path", self.front.config.model_name)
        paths = {"model_path": path, "tokenizer_path": path}
        version = str(self.front.service.stats().version)
        return JSONResponse({**paths, "is_generation": True, "weight_version": version})

    async def weight_version(self, http: HTTPRequest) -> Response:
        return JSONResponse({"weight_version": str(self.front.service.stats().version)})


class _SoFar:
    """Of a sample that streams."""

    def __init__(self, text: TrimmedStream) -> None:
        self.stream, self.text = text, ""
        self.token_ids: list[int] = []
        self.versions: list[int] = []
        self.rows: list[Any] = []

    def event(self, chunk: Any, wanted: Generate, request_id: str, num_prompt_tokens: int) -> dict[str, Any]:
        self.token_ids += chunk.token_ids
        self.versions += chunk.versions
        self.rows += logprob_rows(chunk.logprobs, chunk.token_ids)
        self.text += self.stream.push(chunk.token_ids)
        meta = {
            "id": request_id,
            "finish_reason": None,
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": len(self.token_ids),
            "weight_version": str(self.versions[-1]),
            "output_token_versions": self.versions,
        }
        if wanted.logprobs:
            meta["output_token_logprobs"] = self.rows
        return {"text": self.text, "output_ids": self.token_ids, "meta_info": meta}


def logprob_rows(logprobs: list[float], token_ids: list[int]) -> list[tuple[float, int, None]]:
    return [(logprob, token, None) for logprob, token in zip(logprobs, token_ids, strict=True)]


def finish_reason(c: Completion) -> dict[str, Any]:
    """repetition, which SGLang does not know, is a stop."""
    if c.finish_reason == "length":
        return {"type": "length", "length": len(c.token_ids)}
    if c.finish_reason == "abort":
        return {"type": "abort", "message": "Abort before prefill" if not c.token_ids else "Aborted"}
    if c.finish_reason == "error":
        return {"type": "abort", "message": c.failure, "status_code": 500, "err_type": "InternalServerError"}
    matched = c.stop_reason if c.stop_reason is not None else (c.token_ids[-1] if c.token_ids else None)
    return {"type": "stop", "matched": matched}


async def _awaited(request: Any) -> Any:
    return await request
