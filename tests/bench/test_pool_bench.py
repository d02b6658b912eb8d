"""Runs of pools: what the trace says of each engine, the command, and the shape of the benchmark's rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longtail import Group, Rollout, SamplingParams
from longtail.bench import analysis, pool_bench
from longtail.bench.chrome_trace import chrome_trace
from longtail.bench.cli import app
from longtail.bench.models import resolve_model
from longtail.bench.trace import TraceWriter
from longtail.events import Event
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.partial_rollout.pool import EnginePool


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Failing(NativeEngine):
    """Fails now and then."""

    rng = random.Random(2)

    def step(self, **options: Any) -> Any:
        if self.rng.random() < 0.04:
            raise RuntimeError("planted")
        return super().step(**options)


@pytest.fixture(scope="module")
def traced() -> tuple[Any, EnginePool]:
    """A rollout on three engines, some of which are lost."""
    model = str(resolve_model("tiny-llama"))
    pool = EnginePool(
        lambda name: Failing(model, name=name, max_num_seqs=4, kv_cache_bytes=4 << 20, threads=1),
        count=3,
        restarts=50,
    )
    trace = TraceWriter()
    listen = trace.listener("run")
    pool.listener = listen
    rollout = Rollout(pool, strategy="token-budget:tokens=100", listener=listen)
    listen(Event("run_start", pool.now(), detail=json.dumps({"slots": 12})))
    params = SamplingParams(n=3, max_tokens=30, ignore_eos=True)
    rollout.submit(Group.from_prompt(f"p{i}", [3 + i] * 12, params) for i in range(6))
    while len(rollout.store):
        rollout.collect()
    listen(Event("run_end", pool.now()))
    return trace.frame(), pool


def test_each_engine_has_its_timeline(traced: tuple[Any, EnginePool]) -> None:
    """Lanes of passes are of one engine; the passes that were told of made the tokens that were kept; what was made and
    lost is not told of. Analysis and export take the run as any other."""
    frame, pool = traced
    assert pool.failures
    steps = analysis.timeline(frame).query("track == 'steps'")
    assert set(steps["engine"]) >= {"pool-0", "pool-1", "pool-2"}
    lanes = steps.groupby("lane")["engine"].nunique()
    assert (lanes == 1).all() and len(lanes) == steps["engine"].nunique()
    by_engine = frame[frame["kind"] == "step"].groupby("engine")["num_output_tokens"].sum()
    assert by_engine.sum() == 6 * 3 * 30
    numbers = analysis.summary(frame)["run"]
    assert numbers["complete"] and numbers["samples_trained"] == 18 and numbers["slots"] == 12
    parts = [v for k, v in numbers["breakdown"].items() if k not in ("wall", "generate", "switch")]
    assert sum(parts) == pytest.approx(numbers["wall_seconds"])
    events = frame[frame["kind"] == "engine"]
    lost = events[events["detail"].str.startswith("lost: ")]
    assert len(lost) == len(pool.failures)
    assert len(events[events["detail"] == "joined"]) == 3 + len(pool.failures)
    names = {e["args"]["name"] for e in chrome_trace(frame)["traceEvents"] if e["name"] == "thread_name"}
    assert {"steps of pool-0", "steps of pool-1", "steps of pool-2"} <= names


def test_shared_drafts_are_in_summary_and_report() -> None:
    from longtail.bench.report import render

    model = str(resolve_model("tiny-llama"))
    settings: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_bytes": 4 << 20, "threads": 1, "drafter": "group"}
    pool = EnginePool(lambda name: NativeEngine(model, name=name, **settings), count=2, routing="load")
    trace = TraceWriter()
    pool.listener = listen = trace.listener("run")
    rollout = Rollout(pool, listener=listen)
    listen(Event("run_start", pool.now(), detail=json.dumps({"slots": 8})))
    params = SamplingParams(n=4, max_tokens=30, ignore_eos=True)
    rollout.submit(Group.from_prompt(f"p{i}", [3 + i] * 12, params) for i in range(2))
    rollout.collect()
    listen(Event("run_end", pool.now()))
    frame, stats = trace.frame(), pool.stats()
    summary = analysis.summary(frame)
    told = summary["run"]["drafts_shared"]
    assert told == {"messages": stats.num_news, "tokens": stats.num_news_tokens, "bytes": stats.num_news_bytes}
    assert told["messages"] >= 2 and told["bytes"] > 4 * told["messages"]
    summary["run"]["speculation_by_engine"] = pool.drafting()
    page = render(frame, summary, {})
    assert f"{told['tokens']:,d} tokens in {told['messages']:,d} messages" in page
    assert "group (pool-0)" in page and "group (pool-1)" in page


def test_rows() -> None:
    """The tiny model's are no figures, but the samples must move, and all steps be told of."""
    config = pool_bench.PoolBenchConfig(
        model=resolve_model("tiny-llama"), tokens=64, live=6, steps=3, repeats=2, threads=1
    )
    result = json.loads(json.dumps(pool_bench.run(config, lambda text: None)))
    move, overhead = result["rows"]
    assert (move["measure"], move["tokens"], move["where"]) == ("move", 64, "this process")
    assert move["seconds"].keys() == {"save", "move", "recompute"}
    assert move["save_and_move_over_recompute"]["p50"] > move["move_over_recompute"]["p20"] > 0
    assert overhead["live"] == 6 and 0 < overhead["outside_steps"]["pool"]["p50"] < 1
    assert overhead["pool_over_alone"].keys() == {"p20", "p50", "p80"}
    assert pool_bench.table(result).row_count == 10
    with pytest.raises(ValueError, match="live must be at least 1"):
        pool_bench.PoolBenchConfig(model="m", live=0)


@pytest.mark.slow
def test_bench_command_on_engines(tmp_path: Path) -> None:
    """Three engines make the tokens of one."""
    settings = {"strategies": "sync", "iterations": 1, "prompts": 3, "group-size": 2, "max-tokens": 16, "slots": 6}
    arguments = ["bench", "--json", *(f"--{name}={value}" for name, value in settings.items())]
    runs = {}
    for engines in ("1", "3"):
        out = str(tmp_path / engines)
        done = CliRunner().invoke(app, [*arguments, "--engines", engines, "--out", out])
        assert done.exit_code == 0, done.output
        runs[engines] = json.loads(done.stdout.splitlines()[-1])["runs"]["sync"]
    assert runs["1"]["tokens_trained"] == runs["3"]["tokens_trained"] > 0
    assert runs["3"]["ledger"]["pending"] == 0
