"""The simulator against a real engine: of a bench's own runs it predicts the schedule, machine or no machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from longtail.bench.run import BenchConfig, run, write
from longtail.bench.simulate_validate import headline, notes, table, validate

STRATEGIES = ("sync", "token-budget")
"""Whose schedule is one of tokens. Others also wait for graders, whose time the simulator has as a mean only."""


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_the_schedule_is_the_measured_one(tiny_task_model: Path, tmp_path: Path, kv_on_update: str) -> None:
    config = BenchConfig(
        model=str(tiny_task_model),
        strategies=STRATEGIES,
        iterations=3,
        prompts=3,
        group_size=2,
        slots=6,
        max_tokens=48,
        threads=1,
        kv_on_update=kv_on_update,
    )
    result = run(config)
    assert result.summary["identical_tokens"] is True
    recomputed = result.frame.query("run == 'token-budget' and kind == 'step'")["num_prefill_tokens"].sum()
    prompts = result.frame.query("run == 'sync' and kind == 'step'")["num_prefill_tokens"].sum()
    assert (recomputed > prompts) == (kv_on_update == "recompute"), "unfinished samples are computed again, or are not"
    write(result, tmp_path)

    summary = validate(tmp_path)
    assert [row["run"] for row in summary["rows"]] == list(STRATEGIES)
    assert [row["seen"] for row in summary["rows"]] == [True, False]
    for row in summary["rows"]:
        assert row["tokens"]["predicted"] == row["tokens"]["measured"], row
        # The real engine shares and saves KV by blocks, the simulated one by tokens.
        assert row["prefilled"]["predicted"] == pytest.approx(row["prefilled"]["measured"], rel=0.1), row
        assert row["passes"]["predicted"] == pytest.approx(row["passes"]["measured"], rel=0.02), row
    assert "of the calibrated strategy" in headline(summary) and notes(summary)
    assert table(summary).row_count == len(STRATEGIES)


def test_config_says_what_kv_on_update_may_be() -> None:
    with pytest.raises(ValueError, match='kv_on_update must be "recompute" or "keep"'):
        dataclasses.replace(BenchConfig(), kv_on_update="drop")
