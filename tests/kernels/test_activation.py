"""silu_mul, gelu_tanh, sigmoid: against their references, and that a row's bits are its own."""

from __future__ import annotations

import math

import pytest
import torch

from longtail.kernels.activation import (
    gelu_tanh,
    gelu_tanh_reference,
    sigmoid,
    sigmoid_reference,
    silu_mul,
    silu_mul_reference,
)

SIZES = [1, 15, 16, 17, 40, 576]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_silu_mul_by_hand() -> None:
    """silu(ln 3) = ln 3 * 3/4, silu(-ln 3) = -ln 3 / 4, silu(0) = 0; the gate is the first half."""
    ln3 = math.log(3)
    out = silu_mul(torch.tensor([[ln3, -ln3, 0.0, 2.0, 8.0, 5.0]]))
    assert out[0].tolist() == pytest.approx([ln3 * 3 / 4 * 2, -ln3 / 4 * 8, 0.0], rel=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul_is_the_reference(rows: int, size: int) -> None:
    x = randn(rows, 2 * size, seed=1) * 4
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), rtol=1e-6, atol=1e-6)


def test_silu_mul_over_the_whole_range_of_the_gate() -> None:
    gate = torch.linspace(-100, 100, 20_001)
    x = torch.cat([gate, torch.ones_like(gate)])[None]
    exact = (gate.double() * torch.sigmoid(gate.double())).float()[None]
    torch.testing.assert_close(silu_mul(x), exact, rtol=5e-7, atol=1e-35)


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul_rows_do_not_depend_on_the_batch(size: int) -> None:
    x = randn(9, 2 * size, seed=3)
    whole = silu_mul(x)
    for t in range(9):
        assert torch.equal(silu_mul(x[t : t + 1])[0], whole[t])
    assert torch.equal(silu_mul(x.flip(0)), whole.flip(0))
    spoiled = x.clone()
    spoiled[[0, 8]] = float("nan")
    assert torch.equal(silu_mul(spoiled)[1:8], whole[1:8])


def test_silu_mul_columns_do_not_depend_on_their_place() -> None:
    """Vector lanes and the scalar rest of a row do the same arithmetic."""
    gate, up = randn(1, seed=4).item(), randn(1, seed=5).item()
    outs = [silu_mul(torch.tensor([[gate] * size + [up] * size])).unique() for size in (1, 7, 16, 33)]
    assert len(torch.cat(outs).unique()) == 1


@pytest.mark.parametrize("gate", [0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38])
def test_silu_mul_extremes_are_finite(gate: float) -> None:
    x = torch.full((2, 34), gate)
    x[:, 17:] = 1.0
    out = silu_mul(x)
    assert out.isfinite().all()
    torch.testing.assert_close(out, silu_mul_reference(x), rtol=1e-6, atol=1e-30)


def test_silu_mul_does_not_hide_a_nan() -> None:
    assert silu_mul(torch.tensor([[math.nan, 1.0]])).isnan().all()
    assert silu_mul(torch.tensor([[1.0, math.nan]])).isnan().all()


def test_silu_mul_of_no_rows() -> None:
    assert silu_mul(torch.empty(0, 24)).shape == (0, 12)


def test_silu_mul_bfloat16_keeps_its_dtype() -> None:
    x = randn(3, 40).bfloat16()
    out = silu_mul(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), silu_mul(x.float()), rtol=2e-2, atol=2e-2)


def test_gelu_tanh_over_its_whole_range() -> None:
    x = torch.linspace(-30, 30, 20_001)
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu_tanh(x), exact, rtol=1e-6, atol=1e-7)
    assert gelu_tanh(torch.tensor([0.0, 1.0, -1.0])).tolist() == pytest.approx([0.0, 0.8411920, -0.1588080], rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_gelu_tanh_elements_do_not_depend_on_their_place(size: int) -> None:
    x = randn(9, size, seed=6) * 3
    whole = gelu_tanh(x)
    torch.testing.assert_close(whole, gelu_tanh_reference(x), rtol=1e-5, atol=1e-6)
    for t in range(9):
        assert torch.equal(gelu_tanh(x[t : t + 1])[0], whole[t])
        assert torch.equal(gelu_tanh(x[t, -1:]), whole[t, -1:])
    assert torch.equal(gelu_tanh(x.flip(0, 1)), whole.flip(0, 1))
    assert torch.equal(gelu_tanh(x.T), whole.T)


def test_gelu_tanh_at_the_edges() -> None:
    x = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38])
    assert torch.equal(gelu_tanh(x), gelu_tanh_reference(x))
    assert gelu_tanh(torch.tensor([math.nan])).isnan().all()
    assert gelu_tanh(torch.empty(0, 24)).shape == (0, 24)
    y = randn(3, 40).bfloat16()
    assert gelu_tanh(y).dtype == torch.bfloat16 and torch.equal(gelu_tanh(y), gelu_tanh_reference(y))


def test_sigmoid_over_its_whole_range() -> None:
    x = torch.cat([torch.linspace(-110, 110, 20_001), torch.tensor([0.0, -0.0, 3e38, -3e38, math.inf, -math.inf])])
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x.double()).float(), rtol=5e-7, atol=1e-37)
    assert sigmoid(torch.tensor([math.log(3), -math.log(3), 0.0])).tolist() == pytest.approx([0.75, 0.25, 0.5])


def test_sigmoid_does_not_depend_on_the_place() -> None:
    """torch's does: its last elements take another exponential."""
    x = randn(1001, seed=5) * 4
    whole = sigmoid(x)
    for n in (1, 7, 16, 33):
        assert torch.equal(sigmoid(x[:n]), whole[:n]) and torch.equal(sigmoid(x[-n:]), whole[-n:])
    assert torch.equal(sigmoid(x.view(7, 143).T), whole.view(7, 143).T)  # and whatever the strides are


def test_sigmoid_does_not_hide_a_nan() -> None:
    assert sigmoid(torch.tensor([math.nan, 1.0])).isnan().tolist() == [True, False]
    assert sigmoid(torch.empty(0, 3)).shape == (0, 3)
    x = randn(5).bfloat16()
    assert torch.equal(sigmoid(x), sigmoid_reference(x))
