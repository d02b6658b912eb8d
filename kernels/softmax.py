"""Softmax over the last dimension, rows independent bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._numba import exp_nonpositive, jit


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [..., N] -> probabilities [..., N] in x's dtype."""
    return torch.softmax(x, dim=-1)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """x: [..., N] -> [..., N]. On the CPU float32 takes the invariant kernel; anything else, a GPU too (there is no
    Triton kernel), takes the reference. A row with a NaN, or of nothing but -inf, becomes NaN."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.dim() == 0:
        return softmax_reference(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        size = x.shape[-1]
        _softmax(x.detach().contiguous().view(-1, size).numpy(), out.view(-1, size).numpy())
    return out


@jit()
def _softmax(x: Any, out: Any) -> None:
    rows, size = x.shape
    for t in range(rows):
        top = x[t, 0]
        for i in range(1, size):
            top = x[t, i] if x[t, i] > top else top
        total = np.float32(0.0)
        for i in range(size):
            v = x[t, i] - top
            e = exp_nonpositive(v)
            e = e if v == v else v  # a NaN, which the exponential does not carry
            out[t, i] = e
            total += e
        for i in range(size):
            out[t, i] = out[t, i] / total
