"""batch_invariant_linear where there is no GPU: by tiles of a fixed number of rows, or by the machine's own rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from longtail.kernels.linear import RowRule, batch_invariant_linear, find_row_rule

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", [None, RowRule("tiles", 4, 4), RowRule("aten", 4, 4)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 17])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_is_f_linear(dtype: torch.dtype, rows: int, rule: RowRule | None) -> None:
    """Computed in float64 and rounded once."""
    x, weight, bias, residual = (
        t.to(dtype) for t in (randn(rows, 40), randn(24, 40, seed=1) / 6, randn(24, seed=2), randn(rows, 24, seed=3))
    )
    for b, r in ((bias, residual), (None, None)):
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        expected = (expected if r is None else expected + r).to(dtype)
        out = batch_invariant_linear(x, weight, b, r, rule)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("by_rule", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_its_bits_in_every_batch(dtype: torch.dtype, by_rule: bool) -> None:
    x, weight, residual = (t.to(dtype) for t in (randn(65, 136), randn(70, 136, seed=1), randn(65, 70, seed=2)))
    rule = find_row_rule([(136, 70)]) if by_rule else None
    whole = batch_invariant_linear(x, weight, None, residual, rule)
    for rows in (1, 3, 17):
        for first in (0, 1, 65 - rows):
            at = slice(first, first + rows)
            assert torch.equal(batch_invariant_linear(x[at], weight, None, residual[at], rule), whole[at])


def test_misuse_is_named() -> None:
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"x torch.float32 \(2, 7\), .*: want \[T, in\] and \[out, in\] of one dtype"):
        batch_invariant_linear(x[:, :7], weight)
    with pytest.raises(ValueError, match=r"weight torch.float16 \(4, 8\): want"):
        batch_invariant_linear(x, weight.half())
    with pytest.raises(ValueError, match=r"bias \(5,\) must be \[4\]"):
        batch_invariant_linear(x, weight, torch.ones(5))
    with pytest.raises(ValueError, match=r"residual \(1, 4\) must be \(2, 4\)"):
        batch_invariant_linear(x, weight, None, torch.ones(1, 4))
