"""`longtail bench` end to end: the real small model, real tasks, two regimes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from longtail import NativeEngine
from longtail.bench.cli import app
from longtail.bench.engines import batched_tokens, make_engine
from longtail.bench.models import tiny_llama
from longtail.bench.run import BenchConfig
from longtail.bench.strategy_specs import BUDGET_SHARE
from longtail.bench.trace import read_trace
from longtail.partial_rollout.engines.native.config import NativeConfig
from longtail.partial_rollout.pool import EnginePool


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("iterations", 0, "iterations must be at least 1"),
        ("group_size", 0, "group_size must be at least 1"),
        ("slots", -1, "slots must be at least 1"),
        ("token_budget", 0, "token_budget must be at least 1"),
        ("strategies", ("sync", "fifo"), "strategies: strategy 'fifo' is not known; choose from sync, token-budget"),
        ("strategies", (), "strategies: none given"),
        ("strategies", ("sync", "sync"), "names one twice"),
        ("temperature", float("nan"), "temperature"),
        ("max_tokens", 0, "max_tokens"),
    ],
)
def test_bench_config_names_the_field(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**{field: value})  # type: ignore[arg-type]


def test_seeds_differ_between_prompts_and_runs() -> None:
    seeds = {BenchConfig(seed=s).params(p).seed for s in range(3) for p in range(20)}
    assert len(seeds) == 60


def test_a_bench_records_its_own_engines_batch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_bytes": 1 << 22, "max_model_len": 64, "threads": 1}
    model = tiny_llama(tmp_path)
    assert batched_tokens(make_engine("native", model, max_num_batched_tokens=96, **settings), "native") == 96
    with EnginePool(functools.partial(NativeEngine, model, **settings), count=2) as pool:
        assert batched_tokens(pool, "native") == NativeConfig().max_num_batched_tokens
    vllms = SimpleNamespace(config=SimpleNamespace(max_num_batched_tokens=2048))
    assert batched_tokens(vllms, "vllm") == 2048


@pytest.mark.slow
def test_bench_command(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"iterations": 2, "prompts": 2, "group-size": 2, "slots": 4, "max-tokens": 24}
    arguments = ["bench", "--json", *(f"--{name}={value}" for name, value in settings.items()), "--out"]
    result = CliRunner().invoke(app, [*arguments, str(out)])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads((out / "summary.json").read_text())
    assert printed["identical_tokens"] is True
    assert printed["config"]["max_tokens"] == 24 and printed["machine"]["torch"]

    runs = printed["runs"]
    assert list(runs) == ["sync", "token-budget"]
    for run in runs.values():
        assert run["complete"] and run["samples_trained"] == 8 and run["tokens_pending"] == 0
        assert run["tokens_generated"] == run["tokens_trained"] <= 8 * 24
        ledger = run["ledger"]
        assert ledger["generated"] == ledger["trained"] == run["tokens_trained"] and ledger["pending"] == 0
        parts = [v for k, v in run["breakdown"].items() if k not in ("wall", "generate", "switch")]
        assert sum(parts) == pytest.approx(run["wall_seconds"])
    assert runs["sync"]["tokens_trained"] == runs["token-budget"]["tokens_trained"]

    trace = read_trace(out / "trace.parquet")
    assert set(trace["run"]) == {"sync", "token-budget"}
    for name, events in trace.groupby("run"):
        steps = events[events["kind"] == "step"]
        assert steps["num_output_tokens"].sum() == runs[name]["tokens_generated"]
        assert (events["kind"] == "hand_over").sum() == 4  # every group exactly once
        assert (steps["model_seconds"] + steps["sample_seconds"] <= steps["duration"]).all()
    start = trace[(trace["run"] == "token-budget") & (trace["kind"] == "run_start")].iloc[0]
    per_iteration = runs["sync"]["tokens_trained"] / 2
    assert json.loads(start["detail"])["token_budget"] == round(BUDGET_SHARE * per_iteration)

    page = (out / "report.html").read_text()
    assert page.count("<svg") + page.count("data:image/png") >= 4
    assert "<h2>Ledger</h2>" in page and "token-budget" in page and "src=http" not in page and "href=http" not in page


def test_bench_with_a_drafter(tmp_path: Path) -> None:
    """The same samples as without; what drafting did stands in the summary, the trace and the report."""
    out = tmp_path / "run"
    settings = {"strategies": "sync", "iterations": 1, "prompts": 1, "group-size": 2, "max-tokens": 48, "seed": 1}
    arguments = ["bench", "--json", *(f"--{name}={value}" for name, value in settings.items()), "--out"]
    plain = CliRunner().invoke(app, [*arguments, str(tmp_path / "plain")])
    result = CliRunner().invoke(app, [*arguments, str(out), "--drafter", "group>ngram"])
    assert result.exit_code == 0, result.output
    before, runs = (json.loads(r.stdout.splitlines()[-1])["runs"] for r in (plain, result))
    for name, run in runs.items():
        assert run["tokens_trained"] == before[name]["tokens_trained"]
        assert run["tokens_drafted"] >= run["tokens_accepted"]
        assert run["tokens_drafted"] - run["tokens_accepted"] == run["ledger"]["rejected-drafts"]
        drafted = sum(d["drafted"] for d in run["speculation"]["drafters"].values())
        assert drafted == run["tokens_drafted"]
    assert sum(run["tokens_drafted"] for run in runs.values()) > 0
    assert before["sync"]["speculation"] is None
    trace = read_trace(out / "trace.parquet")
    steps = trace[trace["kind"] == "step"]
    assert steps["num_draft_tokens"].sum() == sum(run["tokens_drafted"] for run in runs.values())
    assert "<h2>Drafting</h2>" in (out / "report.html").read_text()
    assert "<h2>Drafting</h2>" not in (tmp_path / "plain" / "report.html").read_text()
    failed = CliRunner().invoke(app, ["bench", "--drafter", "nonsense", "--out", str(out)])
    assert "no drafter 'nonsense'" in str(failed.exception)


def test_errors_are_one_line(tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    command = [sys.executable, "-c", "from longtail.bench.cli import main; main()"]
    for arguments, message in [
        (["bench", "--strategies", "fifo"], "strategies: strategy 'fifo' is not known"),
        (["bench", "--model", str(tmp_path)], "model"),
        (["model", "no-such-model"], "model"),
    ]:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, env=os.environ, check=False)
        assert done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
