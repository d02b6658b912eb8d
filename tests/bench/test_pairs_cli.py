"""`longtail pairs` and `longtail dpo`: from the groups of a store to a trained model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.partial_rollout.store_helpers import finish
from typer.testing import CliRunner, Result

from longtail import Group, SampleStore, SamplingParams
from longtail.bench import dpo
from longtail.bench.cli import app
from longtail.errors import DirectoryLocked
from longtail.trainer_adapter.dpo_trainer import DPOConfig
from longtail.trainer_adapter.pair_files import read_pairs, write_pairs
from longtail.trainer_adapter.preferences import Pair
from longtail.version import PolicyVersion

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def fine(*arguments: object) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def numbers(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout.splitlines()[-1])


def graded(name: str, rewards: list[float | None], tokens: int = 5) -> Group:
    group = Group.from_prompt(name, [5, 6, len(name)], SamplingParams(n=len(rewards)))
    for i, (sample, reward) in enumerate(zip(group.samples, rewards, strict=True)):
        for t in range(tokens + i):
            sample.append(10 + (7 * i + t) % 90, -1.0, PolicyVersion(2), "native", "computed")
        finish(sample)
        sample.reward = reward
    return group


def build(directory: Path) -> None:
    """Two deliveries (a and equal; b), one complete group (c) and one that is not (open), one thrown away."""
    with SampleStore(directory) as store:
        deliveries: list[dict[str, list[float | None]]]
        deliveries = [{"a": [1.0, 0.0, 0.5], "equal": [1.0, 1.0]}, {"b": [0.0, 0.2, 1.0, 0.9]}]
        for groups in deliveries:
            add(store, groups)
            store.hand_over(store.complete())
        add(store, {"gone": [0.0, 1.0]})
        store.discard(list(store), "stale")
        add(store, {"c": [0.0, None, 1.0]})
        store.add([Group.from_prompt("open", [5], SamplingParams(n=2))])


def add(store: SampleStore, groups: Mapping[str, list[float | None]]) -> None:
    for name, rewards in groups.items():
        made = graded(name, rewards)
        store.add([Group.from_prompt(name, made.samples[0].prompt_ids, SamplingParams(n=len(rewards)))])
        (kept,) = [group for group in store if group.id == name]
        for sample, source in zip(kept.samples, made.samples, strict=True):
            for token in source.output_ids:
                sample.append(token, -1.0, PolicyVersion(2), "native", "computed")
            finish(sample)
            sample.reward = source.reward
        store.watch(kept.samples)
        store.commit()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    build(tmp_path / "store")
    return tmp_path / "store"


def groups_of(path: Path) -> list[str | None]:
    return [pair.group for pair in read_pairs(path)]


def test_pairs_of_a_store(directory: Path, tmp_path: Path) -> None:
    """Delivered groups and complete ones; not what was thrown away."""
    out = tmp_path / "pairs.jsonl"
    result = fine("pairs", "from", directory, "--out", out, "--json")
    assert groups_of(out) == ["a", "b", "c"]
    found = numbers(result)
    assert {name: found[name] for name in ("pairs", "groups", "candidates")} == {
        "pairs": 3,
        "groups": 5,
        "candidates": 3 + 6 + 1,
    }
    assert found["groups_without"] == {"all rewards are equal": 1, "it is not complete": 1}
    assert found["samples_left_out"] == {"it has no reward": 1}
    first = read_pairs(out)[0]
    assert first.chosen is not None and first.rejected is not None
    assert (first.chosen.sample, first.rejected.sample, first.chosen.versions) == ("a/0", "a/1", (2,))
    for text in ("none: all rewards are equal", "pairs that the rules allow", "chosen is the shorter one"):
        assert text in result.stderr, text


def test_rules_reach_the_pairs(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "pairs.parquet"
    fine("pairs", "from", directory, "--out", out, "--rule", "all_pairs", "--per-group", 2, "--margin", 0.5)
    assert groups_of(out) == ["a", "a", "b", "b", "c"]
    fine("pairs", "from", directory, "--out", out, "--after", 1)
    assert groups_of(out) == ["b", "c"]
    fine("pairs", "from", directory, "--out", out, "--length-ratio", 1.3)
    assert groups_of(out) == ["a", "b"]  # of c the lengths are 5 and 7


def test_pruned_deliveries_are_named(directory: Path, tmp_path: Path) -> None:
    with SampleStore(directory) as store:
        store.prune(1)
    result = fine("pairs", "from", directory, "--out", tmp_path / "p.jsonl")
    assert "deliveries up to 1 were pruned" in result.stderr
    assert groups_of(tmp_path / "p.jsonl") == ["b", "c"]


def test_a_store_without_a_pair_writes_nothing(directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    result = call("pairs", "from", directory, "--out", out, "--margin", 2)
    assert isinstance(result.exception, ValueError) and "no pair" in str(result.exception)
    assert not out.exists()
    for arguments, says in ((("--after", 9), "the last delivery is 2, not 9"), (("--rule", "best"), "rule 'best'")):
        result = call("pairs", "from", directory, "--out", out, *arguments)
        assert result.exit_code and says in str(result.exception)


# ---- check


def verdicts(path: Path, rows: Sequence[tuple[str, str] | None]) -> Path:
    with path.open("w") as file:
        for i, pair in enumerate(rows):
            row: dict[str, Any] = {"prompt_ids": [i], "chosen_ids": [1, 2], "rejected_ids": [3], "reason": "r"}
            if pair is not None:
                row["verdict_ab"], row["verdict_ba"] = pair
            file.write(json.dumps(row) + "\n")
    return path


def test_check_sets_aside_what_a_judge_did_not_confirm(tmp_path: Path) -> None:
    path = verdicts(tmp_path / "p.jsonl", [*[("A", "B")] * 20, *[("A", "A")] * 12, ("B", "A"), None])
    result = fine("pairs", "check", path, "--out", tmp_path / "kept.jsonl", "--json")
    swap = numbers(result)["order_swap"]
    assert swap["counts"]["agrees"] == 20 and swap["counts"]["first place"] == 12 and swap["kept"] == 21
    assert swap["consistency"] == pytest.approx(21 / 33) and swap["position_bias"] == pytest.approx(12 / 33)
    assert swap["position_interval"][0] > 0
    assert "The judge favours the first place." in result.stderr and "13 pairs are set aside" in result.stderr
    assert [pair.prompt_ids[0] for pair in read_pairs(tmp_path / "kept.jsonl")] == [*range(20), 33]


def test_check_lists_every_problem(tmp_path: Path) -> None:
    path = verdicts(tmp_path / "p.jsonl", [("A", "maybe"), ("A", "B"), ("B", "maybe")])
    result = call("pairs", "check", path, "--limit", 1, "--json")
    assert result.exit_code == 1
    assert f"{path}:1: verdict_ba: must be A, B, tie" in result.stdout and "and 1 more" in result.stdout
    assert [problem["line"] for problem in numbers(result)["problems"]] == [1, 3]


def test_check_reads_text_with_the_tokenizer_of_a_model(tiny_task_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five", "x": 1}) + "\n")
    result = call("pairs", "check", path, "--ignore", "x", "--reason", "right")
    assert result.exit_code == 1 and "is text, which needs a tokenizer" in result.stdout
    fine("pairs", "check", path, "--ignore", "x", "--reason", "right", "--model", tiny_task_model)


def test_length_bias_is_said(tmp_path: Path) -> None:
    path = verdicts(tmp_path / "p.jsonl", [None] * 20)
    assert "The longer response tends to be the chosen one" in fine("pairs", "check", path).stderr


# ---- dpo


def letters(count: int, seed: int = 0) -> list[Pair]:
    """Vowels are preferred."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        chosen, rejected = (
            tuple(rng.choices([j for j, c in enumerate(LETTERS) if (c in "aeiou") == good], k=rng.randint(2, 6)))
            for good in (True, False)
        )
        made.append(
            Pair(prompt_ids=(30 + i % 50, 30 + i // 50), chosen_ids=chosen, rejected_ids=rejected, reason="vowels")
        )
    return made


SETTINGS = ("--lr", "3e-3", "--batch-pairs", 8, "--epochs", 2, "--threads", 1, "--held-out", 0.25)


def test_dpo_from_a_file_of_pairs(tiny_task_model: Path, tmp_path: Path, threads_as_before: None) -> None:
    """Accuracy of the implicit reward on 24 held-out pairs; at random 22 of 24 or more have p = 2e-5."""
    write_pairs(tmp_path / "pairs.jsonl", letters(120))
    out = tmp_path / "run"
    arguments = ("--pairs", tmp_path / "pairs.jsonl", "--out", out, "--model", tiny_task_model, *SETTINGS)
    result = fine("dpo", *arguments, "--eval-every", 5, "--json")
    summary = numbers(result)
    assert summary["pairs"] + summary["held_out"] == 120 and summary["held_out"] >= 20
    assert summary["after"]["accuracy"] >= 0.9 > summary["before"]["accuracy"]
    assert summary["after"]["margin"] > 0.05 and summary["before"]["margin"] == pytest.approx(0, abs=1e-6)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(summary["steps"]))
    evals = [json.loads(line)["step"] for line in (out / "eval.jsonl").read_text().splitlines()]
    assert evals == [*range(0, summary["steps"], 5), summary["steps"]]
    assert json.loads((out / "summary.json").read_text()) == summary
    assert "accuracy of the implicit reward" in result.stderr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(out / "model"), AutoTokenizer.from_pretrained(out / "model")
    again = call("dpo", *arguments)
    assert isinstance(again.exception, ValueError) and "--resume" in str(again.exception)
    other = call("dpo", *arguments, "--resume", "--beta", 0.3)
    assert isinstance(other.exception, ValueError) and "has dpo" in str(other.exception)


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [3, 7])
def test_a_run_that_was_stopped_ends_like_the_undisturbed_one(
    at: int, tiny_task_model: Path, tmp_path: Path, threads_as_before: None
) -> None:
    write_pairs(tmp_path / "pairs.jsonl", letters(60))
    config = dpo.DPORunConfig(
        model=str(tiny_task_model),
        pairs=str(tmp_path / "pairs.jsonl"),
        held_out=0.25,
        threads=1,
        checkpoint_every=2,
        eval_every=2,
        dpo=DPOConfig(learning_rate=3e-3, batch_pairs=8, epochs=2),
    )
    whole = dpo.run(config, tmp_path / "whole")

    def kill(what: str, values: Any) -> None:
        if what == "step" and values["step"] == at:
            raise Killed

    with pytest.raises(Killed):
        dpo.run(config, tmp_path / "run", progress=kill)
    assert dpo.run(config, tmp_path / "run", resume=True) == whole
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert (tmp_path / "run" / name).read_text() == (tmp_path / "whole" / name).read_text()
    from safetensors.torch import load_file

    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_two_runs_do_not_mix_in_one_directory(
    tiny_task_model: Path, tmp_path: Path, threads_as_before: None
) -> None:
    """Neither from the beginning, before there is a run.json, nor with --resume; nor is the first one disturbed."""
    write_pairs(tmp_path / "pairs.jsonl", letters(24))
    out = tmp_path / "run"
    arguments = ("--pairs", tmp_path / "pairs.jsonl", "--model", tiny_task_model, *SETTINGS, "--out", out)
    seen: list[tuple[str, bool]] = []

    def interfere(what: str, values: Any) -> None:
        if what in ("pairs", "step"):
            for resume in ((), ("--resume",)):
                second = call("dpo", *arguments, *resume)
                assert isinstance(second.exception, DirectoryLocked), second.output
                assert f"{out} is open in this process" in str(second.exception)
            seen.append((what, (out / "run.json").exists()))

    config = dpo.DPORunConfig(
        model=str(tiny_task_model),
        pairs=str(tmp_path / "pairs.jsonl"),
        held_out=0.25,
        threads=1,
        dpo=DPOConfig(learning_rate=3e-3, batch_pairs=8, epochs=2),
    )
    with_a_second = dpo.run(config, out, progress=interfere)
    assert seen[:2] == [("pairs", False), ("step", True)]
    assert with_a_second == dpo.run(config, tmp_path / "undisturbed")
    over = call("dpo", *arguments)
    assert isinstance(over.exception, ValueError) and "--resume" in str(over.exception)


def test_dpo_misses_its_file_before_it_loads_a_model(tmp_path: Path, threads_as_before: None) -> None:
    for name, says in (("gone.jsonl", "is no file; `longtail pairs from"), ("pairs.csv", "pairs are read from")):
        config = dpo.DPORunConfig(model=str(tmp_path / "no model"), pairs=str(tmp_path / name))
        with pytest.raises(ValueError, match=says):
            dpo.run(config, tmp_path / "run")


def test_dpo_refuses_what_does_not_fit(tiny_task_model: Path, tmp_path: Path, threads_as_before: None) -> None:
    path = tmp_path / "pairs.jsonl"
    cases: list[tuple[list[Pair], tuple[object, ...], str]] = [
        ([Pair(prompt_ids=(1,) * 600, chosen_ids=(2,), rejected_ids=(3,), reason="long")], (), "has 601 tokens"),
        ([Pair(prompt_ids=(1,), chosen_ids=(2,), rejected_ids=(300,), reason="r")], (), "token 300 is not below 256"),
        (
            [Pair(prompt_ids=(1,), chosen_ids=(2,), rejected_ids=(3,), reason="r", verdicts=("A", "A"))],
            (),
            "no pair was confirmed",
        ),
        (letters(3), ("--lora", 2, "--freeze", "embed"), "freeze with lora"),
        (letters(3), ("--beta", 0), "beta must be above 0"),
        (letters(3), ("--held-out", 0.0001), "holds out 0"),
    ]
    for pairs, arguments, says in cases:
        write_pairs(path, pairs)
        known = ("--held-out", 0) if "--held-out" not in arguments else ()
        out = tmp_path / "run"
        result = call(
            "dpo", "--pairs", path, "--out", out, "--model", tiny_task_model, "--threads", 1, *known, *arguments
        )
        assert isinstance(result.exception, ValueError) and says in str(result.exception), (says, result.output)
        shutil.rmtree(out, ignore_errors=True)
