"""What a pool and its engines tell each other. All of it pickles, and none of it needs torch.

    pool --add: the sample's record, its limit, its saved KV--> engine
         <--Reply: what its samples gained, what it counted, what happened--

The pool's samples are the caller's and change only when a reply is applied. An engine works on copies: what it made and
nobody has heard of is as if it had never been.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

from longtail.events import Event
from longtail.partial_rollout.engine import EngineStats
from longtail.partial_rollout.records import copied
from longtail.routing import RoutedExperts
from longtail.sample import FinishReason, KVSource, Sample, Status, Timings
from longtail.version import PolicyVersion

_FIELDS = tuple(f.name for f in dataclasses.fields(Sample) if f.name != "snapshot")


@dataclasses.dataclass(slots=True)
class Saved:
    """Of a sample that has left with its KV: it lies with the engine."""

    key: int
    """By which the engine finds it."""
    num_tokens: int
    nbytes: int


@dataclasses.dataclass(slots=True)
class Gain:
    """What became of a sample since its engine told of it last."""

    sample_id: str
    start: int
    """Output tokens that the pool has."""
    tokens: list[int]
    logprobs: list[float]
    runs: list[tuple[int, PolicyVersion, str, KVSource]]
    """(tokens, version, engine, KV source), one after the other."""
    status: Status
    admitted: bool
    """It has its slot and its KV: a snapshot that it came with is of no more use."""
    turn_ended: bool
    stop_reason: str | int | None
    timings: Timings
    """On the engine's clock."""
    finish_reason: FinishReason | None = None
    failure: str | None = None
    routed: tuple[int, int, int, bytes] | None = None
    """(layers, top_k, first position, rows) of routed experts, where there are new ones."""
    saved: Saved | None = None


_GAIN = operator.attrgetter(*(f.name for f in dataclasses.fields(Gain) if f.name != "timings"))
_AT = [f.name for f in dataclasses.fields(Gain)].index("timings")
_TIMINGS = operator.attrgetter(*(f.name for f in dataclasses.fields(Timings)))


def pack_gains(gains: list[Gain]) -> list[Any]:
    """As tuples, which pickle in a fifth of the time: a step has one for each of its samples."""
    return [(_GAIN(gain), _TIMINGS(gain.timings)) for gain in gains]


def unpack_gains(rows: list[Any]) -> list[Gain]:
    gains = []
    for fields, timings in rows:
        values = [*fields[:_AT], Timings(*timings), *fields[_AT:]]
        gains.append(Gain(*values))
    return gains


@dataclasses.dataclass(slots=True)
class Reply:
    version: PolicyVersion
    stats: EngineStats
    now: float
    """On the engine's clock."""
    gains: list[Gain] = dataclasses.field(default_factory=list)
    at_limit: list[str] = dataclasses.field(default_factory=list)
    num_seqs: int = 0
    events: list[Event] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    """Samples that the engine did not take."""
    misuse: str | None = None
    """The ValueError with which it answers; nothing has changed."""
    failure: str | None = None
    """Any other error: the engine is not to be used further."""
    shares_drafts: bool = False
    """It can draft from what siblings write in other engines."""
    value: Any = None


@dataclasses.dataclass(slots=True)
class About:
    """An engine that joins a pool."""

    name: str
    version: PolicyVersion
    slots: int
    max_model_len: int | None
    has_tiers: bool
    host: str
    process: int
    now: float
    shares_drafts: bool = False
    """See `Reply`."""


def record_of(sample: Sample) -> Sample:
    """A copy that has everything but the snapshot."""
    source = copied(sample)
    record = Sample.__new__(Sample)
    for name in _FIELDS:
        setattr(record, name, getattr(source, name))
    record.snapshot = None
    return record


def apply(gain: Gain, sample: Sample, offset: float) -> None:
    """offset: of the pool's clock over the engine's. AssertionError if the pool has other tokens than the engine
    thinks."""
    assert gain.start == len(sample.output_ids), (sample.id, gain.start, len(sample.output_ids))
    position = 0
    for count, version, engine, kv in gain.runs:
        end = position + count
        sample.extend(gain.tokens[position:end], gain.logprobs[position:end], version, engine, kv)
        position = end
    assert position == len(gain.tokens), sample.id
    sample.status, sample.finish_reason, sample.failure = gain.status, gain.finish_reason, gain.failure
    sample.turn_ended, sample.stop_reason = gain.turn_ended, gain.stop_reason
    timings = shifted(gain.timings, offset)
    sample.timings.running = timings.running
    for name in ("submitted", "first_token", "finished"):  # what is known here keeps its last bit
        if getattr(sample.timings, name) is None:
            setattr(sample.timings, name, getattr(timings, name))
    if gain.routed is not None:
        layers, top_k, first, rows = gain.routed
        if sample.routed_experts is None:
            sample.routed_experts = RoutedExperts(layers, top_k)
        sample.routed_experts.truncate(first)
        sample.routed_experts.extend(rows)
    if gain.admitted or sample.is_done:
        sample.snapshot = None


def shifted(timings: Timings, by: float) -> Timings:
    """On a clock that is so many seconds ahead."""

    def moved(time: float | None) -> float | None:
        return None if time is None else time + by

    return Timings(moved(timings.submitted), moved(timings.first_token), moved(timings.finished), timings.running)
