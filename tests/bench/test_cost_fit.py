"""Fits find what was planted, slow steps do not bend them, and totals agree; what is no pass is not counted as one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from longtail.bench import cost_fit
from longtail.bench.cli import app
from longtail.bench.cost_fit import fit, nnls, over, robust_nnls, steps_of
from longtail.bench.cost_model import StepModel, read_cost
from longtail.bench.trace import TraceWriter
from longtail.errors import TraceError
from longtail.events import Event


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), columns=st.integers(1, 5))
def test_nnls_is_the_best_of_all_active_sets(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    A, b = rng.standard_normal((12, columns)), rng.standard_normal(12)
    x = nnls(A, b)
    assert (x >= 0).all()
    best = float(b @ b)
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            z = np.linalg.lstsq(A[:, chosen], b, rcond=None)[0]
            if (z >= 0).all():
                best = min(best, float(((A[:, chosen] @ z - b) ** 2).sum()))
    assert float(((A @ x - b) ** 2).sum()) == pytest.approx(best, rel=1e-9)


def test_nnls_with_equal_and_with_empty_columns() -> None:
    A = np.column_stack([np.arange(1.0, 6.0), np.arange(1.0, 6.0), np.zeros(5)])
    x = nnls(A, 3.0 * np.arange(1.0, 6.0))
    assert x[0] + x[1] == pytest.approx(3.0) and x[2] == 0.0


# --- planted costs


def passes(n: int, seed: int, prompts: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences that fall from 32 to 1 several times, as in iterations; now and then a prompt."""
    rng = np.random.default_rng(seed)
    seqs = 1 + np.floor(31 * (1 - (np.arange(n) % 200) / 200)).astype(int)
    prompt = np.where(rng.random(n) < 0.1, rng.integers(20, 500, n), 0) if prompts else np.zeros(n, int)
    context = seqs * rng.integers(100, 2000, n) + prompt
    return seqs, seqs + prompt, context


def trace_of(model: StepModel, n: int = 1000, seed: int = 0, noise: float = 0.03, prompts: bool = True) -> pd.DataFrame:
    """Steps that take what `model` says, times a log-normal factor."""
    seqs, rows, context = passes(n, seed, prompts)
    seconds = model.many(seqs, rows, context) * np.exp(noise * np.random.default_rng(seed + 1).standard_normal(n))
    return frame(seqs, rows, context, seconds)


def frame(seqs: np.ndarray, rows: np.ndarray, context: np.ndarray, seconds: np.ndarray) -> pd.DataFrame:
    writer = TraceWriter()
    emit = writer.listener("sync")
    now = 100.0
    emit(Event("run_start", now))
    for s, r, c, d in zip(seqs.tolist(), rows.tolist(), context.tolist(), seconds.tolist(), strict=True):
        emit(Event("step", now, d, num_seqs=s, num_tokens=r, num_prefill_tokens=r - s, num_context_tokens=c))
        now += d
    return writer.frame()


LINE = StepModel(base=0.02, per_seq=0.0005, per_row=(0.0004,), per_context=4e-7)


def test_planted_line_is_recovered() -> None:
    """3 % noise, 1,000 steps: each coefficient within 10 %, every total within 1 %."""
    costs = fit(trace_of(LINE))
    step = costs.step
    assert costs.report["form"] == {"row_multiple": 1, "knots": 0, "prefill_context": False}
    for name in ("base", "per_seq", "per_context"):
        assert step.scale * getattr(step, name) == pytest.approx(getattr(LINE, name), rel=0.1), name
    assert step.scale * step.per_row[0] == pytest.approx(0.0004, rel=0.1)
    assert abs(costs.report["cross_validated"]["total"]) < 0.01
    assert costs.report["cross_validated"]["median"] == pytest.approx(0.03 * 0.6745, rel=0.15)  # of |noise|
    assert costs.report["in_sample"]["total"] == pytest.approx(0.0, abs=1e-12)
    assert costs.report["findings"] == []


@settings(max_examples=8, deadline=None)
@given(
    base=st.floats(0.001, 0.1),
    per_seq=st.floats(0, 1e-3),
    per_row=st.floats(1e-5, 1e-3),
    per_context=st.floats(0, 1e-6),
    seed=st.integers(0, 1000),
)
def test_any_planted_line_is_predicted(
    base: float, per_seq: float, per_row: float, per_context: float, seed: int
) -> None:
    """On batches and contexts that the fit has not seen: each within 3 %, at 1 % noise."""
    planted = StepModel(base=base, per_seq=per_seq, per_row=(per_row,), per_context=per_context)
    step = fit(trace_of(planted, n=600, seed=seed, noise=0.01)).step
    for seqs, rows, context in ((1, 1, 50), (7, 7, 30_000), (24, 24, 2000), (20, 300, 20_000), (48, 48, 50_000)):
        assert step.seconds(seqs, rows, context) == pytest.approx(planted.seconds(seqs, rows, context), rel=0.03)


def test_padded_blocks_and_bends_are_chosen_where_they_are() -> None:
    blocks = StepModel(base=0.002, per_row=(0.002,), row_multiple=4)
    costs = fit(trace_of(blocks, noise=0.01))
    assert costs.report["form"]["row_multiple"] == 4
    assert costs.step.seconds(5, 5, 0) == pytest.approx(costs.step.seconds(8, 8, 0), rel=0.01)
    bend = StepModel(base=0.002, per_row=(0.0, 0.001), knots=(16,))
    costs = fit(trace_of(bend, noise=0.01, prompts=False))
    assert costs.report["form"]["knots"] >= 1
    assert costs.step.seconds(12, 12, 10_000) == pytest.approx(bend.seconds(12, 12, 10_000), rel=0.02)
    assert costs.step.seconds(30, 30, 10_000) == pytest.approx(bend.seconds(30, 30, 10_000), rel=0.02)


def test_what_prompts_read_is_found() -> None:
    planted = StepModel(base=0.02, per_row=(1e-5,), per_prefill_context=2e-7)
    costs = fit(trace_of(planted, noise=0.01))
    assert costs.report["form"]["prefill_context"]
    assert costs.step.per_prefill_context * costs.step.scale == pytest.approx(2e-7, rel=0.1)


# --- outliers


def with_stalls(df: pd.DataFrame, every: int, factor: float) -> pd.DataFrame:
    """Every so manieth step takes so many times its time; the ones after it start as much later."""
    df = df.copy()
    steps = df.index[df["kind"] == "step"]
    slow = steps[::every]
    df.loc[slow, "duration"] *= factor
    return df


def test_slow_steps_do_not_bend_the_coefficients_but_count_in_the_sum() -> None:
    """Every 20th step takes 10 times as long: 1.45 times the time in all. Plain least squares would be 45 % off."""
    df = with_stalls(trace_of(LINE), 20, 10.0)
    costs = fit(df)
    step = costs.step
    assert step.base == pytest.approx(0.02, rel=0.1)
    assert step.scale == pytest.approx(1.45, rel=0.05)
    within = step.many(*(df.loc[df["kind"] == "step", c].to_numpy() for c in COLUMNS))
    assert within.sum() == pytest.approx(df["duration"].sum(), rel=1e-9)
    assert costs.report["stalls"]["steps"] == 50
    assert costs.report["stalls"]["share"] == pytest.approx(0.45 / 1.45, rel=0.1)
    assert fit(df, stalls="drop").step.scale == pytest.approx(1.0, abs=0.02)


COLUMNS = ("num_seqs", "num_tokens", "num_context_tokens")


def test_one_long_hang_is_named() -> None:
    df = trace_of(LINE)
    df.loc[df.index[500], "duration"] = 5.0
    costs = fit(df)
    assert any("One stalled step holds" in line and "--stalls drop" in line for line in costs.report["findings"])
    assert fit(df, stalls="drop").report["findings"] == []


def test_a_machine_whose_speed_drifts_is_named() -> None:
    df = trace_of(LINE)
    df.loc[df.index[500:], "duration"] *= 2.0
    assert any("drifted" in line for line in fit(df).report["findings"])


# --- what is a pass's own


def test_the_synthetic_run_is_recovered_exactly(synthetic: pd.DataFrame) -> None:
    """tests/bench/conftest.py: a step takes 0.022 + 0.0021 x sequences + 0.0004 x prompt tokens, a grade 0.004."""
    costs = fit(synthetic, runs=["sync"])
    for seqs, rows in ((1, 1), (16, 16), (16, 400)):
        expected = 0.022 + 0.0021 * seqs + 0.0004 * (rows - seqs)
        assert costs.step.seconds(seqs, rows, 0) == pytest.approx(expected, rel=1e-6)
    assert costs.grade == pytest.approx(0.004)
    assert costs.update == pytest.approx(0.3)
    assert costs.train == pytest.approx(2.0)
    assert (costs.save, costs.restore, costs.draft_token) == (None, None, None)
    unseen = steps_of(synthetic[synthetic["run"] == "token-budget"])
    predicted = costs.step.many(unseen.seqs, unseen.rows, unseen.context)
    assert cost_fit.errors(predicted, unseen.seconds)["p90"] < 1e-6


def test_saves_drafts_and_gaps_are_costs_of_their_own() -> None:
    """Each step of 1 s: 0.2 s of drafts, and in every second one a restore of 0.1 s; 0.05 s to the next."""
    writer = TraceWriter()
    emit = writer.listener("r")
    emit(Event("admit", 0.0, sample="a"))
    for i in range(100):
        start = 1.05 * i
        if i % 2:
            emit(Event("restore", start + 0.3, 0.1, num_tokens=100 + i))
        counts: dict[str, Any] = {"num_seqs": 1, "num_tokens": 3, "num_context_tokens": 10, "num_draft_tokens": 2}
        emit(Event("step", start, 1.0, draft_seconds=0.2, **counts))
    emit(Event("finish", 105.0, sample="a"))
    emit(Event("step", 200.0, 1.0, num_seqs=1, num_tokens=1))  # after a wait without work: no gap
    steps = steps_of(writer.frame())
    assert steps.seconds[:2].tolist() == pytest.approx([0.8, 0.7])
    # A restore began between two steps' records, so the gap before a step with one is not bookkeeping alone.
    assert np.isnan(steps.between[::2][:50]).all()
    assert steps.between[1:99:2] == pytest.approx(0.05)
    assert np.isnan(steps.between[-2:]).all()
    costs = fit(writer.frame())
    assert costs.draft_token == pytest.approx(0.1)
    assert costs.restore is not None and costs.restore.seconds(150) == pytest.approx(0.1)
    assert costs.step.between == pytest.approx(0.05)


def test_what_the_rollout_does_between_steps_is_no_bookkeeping() -> None:
    """Two engines whose sequences run on through an iteration's end and a training step, which name no engine."""
    writer = TraceWriter()
    emit = writer.listener("r")
    for engine in ("e0", "e1"):
        emit(Event("admit", 0.0, engine=engine, sample=engine))
    for start in (0.0, 1.25, 9.0):
        if start == 9.0:
            emit(Event("iteration_end", 3.0))
            emit(Event("train", 3.0, 5.0))
        for engine in ("e0", "e1"):
            emit(Event("step", start, 1.0, engine=engine, num_seqs=1, num_tokens=1))
    between = steps_of(writer.frame()).between
    assert between[[0, 3]].tolist() == [0.25, 0.25]
    assert np.isnan(between[[1, 2, 4, 5]]).all()


def test_several_passes_in_one_event_count_as_many() -> None:
    """A virtual clock's event stands for num_passes alike; counts and seconds are sums."""
    df = trace_of(LINE, noise=0.0)
    several = df.copy()
    several["num_passes"] = 3
    for column in ("num_tokens", "num_context_tokens", "duration"):
        several[column] = several[column] * 3
    one, three = fit(df), fit(several)
    assert three.step.seconds(4, 4, 900) == pytest.approx(one.step.seconds(4, 4, 900), rel=1e-6)


def test_transfer_by_two_points() -> None:
    writer = TraceWriter()
    emit = writer.listener("r")
    for tokens in (100, 1000, 100, 1000):
        emit(Event("save", 0.0, 0.5 + 0.001 * tokens, num_tokens=tokens))
    transfer = cost_fit._transfer(writer.frame(), "save")
    assert transfer is not None
    assert transfer.base == pytest.approx(0.5, rel=1e-6)
    assert transfer.per_token == pytest.approx(0.001, rel=1e-6)


def test_robust_fit_ignores_what_plain_least_squares_does_not() -> None:
    A = np.column_stack([np.ones(100), np.arange(100.0)])
    b = A @ [1.0, 0.5]
    b[::10] *= 20.0
    assert robust_nnls(A, b) == pytest.approx([1.0, 0.5], rel=0.02)
    assert nnls(A, b)[1] > 0.7


# --- what cannot be fitted


def test_refusals(synthetic: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="run nope is not in the trace; it holds sync, token-budget"):
        fit(synthetic, runs=["nope"])
    with pytest.raises(ValueError, match='"keep" or "drop"'):
        fit(synthetic, stalls="maybe")
    few = synthetic[synthetic["kind"] != "step"]
    with pytest.raises(ValueError, match="0 usable steps"):
        fit(few)
    made_up = synthetic.assign(detail=cost_fit.IMPORTED)
    with pytest.raises(ValueError, match="imported trace"):
        fit(made_up)


def test_no_prompts_is_said() -> None:
    findings = fit(trace_of(LINE, prompts=False)).report["findings"]
    assert any("No step computes a prompt" in line for line in findings)


def test_nothing_predicted_is_infinitely_off() -> None:
    """A fold of few steps may leave out all that have something in common. (Warnings are errors here.)"""
    assert over(np.array([1.0, 3.0]), np.array([0.0, 2.0])).tolist() == [np.inf, 1.5]


# --- the command


def test_calibrate(tmp_path: Path, synthetic_writer: TraceWriter) -> None:
    trace, out = tmp_path / "trace.parquet", tmp_path / "cost.toml"
    synthetic_writer.write(trace, {"model": "synthetic"})
    arguments = ["calibrate", str(trace), "--out", str(out), "--runs", "sync", "--json"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    assert "cross-validated" in result.output and "sequences" in result.output
    costs = read_cost(out)
    assert json.loads(result.stdout.splitlines()[-1]) == costs.as_dict()
    assert costs.label.startswith("synthetic")
    assert costs.step.seconds(16, 16, 0) == pytest.approx(0.022 + 0.0021 * 16, rel=1e-6)


def test_calibrate_says_what_is_wrong_before_it_reads(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "no.parquet"), "--out", "cost.yaml"])
    assert isinstance(result.exception, ValueError) and "cost.yaml" in str(result.exception)
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "no.parquet"), "--out", str(tmp_path / "c.toml")])
    assert isinstance(result.exception, TraceError)
