"""Settings of a pool of engines, and of the Ray cluster that it runs on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from longtail.partial_rollout.pool.routing import ROUTINGS, SPREAD


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Checked at construction."""

    routing: str = "affinity"
    """Where a sample goes (`pool/routing.py`): "load", "affinity", "length" or "group"."""
    spread: int = SPREAD
    """affinity: so many samples more than the least loaded engine may the one have that holds a sample's KV."""
    repack: int | None = None
    """Tail repacking: when nobody waits for a slot, the samples left are gathered on as few engines as take no more
    than so many each; the others are released. None: never."""
    deadline: float | None = 600.0
    """Seconds that a call of an engine (a step, an update) may take before it counts as hung, and is lost. The first
    steps compile. Engines of this process are called in this thread and cannot be given up: for them it means nothing.
    None: however many."""
    most_behind: int = 1
    """Weight updates that an engine may not have confirmed while the pool goes on; 0: `update_weights` waits for
    all. No engine steps with weights older than the last update in any case."""
    share_drafts: int | None = 8
    """Steps of an engine after which it is told what siblings of its samples have written in other engines, for drafts
    from a group index; with the step, and at once where a sample has come. None: each drafts from what it has seen
    itself."""
    restarts: int = 0
    """Lost engines that are replaced by new ones (of a pool that makes its engines itself)."""
    keep_weights: bool = False
    """Keeps a copy of the last weights, for engines of this process that join later; with restarts in any case. (For
    actors Ray's object store has them.)"""

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, not {self.routing!r}")
        for name, least in (("spread", 0), ("repack", 1), ("most_behind", 0), ("share_drafts", 1), ("restarts", 0)):
            value = getattr(self, name)
            if name in ("repack", "share_drafts") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        if self.deadline is not None and not (0 < self.deadline < math.inf):
            raise ValueError(f"deadline must be a number of seconds above 0, or None, not {self.deadline!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Where the actors run, and what each of them is given. Checked at construction."""

    address: str = "local"
    """local: a Ray cluster of this machine, started for the pool and ended with it; auto: the one that runs here; or
    the address of one."""
    num_cpus: float = 1.0
    """Of an actor."""
    num_gpus: float = 0.0
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Custom resources of an actor, by name (of a kind of node, say)."""
    placement: str = "SPREAD"
    """SPREAD: actors on as many nodes as there are; PACK (Ray's DEFAULT): on few."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the actors."""
    ready_seconds: float = 300.0
    """That actors may take to be there with their engines."""
    fetch_seconds: float = 30.0
    """That saved KV may take to come from another engine (at most half of the pool's deadline); it is computed again if
    it takes longer. Further KV from an engine that has kept one waiting must be there at once, until some is."""

    def __post_init__(self) -> None:
        if not self.address or not isinstance(self.address, str):
            raise ValueError(f'address must be "local", "auto" or HOST:PORT, not {self.address!r}')
        if self.placement not in ("SPREAD", "PACK"):
            raise ValueError(f"placement must be SPREAD or PACK, not {self.placement!r}")
        for name in ("num_cpus", "num_gpus"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {getattr(self, name)!r}")
        for name in ("ready_seconds", "fetch_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")

    def options(self) -> dict[str, Any]:
        """Of `ray.remote(...)`."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
            "scheduling_strategy": "SPREAD" if self.placement == "SPREAD" else "DEFAULT",
        }
        return options | ({"runtime_env": {"env_vars": dict(self.env)}} if self.env else {})
