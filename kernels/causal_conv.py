"""Depthwise causal convolution over time with a state, as short convolutions of hybrid models need it (H3, Mamba,
gated delta networks, LFM2): a channel's output is a weighted sum of its last `kernel` inputs.

The state of a sequence is its last kernel - 1 inputs, oldest first; zeros are the state before any input. How rows and
states are addressed stands in kernels/_state.py. A row's bits depend on the inputs of its own sequence in the window
alone: on the CPU the products are added in order of time, one channel beside the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import jit, sigmoid
from longtail.kernels._state import check_state, flat
from longtail.kernels.causal_conv_triton import causal_conv_triton

PARALLEL_FROM = 1 << 17
"""Products from which waking other threads pays."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    silu: bool = False,
) -> torch.Tensor:
    """out[t, c] = bias[c] + sum over j of weight[c, j] * x[t - (kernel - 1) + j, c], then SiLU if asked for.

    x: [T, channels]; weight: [channels, kernel], kernel 2 or larger; bias: [channels] or None; state: [slots, channels,
    kernel - 1], in x's dtype or float32; cu_seqlens: int64 [S + 1]; read, write: int64 [S] -> [T, channels] in x's
    dtype, zeros in padding rows.

    Writes the state after each sequence's last row (as it was, if it has none) into its write slot. On a GPU the Triton
    kernel; on the CPU float32 takes the invariant kernel, anything else the reference. ValueError: shapes, dtypes or
    devices that do not fit each other, slots that do not exist, a slot that is written and used by another sequence.
    """
    _check(x, weight, bias, state, cu_seqlens, read, write)
    if x.is_cuda:
        return causal_conv_triton(x, weight, bias, state, cu_seqlens, read, write, silu)
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return causal_conv_reference(x, weight, bias, state, cu_seqlens, read, write, silu)
    channels, kernel = weight.shape
    cu = cu_seqlens.numpy()
    live = int(cu[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[live:].zero_()
    memory, stride = flat(state)
    _kernel(live * channels * kernel >= PARALLEL_FROM)(
        x.detach().contiguous().numpy(),
        weight.detach().t().contiguous().numpy(),
        np.zeros(channels, np.float32) if bias is None else bias.detach().float().contiguous().numpy(),
        memory,
        stride,
        cu,
        read.numpy(),
        write.numpy(),
        np.repeat(np.arange(len(read)), np.diff(cu)),
        silu,
        out.numpy(),
    )
    return out


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    silu: bool = False,
) -> torch.Tensor:
    """See `causal_conv`; any device and dtype, computed in float32, or float64 where x is."""
    _check(x, weight, bias, state, cu_seqlens, read, write)
    (channels, kernel), dtype = weight.shape, torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x)
    bounds = cu_seqlens.tolist()
    for i, (source, target) in enumerate(zip(read.tolist(), write.tolist(), strict=True)):
        start, stop = bounds[i], bounds[i + 1]
        inputs = torch.cat([state[source].to(x.dtype), x[start:stop].T], dim=1)  # [channels, kernel - 1 + rows]
        if stop > start:
            more = None if bias is None else bias.to(dtype)
            y = F.conv1d(inputs[None].to(dtype), weight[:, None].to(dtype), more, groups=channels)[0]
            out[start:stop] = (F.silu(y) if silu else y).T.to(x.dtype)
        state[target] = inputs[:, inputs.shape[1] - (kernel - 1) :]
    return out


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 2:
        given = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"causal_conv: {given}: want [T, channels] and [channels, kernel], kernel 2 or larger")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"causal_conv: bias {tuple(bias.shape)} must be [{weight.shape[0]}], one a channel")
    if state.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"causal_conv: state is {state.dtype}, x {x.dtype}: give the state that dtype, or float32")
    check_devices("causal_conv", x=x, weight=weight, bias=bias, state=state)
    check_state("causal_conv", len(x), state, (x.shape[1], weight.shape[1] - 1), cu_seqlens, read, write)


@functools.cache
def _kernel(parallel: bool) -> Callable[..., None]:
    @jit(parallel=parallel)
    def convolve(
        x: Any,
        weight: Any,  # [kernel, channels]
        bias: Any,
        state: Any,
        stride: Any,
        cu: Any,
        read: Any,
        write: Any,
        sequence: Any,  # of each row
        silu: Any,
        out: Any,
    ) -> None:
        _variant = parallel  # in the closure only because numba's disk cache tells functions apart by their closures
        kernel, channels = weight.shape
        before = kernel - 1
        past = np.empty((len(read), before, channels), np.float32)
        for i in prange(len(read)):
            start, rows = cu[i], cu[i + 1] - cu[i]
            old = state[read[i] * stride : read[i] * stride + channels * before].reshape(channels, before)
            new = state[write[i] * stride : write[i] * stride + channels * before].reshape(channels, before)
            for j in range(before):
                row = past[i, j]
                for c in range(channels):
                    row[c] = old[c, j]
            for j in range(before):
                row = past[i, rows + j] if rows + j < before else x[start + rows + j - before]
                for c in range(channels):
                    new[c, j] = row[c]
        for t in prange(len(sequence)):
            i = sequence[t]
            own = out[t]
            for c in range(channels):
                own[c] = bias[c]
            for j in range(kernel):
                at = t - cu[i] + j  # in the past and the rows of the sequence
                row = past[i, at] if at < before else x[t + j - before]
                taps = weight[j]
                for c in range(channels):
                    own[c] += taps[c] * row[c]
            if silu:
                for c in range(channels):
                    own[c] = own[c] * sigmoid(own[c])

    return convolve
