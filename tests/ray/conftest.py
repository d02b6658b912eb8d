"""A Ray of this machine for the tests, and tiny models on disk, so that actors need nothing of the tests' modules."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# No actor is killed because another test wants memory. (Ray's name is not in capitals.)
os.environ.update({"RAY_memory_monitor_refresh_ms": "0"})


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """-> its address. This process has joined it: pools with address "local" or "auto" run there."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as directory:  # short: sockets lie in it
        ray.init(
            address="local",
            num_cpus=16,
            object_store_memory=256 << 20,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=directory,
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.partial_rollout.conftest import make_model

    return make_model("llama")


@pytest.fixture(scope="session")
def model_directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory
