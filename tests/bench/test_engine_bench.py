"""The statistics on numbers made by hand, and one real run of every contestant on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtail.bench import engine_bench
from longtail.bench.engine_bench import EngineBenchConfig, Run
from longtail.events import Event

NATIVE = ("native exact", "native fast")


def step(time: float, duration: float, model: float, sample: float) -> Event:
    return Event("step", time, duration, model_seconds=model, sample_seconds=sample)


# ---- statistics


def test_decode_counts_from_the_moment_all_have_their_first_token() -> None:
    # Sequence 0 has its first token at 1.0 and its second at 2.0, when sequence 1 gets its first.
    run = Run(0.5, [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]])
    assert run.decode_start == 2.0
    assert run.decode_rate == (2 + 3) / (5.0 - 2.0)


def test_quantiles_are_by_nearest_rank() -> None:
    assert engine_bench.quantiles([3.0, 1.0, 2.0]) == {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    assert engine_bench.quantiles([float(i) for i in range(10, 0, -1)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}
    assert engine_bench.quantiles([7.0]) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}


def test_ratios_are_taken_within_a_repeat() -> None:
    # The machine is four times slower in the second repeat: no ratio shows it.
    assert engine_bench.ratios([200.0, 50.0, 220.0], [100.0, 25.0, 110.0]) == {"p20": 2.0, "p50": 2.0, "p80": 2.0}
    with pytest.raises(ValueError):
        engine_bench.ratios([1.0, 2.0], [1.0])


def test_shares_are_of_decode_steps_only() -> None:
    prefill = step(0.0, 10.0, model=1.0, sample=9.0)
    run = Run(0.0, [[10.0, 12.0, 14.0]])
    run.events = [prefill, Event("finish", 11.0), step(10.0, 2.0, 1.5, 0.25), step(12.0, 2.0, 1.0, 0.75)]
    shares = engine_bench.step_shares([run])
    assert shares["outside_forward"]["p50"] == pytest.approx(1 - 2.5 / 4)
    assert shares["sampling"]["p50"] == pytest.approx(1.0 / 4)
    assert engine_bench.step_shares([Run(0.0, [[1.0, 2.0]])]) == {}


def test_only_native_rows_have_ratios_and_only_to_peers_that_ran() -> None:
    rates = {"native fast": [30.0, 60.0], "generate": [10.0, 30.0]}
    ours, theirs = engine_bench.comparison_rows("decode", 4, rates)
    assert ours["ratios"] == {"generate": {"p20": 2.0, "p50": 2.0, "p80": 3.0}}
    assert ours["tokens_per_second"] == {"p20": 30.0, "p50": 30.0, "p80": 60.0}
    assert theirs["per_repeat"] == [10.0, 30.0]
    assert "ratios" not in theirs


@pytest.mark.parametrize("stamps", [[[1.0, 2.0]], [[1.0, 2.0], [1.0]], [[1.0, 2.0], [1.0, 2.0, 3.0]]])
def test_a_run_with_other_tokens_than_asked_for_has_no_speed(stamps: list[list[float]]) -> None:
    with pytest.raises(engine_bench.BenchFailed, match="generate was to make 2 tokens for each of 2 prompts"):
        engine_bench.check_run("generate", Run(0.0, stamps), 2, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batches", ()),
        ("batches", (4, 0)),
        ("decode_tokens", 1),
        ("repeats", 0),
        ("peers", ("sglang",)),
        ("peers", ("generate", "generate")),
        ("numerics", ()),
        ("numerics", ("exact", "exact")),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        EngineBenchConfig(model="x", **{field: value})


# ---- a real run


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of 32, so that EOS (token 2) comes up in most runs and has to be ignored."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def settings(tiny_model: Path) -> dict:
    sizes = {"prompt_tokens": 5, "decode_tokens": 24, "prefill_tokens": 40, "snapshot_tokens": 70}
    return {"model": tiny_model, "batches": (1, 3), "repeats": 2, "threads": 1, **sizes}


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    import numba
    import torch

    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.fixture(scope="module")
def result(settings: dict) -> dict:
    told: list[str] = []
    result = engine_bench.run(EngineBenchConfig(**settings), told.append)
    assert "decode, batch 3" in told
    return result


def test_every_contestant_runs_in_every_comparison(result: dict) -> None:
    compared = [(r["measure"], r["batch"], r["contestant"]) for r in result["rows"] if r["measure"] != "snapshot"]
    everyone = (*NATIVE, "generate", "continuous")
    assert compared == [(m, b, c) for m, b in (("decode", 1), ("decode", 3), ("prefill", 1)) for c in everyone]


def test_rows_agree_with_their_own_repeats(result: dict) -> None:
    rates = {(r["measure"], r.get("batch"), r["contestant"]): r.get("per_repeat") for r in result["rows"]}
    for row in result["rows"]:
        if row["measure"] == "snapshot":
            continue
        assert len(row["per_repeat"]) == 2
        assert all(rate > 0 for rate in row["per_repeat"])
        assert row["tokens_per_second"] == engine_bench.quantiles(row["per_repeat"])
        for peer, ratio in row.get("ratios", {}).items():
            assert ratio == engine_bench.ratios(row["per_repeat"], rates[row["measure"], row["batch"], peer])
        native_decode = row["contestant"] in NATIVE and row["measure"] == "decode"
        assert ("outside_forward" in row) == native_decode
        if native_decode:
            assert 0 < row["sampling"]["p50"] < row["outside_forward"]["p50"] < 1


def test_snapshot_rows(result: dict) -> None:
    rows = [r for r in result["rows"] if r["measure"] == "snapshot"]
    assert [r["contestant"] for r in rows] == list(NATIVE)
    for row in rows:
        times = {name: values["p50"] for name, values in row["milliseconds"].items()}
        assert set(times) == {"save", "restore", "step", "resume", "recompute"}
        assert 0 < times["save"] < times["resume"]
        assert 0 < times["restore"] < times["resume"]
        assert set(row["ratios"]) == {"save", "restore", "resume"}


def test_the_result_is_json_and_says_where_it_comes_from(result: dict) -> None:
    again = json.loads(json.dumps(result))
    assert again["settings"]["batches"] == [1, 3]
    assert again["machine"]["threads"] == 1
    assert "OMP_WAIT_POLICY" in again["machine"]
    assert set(again["versions"]) == {"torch", "transformers", "longtail", "numba"}


def test_the_table_shows_every_row(result: dict) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(engine_bench.table(result))
        console.print(engine_bench.table(json.loads(json.dumps(result))))
    text = capture.get()
    for expected in ("decode B3", "prefill B1", "snapshot 70", "x continuous", "recompute"):
        assert text.count(expected) >= 2, text


def test_without_peers_only_ours_run(settings: dict) -> None:
    alone = settings | {"peers": (), "numerics": ("fast",), "batches": (2,), "repeats": 1}
    rows = engine_bench.run(EngineBenchConfig(**alone), lambda text: None)["rows"]
    assert [(r["measure"], r["contestant"], r["ratios"] == {}) for r in rows[:2]] == [
        ("decode", "native fast", True),
        ("prefill", "native fast", True),
    ]


def test_a_model_too_short_for_the_run_is_named(settings: dict) -> None:
    with pytest.raises(ValueError, match="256 positions"):
        engine_bench.run(EngineBenchConfig(**settings | {"snapshot_tokens": 300}), lambda text: None)
