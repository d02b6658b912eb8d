"""A row's bits are its own, on a GPU: whatever stands beside it, and whichever way the kernel takes."""

from __future__ import annotations

import pytest
import torch

from longtail.bench.kernel_cases import DTYPES
from longtail.kernels import attention_triton
from longtail.kernels.attention import AttentionBatch, paged_attention
from longtail.kernels.latent import latent_attention
from longtail.kernels.linear import batch_invariant_linear
from longtail.kernels.norm import rms_norm

from .paged import Paged, randn

CONTEXTS = {"uneven": [700, 33, 5, 2050], "even": [2050, 1700, 1900, 2000]}
"""Uneven ones have tiles with far more partitions than the others."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contexts", CONTEXTS)
def test_attention_rows_keep_their_bits(
    contexts: str, dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified in a batch of 4 sequences with 5 rows each, and row by row as decode computes them; by programs that
    take all partitions of a tile and by split ones."""
    lens = CONTEXTS[contexts] if device.type == "cuda" else [n // 8 + 5 for n in CONTEXTS[contexts]]
    p = Paged(device, DTYPES[dtype], [5] * 4, lens)
    outputs = []
    for whole_from in (1, 1 << 40):
        monkeypatch.setattr(attention_triton, "WHOLE_FROM", whole_from)
        together = paged_attention(p.q, p.kv, 1, p.batch(), p.block, p.scale)
        assert together.isfinite().all()
        outputs.append(together)
        for i in range(4):
            for j in range(5):
                row = paged_attention(p.q[5 * i + j][None], p.kv, 1, p.alone(i, j), p.block, p.scale)
                assert torch.equal(row[0], together[5 * i + j]), (whole_from, i, j)
    assert torch.equal(*outputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_rows_keep_their_bits(dtype: str, device: torch.device) -> None:
    lens, (heads, rank, rope) = (
        ([700, 33, 5, 2050], (128, 512, 64)) if device.type == "cuda" else ([70, 9, 5], (4, 32, 8))
    )
    block, queries = 16, 3
    tables, free = [], 0
    for n in lens:
        tables.append(list(range(free, free + -(-n // block))))
        free += len(tables[-1])
    latent = randn(free, 1, block, rank + rope).to(device, DTYPES[dtype])
    q = randn(queries * len(lens), heads, rank, seed=1).to(device, DTYPES[dtype])
    q_rope = randn(queries * len(lens), heads, rope, seed=2).to(device, DTYPES[dtype])
    batch = AttentionBatch.build([queries] * len(lens), lens, tables, heads)
    scale = (rank + rope) ** -0.5
    together = latent_attention(q, q_rope, latent, 0, batch, block, scale)
    for i, n in enumerate(lens):
        for j in range(queries):
            row = slice(queries * i + j, queries * i + j + 1)
            alone = AttentionBatch.build([1], [n - queries + 1 + j], [tables[i]], heads)
            assert torch.equal(latent_attention(q[row], q_rope[row], latent, 0, alone, block, scale), together[row]), (
                i,
                j,
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_norm_rows_keep_their_bits(dtype: str, device: torch.device) -> None:
    x, residual = randn(300, 1000).to(device, DTYPES[dtype]), randn(300, 700, seed=1).to(device, DTYPES[dtype])
    weight, bias = randn(700, 1000, seed=2).to(device, DTYPES[dtype]), randn(700, seed=3).to(device, DTYPES[dtype])
    scale = randn(1000, seed=4).to(device, DTYPES[dtype])
    product, normed = batch_invariant_linear(x, weight, bias, residual), rms_norm(x, scale, 1e-6)
    for rows in (slice(0, 1), slice(7, 10), slice(100, 229), slice(299, 300)):
        assert torch.equal(batch_invariant_linear(x[rows], weight, bias, residual[rows]), product[rows])
        assert torch.equal(rms_norm(x[rows], scale, 1e-6), normed[rows])
