"""Log-probabilities of given tokens with the LM head taken in, a chunk of rows at a time, so that logits of all rows
never exist (Wijmans et al. 2024, "Cut Your Losses"; Liger Kernel's fused linear cross entropy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from longtail.kernels._checks import check_devices
from longtail.kernels.logprobs import Outputs, backend_of, check_tokens

Linear = Callable[[torch.Tensor], torch.Tensor]

LOGITS_PER_CHUNK = 1 << 25
"""Logits that `linear_token_logprobs` makes at a time unless told otherwise: 128 MiB in float32."""


def linear_token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor | float = 1.0,
    *,
    bias: torch.Tensor | None = None,
    rows_per_chunk: int | None = None,
    linear: Linear | None = None,
    return_entropy: bool = False,
) -> Outputs:
    """`token_logprobs` of hidden @ weight.T + bias, of which at most `rows_per_chunk` rows exist at a time.

    hidden: [T, H]; weight: [V, H]; bias: [V]; tokens, temperatures and results as in `token_logprobs`. Differentiable
    with respect to hidden, weight and bias, once; the backward pass makes each chunk's logits again and sums the
    gradients of weight and bias in float32 (a buffer of the weight's size). rows_per_chunk is by default what makes
    LOGITS_PER_CHUNK logits. 16-bit logits on the CPU are held in float32 as well.

    linear: [t, H] -> [t, V], used in place of F.linear(hidden, weight, bias) for the logits, forward and backward, such
    as a packed matmul for exact numerics. It has to compute that product and to return a tensor that may be
    overwritten. If its rows do not depend on the batch, the results do not depend on the chunks, bit for bit.

    Under torch.autocast the logits are those that F.linear gives there, in the backward pass as well, wherever that is
    called. Elsewhere hidden, weight and bias are of one dtype. float64 gives float64.

    Raises ValueError for shapes, dtypes and devices that do not fit, and for tokens and temperatures as
    `token_logprobs` does.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear_token_logprobs: hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}; "
            "pass [T, H] and [V, H]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear_token_logprobs: bias {tuple(bias.shape)}, weight has {weight.shape[0]} rows")
    check_devices("linear_token_logprobs", hidden=hidden, weight=weight, bias=bias, tokens=tokens)
    wrong = hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype)
    if wrong and linear is None and not _autocast(hidden.device)[2]:
        of_bias = "" if bias is None else f", bias {bias.dtype}"
        raise ValueError(
            f"linear_token_logprobs: hidden is {hidden.dtype}, weight {weight.dtype}{of_bias}; give them one dtype"
        )
    if rows_per_chunk is None:
        rows_per_chunk = max(LOGITS_PER_CHUNK // max(weight.shape[0], 1), 1)
    if rows_per_chunk < 1:
        raise ValueError(f"linear_token_logprobs: rows_per_chunk is {rows_per_chunk}, at least 1 is needed")
    shape = (hidden.shape[0], weight.shape[0])
    temperatures = check_tokens(shape, hidden.device, tokens, temperatures)
    return _LinearTokenLogprobs.apply(
        hidden, weight, bias, tokens, temperatures, rows_per_chunk, linear, return_entropy
    )


def _autocast(device: torch.device) -> tuple[str, torch.dtype, bool]:
    """-> the arguments of torch.autocast that make its present state again."""
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


class _LinearTokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperatures: torch.Tensor,
        rows_per_chunk: int,
        linear: Linear | None,
        return_entropy: bool,
    ) -> Outputs:
        call = linear or (lambda h: F.linear(h, weight, bias))
        parts: list[tuple[torch.Tensor, ...]] = []
        for start in range(0, hidden.shape[0], rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            logits = call(hidden[rows])
            if logits.shape != (tokens[rows].shape[0], weight.shape[0]):
                raise ValueError(f"linear_token_logprobs: linear gave {tuple(logits.shape)} for {hidden[rows].shape}")
            logprobs, statistics = backend_of(logits)[0](logits, tokens[rows], temperatures[rows], return_entropy)
            parts.append((logprobs, *statistics))
            del logits  # before the next ones are made
        if not parts:
            dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            parts.append(tuple(hidden.new_empty(0, dtype=dtype) for _ in range(4)))
        logprobs, *joined = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, tokens, temperatures, *joined)
        ctx.rows_per_chunk, ctx.linear = rows_per_chunk, linear
        ctx.autocast = _autocast(hidden.device)
        ctx.set_materialize_grads(False)
        return (logprobs, joined[2].clone()) if return_entropy else logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: torch.Tensor | None, entropy_grads: torch.Tensor | None = None) -> Any:
        with torch.autocast(ctx.autocast[0], enabled=False):  # whatever it is where the backward pass is called
            return _LinearTokenLogprobs._gradients(ctx, grads, entropy_grads)

    @staticmethod
    def _gradients(ctx: Any, grads: torch.Tensor | None, entropy_grads: torch.Tensor | None) -> Any:
        hidden, weight, bias, tokens, temperatures, *statistics = ctx.saved_tensors
        kind, half, autocast = ctx.autocast
        factor = weight  # in the dtype that the logits were multiplied in
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if grads is None and entropy_grads is None:
            return (None,) * 8
        grads = torch.zeros_like(tokens, dtype=torch.float32) if grads is None else grads
        call = ctx.linear or (lambda h: F.linear(h, weight, bias))
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        for start in range(0, hidden.shape[0], ctx.rows_per_chunk):
            rows = slice(start, start + ctx.rows_per_chunk)
            with torch.autocast(kind, half, autocast):  # the logits of the forward pass, whose statistics are used
                logits = call(hidden[rows])
            logits = logits if logits.stride(1) == 1 else logits.contiguous()
            backend_of(logits)[1](
                logits,
                tokens[rows],
                temperatures[rows],
                (statistics[0][rows], statistics[1][rows], statistics[2][rows]),
                grads[rows],
                None if entropy_grads is None else entropy_grads[rows],
                logits,
            )
            if autocast and factor.dtype != logits.dtype:
                factor = weight.to(logits.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = logits.to(factor.dtype) @ factor
            if grad_weight is not None:
                _add_product(grad_weight, logits.t(), hidden[rows].to(logits.dtype) if autocast else hidden[rows])
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
            del logits
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, total in float32 (or float64) whatever a and b are."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    elif total.is_cuda and a.dtype == b.dtype:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))  # tensor cores, not rounded to 16 bits
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
