"""How the CPU kernels are compiled, and the few vectorisable helpers they share.

Numerics. `contract` lets LLVM fuse a*b+c; nothing else of fast-math is on, so LLVM may not reorder a sum. A kernel
whose loops have a fixed trip structure per row therefore gives a row the same bits whatever else is in the batch and
whichever thread ran it. That is the whole basis of exact numerics in the ops that are not matmuls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

LANES = 16
"""Partial sums of a reduction: 16 interleaved accumulators, added pairwise at the end. Fixed, so that bits are."""


HELPERS = ("_numba.py", "philox.py", "sample.py")
"""Files whose functions are compiled into the kernels of other files."""


def digest_of(folder: Path) -> str:
    """Of what stands in the HELPERS of a folder."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in HELPERS)).hexdigest()[:12]


_DIGEST = digest_of(Path(__file__).parent)


def jit(parallel: bool = False) -> Callable[[F], F]:
    """Compiled on first call and cached on disk. Numba's cache sees changes in a kernel's own file only, and names its
    files after the kernel: so the kernel's name takes in the contents of HELPERS."""
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
    compiled: Callable[[F], F] = numba.njit(parallel=parallel, **options)

    def decorator(function: F) -> F:
        function.__qualname__ += f".{_DIGEST}"
        return compiled(function)

    return decorator


def inline(function: F) -> F:
    """For helpers that must dissolve into the caller's loop, or it is not vectorised."""
    compiled: Any = numba.njit(inline="always")(function)
    return cast(F, compiled)


@inline
def exp_nonpositive(x: Any) -> Any:
    """exp(x) for x <= 0 in float32, about 1 ulp; 0 is returned below -87 (Cephes polynomial, Cody-Waite reduction)."""
    f = np.float32
    y = x if x > f(-87.0) else f(-87.0)
    k = np.floor(y * f(1.44269504) + f(0.5))
    r = y - k * f(0.693359375)
    r = r - k * f(-2.12194440e-4)
    p = f(1.9875691500e-4)
    p = p * r + f(1.3981999507e-3)
    p = p * r + f(8.3334519073e-3)
    p = p * r + f(4.1665795894e-2)
    p = p * r + f(1.6666665459e-1)
    p = p * r + f(5.0000001201e-1)
    p = p * (r * r) + r + f(1.0)
    scale = np.int32((np.int32(k) + 127) << 23).view(np.float32)
    return p * scale if x > f(-87.0) else f(0.0)


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) in float32; the exponential is taken of a non-positive number, which never overflows."""
    f = np.float32
    e = exp_nonpositive(-np.abs(x))
    s = (f(1.0) if x >= f(0.0) else e) / (f(1.0) + e)
    return s if x == x else x
