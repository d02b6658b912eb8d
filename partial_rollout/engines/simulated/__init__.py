"""An engine on a virtual clock, with scripted lengths and a cost model in place of a model."""

from __future__ import annotations

from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.cluster import SimulatedCluster
from longtail.partial_rollout.engines.simulated.cluster_config import Instances, Loss
from longtail.partial_rollout.engines.simulated.config import SimulatedConfig
from longtail.partial_rollout.engines.simulated.cost import LinearCost, StepSeconds, TableCost
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.faults import Faults
from longtail.partial_rollout.engines.simulated.script import Length, log_normal, scripted, to_max_tokens

__all__ = [
    "Faults",
    "Instances",
    "Length",
    "LinearCost",
    "Loss",
    "SimulatedCluster",
    "SimulatedConfig",
    "SimulatedEngine",
    "StepSeconds",
    "TableCost",
    "VirtualClock",
    "log_normal",
    "scripted",
    "to_max_tokens",
]
