"""The operations of layers that keep a state, for a trainer: the kernels' values, bit for bit, with the gradients of
their plain-torch references, which go token by token. A trainer's pass starts every sequence from the zero state."""

from __future__ import annotations

from typing import Any

import torch

from longtail.kernels import causal_conv as conv_kernel
from longtail.kernels import gated_delta as delta_kernel
from longtail.kernels import linear_attention as linear_kernel
from longtail.partial_rollout.engines.native.differentiable import with_gradient_of


def _zeros(state: torch.Tensor) -> torch.Tensor:
    """For a reference: of another dtype, so that what it reads is a copy and its writes touch nothing in the graph."""
    return torch.zeros(state.shape, dtype=torch.float64)


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
    """As the kernel of this name. With gradients only from states of zeros."""

    def kernel(x: Any, weight: Any, bias: Any) -> torch.Tensor:
        return conv_kernel.causal_conv(x, weight, bias, state, cu_seqlens, read, write, silu)

    def reference(x: Any, weight: Any, bias: Any) -> torch.Tensor:
        start = torch.zeros_like(state)
        return conv_kernel.causal_conv_reference(x, weight, bias, start, cu_seqlens, read, write, silu)

    return with_gradient_of(kernel, reference, x, weight, bias)


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
) -> torch.Tensor:
    """As the kernel of this name. With gradients only from states of zeros."""

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
        return delta_kernel.gated_delta_rule(q, k, v, g, beta, state, cu_seqlens, read, write)

    def reference(q: Any, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
        return delta_kernel.gated_delta_rule_reference(q, k, v, g, beta, _zeros(state), cu_seqlens, read, write)

    return with_gradient_of(kernel, reference, q, k, v, g, beta)


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> torch.Tensor:
    """As the kernel of this name. With gradients only from states of zeros."""

    def kernel(q: Any, k: Any, v: Any, g: Any) -> torch.Tensor:
        return linear_kernel.linear_attention(q, k, v, g, state, cu_seqlens, read, write)

    def reference(q: Any, k: Any, v: Any, g: Any) -> torch.Tensor:
        return linear_kernel.linear_attention_reference(q, k, v, g, _zeros(state), cu_seqlens, read, write)

    return with_gradient_of(kernel, reference, q, k, v, g)
