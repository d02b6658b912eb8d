"""How much each instance of a cluster has to do, and which of them has least."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


class Loads:
    """slots: of each instance. Samples beyond them count as load, and take no slot.

    The heap has an entry that counts for each instance that is alive, of its share of slots taken when it was last
    looked at. One that has risen since is put right when it comes up; those that have fallen are entered anew before
    the next look: samples that leave one after the other cost one entry together."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        self.of = [0] * len(slots)
        """Samples of each instance."""
        self.alive = [True] * len(slots)
        self.free = sum(slots)
        """Slots that nobody has, of all that are alive."""
        self._heap: list[tuple[float, int]] = [(0.0, number) for number in range(len(slots))]
        self._entered: list[float] = [0.0] * len(slots)
        """The share in the entry that counts; below 0: none does."""
        self._fallen: set[int] = set()

    def open_slots(self, number: int) -> int:
        free = self.slots[number] - self.of[number]
        return free if free > 0 and self.alive[number] else 0

    def came(self, number: int) -> None:
        """A sample, to one that is alive."""
        if self.of[number] < self.slots[number]:
            self.free -= 1
        self.of[number] += 1

    def left(self, number: int) -> None:
        """A sample, one that is alive."""
        self.of[number] -= 1
        if self.of[number] < self.slots[number]:
            self.free += 1
        self._fallen.add(number)

    def lose(self, number: int) -> None:
        """It is gone, with all that it had."""
        self.free -= self.open_slots(number)
        self.alive[number], self.of[number], self._entered[number] = False, 0, -1.0
        self._fallen.discard(number)

    def restore(self, number: int) -> None:
        """It is back, empty."""
        self.alive[number] = True
        self.free += self.slots[number]
        self._fallen.add(number)

    def least(self, fits: Callable[[int], bool]) -> int | None:
        """The least loaded that has a free slot and fits, of equals the first; where none does, the least loaded of
        all; None: all are lost."""
        heap, entered = self._heap, self._entered
        if self._fallen:
            self._enter_fallen()
        first = None
        passed: list[tuple[float, int]] = []
        while heap:
            share, number = heap[0]
            if share != entered[number]:
                heapq.heappop(heap)
                continue
            now = self.of[number] / self.slots[number]
            if now != share:
                entered[number] = now
                heapq.heapreplace(heap, (now, number))
                continue
            if first is None:
                first = number
            if share >= 1.0:
                break
            if fits(number):
                first = number
                break
            passed.append(heapq.heappop(heap))
        for entry in passed:
            heapq.heappush(heap, entry)
        return first

    def _enter_fallen(self) -> None:
        for number in self._fallen:
            share = self.of[number] / self.slots[number]
            if share != self._entered[number]:
                self._entered[number] = share
                heapq.heappush(self._heap, (share, number))
        self._fallen.clear()
        if len(self._heap) > 4 * len(self.slots) + 64:
            self._heap = [(share, number) for number, share in enumerate(self._entered) if share >= 0.0]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """AssertionError if the free slots do not add up, or an instance could be overlooked."""
        assert self.free == sum(map(self.open_slots, range(len(self.of))))
        entries = set(self._heap)
        for number, share in enumerate(self._entered):
            assert self.alive[number] or share < 0.0, number
            if share >= 0.0:
                assert (share, number) in entries, number
            if self.alive[number] and number not in self._fallen:
                assert 0.0 <= share <= self.of[number] / self.slots[number], number
