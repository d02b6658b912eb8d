"""SiLU-gated product of a fused gate/up projection (SwiGLU, Shazeer 2020), rows independent bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._numba import exp_nonpositive, jit


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 I] (gate first) -> silu(gate) * up: [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [T, 2 I] -> [T, I]. CPU float32 takes the invariant kernel, anything else the reference."""
    if gate_up.device.type != "cpu" or gate_up.dtype != torch.float32:
        return silu_mul_reference(gate_up)
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _silu_mul(gate_up.contiguous().numpy(), out.numpy())
    return out


@jit()
def _silu_mul(gate_up: Any, out: Any) -> None:
    rows, size = out.shape
    one = np.float32(1.0)
    for t in range(rows):
        for c in range(size):
            g = gate_up[t, c]
            e = exp_nonpositive(-np.abs(g))  # exp of a non-positive number never overflows
            sigmoid = (one if g >= np.float32(0.0) else e) / (one + e)
            out[t, c] = g * sigmoid * gate_up[t, size + c]
