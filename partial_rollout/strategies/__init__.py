"""Strategies by name. Each is one small file against the protocol in `base`."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

from longtail.partial_rollout.strategies.base import (
    Admit,
    BatchStrategy,
    Order,
    RolloutState,
    Strategy,
    oldest_unfinished_first,
)
from longtail.partial_rollout.strategies.bounded_staleness import BoundedStaleness
from longtail.partial_rollout.strategies.context_aware import ContextAware
from longtail.partial_rollout.strategies.over_issue import OverIssue
from longtail.partial_rollout.strategies.short_first import ShortFirst
from longtail.partial_rollout.strategies.sync import Sync
from longtail.partial_rollout.strategies.tail_rounds import TailRounds
from longtail.partial_rollout.strategies.token_budget import TokenBudget

__all__ = [
    "STRATEGIES",
    "Admit",
    "BatchStrategy",
    "BoundedStaleness",
    "ContextAware",
    "Order",
    "OverIssue",
    "RolloutState",
    "ShortFirst",
    "Strategy",
    "Sync",
    "TailRounds",
    "TokenBudget",
    "make_strategy",
    "oldest_unfinished_first",
    "parse_strategy",
    "strategy_class",
]

STRATEGIES: dict[str, type[Strategy]] = {
    cls.name: cls for cls in (Sync, TokenBudget, OverIssue, TailRounds, ContextAware, ShortFirst, BoundedStaleness)
}


def make_strategy(strategy: Strategy | str | tuple[type[Strategy], dict[str, Any]] | None) -> Strategy:
    """An object as it is; None: `Sync`; text, or what `parse_strategy` made of it: a new one.

    ValueError names what is not known, and what there is."""
    if strategy is None:
        return Sync()
    if isinstance(strategy, Strategy):
        return strategy
    cls, settings = strategy if isinstance(strategy, tuple) else parse_strategy(strategy)
    parameters, name = inspect.signature(cls).parameters.values(), cls.name
    unknown = settings.keys() - {p.name for p in parameters}
    if unknown:
        known = ", ".join(p.name for p in parameters) or "none"
        raise ValueError(f"strategy {name}: no setting {', '.join(sorted(unknown))}; it has {known}")
    needed = [p.name for p in parameters if p.default is p.empty and p.name not in settings]
    if needed:
        raise ValueError(f'strategy {name} needs {", ".join(needed)}, e.g. "{name}:{needed[0]}=8"')
    return cls(**settings)


def parse_strategy(spec: str) -> tuple[type[Strategy], dict[str, Any]]:
    """A name, or the dotted path of a class of your own, with its settings: "sync", "token-budget:tokens=8000",
    "over-issue:groups=32,extra=8", "my_package.my_module.MyStrategy:groups=4"."""
    if not isinstance(spec, str):
        raise ValueError(f"strategy must be a Strategy or a name, not {spec!r}")
    name, _, text = spec.partition(":")
    return strategy_class(name.strip()), dict(_setting(spec, part) for part in text.split(",") if part.strip())


def strategy_class(name: str) -> type[Strategy]:
    """Of a name, or of a dotted path."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"strategy {name!r} is not known; choose from {', '.join(STRATEGIES)}, or give the dotted path of a class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"strategy {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ValueError(f"strategy {name!r} is no subclass of longtail.partial_rollout.strategies.Strategy")
    return found


def _setting(strategy: str, part: str) -> tuple[str, Any]:
    key, is_given, value = (piece.strip() for piece in part.partition("="))
    if not is_given:
        raise ValueError(f"strategy {strategy!r}: {part.strip()!r} is no setting; write name=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, {"True": True, "False": False, "None": None}.get(value, value)
