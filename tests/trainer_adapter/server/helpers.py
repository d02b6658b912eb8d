"""A real server on a loopback port, in front of a tiny model, and clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2
from safetensors.torch import save_file
from tests.partial_rollout.service_helpers import Stepped

from longtail.partial_rollout.service import KeptConfig, RolloutService
from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.serve import serving


class Served:
    """What a test has of a server."""

    def __init__(self, url: str, engine: Stepped, service: RolloutService) -> None:
        self.url, self.engine, self.service = url, engine, service

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return httpx2.post(self.url + path, content=content, timeout=120, trust_env=False, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=120, trust_env=False, **options)


@contextmanager
def served(
    engine: Stepped,
    *,
    steps: int | None = None,
    tokenizer: Any = None,
    seed: int = 5,
    kept: KeptConfig | None = None,
    **config: Any,
) -> Iterator[Served]:
    """steps: as of `service_helpers.serving`. At the end nothing is left: no blocks, no saved KV, no request."""
    engine.budget = steps
    blocks = engine.stats().num_free_blocks
    settings = ServerConfig(**{"port": 0, "grace_seconds": 0.2} | config)
    with RolloutService(engine, seed=seed, kept=kept) as service:
        with serving(service, settings, tokenizer=tokenizer, about={"model_path": "tiny"}) as url:
            yield Served(url, engine, service)
        engine.budget = None
        if service.stopped is None:
            service.resume().result()
            service.abort_all().result()
            service.check_integrity()
        assert service.stats().num_requests == 0
    engine.check_integrity()
    assert engine.stats().num_free_blocks == blocks == engine.stats().num_blocks
    assert engine.tiers.host_used == 0


def client(**options: Any) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(timeout=120, limits=limits, trust_env=False, **options)


@asynccontextmanager
async def stream(http: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Its events; the last one is "[DONE]"."""
    async with http.stream("POST", url, json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _events(response)


async def _events(response: httpx2.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


async def all_events(http: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> list[Any]:
    async with stream(http, url, body) as events:
        got = [event async for event in events]
    assert got.pop() == "[DONE]"
    return got


def run_async(coroutine: Any) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(300):
            return await coroutine

    return asyncio.run(limited())


def save_model(model: Any, directory: Path) -> str:
    """As `save_pretrained` writes the weights, without the rest."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    weights.pop("lm_head.weight", None) if model.config.tie_word_embeddings else None
    save_file(weights, directory / "model.safetensors")
    return str(directory)
