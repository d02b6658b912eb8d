"""The SGLang dialect: shapes, values, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import Stepped, barrier, make_stepped, params, steps, undisturbed
from tests.trainer_adapter.server.helpers import Served, all_events, client, run_async, save_model, served

from longtail import NativeEngine, Sample


def sampling(**fields: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 3, **fields}


def want(alone: NativeEngine, ids: list[int], *, index: int = 0, **fields: Any) -> Sample:
    return undisturbed(alone, ids, params(**{"seed": 3, "max_tokens": 12, **fields}), index=index)


def rows(sample: Sample) -> list[list[Any]]:
    return [[p, t, None] for p, t in zip(sample.logprobs, sample.output_ids, strict=True)]


def test_generate(engine: Stepped, alone: NativeEngine, characters: Any) -> None:
    sample = want(alone, prompt(9))
    with served(engine, tokenizer=characters) as server:
        body = {"input_ids": prompt(9), "sampling_params": sampling(), "return_logprob": True}
        answer = server.post("/generate", body).json()
        assert answer["output_ids"] == sample.output_ids
        assert answer["text"] == characters.decode(sample.output_ids)
        meta = answer["meta_info"]
        assert meta["output_token_logprobs"] == rows(sample)  # bit for bit: JSON holds a float whole
        assert meta["output_token_versions"] == [0] * 12
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (9, 12, "0")
        del body["return_logprob"]
        assert "output_token_logprobs" not in server.post("/generate", body).json()["meta_info"]
        text = {"text": characters.decode(prompt(9)), "sampling_params": sampling()}
        assert server.post("/generate", text).json()["output_ids"] == sample.output_ids


def test_batches_and_n(engine: Stepped, alone: NativeEngine) -> None:
    """Prompt after prompt, the samples of each together, index counting within."""
    with served(engine) as server:
        body: dict[str, Any] = {"input_ids": [prompt(9), prompt(12, 1)], "sampling_params": sampling(n=2)}
        answers = server.post("/generate", body).json()
        assert [a["output_ids"] for a in answers] == [
            want(alone, ids, index=i).output_ids for ids in body["input_ids"] for i in (0, 1)
        ]
        body["sampling_params"] = [sampling(max_new_tokens=2), sampling(max_new_tokens=3)]
        assert [len(a["output_ids"]) for a in server.post("/generate", body).json()] == [2, 3]
        (alone_in_a_list,) = server.post("/generate", {"input_ids": [prompt(9)], "sampling_params": sampling()}).json()
        assert alone_in_a_list["output_ids"] == want(alone, prompt(9)).output_ids


def test_stops(engine: Stepped, alone: NativeEngine, characters: Any) -> None:
    """matched says what it was; the tokens stay, and the text is trimmed unless that is not wanted."""
    drawn = want(alone, prompt(9)).output_ids
    end = characters.decode(drawn[4:6])
    with served(engine, tokenizer=characters) as server:

        def ask(**fields: Any) -> tuple[Any, Any, Any]:
            body = {"input_ids": prompt(9), "sampling_params": sampling(**fields), "return_logprob": True}
            answer = server.post("/generate", body).json()
            return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]

        assert ask(stop_token_ids=[drawn[3]]) == (
            drawn[:4],
            characters.decode(drawn[:4]),
            {"type": "stop", "matched": drawn[3]},
        )
        stopped = {"type": "stop", "matched": end}
        assert ask(stop=end) == (drawn[:6], characters.decode(drawn[:4]), stopped)
        assert ask(stop=[end], no_stop_trim=True) == (drawn[:6], characters.decode(drawn[:6]), stopped)


def test_streams_hold_all_so_far(engine: Stepped, alone: NativeEngine, characters: Any) -> None:
    async def ask(server: Served) -> list[Any]:
        body = {"input_ids": prompt(9), "sampling_params": sampling(), "return_logprob": True, "stream": True}
        async with client() as http:
            return await all_events(http, server.url + "/generate", body)

    sample = want(alone, prompt(9))
    with served(engine, tokenizer=characters) as server:
        events = run_async(ask(server))
    for event in events:
        n = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == sample.output_ids[:n]
        assert event["meta_info"]["output_token_logprobs"] == rows(sample)[:n]
        assert event["text"] == characters.decode(sample.output_ids[:n])
        assert (event["meta_info"]["finish_reason"] is None) == (event is not events[-1])
    assert len(events[-1]["output_ids"]) == 12


def test_a_stream_of_several(engine: Stepped, alone: NativeEngine) -> None:
    async def ask(server: Served) -> list[Any]:
        body = {"input_ids": [prompt(9), prompt(12, 1)], "sampling_params": sampling(n=2), "stream": True}
        async with client() as http:
            return await all_events(http, server.url + "/generate", body)

    with served(engine) as server:
        events = run_async(ask(server))
    ends = {e["index"]: e["output_ids"] for e in events if e["meta_info"]["finish_reason"]}
    prompts = [prompt(9), prompt(12, 1)]
    assert ends == {2 * p + i: want(alone, prompts[p], index=i).output_ids for p in (0, 1) for i in (0, 1)}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input_ids"),
        ({"input_ids": [1], "text": "x"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "text"}, "input_ids"),
        ({"input_ids": [1, "2"]}, "input_ids"),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1, -1]}, "input_ids"),
        ({"input_ids": [1, 512]}, "input_ids"),
        ({"input_ids": [1, 10**40]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"input_ids": [[1], "x"]}, "input_ids[1]"),
        ({"input_ids": [4] * 300}, "input_ids"),
        ({"text": "x"}, "text"),
        ({"text": 7}, "text"),
        ({"input_ids": [1], "sampling_params": "hot"}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2.5}}, "sampling_params.max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"input_ids": [1], "sampling_params": {"stop": [1]}}, "sampling_params.stop"),
        ({"input_ids": [1], "sampling_params": {"stop": "x"}}, None),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "sampling_params.stop_token_ids"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [512]}}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"input_ids": [1], "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob"),
        ({"input_ids": [1], "top_logprobs_num": 5}, "top_logprobs_num"),
        ({"input_ids": [1], "image_data": ["x"]}, "image_data"),
        ({"input_ids": [1], "stream": 1}, "stream"),
        ({"input_ids": [1], "rid": ["a", "b"]}, "rid"),
        ({"input_ids": [1], "sampling_parms": {}}, "sampling_parms"),
    ],
)
def test_what_is_refused(served_quiet: Served, body: dict[str, Any], field: str | None) -> None:
    answer = served_quiet.post("/generate", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400 and error["message"]
    if field is not None:
        assert error["param"] == field
        assert field.split(".")[-1].split("[")[0] in error["message"]
    barrier(served_quiet.service)
    assert served_quiet.service.stats().num_requests == 0


@pytest.fixture(scope="module")
def served_quiet() -> Any:
    """Without a tokenizer."""
    with served(make_stepped()) as server:
        yield server


def test_fields_that_change_nothing_are_taken(served_quiet: Served) -> None:
    body = {
        "input_ids": prompt(9),
        "image_data": None,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "priority": 3,
        "sampling_params": sampling(top_k=10**9, regex=None, spaces_between_special_tokens=False, max_new_tokens=3.0),
    }
    assert len(served_quiet.post("/generate", body).json()["output_ids"]) == 3


# ---- control


def test_abort_by_name_and_all(engine: Stepped) -> None:
    with served(engine, steps=0) as server:

        async def ask(http: Any, name: str, n: int) -> Any:
            body = {"input_ids": prompt(9), "rid": name, "sampling_params": sampling(n=n), "return_logprob": True}
            return (await http.post(server.url + "/generate", json=body)).json()

        async def talk() -> None:
            import asyncio

            async with client() as http, asyncio.TaskGroup() as group:
                a, b = group.create_task(ask(http, "a", 2)), group.create_task(ask(http, "b", 1))
                while server.service.stats().num_requests < 3:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(steps, server.service, 4)
                twice = await http.post(server.url + "/generate", json={"input_ids": [1], "rid": "a"})
                assert (twice.status_code, "'a' is the id" in twice.text) == (400, True)
                gone = await http.post(server.url + "/abort_request", json={"rid": "a"})
                assert gone.json() == {"status": "ok", "num_aborted": 2}
                for one in await a:
                    assert one["meta_info"]["finish_reason"]["type"] == "abort"
                    assert len(one["meta_info"]["output_token_logprobs"]) in (3, 4)  # the second waits for the prompt
                assert (await http.get(server.url + "/v1/loads")).json()["loads"][0]["num_total_reqs"] == 1
                await http.post(server.url + "/abort_request", json={"abort_all": True})
                loads = (await http.get(server.url + "/v1/loads?include=core,disagg,queues")).json()
                assert loads["aggregate"] == {"total_running_reqs": 0, "total_waiting_reqs": 0, "total_reqs": 0}
                assert (await b)["meta_info"]["id"] == "b"

        run_async(talk())
        assert server.post("/abort_request", {"rid": "never"}).json()["num_aborted"] == 0
        assert server.post("/abort_request", {}).status_code == 400


def test_a_resume_by_tokens(engine: Stepped, alone: NativeEngine) -> None:
    """pause, the weights' place, continue: as AReaL does it, without the update. And no seed but the server's."""
    fields = sampling(max_new_tokens=20)
    del fields["sampling_seed"]
    with served(engine) as server:
        whole = server.post("/generate", {"input_ids": prompt(9), "sampling_params": fields}).json()["output_ids"]
    engine.reset_prefix_cache()
    with served(engine, steps=0) as server:

        async def talk() -> list[Any]:
            import asyncio

            async with client() as http:

                async def ask(ids: list[int], left: int) -> Any:
                    body = {"input_ids": ids, "sampling_params": {**fields, "max_new_tokens": left}}
                    return (await http.post(server.url + "/generate", json=body)).json()

                first = asyncio.ensure_future(ask(prompt(9), 20))
                while not server.service.stats().num_requests:
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(steps, server.service, 7)
                await http.post(server.url + "/pause_generation")
                got = await first
                second = asyncio.ensure_future(ask([*prompt(9), *got["output_ids"]], 13))
                while not server.service.stats().num_queued:
                    await asyncio.sleep(0.01)
                engine.budget = None
                await http.post(server.url + "/continue_generation")
                return [got, await second]

        first, second = run_async(talk())
        assert first["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
        assert (len(first["output_ids"]), second["meta_info"]["resumed_tokens"]) == (7, 7)
        assert first["output_ids"] + second["output_ids"] == whole


def test_pause_modes(engine: Stepped) -> None:
    with served(engine) as server:
        for mode in ("abort", "retract", "in_place"):
            assert server.post("/pause_generation", {"mode": mode}).json()["status"] == "ok"
            assert server.get("/server_info").json()["is_paused"]
            assert server.get("/health_generate").status_code == 200
            assert server.post("/continue_generation").json()["status"] == "ok"
        wrong = server.post("/pause_generation", {"mode": "wait"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")


def test_weights_from_disk(tmp_path: Path) -> None:
    new = make_model("llama", seed=1)
    directory = save_model(new, tmp_path / "new")
    engine, alone = make_stepped(), make_stepped(new)
    with served(engine) as server:
        body = {"input_ids": prompt(9), "sampling_params": sampling(), "return_logprob": True}
        assert server.get("/get_model_info").json()["weight_version"] == "0"
        answer = server.post("/update_weights_from_disk", {"model_path": directory, "abort_all_request": True})
        assert answer.status_code == 200 and answer.json()["success"], answer.text
        got = server.post("/generate", body).json()["meta_info"]
        assert got["output_token_logprobs"] == rows(want(alone, prompt(9)))
        assert (got["weight_version"], set(got["output_token_versions"])) == ("1", {1})
        answer = server.post("/update_weights_from_disk", {"model_path": directory, "weight_version": "7"})
        assert answer.json()["success"] and server.get("/get_weight_version").json() == {"weight_version": "7"}
        barrier(server.service)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "model_path"),
        ({"model_path": "/nowhere/at/all"}, "model_path"),
        ({"model_path": "EMPTY"}, "model_path"),
        ({"model_path": "TORN"}, "model_path"),
        ({"model_path": "OTHER"}, "model_path"),
        ({"model_path": "OUTSIDE"}, "model_path"),
        ({"model_path": "GOOD", "weight_version": "0"}, "weight_version"),
        ({"model_path": "GOOD", "weight_version": "latest"}, "weight_version"),
        ({"model_path": "GOOD", "load_format": "dummy"}, "load_format"),
        ({"model_path": 7}, "model_path"),
    ],
)
def test_weights_that_are_none(served_quiet: Served, tmp_path: Path, fields: dict[str, Any], field: str) -> None:
    """Refused, and what is served stays as it was."""
    (tmp_path / "EMPTY").mkdir()
    save_model(make_model("llama"), tmp_path / "GOOD")
    save_model(make_model("llama", num_hidden_layers=1), tmp_path / "OTHER")
    torn = Path(save_model(make_model("llama"), tmp_path / "TORN")) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    (tmp_path / "OUTSIDE").mkdir()
    index = '{"weight_map": {"a": "../GOOD/model.safetensors"}}'
    (tmp_path / "OUTSIDE" / "model.safetensors.index.json").write_text(index)
    if isinstance(name := fields.get("model_path"), str) and name.isupper():
        fields = {**fields, "model_path": str(tmp_path / name)}
    answer = served_quiet.post("/update_weights_from_disk", fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert served_quiet.get("/get_weight_version").json() == {"weight_version": "0"}


def test_what_it_says_of_itself(served_quiet: Served) -> None:
    assert served_quiet.get("/health").status_code == served_quiet.get("/health_generate").status_code == 200
    (worker,) = served_quiet.get("/workers").json()["workers"]
    assert (worker["url"], worker["is_healthy"]) == (served_quiet.url, True)
    assert served_quiet.get("/get_server_info").json()["model_path"] == "tiny"
    assert served_quiet.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0}]
    for method in (served_quiet.get, served_quiet.post):
        assert method("/flush_cache").status_code == 200
