"""Linear attention with a decay, token by token: gated linear attention (Yang et al., arXiv 2312.06635), Mamba-2 (state
space duality; Dao & Gu, arXiv 2405.21060) and lightning attention (Qin et al., arXiv 2401.04658; MiniMax-01).

A head keeps a matrix S [k_dim, v_dim], zeros before any token:

    S = exp(g) S + k v^T;   out = scale q^T S

In the terms of Mamba-2, q is C, k is B, v is dt x and g is dt A; of lightning attention, g is minus the head's slope.
Rows, states and exactness are as in kernels/gated_delta.py, whose kernel this is without the delta rule.
"""

from __future__ import annotations

import numpy as np
import torch

from longtail.kernels._checks import check_devices
from longtail.kernels._state import check_state, flat
from longtail.kernels.gated_delta import PARALLEL_FROM, scan_kernel
from longtail.kernels.state_scan_triton import state_scan_triton

_NO_BETA = np.zeros((0, 0), np.float32)


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """q, k: [T, k_heads, k_dim]; v: [T, v_heads, v_dim], v_heads a multiple of k_heads; g: log of the decay, 0 or less,
    [T, v_heads] or [T, v_heads, k_dim]; state: float32 [slots, v_heads, k_dim, v_dim]; cu_seqlens: int64 [S + 1]; read,
    write: int64 [S]; scale: of q -> [T, v_heads, v_dim] in v's dtype, zeros in padding rows.

    Writes the state after each sequence's last row (as it was, if it has none) into its write slot. On a GPU the
    Triton kernel; on the CPU float32 takes the invariant kernel, anything else the reference. ValueError: shapes or
    devices that do not fit each other, slots that do not exist, a slot that is written and used by another sequence.
    """
    _check(q, k, v, g, state, cu_seqlens, read, write)
    if v.is_cuda:
        return state_scan_triton(q, k, v, g, None, state, cu_seqlens, read, write, scale, None)
    if v.device.type != "cpu" or {x.dtype for x in (q, k, v, g, state)} != {torch.float32}:
        return linear_attention_reference(q, k, v, g, state, cu_seqlens, read, write, scale)
    cu = cu_seqlens.numpy()
    live = int(cu[-1])
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    out[live:].zero_()
    memory, stride = flat(state)
    scan_kernel(live * state[0].numel() >= PARALLEL_FROM, False)(
        *(x.detach().contiguous().numpy() for x in (q, k, v, g if g.dim() == 3 else g[:, :, None])),
        _NO_BETA,
        memory,
        stride,
        cu,
        read.numpy(),
        write.numpy(),
        np.float32(scale),
        False,
        out.numpy(),
    )
    return out


def linear_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """See `linear_attention`; any device and dtype, computed in float32, or float64 where v is."""
    _check(q, k, v, g, state, cu_seqlens, read, write)
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[1] // q.shape[1]
    queries, keys = (x.to(dtype).repeat_interleave(group, 1) for x in (q * scale, k))
    decay = (g if g.dim() == 3 else g[:, :, None]).to(dtype).exp()
    out = torch.zeros_like(v)
    bounds = cu_seqlens.tolist()
    for i, (source, target) in enumerate(zip(read.tolist(), write.tolist(), strict=True)):
        s = state[source].to(dtype)  # [v_heads, k_dim, v_dim]
        for t in range(bounds[i], bounds[i + 1]):
            s = s * decay[t, :, :, None] + keys[t, :, :, None] * v[t, :, None].to(dtype)
            out[t] = torch.einsum("hk,hkv->hv", queries[t], s).to(v.dtype)
        state[target] = s.to(state.dtype)
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or len(v) != len(q) or v.shape[1] % q.shape[1]:
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        wanted = "want [T, k_heads, k_dim] twice and [T, v_heads, v_dim], v_heads a multiple of k_heads"
        raise ValueError(f"linear_attention: {given}: {wanted}")
    rows, heads, k_dim = len(v), v.shape[1], q.shape[2]
    if g.shape not in ((rows, heads), (rows, heads, k_dim)):
        raise ValueError(f"linear_attention: g {tuple(g.shape)} must be {(rows, heads)} or {(rows, heads, k_dim)}")
    check_devices("linear_attention", q=q, k=k, v=v, g=g, state=state)
    check_state("linear_attention", rows, state, (heads, k_dim, v.shape[2]), cu_seqlens, read, write)
