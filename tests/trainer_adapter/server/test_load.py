"""Everything at once: 500 streams, clients that are slow or vanish, bodies that are none, updates, aborts. What comes
is right, token by token and version by version, and at the end nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import barrier, continued, cut_to, make_stepped, params, undisturbed
from tests.trainer_adapter.server.helpers import Served, client, run_async, save_model, served, stream

from longtail import NativeEngine, Sample
from longtail.sample import sample_seed
from longtail.version import PolicyVersion

STREAMS = 500
LENGTH = 16
BAD = [
    ({"input_ids": [1, 512]}, 400),
    ({"input_ids": [3] * 300}, 400),
    ({"input_ids": "x"}, 400),
    ({"sampling_params": {"temperature": "hot"}, "input_ids": [1]}, 400),
    (b"{", 400),
    (b" " * 70_000, 413),
]


def body(number: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": LENGTH, "ignore_eos": True, "sampling_seed": number}
    ids = prompt(4 + number % 30, number % 7)
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": True}


def raw(content: bytes) -> bytes:
    return f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def patient(http: httpx2.AsyncClient, server: Served, number: int) -> list[dict[str, Any]]:
    """Reads to the end, and sends again what was aborted. -> meta_info of each part."""
    wanted, parts = body(number), []
    while True:
        async with stream(http, server.url + "/generate", wanted) as events:
            last = [event async for event in events][-2]["meta_info"]
        parts.append(last)
        if last["finish_reason"]["type"] != "abort":
            return parts
        wanted["input_ids"] = [*wanted["input_ids"], *(row[1] for row in last["output_token_logprobs"])]
        left = LENGTH - sum(part["completion_tokens"] for part in parts)
        wanted["sampling_params"] = {**wanted["sampling_params"], "max_new_tokens": left}


async def slow(http: httpx2.AsyncClient, server: Served, number: int) -> list[dict[str, Any]]:
    async with stream(http, server.url + "/generate", body(number)) as events:
        last = None
        async for event in events:
            await asyncio.sleep(0.1)
            last = event if event != "[DONE]" else last
    assert last is not None
    return [last["meta_info"]]


async def vanishes(server: Served, number: int) -> None:
    """After a moment, without a word."""
    host, port = server.url.removeprefix("http://").split(":")
    content = httpx2.Request("POST", server.url, json=body(number)).content
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw(content) if number % 3 else raw(content)[:-20])
    await writer.drain()
    if number % 3 == 1:
        await reader.read(100)
    writer.transport.abort()


async def malformed(http: httpx2.AsyncClient, server: Served, number: int) -> None:
    content, status = BAD[number % len(BAD)]
    if isinstance(content, bytes):
        answer = await http.post(server.url + "/generate", content=content)
    else:
        answer = await http.post(server.url + "/generate", json=content)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text


async def trainer(http: httpx2.AsyncClient, server: Served, directories: list[str]) -> int:
    """Updates under way: in flight, after an abort, in a pause. -> how many."""
    for version in (1, 2, 3):
        await until(lambda v=version: server.service.stats().num_output_tokens > v * STREAMS * LENGTH // 5)
        if version == 2:
            await http.post(server.url + "/pause_generation", json={"mode": "abort"})
        if version == 3:
            await http.post(server.url + "/pause", params={"mode": "keep"})
        answer = await http.post(
            server.url + "/update_weights_from_disk",
            json={"model_path": directories[version % 2], "weight_version": str(version)},
        )
        assert answer.json()["success"], answer.text
        await http.post(server.url + "/continue_generation")
    return 3


def runs(number: int, parts: list[dict[str, Any]]) -> list[tuple[int, Sample, Sample]]:
    """Each run of one version: the version, what came, and the same cut to where the run began."""
    rows = [row for part in parts for row in part["output_token_logprobs"]]
    versions = [v for part in parts for v in part["output_token_versions"]]
    assert len(rows) == len(versions) == LENGTH and versions == sorted(versions)
    wanted = body(number)
    sample = Sample(
        id="check",
        group_id="check",
        index=0,
        prompt_ids=tuple(wanted["input_ids"]),
        params=params(seed=number, max_tokens=LENGTH),
        seed=sample_seed(number, "", 0),
        output_ids=[row[1] for row in rows],
        logprobs=[row[0] for row in rows],
        versions=versions,
    )
    borders = [0, *(i for i in range(1, LENGTH) if versions[i] != versions[i - 1]), LENGTH]
    found = []
    for start, end in pairwise(borders):
        again = cut_to(sample, start, end, PolicyVersion(0))
        again.id = f"{number}/{start}"
        found.append((versions[start], sample, again))
    return found


def check(found: list[tuple[int, Sample, Sample]], alone: Sequence[NativeEngine]) -> None:
    """Each run is what the weights of its version make of the tokens before, on an engine that nothing disturbs."""
    for parity, engine in enumerate(alone):
        engine.add([again for version, _, again in found if version % 2 == parity])
        while engine.has_work:
            engine.step()
    for version, sample, again in found:
        end = len(again.output_ids)
        assert again.output_ids == sample.output_ids[:end], (again.id, version)
        assert again.logprobs == sample.logprobs[:end], (again.id, version)


@pytest.mark.slow
def test_five_hundred_streams(tmp_path: Path) -> None:
    models = [make_model("llama"), make_model("llama", seed=1)]
    directories = [save_model(model, tmp_path / str(i)) for i, model in enumerate(models)]
    engine = make_stepped(models[0], max_num_seqs=64, max_num_batched_tokens=256, kv_cache_bytes=16 << 20)
    step = engine.step

    def at_leisure(**options: Any) -> Any:
        """The streams do not end before the trainer, which has the same two cores, has made its updates."""
        if engine.version < 3 and engine.stats().num_output_tokens > (engine.version + 1.5) * STREAMS * LENGTH / 5:
            time.sleep(0.1)
        return step(**options)

    engine.step = at_leisure  # type: ignore[method-assign]
    alone = [make_stepped(model, max_num_seqs=64, max_num_batched_tokens=256) for model in models]

    async def everything(server: Served) -> tuple[list[Any], list[Any]]:
        pick = random.Random(0)
        kinds = [("slow" if i % 25 == 1 else "patient") for i in range(STREAMS)]
        async with client() as http:
            streams = [slow(http, server, i) if k == "slow" else patient(http, server, i) for i, k in enumerate(kinds)]
            others = [vanishes(server, 1000 + i) for i in range(60)] + [malformed(http, server, i) for i in range(60)]
            pick.shuffle(others)
            results = asyncio.gather(*streams)
            extra = asyncio.gather(*others, trainer(http, server, directories))
            return await results, await extra

    with served(engine, max_body_bytes=65_536, max_samples=STREAMS + 100) as server:
        results, extra = run_async(everything(server))
        run_async(until(lambda: server.service.stats().num_requests == 0))
        stats = server.service.stats()
    assert extra[-1] == 3
    found: list[tuple[int, Sample, Sample]] = []
    for number, parts in enumerate(results):
        if sum(part["completion_tokens"] for part in parts) == LENGTH:
            found += runs(number, parts)
        else:  # slow ones do not send again what was aborted
            assert number % 25 == 1 and parts[-1]["finish_reason"]["type"] == "abort"
    check(found, alone)
    assert {version for version, _, _ in found} == {0, 1, 2, 3}
    assert stats.num_resumed > 0 and stats.num_cancelled > 0 and stats.num_failed == 0
    assert stats.num_completed + stats.num_aborted + stats.num_cancelled >= STREAMS


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


def test_undisturbed_is_undisturbed() -> None:
    """The yardstick itself."""
    alone = make_stepped()
    whole = undisturbed(alone, prompt(9), params(seed=3, max_tokens=LENGTH))
    assert continued(alone, whole, 5, LENGTH) == (whole.output_ids[5:], whole.logprobs[5:])
