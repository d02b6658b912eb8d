"""What works on samples outside the engine: graders on finished ones, environments on those whose turn has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from longtail.errors import LongtailError
from longtail.partial_rollout.background import Background
from longtail.partial_rollout.environment import Turn, TurnRequest, turn_tokens
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.sample import Sample

Decode = Callable[[Sequence[int]], str]
WAIT_SECONDS = 0.005
"""Between two looks at graders and environments, when both have work and nothing runs."""


class Workers:
    """Knows which samples are with whom. The workers themselves are the caller's."""

    def __init__(
        self,
        grader: Background[GradeRequest, Grade] | None,
        environment: Background[TurnRequest, Turn] | None,
        decode: Decode | None,
    ) -> None:
        self.grader, self.environment, self._decode = grader, environment, decode
        self._ungraded: dict[str, Sample] = {}
        self._parked: dict[str, Sample] = {}
        self._results: deque[Grade | Turn] = deque()
        """What they have brought and nobody has taken yet."""

    def __len__(self) -> int:
        """Samples that somebody works on."""
        return len(self._ungraded) + len(self._parked)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self._ungraded or sample.id in self._parked

    @property
    def is_idle(self) -> bool:
        """Nobody works on anything, and nothing is left to be taken."""
        return not (self._ungraded or self._parked or self._results)

    def samples(self) -> list[Sample]:
        return [*self._ungraded.values(), *self._parked.values()]

    def grade(self, sample: Sample, task: Any) -> None:
        assert self.grader is not None
        self.grader.submit(GradeRequest.of(sample, task, self._text(sample.output_ids)))
        self._ungraded[sample.id] = sample

    def take_turn(self, sample: Sample, task: Any) -> None:
        assert self.environment is not None
        self.environment.submit(TurnRequest.of(sample, task, self._text(turn_tokens(sample))))
        self._parked[sample.id] = sample

    def _text(self, token_ids: Sequence[int]) -> str:
        return "" if self._decode is None else self._decode(token_ids)

    def poll(self) -> None:
        """Fetches what is done. Never blocks."""
        for worker, held in self._both():
            if held:
                self._results.extend(worker.poll())

    def next(self) -> tuple[Sample, Grade | Turn] | None:
        """One of the results that were fetched, with its sample, which nobody works on any more."""
        while self._results:
            result = self._results.popleft()
            held = self._ungraded if isinstance(result, Grade) else self._parked
            sample = held.pop(result.sample_id, None)
            if sample is not None:
                return sample, result
        return None

    def wait(self) -> None:
        """Until there is a result. LongtailError if none can come."""
        while not self._results:
            working: list[Background[Any, Any]] = [w for w, held in self._both() if held and w.num_pending]
            if not working:
                raise LongtailError(
                    f"{self.what}: {len(self)} samples wait for a result, but nothing is pending there; was it closed "
                    "before the rollout? Cancel their groups, or open the store again with one that works"
                )
            if len(working) == 1 or self.next_time() is not None:
                self._results.extend(min(working, key=lambda w: w.next_time() or 0.0).wait())
            else:
                time.sleep(WAIT_SECONDS)
                self.poll()

    def next_time(self) -> float | None:
        """Engine time of the next result, where it is known (virtual clocks)."""
        if not (self._ungraded or self._parked):
            return None
        times = [worker.next_time() for worker, held in self._both() if held]
        return min((t for t in times if t is not None), default=None)

    @property
    def what(self) -> str:
        return "environment" if self._parked else "grade"

    def forget(self, samples: Iterable[Sample]) -> None:
        batch = list(samples)
        for worker, held in self._both():
            ids = [s.id for s in batch if held.pop(s.id, None) is not None]
            if ids:
                worker.cancel(ids)
        gone = {s.id for s in batch}
        if any(result.sample_id in gone for result in self._results):  # it is of what the sample was
            self._results = deque(result for result in self._results if result.sample_id not in gone)

    def _both(self) -> list[tuple[Background[Any, Any], dict[str, Sample]]]:
        both: list[tuple[Background[Any, Any] | None, dict[str, Sample]]]
        both = [(self.grader, self._ungraded), (self.environment, self._parked)]
        return [(worker, held) for worker, held in both if worker is not None]
