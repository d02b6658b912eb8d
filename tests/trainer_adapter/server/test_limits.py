"""Who may ask, how much, and what becomes of bodies that are none."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import Stepped, barrier, make_stepped, steps
from tests.trainer_adapter.server.helpers import Served, client, run_async, served

from longtail.trainer_adapter.server.config import ServerConfig

GENERATE = {"input_ids": prompt(9), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


@pytest.fixture(scope="module")
def small() -> Any:
    with served(make_stepped(), max_body_bytes=2000, body_seconds=0.3, max_samples_per_request=3) as server:
        yield server


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"input_ids": [NaN]}',
        b'{"input_ids": [1], "sampling_params": {"temperature": Infinity}}',
        b'{"input_ids": [1' + b"0" * 1500 + b"]}",
        b"[" * 1900,
        b'{"a":' * 300,
        b"",
    ],
)
def test_bodies_that_are_none(small: Served, content: bytes) -> None:
    for path in ("/generate", "/v1/completions", "/update_weights_from_disk"):
        answer = small.post(path, content)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_a_body_that_is_too_long(small: Served) -> None:
    """By its length, or once it has come: chunked."""
    for size in (2001, 4001):
        answer = small.post("/generate", b" " * size)
        assert answer.status_code == 413 and "2000 bytes" in answer.json()["error"]["message"]

    async def chunked() -> int:
        async def parts() -> Any:
            for _ in range(30):
                yield b" " * 100

        async with client() as http:
            return (await http.post(small.url + "/generate", content=parts())).status_code

    assert run_async(chunked()) == 413
    assert small.post("/generate", GENERATE).status_code == 200


def test_a_body_that_does_not_come(small: Served) -> None:
    """Its sender is told so, and nobody else waits for it."""
    host, port = small.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert small.post("/generate", GENERATE).status_code == 200
        slow.settimeout(30)
        assert b" 408 " in slow.recv(4096)


def test_no_path_no_method(small: Served) -> None:
    for answer, status in ((small.get("/nowhere"), 404), (small.get("/generate"), 405), (small.post("/health"), 405)):
        assert answer.status_code == status and answer.json()["error"]["code"] == status


def test_more_samples_than_a_request_may_ask_for(small: Served) -> None:
    many = {"input_ids": [prompt(3)] * 4, "sampling_params": {"max_new_tokens": 1}}
    for body in (many, {**GENERATE, "sampling_params": {"n": 4}}):
        answer = small.post("/generate", body)
        assert answer.status_code == 400 and "4 samples" in answer.text
    assert small.post("/v1/completions", {"prompt": prompt(3), "n": 10**12}).status_code == 400


def test_more_samples_than_there_is_room_for(engine: Stepped) -> None:
    """Refused, to be sent again; those that run, and what controls them, are not."""
    with served(engine, steps=0, max_samples=2) as server:

        async def talk() -> None:
            async with client(base_url=server.url) as http:
                first = [asyncio.ensure_future(http.post("/generate", json=GENERATE)) for _ in range(2)]
                while server.service.stats().num_requests < 2:
                    await asyncio.sleep(0.01)
                refused = await http.post("/generate", json=GENERATE)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert (await http.get("/v1/loads")).json()["loads"][0]["num_total_reqs"] == 2
                engine.budget = None
                await asyncio.to_thread(barrier, server.service)
                assert [(await one).status_code for one in first] == [200, 200]
                assert (await http.post("/generate", json=GENERATE)).status_code == 200

        run_async(talk())


def test_a_key(engine: Stepped) -> None:
    with served(engine, api_key="sésame") as server:
        right = {"authorization": "Bearer sésame".encode()}
        assert server.post("/generate", GENERATE, headers=right).status_code == 200
        for key in (None, "Bearer sesame", "sesame", "Bearer"):
            wrong = {} if key is None else {"authorization": key}
            for path in ("/generate", "/pause", "/nowhere", "/update_weights_from_disk"):
                answer = server.post(path, GENERATE, headers=wrong)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
        assert server.get("/health").status_code == 200
        assert server.get("/get_server_info").status_code == 401
        assert not server.service.stats().is_paused
    assert "sésame" not in repr(ServerConfig(api_key="sésame"))


def test_one_dialect(engine: Stepped) -> None:
    for dialect, here, gone in (("sglang", "/get_load", "/v1/models"), ("vllm", "/v1/models", "/get_load")):
        with served(engine, dialect=dialect) as server:
            assert (server.get(here).status_code, server.get(gone).status_code) == (200, 404)
            assert server.get("/server_info").status_code == 200


def test_it_binds_to_loopback() -> None:
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize(
    "fields",
    [
        {"dialect": "grpc"},
        {"port": -1},
        {"port": 70000},
        {"max_body_bytes": 0},
        {"max_samples": True},
        {"send_seconds": float("nan")},
        {"grace_seconds": -1},
        {"api_key": " "},
    ],
)
def test_wrong_settings(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ServerConfig(**fields)


def test_an_address_that_is_taken(engine: Stepped) -> None:
    with served(engine) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"), served(engine, port=port):
            pass


def test_an_engine_that_fails() -> None:
    """Those who wait get a 503, /health too, and what comes later."""

    class Breaks(Stepped):
        def step(self, **options: Any) -> Any:
            raise RuntimeError("cuda is on fire")

    engine = Breaks(make_model("llama"), kv_cache_bytes=4 << 20, max_num_seqs=2, block_size=16)
    with served(engine) as server:
        for body in ({**GENERATE, "stream": True}, GENERATE):
            answer = server.post("/generate", body)
            assert answer.status_code == 503 or "cuda is on fire" in answer.text
        assert server.get("/health").status_code == 503
        assert "cuda is on fire" in server.post("/v1/completions", {"prompt": [1]}).json()["error"]["message"]
        assert server.post("/abort_request", {"abort_all": True}).status_code == 503


def test_the_end_gives_what_there_is(engine: Stepped) -> None:
    """Requests have the grace time; then they end as aborted ones, with what they have."""

    async def ask(url: str) -> list[str]:
        body = {"input_ids": [7], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        async with client(base_url=url) as http:
            posts = [http.post("/generate", json={**body, "stream": stream}) for stream in (False, True)]
            return [answer.text for answer in await asyncio.gather(*posts)]

    with ThreadPoolExecutor(1) as pool:
        with served(engine, steps=0, grace_seconds=0.3) as server:
            asked = pool.submit(run_async, ask(server.url))
            while server.service.stats().num_requests < 2:
                time.sleep(0.01)
            steps(server.service, 6)
        whole, events = asked.result()
    assert len(json.loads(whole)["output_ids"]) == 6
    last, done = events.strip().split("\n\n")[-2:]
    assert done == "data: [DONE]"
    for answer in (json.loads(whole), json.loads(last.removeprefix("data: "))):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) == 6
