"""Services for plugins whose framework starts them by name: an engine, and the `RolloutService` in front of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtail.kv_manager.tier_config import TierConfig
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.partial_rollout.service import KeptConfig, RolloutService
from longtail.sampling_params import check_known_fields


def native_service(
    model: str,
    *,
    seed: int,
    name: str = "served",
    kept: Mapping[str, Any] | None = None,
    tiers: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RolloutService:
    """On a `NativeEngine` of its own, which holds version 0 of the weights in `model` (a directory or a hub id).

    kept, tiers: fields of `KeptConfig` and `TierConfig`. settings: what else `NativeEngine` takes. ValueError for
    unknown ones."""
    kept, tiers = dict(kept or {}), dict(tiers or {})
    check_known_fields(KeptConfig, kept)
    check_known_fields(TierConfig, tiers)
    engine = NativeEngine(model, name=name, tiers=TierConfig(**tiers), **settings)
    return RolloutService(engine, seed=seed, kept=KeptConfig(**kept), name=name)
