"""What a strategy decides: what to admit, in which order, when to stop waiting, what to hand over.

    begin -> [ order -> admit -> step -> at_limit? -> stop_waiting? ]* -> hand_over        one iteration (`collect`)

A strategy sees a `RolloutState` and changes nothing in it. It sees samples and groups, never an engine, so that the
same code runs on real and on simulated ones. A strategy of your own is a subclass that overrides what differs from
"wait for everything"; docs/strategies.md has one to copy.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

from longtail.partial_rollout.groups import GroupState
from longtail.partial_rollout.length_estimates import LengthEstimates
from longtail.partial_rollout.queue import SampleQueue
from longtail.sample import Sample

Order = tuple[Any, ...]
"""Sort key: smaller is admitted first. Of one length and one type at each place, within a strategy."""


class Admit(NamedTuple):
    """Who gets the free slot."""

    sample: Sample
    limit: int | None = None
    """Output tokens after which `at_limit` is asked; None: never."""


@dataclasses.dataclass(slots=True)
class RolloutState:
    """What a strategy sees. It lives as long as the rollout; what is said of an iteration starts anew with each."""

    lengths: LengthEstimates
    queue: SampleQueue
    """Samples that want a slot."""
    iteration: int = 0
    version: int = 0
    """Of the engine's weights."""
    groups: dict[str, GroupState] = dataclasses.field(default_factory=dict)
    """Those that are not handed over, in order of submission."""
    ready: dict[str, GroupState] = dataclasses.field(default_factory=dict)
    """Of these, the complete ones (graded, where there is a grader), in order of completion."""
    running: dict[str, Sample] = dataclasses.field(default_factory=dict)
    """In the engine."""
    num_started: int = 0
    """Groups that are not handed over and of which at least one sample was ever admitted."""
    started_with: dict[str, int] = dataclasses.field(default_factory=dict)
    """Output tokens that each sample admitted in this iteration (or running when it began) brought, by id."""
    num_output_tokens: int = 0
    """Generated in this iteration so far."""
    num_admissions: int = 0
    """In this iteration."""

    def group(self, sample: Sample) -> GroupState:
        return self.groups[sample.group_id]

    def new_tokens(self, sample: Sample) -> int:
        """Output tokens that a sample has gained in this iteration."""
        return len(sample.output_ids) - self.started_with.get(sample.id, len(sample.output_ids))

    def is_outranked(self, sample: Sample) -> bool:
        """Whether a sample that waits comes before this one, which runs."""
        first, own = self.queue.first_order(), self.queue.order_of(sample)
        return first is not None and own is not None and first < own

    def oldest_ready(self, limit: int | None = None) -> list[GroupState]:
        """The complete groups in order of submission, at most `limit`."""
        return sorted(self.ready.values(), key=lambda g: g.number)[:limit]


class Strategy:
    """Waits for everything. groups: the iteration works on so many groups (None: on all that there are)."""

    name: ClassVar[str]
    keeps_running: ClassVar[bool] = False
    """Samples stay in the engine between iterations, and weights change under them."""
    fresh_stand: ClassVar[bool] = True
    """The order of a sample of a group that nobody has begun does not change until the group is begun, so that it is
    not asked for again when an iteration begins. A class with an `order` of its own has to say so of itself."""

    def __init_subclass__(cls) -> None:
        if "order" in vars(cls) and "fresh_stand" not in vars(cls):
            cls.fresh_stand = False

    def __init__(self, *, groups: int | None = None) -> None:
        self.groups = None if groups is None else positive("groups", groups)

    def begin(self, state: RolloutState) -> None:
        """An iteration starts. Afterwards `order` is asked for every waiting sample."""

    def needed(self, group: GroupState, state: RolloutState) -> int:
        """How many finished samples make a group complete; what is left of it then is surplus."""
        return len(group.samples)

    def restarts(self, group: GroupState, state: RolloutState) -> bool:
        """Asked when an iteration begins: whether what the group has made is thrown away (aborted, on the ledger), and
        made again."""
        return False

    def order(self, sample: Sample, state: RolloutState) -> Order | None:
        """Key of a waiting sample: smaller is admitted first, of equals the one submitted first. None: not in this
        iteration. Asked when an iteration has begun (but see `fresh_stand`), and in it when the sample starts to wait,
        when a sibling has finished, and after `admit` has refused it."""
        return oldest_unfinished_first(sample, state)

    def admit(self, sample: Sample, state: RolloutState) -> Admit | None:
        """sample: the first in order. None: it is asked for its order again, and leaves the slot to whoever comes
        before it then; if that is nobody, the slot stays empty until something has happened."""
        return Admit(sample) if self.may_begin(state.group(sample), state) else None

    def may_begin(self, group: GroupState, state: RolloutState) -> bool:
        """Whether it is begun already, or among the first `groups`."""
        return self.groups is None or group.started or state.num_started < self.groups

    def at_limit(self, sample: Sample, state: RolloutState) -> int | None:
        """A running sample has made as many tokens as `Admit.limit` allowed: how many more, or None: pause it."""
        return None

    def horizon(self, state: RolloutState) -> int | None:
        """Output tokens, of all samples, after which `stop_waiting` may answer otherwise with nothing else having
        happened; None: however many. For engines that look ahead."""
        return None

    def stop_waiting(self, state: RolloutState) -> bool:
        """Whether to end the iteration; asked after every step. What runs is paused, or stays (`keeps_running`)."""
        return False

    def hand_over(self, state: RolloutState) -> list[GroupState]:
        """Which of the complete groups leave now."""
        return state.oldest_ready()


class BatchStrategy(Strategy):
    """Ends an iteration as soon as `groups` groups are complete, and hands over so many, the oldest.

    most_begun: groups that are begun and not handed over; None: however many."""

    def __init__(self, groups: int, most_begun: int | None = None) -> None:
        super().__init__(groups=positive("groups", groups))
        self.wanted, self.most_begun = groups, most_begun

    def may_begin(self, group: GroupState, state: RolloutState) -> bool:
        return self.most_begun is None or group.started or state.num_started < self.most_begun

    def stop_waiting(self, state: RolloutState) -> bool:
        return len(state.ready) >= self.wanted

    def hand_over(self, state: RolloutState) -> list[GroupState]:
        return state.oldest_ready(self.wanted)


def oldest_unfinished_first(sample: Sample, state: RolloutState) -> Order:
    """Work that was begun before new work (samples, then groups), and all by age: nothing starves."""
    group = state.groups[sample.group_id]
    return (not sample.output_ids, not group.started, group.number, sample.index)


def positive(name: str, value: Any, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an integer of at least {low}, not {value!r}")
    return value


def at_least(name: str, value: Any, low: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
        raise ValueError(f"{name} must be a number of at least {low:g}, not {value!r}")
    return float(value)
