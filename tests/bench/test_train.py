"""`longtail train` as a whole, on tiny models: it learns, comes back from kills, its graders' speed is no matter."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from longtail.bench.run_files import load
from longtail.bench.train import run
from longtail.bench.train_config import RunConfig
from longtail.errors import StoreError
from longtail.trainer_adapter.metrics import read_metrics

WORKER = Path(__file__).with_name("train_kill_worker.py")
CONFIG = RunConfig(
    model="tiny",
    strategy="token-budget:tokens=150",
    loss="dapo",
    correction="tis:cap=2",
    steps=14,
    prompts=4,
    group_size=8,
    learning_rate=1e-2,
    threads=1,
    kv_cache_bytes=1 << 24,
    policy="transformers",
    eval_every=14,
    eval_samples=25,
    export=False,
)


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As a user's module: on sys.path, which the graders' workers are told."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("train_toys")


@pytest.fixture
def model(toys: ModuleType, tmp_path: Path) -> Path:
    toys.save_model(tmp_path / "model")
    return tmp_path / "model"


def test_it_learns_on_resumed_samples(toys: ModuleType, model: Path, tmp_path: Path) -> None:
    """Half of the vocabulary is rewarded. Before and after are evaluated on the same noise, 16 x 25 responses each; of
    two means of 400 rewards in [0, 1] of one policy, chance puts the second 0.3 above the first with a probability
    below exp(-400 x 0.3^2) < 1e-15 (Hoeffding)."""
    out = tmp_path / "run"
    summary = run(CONFIG, out, model=model, prompts=toys.ToyPrompts())
    before, after = read_metrics(out / "eval.jsonl")
    assert (before["step"], after["step"]) == (0, 14)
    assert before["sampled"] < 0.65
    assert after["sampled"] > before["sampled"] + 0.3
    lines = read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(14))
    assert sum(bool(line["staleness"]["max"]) for line in lines) >= 7  # most batches have samples of older versions
    assert sum(line["updated"] for line in lines) >= 6  # until all rewards are the same
    # what the same weights made agrees up to rounding; what older ones made differs, and is corrected
    differences = [line["max_difference"] for line in lines if line["max_difference"] is not None]
    assert len(differences) >= 7 and max(differences) < 1e-4
    stale = [m["kl_k3"] for line in lines for age, m in line["by_staleness"].items() if int(age) and m["trained"]]
    assert max(stale) > 1e-3
    ledger = summary["runs"]["train"]["ledger"]
    assert ledger["generated"] == ledger["trained"] + ledger["pending"]
    assert ledger["generated"] == sum(line["generated"] for line in lines)
    for line in lines:
        columns = line["seconds"]
        assert columns["wall"] == pytest.approx(sum(v for name, v in columns.items() if name != "wall"), abs=1e-6)
        assert columns["generate"] > 0 and columns["train"] > 0
    parts = summary["runs"]["train"]["breakdown"]
    assert parts["evaluate"] > lines[0]["seconds"]["evaluate"] > 0  # the second evaluation is behind the last line
    assert parts["checkpoint"] > sum(line["seconds"]["checkpoint"] for line in lines)
    named = sum(parts[name] for name in ("prefill", "decode", "grade", "train", "evaluate", "checkpoint"))
    assert named > 0.5 * parts["wall"]
    loaded = load([out])
    assert loaded.summary["train"]["samples_trained"] == sum(line["graded"] for line in lines)
    assert (out / "report.html").stat().st_size > 10_000


def same(first: Path, second: Path, *, but: tuple[str, ...] = ("seconds",)) -> None:
    lines, others = read_metrics(first / "metrics.jsonl"), read_metrics(second / "metrics.jsonl")
    assert len(lines) == len(others)
    for line, other in zip(lines, others, strict=True):
        for name in but:
            del line[name], other[name]
        assert line == other


def test_the_speed_of_graders_changes_nothing(toys: ModuleType, model: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=6, eval_every=0)
    for name, grader in (("quick", toys.low), ("slow", toys.slow_low)):
        run(config, tmp_path / name, model=model, prompts=toys.ToyPrompts(grader))
    same(tmp_path / "quick", tmp_path / "slow")


def test_more_steps_later_are_the_same_run(toys: ModuleType, model: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=5, eval_every=0, checkpoint_every=2)
    run(config, tmp_path / "whole", model=model, prompts=toys.ToyPrompts())
    for steps in (3, 5):
        part = dataclasses.replace(config, steps=steps)
        run(part, tmp_path / "parts", resume=True, model=model, prompts=toys.ToyPrompts())
    same(tmp_path / "whole", tmp_path / "parts")
    assert list(load([tmp_path / "parts"]).summary) == ["train", "train, life 2"]


def test_what_a_step_took_survives_kills(toys: ModuleType, model: Path, tmp_path: Path) -> None:
    """However often a run is killed while it trains on its deliveries again."""
    out, path = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    config = dataclasses.replace(CONFIG, steps=5, eval_every=0, checkpoint_every=100)
    run(dataclasses.replace(config, steps=4), out, model=model, prompts=toys.ToyPrompts())
    shutil.rmtree(out / "checkpoints")  # all is trained on again
    lines = read_metrics(path)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))  # killed before it wrote the last one

    def killed(what: str, values: Any) -> None:
        if what == "step" and values["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, out, resume=True, model=model, prompts=toys.ToyPrompts(), progress=killed)
    assert read_metrics(path) == lines[:3]
    run(config, out, resume=True, model=model, prompts=toys.ToyPrompts())
    again = read_metrics(path)
    assert again[:3] == lines[:3]
    assert again[3] == lines[3] | {"ledger": None, "seconds": None}
    assert again[4]["seconds"]["wall"] > 0


def kills(tmp_path: Path, strategy: str, number: int, seed: int) -> dict[str, int]:
    command = [sys.executable, str(WORKER), str(tmp_path), strategy, str(number), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.rpartition("Loading weights")[2][-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("strategy", ["sync", "token-budget:tokens=50"])
def test_kills(strategy: str, tmp_path: Path) -> None:
    assert kills(tmp_path, strategy, 6, seed=1)["kills"] >= 6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync", "token-budget:tokens=50"])
def test_many_kills(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = kills(tmp_path, strategy, 40, seed=2)
    with capsys.disabled():
        print(f"\n{strategy}: {', '.join(f'{name}: {number}' for name, number in found.items())}")
    assert min(found[f"kills by {way}"] for way in ("time", "event", "file")) >= 5
    assert found["lives that left deliveries"] >= 10


# ---- what it refuses


def test_directories_are_not_mixed_up(toys: ModuleType, model: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, steps=1, eval_every=0)
    prompts: Any = toys.ToyPrompts()
    run(config, tmp_path / "run", model=model, prompts=prompts)
    with pytest.raises(ValueError, match="holds a run; --resume"):
        run(config, tmp_path / "run", model=model, prompts=prompts)
    other = dataclasses.replace(config, learning_rate=2e-2)
    with pytest.raises(ValueError, match=r"other settings: learning_rate was 0\.01 and is 0\.02"):
        run(other, tmp_path / "run", resume=True, model=model, prompts=prompts)
    other = dataclasses.replace(config, eval_prompts=config.eval_prompts + 1)  # what is held out is not trained on
    with pytest.raises(ValueError, match="other settings: eval_prompts"):
        run(other, tmp_path / "run", resume=True, model=model, prompts=prompts)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        run(config, tmp_path / "run", resume=True, model=model, prompts=prompts)


def test_a_store_that_went_back(toys: ModuleType, model: Path, tmp_path: Path) -> None:
    import shutil

    config = dataclasses.replace(CONFIG, steps=1, eval_every=0)
    run(config, tmp_path / "run", model=model, prompts=toys.ToyPrompts())
    shutil.rmtree(tmp_path / "run" / "store")
    with pytest.raises(StoreError, match="was exchanged or went back"):
        run(config, tmp_path / "run", resume=True, model=model, prompts=toys.ToyPrompts())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"strategy": "nonesuch"}, "nonesuch"),
        ({"loss": "nonesuch"}, "loss 'nonesuch' is unknown"),
        ({"loss": "dapo:clip_high"}, "write name=value"),
        ({"loss": "dapo:floor=2"}, r"'floor'; its settings: .*clip_high"),
        ({"correction": "tis:floor=2"}, r"'floor'; its settings: .*cap"),
        ({"zero_variance": "drop"}, r'zero_variance must be "train" or "leave_out", not \'drop\''),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0"),
        ({"numerics": "fast", "policy": "exact"}, 'numerics="exact"'),
        ({"lora": 4, "freeze": "norm"}, "freeze with lora"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_bad_settings(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RunConfig(**fields)


@pytest.mark.parametrize("lora", [0, 4])
def test_the_trainer_reads_the_bits_of_the_rollout(lora: int, toys: ModuleType, model: Path, tmp_path: Path) -> None:
    """With the exact policy: of every token that the present weights made, also behind a prefix of older ones, and also
    with adapters, whose merged weights both sides compute with."""
    if lora:
        pytest.importorskip("peft", reason="needs the extra lora")
    config = dataclasses.replace(CONFIG, policy="exact", lora=lora, steps=6, eval_every=0, kl_coef=0.01)
    run(config, tmp_path / "run", model=model, prompts=toys.ToyPrompts())
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    trained = [line for line in lines if line["tokens"]]  # the first iterations complete no group
    assert len(trained) >= 4 and all(line["updated"] for line in trained)
    fresh = [line["max_difference"] for line in trained if line["max_difference"] is not None]
    assert len(fresh) >= 3 and set(fresh) == {0.0}
    assert any(line["staleness"]["max"] for line in trained)
    assert trained[0]["kl"] == 0.0 and trained[-1]["kl"] > 0
