"""softmax: against its reference, and that a row's bits are its own."""

from __future__ import annotations

import math

import pytest
import torch

from longtail.kernels.softmax import softmax, softmax_reference


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33, 257])
def test_softmax_is_the_reference(size: int) -> None:
    x = randn(3, 5, size) * 8
    torch.testing.assert_close(softmax(x), softmax_reference(x.double()).float(), rtol=5e-6, atol=1e-37)


def test_softmax_by_hand() -> None:
    x = torch.tensor([[0.0, math.log(2), math.log(5)], [-math.inf, 3e38, 0.0]])
    assert softmax(x).flatten().tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8, 0.0, 1.0, 0.0])


@pytest.mark.parametrize("size", [1, 7, 16, 33])
def test_softmax_rows_do_not_depend_on_the_batch(size: int) -> None:
    x = randn(9, size)
    whole = softmax(x)
    for t in range(9):
        assert torch.equal(softmax(x[t]), whole[t])
    assert torch.equal(softmax(x.flip(0)), whole.flip(0))
    assert torch.equal(softmax(x.T.contiguous().T), whole)


def test_softmax_carries_a_nan_and_hides_none() -> None:
    """As torch does, also where a row has nothing but -inf."""
    x = torch.tensor([[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [-math.inf, -math.inf], [1.0, 2.0]])
    assert torch.equal(softmax(x).isnan(), softmax_reference(x).isnan())


def test_softmax_of_nothing_and_of_other_dtypes() -> None:
    assert softmax(torch.empty(0, 3)).shape == (0, 3) and softmax(torch.empty(3, 0)).shape == (3, 0)
    x = randn(3, 5).bfloat16()
    assert torch.equal(softmax(x), softmax_reference(x))
