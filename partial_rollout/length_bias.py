"""Lengths trained against lengths generated: do early cut-offs train on short answers only?

bias = LengthBias()
figures = bias.observe(iteration, trained=samples handed over, unfinished=samples of the groups that stay)

That an iteration hands over short responses is no bias by itself: partial rollouts train the long ones later. So two
things are kept apart.

- The shift: the mean length handed over in an iteration against the mean length of what the policy generates. The
  latter is estimated from every response that got a token within the window, the unfinished ones as longer than what
  they have (`survival`): `ratio`, below 1 at the start of a run, about 1 later.
- The bias: responses that are *lost*, because they were dropped, or stay while `window` iterations hand over others,
  and are longer than those that were trained on: `kept_ratio`, and the warning.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from longtail.partial_rollout.survival import Exposure, Survival, chance_of_low, kaplan_meier, rank_scores
from longtail.sample import Sample


class LengthBiasWarning(UserWarning):
    """The responses that are trained on are clearly shorter than those that the policy generates."""


@dataclasses.dataclass(frozen=True, slots=True)
class IterationBias:
    """Lengths in output tokens; None where nothing was seen."""

    iteration: int
    num_trained: int
    num_unfinished: int
    """That have a token and stay: unfinished, or waiting for the rest of their group."""
    num_dropped: int
    trained_mean: float | None
    expected_mean: float | None
    """Restricted mean of what was generated in the window (`Survival.mean`)."""
    ratio: float | None
    """trained_mean / expected_mean."""
    trained_median: int | None
    expected_median: int | None
    trained_p90: int | None
    expected_p90: int | None
    """None too where fewer than nine in ten are known to end within the longest length seen."""
    num_lost: int
    """Dropped in the window, or here for longer than the window."""
    num_cut: int
    """Of these, those that had not ended."""
    kept_ratio: float | None
    """Mean length of what the window trained on, over that of the same with the lost ones: 1 if nothing is lost."""
    chance: float
    """At most this likely were the lost ones drawn by lot (`chance_of_low`); 1 if nothing is lost."""
    biased: bool


class _Open(NamedTuple):
    group: str
    since: int
    """The iteration in which it was first seen with a token."""
    tokens: int
    ended: bool


class _Decided(NamedTuple):
    iteration: int
    group: str
    tokens: int
    ended: bool
    lost: bool


class LengthBias:
    """Follows every sample from its first token until it is handed over or dropped.

    window: iterations that count together; also how long a sample may stay before it counts as lost for the time
    being. Choose more than the longest response needs to be handed over.
    tolerance: a warning needs a `kept_ratio` of at most 1 - tolerance: less matters to nobody.
    alarm: the false-alarm rate of a whole run, however long: the probability of any warning when the lost samples
    are no longer than others. The k-th test is made at alarm / (k (k + 1)), which sums up to it. It holds for any
    number of samples (`chance_of_low`), also where responses of one prompt resemble each other or share their fate.
    max_samples: memory: of the samples that were trained on or lost in the window, the latest.

    `LengthBiasWarning` once per onset: again only after kept_ratio was back above 1 - tolerance / 2.
    """

    def __init__(
        self, *, window: int = 16, tolerance: float = 0.05, alarm: float = 1e-3, max_samples: int = 65_536
    ) -> None:
        for name, value in (("window", window), ("max_samples", max_samples)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        for name, share in (("tolerance", tolerance), ("alarm", alarm)):
            if not 0.0 < share < 1.0:
                raise ValueError(f"{name} must be between 0 and 1, not {share!r}")
        self.window = window
        self.tolerance = tolerance
        self.alarm = alarm
        self.max_samples = max_samples
        self.biased = False
        self.onsets: list[int] = []
        """Iterations that warned."""
        self._last: IterationBias | None = None
        self._open: dict[str, _Open] = {}
        self._decided: deque[_Decided] = deque()
        self._recent: deque[tuple[int, Exposure]] = deque()
        self._tests = 0
        self._iterations = 0
        self._dropped = 0
        self._generated = Exposure()
        self._trained = Exposure()
        self._trained_tokens = 0
        self._num_trained = 0

    def observe(
        self,
        iteration: int,
        trained: Iterable[Sample],
        unfinished: Iterable[Sample],
        dropped: Iterable[Sample] = (),
    ) -> IterationBias:
        """Once an iteration, at its end.

        trained: samples of the groups that are handed over; the failed and aborted among them count as dropped.
        unfinished: samples of the groups that stay, finished or not; those without a token are passed over.
        dropped: what left otherwise. Only samples that came and went within the iteration need be named: one that was
        here before, and is in no list, was dropped at the length it had. (One that is shorter than before was cut, and
        counts as a new response.)

        ValueError if iterations do not rise, or a sample is named twice.
        """
        if self._last is not None and iteration <= self._last.iteration:
            raise ValueError(f"iteration must rise: {iteration} comes after {self._last.iteration}")
        before, now = self._open, dict[str, _Open]()
        entries, lengths, ended, handed = list[int](), list[int](), list[bool](), list[int]()
        decided = list[_Decided]()
        seen = set[str]()
        for samples, fate in ((trained, "trained"), (unfinished, "open"), (dropped, "lost")):
            for sample in samples:
                if sample.id in seen:
                    raise ValueError(f"sample {sample.id} is named twice; each is trained, unfinished or dropped")
                seen.add(sample.id)
                tokens = len(sample.output_ids)
                end = sample.status == "finished" and sample.finish_reason not in ("aborted", "error")
                known = before.get(sample.id)
                if known is not None and tokens < known.tokens:
                    known = None
                if tokens and not (known is not None and known.ended):
                    entries.append(known.tokens if known is not None else 0)
                    lengths.append(tokens)
                    ended.append(end)
                if fate == "open":
                    if tokens:
                        since = iteration if known is None else known.since
                        now[sample.id] = _Open(sample.group_id, since, tokens, end)
                elif fate == "trained" and end:
                    handed.append(tokens)
                    decided.append(_Decided(iteration, sample.group_id, tokens, True, False))
                elif tokens:
                    decided.append(_Decided(iteration, sample.group_id, tokens, end, True))
        decided += [
            _Decided(iteration, known.group, known.tokens, known.ended, True)
            for name, known in before.items()
            if name not in seen
        ]
        exposure = Exposure()
        exposure.add(lengths, ended, entries)
        self._open = now
        self._remember(iteration, exposure, decided)
        return self._judge(iteration, handed, sum(d.lost for d in decided))

    def report(self) -> dict[str, Any]:
        """JSON-able figures of the whole run, and of the window at its end (num_lost to chance)."""
        trained, generated = self._trained.survival(), self._generated.survival()
        mean, expected = _ratio(self._trained_tokens, self._num_trained), generated.mean()
        last = self._last
        return {
            "iterations": self._iterations,
            "num_trained": self._num_trained,
            "num_unfinished": len(self._open),
            "num_dropped": self._dropped,
            "trained_mean": mean,
            "expected_mean": expected,
            "ratio": _ratio(mean, expected),
            "trained_median": trained.quantile(0.5),
            "expected_median": generated.quantile(0.5),
            "trained_p90": trained.quantile(0.9),
            "expected_p90": generated.quantile(0.9),
            "num_lost": 0 if last is None else last.num_lost,
            "num_cut": 0 if last is None else last.num_cut,
            "kept_ratio": None if last is None else last.kept_ratio,
            "chance": 1.0 if last is None else last.chance,
            "biased": self.biased,
            "onsets": list(self.onsets),
        }

    def _remember(self, iteration: int, exposure: Exposure, decided: list[_Decided]) -> None:
        self._iterations += 1
        self._dropped += sum(d.lost for d in decided)
        self._generated += exposure
        self._recent.append((iteration, exposure))
        while self._recent[0][0] <= iteration - self.window:
            self._recent.popleft()
        self._decided.extend(decided)
        while self._decided and (
            self._decided[0].iteration <= iteration - self.window or len(self._decided) > self.max_samples
        ):
            self._decided.popleft()

    def _judge(self, iteration: int, handed: list[int], num_dropped: int) -> IterationBias:
        trained = Exposure()
        trained.add(handed, [True] * len(handed))
        self._trained += trained
        self._trained_tokens += sum(handed)
        self._num_trained += len(handed)
        generated = Exposure()
        for _, exposure in self._recent:
            generated += exposure
        actual, expected = trained.survival(), generated.survival()
        num_lost, num_cut, kept_ratio, chance = self._lost(iteration)
        onset = self._is_onset(num_lost, kept_ratio, chance)
        mean = _ratio(sum(handed), len(handed))
        self._last = IterationBias(
            iteration=iteration,
            num_trained=len(handed),
            num_unfinished=len(self._open),
            num_dropped=num_dropped,
            trained_mean=mean,
            expected_mean=expected.mean(),
            ratio=_ratio(mean, expected.mean()),
            **_quantiles("trained", actual),
            **_quantiles("expected", expected),
            num_lost=num_lost,
            num_cut=num_cut,
            kept_ratio=kept_ratio,
            chance=chance,
            biased=self.biased,
        )
        if onset:
            self.onsets.append(iteration)
            warnings.warn(
                LengthBiasWarning(
                    f"iteration {iteration}: training sees short answers, {kept_ratio:.0%} of the mean length with the "
                    f"{num_lost} of the last {self.window} iterations that were lost to it, {num_cut} of them cut off "
                    f"before their end (chance of such a choice at most {chance:.1e}); keep unfinished work, or wait "
                    "longer"
                ),
                stacklevel=3,
            )
        return self._last

    def _lost(self, iteration: int) -> tuple[int, int, float | None, float]:
        """(num_lost, num_cut, kept_ratio, chance) of the window."""
        overdue = [
            _Decided(iteration, known.group, known.tokens, known.ended, True)
            for known in self._open.values()
            if known.since <= iteration - self.window
        ]
        rows = [*self._decided, *overdue]
        lost = np.array([row.lost for row in rows], dtype=bool)
        num_lost, num_cut = int(lost.sum()), sum(not row.ended for row in rows)
        if num_lost == len(rows):  # nothing was trained on: nothing to compare
            return num_lost, num_cut, None, 1.0
        if not num_lost:
            return 0, 0, 1.0, 1.0
        codes: dict[str, int] = {}
        units = np.array([codes.setdefault(row.group, len(codes)) for row in rows])
        tokens = np.array([row.tokens for row in rows])
        ended = np.array([row.ended for row in rows], dtype=bool)
        kept_ratio = _ratio(float(tokens[~lost].mean()), kaplan_meier(tokens, ended).mean())
        return num_lost, num_cut, kept_ratio, chance_of_low(rank_scores(tokens, ended), units, lost)

    def _is_onset(self, num_lost: int, kept_ratio: float | None, chance: float) -> bool:
        if kept_ratio is None or not num_lost:
            self.biased = self.biased and kept_ratio is None
            return False
        self._tests += 1
        if self.biased:
            self.biased = kept_ratio <= 1.0 - self.tolerance / 2.0
            return False
        level = self.alarm / (self._tests * (self._tests + 1))
        self.biased = kept_ratio <= 1.0 - self.tolerance and chance <= level
        return self.biased


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _quantiles(name: str, survival: Survival) -> dict[str, int | None]:
    return {f"{name}_median": survival.quantile(0.5), f"{name}_p90": survival.quantile(0.9)}
