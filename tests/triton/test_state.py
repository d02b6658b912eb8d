"""causal_conv, gated_delta_rule and linear_attention: against their references, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.triton.paged import randn

from longtail.kernels.causal_conv import causal_conv_reference
from longtail.kernels.causal_conv_triton import causal_conv_triton
from longtail.kernels.gated_delta import L2NORM_EPS, gated_delta_rule_reference
from longtail.kernels.linear_attention import linear_attention_reference
from longtail.kernels.state_scan_triton import state_scan_triton

pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")

TOLERANCES: dict[torch.dtype, Any] = {  # one rounding to the dtype; float32: the order of sums, another exp
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-3},
}
LENS = [5, 0, 1, 9]
Parts = list[torch.Tensor]


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)


def where() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cu_seqlens, read, write of LENS: slots 0 and 1 are read, 2 to 5 written, 6 is nobody's."""
    return torch.tensor([0, *LENS]).cumsum(0), int64(0, 1, 0, 1), int64(2, 3, 4, 5)


def check_cuts(op: Callable[..., torch.Tensor], parts: Parts, state: torch.Tensor) -> None:
    """op(parts, state, cu, read, write). Rows and states bit for bit: of all sequences at once, with padding of NaN;
    each alone; row by row, through slots that take turns."""
    cu, read, write = where()
    whole = op([torch.cat([x, torch.full_like(x[:2], torch.nan)]) for x in parts], state, cu, read, write)
    assert not whole[cu[-1] :].any()
    for i, start in enumerate(cu[:-1].tolist()):
        own = [x[start : start + LENS[i]] for x in parts]
        alone, by_row = state.clone(), state[int(read[i])].repeat(2, *[1] * (state.dim() - 1))
        out = op(own, alone, int64(0, LENS[i]), read[i : i + 1], int64(6))
        assert torch.equal(out, whole[start : start + LENS[i]])
        assert torch.equal(alone[6], state[write[i]])
        for t in range(LENS[i]):
            row = op([x[t : t + 1] for x in own], by_row, int64(0, 1), int64(t % 2), int64((t + 1) % 2))
            assert torch.equal(row, out[t : t + 1])
        assert torch.equal(by_row[LENS[i] % 2], state[write[i]])


# ---- causal convolution

CONVOLUTIONS = [(1, 2, False, True), (17, 4, True, False), (1100, 3, True, True)]


@pytest.mark.parametrize(("channels", "kernel", "bias", "silu"), CONVOLUTIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_causal_conv(dtype: torch.dtype, channels: int, kernel: int, bias: bool, silu: bool) -> None:
    x, weight = randn(17, channels, dtype=dtype), randn(channels, kernel, seed=1, dtype=dtype)
    shift = randn(channels, seed=2, dtype=dtype) if bias else None
    state = randn(7, channels, kernel - 1, seed=3, dtype=dtype)
    twin = state.clone()
    out = causal_conv_triton(x, weight, shift, state, *where(), silu)
    expected = causal_conv_reference(x, weight, shift, twin, *where(), silu)
    torch.testing.assert_close(out, expected, **TOLERANCES[dtype])
    assert torch.equal(state, twin)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_causal_conv_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    weight, bias = randn(17, 4, seed=1, dtype=dtype), randn(17, seed=2, dtype=dtype)

    def op(parts: Parts, state: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
        cu, read, write = at
        return causal_conv_triton(parts[0], weight, bias, state, cu, read, write, True)

    check_cuts(op, [randn(15, 17, dtype=dtype)], randn(7, 17, 3, seed=3, dtype=dtype))


def test_causal_conv_of_views_and_of_nothing() -> None:
    x, memory = randn(15, 40)[:, 3:20], randn(7, 2, 17, 3)
    weight, state = randn(17, 4), memory[:, 1]
    twin = state.clone()
    out = causal_conv_triton(x, weight, None, state, *where())
    torch.testing.assert_close(out, causal_conv_reference(x, weight, None, twin, *where()), rtol=1e-5, atol=1e-5)
    assert torch.equal(memory[:, 1], twin) and torch.equal(memory[:, 0], randn(7, 2, 17, 3)[:, 0])
    assert causal_conv_triton(x[:0], weight, None, state, int64(0), int64(), int64()).shape == (0, 17)
    padding = causal_conv_triton(x[:2], weight, None, state, int64(0), int64(), int64())
    assert torch.equal(padding, torch.zeros(2, 17))


# ---- the scan


def inputs(size: tuple[int, ...], by_channel: bool, dtype: torch.dtype) -> Parts:
    """q, k, v, g, beta of 15 rows."""
    k_heads, v_heads, k_dim, v_dim = size
    q, k = (randn(15, k_heads, k_dim, seed=i, dtype=dtype) for i in (1, 2))
    g = -3 * randn(15, v_heads, *([k_dim] if by_channel else []), seed=3).sigmoid()
    return [q, k, randn(15, v_heads, v_dim, seed=4, dtype=dtype), g, randn(15, v_heads, seed=5).sigmoid().to(dtype)]


def delta(parts: Parts, state: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
    q, k, v, g, beta = parts
    cu, read, write = at
    return state_scan_triton(q, k, v, g, beta, state, cu, read, write, 0.5, L2NORM_EPS)


def linear(parts: Parts, state: torch.Tensor, *at: torch.Tensor) -> torch.Tensor:
    q, k, v, g, _ = parts
    cu, read, write = at
    return state_scan_triton(q, k, v, g, None, state, cu, read, write, 0.5, None)


SIZES = [(1, 1, 4, 4), (2, 4, 7, 33), (1, 2, 130, 40)]  # k_heads, v_heads, k_dim, v_dim


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_state_scan(dtype: torch.dtype, size: tuple[int, ...], by_channel: bool) -> None:
    parts = inputs(size, by_channel, dtype)
    q, k, v, g, beta = parts
    for op in (delta, linear):
        state = randn(7, *size[1:], seed=6)
        twin = state.clone()
        out = op(parts, state, *where())
        if op is delta:
            expected = gated_delta_rule_reference(q, k, v, g, beta, twin, *where(), scale=0.5)
        else:
            expected = linear_attention_reference(q, k, v, g, twin, *where(), scale=0.5)
        tolerance = TOLERANCES[dtype] if op is delta else {k: 4 * v for k, v in TOLERANCES[dtype].items()}
        torch.testing.assert_close(out, expected, **tolerance)
        torch.testing.assert_close(state, twin, rtol=1e-5, atol=1e-5)
        assert torch.equal(state[[0, 1, 3, 6]], twin[[0, 1, 3, 6]])


@pytest.mark.parametrize("op", [delta, linear])
@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_scan_rows_do_not_depend_on_the_batch(
    dtype: torch.dtype, by_channel: bool, op: Callable[..., torch.Tensor]
) -> None:
    size = (2, 4, 7, 33)
    check_cuts(op, inputs(size, by_channel, dtype), randn(7, *size[1:], seed=6))


def test_a_nan_is_not_hidden() -> None:
    size = (2, 4, 7, 33)
    for part in range(5):
        parts, state = inputs(size, False, torch.float32), randn(7, *size[1:], seed=6)
        parts[part][3] = torch.nan
        out = delta(parts, state, *where())
        assert out[3].isnan().all() and out[[*range(3), *range(5, 15)]].isfinite().all()
        assert state[2].isnan().any() == (part > 0) and state[3:6].isfinite().all()
