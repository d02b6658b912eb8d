"""Samples that want a slot, in the order that a strategy gives them: O(log n) for what changes, O(1) to look, and
nothing for what stands."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from longtail.sample import Sample

Order = tuple[Any, ...]
Age = tuple[int, int]


class SampleQueue:
    """order: the key of a sample, or None while it may not be admitted. age: smaller is older, of no two the same, and
    never another; it breaks ties and gives `oldest`. stands: whether the key of a sample that may be admitted stays
    what it is until `stir` names it: it is not asked for again.

    Entries of the heaps that are out of date are skipped when they come up, and cleared away before they are more than
    those that count."""

    def __init__(
        self,
        order: Callable[[Sample], Order | None],
        age: Callable[[Sample], Age],
        stands: Callable[[Sample], bool] = lambda sample: False,
    ) -> None:
        self._order, self._age, self._stands = order, age, stands
        self._samples: dict[str, Sample] = {}
        self._entered: dict[str, tuple[Order, Age, str]] = {}
        """The entry that counts, of samples that may be admitted."""
        self._unsettled: dict[str, Sample] = {}
        """Of those that wait, all but those whose keys stand."""
        self._ordered: list[tuple[Order, Age, str]] = []
        self._aged: list[tuple[Age, str]] | None = None
        """None: nobody has asked for the oldest yet."""

    def __len__(self) -> int:
        """With those that may not be admitted."""
        return len(self._samples)

    def __contains__(self, sample: Sample) -> bool:
        return sample.id in self._samples

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples.values())

    @property
    def num_eligible(self) -> int:
        return len(self._entered)

    def add(self, sample: Sample) -> None:
        assert sample.id not in self._samples, f"{sample.id} waits already"
        self._samples[sample.id] = sample
        self._enter(sample)

    def remove(self, sample: Sample) -> None:
        name = sample.id
        del self._samples[name]
        self._entered.pop(name, None)
        self._unsettled.pop(name, None)

    def discard(self, sample: Sample) -> None:
        if sample.id in self._samples:
            self.remove(sample)

    def reorder(self, samples: Iterable[Sample]) -> None:
        """Asks for the order of those that wait again, but for those whose keys stand."""
        unsettled = self._unsettled
        for sample in samples:
            if sample.id in unsettled:
                self._enter(sample)

    def stir(self, samples: Iterable[Sample]) -> None:
        """The keys of those that wait stand no longer: the next time that all, or they, are to be ordered, they are
        asked about."""
        for sample in samples:
            if sample.id in self._samples:
                self._unsettled[sample.id] = sample

    def reorder_all(self, *, strictly: bool = False) -> None:
        """strictly: also those whose keys stand."""
        for sample in list(self._samples.values() if strictly else self._unsettled.values()):
            self._enter(sample)

    def first(self) -> Sample | None:
        """The first in order of those that may be admitted."""
        ordered, entered = self._ordered, self._entered
        while ordered and entered.get(ordered[0][2]) is not ordered[0]:
            heapq.heappop(ordered)
        return self._samples[ordered[0][2]] if ordered else None

    def first_order(self) -> Order | None:
        return None if self.first() is None else self._ordered[0][0]

    def order_of(self, sample: Sample) -> Order | None:
        """Whether it waits or not."""
        return self._order(sample)

    def oldest(self) -> Sample | None:
        """The one submitted first, of those that may be admitted."""
        if self._aged is None:
            self._aged = self._ages()
        while self._aged and self._aged[0][1] not in self._entered:
            heapq.heappop(self._aged)
        return self._samples[self._aged[0][1]] if self._aged else None

    def _ages(self) -> list[tuple[Age, str]]:
        return sorted((age, name) for _, age, name in self._entered.values())

    def _enter(self, sample: Sample) -> None:
        name, order = sample.id, self._order(sample)
        if order is None:
            self._unsettled[name] = sample
            self._entered.pop(name, None)
            return
        if self._stands(sample):
            self._unsettled.pop(name, None)
        else:
            self._unsettled[name] = sample
        known = self._entered.get(name)
        if known is not None and known[0] == order:
            return
        entry = self._entered[name] = order, self._age(sample) if known is None else known[1], name
        most = 2 * len(self._samples) + 64
        if len(self._ordered) > most:
            self._ordered = list(self._entered.values())
            heapq.heapify(self._ordered)
        else:
            heapq.heappush(self._ordered, entry)
        if self._aged is not None and known is None:
            if len(self._aged) > most:
                self._aged = self._ages()
            else:
                heapq.heappush(self._aged, (entry[1], name))
