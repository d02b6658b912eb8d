"""sample: its draws, its log-probabilities, its bits."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
import torch

from longtail.kernels.sample import (
    SampleBatch,
    gumbel_noise,
    sample,
    sample_reference,
)

INF = math.inf


def make_batch(rows: int, temperature: float = 1.0, seed: int = 0) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch(
        np.full(rows, temperature, np.float32),
        rng.integers(0, 2**64, rows, dtype=np.uint64),
        rng.integers(0, 2**33, rows, dtype=np.int64),
    )


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- sample against its reference


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 63, 65, 1023, 1024, 1025, 5000])
def test_sample_is_the_reference(vocab: int, temperature: float) -> None:
    logits, batch = randn(64, vocab, seed=vocab) * 4, make_batch(64, temperature, seed=vocab)
    tokens, logprobs = sample(logits, batch)
    expected_tokens, expected_logprobs = sample_reference(logits, batch)
    assert tokens.tolist() == expected_tokens.tolist()
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    assert tokens.dtype == np.int64
    assert logprobs.dtype == np.float32


def test_sample_is_the_reference_on_a_flat_wide_vocabulary() -> None:
    """Every token has a chance: the bound that saves logarithms must not lose a winner."""
    logits, batch = randn(48, 49_152, seed=1) * 0.1, make_batch(48, seed=2)
    assert sample(logits, batch)[0].tolist() == sample_reference(logits, batch)[0].tolist()


def test_sample_is_argmax_of_logits_and_noise() -> None:
    """DESIGN.md section 1, directly: nothing else decides."""
    logits, batch = randn(32, 300, seed=3), make_batch(32, 0.7, seed=3)
    tokens, _ = sample(logits, batch)
    for row, seed, position, token in zip(logits.numpy(), batch.seeds, batch.positions, tokens, strict=True):
        scores = row / np.float64(np.float32(0.7)) + gumbel_noise(int(seed), int(position), 300)
        assert token == scores.argmax()


def test_sample_bfloat16_takes_the_reference() -> None:
    logits, batch = randn(8, 100).bfloat16(), make_batch(8)
    assert sample(logits, batch)[0].tolist() == sample(logits.float(), batch)[0].tolist()


# ---- the distribution


def chi_square_p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of Pearson's statistic; every expected count must be large enough for the approximation."""
    assert expected.min() >= 10
    statistic = float(((observed - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


FALSE_ALARM = 1e-6
DRAWS = 200_000


def draw(logits: torch.Tensor, temperature: float, vary: str) -> np.ndarray:
    """200,000 tokens of one distribution, along output positions, along samples of a group, or both."""
    i = np.arange(DRAWS, dtype=np.int64)
    zeros = np.zeros(DRAWS, np.int64)
    positions = {"positions": i, "seeds": zeros, "both": i % 500}[vary]
    seeds = {"positions": zeros, "seeds": i, "both": i // 500}[vary].astype(np.uint64)
    tokens = []
    for start in range(0, DRAWS, 10_000):
        part = slice(start, start + 10_000)
        batch = SampleBatch(np.full(10_000, temperature, np.float32), seeds[part], positions[part])
        tokens.append(sample(logits.expand(10_000, -1).contiguous(), batch)[0])
    return np.concatenate(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["positions", "seeds", "both"])
def test_sample_draws_from_softmax_of_five_tokens(vary: str, temperature: float) -> None:
    """Nine tests, each with a false-alarm probability of 1e-6 (and fixed seeds: they pass always or never)."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.09, 0.01], dtype=torch.float64)
    expected = probs ** (1 / temperature) / (probs ** (1 / temperature)).sum() * DRAWS
    tokens = draw(probs.log().float(), temperature, vary)
    assert chi_square_p_value(np.bincount(tokens, minlength=5), expected.numpy()) > FALSE_ALARM


def test_sample_draws_from_softmax_across_chunks() -> None:
    """1,500 tokens, of which the least likely is expected 17 times; false-alarm probability 1e-6."""
    logits = torch.linspace(-1.0, 1.0, 1500)[torch.randperm(1500, generator=torch.Generator().manual_seed(0))]
    expected = torch.softmax(logits.double(), 0).numpy() * DRAWS
    assert chi_square_p_value(np.bincount(draw(logits, 1.0, "both"), minlength=1500), expected) > FALSE_ALARM


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    """Pairs of draws over 4 equal tokens: 16 equal cells. False-alarm probability 1e-6 each."""
    for vary in ("positions", "seeds"):
        tokens = draw(torch.zeros(4), 1.0, vary)
        pairs = np.bincount(tokens[0::2] * 4 + tokens[1::2], minlength=16)
        assert chi_square_p_value(pairs, np.full(16, DRAWS / 32)) > FALSE_ALARM


def test_the_chi_square_test_sees_a_small_bias() -> None:
    """2 % more of one of five tokens is found, and so is a temperature of 0.97 for 1."""
    probs = np.array([0.5, 0.25, 0.15, 0.09, 0.01])
    tokens = draw(torch.tensor(probs).log().float(), 1.0, "both")
    biased = probs * [1.02, 1, 1, 1, 1]
    colder = probs ** (1 / 0.97)
    for wrong in (biased, colder):
        assert chi_square_p_value(np.bincount(tokens, minlength=5), wrong / wrong.sum() * DRAWS) < FALSE_ALARM


# ---- greedy, exclusion, refusal


def test_sample_greedy_takes_the_largest_and_at_ties_the_lowest_id() -> None:
    logits = torch.zeros(4, 2000)
    logits[0, 1700] = 1.0
    logits[1, [1999, 30, 1024]] = 2.0
    logits[3] = -5.0
    logits[3, 1023:] = -4.0
    tokens, _ = sample(logits, make_batch(4, temperature=0.0))
    assert tokens.tolist() == [1700, 30, 0, 1023]


def test_sample_greedy_does_not_use_the_noise() -> None:
    logits = randn(5, 100)
    one, other = (sample(logits, make_batch(5, 0.0, seed=seed))[0] for seed in (1, 2))
    assert one.tolist() == other.tolist() == logits.argmax(-1).tolist()


def test_sample_never_takes_an_excluded_token() -> None:
    logits = torch.full((4000, 1100), -INF)
    logits[:, [7, 1050]] = torch.tensor([0.0, -3.0])
    tokens, logprobs = sample(logits, make_batch(4000))
    assert set(tokens.tolist()) == {7, 1050}
    assert np.isfinite(logprobs).all()
    only = torch.full((50, 1100), -INF)
    only[:, 1099] = -80.0
    tokens, logprobs = sample(only, make_batch(50))
    assert set(tokens.tolist()) == {1099}
    assert logprobs.tolist() == [0.0] * 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [(3, math.nan, "NaN or"), (1040, math.nan, "NaN or"), (3, INF, "or \\+inf"), (1040, INF, "or \\+inf")],
)
def test_sample_refuses_nan_and_inf_by_row(column: int, value: float, message: str, temperature: float) -> None:
    logits = randn(5, 1041)
    logits[2, column] = value
    with pytest.raises(ValueError, match=rf"logits row 2 has .*{message}"):
        sample(logits, make_batch(5, temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [5, 16, 1041])
def test_sample_refuses_a_row_without_tokens(vocab: int, temperature: float) -> None:
    logits = randn(5, vocab)
    logits[4] = -INF
    with pytest.raises(ValueError, match="logits row 4 has no token left to sample"):
        sample(logits, make_batch(5, temperature))


# ---- log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("vocab", [1, 17, 1500, 49_152])
def test_sample_logprobs_are_log_softmax(vocab: int, temperature: float) -> None:
    logits = randn(20, vocab, seed=vocab) * 5
    logits[:10, vocab // 2 + 1 :] = -INF
    tokens, logprobs = sample(logits, make_batch(20, temperature))
    scaled = logits.double() / float(np.float32(temperature or 1.0))  # greedy reports temperature 1
    expected = torch.log_softmax(scaled, -1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected.numpy(), rtol=1e-5, atol=1e-5)


# ---- bit for bit


def test_sample_rows_do_not_depend_on_the_batch() -> None:
    logits, batch = randn(33, 1500, seed=9) * 3, make_batch(33, seed=9)
    batch.temperatures = np.resize(np.array([0.0, 0.7, 1.0, 1.3], np.float32), 33)
    tokens, logprobs = sample(logits, batch)
    for i in range(33):
        one = slice(i, i + 1)
        alone = sample(logits[one], SampleBatch(batch.temperatures[one], batch.seeds[one], batch.positions[one]))
        assert (alone[0][0], alone[1].tobytes()) == (tokens[i], logprobs[one].tobytes())
    order = np.random.default_rng(0).permutation(33)
    shuffled = SampleBatch(batch.temperatures[order], batch.seeds[order], batch.positions[order])
    again = sample(logits[torch.from_numpy(order)], shuffled)
    assert np.array_equal(again[0], tokens[order])
    assert np.array_equal(again[1], logprobs[order])


def test_sample_threads_do_not_change_a_bit() -> None:
    if numba.get_num_threads() < 2:
        pytest.skip("one core")
    logits, batch = randn(33, 1500, seed=9) * 3, make_batch(33, seed=9)
    results = []
    for threads in (1, 2, 1, 2):
        numba.set_num_threads(threads)
        tokens, logprobs = sample(logits, batch)
        results.append((tokens.tobytes(), logprobs.tobytes()))
    assert len(set(results)) == 1


def test_sample_leaves_the_logits_alone() -> None:
    logits = randn(4, 100)
    before = logits.clone()
    sample(logits, make_batch(4))
    assert torch.equal(logits, before)
