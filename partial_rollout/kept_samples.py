"""Samples that were aborted and may come back: found by their tokens, bounded in number, bytes and age."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from longtail.kv_manager.snapshot import token_digest
from longtail.sample import Sample

if TYPE_CHECKING:
    from longtail.kv_manager.part import Part

Key = tuple[bytes, int | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptConfig:
    """Checked at construction."""

    max_samples: int = 4096
    """Samples that are kept; beyond them the oldest go. 0: none."""
    max_bytes: int | None = 4 << 30
    """Of their saved KV, in whichever tier; beyond them the oldest lose theirs, and resume from their tokens. What
    siblings share counts once. None: as many as the tiers take."""
    max_age: float | None = 3600.0
    """Seconds after which one goes; None: never."""

    def __post_init__(self) -> None:
        for name, value in (("max_samples", self.max_samples), ("max_bytes", self.max_bytes)):
            if value is None and name == "max_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, not {value!r}")
        age = self.max_age
        if age is not None and (isinstance(age, bool) or not isinstance(age, int | float) or not 0 < age < math.inf):
            raise ValueError(f"max_age must be a number of seconds above 0, or None for no limit, not {age!r}")


class KeptSamples:
    """A multiset of paused samples, by (prompt_ids + output_ids, the seed that their requests named). Owned by one
    thread. clock: seconds, monotonic."""

    def __init__(self, config: KeptConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._now = clock
        self._samples: OrderedDict[str, tuple[Sample, Key, float]] = OrderedDict()
        """Sample, key and time of arrival by id, the oldest first."""
        self._by_key: dict[Key, list[str]] = {}
        """Never an empty list; the oldest first."""
        self._parts: Counter[Part] = Counter()
        """How many of the samples refer to each."""
        self.nbytes = 0
        """Of the saved KV."""
        self.num_evicted = 0
        """Samples that went for their number or age,"""
        self.num_evicted_kv = 0
        """and those that lost their KV for its bytes."""

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._samples

    def put(self, sample: Sample) -> None:
        """Takes one that is in no engine."""
        key = (token_digest([*sample.prompt_ids, *sample.output_ids]), sample.params.seed)
        self._samples[sample.id] = (sample, key, self._now())
        self._by_key.setdefault(key, []).append(sample.id)
        self._count(sample, 1)
        while len(self._samples) > self.config.max_samples:
            self._evict()
        self._fit_bytes()

    def find(self, token_ids: Sequence[int], seed: int | None) -> Sample | None:
        """The oldest one of exactly these tokens, and of this seed."""
        ids = self._by_key.get((token_digest(token_ids), seed))
        return None if ids is None else self._samples[ids[0]][0]

    def take(self, sample: Sample) -> None:
        """It is kept no longer."""
        sample, key, _ = self._samples.pop(sample.id)
        self._by_key[key].remove(sample.id)
        if not self._by_key[key]:
            del self._by_key[key]
        self._count(sample, -1)

    def expire(self) -> None:
        """Lets those go that are too old."""
        while self._samples and self.seconds_left() == 0.0:
            self._evict()

    def seconds_left(self) -> float | None:
        """Until the next one is too old; None: never."""
        if self.config.max_age is None or not self._samples:
            return None
        arrived = next(iter(self._samples.values()))[2]
        return max(arrived + self.config.max_age - self._now(), 0.0)

    def clear(self) -> None:
        for sample, _, _ in list(self._samples.values()):
            self.take(sample)

    def check_integrity(self) -> None:
        """AssertionError unless keys, parts and bytes add up and the bounds hold."""
        assert sorted(i for ids in self._by_key.values() for i in ids) == sorted(self._samples)
        parts: Counter[Part] = Counter()
        for sample, key, _ in self._samples.values():
            assert key == (token_digest([*sample.prompt_ids, *sample.output_ids]), sample.params.seed), sample.id
            assert sample.status in ("waiting", "paused"), (sample.id, sample.status)
            parts.update(_parts(sample))
        assert parts == self._parts and self.nbytes == sum(part.nbytes for part in parts)
        assert len(self._samples) <= self.config.max_samples
        assert self.config.max_bytes is None or self.nbytes <= self.config.max_bytes

    def _evict(self) -> None:
        sample = next(iter(self._samples.values()))[0]
        self.take(sample)
        self.num_evicted += 1

    def _fit_bytes(self) -> None:
        if self.config.max_bytes is None or self.nbytes <= self.config.max_bytes:
            return
        for sample, _, _ in self._samples.values():
            if sample.snapshot is not None:
                self._count(sample, -1)
                sample.snapshot = None
                self.num_evicted_kv += 1
                if self.nbytes <= self.config.max_bytes:
                    return

    def _count(self, sample: Sample, change: int) -> None:
        for part in _parts(sample):
            before = self._parts[part]
            self._parts[part] += change
            if before == 0:
                self.nbytes += part.nbytes
            elif self._parts[part] == 0:
                self.nbytes -= part.nbytes
                del self._parts[part]


def _parts(sample: Sample) -> set[Part]:
    return set() if sample.snapshot is None else set(sample.snapshot.parts)
