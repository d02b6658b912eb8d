"""Which strategies a bench compares, and the settings that make them comparable: the same batch for each."""

from __future__ import annotations

import inspect
import math
from typing import Any

from longtail.partial_rollout.strategies import STRATEGIES, Strategy, make_strategy, parse_strategy

BUDGET_SHARE = 0.9
"""Automatic token budget: this share of what sync generates in an iteration. At 1.0 the budget would now and then not
be reached before the tail; far below it, unfinished work would pile up from iteration to iteration."""


def split_specs(text: str) -> tuple[str, ...]:
    """ "all"; names with commas between them; or, with settings, specs with semicolons between them."""
    if text.strip() == "all":
        return tuple(STRATEGIES)
    mark = ";" if ";" in text or ":" in text else ","
    return tuple(part.strip() for part in text.split(mark) if part.strip())


def check_specs(specs: tuple[str, ...]) -> None:
    """ValueError for none, for one that is not known, for one that is named twice."""
    if not specs:
        raise ValueError(f"strategies: none given; choose from all, {', '.join(STRATEGIES)}")
    if len(set(specs)) < len(specs):
        raise ValueError(f"strategies: {', '.join(specs)} names one twice")
    for spec in specs:
        try:
            strategy_for(spec, groups=1, samples=1, budget=1)
        except ValueError as error:
            raise ValueError(f"strategies: {error}") from error


def strategy_for(spec: str, *, groups: int, samples: int, budget: int) -> Strategy:
    """groups, samples: of the trainer's batch; budget: output tokens of an iteration under token-budget. What the spec
    says itself stays."""
    cls, settings = parse_strategy(spec)
    defaults: dict[str, Any] = {"groups": groups, "samples": samples, "tokens": budget}
    if cls is STRATEGIES["token-budget"]:
        del defaults["groups"]  # the budget alone ends its iterations
    known = inspect.signature(cls).parameters
    return make_strategy((cls, {name: v for name, v in defaults.items() if name in known} | settings))


def samples_for(strategy: Strategy, samples: int) -> int:
    """Samples that a group is submitted with: a strategy that over-issues within a prompt needs more."""
    return math.ceil(samples * getattr(strategy, "eta", 1.0)) if strategy.name == "tail-rounds" else samples
