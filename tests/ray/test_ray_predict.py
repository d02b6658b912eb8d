"""The simulator knows how many passes pools of one and two engines take, and what they cost, from a run of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install 'longtail[ray]'")

from tests.bench import conftest as of_bench

from longtail.bench import pool_predict
from longtail.bench.run import BenchConfig

tiny_task_model = of_bench.tiny_task_model


def test_pools_are_predicted(cluster: str, tiny_task_model: Path) -> None:
    """Tokens and passes are no machine's. (Seconds are: how far off they are is no test.)"""
    config = pool_predict.PredictConfig(
        model=tiny_task_model, counts=(1, 2), slots=3, prompts=4, group_size=3, max_tokens=40, slowed=2.0
    )
    result = json.loads(json.dumps(pool_predict.run(config, lambda text: None)))
    one, two = result["rows"]
    assert (one["engines"], one["seen"], two["engines"], two["seen"]) == (1, True, 2, False)
    for row in (one, two):
        assert row["passes"]["predicted"] == pytest.approx(row["passes"]["measured"], rel=0.05)
        assert row["predicted"] > 0 and row["measured"] > 0
    assert two["predicted"] < one["predicted"]
    assert pool_predict.table(result).row_count == 2
    assert any("slept until a pass had taken 2 times" in line for line in pool_predict.notes(result))


def test_engines_that_take_turns_are_not_slowed() -> None:
    with pytest.raises(ValueError, match="slowed: engines that share cores are those on Ray"):
        BenchConfig(engines=2, slowed=2.0)
    with pytest.raises(ValueError, match="slowed must be a factor of at least 1"):
        BenchConfig(engines=2, ray="local", slowed=0.5)
