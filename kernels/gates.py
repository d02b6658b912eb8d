"""Gates of recurrent and hybrid layers: sigmoid, SiLU, the decay of a gated delta rule, gated RMSNorm.

Row-invariant on the CPU in float32, where torch takes an element of the last, incomplete vector of a tensor (or of a
thread's part of it) through other code than the rest, so that its bits depend on its place.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import LANES, jit
from longtail.kernels._numba import sigmoid as sigmoid_of


def sigmoid_reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> 1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> the same shape. On the CPU float32 takes the invariant kernel, anything else the reference."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return sigmoid_reference(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sigmoid(x.detach().contiguous().view(-1).numpy(), False, out.view(-1).numpy())
    return out


def silu_reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> x * sigmoid(x)."""
    return F.silu(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> the same shape. On the CPU float32 takes the invariant kernel, anything else the reference."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return silu_reference(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sigmoid(x.detach().contiguous().view(-1).numpy(), True, out.view(-1).numpy())
    return out


@jit()
def _sigmoid(x: Any, times_x: Any, out: Any) -> None:
    for i in range(len(x)):
        s = sigmoid_of(x[i])
        out[i] = x[i] * s if times_x else s


def delta_gates_reference(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delta_gates`; any device and dtype."""
    _check_gates(a, b, a_log, dt_bias)
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `gated_delta_rule` takes: g = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b).

    a, b: [T, heads]; a_log, dt_bias: [heads] -> g float32 [T, heads], beta [T, heads] in b's dtype. On the CPU float32
    takes the invariant kernel, anything else the reference. ValueError: shapes that do not fit each other.
    """
    if a.device.type != "cpu" or {x.dtype for x in (a, b, a_log, dt_bias)} != {torch.float32}:
        return delta_gates_reference(a, b, a_log, dt_bias)
    _check_gates(a, b, a_log, dt_bias)
    g, beta = torch.empty(a.shape), sigmoid(b)
    rows, rates, shifts = (x.detach().contiguous().numpy() for x in (a, a_log, dt_bias))
    _decay(rows, rates, shifts, g.numpy())
    return g, beta


def _check_gates(a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
    if a.dim() != 2 or a.shape != b.shape or not a_log.shape == dt_bias.shape == a.shape[1:]:
        given = f"a {tuple(a.shape)}, b {tuple(b.shape)}, a_log {tuple(a_log.shape)}, dt_bias {tuple(dt_bias.shape)}"
        raise ValueError(f"delta_gates: {given}: want [T, heads] twice and [heads] twice")
    check_devices("delta_gates", a=a, b=b, a_log=a_log, dt_bias=dt_bias)


@jit()
def _decay(a: Any, a_log: Any, dt_bias: Any, g: Any) -> None:
    for t in range(a.shape[0]):
        for h in range(a.shape[1]):
            x = np.float64(a[t, h]) + np.float64(dt_bias[h])
            # log(1 + exp(x)), of the smaller of exp(x) and exp(-x)
            soft = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
            g[t, h] = np.float32(-math.exp(np.float64(a_log[h])) * soft) if x == x else np.float32(x)


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
            s = sigmoid_of(gate[t, c])
            s = gate[t, c] * s if silu else s
            out[t, c] = weight[c] * (x[t, c] * scale) * s
