"""The engine's operations for a trainer: the kernels' values, bit for bit, and the standard gradients behind them.

A kernel that has a plain-torch reference of the same arguments gets the reference's gradient, computed again in the
backward pass (`differentiable`). Linear layers and attention have their formulas here:

    y = x W^T + b            dx = g W,  dW = g^T x,  db = sum g                           (rows of padding have g = 0)
    o = softmax(c q k^T) v   dv = p^T g,  ds = p (g v^T - sum_j p_j g v_j^T),  dq = c ds k,  dk = c ds^T q

where p is computed again, a piece of rows at a time, so that memory grows with a sequence's length and not with its
square (Dao et al., arXiv 2205.14135). Weights are packed anew in each call: there is no packed copy that an optimiser's
step could leave behind, and none that takes memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from longtail.kernels import activation, gates, norm
from longtail.kernels import softmax as softmax_kernel
from longtail.kernels.attention import AttentionBatch, AttentionVariant, paged_attention
from longtail.kernels.kv import store_kv
from longtail.kernels.latent import latent_attention, store_latent
from longtail.kernels.linear import Backend, PackedLinear, RowRule
from longtail.kernels.norm import rms_norm_reference
from longtail.kernels.rope import rope_store_kv

SCORES_AT_ONCE = 1 << 23
"""Attention scores that the backward pass holds at a time, about: 32 MiB in float32, four such tensors."""

# ---- kernels with references


class _Recomputed(torch.autograd.Function):
    """kernel(*args), one tensor, with the gradient of reference(*args)."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> torch.Tensor:
        ctx.reference = reference
        ctx.save_for_backward(*(a for a in args if isinstance(a, torch.Tensor)))
        ctx.others = [None if isinstance(a, torch.Tensor) else (a,) for a in args]
        out: torch.Tensor = kernel(*(a.detach() if isinstance(a, torch.Tensor) else a for a in args))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        needs, saved = ctx.needs_input_grad[2:], iter(ctx.saved_tensors)
        args = [
            next(saved).detach().requires_grad_(need) if other is None else other[0]
            for other, need in zip(ctx.others, needs, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.reference(*args)
        grads = iter(torch.autograd.grad(out, [a for a, need in zip(args, needs, strict=True) if need], grad))
        return None, None, *(next(grads) if need else None for need in needs)


def with_gradient_of(kernel: Callable[..., Any], reference: Callable[..., Any], *args: Any) -> torch.Tensor:
    """kernel(*args), with a gradient where one is asked for: that of reference(*args)."""
    if not torch.is_grad_enabled():
        out: torch.Tensor = kernel(*(a.detach() if isinstance(a, torch.Tensor) else a for a in args))
        return out
    made: torch.Tensor = _Recomputed.apply(kernel, reference, *args)
    return made


def differentiable(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """kernel, with the gradient of reference. Arguments by position; both take the same."""
    return functools.wraps(kernel)(functools.partial(with_gradient_of, kernel, reference))


rms_norm = differentiable(norm.rms_norm, norm.rms_norm_reference)
gated_rms_norm = differentiable(gates.gated_rms_norm, gates.gated_rms_norm_reference)
silu = differentiable(gates.silu, gates.silu_reference)
softplus = differentiable(gates.softplus, gates.softplus_reference)
sigmoid = differentiable(activation.sigmoid, activation.sigmoid_reference)
silu_mul = differentiable(activation.silu_mul, activation.silu_mul_reference)
gelu_tanh = differentiable(activation.gelu_tanh, activation.gelu_tanh_reference)
softmax = differentiable(softmax_kernel.softmax, softmax_kernel.softmax_reference)


# ---- linear layers


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        backend: Backend,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        packed = PackedLinear([w.contiguous() for w in weights], None if bias is None else bias.detach(), backend)
        return packed(x.detach(), None if residual is None else residual.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        wants_x, wants_residual, wants_bias, _, *wants = ctx.needs_input_grad
        parts = grad.split([len(w) for w in weights], dim=1)
        grad_x = None
        if wants_x:
            grad_x = parts[0] @ weights[0]
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                grad_x.addmm_(part, weight)
        return (
            grad_x,
            grad if wants_residual else None,
            grad.sum(0) if wants_bias else None,
            None,
            *(part.t() @ x if want else None for part, want in zip(parts, wants, strict=True)),
        )


class TrainedLinear:
    """As `PackedLinear`, of weights that are trained."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, backend: Backend) -> None:
        self.weights, self.bias, self.backend = tuple(weights), bias, backend
        self.out_features, self.in_features = sum(len(w) for w in weights), weights[0].shape[1]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, in], T padded by the engine's `RowRule`; residual: [T, out] -> [T, out]."""
        out: torch.Tensor = _Linear.apply(x.contiguous(), residual, self.bias, self.backend, *self.weights)
        return out


# ---- attention


@dataclasses.dataclass(eq=False)
class PackedSequences:
    """Whole sequences, packed, as the kernels of paged attention want them: each has its blocks in a cache that one
    layer fills and reads. Then padding rows (position 0, slot -1)."""

    ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    slots: torch.Tensor
    """int64 [T]."""
    lengths: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        self._batches: dict[int, AttentionBatch] = {}
        counts = [-(-n // self.block_size) for n in self.lengths]
        self.num_blocks = sum(counts)
        blocks = iter(range(self.num_blocks))
        self._tables = [[next(blocks) for _ in range(count)] for count in counts]

    @classmethod
    def build(cls, ids: torch.Tensor, lengths: Sequence[int], rule: RowRule, block_size: int) -> PackedSequences:
        """ids: int64 [M], of sequences of these lengths, of at least 1."""
        total = len(ids)
        padding = rule.padded(total) - total
        positions = torch.cat([torch.arange(n) for n in lengths])
        firsts = torch.tensor([0, *(-(-n // block_size) for n in lengths[:-1])]).cumsum(0) * block_size
        slots = positions + firsts.repeat_interleave(torch.tensor(lengths))
        return cls(
            torch.nn.functional.pad(ids, (0, padding)),
            torch.nn.functional.pad(positions, (0, padding)),
            torch.nn.functional.pad(slots, (0, padding), value=-1),
            tuple(lengths),
            block_size,
        )

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int64 [S + 1]."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def attention(self, group: int) -> AttentionBatch:
        """group: query heads of a KV head."""
        if group not in self._batches:
            lengths = list(self.lengths)
            self._batches[group] = AttentionBatch.build(lengths, lengths, self._tables, group)
        return self._batches[group]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        rows: PackedSequences,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, sinks)
        ctx.settings = rows.lengths, scale, window, softcap
        (_, heads, dim), kv_heads, size = q.shape, k.shape[1], rows.block_size
        cache = torch.zeros(rows.num_blocks, 1, 2, kv_heads, size * dim)
        store_kv(k.detach(), v.detach(), cache, 0, rows.slots, size)
        own = None if sinks is None else sinks.detach().float().contiguous()
        variant = AttentionVariant(window, softcap, own)
        batch = rows.attention(heads // kv_heads)
        return paged_attention(q.detach().contiguous(), cache, 0, batch, size, scale, variant)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, sinks = ctx.saved_tensors
        lengths, scale, window, softcap = ctx.settings
        return *attention_gradients(q, k, v, grad, lengths, scale, window, softcap, sinks), *(None,) * 4


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: PackedSequences,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each sequence. q: [T, heads, dim]; k, v: [T, kv_heads, dim]; window, softcap, sinks: as
    `AttentionVariant`'s -> [T, heads, dim]; rows of padding give zeros."""
    out: torch.Tensor = _Attention.apply(q, k, v, sinks, rows, scale, window, softcap)
    return out


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        rows: PackedSequences,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(q_latent, q_rope, c, k_rope)
        ctx.settings = rows.lengths, scale
        width, size = c.shape[1] + k_rope.shape[1], rows.block_size
        cache = torch.zeros(rows.num_blocks, 1, size, width)
        store_latent(c.detach(), k_rope.detach(), cache, 0, rows.slots, size)
        batch = rows.attention(q_latent.shape[1])
        return latent_attention(q_latent.detach(), q_rope.detach().contiguous(), cache, 0, batch, size, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q_latent, q_rope, c, k_rope = ctx.saved_tensors
        q, k = torch.cat([q_latent, q_rope], -1), torch.cat([c, k_rope], -1)[:, None]
        dq, dk, dv, _ = attention_gradients(q, k, c[:, None], grad, *ctx.settings)
        sizes = [c.shape[1], k_rope.shape[1]]
        dq_latent, dq_rope = dq.split(sizes, -1)
        dc, dk_rope = dk[:, 0].split(sizes, -1)
        return dq_latent, dq_rope, dc + dv[:, 0], dk_rope, None, None


def attention_over_latents(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    c: torch.Tensor,
    k_rope: torch.Tensor,
    rows: PackedSequences,
    scale: float,
) -> torch.Tensor:
    """q_latent: [T, heads, rank]; q_rope: [T, heads, rope_dim]; c: [T, rank]; k_rope: [T, rope_dim]: as
    `latent_attention` has them -> [T, heads, rank]."""
    out: torch.Tensor = _LatentAttention.apply(q_latent, q_rope, c, k_rope, rows, scale)
    return out


def attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q: [T, heads, dim]; k: [T, kv_heads, dim]; v: [T, kv_heads, v_dim]; grad: [T, heads, v_dim], of what attention
    returns; sinks: [heads]; any dtype -> the gradients of q, k, v and sinks. Rows behind the sequences get zeros."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    heads, kv_heads = q.shape[1], k.shape[1]
    start = 0
    for length in lengths:
        step = max(SCORES_AT_ONCE // (heads * length), 1)
        for a in range(0, length, step):
            b = min(a + step, length)
            first = max(a + 1 - window, 0) if window else 0
            own, seen = slice(start + a, start + b), slice(start + first, start + b)
            # [kv_heads, query heads of it * rows, ...]: the queries of a KV head are rows of one matrix
            qs, gs = (x[own].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2) for x in (q, grad))
            ks, vs = k[seen].transpose(0, 1), v[seen].transpose(0, 1)
            s = qs @ ks.mT * scale
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            slope = 1 - (s / softcap).square() if softcap else None
            row, column = torch.arange(a, b)[:, None], torch.arange(first, b)
            hidden = column > row
            if window:
                hidden |= column <= row - window
            s = s.unflatten(1, (-1, b - a)).masked_fill(hidden, -torch.inf)  # [kv_heads, group, rows, positions]
            if sinks is None:
                p = torch.softmax(s, -1)
            else:
                sink = sinks.to(s.dtype).view(kv_heads, -1, 1, 1).expand(*s.shape[:3], 1)
                p, p_sink = torch.softmax(torch.cat([s, sink], -1), -1).split([s.shape[-1], 1], -1)
            dp = (gs @ vs.mT).view(p.shape)
            mean = (p * dp).sum(-1, keepdim=True)
            ds = (p * (dp - mean)).flatten(1, 2)
            if dsinks is not None:
                dsinks -= (p_sink * mean).sum((2, 3)).flatten()
            if slope is not None:
                ds *= slope
            dq[own] = (ds @ ks * scale).unflatten(1, (-1, b - a)).permute(2, 0, 1, 3).flatten(1, 2)
            dk[seen] += (ds.mT @ qs * scale).transpose(0, 1)
            dv[seen] += (p.flatten(1, 2).mT @ gs).transpose(0, 1)
        start += length
    return dq, dk, dv, dsinks


# ---- the fused path: split, per-head norm, rotation, attention


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FusedShape:
    """Of the attention of `FusedDecoder`."""

    cos: torch.Tensor
    """float32 [max positions, rotary_dim / 2]."""
    sin: torch.Tensor
    eps: float
    scale: float
    heads: int
    kv_heads: int
    window: int

    def rotated(
        self, qkv: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `rope_store_kv` makes, in torch: qkv [T, ...] -> q [T, heads, dim], k and v [T, kv_heads, dim]."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv.unflatten(1, (sum(heads), -1)).split(heads, dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm_reference(q, q_norm, self.eps), rms_norm_reference(k, k_norm, self.eps)
        c, s = self.cos[positions][:, None], self.sin[positions][:, None]
        half = c.shape[-1]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            low, high, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
            return torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1)

        return rotate(q), rotate(k), v


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        rows: PackedSequences,
        shape: FusedShape,
    ) -> torch.Tensor:
        ctx.save_for_backward(qkv, q_norm, k_norm)
        ctx.rows, ctx.shape = rows, shape
        dim, size = qkv.shape[1] // (shape.heads + 2 * shape.kv_heads), rows.block_size
        cache = torch.zeros(rows.num_blocks, 1, 2, shape.kv_heads, size * dim)
        q = rope_store_kv(
            qkv.detach(),
            shape.cos,
            shape.sin,
            rows.positions,
            None if q_norm is None else q_norm.detach(),
            None if k_norm is None else k_norm.detach(),
            shape.eps,
            cache,
            0,
            rows.slots,
            size,
            shape.heads,
            shape.kv_heads,
        )
        batch, variant = rows.attention(shape.heads // shape.kv_heads), AttentionVariant(shape.window)
        return paged_attention(q, cache, 0, batch, size, shape.scale, variant).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape: FusedShape = ctx.shape
        given: list[Any] = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        qkv, q_norm, k_norm = given
        with torch.enable_grad():
            made = shape.rotated(qkv, q_norm, k_norm, ctx.rows.positions)
        q, k, v = (x.detach() for x in made)
        grad = grad.unflatten(1, (shape.heads, -1))
        grads = attention_gradients(q, k, v, grad, ctx.rows.lengths, shape.scale, shape.window)[:3]
        reached = [(x, g) for x, g in zip(made, grads, strict=True) if x.requires_grad]
        wanted = [x for x in given if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad([x for x, _ in reached], wanted, [g for _, g in reached]))
        return *(next(found) if x is not None and x.requires_grad else None for x in given), None, None


def fused_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    rows: PackedSequences,
    shape: FusedShape,
) -> torch.Tensor:
    """qkv: [T, (heads + 2 kv_heads) * dim]; q_norm, k_norm: [dim] or None -> [T, heads * dim]."""
    out: torch.Tensor = _FusedAttention.apply(qkv, q_norm, k_norm, rows, shape)
    return out
