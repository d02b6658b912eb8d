"""Triton kernel of kernels/gated_delta.py and kernels/linear_attention.py: a program takes some columns of a head's
state through the rows of one sequence, one after the other: a row's bits do not depend on how rows are cut into steps.
"""

from __future__ import annotations

import torch

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl

STATE_ELEMENTS = 4096
"""Numbers of the state that a program keeps in registers: 32 columns of 128 channels."""


def state_scan_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    scale: float,
    l2norm_eps: float | None,
) -> torch.Tensor:
    """See `gated_delta_rule`, or with beta None `linear_attention`, which check the arguments; l2norm_eps: with None
    q and k stay as they are. Any float dtypes, computed in float32."""
    (k_heads, k_dim), (heads, v_dim) = q.shape[1:], v.shape[1:]
    q, k, v, g = (x.contiguous() for x in (q, k, v, g))
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)  # rows of no sequence stay so
    block_k = next_power_of_2(k_dim)
    block_v = min(next_power_of_2(v_dim), max(STATE_ELEMENTS // block_k, 1))
    sequences, blocks = len(read), -(-v_dim // block_v)
    if sequences == 0:
        return out
    with on_device_of(v):
        _state_scan_kernel[(sequences, heads * blocks)](
            q,
            k,
            v,
            g,
            g if beta is None else beta.contiguous(),
            state,
            cu_seqlens.contiguous(),
            read.contiguous(),
            write.contiguous(),
            out,
            state.stride(0),
            scale,
            0.0 if l2norm_eps is None else l2norm_eps,
            HEADS=heads,
            GROUP=heads // k_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            BY_CHANNEL=g.dim() == 3,
            DELTA=beta is not None,
            L2NORM=l2norm_eps is not None,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=num_warps_for(block_k * block_v),
        )
    return out


@triton_jit
def _state_scan_kernel(
    q: tl.tensor,  # this and what follows are contiguous
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,  # a slot is
    cu: tl.tensor,
    read: tl.tensor,
    write: tl.tensor,
    out: tl.tensor,
    state_slot: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    blocks = (V_DIM + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(1) // blocks).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    c = tl.program_id(1) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    d_in, c_in = d < K_DIM, c < V_DIM
    at = head * (K_DIM * V_DIM) + d[:, None] * V_DIM + c[None, :]
    mask = d_in[:, None] & c_in[None, :]
    source = tl.load(read + sequence).to(tl.int64) * state_slot
    own = tl.load(state + source + at, mask=mask, other=0.0).to(tl.float32)
    for t in range(tl.load(cu + sequence), tl.load(cu + sequence + 1)):
        row = tl.cast(t, tl.int64)
        key_at = (row * (HEADS // GROUP) + head // GROUP) * K_DIM + d
        query = tl.load(q + key_at, mask=d_in, other=0.0).to(tl.float32)
        key = tl.load(k + key_at, mask=d_in, other=0.0).to(tl.float32)
        if L2NORM:
            query = query * (1.0 / tl.sqrt(tl.sum(query * query, axis=0) + eps))
            key = key * (1.0 / tl.sqrt(tl.sum(key * key, axis=0) + eps))
        query = query * scale
        if BY_CHANNEL:
            fade = tl.exp(tl.load(g + (row * HEADS + head) * K_DIM + d, mask=d_in, other=0.0).to(tl.float32))
            own = own * fade[:, None]
        else:
            own = own * tl.exp(tl.load(g + row * HEADS + head).to(tl.float32))
        added = tl.load(v + (row * HEADS + head) * V_DIM + c, mask=c_in, other=0.0).to(tl.float32)
        if DELTA:
            known = tl.sum(key[:, None] * own, axis=0)
            added = (added - known) * tl.load(beta + row * HEADS + head).to(tl.float32)
        own += key[:, None] * added[None, :]
        result = tl.sum(query[:, None] * own, axis=0)
        tl.store(out + (row * HEADS + head) * V_DIM + c, result.to(out.dtype.element_ty), mask=c_in)
    target = tl.load(write + sequence).to(tl.int64) * state_slot
    tl.store(state + target + at, own.to(state.dtype.element_ty), mask=mask)
