"""The Triton kernels on a GPU: against the references at the sizes of a real model, and that a row's bits are its own.

Skipped, with a count, where there is no CUDA device. `pytest tests/gpu`
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from longtail.bench.kernel_case_list import CASES
from longtail.bench.kernel_cases import DTYPES, Case, Form
from longtail.kernels.attention import AttentionBatch, paged_attention
from longtail.kernels.kv import empty_kv
from longtail.kernels.linear import batch_invariant_linear
from longtail.kernels.norm import rms_norm
from longtail.kernels.sample import SampleBatch, sample

pytestmark = pytest.mark.gpu

TOLERANCES: dict[str, Any] = {  # sums of thousands of terms in another order, and the output's rounding
    "float32": {"rtol": 1e-4, "atol": 1e-4},
    "float16": {"rtol": 5e-3, "atol": 5e-3},
    "bfloat16": {"rtol": 3e-2, "atol": 3e-2},
}


def tensors(result: Any) -> list[torch.Tensor]:
    items = result if isinstance(result, tuple) else (result,)
    return [torch.as_tensor(np.asarray(x)) if isinstance(x, np.ndarray) else x for x in items]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case.name} {dtype}") for case in CASES for dtype in case.dtypes],
)
def test_op_equals_its_reference(case: Case, dtype: str) -> None:
    call = case.make(Form(torch.device("cuda"), "triton", DTYPES[dtype]), case.cpu)
    expected = tensors(call.reference())  # first: in-place ops work on a copy there
    for got, wanted in zip(tensors(call.op()), expected, strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), **TOLERANCES[dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_rows_keep_their_bits(dtype: str) -> None:
    """Verified in a batch of 4 sequences with 5 rows each, and row by row as decode computes them."""
    lens, heads, kv_heads, dim, block = [700, 33, 5, 2050], 8, 2, 128, 16
    kv = torch.randn_like(empty_kv(256, 1, kv_heads, block, dim, layout="hnd", device="cuda"))
    kv = kv.to(DTYPES[dtype])
    tables, free = [], 0
    for n in lens:
        tables.append(list(range(free, free + -(-n // block))))
        free += len(tables[-1])
    q = torch.randn(20, heads, dim, device="cuda").to(DTYPES[dtype])
    together = AttentionBatch.build([5] * 4, lens, tables, heads // kv_heads)
    expected = paged_attention(q, kv, 0, together, block, dim**-0.5)
    for i, n in enumerate(lens):
        for j in range(5):
            alone = AttentionBatch.build([1], [n - 4 + j], [tables[i]], heads // kv_heads)
            row = paged_attention(q[5 * i + j][None], kv, 0, alone, block, dim**-0.5)
            assert torch.equal(row[0], expected[5 * i + j]), (i, j)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_norm_rows_keep_their_bits(dtype: str) -> None:
    x = torch.randn(300, 1000, device="cuda").to(DTYPES[dtype])
    weight = torch.randn(700, 1000, device="cuda").to(DTYPES[dtype])
    scale = torch.randn(1000, device="cuda").to(DTYPES[dtype])
    product, normed = batch_invariant_linear(x, weight), rms_norm(x, scale, 1e-6)
    for rows in (slice(0, 1), slice(7, 10), slice(100, 229), slice(299, 300)):
        assert torch.equal(batch_invariant_linear(x[rows], weight), product[rows])
        assert torch.equal(rms_norm(x[rows], scale, 1e-6), normed[rows])


def test_sampled_tokens_are_those_of_the_cpu() -> None:
    """The same noise on both: of 2,000 draws none may differ, but where two scores are within rounding (expected: less
    than one in 10,000)."""
    rows = 2000
    logits = 2 * torch.randn(rows, 5000, generator=torch.Generator().manual_seed(0))
    batch = SampleBatch(
        np.full(rows, 0.7, np.float32), np.arange(rows, dtype=np.uint64), np.arange(rows, dtype=np.int64)
    )
    on_cpu, logprobs = sample(logits, batch)
    on_gpu, gpu_logprobs = sample(logits.cuda(), batch)
    same = on_cpu == on_gpu
    assert same.sum() >= rows - 3
    np.testing.assert_allclose(gpu_logprobs[same], logprobs[same], atol=1e-4)
