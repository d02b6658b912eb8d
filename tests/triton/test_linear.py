"""batch_invariant_linear's Triton kernel: against the reference, and that a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton.paged import randn

from longtail.kernels import linear
from longtail.kernels.linear import (
    Tile,
    batch_invariant_linear_reference,
    batch_invariant_linear_triton,
    tile_for,
)

TOLERANCES: dict[torch.dtype, Any] = {  # the order of the sum, then one rounding
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-4},
}


pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")


def case(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """-> x, weight, bias, residual"""
    weight = randn(outputs, inputs, seed=1) / inputs**0.5
    bias, residual = randn(outputs, seed=2), randn(rows, outputs, seed=3)
    return randn(rows, inputs).to(dtype), weight.to(dtype), bias.to(dtype), residual.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 3, 64, 65, 130])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (40, 24), (200, 70), (1, 1), (100, 130)])
def test_it_is_the_reference(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> None:
    """Whole tiles and edges in each of the three directions."""
    x, weight, bias, residual = case(rows, inputs, outputs, dtype)
    out = batch_invariant_linear_triton(x, weight, bias, residual)
    assert out.dtype == dtype
    torch.testing.assert_close(out, batch_invariant_linear_reference(x, weight, bias, residual), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_without_bias_or_residual_and_with_others_dtypes(dtype: torch.dtype) -> None:
    x, weight, bias, residual = case(3, 72, 40, dtype)
    for b, r in ((None, None), (bias.float(), None), (None, residual.float()), (bias, residual)):
        expected = batch_invariant_linear_reference(x, weight, b, r)
        torch.testing.assert_close(batch_invariant_linear_triton(x, weight, b, r), expected, **TOLERANCES[dtype])


def test_wide_outputs_take_another_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in TOLERANCES:
        assert tile_for(dtype, 8192, amd=False).outputs == 64
        assert tile_for(dtype, 8193, amd=False).outputs == (64 if dtype == torch.float32 else 128)
    x, weight, bias, residual = case(2, 16, 8200, torch.bfloat16)
    expected = batch_invariant_linear_reference(x, weight, bias, residual)
    out = batch_invariant_linear_triton(x, weight, bias, residual)
    torch.testing.assert_close(out, expected, **TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_has_its_bits_in_every_batch_and_at_every_place(dtype: torch.dtype) -> None:
    """Row counts on both sides of a tile; the same row first, in the middle and last; NaN in the rows beside it. Proves
    the order of the kernel's own sums, given that `tl.dot` treats the rows of a tile alike (here in order of k)."""
    x, weight, bias, residual = case(130, 136, 70, dtype)
    whole = batch_invariant_linear_triton(x, weight, bias, residual)
    for rows in (1, 3, 17, 65):
        for first in (0, 1, 130 - rows):
            at = slice(first, first + rows)
            assert torch.equal(batch_invariant_linear_triton(x[at], weight, bias, residual[at]), whole[at])
    assert torch.equal(batch_invariant_linear_triton(x.flip(0), weight, bias, residual.flip(0)), whole.flip(0))
    spoiled = x.clone()
    spoiled[[0, 5, 129]] = torch.nan
    kept = torch.ones(130, dtype=torch.bool)
    kept[[0, 5, 129]] = False
    out = batch_invariant_linear_triton(spoiled, weight, bias, residual)
    assert torch.equal(out[kept], whole[kept])
    assert out[~kept].isnan().all()


def test_the_comparison_of_bits_sees_another_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tile that depended on the batch would do: the sum is cut at other places."""
    x, weight, bias, residual = case(16, 256, 32, torch.float32)
    before = batch_invariant_linear_triton(x, weight, bias, residual)
    monkeypatch.setattr(linear, "tile_for", lambda *_: Tile(64, 64, 16, 4, 1))
    after = batch_invariant_linear_triton(x, weight, bias, residual)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_program_has_its_tile_whatever_the_order(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row tiles that fill no group, just one, and one and a part; bits do not depend on the order of programs."""
    x, weight, bias, residual = case(64 * 5 - 3, 16, 130, torch.float32)
    expected = batch_invariant_linear_triton(x, weight, bias, residual)
    torch.testing.assert_close(
        expected, batch_invariant_linear_reference(x, weight, bias, residual), **TOLERANCES[torch.float32]
    )
    monkeypatch.setattr(linear, "GROUP", group)
    assert torch.equal(batch_invariant_linear_triton(x, weight, bias, residual), expected)


def test_views_and_nothing() -> None:
    x, weight, bias, residual = case(3, 48, 24, torch.float32)
    expected = batch_invariant_linear_triton(x, weight, bias, residual)
    wide = torch.cat([x, x], dim=1)
    out = batch_invariant_linear_triton(wide[:, :48], weight.T.contiguous().T, bias, residual.T.contiguous().T)
    assert torch.equal(out, expected)
    assert batch_invariant_linear_triton(x[:0], weight, bias, residual[:0]).shape == (0, 24)


def test_infinities_and_nan_are_not_hidden() -> None:
    x, weight, _, _ = case(2, 48, 24, torch.float32)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    weight = weight.abs()
    out = batch_invariant_linear_triton(x, weight)
    assert (out[0] == torch.inf).all()
    assert out[1].isnan().all()
