"""vLLM behind the engine protocol. Importing it without a vLLM that it supports says how to install one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtail.partial_rollout.engines.vllm import versions

versions.check(versions.installed())

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm.config import VllmSettings
    from longtail.partial_rollout.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "VllmSettings"]

# Loaded on first use: vLLM's own processes import the corrections alone, and are not to wait for the rest.
_LAZY = {"VllmEngine": "engine", "VllmSettings": "config"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
