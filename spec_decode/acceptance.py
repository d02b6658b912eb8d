"""How often drafts are accepted: measured per drafter, position, and estimate of the drafter.

A token of a draft is *judged* once all before it on its path are accepted and the target has a token in its place: it
is accepted or it is the one rejected. Those behind a rejected one are never judged.

Under match verification a draft token is accepted exactly where it equals the token that the target samples, and that
token does not depend on the draft. So a draft can be judged without verifying it: compare it with what the target goes
on to commit. Drafts that were only made to be judged (`shadows`) cost the time to make them and nothing else.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import warnings
from collections.abc import Sequence

import numpy as np

from longtail.spec_decode.drafter import Draft

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 0.999)
"""Between the classes of a drafter's estimates; finer where a difference matters more. One more class: no estimate."""
NO_ESTIMATE = len(EDGES) + 1
POSITIONS = (0, 1, 2, 2, 3)
"""Class of a position in the draft; those behind belong to the last class."""


class AcceptanceFell(UserWarning):
    """After a weight update a drafter's first tokens are accepted clearly less often than before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceConfig:
    memory: float = 400.0
    """Judged tokens of a class that count: older ones fade."""
    prior_weight: float = 12.0
    """Judged tokens that the coarser estimate is worth: a class is believed once it has more."""
    prior: float = 0.5
    """What a drafter that gives no estimates is taken to claim."""
    trust: float = 0.5
    """Share of what a drafter claims that is believed until it was judged: judging is cheap, believing is not."""
    fall: float = 0.2
    """Relative fall of the first tokens' acceptance after a weight update that is reported,"""
    fall_z: float = 4.0
    """if it is as many standard deviations from chance (4: a false alarm in 30,000 updates were tokens independent),"""
    fall_judged: int = 200
    """judged on at least as many first tokens before and after."""

    def __post_init__(self) -> None:
        for name in ("memory", "prior_weight", "fall_judged"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("prior", "trust", "fall"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")


class _Measured:
    """What is known of one drafter."""

    def __init__(self) -> None:
        self.judged = [[0.0] * (NO_ESTIMATE + 1) for _ in range(max(POSITIONS) + 1)]
        """By class of the position and of the estimate; older ones fade."""
        self.accepted = [[0.0] * (NO_ESTIMATE + 1) for _ in range(max(POSITIONS) + 1)]
        self.claimed = self.hits = 0.0
        """Tokens accepted if the drafter's own estimates were right, and those that were; older ones fade."""
        self.totals: list[list[int]] = []
        """[judged, accepted] of each position, of the whole run."""
        self.before = [0.0, 0.0]
        """[judged, accepted] first tokens until the last weight update, faded,"""
        self.since = [0.0, 0.0]
        """and since."""


class Acceptance:
    """Measured acceptance of any number of drafters."""

    def __init__(self, config: AcceptanceConfig | None = None) -> None:
        self.config = config or AcceptanceConfig()
        self._drafters: dict[str, _Measured] = {}
        self._version: int | None = None
        self._excess = [0.0, 0.0]  # tokens accepted over those expected, and the variance; older ones fade

    def judge(self, draft: Draft, accepted: int, rejected: bool) -> None:
        """Of a path the first `accepted` tokens were accepted and, if `rejected`, the one after them was not. (If not,
        the sample ended or the draft did: what is behind was not judged.)"""
        judged = accepted + rejected
        if judged > len(draft.tokens) or accepted < 0:
            raise ValueError(f"accepted {accepted}, rejected {rejected}: the draft has {len(draft.tokens)} tokens")
        if not judged:
            return
        measured = self._drafters.get(draft.drafter)
        if measured is None:
            measured = self._drafters[draft.drafter] = _Measured()
        keep = 1.0 - 1.0 / self.config.memory
        for i in range(judged):
            hit = i < accepted
            claim = self.config.prior if draft.probs is None else draft.probs[i]
            measured.claimed = measured.claimed * keep + claim
            measured.hits = measured.hits * keep + hit
            place = POSITIONS[min(i, len(POSITIONS) - 1)]
            c = NO_ESTIMATE if draft.probs is None else bisect.bisect_left(EDGES, draft.probs[i])
            expected = (measured.accepted[place][c] + 0.5) / (measured.judged[place][c] + 1.0)
            self._excess[0] += hit - expected
            self._excess[1] += expected * (1.0 - expected)
            measured.judged[place][c] = measured.judged[place][c] * keep + 1.0
            measured.accepted[place][c] = measured.accepted[place][c] * keep + hit
            if i == len(measured.totals):
                measured.totals.append([0, 0])
            measured.totals[i][0] += 1
            measured.totals[i][1] += hit
        measured.since[0] += 1.0
        measured.since[1] += accepted > 0
        if self._version is not None and measured.since[0] == self.config.fall_judged:
            self._compare(draft.drafter, measured, self._version)

    def estimate(self, drafts: Sequence[Draft]) -> list[np.ndarray]:
        """For each draft (a path), for each token: the probability that it is accepted if those before it are. From
        the class of position and estimate; where little is known of it, from the estimate's class at any position;
        where little is known of that, the drafter's own estimate, times what its estimates have come to."""
        out: list[np.ndarray] = [_NONE] * len(drafts)
        by_name: dict[str, list[int]] = {}
        for i, draft in enumerate(drafts):
            if draft.tokens:
                by_name.setdefault(draft.drafter, []).append(i)
        weight, trust = self.config.prior_weight, self.config.trust
        for name, indices in by_name.items():
            chosen = [drafts[i] for i in indices]
            places, classes, own = self._classes(chosen)
            measured = self._drafters.get(name)
            if measured is None:
                own *= trust
            else:
                own *= (measured.hits + weight * trust) / (measured.claimed + weight)
                np.minimum(own, 1.0, out=own)
                judged, accepted = np.array(measured.judged), np.array(measured.accepted)
                own = (accepted.sum(0)[classes] + weight * own) / (judged.sum(0)[classes] + weight)
                own = (accepted[places, classes] + weight * own) / (judged[places, classes] + weight)
            start = 0
            for i, draft in zip(indices, chosen, strict=True):
                out[i] = own[start : start + len(draft)]
                start += len(draft)
        return out

    def _classes(self, drafts: Sequence[Draft]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(class of the position, class of the estimate, estimate) of every token, one draft after the other."""
        places: list[int] = []
        own: list[float] = []
        for draft in drafts:
            count = len(draft)
            places += POSITIONS[:count] + POSITIONS[-1:] * (count - len(POSITIONS))
            own += [np.nan] * count if draft.probs is None else draft.probs
        estimates = np.array(own)
        classes = np.searchsorted(EDGES, estimates)
        silent = np.isnan(estimates)
        classes[silent], estimates[silent] = NO_ESTIMATE, self.config.prior
        return np.array(places), classes, estimates

    def has_risen(self) -> bool:
        """Whether lately clearly more was accepted than before (by two standard deviations). Asked once a step that
        something was judged in; says so once."""
        excess, variance = self._excess
        risen = excess > 2.0 * math.sqrt(variance)
        self._excess = [0.0, 0.0] if risen else [0.8 * excess, 0.8 * variance]
        return risen

    def first_token(self, drafter: str) -> float | None:
        """Recent acceptance of a draft's first token; None if none was judged."""
        measured = self._drafters.get(drafter)
        judged = 0.0 if measured is None else sum(measured.judged[0])
        return sum(measured.accepted[0]) / judged if measured is not None and judged else None

    def by_position(self) -> dict[str, list[tuple[int, int]]]:
        """For each drafter and position: (judged, accepted) over the whole run, shadows counted."""
        return {name: [(j, a) for j, a in measured.totals] for name, measured in self._drafters.items()}

    def weights_updated(self, version: int) -> None:
        """The target has other weights: from here on acceptance is compared with what it was."""
        self._version = version
        keep = 1.0 - 1.0 / self.config.memory
        for measured in self._drafters.values():
            fade = keep ** measured.since[0]
            measured.before = [b * fade + s for b, s in zip(measured.before, measured.since, strict=True)]
            measured.since = [0.0, 0.0]

    def _compare(self, name: str, measured: _Measured, version: int) -> None:
        (n_before, k_before), (n, k) = measured.before, measured.since
        if n_before < self.config.fall_judged:
            return
        before, after, pooled = k_before / n_before, k / n, (k_before + k) / (n_before + n)
        deviation = math.sqrt(pooled * (1.0 - pooled) * (1.0 / n_before + 1.0 / n))
        if before - after > self.config.fall_z * deviation and after < (1.0 - self.config.fall) * before:
            warnings.warn(
                AcceptanceFell(
                    f"drafter {name}: {after:.0%} of first draft tokens are accepted since the weights of version "
                    f"{version}, {before:.0%} before; train the drafter on newer rollouts, or drop it"
                ),
                stacklevel=3,
            )


_NONE = np.empty(0)
