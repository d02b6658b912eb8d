"""The noise (Philox against its authors' vectors and Triton); sample: its draws, its log-probabilities, its bits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from longtail.kernels.sample import (
    CHUNK,
    SampleBatch,
    _philox,
    gumbel_noise,
    philox_reference,
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


# ---- the generator


# Random123, tests/kat_vectors: philox4x32 with 10 rounds, counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_reference_known_answers(counter: str, key: str, expected: str) -> None:
    k0, k1 = words(key)
    both = philox_reference(np.array([[1, 2, 3, 4], words(counter)], np.uint32), (k0, k1))
    assert both[1].tolist() == words(expected)
    assert both[0].tolist() != both[1].tolist()


def philox_kernel(counter: list[int], key: tuple[int, int]) -> list[int]:
    return [int(word) for word in _philox(*(np.uint64(x) for x in (*counter, *key)))]


def test_philox_of_the_kernel() -> None:
    """The kernel's own generator has the last counter word fixed at 0."""
    assert philox_kernel([0, 0, 0], (0, 0)) == words("6627e8d5 e169c58d bc57ac4c 9b00dbd8")
    rng = np.random.default_rng(0)
    for values in rng.integers(0, 2**32, (200, 5)).tolist():
        counter, key = values[:3], (values[3], values[4])
        expected = philox_reference(np.array([[*counter, 0]], np.uint32), key)[0]
        assert philox_kernel(counter, key) == expected.tolist()


TRITON = """
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def philox_words(out, seed, c1, c2, n: tl.constexpr):
    i = tl.arange(0, n)
    zero = tl.zeros([n], tl.uint32)
    c1, c2 = zero + tl.to_tensor(c1).to(tl.uint32), zero + tl.to_tensor(c2).to(tl.uint32)
    a, b, c, d = tl.philox(seed, i.to(tl.uint32), c1, c2, zero)
    tl.store(out + 4 * i, a)
    tl.store(out + 4 * i + 1, b)
    tl.store(out + 4 * i + 2, c)
    tl.store(out + 4 * i + 3, d)

@triton.jit
def randint4x_words(out, seed, n: tl.constexpr):
    i = tl.arange(0, n)
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(out + 4 * i, a)
    tl.store(out + 4 * i + 1, b)
    tl.store(out + 4 * i + 2, c)
    tl.store(out + 4 * i + 3, d)

for line in sys.stdin:
    seed, c1, c2 = map(int, line.split())
    out = torch.zeros(1024, dtype=torch.int32)
    philox_words[(1,)](out, seed, c1, c2, 256)
    print(*(x & 0xFFFFFFFF for x in out.tolist()))
    randint4x_words[(1,)](out, seed, 256)
    print(*(x & 0xFFFFFFFF for x in out.tolist()))
"""


def test_philox_is_tritons_generator(tmp_path: Path) -> None:
    """tl.philox and tl.randint4x in Triton's interpreter: the noise of a GPU kernel can be that of the CPU's. Triton is
    in the dev extra; without it this fails rather than skips."""
    (tmp_path / "words.py").write_text(TRITON)
    cases = [(0, 0, 0), (7, 3, 0), (2**63 - 1, 2**32 - 1, 1), (0xFEDCBA9876543210, 12345, 77), (2**32, 1, 0)]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "words.py")],
        input="".join(f"{seed} {c1} {c2}\n" for seed, c1, c2 in cases),
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [np.array(line.split(), np.int64).reshape(256, 4) for line in done.stdout.splitlines()]
    for (seed, c1, c2), philox, randint4x in zip(cases, lines[0::2], lines[1::2], strict=True):
        counter = np.zeros((256, 4), np.uint32)
        counter[:, 0] = np.arange(256)
        key = (seed & 0xFFFFFFFF, seed >> 32)
        assert np.array_equal(philox_reference(counter, key), randint4x)
        counter[:, 1], counter[:, 2] = c1, c2
        assert np.array_equal(philox_reference(counter, key), philox)


# ---- the noise


def test_gumbel_noise_by_hand() -> None:
    """Token 0 takes word 0 of counter 0, token 256 word 1, token 1 word 0 of counter 1, token 1024 that of counter 256.
    At seed 0 and position 0, word 0 of counter 0 is 0x6627e8d5: u = (0x6627e8d5 + 1/2) / 2^31 = 0.79809."""
    noise = gumbel_noise(0, 0, 1500)
    u = (0x6627E8D5 + 0.5) / 2**31
    assert noise[0] == pytest.approx(-math.log(-math.log(1 - u)), rel=1e-12)
    u = ((0xE169C58D & 0x7FFFFFFF) + 0.5) / 2**31  # the sign bit is dropped
    assert noise[256] == pytest.approx(-math.log(-math.log(1 - u)), rel=1e-12)
    assert CHUNK == 1024
    for token, counter, word in ((1, 1, 0), (255, 255, 0), (513, 1, 2), (1023, 255, 3), (1024, 256, 0), (1290, 266, 1)):
        bits = int(philox_reference(np.array([[counter, 0, 0, 0]], np.uint32), (0, 0))[0, word])
        u = ((bits & 0x7FFFFFFF) + 0.5) / 2**31
        assert noise[token] == pytest.approx(-math.log(-math.log(1 - u)), rel=1e-12), token


def test_gumbel_noise_uses_every_bit_of_seed_and_position() -> None:
    base = gumbel_noise(5, 9, 16)
    others = [gumbel_noise(5 ^ (1 << bit), 9, 16) for bit in range(64)]
    others += [gumbel_noise(5, 9 ^ (1 << bit), 16) for bit in range(63)]
    assert all(not np.any(base == other) for other in others)
    assert len({tuple(x) for x in others}) == 127


def test_gumbel_noise_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert np.array_equal(gumbel_noise(3, 4, 2000)[:7], gumbel_noise(3, 4, 7))


def test_gumbel_noise_has_the_moments_of_a_gumbel() -> None:
    """Mean 0.5772, variance pi^2 / 6; over 2e6 draws their standard errors are 9.1e-4 and about 2.4e-3 (kurtosis 5.4).
    Six of them: a false-alarm probability of 4e-9."""
    noise = np.concatenate([gumbel_noise(11, p, 20_000) for p in range(100)])
    assert abs(noise.mean() - 0.57721566) < 6 * 9.1e-4
    assert abs(noise.var() - math.pi**2 / 6) < 6 * 2.5e-3
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 6 / math.sqrt(len(noise))


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
