"""The chaos of test_chaos, on a pool of simulated engines of which some are lost: everything that must add up does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.partial_rollout import test_chaos

from longtail.partial_rollout.engines.simulated.clock import VirtualClock
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.pool import EnginePool
from longtail.partial_rollout.strategies import STRATEGIES


def pool_of_simulated(clock: VirtualClock, slots: int, rate: float, rng: random.Random, **settings: Any) -> EnginePool:
    def make(name: str) -> SimulatedEngine:
        engine = SimulatedEngine(name=name, slots=slots // 3, clock=clock, **settings)
        step = engine.step

        def lose() -> None:
            if rng.random() < rate:
                engine.pause()  # so that the clock, which all engines share, does not wait for it
                raise RuntimeError("planted loss")

        def failing(**options: Any) -> Any:
            lose()
            out = step(**options)
            lose()
            return out

        engine.step = failing  # type: ignore[method-assign]
        return engine

    return EnginePool(make, count=3, clock=clock.now, restarts=1_000_000, over_wire=True, repack=2)


@pytest.mark.filterwarnings("ignore::longtail.partial_rollout.length_bias.LengthBiasWarning")
@pytest.mark.parametrize("rules", ["plain", "strict", "regenerate", "mask", "drop-stale"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_chaos_on_a_pool(name: str, rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{name}{rules}")

    def make(**settings: Any) -> EnginePool:
        return pool_of_simulated(rate=0.02, rng=rng, **settings)

    monkeypatch.setattr(test_chaos, "SimulatedEngine", make)
    chaos = test_chaos.Chaos(name, 1, **test_chaos.RULES[rules])
    chaos.run(250)
    for group in chaos.submitted:
        assert chaos.handed[group.id] + chaos.discarded[group.id] == 1, group.id
    pool: Any = chaos.engine
    ledger = chaos.rollout.store.ledger
    assert ledger.pending == 0 and not pool.has_work
    assert ledger.generated == pool.stats().num_output_tokens
    assert pool.failures and all("planted loss" in why for why in pool.failures)
    assert chaos.grader.num_pending == chaos.environment.num_pending == 0
