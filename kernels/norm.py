"""RMSNorm over the last dimension (Zhang & Sennrich 2019), rows independent bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._numba import LANES, jit


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., H], weight: [H] -> [..., H] in x's dtype; statistics in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [T, H] -> [T, H]. CPU float32 contiguous takes the invariant kernel, anything else the reference."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _rms_norm(x.contiguous().numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out


@jit()
def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, size = x.shape
    lanes = np.empty(LANES, np.float32)
    whole = size - size % LANES
    for t in range(rows):
        for i in range(LANES):
            lanes[i] = np.float32(0.0)
        for c in range(0, whole, LANES):
            for i in range(LANES):
                lanes[i] += x[t, c + i] * x[t, c + i]
        for c in range(whole, size):
            lanes[c - whole] += x[t, c] * x[t, c]
        total = np.float32(0.0)
        for i in range(LANES):
            total += lanes[i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for c in range(size):
            out[t, c] = weight[c] * (x[t, c] * scale)
