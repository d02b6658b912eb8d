"""Time that passes only when somebody says so, shared by engines and by what works beside them.

An engine's step takes it ahead on a lane of its own. The clock is where the engine stands that is furthest behind of
those with work: nothing can happen before that. Whoever drives several engines steps that one (`now()` of each tells),
and the engines run side by side.

    engine a  |--step--|--step--|                 a.now() = 2.0
    engine b  |------step------|---step---|       b.now() = 2.6
    clock                       ^ 2.0             the next to step is a
"""

from __future__ import annotations

import math
from typing import Protocol


class Lane(Protocol):
    """Somebody who runs ahead of the clock."""

    @property
    def has_work(self) -> bool: ...

    def now(self) -> float:
        """How far it has come; never before the clock."""
        ...


class VirtualClock:
    """Seconds since `start`. It never goes back."""

    def __init__(self, start: float = 0.0) -> None:
        if not math.isfinite(start):
            raise ValueError(f"start must be a finite number of seconds, not {start!r}")
        self.time = float(start)
        """What `now` says; to be read only."""
        self._lanes: list[Lane] = []

    def now(self) -> float:
        return self.time

    def advance_to(self, time: float) -> None:
        """It is this time now, if it is not later already: whoever waits for something that is due then says so."""
        if not math.isfinite(time):
            raise ValueError(f"time must be a finite number of seconds, not {time!r}")
        if time > self.time:
            self.time = time

    def join(self, lane: Lane) -> None:
        self._lanes.append(lane)

    def ran(self, lane: Lane) -> None:
        """This one has come further. The clock follows the last of those that have work."""
        others = [other.now() for other in self._lanes if other is not lane and other.has_work]
        self.advance_to(min([lane.now(), *others]))
