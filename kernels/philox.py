"""The noise of sampling: Philox 4x32-10 (Salmon et al. 2011), the same words in NumPy, numba and Triton.

u is a function of (seed, output position, token id, stream), so there is no generator state to save, and nothing to
rewind after a rejected draft. Token i draws word (i % CHUNK) // 256 of the counter whose words are

    c0 = (i // CHUNK) * 256 + i % 256,   c1, c2 = low and high half of the position,   c3 = stream

under the seed as key. Stream 0 is the noise of `sample`; another use of noise at the same position takes another one.

u has 31 random bits, (k + 1/2) / 2^31. E = -log(1 - u) is exponential, G = -log E is Gumbel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from longtail.kernels._numba import inline
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import tl

CHUNK = 1024
"""Tokens that share 256 counters. Token i draws word (i % CHUNK) // 256 of counter (i // CHUNK) * 256 + i % 256."""

QUARTER = CHUNK // 4


def philox_reference(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """counter: uint32 [n, 4] -> uint32 [n, 4]: Philox 4x32 with 10 rounds."""
    c = counter.astype(np.uint64)
    k0, k1 = key
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        c = np.stack(
            [
                (p1 >> np.uint64(32)) ^ c[:, 1] ^ np.uint64(k0),
                p1 & mask,
                (p0 >> np.uint64(32)) ^ c[:, 3] ^ np.uint64(k1),
                p0 & mask,
            ],
            axis=1,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c.astype(np.uint32)


def uniform_noise(seed: int, position: int, vocab: int, stream: int = 0) -> np.ndarray:
    """float64 [vocab] in (0, 1): u of one output position."""
    index = np.arange(-(-vocab // CHUNK) * QUARTER, dtype=np.uint64)
    counter = np.zeros((len(index), 4), np.uint32)
    counter[:, 0] = index
    counter[:, 1] = position & 0xFFFFFFFF
    counter[:, 2] = position >> 32
    counter[:, 3] = stream
    words = philox_reference(counter, (seed & 0xFFFFFFFF, seed >> 32))
    flat = words.reshape(-1, QUARTER, 4).transpose(0, 2, 1).reshape(-1)[:vocab]
    u: np.ndarray = ((flat & np.uint32(0x7FFFFFFF)).astype(np.float64) + 0.5) * 2.0**-31
    return u


def gumbel_noise(seed: int, position: int, vocab: int, stream: int = 0) -> np.ndarray:
    """float64 [vocab]: the noise of one output position, as the sampler uses it."""
    noise: np.ndarray = -np.log(-np.log1p(-uniform_noise(seed, position, vocab, stream)))
    return noise


@inline
def _round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    m32 = np.uint64(0xFFFFFFFF)  # masks tell the compiler that 32 x 32 -> 64 bit multiplications suffice
    p0 = np.uint64(0xD2511F53) * (c0 & m32)
    p1 = np.uint64(0xCD9E8D57) * (c2 & m32)
    return (p1 >> np.uint64(32)) ^ c1 ^ k0, p1 & m32, (p0 >> np.uint64(32)) ^ c3 ^ k1, p0 & m32


@inline
def philox_numba(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Four 32-bit words (in uint64) of a counter of uint64. Unrolled, so that the caller's loop vectorises."""
    m32 = np.uint64(0xFFFFFFFF)
    w0, w1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + w0) & m32, (k1 + w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(2) * w0) & m32, (k1 + np.uint64(2) * w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(3) * w0) & m32, (k1 + np.uint64(3) * w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(4) * w0) & m32, (k1 + np.uint64(4) * w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(5) * w0) & m32, (k1 + np.uint64(5) * w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(6) * w0) & m32, (k1 + np.uint64(6) * w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(7) * w0) & m32, (k1 + np.uint64(7) * w1) & m32)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, (k0 + np.uint64(8) * w0) & m32, (k1 + np.uint64(8) * w1) & m32)
    return _round(c0, c1, c2, c3, (k0 + np.uint64(9) * w0) & m32, (k1 + np.uint64(9) * w1) & m32)


@inline
def uniform_numba(word: Any) -> Any:
    """uint32 -> u in float32."""
    return (np.float32(np.int32(word & np.uint32(0x7FFFFFFF))) + np.float32(0.5)) * np.float32(2.0**-31)


@triton_jit
def philox_triton(seed: tl.tensor, position: tl.tensor, counter: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """seed, position: int64 (the seed's bits as those of a uint64), scalars or of counter's shape; counter: c0, any
    integers; stream: a constant or a uint32 scalar -> four tensors of uint32 words, of counter's shape."""
    c0 = counter.to(tl.uint32)
    zero = c0 & 0
    c1 = zero | (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero | ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, c0, c1, c2, zero | stream)


@triton_jit
def uniform_triton(word: tl.tensor) -> tl.tensor:
    """uint32 -> u in float32, the bits of `uniform_numba`."""
    return ((word & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31


@triton_jit
def exponential_triton(u: tl.tensor) -> tl.tensor:
    """E = -log(1 - u) in float32, about 2 ulp also where u is small, as it is for winners (the polynomial of Cephes'
    logf). It uses no logarithm of the backend, whose accuracy near 1 is its own."""
    w = 1.0 - u
    bits = w.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # w = m * 2^exponent with m in [sqrt(1/2), sqrt(2)); 0 where u < 0.29
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    e = exponent.to(tl.float32)
    x = tl.where(exponent == 0, -u, m - 1.0)
    square = x * x
    y = tl.fma(x, 7.0376836292e-2, -1.1514610310e-1)
    y = tl.fma(y, x, 1.1676998740e-1)
    y = tl.fma(y, x, -1.2420140846e-1)
    y = tl.fma(y, x, 1.4249322787e-1)
    y = tl.fma(y, x, -1.6668057665e-1)
    y = tl.fma(y, x, 2.0000714765e-1)
    y = tl.fma(y, x, -2.4999993993e-1)
    y = tl.fma(y, x, 3.3333331174e-1)
    y = tl.fma(y * x, square, tl.fma(e, -2.12194440e-4, -0.5 * square))
    return -tl.fma(e, 0.693359375, x + y)
