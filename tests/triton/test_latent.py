"""latent_attention's Triton kernels: against the reference, and that a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton.paged import Sequences, randn
from triton.runtime.errors import InterpreterError

from longtail.kernels import latent_triton
from longtail.kernels.attention import AttentionBatch
from longtail.kernels.latent import (
    absorb_query,
    empty_latent,
    expand_values,
    latent_attention_reference,
    store_latent_reference,
)
from longtail.kernels.latent_triton import latent_attention_triton, store_latent_triton

TOLERANCES: dict[torch.dtype, Any] = {  # float16, bfloat16: p rounded to the dtype before p @ c, and the output
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 8e-3},
}
PARTITION = 64


@pytest.fixture(autouse=True)
def small_partitions(outputs_start_as_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_triton, "PARTITION", PARTITION)


class Case(Sequences):
    """Latents in layer 1 of a cache whose other slots are NaN, and queries."""

    def __init__(
        self,
        queries: list[int],
        contexts: list[int],
        heads: int = 3,
        rank: int = 32,
        rope: int = 16,
        block: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(queries, contexts, block, heads)
        self.scale = (rank + rope) ** -0.5
        self.latent = empty_latent(self.num_blocks, 2, block, rank, rope).fill_(torch.nan).to(dtype)
        for i, n in enumerate(contexts):
            rows = randn(n, rank + rope, seed=10 + i).to(dtype)
            store_latent_reference(rows[:, :rank], rows[:, rank:], self.latent, 1, self.slots(i), block)
        both = [randn(n, heads, rank + rope, seed=100 + i).to(dtype) for i, n in enumerate(queries)]
        self.q, self.q_rope = [x[..., :rank] for x in both], [x[..., rank:] for x in both]

    def run(self, op: Any, which: list[int] | None = None, row: int | None = None) -> torch.Tensor:
        """All sequences, some, or one row of one, as decode would have computed it."""
        which = list(range(len(self.queries))) if which is None else which
        q, q_rope = (torch.cat([of[i] for i in which]) for of in (self.q, self.q_rope))
        batch = self.batch(which)
        if row is not None:
            q, q_rope, batch = q[row : row + 1], q_rope[row : row + 1], self.row(which[0], row)
        out: torch.Tensor = op(q, q_rope, self.latent, 1, batch, self.block, self.scale)
        return out


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "block"),
    [(1, 32, 16, 16), (3, 64, 16, 7), (16, 48, 8, 1), (20, 32, 16, 64)],
)
def test_decode(heads: int, rank: int, rope: int, block: int, dtype: torch.dtype) -> None:
    """One token, page boundaries, one partition exactly, one more, several; an empty sequence among them; heads that
    fill a tile in part, just, and more; sizes that are no powers of two."""
    contexts = [1, 15, 16, 17, 0, PARTITION, PARTITION + 1, 2 * PARTITION + 35]
    case = Case([min(n, 1) for n in contexts], contexts, heads, rank, rope, block, dtype)
    expected = case.run(latent_attention_reference)
    torch.testing.assert_close(case.run(latent_attention_triton), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_sizes_of_deepseek(dtype: torch.dtype) -> None:
    case = Case([1, 2], [PARTITION + 9, 20], 128 if dtype == torch.bfloat16 else 16, 512, 64, 64, dtype)
    expected = case.run(latent_attention_reference)
    torch.testing.assert_close(case.run(latent_attention_triton), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_verify_prefill_and_resume(dtype: torch.dtype) -> None:
    """Several query rows a sequence, whole prompts, chunks that cross a partition, padding rows."""
    case = Case([5, 20, 1, 9, 0], [70, 20, 150, PARTITION + 4, 0], dtype=dtype)
    expected = case.run(latent_attention_reference)
    torch.testing.assert_close(case.run(latent_attention_triton), expected, **TOLERANCES[dtype])
    case.q.append(torch.full((3, 3, 32), torch.nan).to(dtype))
    case.q_rope.append(torch.full((3, 3, 16), torch.nan).to(dtype))
    q, q_rope = torch.cat(case.q), torch.cat(case.q_rope)
    out = latent_attention_triton(q, q_rope, case.latent, 1, case.batch(), 16, case.scale)
    torch.testing.assert_close(out[:-3], expected, **TOLERANCES[dtype])
    assert not out[-3:].any()


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_depends_neither_on_the_batch_nor_on_the_rows_that_ride_along(dtype: torch.dtype) -> None:
    """Bit for bit: all at once, sequence by sequence, and row by row as decode would have computed them. Proves the
    order of the kernel's own arithmetic, given that `tl.dot` treats the rows of a tile alike (here in order of k)."""
    case = Case([7, 1], [PARTITION + 3, 2 * PARTITION + 9], heads=5, dtype=dtype)
    whole = case.run(latent_attention_triton).split(case.queries)
    for i, queries in enumerate(case.queries):
        assert torch.equal(case.run(latent_attention_triton, [i]), whole[i])
        for t in range(queries):
            assert torch.equal(case.run(latent_attention_triton, [i], t)[0], whole[i][t])


def test_the_comparison_of_bits_sees_a_change_of_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a partition size that depended on the batch would do."""
    case = Case([1], [3 * PARTITION])
    before = case.run(latent_attention_triton)
    monkeypatch.setattr(latent_triton, "PARTITION", PARTITION // 2)
    after = case.run(latent_attention_triton)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("queries", [1, 5], ids=["decode", "verify"])
def test_absorbed_weights_are_attention_on_expanded_heads(queries: int) -> None:
    heads, nope, rope, rank, v_dim, n = 3, 24, 16, 64, 20, PARTITION + 6
    case = Case([queries], [n], heads, rank, rope)
    w_uk, w_uv = randn(heads, nope, rank) / 8, randn(heads, v_dim, rank, seed=1) / 8
    q_nope = randn(queries, heads, nope, seed=2)
    case.q[0], case.scale = absorb_query(q_nope, w_uk), (nope + rope) ** -0.5
    rows = case.latent[case.tables[0], 1].flatten(0, 1)[:n]
    k = torch.cat([torch.einsum("nr,hdr->hnd", rows[:, :rank], w_uk), rows[:, rank:].expand(heads, -1, -1)], dim=2)
    v = torch.einsum("nr,hvr->hnv", rows[:, :rank], w_uv)
    q = torch.cat([q_nope, case.q_rope[0]], dim=2).transpose(0, 1)
    seen = torch.ones(queries, n, dtype=torch.bool).tril(n - queries)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)
    torch.testing.assert_close(expand_values(case.run(latent_attention_triton), w_uv), expected, rtol=1e-5, atol=1e-5)


def test_a_cache_of_another_dtype_strided_queries_and_no_queries() -> None:
    case = Case([2, 3], [40, 3])
    expected = case.run(latent_attention_triton)
    q, q_rope = (torch.cat(x).repeat(1, 2, 2) for x in (case.q, case.q_rope))
    out = latent_attention_triton(q[:, 3:, 32:], q_rope[:, 3:, 16:], case.latent, 1, case.batch(), 16, case.scale)
    assert torch.equal(out, expected)
    case.latent = case.latent.bfloat16()
    expected = case.run(latent_attention_reference)
    torch.testing.assert_close(case.run(latent_attention_triton), expected, **TOLERANCES[torch.float32])
    nothing = AttentionBatch.build([], [], [], 3)
    q, q_rope = torch.ones(2, 3, 32), torch.ones(2, 3, 16)
    assert not latent_attention_triton(q, q_rope, case.latent, 1, nothing, 16, 1.0).any()


@pytest.mark.parametrize("part", [5, 40], ids=["c", "k_rope"])
def test_a_nan_is_not_hidden(part: int) -> None:
    case = Case([1], [50])
    case.latent[case.tables[0][1], 1, 3, part] = torch.nan
    assert case.run(latent_attention_triton).isnan().flatten(1).any(1).all()


def test_large_scores_do_not_overflow() -> None:
    case = Case([1], [100])
    case.q[0] = case.q[0] * 1e4
    expected = case.run(latent_attention_reference)
    torch.testing.assert_close(case.run(latent_attention_triton), expected, rtol=1e-4, atol=1e-4)


# ---- store_latent


@pytest.mark.parametrize("source", TOLERANCES)
@pytest.mark.parametrize("target", TOLERANCES)
def test_store_latent_is_the_reference(source: torch.dtype, target: torch.dtype) -> None:
    """Bit for bit: padding rows, the first and the last slot, more tokens than a program takes; strided sources."""
    rows, slots = randn(7, 100).to(source), torch.tensor([3, -1, 16, 47, 0, -1, 33])
    for rank, rope in ((32, 16), (48, 8)):
        ours, theirs = (torch.full((3, 2, 16, rank + rope), torch.nan).to(target) for _ in range(2))
        for latent, op in ((ours, store_latent_triton), (theirs, store_latent_reference)):
            op(rows[:, :rank], rows[:, rank : rank + rope], latent, 1, slots, 16)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_store_latent_beyond_the_cache_and_nothing() -> None:
    latent = empty_latent(1, 1, 16, 16, 16)
    with pytest.raises(InterpreterError, match="a slot lies beyond the cache"):
        store_latent_triton(torch.ones(1, 16), torch.ones(1, 16), latent, 0, torch.tensor([16]), 16)
    store_latent_triton(torch.ones(0, 16), torch.ones(0, 16), latent, 0, torch.tensor([], dtype=torch.long), 16)
    assert not latent.any()


def test_misuse_is_named() -> None:
    batch, q = AttentionBatch.build([1], [1], [[0]], 1), torch.ones(1, 1, 1024)
    with pytest.raises(ValueError, match=r"rank 1024 \(at most 512\)"):
        latent_attention_triton(q, q[..., :16], empty_latent(1, 1, 16, 1024, 16), 0, batch, 16, 1.0)
