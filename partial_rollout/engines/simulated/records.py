"""How tokens get into samples: written into their lists, or counted.

`Lists` makes the tokens and writes them. `Columns` is for millions of samples: their records hold no tokens but rules
to compute them from, and cost the same whatever the length.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

from longtail.partial_rollout.engines.simulated import script
from longtail.partial_rollout.engines.simulated.sequence import SimulatedSequence
from longtail.sample import Segment
from longtail.version import PolicyVersion

T = TypeVar("T")


class Records(Protocol):
    """What stands in the samples at the end of a step is right whichever it is."""

    def begin(self, seq: SimulatedSequence, start: int, version: PolicyVersion) -> None:
        """From output position `start` on its tokens are of this version; it has made the first of them."""
        ...

    def end(self, seq: SimulatedSequence, length: int) -> None:
        """Its output has this length, and does not grow for now."""
        ...

    def catch_up(self) -> None:
        """Somebody may look at the running samples now."""
        ...


class Lists:
    """The records that every other engine makes."""

    def __init__(self, engine: str, vocab_size: int) -> None:
        self.engine, self.vocab_size = engine, vocab_size
        self._versions: dict[SimulatedSequence, PolicyVersion] = {}

    def begin(self, seq: SimulatedSequence, start: int, version: PolicyVersion) -> None:
        self._versions[seq] = version

    def end(self, seq: SimulatedSequence, length: int) -> None:
        version = self._versions.pop(seq, None)
        if version is not None:
            self._write(seq, length, version)

    def catch_up(self) -> None:
        for seq, version in self._versions.items():
            self._write(seq, seq.num_output_tokens, version)

    def _write(self, seq: SimulatedSequence, length: int, version: PolicyVersion) -> None:
        sample, start = seq.sample, len(seq.sample.output_ids)
        if start < length:
            tokens, logprobs = script.both(sample.seed, start, length, self.vocab_size)
            sample.extend(tokens, logprobs, version, self.engine, seq.kv)


class Columns:
    """output_ids, logprobs and versions of each sample are `Column`s, which compute what they are asked for."""

    def __init__(self, engine: str, vocab_size: int) -> None:
        self.engine, self.vocab_size = engine, vocab_size

    def begin(self, seq: SimulatedSequence, start: int, version: PolicyVersion) -> None:
        sample: Any = seq.sample  # its lists become columns, which have what is needed of a list
        segments = sample.segments
        if not isinstance(sample.output_ids, Column):
            sample.output_ids = TokenIds(sample.seed, sample.output_ids, self.vocab_size)
            sample.logprobs = Logprobs(sample.seed, sample.logprobs)
            sample.versions = Versions(segments, len(sample.versions))
        if segments:
            last = segments[-1]
            if last.version == version and last.engine == self.engine and last.kv == seq.kv:
                start = segments.pop().start
        segments.append(OpenSegment(start, version, self.engine, seq.kv, seq))
        sample.output_ids.grows_with = sample.logprobs.grows_with = sample.versions.grows_with = seq

    def end(self, seq: SimulatedSequence, length: int) -> None:
        sample: Any = seq.sample
        segments = sample.segments
        if segments and isinstance(segments[-1], OpenSegment):
            last = segments.pop()
            if last.start < length:
                segments.append(Segment(last.start, length, last.version, last.engine, last.kv))
            for column in (sample.output_ids, sample.logprobs, sample.versions):
                column.grows_with, column.size = None, length

    def catch_up(self) -> None:
        pass


class OpenSegment(Segment):
    """The segment that a running sequence is making."""

    __slots__ = ("_seq",)

    def __init__(self, start: int, version: PolicyVersion, engine: str, kv: Any, seq: SimulatedSequence) -> None:
        self.start, self.version, self.engine, self.kv = start, version, engine, kv
        self._seq = seq

    @property
    def end(self) -> int:  # type: ignore[override]
        return self._seq.num_output_tokens


class Column(Sequence[T], Generic[T]):
    """As much of a list as a sample's records need: read, extend, and cut at the end. Equal to a list of the same."""

    __slots__ = ("_given", "grows_with", "size")
    __hash__ = None  # type: ignore[assignment]

    size: int
    grows_with: SimulatedSequence | None
    """The running sequence whose output length is its own."""
    _given: list[tuple[int, list[T]]] | None
    """Stretches that somebody else wrote, with the positions at which they start."""

    def _computed(self, start: int, end: int) -> list[T]:
        """Of positions that nobody else wrote."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.size if self.grows_with is None else self.grows_with.num_output_tokens

    @overload
    def __getitem__(self, key: int) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> list[T]: ...
    def __getitem__(self, key: int | slice) -> T | list[T]:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            if step > 0:
                return self._values(start, max(start, end))[::step]
            return self._values(0, len(self))[key]
        position = key + len(self) if key < 0 else key
        if not 0 <= position < len(self):
            raise IndexError(f"position {key} of {len(self)}")
        return self._values(position, position + 1)[0]

    def __iter__(self) -> Iterator[T]:
        return iter(self._values(0, len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def __add__(self, other: Sequence[T]) -> list[T]:
        return [*self, *other]

    def frozen(self) -> Column[T]:
        """As it stands, for good."""
        twin = copy.copy(self)
        twin.size, twin.grows_with = len(self), None
        return twin

    def append(self, value: T) -> None:
        self.extend([value])

    def extend(self, values: Sequence[T]) -> None:
        assert self.grows_with is None, "a running sample's output grows in the engine"
        if values:
            self._given = [*(self._given or ()), (self.size, list(values))]
            self.size += len(values)

    def __iadd__(self, values: Sequence[T]) -> Column[T]:
        self.extend(values)
        return self

    def __delitem__(self, key: slice) -> None:
        start, end, step = key.indices(len(self))
        assert self.grows_with is None and (end, step) == (self.size, 1), "only the end can be dropped"
        kept = [(at, values[: start - at]) for at, values in self._given or () if at < start]
        self.size, self._given = start, kept or None

    def _values(self, start: int, end: int) -> list[T]:
        result: list[T] = []
        for at, values in self._given or ():
            if start < at < end:
                result += self._computed(start, at)
                start = at
            if at <= start < at + len(values):
                result += values[start - at : end - at]
                start = min(at + len(values), end)
        return result + self._computed(start, end) if start < end else result


class TokenIds(Column[int]):
    __slots__ = ("_seed", "_vocab_size")

    def __init__(self, seed: int, known: Sequence[int], vocab_size: int) -> None:
        self.size, self.grows_with, self._given = 0, None, None
        self._seed, self._vocab_size = seed, vocab_size
        if known:
            self.extend(known)

    def _computed(self, start: int, end: int) -> list[int]:
        return script.token_ids(self._seed, start, end, self._vocab_size)


class Logprobs(Column[float]):
    __slots__ = ("_seed",)

    def __init__(self, seed: int, known: Sequence[float]) -> None:
        self.size, self.grows_with, self._given = 0, None, None
        self._seed = seed
        if known:
            self.extend(known)

    def _computed(self, start: int, end: int) -> list[float]:
        return script.logprobs(self._seed, start, end)


class Versions(Column[PolicyVersion]):
    """Read off the sample's segments."""

    __slots__ = ("_segments",)

    def __init__(self, segments: list[Segment], size: int) -> None:
        self.size, self.grows_with, self._given = size, None, None
        self._segments = segments

    def extend(self, values: Sequence[PolicyVersion]) -> None:
        self.size += len(values)

    def _computed(self, start: int, end: int) -> list[PolicyVersion]:
        result: list[PolicyVersion] = []
        for segment in self._segments:
            first, last = max(segment.start, start), min(segment.end, end)
            result += [segment.version] * (last - first)
        return result
