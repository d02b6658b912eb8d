"""Samples that want a slot, in the order that a strategy gives them: O(log n) for what changes, O(1) to look."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from longtail.sample import Sample


class SampleQueue:
    """order: the key of a sample, or None while it may not be admitted. age: smaller is older; both break ties and
    give `oldest`. Entries of the heaps that are out of date are skipped when they come up, and cleared away before
    they are more than those that count."""

    def __init__(self, order: Callable[[Sample], tuple[Any, ...] | None], age: Callable[[Sample], tuple[int, int]]):
        self._order, self._age = order, age
        self._samples: dict[str, Sample] = {}
        self._stamps: dict[str, int] = {}
        """Of the entry that counts, of samples that may be admitted."""
        self._ordered: list[tuple[tuple[Any, ...], tuple[int, int], int, str]] = []
        self._aged: list[tuple[tuple[int, int], int, str]] = []
        self._counter = itertools.count()

    def __len__(self) -> int:
        """With those that may not be admitted."""
        return len(self._samples)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self._samples

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())

    @property
    def num_eligible(self) -> int:
        return len(self._stamps)

    def add(self, sample: Sample) -> None:
        assert sample.id not in self._samples, f"{sample.id} waits already"
        self._samples[sample.id] = sample
        self._enter(sample)

    def remove(self, sample: Sample) -> None:
        del self._samples[sample.id]
        self._stamps.pop(sample.id, None)

    def discard(self, sample: Sample) -> None:
        if sample.id in self._samples:
            self.remove(sample)

    def reorder(self, sample: Sample) -> None:
        """Asks for its order again, if it waits."""
        if sample.id in self._samples:
            self._stamps.pop(sample.id, None)
            self._enter(sample)

    def reorder_all(self) -> None:
        self._stamps.clear()
        self._ordered.clear()
        self._aged.clear()
        for sample in self._samples.values():
            self._enter(sample)

    def first(self) -> Sample | None:
        """The first in order of those that may be admitted."""
        while self._ordered and self._stamps.get(self._ordered[0][3]) != self._ordered[0][2]:
            heapq.heappop(self._ordered)
        return self._samples[self._ordered[0][3]] if self._ordered else None

    def first_order(self) -> tuple[Any, ...] | None:
        return None if self.first() is None else self._ordered[0][0]

    def order_of(self, sample: Sample) -> tuple[Any, ...] | None:
        """Whether it waits or not."""
        return self._order(sample)

    def oldest(self) -> Sample | None:
        """The one submitted first, of those that may be admitted."""
        while self._aged and self._stamps.get(self._aged[0][2]) != self._aged[0][1]:
            heapq.heappop(self._aged)
        return self._samples[self._aged[0][2]] if self._aged else None

    def _enter(self, sample: Sample) -> None:
        order = self._order(sample)
        if order is None:
            return
        if len(self._ordered) > 2 * len(self._samples) + 64 or len(self._aged) > 2 * len(self._samples) + 64:
            self._ordered = [entry for entry in self._ordered if self._stamps.get(entry[3]) == entry[2]]
            self._aged = [entry for entry in self._aged if self._stamps.get(entry[2]) == entry[1]]
            heapq.heapify(self._ordered)
            heapq.heapify(self._aged)
        stamp, age = next(self._counter), self._age(sample)
        self._stamps[sample.id] = stamp
        heapq.heappush(self._ordered, (order, age, stamp, sample.id))
        heapq.heappush(self._aged, (age, stamp, sample.id))
