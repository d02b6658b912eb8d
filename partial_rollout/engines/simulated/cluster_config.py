"""What a simulated cluster consists of, and what it loses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from longtail.partial_rollout.engines.simulated.config import SimulatedConfig
from longtail.partial_rollout.engines.simulated.cost import LinearCost, StepSeconds
from longtail.sampling_params import check_known_fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """So many instances that are alike. settings: `SimulatedConfig`."""

    count: int
    cost: StepSeconds = dataclasses.field(default_factory=LinearCost)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"count must be an integer of at least 1, not {self.count!r}")
        check_known_fields(SimulatedConfig, dict(self.settings))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Loss:
    """An instance is lost, with the KV that it computed: its samples go on elsewhere from their tokens, those of the
    pass of the moment among them. Saved KV of paused samples is not in its memory and stays good."""

    time: float
    instance: int
    back: float | None = None
    """When it is there again, empty; None: never."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time) and self.time >= 0):
            raise ValueError(f"time must be a finite number of seconds of at least 0, not {self.time!r}")
        if self.back is not None and not (math.isfinite(self.back) and self.back > self.time):
            raise ValueError(f"back must be after time {self.time}, not {self.back!r}")
