"""Many engines as one: `EnginePool`, over engines of this process or over Ray actors."""

from __future__ import annotations

from longtail.partial_rollout.pool.pool import EnginePool
from longtail.partial_rollout.pool.settings import PoolConfig, RayConfig

__all__ = ["EnginePool", "PoolConfig", "RayConfig"]
