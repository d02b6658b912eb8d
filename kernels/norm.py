"""RMSNorm over the last dimension (Zhang & Sennrich 2019), rows independent bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import LANES, jit
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl

MOST_COLUMNS = 32_768
"""Widest row of the Triton kernel, which keeps it in registers: 64 a thread."""


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., H], weight: [H] -> [..., H] in x's dtype; statistics in float32."""
    _check(x, weight)
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., H], weight: [H] -> [..., H]. On a GPU the Triton kernel; on the CPU float32 takes the invariant kernel,
    anything else the reference. ValueError: a weight that does not fit."""
    if x.is_cuda:
        return rms_norm_triton(x, weight, eps)
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    _check(x, weight)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _rms_norm(rows.contiguous().numpy(), weight.numpy(), np.float32(eps), out.numpy())
    return out if x.dim() == 2 else out.view(x.shape)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.dim() != 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} must be {list(x.shape[-1:])}, the width of x")
    if weight.device != x.device:
        check_devices("rms_norm", x=x, weight=weight)


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


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm`. Reads x once. The order of the sum depends on H alone, so that a row's bits are its own."""
    columns = x.shape[-1]
    _check(x, weight)
    if columns > MOST_COLUMNS:
        raise ValueError(f"rms_norm: rows of {columns}, the Triton kernel takes at most {MOST_COLUMNS}")
    rows = x.reshape(-1, columns)
    if rows.stride(1) != 1 or rows.data_ptr() % 16:  # else a row's bits could depend on its place in memory
        rows = rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty(rows.shape, dtype=torch.result_type(x, weight), device=x.device)
    if out.numel():
        block = next_power_of_2(columns)
        with on_device_of(x):
            _rms_norm_kernel[(rows.shape[0],)](
                rows,
                weight.contiguous(),
                out,
                rows.stride(0),
                eps,
                COLUMNS=columns,
                BLOCK=block,
                num_warps=num_warps_for(block),
            )
    return out.view(x.shape)


@triton_jit
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program normalises one row; x_row is the stride of rows in elements, out is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < COLUMNS
    values = tl.load(x + row * x_row + column, mask=mask, other=0.0)
    y = values.to(tl.float32)
    y = y * (1.0 / tl.sqrt(tl.sum(y * y, axis=0) / COLUMNS + eps))
    y = y.to(values.dtype).to(tl.float32)  # rounded before the weight is applied, as models were trained
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + column, (y * w).to(out.dtype.element_ty), mask=mask)
