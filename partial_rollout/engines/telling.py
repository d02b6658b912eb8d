"""How engines tell of their work."""

from __future__ import annotations

from collections import deque

from longtail.events import Event, Listener

COUNTS = ("steps", "output", "recomputed", "restored", "cached", "preemptions", "drafted", "accepted", "overrun")
"""What a journal counts, as `EngineStats` has it."""


def tell(queue: deque[Event], listener: Listener, failure: BaseException | None = None) -> None:
    """The listener hears of a call's events when its work is done, so that it cannot leave it half done by raising. It
    hears of every event; the first error, `failure` before all others, is raised in the end."""
    while queue:
        try:
            listener(queue.popleft())
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure
