"""The gated delta rule (Yang, Kautz & Hatamizadeh, arXiv 2412.06464), token by token, as Qwen3-Next, Qwen3.5 and, with
a decay of each channel, Kimi Linear (arXiv 2510.26692) use it.

A head keeps a matrix S [k_dim, v_dim], zeros before any token. A token decays it, replaces what it says about the key
by a mix with the value, and reads it with the query:

    S = exp(g) S;   S = S + k (beta (v - k^T S))^T;   out = scale q^T S

Several value heads may share a key head, as in grouped-query attention. How rows and states are addressed stands in
kernels/_state.py. A row's bits depend on its sequence's rows up to it and the state before them alone, never on how
they are cut into steps: on the CPU there is no chunk of tokens whose arithmetic another cut would change, and every sum
runs in order of the channels. Chunked forms (FLA, `transformers`) reach the same numbers up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import LANES, exp_nonpositive, jit
from longtail.kernels._state import check_state, flat
from longtail.kernels.state_scan_triton import state_scan_triton

COLUMNS = 32
"""Columns of S (v_dim) that a thread takes through all rows: columns do not meet, and these stay in the L1 cache."""

PARALLEL_FROM = 1 << 17
"""Numbers of S times rows from which waking other threads pays."""

L2NORM_EPS = 1e-6
"""Added to the sum of squares, as FLA and `transformers` do."""


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    scale: float | None = None,
    l2norm: bool = True,
) -> torch.Tensor:
    """q, k: [T, k_heads, k_dim]; v: [T, v_heads, v_dim], v_heads a multiple of k_heads; g: log of the decay, 0 or less,
    [T, v_heads] or [T, v_heads, k_dim]; beta: [T, v_heads]; state: float32 [slots, v_heads, k_dim, v_dim]; cu_seqlens:
    int64 [S + 1]; read, write: int64 [S]; scale: of q, 1 / sqrt(k_dim) if None; l2norm: q and k are divided by their
    length first -> [T, v_heads, v_dim] in v's dtype, zeros in padding rows.

    Writes the state after each sequence's last row (as it was, if it has none) into its write slot. On a GPU the
    Triton kernel; on the CPU float32 takes the invariant kernel, anything else the reference. ValueError: shapes or
    devices that do not fit each other, slots that do not exist, a slot that is written and used by another sequence.
    """
    _check(q, k, v, g, beta, state, cu_seqlens, read, write)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if v.is_cuda:
        eps = L2NORM_EPS if l2norm else None
        return state_scan_triton(q, k, v, g, beta, state, cu_seqlens, read, write, scale, eps)
    dtypes = {x.dtype for x in (q, k, v, g, beta, state)}
    if v.device.type != "cpu" or dtypes != {torch.float32}:
        return gated_delta_rule_reference(q, k, v, g, beta, state, cu_seqlens, read, write, scale, l2norm)
    cu = cu_seqlens.numpy()
    live = int(cu[-1])
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    out[live:].zero_()
    memory, stride = flat(state)
    scan_kernel(live * state[0].numel() >= PARALLEL_FROM, True)(
        *(x.detach().contiguous().numpy() for x in (q, k, v, g if g.dim() == 3 else g[:, :, None], beta)),
        memory,
        stride,
        cu,
        read.numpy(),
        write.numpy(),
        np.float32(scale),
        l2norm,
        out.numpy(),
    )
    return out


def gated_delta_rule_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    scale: float | None = None,
    l2norm: bool = True,
) -> torch.Tensor:
    """See `gated_delta_rule`; any device and dtype, computed in float32, or float64 where v is."""
    _check(q, k, v, g, beta, state, cu_seqlens, read, write)
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[1] // q.shape[1]
    queries, keys = (x.to(dtype) for x in (q, k))
    if l2norm:
        queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS) for x in (queries, keys))
    queries = queries * (q.shape[2] ** -0.5 if scale is None else scale)
    queries, keys = (x.repeat_interleave(group, 1) for x in (queries, keys))
    decay = (g if g.dim() == 3 else g[:, :, None]).to(dtype).exp()
    out = torch.zeros_like(v)
    bounds = cu_seqlens.tolist()
    for i, (source, target) in enumerate(zip(read.tolist(), write.tolist(), strict=True)):
        s = state[source].to(dtype)  # [v_heads, k_dim, v_dim]
        for t in range(bounds[i], bounds[i + 1]):
            s = s * decay[t, :, :, None]
            known = torch.einsum("hk,hkv->hv", keys[t], s)
            delta = (v[t].to(dtype) - known) * beta[t, :, None].to(dtype)
            s = s + keys[t, :, :, None] * delta[:, None]
            out[t] = torch.einsum("hk,hkv->hv", queries[t], s).to(v.dtype)
        state[target] = s.to(state.dtype)
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or len(v) != len(q) or v.shape[1] % q.shape[1]:
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        wanted = "want [T, k_heads, k_dim] twice and [T, v_heads, v_dim], v_heads a multiple of k_heads"
        raise ValueError(f"gated_delta_rule: {given}: {wanted}")
    rows, heads, k_dim = len(v), v.shape[1], q.shape[2]
    if g.shape not in ((rows, heads), (rows, heads, k_dim)) or beta.shape != (rows, heads):
        given = f"g {tuple(g.shape)}, beta {tuple(beta.shape)}"
        wanted = f"want {(rows, heads)} or {(rows, heads, k_dim)}, and {(rows, heads)}"
        raise ValueError(f"gated_delta_rule: {given}: {wanted}")
    check_devices("gated_delta_rule", q=q, k=k, v=v, g=g, beta=beta, state=state)
    check_state("gated_delta_rule", rows, state, (heads, k_dim, v.shape[2]), cu_seqlens, read, write)


@jit()
def _unit(x: Any, scale: Any, l2norm: Any, lanes: Any, out: Any) -> None:
    """out = x * scale, or x over its length, times scale."""
    size = len(x)
    factor = scale
    if l2norm:
        for i in range(LANES):
            lanes[i] = np.float32(0.0)
        whole = size - size % LANES
        for c in range(0, whole, LANES):
            for i in range(LANES):
                lanes[i] += x[c + i] * x[c + i]
        for c in range(whole, size):
            lanes[c - whole] += x[c] * x[c]
        total = np.float32(L2NORM_EPS)
        for i in range(LANES):
            total += lanes[i]
        factor = scale / np.sqrt(total)
    for c in range(size):
        out[c] = x[c] * factor


@functools.cache
def scan_kernel(parallel: bool, delta_rule: bool) -> Callable[..., None]:
    """S = exp(g) S + k x^T; out = scale q^T S, for every row in order. x: by the delta rule, or else v."""
    C = COLUMNS

    @jit(parallel=parallel)
    def scan(
        q: Any,
        k: Any,
        v: Any,
        g: Any,  # [T, v_heads, 1 or k_dim]
        beta: Any,  # of the delta rule only
        state: Any,
        stride: Any,
        cu: Any,
        read: Any,
        write: Any,
        scale: Any,
        l2norm: Any,
        out: Any,
    ) -> None:
        _variant = parallel, delta_rule  # numba's disk cache tells functions apart by their closures only
        sequences, rows = len(read), cu[len(read)]
        k_heads, k_dim = q.shape[1], q.shape[2]
        heads, v_dim = v.shape[1], v.shape[2]
        blocks, group, channels = (v_dim + C - 1) // C, heads // k_heads, g.shape[2]
        queries = np.empty((rows, k_heads, k_dim), np.float32)
        keys = np.empty((rows, k_heads, k_dim), np.float32)
        decays = np.empty((rows, heads, channels), np.float32)
        for t in prange(rows):
            lanes = np.empty(LANES, np.float32)
            for h in range(k_heads):
                _unit(q[t, h], scale, l2norm, lanes, queries[t, h])
                _unit(k[t, h], np.float32(1.0), l2norm, lanes, keys[t, h])
            for h in range(heads):
                for c in range(channels):
                    x = g[t, h, c]
                    decays[t, h, c] = exp_nonpositive(x) if x == x else x
        # Sequences vary fastest: a thread takes a run of items, and so some columns of long ones and of short ones.
        for item in prange(heads * blocks * sequences):
            i, head, first = item % sequences, item // sequences // blocks, item // sequences % blocks * C
            width = min(C, v_dim - first)
            own = np.zeros(k_dim * C, np.float32)  # columns beyond v_dim stay zero
            fade = np.empty(k_dim, np.float32)
            known = np.empty(C, np.float32)
            added = np.zeros(C, np.float32)
            result = np.empty(C, np.float32)
            source = read[i] * stride + head * k_dim * v_dim + first
            target = write[i] * stride + head * k_dim * v_dim + first
            for d in range(k_dim):
                row, line = state[source + d * v_dim : source + d * v_dim + width], own[d * C : d * C + width]
                for c in range(width):
                    line[c] = row[c]
            whole = k_dim - k_dim % 4
            for t in range(cu[i], cu[i + 1]):
                key, query = keys[t, head // group], queries[t, head // group]
                for d in range(k_dim):
                    fade[d] = decays[t, head, d if channels > 1 else 0]
                for c in range(C):
                    known[c] = np.float32(0.0)
                if delta_rule:
                    for d in range(0, whole, 4):
                        o = d * C
                        k0, k1 = key[d] * fade[d], key[d + 1] * fade[d + 1]
                        k2, k3 = key[d + 2] * fade[d + 2], key[d + 3] * fade[d + 3]
                        for c in range(C):
                            s = known[c] + k0 * own[o + c]
                            s = s + k1 * own[o + C + c]
                            s = s + k2 * own[o + 2 * C + c]
                            known[c] = s + k3 * own[o + 3 * C + c]
                    for d in range(whole, k_dim):
                        k0 = key[d] * fade[d]
                        for c in range(C):
                            known[c] = known[c] + k0 * own[d * C + c]
                    for c in range(width):
                        added[c] = (v[t, head, first + c] - known[c]) * beta[t, head]
                else:
                    for c in range(width):
                        added[c] = v[t, head, first + c]
                for c in range(C):
                    result[c] = np.float32(0.0)
                for d in range(0, whole, 4):
                    o = d * C
                    f0, f1, f2, f3 = fade[d], fade[d + 1], fade[d + 2], fade[d + 3]
                    k0, k1, k2, k3 = key[d], key[d + 1], key[d + 2], key[d + 3]
                    q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
                    for c in range(C):
                        x = added[c]
                        s0 = own[o + c] * f0 + k0 * x
                        s1 = own[o + C + c] * f1 + k1 * x
                        s2 = own[o + 2 * C + c] * f2 + k2 * x
                        s3 = own[o + 3 * C + c] * f3 + k3 * x
                        own[o + c] = s0
                        own[o + C + c] = s1
                        own[o + 2 * C + c] = s2
                        own[o + 3 * C + c] = s3
                        s = result[c] + q0 * s0
                        s = s + q1 * s1
                        s = s + q2 * s2
                        result[c] = s + q3 * s3
                for d in range(whole, k_dim):
                    f0, k0, q0 = fade[d], key[d], query[d]
                    for c in range(C):
                        s0 = own[d * C + c] * f0 + k0 * added[c]
                        own[d * C + c] = s0
                        result[c] = result[c] + q0 * s0
                for c in range(width):
                    out[t, head, first + c] = result[c]
            for d in range(k_dim):
                row, line = state[target + d * v_dim : target + d * v_dim + width], own[d * C : d * C + width]
                for c in range(width):
                    row[c] = line[c]

    return scan
