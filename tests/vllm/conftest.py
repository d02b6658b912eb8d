"""These tests run in an environment of their own, with vLLM's CPU build: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engines run in this process
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise pytest.UsageError("tests/vllm needs vLLM, which is not in this environment; run `make test-vllm`")
    # Said once a process, by whichever test comes first; test_correction.py looks at it.
    config.addinivalue_line(
        "filterwarnings", "ignore::longtail.partial_rollout.engines.vllm.correction.VllmCorrected"
    )
