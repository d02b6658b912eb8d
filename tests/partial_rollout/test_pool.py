"""A pool makes the samples of the single engine, bit for bit, whatever its engines, their number and their fate."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.partial_rollout.conftest import assert_same
from tests.partial_rollout.pool_helpers import STRATEGIES, balance, batch, collect_all, failing_maker, maker

from longtail import Rollout, Sample
from longtail.partial_rollout.pool import EnginePool
from longtail.partial_rollout.pool.routing import ROUTINGS


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_samples_of_the_single_engine(llama: Any, alone: dict[str, Sample], strategy: str, count: int) -> None:
    """Weights are sent again, as other versions, after each iteration."""
    pool = EnginePool(maker(llama), count=count, over_wire=count == 2)
    rollout = Rollout(pool, strategy=STRATEGIES[strategy])
    got = collect_all(rollout, batch(), dict(llama.state_dict()))
    assert got.keys() <= alone.keys() and (len(got) == len(alone) or strategy in ("over-issue", "tail-rounds"))
    for name, sample in got.items():
        assert_same(sample, alone[name])
    balance(pool, rollout)
    used = {segment.engine for sample in got.values() for segment in sample.segments}
    assert used <= {f"pool-{i}" for i in range(count)} and len(used) >= 2


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_random_losses(llama: Any, alone: dict[str, Sample], routing: str, seed: int) -> None:
    """Engines fail in random steps, before and after the pass; others take their places. Nothing is lost, nothing comes
    twice, and every sample is the one of the undisturbed run."""
    rng = random.Random(f"{routing}{seed}")
    pool = EnginePool(failing_maker(llama, rng, 0.04), count=3, routing=routing, restarts=1000, over_wire=seed == 0)
    rollout = Rollout(pool, strategy=("token-budget:tokens=90", "context-aware:chunk=6", "sync")[seed])
    got = collect_all(rollout, batch(), dict(llama.state_dict()))
    assert got.keys() == alone.keys()
    for name, sample in got.items():
        assert_same(sample, alone[name])
    balance(pool, rollout)
    assert len(pool.failures) >= 5 and all("planted" in why for why in pool.failures)
    assert [state for state in pool.engines.values() if state == "active"] == ["active"] * 3
