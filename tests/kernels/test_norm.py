"""rms_norm: against its reference, and that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from longtail.kernels.norm import rms_norm, rms_norm_reference

SIZES = [1, 15, 16, 17, 40, 576]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_by_hand() -> None:
    """The mean square of (1, -7, 5, 5) is 25; with eps 0 the row is divided by 5."""
    x, weight = torch.tensor([[1.0, -7.0, 5.0, 5.0]]), torch.tensor([1.0, 1.0, 2.0, 0.0])
    torch.testing.assert_close(rms_norm(x, weight, 0.0), torch.tensor([[0.2, -1.4, 2.0, 0.0]]))
    # eps stands under the root: 25 + 11 = 36
    torch.testing.assert_close(rms_norm(x, weight, 11.0), torch.tensor([[1 / 6, -7 / 6, 10 / 6, 0.0]]))


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_is_the_reference(rows: int, size: int) -> None:
    x, weight = randn(rows, size, seed=1) * 5, randn(size, seed=2)
    out = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (size,), weight, 1e-5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_rows_do_not_depend_on_the_batch(size: int) -> None:
    x, weight = randn(9, size, seed=3), randn(size, seed=4)
    whole = rms_norm(x, weight, 1e-6)
    for t in range(9):
        assert torch.equal(rms_norm(x[t : t + 1], weight, 1e-6)[0], whole[t])
    assert torch.equal(rms_norm(x.flip(0), weight, 1e-6), whole.flip(0))
    spoiled = x.clone()
    spoiled[[0, 8]] = float("nan")  # a broken neighbour stays its own affair
    assert torch.equal(rms_norm(spoiled, weight, 1e-6)[1:8], whole[1:8])


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e18, -1e18, 1e30, 3e38])
@pytest.mark.parametrize("size", [1, 17, 64])
def test_rms_norm_extremes_are_finite(value: float, size: int) -> None:
    """Squares that overflow give 0, as in the reference; zeros stay zeros."""
    x = torch.full((2, size), value)
    out = rms_norm(x, torch.ones(size), 1e-6)
    assert out.isfinite().all()
    torch.testing.assert_close(out, rms_norm_reference(x, torch.ones(size), 1e-6), rtol=1e-5, atol=0)


def test_rms_norm_input_is_left_alone_and_may_be_a_view() -> None:
    wide = randn(4, 64, seed=5)
    before, view = wide.clone(), wide[:, ::2]
    torch.testing.assert_close(
        rms_norm(view, torch.ones(32), 1e-6), rms_norm_reference(view, torch.ones(32), 1e-6), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(wide, before)


def test_rms_norm_of_no_rows() -> None:
    assert rms_norm(torch.empty(0, 24), torch.ones(24), 1e-6).shape == (0, 24)


def test_rms_norm_bfloat16_keeps_its_dtype() -> None:
    x, weight = randn(3, 40).bfloat16(), randn(40, seed=1).bfloat16()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), rms_norm(x.float(), weight.float(), 1e-6), rtol=2e-2, atol=2e-2)
