"""Is a preference still one when the responses change places? A judge that likes what it reads first says nothing.

Each pair is shown twice, as (A chosen, B rejected) and as (A rejected, B chosen) (Zheng et al., "Judging
LLM-as-a-judge", arXiv 2306.05685, section 3.4). Only a judge that picks the chosen response both times confirms it.

    verdicts   A B   agrees                          A A   prefers the first, whichever it is
               B A   prefers the rejected response   B B   prefers the second, whichever it is
               tie tie   sees no difference          else  a tie in one order only
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from longtail.trainer_adapter.intervals import paired_difference, wilson
from longtail.trainer_adapter.preferences import Pair, Verdict

Outcome = Literal["agrees", "opposed", "no difference", "first place", "second place", "half a tie", "not asked"]
CONSISTENT: tuple[Outcome, ...] = ("agrees", "opposed", "no difference")
KEPT: tuple[Outcome, ...] = ("agrees", "not asked")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a judge sees: which of two responses is better. It is not told which was chosen."""

    prompt_ids: tuple[int, ...]
    a_ids: tuple[int, ...]
    b_ids: tuple[int, ...]


Judge = Callable[[Question], Verdict]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderSwap:
    kept: tuple[Pair, ...]
    """Confirmed in both orders, or not asked about. Those asked about have their verdicts."""
    set_aside: tuple[tuple[Pair, Outcome], ...]
    """The others, and what came out."""
    counts: dict[Outcome, int]
    """Every pair counts once."""
    consistency: float | None
    """Share of the pairs asked about with the same answer in both orders. None where no pair was asked about."""
    consistency_interval: tuple[float, float] | None
    """95 %, Wilson. Here and below pairs count as independent."""
    position_bias: float | None
    """Mean over pairs of how much more often the first place wins than the second, -1 to 1: +1 where the first wins in
    both orders, 0 where the answer is the same in both, +1/2 where it wins once and ties once."""
    position_interval: tuple[float, float] | None
    """95 %, Bonett and Price."""

    @property
    def is_biased(self) -> bool:
        """Whether the interval of the position bias leaves 0 out."""
        return self.position_interval is not None and not self.position_interval[0] <= 0 <= self.position_interval[1]


def order_swap(pairs: Sequence[Pair], judge: Judge | None = None) -> OrderSwap:
    """judge: asked twice about each pair; without one the verdicts that the pairs have are read, and a pair without
    them was not asked about. What a judge raises goes to the caller. ValueError: a verdict that is none."""
    if judge is not None:
        pairs = [asked(pair, judge) for pair in pairs]
    outcomes = [outcome(pair.verdicts) for pair in pairs]
    counts: Counter[Outcome] = Counter(outcomes)
    known = [pair.verdicts for pair in pairs if pair.verdicts is not None]
    share = sum(counts[name] for name in CONSISTENT) / len(known) if known else None
    bias = [(_first(first) + _first(second)) / 2 for first, second in known]
    return OrderSwap(
        kept=tuple(pair for pair, found in zip(pairs, outcomes, strict=True) if found in KEPT),
        set_aside=tuple((pair, found) for pair, found in zip(pairs, outcomes, strict=True) if found not in KEPT),
        counts={name: counts[name] for name in get_args(Outcome)},
        consistency=share,
        consistency_interval=None if share is None else wilson(share, len(known)),
        position_bias=sum(bias) / len(bias) if bias else None,
        position_interval=paired_difference(bias) if bias else None,
    )


def asked(pair: Pair, judge: Judge) -> Pair:
    """With the verdicts of this judge."""
    chosen_first = Question(prompt_ids=pair.prompt_ids, a_ids=pair.chosen_ids, b_ids=pair.rejected_ids)
    chosen_second = Question(prompt_ids=pair.prompt_ids, a_ids=pair.rejected_ids, b_ids=pair.chosen_ids)
    return dataclasses.replace(pair, verdicts=(judge(chosen_first), judge(chosen_second)))


def outcome(verdicts: tuple[Verdict, Verdict] | None) -> Outcome:
    if verdicts is None:
        return "not asked"
    for verdict in verdicts:
        if verdict not in get_args(Verdict):
            raise ValueError(f"verdict {verdict!r} is none; a judge says {', '.join(get_args(Verdict))}")
    known: dict[tuple[Verdict, Verdict], Outcome] = {
        ("A", "B"): "agrees",
        ("B", "A"): "opposed",
        ("tie", "tie"): "no difference",
        ("A", "A"): "first place",
        ("B", "B"): "second place",
    }
    return known.get(verdicts, "half a tie")


def _first(verdict: Verdict) -> int:
    """+1 where the first place won, -1 where the second did."""
    return {"A": 1, "B": -1, "tie": 0}[verdict]
