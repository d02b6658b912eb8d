"""The vLLM dialect: completions and chat with token ids, pause and resume, weights; what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import Stepped, barrier, make_stepped, params, steps, undisturbed
from tests.trainer_adapter.server.helpers import Served, all_events, client, run_async, save_model, served

from longtail import NativeEngine, Sample


def body(**fields: Any) -> dict[str, Any]:
    known = {"prompt": prompt(9), "max_tokens": 12, "ignore_eos": True, "seed": 3, "logprobs": 1}
    known["return_token_ids"] = True
    return {k: v for k, v in (known | fields).items() if v is not None}


def want(alone: NativeEngine, ids: list[int], *, index: int = 0, **fields: Any) -> Sample:
    return undisturbed(alone, ids, params(**{"seed": 3, "max_tokens": 12, **fields}), index=index)


@pytest.fixture(scope="module")
def quiet() -> Any:
    """Without a tokenizer."""
    with served(make_stepped(), model_name="tiny") as server:
        yield server


def test_completions(quiet: Served, alone: NativeEngine) -> None:
    sample = want(alone, prompt(9))
    answer = quiet.post("/v1/completions", body(model="tiny")).json()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (sample.output_ids, prompt(9))
    assert choice["logprobs"]["token_logprobs"] == sample.logprobs
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in sample.output_ids]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_versions"]) == ("length", None, [0] * 12)
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    assert (answer["object"], answer["model"], answer["weight_version"]) == ("text_completion", "tiny", "0")
    bare = quiet.post("/v1/completions", body(logprobs=None, return_token_ids=None)).json()["choices"][0]
    assert bare["logprobs"] is None and "token_ids" not in bare


def test_several_prompts_and_samples(quiet: Served, alone: NativeEngine) -> None:
    prompts = [prompt(9), prompt(12, 1)]
    answer = quiet.post("/v1/completions", body(prompt=prompts, n=2)).json()
    assert [c["token_ids"] for c in answer["choices"]] == [
        want(alone, ids, index=i).output_ids for ids in prompts for i in (0, 1)
    ]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 21, "completion_tokens": 48, "total_tokens": 69}


def test_tokens_only(quiet: Served, alone: NativeEngine) -> None:
    """/inference/v1/generate, as SkyRL asks: by its own names."""
    sample = want(alone, prompt(9))
    sampling = {"max_tokens": 12, "ignore_eos": True, "seed": 3, "logprobs": 0}
    body = {"model": "tiny", "token_ids": prompt(9), "sampling_params": sampling}
    answer = quiet.post("/inference/v1/generate", body)
    (choice,) = answer.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (sample.output_ids, "length")
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == sample.logprobs


def test_chat(engine: Stepped, alone: NativeEngine, characters: Any) -> None:
    text = characters.decode(prompt(5))
    ids = [1, *prompt(5), 2, 1]
    sample = want(alone, ids)
    ask = body(messages=[{"role": "user", "content": text}], prompt=None, logprobs=True)
    with served(engine, tokenizer=characters) as server:
        answer = server.post("/v1/chat/completions", ask).json()
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == ids
        assert choice["message"] == {"role": "assistant", "content": characters.decode(sample.output_ids)}
        assert choice["token_ids"] == sample.output_ids
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == sample.logprobs
        no_prompt = server.post("/v1/chat/completions", {**ask, "add_generation_prompt": False}).json()
        assert no_prompt["prompt_token_ids"] == ids[:-1]
        answer = server.post("/v1/completions", body(prompt=text, return_token_ids=True)).json()
        assert answer["choices"][0]["prompt_token_ids"] == prompt(5)
        tool = server.post("/v1/chat/completions", {**ask, "messages": [{"role": "tool", "content": "x"}]})
        assert tool.status_code == 400 and "no tools here" in tool.json()["error"]["message"]
        for own in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}):
            refused = server.post("/v1/chat/completions", {**ask, **own})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(own))
        assert server.post("/detokenize", {"tokens": [1 << 70]}).status_code == 400
        tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
        assert tokens == prompt(5)
        assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    with served(engine, tokenizer=characters, request_templates=True) as server:
        for own in (template, {"chat_template_kwargs": template}):
            assert server.post("/v1/chat/completions", {**ask, **own}).json()["prompt_token_ids"] == prompt(5)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_hold_what_is_new(engine: Stepped, alone: NativeEngine, characters: Any, path: str) -> None:
    async def ask(server: Served, fields: dict[str, Any]) -> list[Any]:
        async with client() as http:
            return await all_events(http, server.url + path, fields)

    chat = path.endswith("chat/completions")
    ids = [1, *prompt(5), 2, 1] if chat else prompt(9)
    fields = body(stream=True, n=2, stream_options={"include_usage": True})
    if chat:
        del fields["prompt"]
        fields["messages"] = [{"role": "user", "content": characters.decode(prompt(5))}]
    with served(engine, tokenizer=characters) as server:
        events = run_async(ask(server, fields))
    assert events.pop()["usage"]["completion_tokens"] == 24
    for index in (0, 1):
        sample = want(alone, ids, index=index)
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [t for p in parts for t in p["token_ids"]] == sample.output_ids
        assert [v for p in parts for v in p["token_versions"]] == [0] * 12
        texts = [p["delta"]["content"] if chat else p["text"] for p in parts]
        assert "".join(texts) == characters.decode(sample.output_ids)
        logprobs = [p["logprobs"] for p in parts]
        if chat:
            assert [one["logprob"] for part in logprobs for one in part["content"]] == sample.logprobs
        else:
            assert [p for part in logprobs for p in part["token_logprobs"]] == sample.logprobs
            assert "".join(t for part in logprobs for t in part["tokens"]) == "".join(texts)
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
def test_streams_end_before_the_stop_string(engine: Stepped, alone: NativeEngine, characters: Any, path: str) -> None:
    """Of three tokens; another one begins as the text does and comes to nothing. The tokens are all there."""

    async def ask(server: Served, fields: dict[str, Any]) -> list[Any]:
        async with client() as http:
            return await all_events(http, server.url + path, fields)

    chat, bare = path.endswith("chat/completions"), path.endswith("generate")
    ids = [1, *prompt(5), 2, 1] if chat else prompt(9)
    sample = want(alone, ids)
    text = characters.decode(sample.output_ids)
    end, nearly = text[5:8], text[2:5] + characters.decode([max(sample.output_ids) + 1])
    known = text[: text.index(end)]
    length = len(known) + 3
    for kept in (False, True):
        own = {"stop": [nearly, end], "include_stop_str_in_output": kept}
        fields = body(stream=True, **own)
        if chat:
            del fields["prompt"]
            fields["messages"] = [{"role": "user", "content": characters.decode(prompt(5))}]
        if bare:
            sampling = {"max_tokens": 12, "ignore_eos": True, "seed": 3, "logprobs": 1, **own}
            fields = {"token_ids": prompt(9), "sampling_params": sampling, "stream": True}
        with served(engine, tokenizer=characters) as server:
            parts = [event["choices"][0] for event in run_async(ask(server, fields))]
            whole = server.post(path, {**fields, "stream": False}).json()["choices"][0]
        assert [t for p in parts for t in p["token_ids"]] == sample.output_ids[:length] == whole["token_ids"]
        logprobs = [p["logprobs"] for p in parts]
        if path == "/v1/completions":
            assert [p for part in logprobs for p in part["token_logprobs"]] == sample.logprobs[:length]
            assert [o for part in logprobs for o in part["text_offset"]] == list(range(length))
            assert [p for p in parts if "prompt_token_ids" in p] == parts[:1]
        else:
            assert [one["logprob"] for part in logprobs for one in part["content"]] == sample.logprobs[:length]
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", end)
        if not bare:
            texts = [p["delta"]["content"] if chat else p["text"] for p in parts]
            assert "".join(texts) == known + (end if kept else "")
            assert (whole["message"]["content"] if chat else whole["text"]) == "".join(texts)
            for i in range(0 if kept else len(parts)):  # held no longer than it may be the beginning of one
                out = sum(len(p["token_ids"]) for p in parts[: i + 1])
                assert len("".join(texts[: i + 1])) == (min(out, 2) if out < 6 else 5)


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/completions", {"prompt": None}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "x"]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [512]]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], 2]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [3] * 256}, "prompt"),
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"top_p": 1.5}, "top_p"),
        ("/v1/completions", {"n": "two"}, "n"),
        ("/v1/completions", {"logprobs": 5}, "logprobs"),
        ("/v1/completions", {"logit_bias": {"3": 100}}, "logit_bias"),
        ("/v1/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/completions", {"temprature": 0.5}, "temprature"),
        ("/v1/completions", {"stream_options": {"usage": True}}, "stream_options.usage"),
        ("/v1/chat/completions", {"prompt": None}, "messages"),
        ("/v1/chat/completions", {"prompt": None, "messages": []}, "messages"),
        ("/v1/chat/completions", {"prompt": None, "messages": ["hi"]}, "messages"),
        ("/v1/chat/completions", {"prompt": None, "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/inference/v1/generate", {"prompt": None, "token_ids": "x"}, "token_ids"),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/detokenize", {"prompt": None, "tokens": [1]}, "tokens"),
        ("/update_weights", {"prompt": None}, "weight_dir"),
        ("/update_weights", {"prompt": None, "weight_dir": "/nowhere"}, "weight_dir"),
        ("/update_weights", {"prompt": None, "update_info": {"path": "/nowhere"}}, "update_info.path"),
        ("/update_weights", {"prompt": None, "update_info": {"names": ["a"]}}, "update_info.names"),
    ],
)
def test_what_is_refused(quiet: Served, path: str, fields: dict[str, Any], field: str) -> None:
    whole = body(**fields) if path == "/v1/completions" else {k: v for k, v in fields.items() if v is not None}
    answer = quiet.post(path, whole)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field, answer.text
    barrier(quiet.service)
    assert quiet.service.stats().num_requests == 0


def test_another_model_is_not_found(quiet: Served) -> None:
    answer = quiet.post("/v1/completions", body(model="gpt"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
    (card,) = quiet.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 256)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_pause_update_resume(tmp_path: Path, mode: str) -> None:
    """As prime-rl and SkyRL do it, with a request in flight and one that comes in between."""
    old, new = make_model("llama"), make_model("llama", seed=1)
    directory = save_model(new, tmp_path)
    engine, alone_old, alone_new = make_stepped(old), make_stepped(old), make_stepped(new)
    with served(engine, steps=0) as server:

        async def talk() -> tuple[Any, Any]:
            async with client(base_url=server.url) as http:

                async def ask(ids: list[int]) -> Any:
                    return (await http.post("/v1/completions", json=body(prompt=ids))).json()["choices"][0]

                first = asyncio.ensure_future(ask(prompt(9)))
                while not server.service.stats().num_requests:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(steps, server.service, 5)
                pause = asyncio.ensure_future(http.post("/pause", params={"mode": mode, "clear_cache": "false"}))
                while not server.service.stats().is_paused:
                    await asyncio.sleep(0.01)
                second = asyncio.ensure_future(ask(prompt(12, 1)))
                while not server.service.stats().num_queued:
                    await asyncio.sleep(0.01)
                assert (await http.get("/is_paused")).json() == {"is_paused": True}
                engine.budget = None
                await asyncio.to_thread(server.service.check_integrity)
                assert (await pause).json() == {"status": "paused"}
                done = await http.post("/update_weights", json={"weight_dir": directory})
                assert done.json()["weight_version"] == "1", done.text
                assert (await http.post("/reset_prefix_cache")).status_code == 200
                assert (await http.post("/resume")).json() == {"status": "resumed"}
                return await first, await second

        first, second = run_async(talk())
    expected = want(alone_old, prompt(9))
    versions = {"keep": [0] * 5 + [1] * 7, "abort": [0] * 5, "wait": [0] * 12}[mode]
    assert first["token_versions"] == versions
    assert first["finish_reason"] == ("abort" if mode == "abort" else "length")
    kept = len([v for v in versions if v == 0])
    assert first["token_ids"][:kept] == expected.output_ids[:kept]
    assert second["token_versions"] == [1] * 12
    assert second["token_ids"] == want(alone_new, prompt(12, 1)).output_ids


def test_a_mode_that_is_none(quiet: Served) -> None:
    answer = quiet.post("/pause?mode=freeze")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mode")
    assert quiet.get("/get_world_size").json() == {"world_size": 1}
