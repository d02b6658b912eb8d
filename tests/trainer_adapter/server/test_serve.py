"""`serve`: how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model

from longtail import NativeEngine
from longtail.partial_rollout.service import RolloutService
from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.serve import serve

CONFIG = ServerConfig(port=0, grace_seconds=1.0)


@pytest.fixture(scope="module")
def service() -> Iterator[RolloutService]:
    engine = NativeEngine(make_model("llama"), kv_cache_bytes=2 << 20, max_num_seqs=4, block_size=16)
    with RolloutService(engine) as service:
        yield service


@pytest.fixture(autouse=True)
def by_default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_returns_from_sigterm(service: RolloutService) -> None:
    serve(service, CONFIG, started=terminate)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_caller_hears_of_it(service: RolloutService) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    serve(service, CONFIG, started=terminate)
    assert heard == [signal.SIGTERM]


def test_sigint_interrupts(service: RolloutService) -> None:
    with pytest.raises(KeyboardInterrupt):
        serve(service, CONFIG, started=lambda url: os.kill(os.getpid(), signal.SIGINT))


def test_what_started_raises_ends_it(service: RolloutService) -> None:
    def broken(url: str) -> None:
        raise RuntimeError(f"no service registry for {url}")

    with pytest.raises(RuntimeError, match="no service registry for http"):
        serve(service, CONFIG, started=broken)
