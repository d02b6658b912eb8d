"""paged_attention's Triton kernels: against the reference, and that a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton.paged import KVCase

from longtail.kernels import attention_triton
from longtail.kernels.attention import AttentionBatch, paged_attention_reference, paged_attention_triton
from longtail.kernels.kv import empty_kv

TOLERANCES: dict[torch.dtype, Any] = {  # float16, bfloat16: p rounded to the dtype before p @ v, and the output
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 8e-3},
}
PARTITION = 128


@pytest.fixture(autouse=True)
def small_partitions(outputs_start_as_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_triton, "PARTITION", PARTITION)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"),
    [(3, 1, 16, 16), (9, 3, 64, 16), (2, 2, 20, 32), (4, 1, 128, 64), (1, 1, 8, 1)],
)
def test_decode(heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype) -> None:
    """One token, page boundaries, one partition exactly, one more, several; an empty sequence among them."""
    contexts = [1, 15, 16, 17, 0, PARTITION, PARTITION + 1, 2 * PARTITION + 70]
    case = KVCase([min(n, 1) for n in contexts], contexts, heads, kv_heads, dim, block, dtype)
    q, batch = torch.cat(case.q), case.batch()
    expected = case.run(paged_attention_reference, q, batch)
    torch.testing.assert_close(case.run(paged_attention_triton, q, batch), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_verify_prefill_and_resume(dtype: torch.dtype) -> None:
    """Several query rows a sequence, more than a tile; whole prompts; chunks that cross a partition; padding rows."""
    case = KVCase([5, 20, 1, 9, 0], [70, 20, 300, PARTITION + 4, 0], dtype=dtype)
    q, batch = torch.cat([*case.q, torch.full((3, 3, 16), torch.nan).to(dtype)]), case.batch()
    out = case.run(paged_attention_triton, q, batch)
    torch.testing.assert_close(out, case.run(paged_attention_reference, q, batch), **TOLERANCES[dtype])
    assert not out[-3:].any()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_depends_neither_on_the_batch_nor_on_the_rows_that_ride_along(dtype: torch.dtype) -> None:
    """Bit for bit: all at once, sequence by sequence, and row by row as decode would have computed them. Proves the
    order of the kernel's own arithmetic, given that `tl.dot` treats the rows of a tile alike (here in order of k)."""
    case = KVCase([7, 12, 1], [PARTITION + 3, 12, 2 * PARTITION + 9], dtype=dtype)
    whole = case.run(paged_attention_triton, torch.cat(case.q), case.batch()).split(case.queries)
    for i, queries in enumerate(case.queries):
        alone = case.run(paged_attention_triton, case.q[i], case.batch([i]))
        assert torch.equal(alone, whole[i])
        for t in range(queries):
            assert torch.equal(case.run(paged_attention_triton, case.q[i][t : t + 1], case.row(i, t))[0], whole[i][t])


def test_the_comparison_of_bits_sees_a_change_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a partition size that depended on the batch would do."""
    case = KVCase([1], [3 * PARTITION])
    before = case.run(paged_attention_triton, case.q[0], case.batch())
    monkeypatch.setattr(attention_triton, "PARTITION", PARTITION // 2)
    after = case.run(paged_attention_triton, case.q[0], case.batch())
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, **TOLERANCES[torch.float32])


def test_strided_queries_and_no_queries() -> None:
    case = KVCase([2, 3], [40, 3])
    wide = torch.cat(case.q).repeat(1, 2, 2)
    expected = case.run(paged_attention_triton, torch.cat(case.q), case.batch())
    assert torch.equal(case.run(paged_attention_triton, wide[:, 3:, 16:], case.batch()), expected)
    nothing = AttentionBatch.build([], [], [], 3)
    assert not case.run(paged_attention_triton, torch.ones(2, 3, 16), nothing).any()


def test_large_scores_do_not_overflow() -> None:
    case = KVCase([1], [200])
    q = case.q[0] * 1e4
    expected = case.run(paged_attention_reference, q, case.batch())
    torch.testing.assert_close(case.run(paged_attention_triton, q, case.batch()), expected, rtol=1e-4, atol=1e-4)


def test_misuse_is_named() -> None:
    case = KVCase([1], [5])
    with pytest.raises(ValueError, match="does not fit kv"):
        paged_attention_triton(torch.ones(1, 3, 8), case.kv, 1, case.batch(), 16, 1.0)
    with pytest.raises(ValueError, match=r"block size 24 \(a divisor of 256\)"):
        batch = AttentionBatch.build([1], [5], [[0]], 1)
        paged_attention_triton(torch.ones(1, 1, 8), empty_kv(2, 1, 1, 24, 8, layout="hnd"), 0, batch, 24, 1.0)
