"""rms_norm and silu_mul, the ops on rows: against their references, and a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton.paged import randn

from longtail.kernels.activation import silu_mul_reference, silu_mul_triton
from longtail.kernels.norm import MOST_COLUMNS, rms_norm_reference, rms_norm_triton

pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")

TOLERANCES: dict[torch.dtype, Any] = {  # two roundings to the dtype; float32: the sum's order, another exp
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
}
SIZES = [1, 17, 64, 576, 2050]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rms_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, size, dtype=dtype) * 3, randn(size, seed=1, dtype=dtype)
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-5), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    x = randn(rows, 2 * size, dtype=dtype) * 4
    torch.testing.assert_close(silu_mul_triton(x), silu_mul_reference(x), **TOLERANCES[dtype])


def test_rms_norm_of_heads_in_a_fused_projection_with_float32_weights() -> None:
    x, weight = randn(3, 2, 40, dtype=torch.bfloat16)[:, :, 4:24], randn(20, seed=1)
    out = rms_norm_triton(x, weight, 1e-6)
    expected = rms_norm_reference(x, weight, 1e-6)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected, **TOLERANCES[torch.bfloat16])


def test_views_and_leading_dimensions() -> None:
    wide = randn(2, 3, 96)
    for view in (wide[:, :, ::2], wide[:, :, 10:58], wide[:, 1]):
        weight = randn(view.shape[-1], seed=1)
        torch.testing.assert_close(
            rms_norm_triton(view, weight, 1e-6), rms_norm_reference(view, weight, 1e-6), **TOLERANCES[torch.float32]
        )
        torch.testing.assert_close(silu_mul_triton(view), silu_mul_reference(view), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, weight = randn(5, 576, dtype=dtype), randn(576, seed=1, dtype=dtype)
    for op in (lambda rows: rms_norm_triton(rows, weight, 1e-6), silu_mul_triton):
        whole = op(x)
        assert torch.equal(torch.cat([op(x[t : t + 1]) for t in range(5)]), whole)
        assert torch.equal(op(x.flip(0)), whole.flip(0))
        spoiled = x.clone()
        spoiled[[0, 4]] = torch.nan
        assert torch.equal(op(spoiled)[1:4], whole[1:4])


@pytest.mark.parametrize("gate", [0.0, -0.0, 88.0, -88.0, -104.0, 1e4, -1e4, 3e38, -3e38])
def test_silu_mul_extremes_are_finite(gate: float) -> None:
    x = torch.tensor([[gate, 1.0]])
    out = silu_mul_triton(x)
    assert out.isfinite().all()
    torch.testing.assert_close(out, silu_mul_reference(x), rtol=1e-6, atol=1e-30)


def test_a_nan_is_not_hidden() -> None:
    assert silu_mul_triton(torch.tensor([[torch.nan, 1.0]])).isnan().all()
    assert silu_mul_triton(torch.tensor([[1.0, torch.nan]])).isnan().all()
    assert rms_norm_triton(torch.tensor([[1.0, torch.nan]]), torch.ones(2), 1e-6).isnan().all()


def test_no_rows() -> None:
    assert rms_norm_triton(torch.zeros(0, 24), torch.ones(24), 1e-6).shape == (0, 24)
    assert silu_mul_triton(torch.zeros(0, 24)).shape == (0, 12)


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="silu_mul: gate and up have different sizes"):
        silu_mul_triton(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"rms_norm: weight \(4,\) must be \[3\]"):
        rms_norm_triton(torch.zeros(1, 3), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="at most"):
        rms_norm_triton(torch.zeros(1, MOST_COLUMNS + 1), torch.ones(MOST_COLUMNS + 1), 1e-6)
