"""Compiles kernels for GPUs that are not here, in a process of their own: `pytest tests/triton_compile`.

A test marked `launches(of=f)` gets, as its argument `launches`, what `f` compiles to for the test's parameters.
All that the selected tests of a file launch is compiled when the first of them asks, so that the code is disassembled
together.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from longtail.bench.offline_compile import TARGETS, Compiled, compile_all

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    raise pytest.UsageError("TRITON_INTERPRET is set: run `pytest tests/triton_compile` in its own process")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "launches(of): a function that runs ops, of the parameters but for `target`")


@pytest.fixture(autouse=True, scope="session")
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels are compiled here and now, not found in the user's cache."""
    path = tmp_path_factory.mktemp("triton")
    os.environ["TRITON_CACHE_DIR"] = str(path)
    return path


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, fresh_cache: Path) -> dict[str, list[Compiled] | Exception]:
    """By test."""
    jobs = {}
    for item in request.session.items:
        if item.path == request.path and (marker := item.get_closest_marker("launches")):
            assert isinstance(item, pytest.Function)
            parameters = dict(item.callspec.params)
            target = TARGETS[str(parameters.pop("target"))]
            jobs[item.nodeid] = (functools.partial(marker.kwargs["of"], **parameters), target)
    return dict(zip(jobs, compile_all(jobs.values()), strict=True))


@pytest.fixture
def launches(request: pytest.FixtureRequest, outcomes: dict[str, list[Compiled] | Exception]) -> list[Compiled]:
    outcome = outcomes[request.node.nodeid]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
