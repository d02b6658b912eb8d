"""Will speculation pay here? Expected speed-up and break-even acceptance from what a step costs.

With S sequences that decode, drafts of which the j-th token is accepted with probability a_j given those before it, and
t(n) the seconds of a pass over n rows, a step with D draft rows emits S + G(D) tokens in t(S + D) + d seconds, where d
is the time to draft and G(D) the sum of the D largest of S times {a_1, a_1 a_2, ...}. Without drafts: S in t(S).

    speed-up = (S + G(D)) / (t(S + D) + d) * t(S) / S
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from longtail.spec_decode.step_cost import StepCost


@dataclasses.dataclass(frozen=True, slots=True)
class BreakEven:
    """Of one batch size."""

    batch: int
    step_seconds: float
    """Of a step with drafting off."""
    acceptance: float | None
    """If it is the same for every token: from which on some number of drafts pays; None: not even 1 does."""
    speedups: dict[str, float]
    """Of each drafter asked for, with the best number of drafts; 1 where none pays."""
    lengths: dict[str, float]
    """And that number, a sequence."""


def speedups(
    curve: np.ndarray,
    batch: int,
    acceptance: float | Sequence[float],
    max_drafts: int,
    draft_seconds: float = 0.0,
) -> np.ndarray:
    """curve: float64, seconds of a pass by rows, up to batch * (1 + max_drafts). acceptance: of every draft token given
    those before it, or by position (none is accepted behind its end). -> float64 [batch * max_drafts + 1]: speed-up by
    the number D of draft rows (D = 0: 1)."""
    by_position = np.zeros(max_drafts)
    given = [acceptance] * max_drafts if isinstance(acceptance, int | float) else list(acceptance)[:max_drafts]
    by_position[: len(given)] = given
    emitted = batch + np.concatenate([[0.0], np.cumsum(np.repeat(np.cumprod(by_position), batch))])
    seconds = curve[batch : batch * (1 + max_drafts) + 1] + draft_seconds
    out: np.ndarray = emitted / seconds * curve[batch] / batch
    out[0] = 1.0
    return out


def break_even_acceptance(
    curve: np.ndarray, batch: int, max_drafts: int, draft_seconds: float = 0.0, margin: float = 0.0
) -> float | None:
    """The smallest acceptance at which some number of drafts makes a step 1 + margin times as productive as drafting
    off; None if none does. (More acceptance never hurts, so halving the interval finds it.)"""

    def pays(acceptance: float) -> bool:
        best = speedups(curve, batch, acceptance, max_drafts, draft_seconds)[1:]
        return bool(len(best) and best.max() > 1.0 + margin)

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def advise(
    cost: StepCost,
    batches: Iterable[int],
    drafters: Mapping[str, float | Sequence[float]],
    *,
    max_drafts: int = 8,
    draft_seconds: float = 0.0,
    context_per_sequence: float = 0.0,
) -> list[BreakEven]:
    """drafters: by name, the acceptance of every token given those before it, or by position, as `Acceptance` and
    bench's replay measure it. draft_seconds: to draft for one sequence. context_per_sequence: KV tokens of one."""
    for name, given in drafters.items():
        for a in [given] if isinstance(given, int | float) else given:
            if not 0.0 <= a <= 1.0:
                raise ValueError(f"drafters: an acceptance of {name} is {a}, which is not from 0 to 1")
    if max_drafts < 1:
        raise ValueError(f"max_drafts must be at least 1, not {max_drafts}")
    out = []
    for batch in batches:
        if batch < 1:
            raise ValueError(f"batches: {batch} sequences; there is at least 1")
        curve = cost.curve(batch * (1 + max_drafts), context_per_sequence * batch)
        seconds = draft_seconds * batch
        by_name = {name: speedups(curve, batch, a, max_drafts, seconds) for name, a in drafters.items()}
        out.append(
            BreakEven(
                batch,
                float(curve[batch]),
                break_even_acceptance(curve, batch, max_drafts, seconds),
                {name: float(s.max()) for name, s in by_name.items()},
                {name: float(s.argmax()) / batch for name, s in by_name.items()},
            )
        )
    return out
