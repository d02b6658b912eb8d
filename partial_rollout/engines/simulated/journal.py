"""What the simulated engine tells of its work: events to a listener, and running counts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from longtail.events import Event, EventKind, Listener, ignore
from longtail.partial_rollout.engines.telling import COUNTS, tell
from longtail.sample import Sample

Span = tuple[float, float]
"""Start and end."""


class Journal:
    """Owns the queue of events and the counts. engine: its name; now: seconds on its clock. Where nobody listens no
    events are made."""

    def __init__(self, engine: str, listener: Listener, now: Callable[[], float]) -> None:
        self.engine, self.listener, self.now = engine, listener, now
        self.counts = dict.fromkeys(COUNTS, 0)
        self._queue: deque[Event] = deque()

    def add(self, kind: EventKind, start: float, end: float, **fields: Any) -> None:
        if self.listener is not ignore:
            self._queue.append(Event(kind, start, end - start, self.engine, **fields))

    def emit(self, kind: EventKind, sample: Sample, start: float | None = None, **fields: Any) -> None:
        """Something that ends now."""
        if self.listener is not ignore:
            now = self.now()
            begin = now if start is None else start
            self.add(kind, begin, now, sample=sample.id, group=sample.group_id, **fields)

    def passed(
        self,
        span: Span,
        passes: int,
        num_seqs: int,
        rows: int,
        prefill: int,
        context: int,
        made: int,
    ) -> None:
        """Passes alike. span: start and end; rows, of these prefill, context (KV tokens read) and made (output tokens)
        are of all of them."""
        self.counts["steps"] += passes
        self.counts["output"] += made
        if self.listener is ignore:
            return
        self.add(
            "step",
            *span,
            num_passes=passes,
            num_seqs=num_seqs,
            num_tokens=rows,
            num_prefill_tokens=prefill,
            num_context_tokens=context,
            num_output_tokens=made,
            model_seconds=span[1] - span[0],
        )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """A call; what it queues is told when it is done with (`tell`), also where it raises."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        tell(self._queue, self.listener, failure)
