"""Samples and engines for hand-computed schedules: a pass takes a second unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from longtail.events import Event
from longtail.partial_rollout.engines.simulated import Length, SimulatedEngine, scripted
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams


def sample(name: str, prompt: int = 3, *, group: str | None = None, multi_turn: bool = False, **params: Any) -> Sample:
    """A group of its own, with a prompt of so many tokens."""
    return Sample(
        id=name,
        group_id=name if group is None else group,
        index=0,
        prompt_ids=tuple(range(1, prompt + 1)),
        params=SamplingParams(**params),
        seed=sum(ord(letter) << 8 * i for i, letter in enumerate(name)),
        multi_turn=multi_turn,
    )


def simulated(lengths: dict[str, int | Length], **settings: Any) -> tuple[SimulatedEngine, list[Event]]:
    events: list[Event] = []
    return SimulatedEngine(lengths=scripted(lengths), listener=events.append, **settings), events


def times(events: list[Event], *kinds: str) -> list[tuple[str, float, str]]:
    return [(e.kind, e.time, e.sample) for e in events if e.kind in kinds]


def drain(engine: SimulatedEngine) -> list[tuple[float, list[str]]]:
    """Steps until nothing is left. -> when each step came back, and what had finished."""
    seen = []
    while engine.has_work:
        out = engine.step()
        engine.check_integrity()
        seen.append((engine.now(), [s.id for s in out.finished]))
    return seen
