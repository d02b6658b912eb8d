"""How many drafts each sequence gets: as many as pay, with a bound on what being wrong may cost.

What pays. With S sequences that decode, t(n) the seconds of a pass over n rows and a_ij the acceptance of sequence i's
j-th draft given those before it, drafting n_i tokens for each emits S + sum_i sum_{j <= n_i} a_i1 ... a_ij tokens in
t(S + sum_i n_i) seconds. The gains of a sequence fall along its draft, so the best D rows are the D largest gains of
all (a greedy split), and D is chosen to make tokens a second largest. Rows that fill a padded block are free, and are
taken. Drafting is off (D = 0) where nothing beats it by `margin`.

What being wrong may cost. `balance` is the time won against drafting off, by the measured cost of both: tokens emitted
at drafting-off's seconds a token, less the seconds that the step and the drafting took. It may fall to -max_loss of the
time that has passed; then drafting is off until time has passed. Everything that is tried for information (drafts that
are made to be judged, row counts whose cost is not known) is paid from the same account.

The account is as good as the measured costs. With steps that vary by 10 %, and spikes, simulated runs of a few hundred
steps stay within 3 % of drafting off; on a machine whose speed jumps by 2.5 every 5 to 200 steps up to 11 % were lost.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from longtail.spec_decode.break_even import break_even_acceptance
from longtail.spec_decode.step_cost import StepCost

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
    max_loss: float = 0.02
    """Share of the time that drafting may lose in all, by the measured costs."""
    max_credit: float = 10.0
    """Time won that may be lost again, in steps: a long good run does not pay for a long bad one."""
    free: float = 0.003
    """Drafts that take less than this share of a step are always made: the acceptance is known when it is needed."""
    refresh: int = 128
    """Steps with drafts after which one without is measured again; fewer where little is won."""

    def __post_init__(self) -> None:
        for name in ("max_drafts", "refresh"):
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


def split(acceptance: Sequence[np.ndarray], batch: int, curve: np.ndarray) -> tuple[list[int], float]:
    """acceptance: for each sequence float64 [drafts], each token's given those before it; batch: sequences that decode
    (those without drafts too); curve: float64, seconds by rows, up to batch + all drafts.
    -> (drafts of each sequence, tokens a second against drafting off). Of equally good splits the smallest."""
    gains = [np.cumprod(a) for a in acceptance]
    flat = np.concatenate(gains) if gains else np.empty(0)
    if not len(flat):
        return [0] * len(gains), 1.0
    owner = np.repeat(np.arange(len(gains)), [len(g) for g in gains])
    order = np.argsort(-flat, kind="stable")  # stable: a sequence's first drafts come before its later ones
    emitted = batch + np.concatenate([[0.0], np.cumsum(flat[order])])
    rate = emitted / curve[batch : batch + len(flat) + 1]
    best = int(rate.argmax())
    lengths = np.bincount(owner[order[:best]], minlength=len(gains))
    return [int(n) for n in lengths], float(rate[best] / rate[0])


class Controller:
    """Before a step: `ask`, then `plan` with the drafts; after it: `done`. Knows nothing of samples or drafters."""

    def __init__(self, cost: StepCost, config: ControllerConfig | None = None) -> None:
        self.cost = cost
        self.config = config or ControllerConfig()
        self.balance = 0.0
        """Seconds won against drafting off; see above."""
        self.elapsed = 0.0
        """Seconds of steps and drafting."""
        self.reasons: Counter[tuple[int, Reason]] = Counter()
        """Steps by sequences that decode and reason."""
        self._draft_seconds = 0.0  # for one sequence, measured
        self._times_drafted = 0
        self._since_measured: Counter[int] = Counter()  # steps with drafts since one without, by batch
        self._gain = 1.0  # expected of drafts as they were lately, the time to make them left out

    # ---- before a step

    def ask(self, batch: int, context: float = 0.0, prefill: int = 0) -> int:
        """For how many of the `batch` sequences to make drafts in this step: all, where drafts are cheap or likely to
        pay; else as many as can be judged for a quarter of what may be lost, often none."""
        if batch < 1:
            return 0
        if self.cost.is_empty:
            self.reasons[batch, "measuring"] += 1
            return 0
        if self._times_drafted < 2:  # what drafting costs is not known
            return min(batch, 2)
        step = self.cost.seconds(batch, context, prefill)
        seconds = self._draft_seconds * batch
        if seconds <= self.config.free * step:
            return batch
        if self._gain * step > (1.0 + self.config.margin) * (step + seconds) and self._may_lose(seconds):
            return batch
        affordable = 0.25 * self.config.max_loss * self.elapsed + min(self.balance, 0.0)
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
    ) -> Plan:
        """acceptance: as in `split`, of the sequences that drafts were made for. asked: what `ask` said; fewer than
        the batch are to be judged only. The time to make the drafts has been spent."""
        asked = batch if asked is None else asked
        plan = self._plan(acceptance, batch, context, prefill, asked)
        self.reasons[batch, plan.reason] += 1
        return plan

    def _plan(self, acceptance: Sequence[np.ndarray], batch: int, context: float, prefill: int, asked: int) -> Plan:
        none = [0] * len(acceptance)
        if asked < batch:  # what it would bring were all drafted for as these
            acceptance = (list(acceptance) * batch)[: max(len(acceptance) * batch // asked, 1)]
        drafts = sum(map(len, acceptance))
        if not drafts:
            return Plan(none, "nothing drafted")
        if not self.cost.is_known(batch):
            return Plan(none, "measuring")
        curve = self.cost.curve(batch + drafts, context, prefill)
        lengths, speedup = split(acceptance, batch, curve)
        may_lose = self._may_lose(0.0)
        tried = self._try(acceptance, batch, curve, sum(lengths)) if may_lose else None
        self._gain += 0.2 * ((speedup if tried is None else tried.speedup) - self._gain)
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

    def _try(self, acceptance: Sequence[np.ndarray], batch: int, curve: np.ndarray, rows: int) -> Plan | None:
        """More rows than the cost is known of may cost less than is assumed. If they would pay were they free, they are
        tried, where the account can bear that they cost in proportion."""
        most = self.cost.most_known
        if batch + rows < most or most >= len(curve):
            return None
        hopeful = curve.copy()
        hopeful[most:] = curve[most]
        lengths, speedup = split(acceptance, batch, hopeful)
        if batch + sum(lengths) <= most or speedup <= 1.0 + self.config.margin:
            return None
        step = 2 * self.cost.row_multiple + most // 4  # a little further each time
        while sum(lengths) and batch + sum(lengths) > most + step:
            lengths[int(np.argmax(lengths))] -= 1
        wanted = batch + sum(lengths)
        block = self.cost.row_multiple
        growth = -(-wanted // block) / -(-batch // block) - 1.0
        if self.cost.is_known(wanted) or not self._may_lose(float(curve[batch]) * growth):
            return None
        return Plan(lengths, "trying", float(speedup))

    def _patience(self, batch: int, speedup: float) -> int:
        """Steps with drafts until one without is due: the more the less is won, so that it costs about 1 % of what is
        won. A cost that was only taken from a neighbour's is checked soon."""
        if not self.cost.is_measured(batch):
            return 8
        return 16 if speedup < 1.15 else 32 if speedup < 1.4 else self.config.refresh

    def _may_lose(self, seconds: float) -> bool:
        return self.balance - seconds >= -self.config.max_loss * self.elapsed

    # ---- after a step

    def done(
        self,
        batch: int,
        drafts: int,
        emitted: int,
        seconds: float,
        *,
        drafted_for: int = 0,
        draft_seconds: float = 0.0,
        context: float = 0.0,
        prefill: int = 0,
    ) -> None:
        """batch: sequences that decoded; drafts: draft rows verified; emitted: tokens of these sequences; seconds: of
        the step without the drafting; drafted_for: sequences for which drafts were made, in draft_seconds."""
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
            # What the step would have taken without drafts: by the ratio, so that a machine that is slow or quick at
            # the moment does not show.
            curve = self.cost.curve(batch + drafts, context, prefill)
            off = seconds * float(curve[batch] / curve[batch + drafts])
            self.balance = min(self.balance + off * emitted / batch - seconds, self.config.max_credit * off)

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

    def ask(self, batch: int, context: float = 0.0, prefill: int = 0) -> int:
        return batch

    def plan(
        self,
        acceptance: Sequence[np.ndarray],
        batch: int,
        context: float = 0.0,
        prefill: int = 0,
        asked: int | None = None,
    ) -> Plan:
        plan = Plan([len(a) for a in acceptance], "drafted")
        self.reasons[batch, plan.reason] += 1
        return plan
