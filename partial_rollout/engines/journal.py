"""What an engine that runs a model tells of its work: events to a listener, and running counts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from longtail.events import Event, EventKind, Listener
from longtail.partial_rollout.engines.native.stepper import PassResult
from longtail.partial_rollout.engines.telling import COUNTS, tell
from longtail.sequence import Sequence


class Journal:
    """Owns the queue of events and the counts. engine: its name; now: seconds on its clock."""

    def __init__(self, engine: str, listener: Listener, now: Callable[[], float]) -> None:
        self.engine, self.listener, self.now = engine, listener, now
        self.counts = dict.fromkeys(COUNTS, 0)
        self._queue: deque[Event] = deque()

    def add(self, event: Event) -> None:
        self._queue.append(event)

    def emit(self, kind: EventKind, seq: Sequence, time: float | None = None, **fields: Any) -> None:
        at = self.now() if time is None else time
        sample = seq.sample
        self.add(Event(kind, at, engine=self.engine, sample=sample.id, group=sample.group_id, **fields))

    def step(self, start: float, num_seqs: int, result: PassResult, end: float | None = None) -> None:
        """A pass. end: None: now."""
        self.add(
            Event(
                "step",
                start,
                (self.now() if end is None else end) - start,
                self.engine,
                num_seqs=num_seqs,
                num_tokens=result.num_tokens,
                num_prefill_tokens=result.num_prefill_tokens,
                num_context_tokens=result.num_context_tokens,
                num_output_tokens=result.num_output_tokens,
                num_draft_tokens=result.num_draft_tokens,
                num_accepted_tokens=result.num_accepted_tokens,
                draft_seconds=result.draft_seconds,
                model_seconds=result.model_seconds,
                sample_seconds=result.sample_seconds,
            )
        )
        self.counts["steps"] += 1
        self.counts["output"] += result.num_output_tokens
        self.counts["drafted"] += result.num_draft_tokens
        self.counts["accepted"] += result.num_accepted_tokens

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """A call; what it queues is told when it has returned (`tell`), or by the next one that does."""
        yield
        tell(self._queue, self.listener)
