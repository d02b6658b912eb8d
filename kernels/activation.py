"""SiLU-gated product of a fused gate/up projection (SwiGLU, Shazeer 2020), GELU and the sigmoid: the bits of a value do
not depend on its place in the tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from longtail.kernels._numba import exp_nonpositive, jit
from longtail.kernels._numba import sigmoid as sigmoid_of
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import num_warps_for, on_device_of, tl

COLUMNS = 2048
"""Columns of a silu_mul program."""


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 I] (gate first) -> silu(gate) * up: [..., I]."""
    _size(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 I] -> [..., I]. On a GPU the Triton kernel; on the CPU float32 takes the invariant kernel,
    anything else the reference. ValueError: an odd width."""
    if gate_up.is_cuda:
        return silu_mul_triton(gate_up)
    if gate_up.device.type != "cpu" or gate_up.dtype != torch.float32:
        return silu_mul_reference(gate_up)
    size = _size(gate_up)
    rows = gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, 2 * size)
    out = torch.empty(rows.shape[0], size)
    _silu_mul(rows.contiguous().numpy(), out.numpy())
    return out if gate_up.dim() == 2 else out.view(*gate_up.shape[:-1], size)


def _size(gate_up: torch.Tensor) -> int:
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(f"silu_mul: gate and up have different sizes in {tuple(gate_up.shape)}: pass [..., 2 I]")
    return width // 2


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


def gelu_tanh_reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2 (Hendrycks & Gimpel 2016)."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> the same shape. On the CPU float32 takes the invariant kernel; anything else, a GPU too (there is
    no Triton kernel), takes the reference."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return gelu_tanh_reference(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _gelu_tanh(x.detach().contiguous().view(-1).numpy(), out.view(-1).numpy())
    return out


@jit()
def _gelu_tanh(x: Any, out: Any) -> None:
    one, slope, cubic = np.float32(1.0), np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
    for i in range(len(x)):
        v = x[i]
        u = slope * (v + cubic * (v * v * v))
        e = exp_nonpositive(-np.abs(u))  # (1 + tanh(u / 2)) / 2 is sigmoid(u); exp never overflows
        out[i] = v * ((one if u >= np.float32(0.0) else e) / (one + e))


def sigmoid_reference(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> 1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """x: any shape -> the same shape. On the CPU float32 takes the invariant kernel; anything else, a GPU too (there is
    no Triton kernel), takes the reference."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return sigmoid_reference(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _sigmoid(x.detach().contiguous().view(-1).numpy(), out.view(-1).numpy())
    return out


@jit()
def _sigmoid(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = sigmoid_of(x[i])


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_mul`."""
    size = _size(gate_up)
    rows = gate_up.reshape(-1, 2 * size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape[0], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        with on_device_of(gate_up):
            _silu_mul_kernel[(rows.shape[0], -(-size // COLUMNS))](
                rows, out, rows.stride(0), size, BLOCK=COLUMNS, num_warps=num_warps_for(COLUMNS)
            )
    return out.view(*gate_up.shape[:-1], size)


@triton_jit
def _silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, row_stride: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """A program makes BLOCK columns of one row; out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + size + column, mask=mask, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    e = tl.exp(-tl.abs(g))  # exp of a non-positive number never overflows
    silu = g * (tl.where(g >= 0, 1.0, e) / (1.0 + e))
    silu = silu.to(gate.dtype).to(tl.float32)  # rounded between the two steps, as the reference does
    tl.store(out + row * size + column, (silu * up).to(gate.dtype), mask=mask)
