"""The staleness bench against the engine, against hand-computed cases, and its shape."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from longtail.bench.staleness_bench import StalenessBenchConfig, age_history, mixed_history, run
from longtail.bench.staleness_drift import by_distance, drift, summary
from longtail.bench.staleness_replay import Context, History, Replay
from longtail.kernels.logprobs import token_logprobs
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.sample import Group
from longtail.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("threads_as_before")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def versions(tiny_task_model: Path) -> list[Weights]:
    """Random weights that differ by a few per cent."""
    model = AutoModelForCausalLM.from_pretrained(tiny_task_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    out = []
    for _ in range(4):
        out.append({name: w.clone() * 5 for name, w in weights_of(model).items()})
        for weight in weights_of(model).values():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    return out


def make_engine(model: Path, kv_on_update: Any = "keep") -> NativeEngine:
    return NativeEngine(model, threads=1, max_num_seqs=4, kv_on_update=kv_on_update, kv_cache_bytes=1 << 24)


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_it_computes_what_the_engine_does(
    tiny_task_model: Path, versions: list[Weights], kv_on_update: str, paused: bool
) -> None:
    """Samples live through three updates: every log-probability that the engine recorded has the replay's bits."""
    engine = make_engine(tiny_task_model, kv_on_update)
    engine.update_weights(versions[0], 1)
    params = SamplingParams(n=3, temperature=1.0, max_tokens=61, seed=3, ignore_eos=True)
    samples = Group.from_prompt("g", list(range(3, 40)), params).samples
    engine.add(samples)
    known: list[list[int]] = []  # of each sample, at each update
    for version, length in zip(versions[1:], (9, 30, 36), strict=True):
        while any(len(s.output_ids) < length for s in samples):
            engine.step()
        known.append([s.num_tokens for s in samples])
        if paused:
            engine.pause()
        engine.update_weights(version, engine.version + 1)
        if paused:
            engine.add(samples)
    while engine.has_work:
        engine.step()
    source = "kept" if kv_on_update == "keep" else "recomputed" if paused else None
    for i, sample in enumerate(samples):
        cuts = [*(lengths[i] for lengths in known), sample.num_tokens]
        for newest in range(1, 4):
            segment = sample.segments[newest]
            assert (segment.start, segment.end) == (cuts[newest - 1] - 37, cuts[newest] - 37)
            assert source is None or segment.kv == source
            context = Context((*sample.prompt_ids, *sample.output_ids)[: cuts[newest]], 37, cuts[newest - 1])
            older = cuts[:newest] if kv_on_update == "keep" else []
            got = replayed(engine, versions, context, older, newest)
            assert torch.equal(got, torch.tensor(sample.logprobs[segment.start : segment.end])), (i, newest)


def replayed(
    engine: NativeEngine, versions: list[Weights], context: Context, known: list[int], newest: int
) -> torch.Tensor:
    """Log-probabilities of the continuation under versions[newest]; known: tokens at each update so far, if their KV
    is kept."""
    replay, saved = Replay(engine, len(context.ids)), None
    for version, tokens in enumerate(known):
        engine.update_weights(versions[version], engine.version + 1)
        saved = replay.extend(context.ids, saved, tokens - 1)
    engine.update_weights(versions[newest], engine.version + 1)
    return token_logprobs(replay.logits(context, saved), context.targets)


def test_kept_kv_drifts(tiny_task_model: Path, versions: list[Weights]) -> None:
    """So that the comparison above can fail: other KV gives other log-probabilities."""
    engine = make_engine(tiny_task_model)
    context = Context(tuple(range(5, 75)), 20, 41)
    kept, fresh = (replayed(engine, versions, context, known, 1) for known in ([41], []))
    assert context.stale == 40 and len(kept) == 29
    assert not torch.equal(kept, fresh) and (kept - fresh).abs().max() > 1e-4


# --- figures


def test_drift_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]), torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])
    found = drift(p.log(), q.log() + 3.0, torch.tensor([0, 2]))
    assert found.kl[0] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), abs=1e-7)
    # sum q (p / q - 1)^2 = 0.25 * 1 + 0.5 * 0.25
    assert found.chi2[0] == pytest.approx(0.375, abs=1e-6)
    assert found.error[0] == pytest.approx(-math.log(2), abs=1e-6)
    assert found.greedy.tolist() == [True, False]
    assert abs(found.kl[1]) < 1e-12 and abs(found.error[1]) < 1e-6
    whole = summary([found, found])
    assert whole["positions"] == 4 and whole["kl_se"] == 0.0
    assert whole["error_max"] == pytest.approx(math.log(2), abs=1e-6) and whole["greedy_changed"] == 0.5
    assert whole["outside_clip"] == 0.5  # a ratio of 2 in every second position
    assert whole["ess_token"] == pytest.approx(1 / 1.1875, abs=1e-6)
    assert whole["ess_run"] == pytest.approx(1 / 1.375, abs=1e-6)


def test_equal_logits_do_not_drift() -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(0)) * 8
    whole = summary([drift(logits, logits.clone(), torch.arange(9))])
    names = ("kl", "error_mean", "error_p99", "error_max", "greedy_changed", "outside_clip", "weight_variance")
    assert all(whole[name] == 0.0 for name in names)
    assert whole["ess_token"] == whole["ess_run"] == 1.0 and whole["kl_se"] is None


def test_effective_sample_size_is_that_of_weights() -> None:
    """Against 200,000 draws from q; E[w^2] has a relative standard error of about 0.5 % here."""
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, 1, 50, generator=generator).unbind(0)
    found = drift(p, q, torch.tensor([0]))
    draws = torch.multinomial(q.softmax(-1)[0], 200_000, replacement=True, generator=generator)
    weights = (p.log_softmax(-1) - q.log_softmax(-1))[0, draws].exp()
    sampled = float(weights.sum() ** 2 / (len(draws) * weights.square().sum()))
    assert summary([found])["ess_token"] == pytest.approx(sampled, rel=0.05)


def test_by_distance() -> None:
    one = drift(torch.zeros(6, 4), torch.zeros(6, 4), torch.zeros(6, dtype=torch.long))
    a, b = (dataclasses.replace(one, kl=np.arange(1.0, n), error=-np.arange(1.0, n)) for n in (7, 4))
    base = [dataclasses.replace(d, kl=2 * d.kl) for d in (a, b)]
    rows = by_distance([a, b], base)
    assert [(r["from"], r["to"], r["positions"]) for r in rows] == [(1, 1, 2), (2, 2, 2), (3, 4, 3), (5, 6, 2)]
    assert [r["kl"] for r in rows] == [1.0, 2.0, pytest.approx(10 / 3), 5.5]
    assert [r["error_mean"] for r in rows] == [r["kl"] for r in rows]
    assert all(r["share_of_policy"] == pytest.approx(0.5) for r in rows)
    nothing = by_distance([one], [one])
    assert all(r["share_of_policy"] is None for r in nothing)


def test_histories_by_hand() -> None:
    context = Context(tuple(range(31)), 10, 19)  # outputs at 10 .. 30, stale up to 17
    assert context.stale == 18 and context.targets.tolist() == list(range(19, 31))
    assert [history_stops(age_history(2, 5), context)] == [[(3, 18)]]
    mixed = mixed_history(4, 4)
    assert history_stops(mixed, context) == [(0, 12), (1, 14), (2, 16), (3, 18)]
    assert mixed.mean_age(4) == 2.5 and age_history(2, 5).mean_age(5) == 2.0


def history_stops(history: History, context: Context) -> list[tuple[int, int]]:
    return [(version, history.stop(context, share)) for version, share in history.pieces]


# --- the whole of it


SMALL: dict[str, Any] = {"contexts": 3, "stale_tokens": 12, "new_tokens": 9, "train_groups": 2, "group_size": 2}
SMALL |= {"train_tokens": 6, "threads": 1, "tasks": "chain_sum", "train_tasks": "chain_sum"}


def test_a_run(tiny_task_model: Path) -> None:
    told: list[str] = []
    config = StalenessBenchConfig(
        model=tiny_task_model, rates=(0.0, 1e-3), ages=(1, 3), live=2, lengths=(20, 40), iteration=(8, 64), repeats=2,
        **SMALL,
    )  # fmt: skip
    result = json.loads(json.dumps(run(config, told.append)))
    assert told and len(result["contexts"]) == 3 and all(c["new"] == 9 for c in result["contexts"])
    rows = {(r["series"], r["history"], r["age"]): r for r in result["drift"]}
    assert [key[1:] for key in rows] == [("age", 1), ("age", 3), ("mixed", 3)] * 2
    for (series, _, _), row in rows.items():
        same = series == "lr 0e+0"
        assert (row["weight_change"] == 0.0) == same
        for what in ("keep", "policy"):
            assert row[what]["positions"] == 27
            assert (row[what]["kl"] == 0.0) == same and (row[what]["error_max"] == 0.0) == same
            assert row[what]["ess_run"] == 1.0 if same else 0 < row[what]["ess_run"] < 1
        assert (row["share_of_policy"] is None) == same
        assert [p["from"] for p in row["by_distance"]] == [1, 2, 3, 5, 9]
    young, old = rows["lr 1e-3", "age", 1], rows["lr 1e-3", "age", 3]
    assert young["weight_change"] < old["weight_change"] and young["policy"]["kl"] < old["policy"]["kl"]
    assert young["keep"]["kl"] < old["keep"]["kl"]
    rounding = {r["dtype"]: r["error_mean"] for r in result["reference"]}
    assert rounding["float32"] < 1e-5 < rounding["bfloat16"] < 1e-1
    assert [row["length"] for row in result["time"]] == [20, 40]
    for row in result["time"]:
        for clock in ("wall", "cpu"):
            found = row[clock]
            assert found["recompute_seconds"]["p50"] > 0 and list(found["share_of_iteration"]) == ["8", "64"]


def test_given_versions(tiny_task_model: Path, versions: list[Weights], tmp_path: Path) -> None:
    """A checkpoint that is there three times does not drift; the last one, which differs, does."""
    model = AutoModelForCausalLM.from_pretrained(tiny_task_model, dtype=torch.float32)
    paths = []
    for i, weights in enumerate([versions[0], versions[0], versions[1]]):
        model.load_state_dict(weights, strict=False)
        paths.append(tmp_path / str(i))
        model.save_pretrained(paths[-1])
    same = StalenessBenchConfig(model=tiny_task_model, weights=tuple(paths[:2]), live=0, **SMALL)
    assert same.measured_ages == (1,) and same.newest == 1
    (row,) = run(same, lambda text: None)["drift"]
    assert row["series"] == "given" and row["keep"]["kl"] == row["weight_change"] == 0.0
    rows = run(dataclasses.replace(same, weights=tuple(paths)), lambda text: None)["drift"]
    assert [(r["history"], r["age"]) for r in rows] == [("age", 1), ("age", 2), ("mixed", 2)]
    assert all(r["keep"]["kl"] > 0 for r in rows)
    # versions 0 and 1 are the same: so are their KV, whoever made which piece
    assert rows[0]["keep"] == rows[1]["keep"] == rows[2]["keep"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"contexts": 0}, "contexts must be at least 1"),
        ({"group_size": 1}, "group_size must be at least 2"),
        ({"live": -1}, "live must be at least 0"),
        ({"rates": ()}, "lr must name"),
        ({"rates": (-1.0,)}, "lr must be at least 0"),
        ({"rates": (float("nan"),)}, "lr must be at least 0"),
        ({"ages": (2, 1)}, "ages must rise"),
        ({"ages": (0, 1)}, "ages must rise"),
        ({"lengths": ()}, "lengths and iteration"),
        ({"weights": (Path("a"),)}, "weights must name at least 2"),
        ({"weights": (Path("a"), Path("b")), "ages": (2,)}, "at most 1"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        StalenessBenchConfig(model="m", **fields)


def test_contexts_that_are_too_short(tiny_task_model: Path) -> None:
    config = StalenessBenchConfig(model=tiny_task_model, **SMALL | {"stale_tokens": 500})
    with pytest.raises(ValueError, match="stale_tokens: none of 6 samples"):
        run(config, lambda text: None)
