"""`longtail bench staleness` at small sizes, its tables and its picture; and the training behind it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from longtail.bench.cli import app
from longtail.bench.staleness_versions import Training, probe, relative_change
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.sample import Group
from longtail.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("threads_as_before")


def test_one_run(tiny_task_model: Path, tmp_path: Path) -> None:
    picture, out = tmp_path / "made" / "staleness.png", tmp_path / "out" / "staleness.json"
    arguments = ["bench", "staleness", "--model", str(tiny_task_model), "--lr", "1e-4,1e-3", "--ages", "1,2"]
    arguments += ["--contexts", "2", "--stale-tokens", "10", "--new-tokens", "6", "--tasks", "chain_sum"]
    arguments += ["--live", "2", "--lengths", "20", "--repeats", "1", "--threads", "1"]
    arguments += ["--picture", str(picture), "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, (result.output, result.exception)
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert [(row["lr"], row["history"], row["age"]) for row in printed["drift"]] == [
        (lr, *key) for lr in (1e-4, 1e-3) for key in (("age", 1), ("age", 2), ("mixed", 2))
    ]
    for text in ("Drift of kept KV", "What a trainer meets", "bfloat16", "by distance", "Time of recompute"):
        assert text in result.stderr
    assert "KV 2 versions old is off by" in result.stderr and "takes as long as decoding" in result.stderr
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lr", "fast"], "lr: 'fast' is not numbers"),
        (["--ages", "1.5"], "ages: '1.5' is not numbers"),
        (["--picture", "a.gif"], "picture must end in .png"),
        (["--lr", ""], "lr must name"),
    ],
)
def test_bad_options(tiny_task_model: Path, arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["bench", "staleness", "--model", str(tiny_task_model), *arguments])
    assert isinstance(result.exception, ValueError) and named in str(result.exception)


# --- the training


def sampled(path: Path) -> Group:
    engine = NativeEngine(path, threads=1, max_num_seqs=2, kv_cache_bytes=1 << 24)
    group = Group.from_prompt("g", range(3, 20), SamplingParams(n=2, temperature=1.0, max_tokens=8, seed=1))
    engine.add(group.samples)
    while engine.has_work:
        engine.step()
    return group


def margin(model: torch.nn.Module, group: Group) -> float:
    """Log-probability of the first sample less that of the second."""
    found = []
    for s in group.samples:
        ids = torch.tensor([[*s.prompt_ids, *s.output_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(s.prompt_ids) - 1 : -1].log_softmax(-1)
        found.append(float(logits.gather(1, torch.tensor(s.output_ids)[:, None]).sum()))
    return found[0] - found[1]


def test_training_prefers_the_better_sample_and_starts_over(tiny_task_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_task_model, dtype=torch.float32)
    start = {name: w.detach().clone() for name, w in model.named_parameters()}
    group = sampled(tiny_task_model)
    training = Training(model, [group], [[1.0, 0.0]])
    assert all(torch.equal(w, start[name]) for name, w in model.named_parameters())  # warming up moves nothing
    margins, made = [], []
    for rate in (1e-3, 1e-4, 1e-3):
        for version, weights in enumerate(training.versions(rate, 2)):
            made.append({name: w.clone() for name, w in weights.items()})
            margins.append(margin(model, group))
            if version == 0:
                assert all(torch.equal(w, start[name]) for name, w in weights.items())
    assert margins[0] < margins[4] < margins[1] < margins[2] and margins[0] < margins[5] < margins[2]
    assert all(torch.equal(w, made[2][name]) for name, w in made[8].items())  # the moments started over as well
    one, two = (relative_change(probe(made[0]), probe(made[i])) for i in (4, 1))
    assert 0 < one < 1e-2 and two == pytest.approx(10 * one, rel=0.05)  # AdamW moves by the learning rate


def test_probe_measures_by_some_of_the_weights() -> None:
    before = {"a": torch.randn(300, 70), "b": torch.randn(5000)}
    after = {name: w + 0.01 * torch.randn_like(w) for name, w in before.items()}
    whole = relative_change(probe(before), probe(after))
    exact = sum(float((after[n] - before[n]).square().sum()) for n in before)
    assert whole == pytest.approx((exact / sum(float(w.square().sum()) for w in before.values())) ** 0.5, rel=1e-5)
    some = probe(before, 4000)
    assert 4000 <= len(some) <= 4002 and torch.equal(some, probe(before, 4000))
    # 4,000 weights estimate a ratio of norms to about 2 %; 10 % is five times that
    assert relative_change(some, probe(after, 4000)) == pytest.approx(whole, rel=0.1)
