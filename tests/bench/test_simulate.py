"""`longtail simulate`: cluster files, runs by hand and against the analysis of their trace, drafting, the command."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from longtail.bench import analysis, simulate_published, simulate_scale
from longtail.bench.cli import app
from longtail.bench.cluster_spec import CONFIGS, ClusterSpec, Drafting, Seconds, Speculation, read_spec, spec_of
from longtail.bench.cost_model import CostModel, StepModel
from longtail.bench.simulate import run as run_one
from longtail.bench.simulate import simulate
from longtail.bench.simulate_cli import table
from longtail.bench.workload import Workload, parse_workload
from longtail.partial_rollout.engines.simulated import LinearCost
from longtail.partial_rollout.strategies import STRATEGIES


def workload(*groups: list[int]) -> Workload:
    lengths = [tokens for group in groups for tokens in group]
    return Workload(
        output_tokens=np.array(lengths, np.int32),
        prompt_tokens=np.ones(len(lengths), np.int32),
        group_starts=np.cumsum([0, *map(len, groups)]),
        capped=np.zeros(len(lengths), bool),
        label="by hand",
    )


def one_second_a_pass(tmp_path: Path, count: int, slots: int, groups: int, **fields: object) -> ClusterSpec:
    CostModel(step=StepModel(base=1.0), source="fitted").write(tmp_path / "cost.toml")
    kinds = [{"count": count, "slots": slots, "cost": "cost.toml"}]
    batch = {"groups": groups, "group_size": 1, "iterations": 1}
    return spec_of({"name": "by hand", "batch": batch, "instances": kinds, **fields}, tmp_path)


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 1)])
def test_makespan_by_hand(tmp_path: Path, count: int, slots: int) -> None:
    """A second a pass, two slots on one instance or on two: 10 | 3, 4. Batches of two and one: 10 s, train 5 s, update
    1 s, 4 s. The last 10 % of two finishes begin with the last, so that there is no tail."""
    seconds = {"train": 5.0, "update": 1.0}
    spec = one_second_a_pass(tmp_path, count, slots, 2, seconds=seconds)
    made = simulate(spec, workload([10], [3], [4]), ["sync"]).runs["sync"]
    assert made.makespan == 10 + 5 + 1 + 4 and made.iterations == 2
    assert (made.tokens_trained, made.tokens_wasted, made.staleness) == (17, 0, {"0": 17})
    assert made.bubble_share == pytest.approx(1 - 17 / (2 * 14))
    one_batch = one_second_a_pass(tmp_path, count, slots, 3)
    assert simulate(one_batch, workload([10], [3], [4]), ["sync"]).runs["sync"].makespan == 10


def test_training_beside_generation_by_hand(tmp_path: Path) -> None:
    """Asynchronous, one group an iteration: a (3) is trained from 3 to 8 while b (10) goes on until 10."""
    spec = one_second_a_pass(tmp_path, 1, 2, 1, seconds={"train": 5.0}, kv_on_update="keep")
    made = simulate(spec, workload([3], [10]), ["bounded-staleness"]).runs["bounded-staleness"]
    assert made.makespan == 10 and made.staleness == {"0": 3 + 2, "1": 8}


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_numbers_are_those_of_the_trace(name: str) -> None:
    """The same from the samples as `analysis.summary` finds in the events."""
    spec = dataclasses.replace(read_spec("demo"), batch=dataclasses.replace(read_spec("demo").batch, groups=8))
    load = parse_workload("lognormal(median=60, sigma=1.0, cap=600, icc=0.4)", groups=40, group_size=8)
    result = simulate(spec, load, [name])
    made, told = result.runs[name], analysis.summary(result.frame())[name]
    assert told["complete"] and told["tokens_unaccounted"] == 0
    for own, other in (
        ("makespan", "wall_seconds"),
        ("tokens_trained", "tokens_trained"),
        ("tokens_generated", "tokens_generated"),
        ("samples_trained", "samples_trained"),
        ("staleness_mean", "staleness_mean"),
        ("staleness_max", "staleness_max"),
        ("seconds_per_1000_tokens", "seconds_per_1000_tokens"),
    ):
        assert getattr(made, own) == pytest.approx(told[other], rel=1e-9), own
    if not STRATEGIES[name].keeps_running:  # whose slots are held while the trainer works, which is in no iteration
        assert made.bubble_share == pytest.approx(told["bubble_share"], abs=1e-6)
    if name != "tail-rounds":  # of which surplus samples finish too
        assert made.tail_seconds == pytest.approx(told["tail_seconds"], rel=1e-6)


def test_the_same_again() -> None:
    spec, load = read_spec("demo"), parse_workload("lognormal(median=60, sigma=1.0, cap=600)", groups=128, group_size=8)
    runs = [simulate(spec, load, ["over-issue"], traced=0).runs["over-issue"].as_dict() for _ in range(2)]
    for run in runs:
        del run["host_seconds"]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["sync", "bounded-staleness"])
def test_the_cost_of_a_sample_does_not_grow_with_their_number(name: str) -> None:
    """Calls of Python functions a sample, which are the same in every run, where a time is not. All of them wait from
    the start, as where a whole epoch is submitted: with four times the samples there are four times the iterations, and
    were each to ask all that wait for their order, that would be a quarter of the calls again."""
    spec = dataclasses.replace(simulate_scale.spec(16, 16), seconds=Seconds(train=1.0))
    calls: list[float] = []
    for groups in (100, 400):
        load = parse_workload("lognormal(median=2000, sigma=1.0, cap=32768)", groups=groups, group_size=8)
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            run_one(spec, load, name, at_once=True)
        finally:
            sys.setprofile(None)
        calls.append(count / len(load))
    assert calls[1] < 1.15 * calls[0], calls


def test_the_curve_has_a_row_for_each_size() -> None:
    rows = simulate_scale.curve((160, 80), instances=2)
    assert [row["samples"] for row in rows] == [80, 160]
    for row in rows:
        assert row["us_per_sample"] == pytest.approx(simulate_scale.EVENTS * row["us_per_event"])
        assert row["tokens"] > 0 and len(simulate_scale.line(row)) == len(simulate_scale.HEADER)


def test_drafting_by_hand() -> None:
    """A pass of 1 s + 0.1 s a row. Alone with 4 drafts: 1.5 s for 3 tokens: 0.5 s each. 100 sequences: 11 s without;
    with drafts 51 s for 1.5 tokens: not worth it. In between (linear, 2.25 tokens at 50.5)."""
    step = LinearCost(1.0, 0.0, 0.1)
    drafting = Drafting(step, Speculation(acceptance={1: 3.0, 100: 1.5}, draft_tokens=4))
    assert drafting.seconds(1, 1, 10) == pytest.approx(0.5)
    assert drafting.decode_seconds(1, 10, 7) == pytest.approx(3.5)
    assert drafting.seconds(100, 100, 10) == pytest.approx(11.0)
    assert drafting.acceptance(34) == pytest.approx(2.5)
    assert drafting.seconds(2, 50, 10) == step.seconds(2, 50, 10)


def test_speculation_shortens_the_tail() -> None:
    spec = read_spec("demo")
    load = parse_workload("lognormal(median=200, sigma=1.0, cap=4000)", groups=64, group_size=8)
    quick = dataclasses.replace(spec, speculation=Speculation(acceptance={1: 2.5, 64: 1.5}))
    plain, drafted = (simulate(s, load, ["sync"], traced=0).runs["sync"] for s in (spec, quick))
    assert drafted.tail_seconds < 0.6 * plain.tail_seconds and drafted.tokens_trained == plain.tokens_trained


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda p: p.stem)
def test_bundled_clusters(path: Path) -> None:
    spec = read_spec(path)
    assert spec.kinds() and spec.describe() and spec.workload
    parse_workload(spec.workload, groups=2, group_size=2)
    if path.parent.name == "published":
        assert simulate_published.rows_of(spec)
    assert read_spec(path.relative_to(CONFIGS).with_suffix("")).name == spec.name


GOOD = {
    "name": "x",
    "batch": {"groups": 1, "group_size": 1},
    "instances": [{"count": 1, "slots": 1, "accelerator": "H100", "model": {}}],
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": None}, "name is missing"),
        ({"batch": {"groups": 0, "group_size": 1}}, "batch: groups must be a whole number of at least 1, not 0"),
        ({"batch": {"groups": 1}}, "batch: group_size is missing"),
        ({"batch": 3}, "batch must be a table"),
        ({"instances": []}, "instances is missing"),
        ({"instances": [{"count": 1, "slots": 1}]}, r"instances\[0\]: give either cost"),
        ({"instances": [{"count": 1, "slots": 1, "accelerator": "H100"}]}, r"instances\[0\]: accelerator needs model"),
        ({"instances": [{"count": 1, "slots": 1, "cost": "a.toml", "gpu": 1}]}, r"instances\[0\]: unknown key gpu"),
        ({"seconds": {"train": -1.0}}, "seconds: train must be a finite number of at least 0, not -1.0"),
        ({"seconds": {"trains": 1.0}}, "seconds: unknown key trains"),
        ({"speculation": {"acceptance": {}}}, "speculation: acceptance must be a table"),
        ({"speculation": {"acceptance": {"1": 0.5}}}, "speculation: acceptance.1 must be a finite number"),
        ({"faults": [{"time": 1.0, "instance": 7}]}, r"faults\[0\]: there is no instance 7"),
        ({"kv_on_update": "drop"}, "kv_on_update must be"),
        ({"extra": 1}, "unknown key extra"),
    ],
)
def test_errors_name_the_field(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        spec_of({key: value for key, value in {**GOOD, **change}.items() if value is not None})


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a cluster\.toml, or a bundled one: demo, published/april"):
        read_spec("nowhere")
    (tmp_path / "a.toml").write_text("name =")
    with pytest.raises(ValueError, match=r"a\.toml: not readable as TOML"):
        read_spec(tmp_path / "a.toml")
    with pytest.raises(ValueError, match=r"instances\[0\]: .*nothing.json: there is no such file"):
        instances = [{"count": 1, "slots": 1, "accelerator": "H100", "model": "nothing.json"}]
        spec_of({**GOOD, "instances": instances}, tmp_path).kinds()


def test_every_strategy_is_named_whole_in_80_columns(tmp_path: Path) -> None:
    names = list(STRATEGIES)
    spec = one_second_a_pass(tmp_path, 1, 4, 3)
    made = simulate(spec, workload([10], [3], [4]), ["sync"])
    runs = {name: dataclasses.replace(made.runs["sync"], strategy=name) for name in names}
    console = Console(width=80, file=io.StringIO())
    console.print(table(dataclasses.replace(made, runs=runs)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and all(name in text for name in names)


def test_the_command() -> None:
    short = "lognormal(median=50, sigma=1.0, cap=500)"
    arguments = ["simulate", "--workload", short, "--strategies", "sync,over-issue", "--iterations", "2", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.strip().splitlines()[-1])
    assert said["headline"].startswith("Under sync ") and list(said["runs"]) == ["sync", "over-issue"]


def test_what_the_command_writes(tmp_path: Path) -> None:
    short = "lognormal(median=50, sigma=1.0, cap=500)"
    arguments = ["simulate", "--workload", short, "--strategies", "sync", "--iterations", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, repr(result.exception)
    assert list(json.loads((tmp_path / "summary.json").read_text())["runs"]) == ["sync"]
    assert (tmp_path / "trace.parquet").is_file() and (tmp_path / "report.html").is_file()
