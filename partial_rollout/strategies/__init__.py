"""Strategies by name. Each is one small file against the protocol in `base`."""

from __future__ import annotations

from longtail.partial_rollout.strategies.base import RolloutState, Strategy
from longtail.partial_rollout.strategies.sync import Sync
from longtail.partial_rollout.strategies.token_budget import TokenBudget

__all__ = ["RolloutState", "Strategy", "Sync", "TokenBudget"]
