"""Gates of recurrent and hybrid layers: SiLU, softplus, gated RMSNorm.

Row-invariant on the CPU in float32, where torch takes an element of the last, incomplete vector of a tensor (or of a
thread's part of it) through other code than the rest, so that its bits depend on its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import LANES, jit, sigmoid


def silu_reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> x * sigmoid(x)."""
    return F.silu(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> the same shape. On the CPU float32 takes the invariant kernel, anything else the reference."""
    return _elementwise(_silu, x) if _fits_cpu(x) else silu_reference(x)


def softplus_reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> log(1 + exp(x)), x itself from 20 on."""
    return F.softplus(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> the same shape. On the CPU float32 takes the invariant kernel, anything else the reference."""
    return _elementwise(_softplus, x) if _fits_cpu(x) else softplus_reference(x)


def _fits_cpu(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


def _elementwise(kernel: Callable[[Any, Any], None], x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel(x.detach().contiguous().view(-1).numpy(), out.view(-1).numpy())
    return out


@jit()
def _silu(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = x[i] * sigmoid(x[i])


@jit()
def _softplus(x: Any, out: Any) -> None:
    for i in range(len(x)):
        v = np.float64(x[i])
        soft = max(v, 0.0) + math.log1p(math.exp(-abs(v)))  # the exponential never overflows
        out[i] = soft if v == v else v


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, act: Literal["silu", "sigmoid"] = "silu"
) -> torch.Tensor:
    """See `gated_rms_norm`; any device and dtype, statistics and gate in float32."""
    _check_norm(x, gate, weight, act)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = weight * y.to(x.dtype)
    opening = F.silu(gate.float()) if act == "silu" else torch.sigmoid(gate.float())
    return (y * opening).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, act: Literal["silu", "sigmoid"] = "silu"
) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich 2019) of x, times weight, times the activated gate.

    x, gate: [..., H]; weight: [H] -> [..., H] in x's dtype. On the CPU float32 takes the invariant kernel, anything
    else the reference. ValueError: shapes that do not fit each other, an activation that is not known.
    """
    if x.device.type != "cpu" or not x.dtype == gate.dtype == weight.dtype == torch.float32:
        return gated_rms_norm_reference(x, gate, weight, eps, act)
    _check_norm(x, gate, weight, act)
    rows, gates = (tensor.detach().reshape(-1, x.shape[-1]).contiguous() for tensor in (x, gate))
    out = torch.empty_like(rows)
    _gated_norm(rows.numpy(), gates.numpy(), weight.detach().numpy(), np.float32(eps), act == "silu", out.numpy())
    return out.view(x.shape)


def _check_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, act: str) -> None:
    if gate.shape != x.shape or weight.shape != x.shape[-1:]:
        given = f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"gated_rms_norm: {given}: want [..., H] twice and [H]")
    if act not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rms_norm: act is {act!r}, use 'silu' or 'sigmoid'")
    check_devices("gated_rms_norm", x=x, gate=gate, weight=weight)


@jit()
def _gated_norm(x: Any, gate: Any, weight: Any, eps: Any, silu: Any, out: Any) -> None:
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
            s = sigmoid(gate[t, c])
            s = gate[t, c] * s if silu else s
            out[t, c] = weight[c] * (x[t, c] * scale) * s
