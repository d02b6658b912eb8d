"""`sample` with bans, penalties and filters on the CPU: the kernel, and the reference in every dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from longtail.kernels.sample import (
    LogitEdits,
    SampleBatch,
    process_logits,
    row_edits,
    sample,
    sample_reference,
)

from .sample_cases import ALL, CASES, Case, batch_of, check_draw, logits_of, random_batch, rows_of

PATHS = {"kernel": sample, "reference": sample_reference}
GOOD = [case for case in CASES if case.fault is None]
BAD = [case for case in CASES if case.fault is not None]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_what_may_be_drawn(path: str, case: Case) -> None:
    """Sixty draws: of tokens by hand, each with the log-probability among them."""
    cases = [case] * 60
    tokens, logprobs = PATHS[path](logits_of(cases), batch_of(cases))
    for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
        check_draw(case, token, logprob)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_row_that_cannot_be_sampled_is_named(path: str, case: Case) -> None:
    cases = [CASES[0], CASES[0], case]
    with pytest.raises(ValueError, match=f"logits row 2 has .*{case.fault}"):
        PATHS[path](logits_of(cases), batch_of(cases))


@pytest.mark.parametrize("path", PATHS)
def test_faults_leave_the_other_rows_alone(path: str) -> None:
    batch, logits, faults = batch_of(CASES), logits_of(CASES), dict[int, str]()
    tokens, logprobs = PATHS[path](logits, batch, faults)
    bad = [i for i, case in enumerate(CASES) if case.fault]
    assert sorted(faults) == bad
    assert tokens[bad].tolist() == [-1] * len(bad)
    assert np.isnan(logprobs[bad]).all()
    good = [i for i, case in enumerate(CASES) if not case.fault]
    alone = PATHS[path](logits[good], rows_of(batch, good))
    assert alone[0].tolist() == tokens[good].tolist()
    assert alone[1].tobytes() == logprobs[good].tobytes()


@pytest.mark.parametrize("vocab", [3, 300, 5000])
def test_the_paths_draw_the_same(vocab: int) -> None:
    logits, batch = random_batch(80, vocab, seed=vocab)
    tokens, logprobs = sample(logits, batch)
    expected = sample_reference(logits, batch)
    assert tokens.tolist() == expected[0].tolist()
    np.testing.assert_allclose(logprobs, expected[1], rtol=1e-5, atol=1e-5)


def test_sample_is_process_logits_then_sample() -> None:
    """Bit for bit, also with the float64 parameters that an engine has."""
    vocab = 700
    rng = np.random.default_rng(0)
    raw = torch.from_numpy(rng.normal(0, 3, (40, vocab)).astype(np.float32))
    params: list[dict[str, Any]] = [
        {
            "temperature": float(rng.choice([0.0, 0.7, 0.9, 1.0])),
            "top_k": int(rng.choice([0, 5, 50])),
            "top_p": float(rng.choice([1.0, 0.9, 0.7])),
            "min_p": float(rng.choice([0.0, 0.03])),
        }
        for _ in range(40)
    ]
    changes: list[dict[str, Any]] = [
        {
            "prompt_ids": rng.integers(0, vocab, 30).tolist(),
            "output_ids": rng.integers(0, vocab, int(rng.integers(0, 30))).tolist(),
            "presence_penalty": float(rng.choice([0.0, 0.3])),
            "frequency_penalty": float(rng.choice([0.0, 0.1])),
            "repetition_penalty": float(rng.choice([1.0, 1.1])),
            "banned": tuple(rng.integers(0, vocab, int(rng.integers(0, 3)))),
        }
        for _ in range(40)
    ]
    processed = raw.clone()
    for row, p, c in zip(processed, params, changes, strict=True):
        process_logits(row.numpy(), **p, **c)
    seeds, positions = rng.integers(0, 2**64, 40, dtype=np.uint64), np.arange(40)
    temperatures = np.array([p["temperature"] for p in params])
    expected = sample(processed, SampleBatch(temperatures.astype(np.float32), seeds, positions))
    batch = SampleBatch(
        temperatures,
        seeds,
        positions,
        np.array([p["top_k"] for p in params], np.int32),
        np.array([p["top_p"] for p in params]),
        np.array([p["min_p"] for p in params]),
        LogitEdits.stack([row_edits(**c) for c in changes]),
    )
    before = raw.clone()
    tokens, logprobs = sample(raw, batch)
    assert torch.equal(raw, before)
    assert tokens.tolist() == expected[0].tolist()
    assert logprobs.tobytes() == expected[1].tobytes()
    again = sample(raw, batch, in_place=True)
    assert again[0].tolist() == tokens.tolist()
    assert again[1].tobytes() == logprobs.tobytes()
    assert torch.equal(raw, processed)  # it worked in the logits


@pytest.mark.parametrize("path", PATHS)
def test_rows_do_not_depend_on_the_batch(path: str) -> None:
    logits, batch = random_batch(24, 600, seed=1)
    tokens, logprobs = PATHS[path](logits, batch)
    order = np.random.default_rng(0).permutation(24)
    for rows in (order.tolist(), *([i] for i in range(24))):
        some = PATHS[path](logits[torch.as_tensor(rows)], rows_of(batch, rows))
        assert some[0].tolist() == tokens[rows].tolist()
        assert some[1].tobytes() == logprobs[rows].tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_takes_the_reference(dtype: torch.dtype) -> None:
    logits, batch = random_batch(20, 300, seed=2)
    logits = logits.to(dtype)
    before = logits.clone()
    tokens, logprobs = sample(logits, batch, in_place=True)
    expected = sample(logits.float(), batch)
    assert tokens.tolist() == expected[0].tolist()
    np.testing.assert_allclose(logprobs, expected[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def chi_square_p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    assert expected.min() >= 10
    statistic = float(((observed - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_top_k_and_temperature_draw_from_what_they_leave() -> None:
    """200,000 draws of 4 of 8 tokens at temperature 0.7; false-alarm probability 1e-6. A bias of 3 % in one token is
    found."""
    draws = 200_000
    probs = np.array([0.05, 0.3, 0.1, 0.02, 0.25, 0.01, 0.15, 0.12])
    logits = torch.tensor(np.log(probs), dtype=torch.float32)
    kept = [1, 4, 6, 7]
    tokens = []
    for start in range(0, draws, 10_000):
        n = 10_000
        batch = SampleBatch(
            np.full(n, 0.7, np.float32), np.full(n, 17, np.uint64), np.arange(start, start + n), np.full(n, 4, np.int32)
        )
        tokens.append(sample(logits.expand(n, -1).contiguous(), batch)[0])
    counts = np.bincount(np.concatenate(tokens), minlength=8)
    assert counts[[0, 2, 3, 5]].tolist() == [0, 0, 0, 0]
    weights = probs[kept] ** (1 / 0.7)
    assert chi_square_p_value(counts[kept], weights / weights.sum() * draws) > 1e-6
    biased = weights * [1.03, 1, 1, 1]
    assert chi_square_p_value(counts[kept], biased / biased.sum() * draws) < 1e-6


# ---- edits and bad input


def test_row_edits_by_hand() -> None:
    tokens, factors, amounts = row_edits(
        prompt_ids=(4, 1),
        output_ids=(2, 2, 1),
        presence_penalty=0.25,
        frequency_penalty=0.5,
        repetition_penalty=2,
        banned=(7, 2),
    )
    assert tokens.tolist() == [1, 2, 4, 7]
    assert factors.tolist() == [2.0, 2.0, 2.0, 1.0]
    assert amounts.tolist() == [0.75, math.inf, 0.0, math.inf]
    assert [str(x.dtype) for x in (tokens, factors, amounts)] == ["int32", "float32", "float32"]


def test_row_edits_of_nothing() -> None:
    assert [len(x) for x in row_edits(prompt_ids=(1, 2), output_ids=(3,))] == [0, 0, 0]
    edits = LogitEdits.stack([row_edits(), row_edits(banned=(3,)), row_edits()])
    assert edits.offsets.tolist() == [0, 0, 1, 1]
    assert LogitEdits.stack([]).offsets.tolist() == [0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": np.zeros(3, np.uint64)}, "seeds has shape"),
        ({"temperatures": np.array([1.0, math.nan], np.float32)}, r"sample: temperatures\[1\] is nan; use 0"),
        ({"temperatures": np.array([-1.0, 1.0])}, r"sample: temperatures\[0\] is -1.0"),
        ({"temperatures": np.array([0.0, 9e-7])}, r"temperatures\[1\] is 9e-07; use 0 \(greedy\) or at least 1e-06"),
        ({"top_k": np.zeros((2, 1), np.int32)}, "top_k has shape"),
        ({"top_p": np.array([0.5, 0.0])}, "top_p must be above 0"),
        ({"top_p": np.array([0.5, math.nan])}, "top_p must be above 0"),
        ({"min_p": np.array([0.5, 1.5])}, "min_p must be in"),
        ({"edits": LogitEdits.stack([row_edits()])}, "edits do not fit 2 rows"),
        ({"edits": LogitEdits.stack([row_edits(), row_edits(banned=(6,))])}, "outside the vocabulary of 6"),
        ({"edits": LogitEdits.stack([row_edits(), row_edits(banned=(-1,))])}, "outside the vocabulary of 6"),
    ],
    ids=str,
)
def test_a_batch_that_does_not_fit_is_refused(path: str, change: dict[str, object], message: str) -> None:
    batch = SampleBatch(np.ones(2, np.float32), np.zeros(2, np.uint64), np.zeros(2, np.int64))
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(ValueError, match=message):
        PATHS[path](torch.zeros(2, len(ALL)), batch)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_least_temperature_is_taken(dtype: type) -> None:
    for path in PATHS.values():
        batch = SampleBatch(np.full(2, 1e-6, dtype), np.zeros(2, np.uint64), np.zeros(2, np.int64))
        tokens, _ = path(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), batch)
        assert tokens.tolist() == [1, 0]


def test_in_place_leaves_rows_apart_that_share_memory() -> None:
    """A ban of one row must not reach the other, whose logits are the same memory."""
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    bans = LogitEdits.stack([row_edits(banned=(1,)), row_edits(banned=(2,))])
    batch = SampleBatch(np.zeros(2, np.float32), np.zeros(2, np.uint64), np.zeros(2, np.int64), edits=bans)
    assert sample(logits.expand(2, 3), batch, in_place=True)[0].tolist() == [2, 1]
    assert logits.tolist() == [[0.0, 5.0, 4.0]]
