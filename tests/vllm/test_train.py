"""`longtail train` on vLLM: it learns, and comes back from kills."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from tests.bench.test_train import CONFIG
from tests.vllm.test_lives import last_line, program

from longtail.trainer_adapter.metrics import read_metrics

BENCH = Path(__file__).parents[1] / "bench"
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Of the toy, whose head is then as wide as vLLM's attention on a CPU takes it."""


def test_it_learns_on_resumed_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on the native engine; see there for the chance of it. What the newest weights made agrees with the trainer's
    forward within 1e-4."""
    from longtail.bench.train import run

    monkeypatch.syspath_prepend(str(BENCH))
    toys = importlib.import_module("train_toys")
    toys.save_model(tmp_path / "model", **HEADS)
    config = dataclasses.replace(CONFIG, engine="vllm", numerics=None, kv_cache_bytes=4 << 20)
    summary = run(config, tmp_path / "run", model=tmp_path / "model", prompts=toys.ToyPrompts())
    before, after = read_metrics(tmp_path / "run" / "eval.jsonl")
    assert before["sampled"] < 0.65
    assert after["sampled"] > before["sampled"] + 0.3
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(bool(line["staleness"]["max"]) for line in lines) >= 7
    differences = [line["max_difference"] for line in lines if line["max_difference"] is not None]
    assert len(differences) >= 7 and max(differences) < 1e-4
    ledger = summary["runs"]["train"]["ledger"]
    assert ledger["generated"] == ledger["trained"] + ledger["pending"] == sum(line["generated"] for line in lines)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_kills(tmp_path: Path) -> None:
    """Metrics, weights, optimiser and samples are those of a run that nobody killed, to the bit: an iteration that was
    cut begins again from what the one before it left, and vLLM repeats a schedule exactly."""
    worker = BENCH / "train_kill_worker.py"
    found = last_line(program(worker, tmp_path, "token-budget:tokens=50", 3, 1, "vllm"))
    assert found["kills"] >= 3
