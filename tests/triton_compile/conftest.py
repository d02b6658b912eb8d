"""Compiles kernels for GPUs that are not here, in a process of their own: `pytest tests/triton_compile`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    raise pytest.UsageError("TRITON_INTERPRET is set: run `pytest tests/triton_compile` in its own process")


@pytest.fixture(autouse=True, scope="session")
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels are compiled here and now, not found in the user's cache."""
    path = tmp_path_factory.mktemp("triton")
    os.environ["TRITON_CACHE_DIR"] = str(path)
    return path
