"""How old a token may be when it is trained on: a hard bound, and what happens to what exceeds it.

The staleness of a token is the version of the weights that are to be trained, less that of the weights that made it.
Versions never fall along a sample, so what is too old is a prefix of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, Protocol

from longtail.partial_rollout.groups import GroupState, oldest_version
from longtail.partial_rollout.ledger import CutLine, Line
from longtail.sample import Sample

Exceeding = Literal["wait", "regenerate", "mask", "drop"]
Scope = Literal["token", "sample", "group"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRule:
    """No token older than `max_staleness` versions reaches the loss. Checked at construction.

    exceeding: what is done about it.
    - "wait": nothing gets so old. An iteration does not end while a group is unfinished whose oldest token is
      `max_staleness` versions old: the next update would make it too old. Nothing is wasted, no prompt takes more than
      max_staleness + 1 iterations from its first token on. (Where versions jump, what is too old all the same is
      regenerated.)
    - "regenerate": what is too old is cut off and made again by the new weights; what came after it stood on it and
      goes too. A group that this has happened to once is waited for, so that it ends.
    - "mask": what is too old stays in the sample as context, left out of the loss (`Sample.masked`); Kimi k1.5 does so
      with earlier segments.
    - "drop": it is thrown away.

    scope: what is too old as soon as one of its tokens is: the token, its sample, or its group. A token cannot be
    dropped, so there the scope is at least the sample.
    """

    max_staleness: int
    exceeding: Exceeding = "wait"
    scope: Scope = "token"

    def __post_init__(self) -> None:
        n = self.max_staleness
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"max_staleness must be an integer of at least 0, not {n!r}")
        if self.exceeding not in ("wait", "regenerate", "mask", "drop"):
            raise ValueError(f'exceeding must be "wait", "regenerate", "mask" or "drop", not {self.exceeding!r}')
        if self.scope not in ("token", "sample", "group"):
            raise ValueError(f'scope must be "token", "sample" or "group", not {self.scope!r}')

    def is_due(self, group: GroupState, version: int) -> bool:
        """Whether the update after `version` makes something of it too old."""
        if self.exceeding == "regenerate" and group.restarted_stale:
            return True
        oldest = group.oldest_version() if self.exceeding == "wait" else None
        return oldest is not None and version - oldest >= self.max_staleness

    @property
    def is_due_at_once(self) -> bool:
        """Whether a group is waited for from its first token on."""
        return self.exceeding == "wait" and self.max_staleness == 0

    def exceeded(self, group: GroupState, version: int) -> list[tuple[Sample, int]]:
        """Samples of which something is too old under `version`, each with the output position up to which it is, by
        the scope."""
        first = version - self.max_staleness  # the oldest version that may be trained on
        old = [s for s in group.samples if (oldest := oldest_version(s)) is not None and oldest < first]
        if old and self.scope == "group":
            return [(s, len(s.output_ids)) for s in group.samples if s.output_ids]
        if self.scope == "sample":
            return [(s, len(s.output_ids)) for s in old]
        return [(s, too_old(s, first)) for s in old]


class Keeper(Protocol):
    """What can be done to groups; `Generation` does it."""

    def mask(self, sample: Sample, end: int) -> None: ...
    def restart(self, group: GroupState, samples: list[Sample], line: CutLine) -> None: ...
    def drop(self, group: GroupState, line: Line) -> None: ...
    def remove(self, group: GroupState, samples: list[Sample], line: CutLine) -> None: ...
    def refill(self) -> None: ...


def enforce(rule: StalenessRule, groups: Iterable[GroupState], version: int, keeper: Keeper) -> None:
    """Deals with what is too old under `version`. Again is harmless."""
    for group in groups:
        old = rule.exceeded(group, version)
        samples = [sample for sample, _ in old]
        if not old:
            continue
        if rule.exceeding == "mask":
            for sample, end in old:
                keeper.mask(sample, end)
        elif rule.exceeding != "drop":  # from the start: before what is too old there is nothing but the prompt
            group.restarted_stale = True
            keeper.restart(group, samples, "stale")
        elif rule.scope == "group" or len(samples) == len(group.samples):
            keeper.drop(group, "stale")
            keeper.refill()
        else:
            keeper.remove(group, samples, "stale")


def hand_over(rule: StalenessRule, chosen: list[GroupState], ready: list[GroupState], version: int) -> list[GroupState]:
    """What leaves: those that will not wait for another iteration take the place of the youngest that can."""
    due = [group for group in ready if rule.is_due(group, version)]
    late = [group for group in due if group not in chosen]
    spare = sorted((g for g in chosen if g not in due), key=lambda g: g.number)[-len(late) :] if late else []
    return [group for group in chosen if group not in spare] + late


def too_old(sample: Sample, first: int) -> int:
    """One past the last output position whose token a version before `first` made."""
    return max((seg.end for seg in sample.segments if 0 <= seg.version < first), default=0)
