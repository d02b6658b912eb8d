"""Everything at once against a server: many streams, clients that are slow or vanish, bodies that are none, updates,
aborts. `load` runs it, and looks at every token that came."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from tests.partial_rollout.conftest import prompt
from tests.partial_rollout.service_helpers import cut_to, params
from tests.trainer_adapter.server.helpers import Served, client, run_async, served, stream

from longtail import NativeEngine, Sample
from longtail.sample import sample_seed
from longtail.version import PolicyVersion

LENGTH = 16
BAD = [
    ({"input_ids": [1, 512]}, 400),
    ({"input_ids": [3] * 300}, 400),
    ({"input_ids": "x"}, 400),
    ({"sampling_params": {"temperature": "hot"}, "input_ids": [1]}, 400),
    (b"{", 400),
    (b" " * 70_000, 413),
]


def body(number: int, length: int = LENGTH) -> dict[str, Any]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": number}
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
    """After a moment, without a word, and long before its end."""
    host, port = server.url.removeprefix("http://").split(":")
    content = httpx2.Request("POST", server.url, json=body(number, 12 * LENGTH)).content
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


async def trainer(http: httpx2.AsyncClient, server: Served, directories: list[str], streams: int) -> int:
    """Updates under way: in flight, after an abort, in a pause. -> how many."""
    for version in (1, 2, 3):
        await until(lambda v=version: server.service.stats().num_output_tokens > v * streams * LENGTH // 5)
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


def check(found: list[tuple[int, Sample, Sample]], alone: Sequence[NativeEngine], noise: float = 0.0) -> None:
    """Each run is what the weights of its version make of the tokens before, on an engine that nothing disturbs. noise:
    that log-probabilities may differ by."""
    for parity, engine in enumerate(alone):
        engine.add([again for version, _, again in found if version % 2 == parity])
        while engine.has_work:
            engine.step()
    for version, sample, again in found:
        end = len(again.output_ids)
        assert again.output_ids == sample.output_ids[:end], (again.id, version)
        assert again.logprobs == pytest.approx(sample.logprobs[:end], rel=0.0, abs=noise), (again.id, version)


def load(engine: Any, alone: Sequence[NativeEngine], directories: list[str], streams: int, noise: float = 0.0) -> None:
    """engine: with the weights of the first directory, at version 0; alone: engines with those of each."""
    step = engine.step

    def at_leisure(**options: Any) -> Any:
        """The streams do not end before the trainer, which has the same two cores, has made its updates."""
        if engine.version < 3 and engine.stats().num_output_tokens > (engine.version + 1.5) * streams * LENGTH / 5:
            with engine._lock, engine._between_passes():  # a core of its own would run on
                time.sleep(0.1)
        return step(**options)

    engine.step = at_leisure
    others = streams * 3 // 25

    async def everything(server: Served) -> tuple[list[Any], list[Any]]:
        pick = random.Random(0)
        kinds = [("slow" if i % 25 == 1 else "patient") for i in range(streams)]
        async with client() as http:
            wanted = [slow(http, server, i) if k == "slow" else patient(http, server, i) for i, k in enumerate(kinds)]
            more = [vanishes(server, 1000 + i) for i in range(others)] + [
                malformed(http, server, i) for i in range(others)
            ]
            pick.shuffle(more)
            results = asyncio.gather(*wanted)
            extra = asyncio.gather(*more, trainer(http, server, directories, streams))
            return await results, await extra

    with served(engine, max_body_bytes=65_536, max_samples=streams + 100) as server:
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
    check(found, alone, noise)
    assert {version for version, _, _ in found} == {0, 1, 2, 3}
    assert stats.num_failed == 0
    assert stats.num_resumed > 0
    assert stats.num_cancelled > 0
    assert stats.num_completed + stats.num_aborted + stats.num_cancelled >= streams
