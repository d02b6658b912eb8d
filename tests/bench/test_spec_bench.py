"""`longtail bench spec`: what it counts, by hand; that a changed token is found; its tables and options. No times."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from longtail.bench import spec_bench, spec_bench_tables, spec_index_bench
from longtail.bench.cli import app
from longtail.bench.engine_bench import BenchFailed, ratios
from longtail.bench.spec_bench import SpecBenchConfig
from longtail.bench.spec_oracle import Oracle
from longtail.events import Event
from longtail.partial_rollout.engines.native import verification
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.drafter import DraftRequest
from longtail.spec_decode.suffix_drafter import group_drafter
from longtail.version import PolicyVersion

NEW = 20
pytestmark = pytest.mark.usefixtures("threads_as_before")


@pytest.fixture(scope="module")
def settings(tiny_task_model: Path) -> dict[str, Any]:
    sizes = {"batches": (1, 5), "new_tokens": NEW, "group_size": 4, "repeats": 2, "threads": 1}
    return {"model": tiny_task_model, "tasks": "arithmetic", **sizes}


@pytest.fixture(scope="module")
def result(settings: dict[str, Any]) -> dict[str, Any]:
    config = SpecBenchConfig(**settings, drafters=("group", "oracle:1", "garbage"), lengths=(2,))
    return spec_bench.run(config, lambda text: None)


def make_sample(name: str, output: list[int]) -> Sample:
    params = SamplingParams(max_tokens=5)
    sample = Sample(id=name, group_id="g", index=0, prompt_ids=(1,), params=params, seed=0)
    for token in output:
        sample.append(token, 0.0, PolicyVersion(0), "test", "computed")
    return sample


# ---- a real run


def test_every_contestant_runs_at_every_batch_size(result: dict[str, Any]) -> None:
    names = ("group", "oracle:1", "garbage")
    labels = ["off", *names, *(f"{name}, always 2" for name in names)]
    assert [(row["batch"], row["label"]) for row in result["rows"]] == [(b, label) for b in (1, 5) for label in labels]
    off = {row["batch"]: row["per_repeat"] for row in result["rows"] if row["label"] == "off"}
    for row in result["rows"]:
        assert len(row["per_repeat"]) == 2 and min(row["per_repeat"]) > 0
        assert row["speedup"] == ratios(off[row["batch"]], row["per_repeat"])
        assert row["tokens"] == row["batch"] * (NEW - 1)
        assert row["full_batch_speedup"]["p20"] > 0
    again = json.loads(json.dumps(result))
    assert again["machine"]["threads"] == 1 and again["settings"]["lengths"] == [2]


def test_counts_by_hand(result: dict[str, Any]) -> None:
    """19 tokens after the first. Two drafts, always right: six steps of three tokens, and a last one that has no room
    for a draft. Always wrong: 19 steps, all with two drafts but the last two, with one and none."""
    rows = {(row["batch"], row["label"]): row for row in result["rows"]}
    for batch in (1, 5):
        off = rows[batch, "off"]
        assert off["steps"] == 2 * 19 and off["steps_with_drafts"] == 0.0
        assert off["acceptance_length"] is off["draft_us"] is off["verify_seconds"] is None
        right = rows[batch, "oracle:1, always 2"]
        assert right["steps"] == 2 * 7 and right["acceptance_length"] == 3.0 and right["acceptance"] == 1.0
        assert right["accepted_per_token"] == right["drafted_per_token"] == pytest.approx(12 / 19)
        assert right["steps_with_drafts"] == pytest.approx(6 / 7)
        wrong = rows[batch, "garbage, always 2"]
        assert wrong["steps"] == 2 * 19 and wrong["acceptance_length"] == 1.0
        assert wrong["accepted_per_token"] == wrong["acceptance"] == 0.0
        assert wrong["drafted_per_token"] == pytest.approx((17 * 2 + 1) / 19)
        assert wrong["draft_us"] > 0 and wrong["verify_seconds"]["p50"] > 0
    assert sum(rows[1, "garbage"]["reasons"].values()) == 2 * 18  # in the last step there is nothing to decide


def test_a_tail_has_siblings_that_are_done(settings: dict[str, Any]) -> None:
    """Batch 1 of a group of 4: the drafter knows the other three in full before it is asked, and not the one that
    runs."""
    drafters: list[Spy] = []

    class Spy:
        name = "spy"

        def __init__(self) -> None:
            self.drafter = group_drafter()
            self.known: list[tuple[str, int]] = []
            self.done: list[str] = []
            self.asked: dict[str, tuple[list[tuple[str, int]], list[str]]] = {}
            drafters.append(self)

        def propose(self, requests: Any) -> Any:
            for request in requests:
                self.asked.setdefault(request.sample.id, (self.known[:], self.done[:]))
            return self.drafter.propose(requests)

        def observe(self, sample: Sample, num_new: int) -> None:
            self.known.append((sample.id, num_new))
            self.drafter.observe(sample, num_new)

        def forget(self, sample_id: str) -> None:
            self.done.append(sample_id)
            self.drafter.forget(sample_id)

    config = SpecBenchConfig(**settings | {"batches": (1,)}, drafters=("spy",), lengths=(1,))
    spec_bench.run(config, lambda text: None, {"spy": lambda engine: Spy()})
    asked = [spy for spy in drafters if spy.asked]
    assert len(asked) == 2 * (1 + 2)  # led and fixed; a warm-up and two repeats
    running = {name for spy in asked for name in spy.asked}
    assert running == {"group 0/0", "group 1/0"}  # each repeat takes another group
    for spy in asked:
        ((name, (known, done)),) = spy.asked.items()
        siblings = [f"{name[:-1]}{i}" for i in (1, 2, 3)]
        assert known[:3] == [(sibling, NEW) for sibling in siblings]
        assert done == [*siblings, name]  # itself as it came: what was known of an earlier one by its name is forgotten
        assert {other for other, _ in known[3:]} <= {name}


def test_a_verification_that_changes_tokens_has_no_speed(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def accepts_all(drafts: torch.Tensor, sampled: torch.Tensor, cu_drafts: torch.Tensor) -> Any:
        return SimpleNamespace(accepted=cu_drafts.diff())

    monkeypatch.setattr(verification, "verify_drafts", accepts_all)
    config = SpecBenchConfig(**settings, drafters=("garbage",), lengths=(2,))
    with pytest.raises(BenchFailed, match=r"garbage(, always 2)?: sample group 0/0 has other tokens than without"):
        spec_bench.run(config, lambda text: None)


def test_check_streams_by_hand() -> None:
    streams = {"a": [5, 6, 7, 8, 9, 10]}
    spec_bench.check_streams("x", [make_sample("a", [5, 6, 7, 8, 9])], streams)  # max_tokens is 5
    for made, place in (([5, 6, 0, 8, 9], 2), ([5, 6, 7, 8], 4), ([5, 6, 7, 8, 9, 10], 5)):
        with pytest.raises(BenchFailed, match=f"from output position {place} on"):
            spec_bench.check_streams("x", [make_sample("a", made)], streams)


def test_the_rate_while_all_decode_by_hand() -> None:
    """Two steps of two sequences, 2 and 3 tokens in 0.5 and 1.5 s; a last one of one sequence does not count."""
    figures = ((2, 2, 0.5), (2, 3, 1.5), (1, 1, 9.0))
    steps = [Event("step", 0.0, d, num_seqs=seqs, num_output_tokens=made) for seqs, made, d in figures]
    assert spec_bench.SpecRun(11.0, steps).rate(2) == 5 / 2.0


# ---- oracles


def test_an_oracle_is_right_as_often_as_it_says() -> None:
    """20,000 tokens at 0.8: 5 standard deviations, a false alarm in a million seeds."""
    stream = np.random.default_rng(0).integers(0, 50, 20_000).tolist()
    (draft,) = Oracle("o", {"a": stream}, 0.8, 50).propose([DraftRequest(make_sample("a", []), 20_000)])
    same = [a == b for a, b in zip(draft.tokens, stream, strict=True)]
    assert abs(np.mean(same) - 0.8) < 5 * (0.8 * 0.2 / 20_000) ** 0.5
    assert all(0 <= token < 50 for token in draft.tokens)


def test_an_oracle_says_the_same_wherever_it_starts() -> None:
    stream = list(range(5))
    oracle = Oracle("o", {"a": stream}, 0.5, 50, seed=3)
    (whole,) = oracle.propose([DraftRequest(make_sample("a", []), 9)])
    assert len(whole) == 5  # behind the end of what it knows it says nothing
    (part,) = oracle.propose([DraftRequest(make_sample("a", stream[:2]), 2)])
    assert part.tokens == whole.tokens[2:4]
    assert oracle.propose([DraftRequest(make_sample("b", []), 3)])[0].tokens == []
    for right, expected in ((1.0, stream), (0.0, [1, 2, 3, 4, 0])):
        (draft,) = Oracle("o", {"a": stream}, right, 5).propose([DraftRequest(make_sample("a", []), 5)])
        assert draft.tokens == expected


# ---- what must hold, in figures and in words


def row(label: str, batch: int, speedup: float, acceptance: float | None = 0.5, expected: float = 1.35) -> dict:
    speeds = {"p20": 0.0, "p50": speedup, "p80": 9.0}
    figures = {"acceptance": acceptance, "break_even_acceptance": 0.2, "speedup": speeds}
    shares = {"steps_with_drafts": 0.4, "silent": 0.55, "expected_speedup": expected}
    return {"label": label, "drafter": label.partition(",")[0], "batch": batch, "length": None, **figures, **shares}


def test_must_hold_by_hand() -> None:
    fixed = row("group, always 4", 32, 0.2) | {"length": 4}  # a fixed length may be slow: nothing is promised of it
    off = row("off", 1, 1.0, None) | {"break_even_acceptance": None, "expected_speedup": None}
    rows = [off, row("group", 1, 1.4), row("garbage", 1, 0.98, 0.0), fixed, row("ngram", 1, 1.1, expected=1.15)]
    held = spec_bench.must_hold([*rows, row("group", 4, 1.2), row("group", 16, 0.99)])
    assert held["floor"] == {"label": "garbage", "batch": 1, "speedup": 0.98, "holds": True}
    assert [(t["label"], t["batch"], t["in_reach"], t["holds"]) for t in held["tail"]] == [
        ("group", 1, True, True), ("ngram", 1, False, False), ("group", 4, True, False)
    ]  # fmt: skip
    said = "acceptance 0.50 against a break-even of 0.20; drafts in 40% of the steps, nothing to say in 55%: "
    assert spec_bench_tables.findings({"must_hold": held}) == [
        "Slowest under the controller: garbage at batch 1, 0.980 x (holds: at least 0.97 x)",
        f"Tail, batch 1, group: {said}1.35 x expected, 1.40 x measured (holds: at least 1.3 x)",
        f"Tail, batch 1, ngram: {said}1.15 x expected, 1.10 x measured (1.3 x is out of reach)",
        f"Tail, batch 4, group: {said}1.35 x expected, 1.20 x measured (FAILS: at least 1.3 x)",
    ]
    assert not spec_bench.must_hold([row("garbage", 32, 0.96)])["floor"]["holds"]


def test_steps_without_drafts_count_by_hand() -> None:
    """Two sequences, a second a step without drafts. One step in four has drafts, takes 1.5 s beside 0.1 s to make
    them, and brings two tokens more: 1.25 times the tokens in 0.75 + 1.5 / 4 + 0.1 / 4 of the time. A stall of a step
    without drafts is no cost of drafting."""
    off = [Event("step", 0.0, d, num_seqs=2) for d in (1.0, 0.9, 1.1)]
    drafted = Event("step", 0.0, 1.6, num_seqs=2, num_draft_tokens=4, num_accepted_tokens=2, draft_seconds=0.1)
    silent = [Event("step", 0.0, d, num_seqs=2) for d in (1.0, 1.0, 9.0)]
    assert spec_bench.expected_speedup(2, [drafted, *silent], off) == pytest.approx(1.25 / (0.75 + 0.375 + 0.025))
    assert spec_bench.expected_speedup(2, [drafted], off) == pytest.approx(2.0 / 1.6)
    assert spec_bench.expected_speedup(2, silent, off) == 1.0


def test_the_tables_show_every_row(result: dict[str, Any]) -> None:
    console = Console(width=200)
    sizes = {"groups": 2, "group_size": 2, "tokens_per_sample": 200, "measured_tokens": 8}
    with console.capture() as capture:
        console.print(spec_bench_tables.table(json.loads(json.dumps(result))))
        console.print(spec_bench_tables.index_table(spec_index_bench.spec_index_bench(**sizes)))
    text = capture.get()
    for expected in ("off", "oracle:1, always 2", "garbage", "speed-up", "all", "3.00", "bytes / token", "1,000"):
        assert expected in text, text


# ---- settings and the command


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batches", ()),
        ("batches", (4, 4)),
        ("batches", (0,)),
        ("lengths", (0,)),
        ("lengths", (2, 2)),
        ("drafters", ()),
        ("drafters", ("group", "group")),
        ("drafters", ("off",)),
        ("new_tokens", 1),
        ("repeats", 0),
        ("group_size", 0),
        ("threads", 0),
        ("max_drafts", 0),
        ("temperature", -1.0),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SpecBenchConfig(model="x", **{field: value})


@pytest.mark.parametrize(
    ("name", "message"), [("grp", "did you mean 'group'"), ("oracle:2", "oracle:P"), ("oracle", "oracle:P")]
)
def test_a_wrong_drafter_is_named(settings: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_bench.run(SpecBenchConfig(**settings, drafters=(name,)), lambda text: None)


def test_a_model_too_short_for_the_run_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="512 positions"):
        spec_bench.run(SpecBenchConfig(**settings | {"new_tokens": 500}), lambda text: None)


def test_the_command(tiny_task_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(spec_index_bench.spec_index_bench, groups=2, group_size=2, tokens_per_sample=99, measured_tokens=8)
    monkeypatch.setattr(spec_index_bench, "spec_index_bench", small)
    out = tmp_path / "out" / "spec.json"
    arguments = ["bench", "spec", "--model", str(tiny_task_model), "--tasks", "arithmetic", "--drafters"]
    arguments += ["group>ngram,garbage>oracle:.5", "--lengths", "1, 3", "--batches", "2", "--tokens", "8"]
    arguments += ["--repeats", "1", "--temperature", "1.0", "--threads", "1", "--index", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "180"})
    assert result.exit_code == 0, (result.output, result.exception)
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert printed["settings"]["temperature"] == 1.0 and len(printed["rows"]) == 1 + 2 * 3
    assert printed["index"]["samples"] == 4
    for text in ("group>ngram, always 3", "Slowest under the controller", "The group index"):
        assert text in result.stderr
    wrong = CliRunner().invoke(app, ["bench", "spec", "--model", str(tiny_task_model), "--batches", "1,x"])
    assert isinstance(wrong.exception, ValueError) and "batches" in str(wrong.exception)
