"""`longtail train` from the command line: files of prompts, graders by name, pictures, errors of one line."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from longtail.bench.cli import app
from longtail.bench.train_config import RunConfig
from longtail.bench.train_plot import curves, sentence
from longtail.trainer_adapter.metrics import read_metrics


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("train_toys")


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture
def options(toys: ModuleType, tmp_path: Path) -> list[Any]:
    toys.save_model(tmp_path / "model")
    lines = [json.dumps({"prompt_ids": [3 + i % 20, 7]}) for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    given = {
        "model": tmp_path / "model",
        "task": tmp_path / "prompts.jsonl",
        "grader": "train_toys.low",
        "steps": 2,
        "prompts": 2,
        "group-size": 4,
        "max-tokens": 8,
        "threads": 1,
        "kv-cache-bytes": 1 << 24,
        "policy": "transformers",
        "learning-rate": 1e-2,
        "eval-prompts": 4,
        "eval-every": 1,
        "checkpoint-every": 1,
    }
    return [part for name, value in given.items() for part in (f"--{name}", value)]


def test_first_screen() -> None:
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert shown.exit_code == 0
    for word in ("rollout, grade, update", "--resume", "--strategy", "--correction", "plot"):
        assert word in shown.stdout
    assert "train" in CliRunner().invoke(app, ["--help"]).stdout


def test_options_are_settings() -> None:
    """Each field of RunConfig is an option with the same default."""
    import inspect

    from longtail.bench.train_cli import train

    defaults = {name: p.default for name, p in inspect.signature(train).parameters.items()}
    for name, field in RunConfig.__dataclass_fields__.items():
        assert defaults[name] == field.default, name


def test_run_resume_report_plot(options: list[Any], tmp_path: Path) -> None:
    import transformers

    out = tmp_path / "first"
    done = call(*options, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["config"]["task"].endswith("prompts.jsonl")
    refused = call(*options, "--out", out)
    assert isinstance(refused.exception, ValueError) and "--resume goes on with it" in str(refused.exception)
    more = [*options, "--steps", 4]
    assert call(*more, "--out", out, "--resume").exit_code == 0
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [line["step"] for line in read_metrics(out / "eval.jsonl")] == [0, 1, 2, 3, 4]
    assert CliRunner().invoke(app, ["report", str(out), "--out", str(out / "again.html")]).exit_code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    assert not model.model.embed_tokens.weight.isnan().any()
    budget = [*more, "--strategy", "token-budget:tokens=20", "--loss", "dapo", "--correction", "tis:cap=2"]
    assert call(*budget, "--out", tmp_path / "second").exit_code == 0
    picture = tmp_path / "pictures" / "learning.png"
    drawn = call("plot", out, tmp_path / "second", "--out", picture)
    assert drawn.exit_code == 0, drawn.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    curve = curves([out])["first"]
    generated = [line["generated"] for line in read_metrics(out / "metrics.jsonl")]
    assert curve.tokens == [sum(generated[:k]) for k in range(5)]
    assert f"{sum(generated):,d} tokens generated" in sentence("first", curve)
    assert isinstance(call("plot", tmp_path).exception, ValueError)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--grader", "nonesuch"], "none is called 'nonesuch'"),
        (["--grader", "math.pi"], "must be a function of a request"),
        (["--task", "nonesuch.jsonl"], "cannot be read"),
        (["--task", "add"], "needs a tokenizer"),
        (["--eval-prompts", "40"], "held out; give more"),
        (["--numerics", "precise"], "numerics must be one of"),
        (["--drafter", "nonesuch"], "nonesuch"),
    ],
)
def test_bad_input(extra: list[str], says: str, options: list[Any], tmp_path: Path) -> None:
    done = call(*options, "--out", tmp_path / "out", *extra)
    assert isinstance(done.exception, ValueError) and says in str(done.exception)


def test_plot_of_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone is no directory"):
        curves([tmp_path / "gone"])
