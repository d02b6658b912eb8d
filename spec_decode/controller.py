"""How many drafts each sequence gets: as many as pay, with a bound on what being wrong may cost.

What pays. With S sequences that decode, t(n) the seconds of a pass over n rows and a_ij the acceptance of sequence i's
j-th draft given those before it, drafting n_i tokens for each emits S + sum_i sum_{j <= n_i} a_i1 ... a_ij tokens in
t(S + sum_i n_i) seconds. The gains of a sequence fall along its draft, so the best D rows are the D largest gains of
all (a greedy split), and D is chosen to make tokens a second largest. Where the run ends with its slowest sequence
tokens are weighed by whose they are (worth.py). Rows that fill a padded block are free, and are taken. Drafting is off
(D = 0) where nothing beats it by `margin`.

What being wrong may cost. `balance` is the time won against drafting off, by the measured cost of both: what the tokens
emitted stand for in steps without drafts, less the seconds that the step and the drafting took. It may fall to
-max_loss of the time that has passed (and of the rest of the run, where its end is known); then drafting is off until
time has passed. Everything that is tried for information (drafts that are made to be judged, row counts whose cost is
not known) is paid from the same account.

What looking costs. Making drafts, to see whether they pay, takes time as well. Where that is more than a trifle
(`free`) and nothing is expected of it, it is done in some steps only: after each look that brought nothing the pause
doubles, up to `longest_pause` steps, until a look brings something, more drafts come true than did before, or
sequences have gone, which makes drafts cheaper.

The account is as good as the measured costs. With steps that vary by 10 %, and spikes, simulated runs of a few hundred
steps stay within 3 % of drafting off, also on a machine whose speed jumps by 2.5 every 5 to 200 steps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from longtail.kernels._numba import jit
from longtail.spec_decode.break_even import break_even_acceptance
from longtail.spec_decode.step_cost import StepCost
from longtail.spec_decode.worth import OPEN, Worth

STAKE = 0.25
"""Share of what may still be lost that one step's drafts may cost: a few unlucky steps do not end the drafting."""

LEARN = 64
"""Sequences that drafts are made for, to judge them, before looks that bring nothing become rarer."""

Reason = Literal[
    "drafted",
    "nothing drafted",  # the drafters had nothing to say, or no sequence has room
    "does not pay",
    "cost of drafting",  # making the drafts costs more than they bring
    "measuring",  # the cost of a step without drafts, to compare with
    "trying",  # drafted, to learn what that many rows cost
    "loss bound",  # drafting has lost what it may lose
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Checked at construction."""

    max_drafts: int = 8
    """Most drafts of one sequence."""
    margin: float = 0.01
    """Expected gain from which on drafting is on."""
    max_loss: float = 0.01
    """Share of the time that drafting may lose in all, by the measured costs."""
    max_credit: float = 10.0
    """Time won that may be lost again, in steps: a long good run does not pay for a long bad one."""
    free: float = 0.003
    """Drafts that take less than this share of a step are always made: the acceptance is known when it is needed."""
    longest_pause: int = 32
    """Steps in which no drafts are made after looks that brought nothing."""
    refresh: int = 128
    """Steps with drafts after which one without is measured again; fewer where little is won."""

    def __post_init__(self) -> None:
        for name in ("max_drafts", "longest_pause", "refresh"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("margin", "max_loss", "free"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be from 0 to below 1, not {getattr(self, name)}")
        if not self.max_credit >= 0.0:
            raise ValueError(f"max_credit must be at least 0, not {self.max_credit}")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Drafts of one step."""

    lengths: list[int]
    """Of each sequence."""
    reason: Reason
    speedup: float = 1.0
    """Expected, of this step against one without drafts."""

    @property
    def rows(self) -> int:
        return sum(self.lengths)


def split(
    acceptance: Sequence[np.ndarray], batch: int, curve: np.ndarray, weights: np.ndarray | None = None
) -> tuple[list[int], float]:
    """acceptance: for each sequence float64 [drafts], each token's given those before it; batch: sequences that decode
    (those without drafts too); curve: float64, seconds by rows, up to batch + all drafts; weights: what a token of each
    sequence is worth, 1 on average.
    -> (drafts of each sequence, what a second brings against drafting off). Of equally good splits the smallest."""
    if not len(acceptance):
        return [], 1.0
    counts = np.array([len(a) for a in acceptance])
    flat = np.concatenate(acceptance)
    weights = np.ones(len(counts)) if weights is None else weights
    lengths, speedup = _split(flat, counts, weights, batch, curve)
    return lengths.tolist(), float(speedup)


@jit()
def _split(flat: Any, counts: Any, weights: Any, batch: Any, curve: Any) -> tuple[Any, Any]:
    gains, owner = np.empty(len(flat)), np.empty(len(flat), np.int64)
    at = 0
    for i in range(len(counts)):
        gain = weights[i]
        for _ in range(counts[i]):
            gain *= flat[at]
            gains[at] = gain
            owner[at] = i
            at += 1
    order = np.argsort(-gains, kind="mergesort")  # stable: a sequence's first drafts come before its later ones
    emitted, best, best_rate = float(batch), 0, batch / curve[batch]
    off = best_rate
    for n in range(len(order)):
        emitted += gains[order[n]]
        rate = emitted / curve[batch + n + 1]
        if rate > best_rate:
            best, best_rate = n + 1, rate
    lengths = np.zeros(len(counts), np.int64)
    for n in range(best):
        lengths[owner[order[n]]] += 1
    return lengths, best_rate / off


def shared_part(curve: np.ndarray, batch: int) -> float:
    """The part of a step's seconds that does not grow with the sequences: by the chord from one row to the batch's."""
    each = (curve[batch] - curve[1]) / max(batch - 1, 1)
    return 1.0 - float(each * batch / curve[batch])


class Controller:
    """Before a step: `ask`, then `plan` with the drafts; after it: `done`. Knows nothing of samples or drafters."""

    def __init__(self, cost: StepCost, config: ControllerConfig | None = None) -> None:
        self.cost = cost
        self.config = config or ControllerConfig()
        self.balance = 0.0
        """Seconds won against drafting off; see above."""
        self.elapsed = 0.0
        """Seconds of steps and drafting."""
        self.rest = 0.0
        """Seconds that the run will go on for without drafts, as far as is known."""
        self.reasons: Counter[tuple[int, Reason]] = Counter()
        """Steps by sequences that decode and reason."""
        self._draft_seconds = 0.0  # for one sequence, measured
        self._times_drafted = 0
        self._since_measured: Counter[int] = Counter()  # steps with drafts since one without, by batch
        self._gain = 1.0  # expected of drafts as they were lately, the time to make them left out
        self._looked_at = 0  # sequences that drafts were made for, in all
        self._last_look = 0  # batch of the last one
        self._pause = self._paused = 0  # steps after it without one, and those still to come
        self._wants_trial = False  # more rows would be tried if the account could bear it

    # ---- before a step

    def ask(self, batch: int, context: float = 0.0, prefill: int = 0, worth: Worth = OPEN) -> int:
        """For how many of the `batch` sequences to make drafts in this step: all, where drafts are cheap or likely to
        pay; else now and then, of dear ones as many as can be judged for a quarter of what may be lost, often none."""
        if batch < 1:
            return 0
        if self.cost.is_empty:
            self.reasons[batch, "measuring"] += 1
            return 0
        step = self.cost.seconds(batch, context, prefill)
        self.rest = step * worth.steps_left
        if self._times_drafted < 2:  # what drafting costs is not known
            return min(batch, 2)
        seconds = self._draft_seconds * batch
        limit = 1.0 + self.config.margin
        pays = seconds <= self.config.free * step or self._gain * step > limit * (step + seconds)
        if pays and self._may_lose(seconds):
            return batch
        if batch <= 0.75 * self._last_look:
            self.look_again()
        count = 0
        if self._paused:
            self._paused -= 1
        else:
            affordable = 0.25 * self.config.max_loss * (self.elapsed + self.rest) + min(self.balance, 0.0)
            count = min(int(affordable / self._draft_seconds), batch) if affordable > 0.0 else 0
        if not count:
            self.reasons[batch, "cost of drafting"] += 1
        return count

    def plan(
        self,
        acceptance: Sequence[np.ndarray],
        batch: int,
        context: float = 0.0,
        prefill: int = 0,
        asked: int | None = None,
        worth: Worth = OPEN,
    ) -> Plan:
        """acceptance: as in `split`, of the sequences that drafts were made for. asked: what `ask` said; fewer than
        the batch are to be judged only. The time to make the drafts has been spent."""
        asked = batch if asked is None else asked
        plan = self._plan(acceptance, batch, context, prefill, asked, worth)
        self._last_look = batch
        self._looked_at += asked
        if plan.rows or self._looked_at < LEARN or self._wants_trial:
            self._pause = 0
        else:
            self._pause = min(max(2 * self._pause, 1), self.config.longest_pause)
        self._paused = self._pause
        self.reasons[batch, plan.reason] += 1
        return plan

    def _plan(
        self,
        acceptance: Sequence[np.ndarray],
        batch: int,
        context: float,
        prefill: int,
        asked: int,
        worth: Worth,
    ) -> Plan:
        none = [0] * len(acceptance)
        if not self.cost.is_known(batch):
            return Plan(none, "measuring")
        if asked < batch:  # what it would bring were all drafted for as these
            acceptance = (list(acceptance) * batch)[: max(len(acceptance) * batch // asked, 1)]
        drafts = sum(map(len, acceptance))
        if not drafts:
            self._expect(1.0)
            return Plan(none, "nothing drafted")
        curve = self.cost.curve(batch + drafts, context, prefill)
        weights = worth.weights(shared_part(curve, batch)) if asked == batch else None
        bounded = curve
        if worth.certain:  # what the others gain counts only if the last one does too: no step stakes all there is
            stake = max(self._left_to_lose(), 0.0) / worth.certain
            bounded = np.where(curve - curve[batch] <= stake, curve, np.inf)
        lengths, speedup = split(acceptance, batch, bounded, weights)
        may_lose, self._wants_trial = self._may_lose(0.0), False
        tried = self._try(acceptance, batch, curve, sum(lengths), weights) if may_lose else None
        self._expect(speedup if tried is None else tried.speedup)
        if asked < batch:
            return Plan(none, "cost of drafting" if self._times_drafted >= 2 else "measuring")
        if self._since_measured[batch] >= self._patience(batch, speedup):
            return Plan(none, "measuring")
        if not may_lose:
            return Plan(none, "loss bound")
        if tried is not None:
            return tried
        if speedup <= 1.0 + self.config.margin:
            return Plan(none, "does not pay")
        return Plan(lengths, "drafted", speedup)

    def look_again(self) -> None:
        """Something has changed: drafts that did not pay may do now."""
        self._pause = self._paused = 0

    def _expect(self, speedup: float) -> None:
        self._gain = max(speedup, self._gain + 0.25 * (speedup - self._gain))

    def _try(
        self,
        acceptance: Sequence[np.ndarray],
        batch: int,
        curve: np.ndarray,
        rows: int,
        weights: np.ndarray | None,
    ) -> Plan | None:
        """More rows than the cost is known of may cost less than is assumed. If they would pay were they free, they are
        tried, where the account can bear what is assumed."""
        most = self.cost.most_known
        if batch + rows < most or most >= len(curve):
            return None
        hopeful = curve.copy()
        hopeful[most:] = hopeful[most]
        lengths, speedup = split(acceptance, batch, hopeful, weights)
        if batch + sum(lengths) <= most or speedup <= 1.0 + self.config.margin:
            return None
        step = 2 * self.cost.row_multiple + most // 4  # a little further each time
        wanted, bearable = batch + sum(lengths), float(curve[batch]) + self._left_to_lose()
        while wanted > most and (wanted > most + step or curve[wanted] > bearable):
            lengths[int(np.argmax(lengths))] -= 1
            wanted -= 1
        self._wants_trial = wanted <= most
        if self._wants_trial or self.cost.is_known(wanted):
            return None
        return Plan(lengths, "trying", float(speedup))

    def _patience(self, batch: int, speedup: float) -> int:
        """Steps with drafts until one without is due: the more the less is won, so that it costs about 1 % of what is
        won. A cost that was only taken from a neighbour's is checked soon."""
        if not self.cost.is_measured(batch):
            return 8
        return 16 if speedup < 1.15 else 32 if speedup < 1.4 else self.config.refresh

    def _may_lose(self, seconds: float) -> bool:
        return self._left_to_lose() >= seconds

    def _left_to_lose(self) -> float:
        return self.balance + self.config.max_loss * (self.elapsed + self.rest)

    # ---- after a step

    def done(
        self,
        batch: int,
        drafts: int,
        emitted: Sequence[int],
        seconds: float,
        *,
        worth: Worth = OPEN,
        drafted_for: int = 0,
        draft_seconds: float = 0.0,
        context: float = 0.0,
        prefill: int = 0,
    ) -> None:
        """batch: sequences that decoded; drafts: draft rows verified; emitted: tokens of each of them; seconds: of the
        step without the drafting; worth: before it; drafted_for: sequences for which drafts were made, in
        draft_seconds."""
        self._times_drafted += drafted_for > 0
        if drafted_for and self._times_drafted == 1:  # may have compiled or loaded something: not what drafting costs
            draft_seconds = 0.0
        elif drafted_for:
            each = draft_seconds / drafted_for
            before = self._draft_seconds or each
            self._draft_seconds = before + 0.1 * (min(each, 2.0 * before) - before)
        else:
            self._draft_seconds *= 0.995  # what was dear, once, is tried again at some time
        self.elapsed += seconds + draft_seconds
        self.balance -= draft_seconds
        if batch < 1 or not seconds > 0.0:  # a clock that has not moved says nothing
            return
        self._since_measured[batch] = self._since_measured[batch] + 1 if drafts or prefill else 0
        self.cost.record(batch + drafts, seconds, context=context, prefill=prefill)
        if drafts and not self.cost.is_empty:
            # What the step would have taken without drafts, as such steps did. (Not by the ratio of its own seconds to
            # those expected: row counts are chosen where the curve is low by chance, and that would count as won.)
            curve = self.cost.curve(batch + drafts, context, prefill)
            off = float(curve[batch])
            won = off * worth.steps(emitted, shared_part(curve, batch))
            self.balance = min(self.balance + won - seconds, self.config.max_credit * off)

    # ---- for the report

    def break_even(self, batch: int, context: float = 0.0) -> float | None:
        """Acceptance from which on drafting pays at this batch size, by the costs measured so far; None if no
        acceptance does, or nothing was measured."""
        if self.cost.is_empty:
            return None
        drafts = self.config.max_drafts
        curve = self.cost.curve(batch * (1 + drafts), context)
        return break_even_acceptance(curve, batch, drafts, self._draft_seconds * batch, self.config.margin)

    def reasons_of(self, batch: int) -> dict[Reason, int]:
        return {reason: n for (size, reason), n in self.reasons.items() if size == batch}


class FixedLength(Controller):
    """Always drafts, and always up to `length` tokens: for tests and comparisons. What it costs is measured too."""

    def __init__(self, length: int, cost: StepCost | None = None) -> None:
        super().__init__(StepCost() if cost is None else cost, ControllerConfig(max_drafts=length))

    def ask(self, batch: int, context: float = 0.0, prefill: int = 0, worth: Worth = OPEN) -> int:
        return batch

    def plan(
        self,
        acceptance: Sequence[np.ndarray],
        batch: int,
        context: float = 0.0,
        prefill: int = 0,
        asked: int | None = None,
        worth: Worth = OPEN,
    ) -> Plan:
        plan = Plan([len(a) for a in acceptance], "drafted")
        self.reasons[batch, plan.reason] += 1
        return plan
