"""Log-probabilities of given tokens under softmax(logits / temperature), for the trainer: differentiable, and the
softmax never stands in memory.

    logprob = z[token] - lse(z),          d logprob / d logits = (onehot(token) - p) / temperature
    entropy = lse(z) - sum_i p_i z_i,     d entropy / d logits = -p * (log p + entropy) / temperature

with z = logits / temperature, p = softmax(z). The backward pass recomputes p from the logits and two numbers a row
(top, the largest z, and log_total, the logarithm of sum exp(z - top)) and writes the gradient once. On the CPU in
float32 the arithmetic is that of `sample`, so the trainer reads the bits that the rollout reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import prange
from torch.autograd.function import once_differentiable

from longtail.kernels._checks import check_temperatures
from longtail.kernels._numba import LANES, exp_nonpositive, inline, jit
from longtail.kernels.logprobs_triton import token_logprobs_backward_triton, token_logprobs_forward_triton
from longtail.kernels.sample import CHUNK, _mass, _top

Outputs = Any
"""The log-probabilities, or with `return_entropy` (log-probabilities, entropies)."""


def token_logprobs_reference(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor | float = 1.0,
    *,
    return_entropy: bool = False,
) -> Outputs:
    """See `token_logprobs`; float64 inside, differentiated by autograd. float64 logits give float64."""
    temperatures = _check(logits, tokens, temperatures)
    z = logits.double() / torch.where(temperatures == 0, 1.0, temperatures.double())[:, None]
    logp = torch.log_softmax(z, -1)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    picked = logp.gather(1, tokens[:, None])[:, 0].to(dtype)
    if not return_entropy:
        return picked
    p = logp.exp()
    return picked, -(p * logp.masked_fill(p == 0, 0.0)).sum(-1).to(dtype)  # NaN is not 0 and stays


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor | float = 1.0,
    *,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Outputs:
    """log softmax(logits / temperature)[token] per row; on the CPU bit-equal to what `sample` reports.

    logits: [T, V] float32, float16, bfloat16 (float64: the reference); tokens: int64 [T]; temperatures: float32 [T] or
    one number, at least 1e-6; 0 counts as 1. -> float32 [T], and with `return_entropy` the entropies of the rows in
    nats, float32 [T]. Both are differentiable with respect to the logits, once; the gradient has the logits' dtype.

    -inf excludes a token: its gradient is 0, its own log-probability -inf (whose gradient is (onehot - p) /
    temperature like any other's, as log_softmax has it). A row with NaN or +inf, or without a token, gives NaN, in
    the gradient too.

    `inplace_backward` writes the gradient over the logits, which saves a tensor of their size; they may not be a leaf,
    and an earlier op that needs its output in its own backward pass (a matmul does not) will raise.

    Raises ValueError for shapes and, on the CPU, for tokens outside of the vocabulary and temperatures that are
    neither 0 nor at least 1e-6. On a GPU, where that check would have to wait for the device, such a token gives NaN.
    """
    _check(logits, tokens, temperatures)
    return _token_logprobs(logits, tokens, temperatures, backend_of(logits), return_entropy, inplace_backward)


def token_logprobs_triton(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor | float = 1.0,
    *,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Outputs:
    """See `token_logprobs`; float32 inside. The order of a row's sums depends on V alone."""
    return _token_logprobs(logits, tokens, temperatures, _TRITON, return_entropy, inplace_backward)


def _token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor | float,
    backend: _Backend,
    return_entropy: bool,
    inplace: bool,
) -> Outputs:
    temperatures = _check(logits, tokens, temperatures)
    if inplace and logits.requires_grad and logits.is_leaf:
        raise ValueError("token_logprobs: inplace_backward would overwrite a leaf; pass logits that an op has made")
    apart = not inplace or logits.stride(0) >= logits.shape[1]  # expanded rows share memory
    rows = logits if logits.stride(1) == 1 and apart else logits.contiguous()
    return _TokenLogprobs.apply(rows, tokens, temperatures, backend, return_entropy, inplace)


def _check(logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor | float) -> torch.Tensor:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"token_logprobs: logits {tuple(logits.shape)} {logits.dtype}; pass floats [T, V]")
    return check_tokens((logits.shape[0], logits.shape[1]), logits.device, tokens, temperatures)


def check_tokens(
    shape: tuple[int, int], device: torch.device, tokens: torch.Tensor, temperatures: torch.Tensor | float
) -> torch.Tensor:
    """-> the temperatures, float32 [T]. What is read here is on the CPU: nothing waits for a GPU."""
    rows, vocab = shape
    if tokens.shape != (rows,) or tokens.dtype != torch.int64:
        raise ValueError(f"token_logprobs: tokens {tuple(tokens.shape)} {tokens.dtype}; pass int64 [{rows}]")
    if not isinstance(temperatures, torch.Tensor):
        temperatures = torch.full((rows,), temperatures, dtype=torch.float32)
    if temperatures.shape != (rows,):
        raise ValueError(f"token_logprobs: temperatures {tuple(temperatures.shape)}; pass a number or [{rows}]")
    if vocab == 0:
        raise ValueError("token_logprobs: logits of no token; V must be at least 1")
    if temperatures.device.type == "cpu":
        check_temperatures("token_logprobs", temperatures.detach().float().numpy())
    if tokens.device.type == "cpu" and rows and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise ValueError(f"token_logprobs: tokens must lie in 0..{vocab - 1}; mask padding out before the call")
    if tokens.device != device:
        raise ValueError(f"token_logprobs: tokens are on {tokens.device}, logits on {device}: put them on one device")
    return temperatures.detach().to(device, torch.float32)


# ---- backends: forward gives (logprobs, (top, log_total, entropy)), all [T]; backward fills `out` with the gradient

Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, Statistics]]
Backward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Statistics, torch.Tensor, torch.Tensor | None, torch.Tensor], None
]
_Backend = tuple[Forward, Backward]


def backend_of(x: torch.Tensor) -> _Backend:
    if x.is_cuda:
        return _TRITON
    return _NUMBA if x.device.type == "cpu" and x.dtype != torch.float64 else _PLAIN


def _forward_plain(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, want_entropy: bool
) -> tuple[torch.Tensor, Statistics]:
    z = logits.double() / torch.where(temperatures == 0, 1.0, temperatures.double())[:, None]
    top = z.amax(-1)
    shifted = z - top[:, None]
    e = shifted.exp()
    total = e.sum(-1)
    log_total = total.log()
    logprobs = shifted.gather(1, tokens[:, None])[:, 0] - log_total
    entropy = log_total - torch.where(e == 0, 0.0, e * shifted).sum(-1) / total if want_entropy else log_total
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logprobs.to(dtype), (top, log_total, entropy.to(dtype))


def _backward_plain(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor,
    statistics: Statistics,
    grads: torch.Tensor,
    entropy_grads: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    top, log_total, entropy = statistics
    t = torch.where(temperatures == 0, 1.0, temperatures.double())[:, None]
    logp = logits.double() / t - top[:, None] - log_total[:, None]
    p = logp.exp()
    grad = -p * grads[:, None]
    grad.scatter_add_(1, tokens[:, None], grads[:, None].to(grad.dtype))
    if entropy_grads is not None:
        grad -= torch.where(p == 0, 0.0, p * (logp + entropy[:, None])) * entropy_grads[:, None]
    out.copy_(grad / t)


def _forward_numba(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, want_entropy: bool
) -> tuple[torch.Tensor, Statistics]:
    rows = logits.shape[0]
    logprobs, tops, entropies = torch.empty(3, rows).unbind()
    log_totals = torch.empty(rows, dtype=torch.float64)
    _forward(
        logits.float().contiguous().numpy(),
        tokens.numpy(),
        temperatures.numpy(),
        want_entropy,
        logprobs.numpy(),
        tops.numpy(),
        log_totals.numpy(),
        entropies.numpy(),
    )
    return logprobs, (tops, log_totals, entropies)


def _backward_numba(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor,
    statistics: Statistics,
    grads: torch.Tensor,
    entropy_grads: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    tops, log_totals, entropies = statistics
    direct = out.dtype == torch.float32 and out.is_contiguous()
    filled = out if direct else torch.empty(out.shape)
    with_entropy = entropy_grads is not None
    _backward(
        logits.float().contiguous().numpy(),
        tokens.numpy(),
        temperatures.numpy(),
        tops.numpy(),
        log_totals.numpy(),
        entropies.numpy(),
        grads.float().contiguous().numpy(),
        (entropy_grads if entropy_grads is not None else grads).float().contiguous().numpy(),
        with_entropy,
        filled.numpy(),
    )
    if not direct:
        out.copy_(filled)


_PLAIN: _Backend = (_forward_plain, _backward_plain)
_NUMBA: _Backend = (_forward_numba, _backward_numba)
_TRITON: _Backend = (token_logprobs_forward_triton, token_logprobs_backward_triton)


@inline
def _scaled_sum(logits: Any, scale: Any, top: Any, probs: Any, lanes: Any) -> Any:
    """sum_i probs_i * (logit_i * scale - top), with the order of `_mass`."""
    size = logits.shape[0]
    total = 0.0
    for start in range(0, size, CHUNK):
        count = min(size - start, CHUNK)
        x, p = logits[start : start + count], probs[start : start + count]
        whole = count - count % LANES
        for i in range(LANES):
            lanes[i] = np.float32(0.0)
        for c in range(0, whole, LANES):
            for i in range(LANES):
                y = x[c + i] * scale - top
                lanes[i] += p[c + i] * (y if y > np.float32(-87.0) else np.float32(-87.0))  # where p is 0
        for c in range(whole, count):
            y = x[c] * scale - top
            lanes[c - whole] += p[c] * (y if y > np.float32(-87.0) else np.float32(-87.0))
        for i in range(LANES):
            total += lanes[i]
    return total


@jit(parallel=True)
def _forward(
    logits: Any,
    tokens: Any,
    temperatures: Any,
    want_entropy: bool,
    out: Any,
    tops: Any,
    log_totals: Any,
    entropies: Any,
) -> None:
    rows, size = logits.shape
    for row in prange(rows):
        lanes = np.empty(LANES, np.float32)
        probs = np.empty(size, np.float32)
        t = temperatures[row]
        scale = np.float32(1.0) / t if t > np.float32(0.0) else np.float32(1.0)
        x = logits[row]
        top = _top(x, scale, lanes)
        total = _mass(x, scale, top, probs, lanes)
        log_total = math.log(total)
        out[row] = np.float32(np.float64(x[tokens[row]] * scale - top) - log_total)
        tops[row] = top
        log_totals[row] = log_total
        entropies[row] = np.float32(log_total)
        if want_entropy:
            entropies[row] = np.float32(log_total - _scaled_sum(x, scale, top, probs, lanes) / total)


@jit(parallel=True)
def _backward(
    logits: Any,
    tokens: Any,
    temperatures: Any,
    tops: Any,
    log_totals: Any,
    entropies: Any,
    grads: Any,
    entropy_grads: Any,
    with_entropy: bool,
    out: Any,
) -> None:
    """`out` may be `logits`: each chunk is read whole before any of it is written."""
    rows, size = logits.shape
    for row in prange(rows):
        buffer = np.empty(CHUNK, np.float32)
        t = temperatures[row]
        scale = np.float32(1.0) / t if t > np.float32(0.0) else np.float32(1.0)
        top = tops[row]
        # A row with NaN has total 0 (the exponential of NaN is 0 here), so that 0 * inf gives NaN.
        over_total = np.float32(math.exp(-log_totals[row]))
        log_total = np.float32(log_totals[row])
        g = grads[row] * scale
        token = tokens[row]
        if with_entropy:
            ge = entropy_grads[row] * scale
            # -p g - p (log p + entropy) ge, log p = y - log_total
            base = g + (entropies[row] - log_total) * ge
            for start in range(0, size, CHUNK):
                count = min(size - start, CHUNK)
                x = logits[row, start : start + count]
                for c in range(count):
                    y = x[c] * scale - top
                    y = y if y > np.float32(-87.0) else np.float32(-87.0)
                    e = exp_nonpositive(x[c] * scale - top) * over_total
                    buffer[c] = -e * (base + y * ge)
                if start <= token < start + count:
                    buffer[token - start] += g
                out[row, start : start + count] = buffer[:count]
        else:
            for start in range(0, size, CHUNK):
                count = min(size - start, CHUNK)
                x = logits[row, start : start + count]
                for c in range(count):
                    buffer[c] = exp_nonpositive(x[c] * scale - top) * over_total * -g
                if start <= token < start + count:
                    buffer[token - start] += g
                out[row, start : start + count] = buffer[:count]


# ---- autograd


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        temperatures: torch.Tensor,
        backend: _Backend,
        return_entropy: bool,
        inplace: bool,
    ) -> Outputs:
        logprobs, statistics = backend[0](logits.detach(), tokens, temperatures, return_entropy)
        ctx.save_for_backward(logits, tokens, temperatures, *statistics)
        ctx.backend, ctx.inplace = backend, inplace
        ctx.set_materialize_grads(False)
        return (logprobs, statistics[2].clone()) if return_entropy else logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: torch.Tensor | None, entropy_grads: torch.Tensor | None = None) -> Any:
        logits, tokens, temperatures, *statistics = ctx.saved_tensors
        if not ctx.needs_input_grad[0] or (grads is None and entropy_grads is None):
            return (None,) * 6
        logits = logits.detach()
        grads = torch.zeros_like(tokens, dtype=torch.float32) if grads is None else grads
        out = logits if ctx.inplace else torch.empty_like(logits)
        ctx.backend[1](logits, tokens, temperatures, tuple(statistics), grads, entropy_grads, out)
        if ctx.inplace:  # whoever saved the logits for a backward pass is told
            torch.autograd.graph.increment_version(logits)
        return (out, *(None,) * 5)
