"""rope_store_kv's Triton kernel: against the reference, one launch, and that a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton.paged import randn
from triton.runtime.errors import InterpreterError

from longtail.kernels.rope import rope_store_kv_reference, rope_store_kv_triton

TOLERANCES: dict[torch.dtype, Any] = {  # a rounding that falls the other way in each of three places; float32: the sum
    torch.float32: {"rtol": 3e-6, "atol": 2e-6},
    torch.float16: {"rtol": 3e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2.4e-2, "atol": 1.6e-2},
}
LAYERS, BLOCKS, BLOCK = 2, 3, 4


pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")


class Case:
    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
        rotary: int | None = None,
        norm: bool = True,
        cache: torch.dtype | None = None,
        weights: torch.dtype | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.cache = heads, kv_heads, dim, cache or dtype
        self.positions, self.slots = torch.tensor([0, 19, 7, 7, 3]), torch.tensor([5, -1, 4 * BLOCK - 5, 0, 3])
        self.qkv = (randn(5, (heads + 2 * kv_heads) * dim, seed=1) * 3).to(dtype)
        angles = torch.outer(torch.arange(20.0), 100.0 ** -torch.linspace(0, 1, (rotary or dim) // 2))
        self.cos, self.sin = angles.cos(), angles.sin()
        both = (1 + randn(2, dim, seed=4) / 4).to(weights or dtype)
        self.weights: list[Any] = list(both) if norm else [None, None]

    def run(
        self, op: Any, rows: Any = slice(None), qkv: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> q, and a cache that was NaN."""
        kv = torch.full((BLOCKS, LAYERS, 2, self.kv_heads, BLOCK, self.dim), torch.nan).to(self.cache)
        x, where = self.qkv if qkv is None else qkv, (self.positions[rows], self.slots[rows])
        args = (x[rows], self.cos, self.sin, where[0], *self.weights, 1e-5, kv, 1, where[1])
        return op(*args, BLOCK, self.heads, self.kv_heads), kv


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(3, 1, 64), (1, 1, 80), (9, 3, 96), (20, 2, 128), (2, 2, 256), (3, 1, 6)]
)
def test_it_is_the_reference(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norm: bool) -> None:
    """Padding rows, block boundaries, one program a token and several; nothing but the slots is written."""
    case = Case(heads, kv_heads, dim, dtype, norm=norm)
    (q, kv), (expected_q, expected_kv) = case.run(rope_store_kv_triton), case.run(rope_store_kv_reference)
    torch.testing.assert_close(q, expected_q, **TOLERANCES[dtype])
    torch.testing.assert_close(kv, expected_kv, **TOLERANCES[dtype], equal_nan=True)
    assert torch.equal(kv[:, 1, 1].nan_to_num(-9.0), expected_kv[:, 1, 1].nan_to_num(-9.0))  # v is only moved


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("dim", "rotary"), [(80, 32), (64, 16), (96, 90)])
def test_partial_rotary(dim: int, rotary: int, dtype: torch.dtype) -> None:
    case = Case(3, 1, dim, dtype, rotary=rotary)
    (q, kv), (expected_q, expected_kv) = case.run(rope_store_kv_triton), case.run(rope_store_kv_reference)
    torch.testing.assert_close(q, expected_q, **TOLERANCES[dtype])
    torch.testing.assert_close(kv, expected_kv, **TOLERANCES[dtype], equal_nan=True)


@pytest.mark.parametrize("cache", TOLERANCES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_other_dtypes_of_cache_and_weights(cache: torch.dtype, weights: torch.dtype) -> None:
    case = Case(3, 1, 64, torch.bfloat16, cache=cache, weights=weights)
    (q, kv), (expected_q, expected_kv) = case.run(rope_store_kv_triton), case.run(rope_store_kv_reference)
    assert q.dtype == torch.bfloat16
    torch.testing.assert_close(q, expected_q, **TOLERANCES[torch.bfloat16])
    torch.testing.assert_close(kv, expected_kv, **TOLERANCES[torch.bfloat16], equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    case = Case(3, 1, 64, dtype)
    q, kv = case.run(rope_store_kv_triton)
    for t in range(5):
        alone, alone_kv = case.run(rope_store_kv_triton, slice(t, t + 1))
        assert torch.equal(alone[0], q[t])
        if (slot := int(case.slots[t])) >= 0:
            at = (slot // BLOCK, 1, slice(None), slice(None), slot % BLOCK)
            assert torch.equal(alone_kv[at], kv[at])
    spoiled = case.qkv.clone()
    spoiled[[0, 3]] = torch.nan
    assert torch.equal(case.run(rope_store_kv_triton, qkv=spoiled)[0][[1, 2, 4]], q[[1, 2, 4]])


def test_a_nan_is_not_hidden_and_stays_in_its_head() -> None:
    case = Case(3, 1, 64)
    case.qkv[0, 64 + 5] = torch.nan  # of the second head
    q, _ = case.run(rope_store_kv_triton)
    assert q[0, 1].isnan().all()
    assert q[0, [0, 2]].isfinite().all()
    case = Case(3, 1, 64)
    case.qkv[0, [4 * 64, 4 * 64 + 33]] = torch.inf  # of v, which is not turned: inf * 0 would be NaN
    _, kv = case.run(rope_store_kv_triton)
    assert kv[1, 1, 1, 0, 1].isinf().nonzero().flatten().tolist() == [0, 33]
    assert not kv[1, 1, 1, 0, 1].isnan().any()


def test_a_strided_projection_and_no_rows() -> None:
    case = Case(3, 1, 64)
    q, _ = case.run(rope_store_kv_triton)
    wide = torch.cat([case.qkv, case.qkv], dim=1)
    assert torch.equal(case.run(rope_store_kv_triton, qkv=wide[:, : 5 * 64])[0], q)
    assert case.run(rope_store_kv_triton, slice(0, 0))[0].shape == (0, 3, 64)


@pytest.mark.parametrize("where", ["slots", "positions"])
def test_what_lies_beyond_is_caught(where: str) -> None:
    case = Case(3, 1, 16)
    getattr(case, where)[2] = BLOCKS * BLOCK if where == "slots" else 20
    with pytest.raises(InterpreterError, match=rf"a {where[:-1]} lies beyond"):
        case.run(rope_store_kv_triton)


def test_misuse_is_named() -> None:
    case = Case(1, 1, 8)
    kv, (q_weight, k_weight) = torch.zeros(3, 2, 2, 1, BLOCK * 8), case.weights
    args = (case.qkv, case.cos, case.sin, case.positions, q_weight, k_weight, 1e-5)
    with pytest.raises(ValueError, match="must be contiguous"):
        rope_store_kv_triton(*args, kv, 1, case.slots, BLOCK, 1, 1)
    case.cos = case.cos.half()
    with pytest.raises(ValueError, match=r"cos torch.float16"):
        case.run(rope_store_kv_triton)
