"""vLLM behind the engine protocol. Importing it without a vLLM that it supports says how to install one."""

from __future__ import annotations

from longtail.partial_rollout.engines.vllm import versions

versions.check(versions.installed())

from longtail.partial_rollout.engines.vllm.config import VllmSettings  # noqa: E402 - after the check
from longtail.partial_rollout.engines.vllm.engine import VllmEngine  # noqa: E402

__all__ = ["VllmEngine", "VllmSettings"]
