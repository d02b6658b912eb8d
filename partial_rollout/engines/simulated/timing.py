"""Where an engine stands in time, and what its passes add to that."""

from __future__ import annotations

import bisect
import dataclasses
import math

from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.cost import StepSeconds


@dataclasses.dataclass(slots=True)
class Stretch:
    """Passes alike that follow each other, whatever number of steps made them."""

    start: float = 0.0
    num_seqs: int = 0
    context: int = 0
    """KV tokens that the first of them reads."""
    passes: int = 0
    """Made by the engine before the first."""
    end: float = math.nan
    """Of the last so far."""

    def goes_on(self, num_seqs: int, context: int, passes: int, start: float) -> bool:
        """Whether these are the next passes of it."""
        return (
            num_seqs == self.num_seqs
            and start == self.end
            and context == self.context + num_seqs * (passes - self.passes)
        )


class Timing:
    """An engine's own time, never before the clock's.

    The time of a pass in a stretch is reckoned from the start of the stretch, so that not one bit of it depends on how
    many passes a step makes.
    """

    def __init__(self, clock: VirtualClock, cost: StepSeconds) -> None:
        self.clock, self.cost = clock, cost
        self._at = clock.now()
        self._stretch = Stretch()
        self._reckoned: tuple[tuple[int, int, int], float] = ((0, 0, 0), 0.0)
        """The last run of passes that was reckoned, and its seconds: what is looked ahead at is often made next."""

    def now(self) -> float:
        at, clock = self._at, self.clock.time
        return at if at > clock else clock

    def spend(self, seconds: float) -> None:
        self._at = self.now() + seconds

    def wait_until(self, time: float) -> None:
        self._at = max(self._at, time)

    def end_of(self, num_seqs: int, context_tokens: int, passes: int, count: int) -> float:
        """Where `decode` of so many passes would end."""
        start, stretch = self.now(), self._stretch
        if not stretch.goes_on(num_seqs, context_tokens, passes, start):
            return start + self._run(num_seqs, context_tokens, count)
        return stretch.start + self._run(num_seqs, stretch.context, passes - stretch.passes + count)

    def mixed(self, num_seqs: int, query_tokens: int, context_tokens: int) -> tuple[float, float]:
        """One pass. -> its start and end."""
        start = self.now()
        self._at = self._check(start, start + self.cost.seconds(num_seqs, query_tokens, context_tokens))
        return start, self._at

    def decode(
        self, num_seqs: int, context_tokens: int, passes: int, most: int, until: float | None
    ) -> tuple[int, float, float]:
        """Passes alike, `most` of them or the fewest that get to `until`. passes: made by the engine so far.
        -> their number, start and end."""
        start, stretch = self.now(), self._stretch
        if not stretch.goes_on(num_seqs, context_tokens, passes, start):
            stretch = self._stretch = Stretch(start, num_seqs, context_tokens, passes)
        done = passes - stretch.passes

        def end(count: int) -> float:
            return stretch.start + self._run(num_seqs, stretch.context, done + count)

        count, at = most, end(most)
        if until is not None and at >= until:
            count = bisect.bisect_left(range(1, most), until, key=end) + 1
            at = end(count)
        self._at = stretch.end = self._check(start, at)
        return count, start, at

    def _run(self, num_seqs: int, context_tokens: int, passes: int) -> float:
        run = num_seqs, context_tokens, passes
        if run != self._reckoned[0]:
            self._reckoned = run, self.cost.decode_seconds(num_seqs, context_tokens, passes)
        return self._reckoned[1]

    def _check(self, start: float, end: float) -> float:
        if not start <= end < math.inf:
            raise ValueError(f"cost: {self.cost!r} lets a pass that starts at {start} s end at {end} s")
        return end
