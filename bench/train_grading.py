"""Graders whose speed changes nothing: what a training run does with them depends on the rewards alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from longtail.events import Event, Listener, ignore
from longtail.partial_rollout.background import Background
from longtail.partial_rollout.grading import Grade, GradeRequest


class SettledGrader:
    """A grader in front of another. settled: `poll` waits for everything that is pending, so that the rollout has every
    reward one engine step after its sample's end, whatever the grader's speed: which groups are complete when an
    iteration ends is then no matter of time. Not settled: `poll` takes what is there, for strategies that wait for all
    grades anyway.

    listener, now: waiting is emitted as "wait" events on this clock. A `Background[GradeRequest, Grade]`."""

    def __init__(
        self,
        grader: Background[GradeRequest, Grade],
        *,
        settled: bool,
        now: Callable[[], float],
        listener: Listener = ignore,
    ) -> None:
        self.grader, self.settled, self.now, self.listener = grader, settled, now, listener
        self._early: list[Grade] = []
        """Of the rollout's samples, that came while others were waited for."""

    @property
    def num_pending(self) -> int:
        return self.grader.num_pending + len(self._early)

    def submit(self, request: GradeRequest) -> None:
        self.grader.submit(request)

    def poll(self) -> list[Grade]:
        grades, self._early = self._early, []
        grades += self.grader.poll()
        if self.settled and self.grader.num_pending:
            start = self.now()
            while self.grader.num_pending:
                grades += self.grader.wait()
            self.listener(Event("wait", start, self.now() - start, detail="grade"))
        return sorted(grades, key=lambda grade: grade.sample_id) if self.settled else grades

    def wait(self) -> list[Grade]:
        if self._early or self.settled:
            return self.poll()
        return self.grader.wait()

    def next_time(self) -> float | None:
        return self.grader.next_time()

    def cancel(self, sample_ids: Iterable[str]) -> None:
        ids = set(sample_ids)
        self._early = [grade for grade in self._early if grade.sample_id not in ids]
        self.grader.cancel(ids)

    def close(self) -> None:
        self.grader.close()

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """These, now, in their order; none of the rollout's."""
        for request in requests:
            self.grader.submit(request)
        wanted = {request.sample_id for request in requests}
        found: dict[str, Grade] = {}
        while len(found) < len(wanted):
            for grade in self.grader.wait():
                if grade.sample_id in wanted:
                    found[grade.sample_id] = grade
                else:
                    self._early.append(grade)
        return [found[request.sample_id] for request in requests]
