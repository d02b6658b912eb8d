"""Settings of the tiers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

Eviction = Literal["lru", "longest-remaining"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Checked at construction."""

    host_bytes: int | None = None
    """Host memory for saved KV; None: no limit."""
    host_idle_bytes: int = 4 << 30
    """Of this memory, what may stay allocated for the next save when nothing is saved in it."""
    disk: str | Path | None = None
    """Directory for what host memory has no room for, and for what is to outlive the process; None: no disk tier."""
    disk_bytes: int | None = None
    """None: all that `disk_spare_bytes` allows."""
    disk_spare_bytes: int = 64 << 20
    """Saved KV leaves so much of the disk free: a store's tokens, come first. 0: until it is full."""
    eviction: Eviction = "lru"
    """What leaves host memory first: the least recently used, or the sample that may still grow longest."""

    def __post_init__(self) -> None:
        for name in ("host_bytes", "host_idle_bytes", "disk_bytes", "disk_spare_bytes"):
            value = getattr(self, name)
            if value is None and name in ("host_bytes", "disk_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of bytes, not {value!r}")
        if self.eviction not in ("lru", "longest-remaining"):
            raise ValueError(f'eviction must be "lru" or "longest-remaining", not {self.eviction!r}')
