"""Cases of the ops that carry a state per sequence: causal convolution, gated delta rule, linear attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from longtail.bench.kernel_cases import Call, Case, Form, Sizes
from longtail.kernels import causal_conv, causal_conv_triton, gated_delta, linear_attention, state_scan_triton
from longtail.kernels._triton import next_power_of_2

SLOT = 8
"""Bytes of a slot number, or of where a sequence starts."""


def _where(form: Form, n: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cu_seqlens, read, write of `batch` sequences of `rows` rows."""
    cu = torch.arange(n["batch"] + 1, device=form.device) * n["rows"]
    slots = torch.arange(2 * n["batch"], device=form.device)
    return cu, slots[: n["batch"]].clone(), slots[n["batch"] :].clone()


def conv(form: Form, n: Sizes) -> Call:
    """`rows` of each sequence are `kernel` - 1 or more, or 1."""
    batch, channels, kernel = n["batch"], n["channels"], n["kernel"]
    rows, before = batch * n["rows"], n["kernel"] - 1
    x, weight = form.randn(rows, channels), form.randn(channels, kernel, scale=0.5)
    state = form.randn(2 * batch, channels, before)
    cu, read, write = _where(form, n)

    def run(function: Callable[..., torch.Tensor], own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return function(x, weight, None, own, cu, read, write, True), own

    states = state.nbytes // 2  # read, or written
    memory = 2 * x.nbytes + weight.nbytes + 2 * states + (3 * batch + 1) * SLOT
    blocks = -(-channels // min(next_power_of_2(channels), causal_conv_triton.CHANNELS))
    numbers = rows * (batch.bit_length() + 3) + batch * 4  # looked up by each row, and each sequence
    taken = kernel * (x.nbytes + rows * channels * x.itemsize) + x.nbytes + 2 * states
    return Call(
        op=lambda: run(causal_conv.causal_conv, state),
        launch=lambda: run(causal_conv_triton.causal_conv_triton, state),
        reference=lambda: run(causal_conv.causal_conv_reference, state.clone()),
        tokens=rows,
        least=memory,
        memory=memory,
        issued=taken + numbers * blocks * SLOT,
    )


def scan(form: Form, n: Sizes) -> Call:
    """The gated delta rule; linear attention where `delta` is 0."""
    batch, heads, k_heads, k_dim, v_dim = n["batch"], n["heads"], n["k_heads"], n["k_dim"], n["v_dim"]
    rows = batch * n["rows"]
    q, k = form.randn(2, rows, k_heads, k_dim, scale=k_dim**-0.5)
    v, beta = form.randn(rows, heads, v_dim), form.randn(rows, heads).sigmoid()
    g = -form.randn(rows, heads).float().sigmoid()
    state = torch.zeros(2 * batch, heads, k_dim, v_dim, device=form.device)
    where = _where(form, n)

    def run(function: Callable[..., torch.Tensor], own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return function(q, k, v, g, *([beta] if n["delta"] else []), own, *where), own

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        scale, eps = (k_dim**-0.5, gated_delta.L2NORM_EPS) if n["delta"] else (1.0, None)
        one = beta if n["delta"] else None
        return state_scan_triton.state_scan_triton(q, k, v, g, one, state, *where, scale, eps), state

    op = gated_delta.gated_delta_rule if n["delta"] else linear_attention.linear_attention
    reference = gated_delta.gated_delta_rule_reference if n["delta"] else linear_attention.linear_attention_reference
    of_heads = g.nbytes + (beta.nbytes if n["delta"] else 0)
    memory = q.nbytes + k.nbytes + 2 * v.nbytes + of_heads + state.nbytes + (3 * batch + 1) * SLOT
    block_k = next_power_of_2(k_dim)
    blocks = -(-v_dim // min(next_power_of_2(v_dim), max(state_scan_triton.STATE_ELEMENTS // block_k, 1)))
    keys = 2 * rows * heads * blocks * k_dim * q.itemsize
    return Call(
        op=lambda: run(op, state),
        launch=launch,
        reference=lambda: run(reference, state.clone()),
        tokens=rows,
        least=memory,
        memory=memory,
        issued=keys + 2 * v.nbytes + of_heads * blocks + state.nbytes + 4 * SLOT * batch * heads * blocks,
        flops=rows * heads * k_dim * v_dim * (7 if n["delta"] else 5),
    )


CASES = [
    Case(
        "causal_conv",
        "decode",
        conv,
        full={"batch": 64, "rows": 1, "channels": 8192, "kernel": 4},
        cpu={"batch": 32, "rows": 1, "channels": 1536, "kernel": 4},
        small={"batch": 3, "rows": 1, "channels": 500, "kernel": 4},
    ),
    Case(
        "causal_conv",
        "prefill",
        conv,
        full={"batch": 2, "rows": 2048, "channels": 8192, "kernel": 4},
        cpu={"batch": 2, "rows": 256, "channels": 1536, "kernel": 4},
        small={"batch": 2, "rows": 5, "channels": 500, "kernel": 3},
    ),
    Case(
        "gated_delta_rule",
        "decode",
        scan,
        full={"batch": 64, "rows": 1, "k_heads": 16, "heads": 32, "k_dim": 128, "v_dim": 128, "delta": 1},
        cpu={"batch": 8, "rows": 1, "k_heads": 4, "heads": 8, "k_dim": 128, "v_dim": 128, "delta": 1},
        small={"batch": 2, "rows": 1, "k_heads": 1, "heads": 2, "k_dim": 24, "v_dim": 40, "delta": 1},
    ),
    Case(
        "gated_delta_rule",
        "prefill",
        scan,
        full={"batch": 8, "rows": 512, "k_heads": 16, "heads": 32, "k_dim": 128, "v_dim": 128, "delta": 1},
        cpu={"batch": 2, "rows": 128, "k_heads": 4, "heads": 8, "k_dim": 128, "v_dim": 128, "delta": 1},
        small={"batch": 2, "rows": 5, "k_heads": 1, "heads": 2, "k_dim": 24, "v_dim": 40, "delta": 1},
    ),
    Case(
        "linear_attention",
        "decode",
        scan,
        full={"batch": 64, "rows": 1, "k_heads": 1, "heads": 128, "k_dim": 128, "v_dim": 64, "delta": 0},
        cpu={"batch": 8, "rows": 1, "k_heads": 1, "heads": 16, "k_dim": 128, "v_dim": 64, "delta": 0},
        small={"batch": 2, "rows": 1, "k_heads": 1, "heads": 2, "k_dim": 24, "v_dim": 40, "delta": 0},
    ),
]
