"""Triton kernel of kernels/causal_conv.py: a program makes channels of one row, or of one sequence's next state."""

from __future__ import annotations

import torch

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, on_device_of, tl, warp_size

CHANNELS = 1024
"""Channels of a program."""


def causal_conv_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    silu: bool = False,
) -> torch.Tensor:
    """See `causal_conv`, which checks the arguments; any float dtypes, sums in float32."""
    (rows, channels), kernel, sequences = x.shape, weight.shape[1], len(read)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    if rows + sequences == 0:
        return out
    block = min(next_power_of_2(channels), CHANNELS)
    with on_device_of(x):
        _causal_conv_kernel[(rows + sequences, -(-channels // block))](
            x,
            weight.contiguous(),
            weight if bias is None else bias.contiguous(),
            state,
            cu_seqlens.contiguous(),
            read.contiguous(),
            write.contiguous(),
            out,
            rows,
            sequences,
            x.stride(0),
            state.stride(0),
            CHANNELS=channels,
            KERNEL=kernel,
            BIAS=bias is not None,
            SILU=silu,
            STEPS=max(sequences, 1).bit_length(),
            BLOCK=block,
            num_warps=max(block // (8 * warp_size()), 1),  # 8 channels a lane: their addresses take registers too
        )
    return out


@triton_jit
def _causal_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,  # this and what follows are contiguous
    bias: tl.tensor,
    state: tl.tensor,  # a slot is
    cu: tl.tensor,
    read: tl.tensor,
    write: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    sequences: tl.tensor,
    x_row: tl.tensor,  # strides, in elements
    state_slot: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = c < CHANNELS
    before = KERNEL - 1
    if program < rows:
        t = program
        sequence = tl.zeros([], tl.int64)  # the last one that starts at t or before it, found by bisection
        above = sequence + sequences
        for _ in range(STEPS):
            middle = (sequence + above) // 2
            starts = tl.load(cu + middle) <= t
            above = tl.where(starts, above, middle)
            sequence = tl.where(starts, middle, sequence)
        live = t < tl.load(cu + sequences)
        start = tl.load(cu + sequence)
        slot = tl.load(read + sequence, mask=live, other=0).to(tl.int64)
        acc = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            acc += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(KERNEL):
            at = t - start + j - before  # in the sequence's rows of this step; what lies before them is in the state
            new = tl.load(x + (start + at) * x_row + c, mask=inside & live & (at >= 0), other=0.0)
            past = state + slot * state_slot + c * before + (before + at)
            old = tl.load(past, mask=inside & live & (at < 0), other=0.0)
            tap = tl.load(weight + c * KERNEL + j, mask=inside, other=0.0).to(tl.float32)
            acc += tap * tl.where(at >= 0, new.to(tl.float32), old.to(tl.float32))
        if SILU:
            e = tl.exp(-tl.abs(acc))  # exp of a non-positive number never overflows
            acc = acc * (tl.where(acc >= 0, 1.0, e) / (1.0 + e))
        acc = tl.where(live, acc, 0.0)
        tl.store(out + t * CHANNELS + c, acc.to(out.dtype.element_ty), mask=inside)
    else:
        sequence = program - rows
        start = tl.load(cu + sequence)
        count = tl.load(cu + sequence + 1) - start
        source = state + tl.load(read + sequence).to(tl.int64) * state_slot
        target = state + tl.load(write + sequence).to(tl.int64) * state_slot
        for j in tl.static_range(KERNEL - 1):
            at = count + j - before
            new = tl.load(x + (start + at) * x_row + c, mask=inside & (at >= 0), other=0.0)
            old = tl.load(source + c * before + (before + at), mask=inside & (at < 0), other=0.0)
            last = tl.where(at >= 0, new.to(tl.float32), old.to(tl.float32))
            tl.store(target + c * before + j, last.to(state.dtype.element_ty), mask=inside)
