"""`longtail bench scheduling` at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longtail.bench import scheduling_bench
from longtail.bench.cli import app
from longtail.partial_rollout.strategies import STRATEGIES


def test_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_bench, "MOST_MICROSECONDS", 1e6)  # a time is no test
    out = tmp_path / "made" / "scheduling.json"
    arguments = ["bench", "scheduling", "--samples", "40,80", "--slots", "16", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, (result.output, result.exception)
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert [(row["strategy"], row["samples"]) for row in printed["rows"]] == [
        (name, count) for name in STRATEGIES for count in (40, 80)
    ]
    steps = {name: {r["sequence_steps"] for r in printed["rows"] if r["samples"] == 80} for name in ("sync",)}
    assert min(steps["sync"]) >= 80 * 4
    assert "us a sequence step" in result.stderr and "it must be less than" in result.stderr


def test_too_slow_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling_bench, "MOST_MICROSECONDS", 0.0)
    arguments = ["bench", "scheduling", "--strategies", "sync", "--samples", "16", "--slots", "4"]
    assert CliRunner().invoke(app, arguments).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--samples", "many"], "samples: 'many' is not numbers"),
        (["--samples", "3"], "samples must be numbers of at least group_size"),
        (["--strategies", "fifo"], "'fifo' is not known"),
    ],
)
def test_bad_options(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "scheduling", *arguments])
    assert isinstance(result.exception, ValueError) and named in str(result.exception)
