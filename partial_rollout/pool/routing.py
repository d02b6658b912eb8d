"""Where a sample goes: rules by name, the same for pools of real engines and for the simulated cluster.

A rule sees a `Fleet`, engines by number, and changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from longtail.sample import Sample

SPREAD = 32
"""Seer's (arXiv 2511.14617): the load comes before the cache when an engine has so many more samples than another."""


class Fleet(Protocol):
    """The engines of a pool or a cluster."""

    @property
    def spread(self) -> int: ...

    def least_loaded(self, sample: Sample) -> int:
        """The engine with the smallest share of its slots taken, with room for the sample's KV where that is known."""
        ...

    def home(self, sample: Sample) -> int | None:
        """The engine that has KV of it (saved, or its siblings' prompt), if it is there."""
        ...

    def bound(self, sample: Sample) -> int | None:
        """The engine that its group was dealt to, if it is there."""
        ...

    def load(self, number: int) -> int:
        """Samples in an engine."""
        ...

    def open_slots(self, number: int) -> int:
        """Of an engine; 0 of one that is lost or released."""
        ...


class MeasuredFleet(Fleet, Protocol):
    """One that also knows what its engines have before them."""

    def least_work(self, sample: Sample) -> int:
        """The engine with a free slot, if there is one, that has the fewest output tokens before it."""
        ...


def by_load(sample: Sample, fleet: Fleet) -> int:
    """Load first."""
    return fleet.least_loaded(sample)


def by_affinity(sample: Sample, fleet: Fleet) -> int:
    """To where its KV is, or its siblings' prompt, if that engine has a free slot and no more than `spread` samples
    more than the least loaded one; else there."""
    least, home = fleet.least_loaded(sample), fleet.home(sample)
    if home is None or not fleet.open_slots(home):
        return least
    return home if fleet.load(home) - fleet.load(least) <= fleet.spread else least


def by_length(sample: Sample, fleet: MeasuredFleet) -> int:
    """Length-balanced: to the engine that has the fewest tokens to make. What a sample has to make is estimated as in
    Seer, by its longest sibling that has finished, without one by the cap."""
    return fleet.least_work(sample)


def by_group(sample: Sample, fleet: Fleet) -> int:
    """Each group is dealt to an engine, in turn, and waits for it even if others are free."""
    bound = fleet.bound(sample)
    return by_affinity(sample, fleet) if bound is None else bound


Routing = Callable[[Sample, Any], int]
ROUTINGS: dict[str, Routing] = {"load": by_load, "affinity": by_affinity, "length": by_length, "group": by_group}


def keep_packed(loads: list[int], most: int) -> list[int]:
    """Tail repacking: the engines to keep, as places in `loads` (samples of each), so that each gets at most `most`
    samples and the fewest samples move. All of them if that frees none."""
    needed = max(1, -(-sum(loads) // most))
    busiest = sorted(range(len(loads)), key=lambda i: (-loads[i], i))
    return sorted(busiest[:needed]) if needed < len(loads) else list(range(len(loads)))


def expected_tokens(sample: Sample, longest_sibling: int | None, context: int | None) -> int:
    """Output tokens that it is expected to make yet, at least 1. longest_sibling: output tokens of the longest one that
    has finished; context: most tokens of prompt and output."""
    cap: Any = sample.params.max_tokens
    if cap is None:
        cap = 1024 if context is None else context - len(sample.prompt_ids)
    have = len(sample.output_ids)
    if longest_sibling is not None and longest_sibling > have:
        cap = min(cap, longest_sibling)
    return max(cap - have, 1)
