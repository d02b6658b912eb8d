"""Pools of tiny engines, engines that fail on command, and rollouts over them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.partial_rollout.conftest import group, prompt

from longtail import Group, NativeEngine, Rollout, Sample
from longtail.partial_rollout.pool import EnginePool

STRATEGIES = {
    "sync": "sync",
    "token-budget": "token-budget:tokens=120",
    "over-issue": "over-issue:groups=3,extra=1",
    "tail-rounds": "tail-rounds:groups=2,samples=3,eta=1.5",
    "context-aware": "context-aware:chunk=7",
    "short-first": "short-first:groups=2,pool=3",
    "bounded-staleness": "bounded-staleness:groups=2,eta=3",
}


def batch(groups: int = 6, size: int = 3, **params: Any) -> list[Group]:
    """Prompts and caps of different lengths; the third group has a stop condition that comes early or late."""
    out = []
    for i in range(groups):
        fields = {"n": size, "max_tokens": (9, 17, 40, 25)[i % 4], "seed": 11 + i} | params
        out.append(group(f"p{i}", prompt(5 + 9 * i % 40, seed=i), **fields))
    return out


class Faulty(NativeEngine):
    """A native engine that raises in chosen steps: before the pass, or after it, when its tokens are made."""

    def __init__(self, *arguments: Any, fails: Callable[[], bool] = lambda: False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.fails = fails

    def step(self, **options: Any) -> Any:
        before = self.fails()
        if before:
            raise RuntimeError("planted, before the pass")
        out = super().step(**options)
        if self.fails():
            raise RuntimeError("planted, after the pass")
        return out


def maker(model: Any, kind: type[NativeEngine] = NativeEngine, **settings: Any) -> Callable[..., NativeEngine]:
    """What makes the engines of a pool."""
    fields: dict[str, Any] = {"kv_cache_bytes": 2 << 20, "max_num_seqs": 4, "block_size": 16} | settings
    return lambda name: kind(model, name=name, **fields)


def failing_maker(model: Any, rng: random.Random, rate: float, **settings: Any) -> Callable[..., NativeEngine]:
    return maker(model, Faulty, fails=lambda: rng.random() < rate, **settings)


def collect_all(rollout: Rollout, groups: list[Group], weights: Any = None) -> dict[str, Sample]:
    """Everything that is handed over, by id; new weights (version + 1) after each collect where they are given."""
    got: dict[str, Sample] = {}
    for one in handed_over(rollout, groups, weights):
        for sample in one.samples:
            assert sample.id not in got, "handed over twice"
            got[sample.id] = sample
    return got


def handed_over(rollout: Rollout, groups: list[Group], weights: Any) -> Iterator[Group]:
    rollout.submit(groups)
    for _ in range(200):
        yield from rollout.collect()
        rollout.check_integrity()
        check = getattr(rollout.engine, "check_integrity", None)
        if check is not None:
            check()
        if not len(rollout.store):
            return
        if weights is not None:
            rollout.update_weights(weights, rollout.engine.version + 1)
    raise AssertionError("does not come to an end")


def balance(pool: EnginePool, rollout: Rollout) -> None:
    """Every token that a sample was given is on the ledger, and none is that nobody was given."""
    ledger = rollout.store.ledger
    assert ledger.pending == 0
    assert ledger.generated == pool.stats().num_output_tokens
