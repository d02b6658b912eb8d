"""The noise: Philox against its authors' vectors and Triton, which token draws which word, the moments."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtail.kernels.philox import CHUNK, gumbel_noise, philox_numba, philox_reference, uniform_noise

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
    return [int(word) for word in philox_numba(*(np.uint64(x) for x in (*counter, *key)))]


def test_philox_of_the_kernel() -> None:
    assert philox_kernel([0, 0, 0, 0], (0, 0)) == words("6627e8d5 e169c58d bc57ac4c 9b00dbd8")
    rng = np.random.default_rng(0)
    for values in rng.integers(0, 2**32, (200, 6)).tolist():
        counter, key = values[:4], (values[4], values[5])
        expected = philox_reference(np.array([counter], np.uint32), key)[0]
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


def test_streams_are_the_last_word_of_the_counter() -> None:
    """Each stream has noise of its own; stream 0 is what `gumbel_noise` gives without one."""
    assert np.array_equal(gumbel_noise(5, 9, 16), gumbel_noise(5, 9, 16, stream=0))
    one, two = uniform_noise(5, 9, 16, stream=1), uniform_noise(5, 9, 16, stream=2)
    assert not np.any(one == two)
    bits = int(philox_reference(np.array([[3, 9, 0, 2]], np.uint32), (5, 0))[0, 0])
    assert two[3] == ((bits & 0x7FFFFFFF) + 0.5) / 2**31
