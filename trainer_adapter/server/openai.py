"""OpenAI's completions and chat completions, with what vLLM adds for RL: prompts of token ids, `return_token_ids`, and
its sampling parameters; and vLLM's /inference/v1/generate, which is tokens only.

What is ours: `token_versions` of a choice, the version that made each token, and `weight_version` of the answer, the
engine's when it ended. Log-probabilities are those of the sampled tokens; others are not to be had."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal
from uuid import uuid4

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longtail.trainer_adapter.server.fields import BadRequest, Fields, check_ids, sampling_params
from longtail.trainer_adapter.server.front import Ask, EventStream, Front, Names, or_gone
from longtail.trainer_adapter.server.protocol import Chunk, Completion
from longtail.trainer_adapter.server.text import TrimmedStream, trimmed

Kind = Literal["completion", "chat", "tokens"]
FIELDS: dict[Kind, str] = {"completion": "prompt", "chat": "messages", "tokens": "token_ids"}
NAMES = {kind: Names(field, {"prompt_ids": field}) for kind, field in FIELDS.items()}
OBJECTS: dict[Kind, str] = {"completion": "text_completion", "chat": "chat.completion", "tokens": "token_completion"}
OFF: tuple[Any, ...] = (False, [], {}, "")
CHANGES_NOTHING = (
    *("user", "store", "metadata", "service_tier", "request_id", "priority", "cache_salt", "safety_identifier"),
    *("prompt_cache_key", "spaces_between_special_tokens", "mm_processor_kwargs", "include_reasoning", "session_id"),
    *("parallel_tool_calls", "kv_transfer_params", "detokenize", "output_kind", "flat_logprobs"),
)
NOT_SUPPORTED = (
    *("suffix", "logit_bias", "best_of", "use_beam_search", "length_penalty", "guided_json", "guided_regex"),
    *("guided_choice", "guided_grammar", "structured_outputs", "response_format", "prompt_logprobs", "prompt_embeds"),
    *("truncate_prompt_tokens", "logits_processors", "vllm_xargs", "allowed_token_ids", "thinking_token_budget"),
    *("functions", "function_call", "reasoning_effort", "logprob_token_ids", "features", "lora_request", "echo"),
    "bad_words",
)
ONLY_SAMPLED = "only the sampled token's are to be had"


class Asked:
    """What the three kinds of body share, read."""

    def __init__(self, kind: Kind, fields: Fields, sampling: Fields, defaults: dict[str, Any], model_name: str) -> None:
        self.kind = kind
        model = fields.string("model")
        if model is not None and model != model_name:
            raise BadRequest(f"model: {model!r} is not served here, {model_name!r} is", "model", 404)
        self.stream = fields.flag("stream")
        options = Fields(fields.object("stream_options"), "stream_options.")
        self.usage = options.flag("include_usage")
        options.ignore("continuous_usage_stats")
        options.done()
        self.n = sampling.integer("n", 1) or 0
        if self.n < 1:
            sampling.fail("n", f"must be at least 1, not {self.n}")
        self.max_tokens = sampling.integer("max_tokens", defaults["max_tokens"])
        if kind == "chat":
            self.max_tokens = sampling.integer("max_completion_tokens", self.max_tokens)
        if self.max_tokens is not None and self.max_tokens < 1:
            sampling.fail("max_tokens", f"must be at least 1, not {self.max_tokens}")
        stop_ids = sampling.any("stop_token_ids")
        values = {
            "temperature": sampling.number("temperature", 1.0),
            "top_p": sampling.number("top_p", 1.0),
            "top_k": min(sampling.integer("top_k", 0) or 0, 2**31 - 1),
            "min_p": sampling.number("min_p", 0.0),
            "min_tokens": sampling.integer("min_tokens", 0),
            "stop": sampling.strings("stop"),
            "stop_token_ids": check_ids("stop_token_ids", stop_ids) if stop_ids else (),
            "ignore_eos": sampling.flag("ignore_eos"),
            "seed": sampling.integer("seed"),
            "presence_penalty": sampling.number("presence_penalty", 0.0),
            "frequency_penalty": sampling.number("frequency_penalty", 0.0),
            "repetition_penalty": sampling.number("repetition_penalty", 1.0),
        }
        self.skip_special = sampling.flag("skip_special_tokens", True)
        self.trim = not sampling.flag("include_stop_str_in_output")
        self.logprobs = self._logprobs(sampling)
        self.ids = fields.flag("return_token_ids") or kind == "tokens"
        self.tokens_as_ids = fields.flag("return_tokens_as_token_ids")
        for one in {id(fields): fields, id(sampling): sampling}.values():
            one.ignore(*CHANGES_NOTHING)
            one.refuse(dict.fromkeys(NOT_SUPPORTED, OFF))
            one.done()
        self.params = sampling_params(values, {})

    def _logprobs(self, sampling: Fields) -> bool:
        value, top = sampling.any("logprobs"), sampling.integer("top_logprobs", 0)
        if top not in (0, 1):
            sampling.fail("top_logprobs", f"must be 0 or 1, not {top}: {ONLY_SAMPLED}")
        if value is None or isinstance(value, bool):
            return bool(value)
        if type(value) is not int or value not in (0, 1):
            sampling.fail("logprobs", f"must be 0 or 1, true or false, not {value!r}: {ONLY_SAMPLED}")
        return True

    def asks(self, prompts: list[tuple[int, ...]]) -> list[Ask]:
        return [Ask(ids, self.params, self.max_tokens, index) for ids in prompts for index in range(self.n)]


class OpenAI:
    """The routes, over one front."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/inference/v1/generate", self.tokens, methods=["POST"]),
        ]

    async def completions(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        prompt, special = fields.any("prompt"), fields.flag("add_special_tokens", True)
        asked = Asked("completion", fields, fields, {"max_tokens": 16}, self.front.config.model_name)
        return await self._answer(http, asked, await self._prompts(prompt, special))

    async def _prompts(self, prompt: Any, special: bool) -> list[tuple[int, ...]]:
        """A text, token ids, or a list of either."""
        if prompt is None or prompt == []:
            raise BadRequest("prompt is missing: a list of token ids, a string, or a list of such", "prompt")
        if isinstance(prompt, str):
            return [await self.front.text.encode(prompt, "prompt", special=special)]
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            self.front.check_count(len(prompt))  # before anything is done for each
        if isinstance(prompt, list) and all(isinstance(one, str) for one in prompt):
            return [await self.front.text.encode(t, f"prompt[{i}]", special=special) for i, t in enumerate(prompt)]
        if isinstance(prompt, list) and any(isinstance(one, list) for one in prompt):
            return [check_ids(f"prompt[{i}]", one) for i, one in enumerate(prompt)]
        return [check_ids("prompt", prompt)]

    async def chat(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        messages = fields.any("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise BadRequest("messages must be a list of objects, with at least one", "messages")
        options: dict[str, Any] = fields.object("chat_template_kwargs")
        if "chat_template" in options:
            self._check_template("chat_template_kwargs")
        options["add_generation_prompt"] = fields.flag("add_generation_prompt", True)
        if fields.flag("continue_final_message"):
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        if (template := fields.string("chat_template")) is not None:
            self._check_template("chat_template")
            options["chat_template"] = template
        if tools := fields.any("tools"):
            options["tools"] = tools
        # Tools are shown to the model; what it makes of them stays text, to be parsed by who trains it.
        fields.refuse({"tool_choice": ("auto", "none")}, "must be auto or none: calls of tools are not parsed")
        fields.ignore("add_special_tokens", "documents", "chat_template_content_format")
        asked = Asked("chat", fields, fields, {"max_tokens": None}, self.front.config.model_name)
        return await self._answer(http, asked, [await self.front.text.chat(messages, "messages", options)])

    def _check_template(self, field: str) -> None:
        if not self.front.config.request_templates:
            raise BadRequest(f"{field}: a template is a program, and this server takes none but the model's", field)

    async def tokens(self, http: HTTPRequest) -> Response:
        fields = Fields(await self.front.body(http))
        prompt = check_ids("token_ids", fields.any("token_ids"))
        sampling = Fields(fields.object("sampling_params"), "sampling_params.")
        asked = Asked("tokens", fields, sampling, {"max_tokens": 16}, self.front.config.model_name)
        return await self._answer(http, asked, [prompt])

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _answer(self, http: HTTPRequest, asked: Asked, prompts: list[tuple[int, ...]]) -> Response:
        self.front.check_count(len(prompts) * asked.n)
        asks = asked.asks(prompts)
        head = {
            "id": f"{'chatcmpl' if asked.kind == 'chat' else 'cmpl'}-{uuid4().hex}",
            "object": OBJECTS[asked.kind],
            "created": int(time.time()),
            "model": self.front.config.model_name,
        }
        async with contextlib.AsyncExitStack() as stack:
            samples = await stack.enter_async_context(self.front.asked(asks, NAMES[asked.kind]))
            if asked.stream:
                events = self._events(samples.stream(), asked, asks, head)
                return EventStream(events, stack.pop_all(), self.front.config.send_seconds)
            done: list[Completion] = await or_gone(http, samples.whole())
            for completion in done:
                if completion.finish_reason == "error":
                    raise BadRequest(f"{completion.failure}", status=500)
            answer = dict(head)
            answer["choices"] = [self._choice(asked, asks[i], i, c) for i, c in enumerate(done)]
            answer["usage"] = usage(asks, sum(len(c.token_ids) for c in done), asked.n)
            answer["weight_version"] = str(max(c.version for c in done))
            if asked.ids and asked.kind == "chat":
                answer["prompt_token_ids"] = asks[0].prompt_ids
            return JSONResponse(answer)
        raise AssertionError("not reached")

    def _choice(self, asked: Asked, ask: Ask, index: int, c: Completion) -> dict[str, Any]:
        reason = c.stop_reason if asked.trim else None
        text = trimmed(self.front.text, c.token_ids, reason, skip_special=asked.skip_special)
        choice = self._part(asked, ask, index, text, c, 0, first=True, whole=True)
        return choice | ended(c)

    def _part(
        self, asked: Asked, ask: Ask, index: int, text: str, tokens: Chunk, offset: int, *, first: bool, whole: bool
    ) -> dict[str, Any]:
        """A choice, or the part of one that a chunk is. offset: characters of the tokens before it; first: there are
        none."""
        part: dict[str, Any] = {"index": index}
        if asked.kind == "completion":
            part["text"] = text
        elif asked.kind == "chat":
            part["message" if whole else "delta"] = {"role": "assistant", "content": text}
        part["logprobs"] = self._logprobs(asked, tokens, offset) if asked.logprobs else None
        part |= {"finish_reason": None, "stop_reason": None}
        if asked.ids:
            part["token_ids"] = tokens.token_ids
            if asked.kind == "completion" and first:
                part["prompt_token_ids"] = ask.prompt_ids
        part["token_versions"] = tokens.versions
        return part

    def _logprobs(self, asked: Asked, tokens: Chunk, offset: int) -> dict[str, Any]:
        name: Callable[[int], str] = (lambda i: f"token_id:{i}") if asked.tokens_as_ids else self.front.text.token
        names = [name(token) for token in tokens.token_ids]
        if asked.kind == "completion":
            offsets = [offset]
            for one in names[:-1]:
                offsets.append(offsets[-1] + len(one))
            top = [{one: logprob} for one, logprob in zip(names, tokens.logprobs, strict=True)]
            fields = {"tokens": names, "token_logprobs": tokens.logprobs, "top_logprobs": top}
            return {**fields, "text_offset": offsets[: len(names)]}
        rows = zip(names, tokens.logprobs, strict=True)
        content = [{"token": one, "logprob": p, "bytes": [*one.encode()], "top_logprobs": []} for one, p in rows]
        return {"content": content}

    async def _events(
        self, stream: Any, asked: Asked, asks: list[Ask], head: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any]]:
        head = {**head, "object": "chat.completion.chunk"} if asked.kind == "chat" else head
        stop = asked.params.stop if asked.trim else ()
        texts = [TrimmedStream(self.front.text, asked.skip_special, stop) for _ in asks]
        total = 0
        first = [True] * len(asks)
        async with contextlib.aclosing(stream):
            async for i, chunk, completion in stream:
                before, tokens = texts[i].length, chunk or _Empty()
                if completion is None:
                    total += len(chunk.token_ids)
                    text = texts[i].push(chunk.token_ids)
                else:
                    text = texts[i].end(completion.stop_reason)
                part = self._part(asked, asks[i], i, text, tokens, before, first=first[i], whole=False)
                if completion is not None:
                    part |= ended(completion)
                event = {**head, "choices": [part]}
                if completion is not None:
                    event["weight_version"] = str(completion.version)
                if asked.ids and asked.kind == "chat" and first[i]:
                    event["prompt_token_ids"] = asks[i].prompt_ids
                first[i] = False
                yield event
        if asked.usage:
            yield {**head, "choices": [], "usage": usage(asks, total, asked.n)}


class _Empty:
    """The chunk of the last event, whose tokens are out."""

    token_ids: list[int] = []  # noqa: RUF012  (nobody writes to them)
    logprobs: list[float] = []  # noqa: RUF012
    versions: list[Any] = []  # noqa: RUF012


def ended(c: Completion) -> dict[str, Any]:
    """repetition, which OpenAI does not know, is a stop."""
    reason = "stop" if c.finish_reason == "repetition" else c.finish_reason
    return {"finish_reason": reason, "stop_reason": c.failure if reason == "error" else c.stop_reason}


def usage(asks: list[Ask], completion_tokens: int, n: int) -> dict[str, int]:
    """A prompt counts once, however many samples it has."""
    prompt = sum(len(ask.prompt_ids) for ask in asks[::n])
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": prompt + completion_tokens}
