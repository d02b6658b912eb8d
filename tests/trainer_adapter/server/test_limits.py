"""Who may ask, how much, and what becomes of bodies that are none."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import Stepped, barrier, make_stepped, steps
from tests.trainer_adapter.server.helpers import Served, client, run_async, served

from longtail.trainer_adapter.server import openai, sglang
from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.serve import bound
from longtail.trainer_adapter.server.text import Text

GENERATE = {"input_ids": prompt(9), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}


@pytest.fixture(scope="module")
def small() -> Any:
    with served(make_stepped(), max_body_bytes=2000, max_samples_per_request=3) as server:
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
        b'{"input_ids": [1], "sampling_params": {"temperature": 1' + b"0" * 400 + b"}}",
        b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1' + b"0" * 400 + b"}}",
        b'{"input_ids": [1], "rid": "\\ud800"}',
        b'{"text": "\\uDFFF"}',
        b'{"prompt": [1], "stop": "\\ud800"}',
        b'{"prompt": [1], "\\ud800": 1}',
        b'{"model_path": "' + b"a" * 1900 + b'"}',
        b'{"model_path": "\\u0000"}',
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


def test_a_body_that_does_not_come(engine: Stepped) -> None:
    """Its sender is told so, and nobody else waits for it."""
    with served(engine, body_seconds=3.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert server.post("/generate", GENERATE).status_code == 200
            slow.settimeout(60)
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


def test_many_prompts_are_counted_before_they_are_read(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(sglang, "Sampling", read)
    monkeypatch.setattr(openai, "check_ids", read)
    monkeypatch.setattr(Text, "encode", read)
    for path, body in (
        ("/generate", {"input_ids": [[1]] * 9}),
        ("/generate", {"text": ["a"] * 9, "sampling_params": [{}] * 9}),
        ("/v1/completions", {"prompt": [[1]] * 9}),
        ("/v1/completions", {"prompt": ["a"] * 9}),
    ):
        answer = small.post(path, body)
        assert answer.status_code == 400 and "9 samples" in answer.text


def test_a_page_in_a_browser_needs_the_key(engine: Stepped) -> None:
    """Any page on the web can send to a loopback address."""
    page = {"origin": "http://example.org", "content-type": "text/plain"}
    with served(engine) as server:
        for path in ("/generate", "/pause", "/update_weights_from_disk"):
            assert server.post(path, GENERATE, headers=page).status_code == 403
        assert not server.service.stats().is_paused
        assert server.post("/generate", GENERATE).status_code == 200
    with served(engine, api_key="k") as server:
        assert server.post("/generate", GENERATE, headers=page).status_code == 401
        assert server.post("/generate", GENERATE, headers=page | {"authorization": "Bearer k"}).status_code == 200


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


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
def test_a_connection_whose_client_takes_nothing_in_ends() -> None:
    """Whatever was written to it, and whether or not anybody still writes."""
    with bound("127.0.0.1", 0, 0.5) as listening, socket.socket() as reader:
        listening.listen()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listening.getsockname())
        writer, _ = listening.accept()
        with writer:
            writer.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    writer.send(bytes(1 << 16))
            until = time.monotonic() + 60
            while not (error := writer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert error == errno.ETIMEDOUT


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
