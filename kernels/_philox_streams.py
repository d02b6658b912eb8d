"""Philox 4x32-10 (Salmon et al. 2011) with all four counter words: NumPy, numba and Triton forms of one generator."""

from __future__ import annotations

from typing import Any

import numpy as np

from longtail.kernels._numba import inline
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import tl
from longtail.kernels.philox import _round, philox_reference

__all__ = ["philox", "philox_reference", "philox_words"]


@inline
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Four 32-bit words (in uint64) of a counter, all arguments uint64. Unrolled, so that the caller's loop
    vectorises."""
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


@triton_jit
def philox_words(c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor, k0: tl.tensor, k1: tl.tensor) -> Any:
    """Four uint32 words of counters, all arguments uint32, of shapes that broadcast to c0's."""
    zero = c0 * 0
    return tl.philox((k1.to(tl.uint64) << 32) | k0.to(tl.uint64), c0, c1 + zero, c2 + zero, c3 + zero)
