"""Everything at once: 500 streams, clients that are slow or vanish, bodies that are none, updates, aborts. What comes
is right, token by token and version by version, and at the end nothing is left behind."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx2
import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import barrier, continued, make_stepped, params, undisturbed
from tests.trainer_adapter.server.helpers import client, run_async, save_model, served
from tests.trainer_adapter.server.load_helpers import LENGTH, body, load, raw, until, vanishes


@pytest.mark.slow
def test_five_hundred_streams(tmp_path: Path) -> None:
    models = [make_model("llama"), make_model("llama", seed=1)]
    directories = [save_model(model, tmp_path / str(i)) for i, model in enumerate(models)]
    engine = make_stepped(models[0], max_num_seqs=64, max_num_batched_tokens=256, kv_cache_bytes=16 << 20)
    alone = [make_stepped(model, max_num_seqs=64, max_num_batched_tokens=256) for model in models]
    load(engine, alone, directories, streams=500)


def test_a_client_that_never_reads_hurts_nobody() -> None:
    """Its socket takes nothing; it is given up after a while, and its sample goes."""
    engine = make_stepped(max_num_seqs=2)
    with served(engine, send_seconds=0.5) as server:

        async def talk() -> None:
            host, port = server.url.removeprefix("http://").split(":")
            stuck = socket.socket()
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            stuck.connect((host, int(port)))
            many = {**body(1), "input_ids": [[5]] * 60, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
            content = httpx2.Request("POST", server.url, json=many).content
            stuck.sendall(raw(content))
            await until(lambda: server.service.stats().num_requests)
            await until(lambda: not server.service.stats().num_requests)
            stuck.close()
            async with client() as http:
                answer = await http.post(server.url + "/generate", json={**body(3), "stream": False})
                assert len(answer.json()["output_ids"]) == LENGTH

        run_async(talk())
        barrier(server.service)
        assert server.service.stats().num_cancelled > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_vanishes_frees_its_blocks(streamed: bool) -> None:
    engine = make_stepped()
    with served(engine, steps=0) as server:

        async def talk() -> None:
            host, port = server.url.removeprefix("http://").split(":")
            content = httpx2.Request("POST", server.url, json={**body(1), "stream": streamed}).content
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(raw(content))
            await until(lambda: server.service.stats().num_requests)
            engine.budget = 5
            await asyncio.to_thread(barrier, server.service)
            if streamed:
                await reader.read(50)
            assert server.service.stats().num_requests == 1
            writer.transport.abort()
            await until(lambda: not server.service.stats().num_requests)

        run_async(talk())
        assert server.service.stats().num_cancelled == 1
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_client_that_vanishes_within_its_body_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with served(make_stepped()) as server:

        async def talk() -> None:
            await vanishes(server, 0)
            async with client() as http:
                answer = await http.post(server.url + "/generate", json={**body(3), "stream": False})
                assert len(answer.json()["output_ids"]) == LENGTH

        run_async(talk())
    assert "Traceback" not in capsys.readouterr().err


def test_undisturbed_is_undisturbed() -> None:
    """The yardstick itself."""
    alone = make_stepped()
    whole = undisturbed(alone, prompt(9), params(seed=3, max_tokens=LENGTH))
    assert continued(alone, whole, 5, LENGTH) == (whole.output_ids[5:], whole.logprobs[5:])
