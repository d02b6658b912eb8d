"""latent_attention and store_latent: against the expanded heads, the reference, by hand; a row's bits are its own."""

from __future__ import annotations

import random

import numba
import pytest
import torch

from longtail.kernels import latent as module
from longtail.kernels.attention import AttentionBatch
from longtail.kernels.latent import (
    absorb_query,
    empty_latent,
    expand_values,
    latent_attention,
    latent_attention_reference,
    store_latent,
)

LAYERS, LAYER = 2, 1


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "output") -> None:
    """float32: an exp good to 1 ulp, 576 products added one after the other, where torch adds blocks."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")


class World:
    """Sequences with random queries and latents at every position, and a paged cache that holds those (the rest is
    NaN)."""

    def __init__(
        self,
        lens: list[int],
        heads: int = 3,
        rank: int = 32,
        rope: int = 16,
        block: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lens, self.heads, self.rank, self.rope, self.block = lens, heads, rank, rope, block
        self.scale = (rank + rope) ** -0.5
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> list[torch.Tensor]:
            return [torch.randn(n, *shape, generator=generator, dtype=torch.float64).to(dtype) for n in lens]

        self.q, self.q_rope, self.c, self.k_rope = randn(heads, rank), randn(heads, rope), randn(rank), randn(rope)
        ids = list(range(sum(-(-n // block) for n in lens) + 3))
        random.Random(0).shuffle(ids)
        self.latent = empty_latent(len(ids), LAYERS, block, rank, rope).fill_(torch.nan).to(dtype)
        self.tables = []
        for n, c, k_rope in zip(lens, self.c, self.k_rope, strict=True):
            table, ids = ids[: -(-n // block)], ids[-(-n // block) :]
            self.tables.append(table)
            slots = torch.tensor([table[p // block] * block + p % block for p in range(n)], dtype=torch.long)
            store_latent(c, k_rope, self.latent, LAYER, slots, block)

    def attend(self, spans: list[tuple[int, int]], op: object = latent_attention) -> list[torch.Tensor]:
        """spans: per sequence, the positions start .. stop-1 whose queries are asked -> per sequence, its rows."""
        q, q_rope = (
            torch.cat([x[start:stop] for x, (start, stop) in zip(of, spans, strict=True)])
            for of in (self.q, self.q_rope)
        )
        lens = [stop - start for start, stop in spans]
        batch = AttentionBatch.build(lens, [stop for _, stop in spans], self.tables, self.heads)
        assert callable(op)
        return list(op(q, q_rope, self.latent, LAYER, batch, self.block, self.scale).split(lens))

    def whole(self) -> list[torch.Tensor]:
        return self.attend([(0, n) for n in self.lens])


def expanded(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    c: torch.Tensor,
    k_rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
) -> torch.Tensor:
    """Ordinary causal attention of the last rows on K and V of every head, built from the latents."""
    k = torch.cat([torch.einsum("nr,hdr->hnd", c, w_uk), k_rope.expand(len(w_uk), -1, -1)], dim=2)
    v = torch.einsum("nr,hvr->hnv", c, w_uv)
    q = torch.cat([q_nope, q_rope], dim=2).transpose(0, 1)
    seen = torch.ones(q.shape[1], len(c), dtype=torch.bool).tril(len(c) - q.shape[1])
    scores = (q @ k.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("queries", [1, 5, 37], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_absorbed_weights_are_attention_on_expanded_heads(dtype: torch.dtype, queries: int) -> None:
    """In float64 through the reference, in float32 through the kernel."""
    heads, nope, rope, rank, v_dim, n = 3, 24, 16, 64, 20, 37
    world = World([n], heads, rank, rope, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    w_uk, w_uv, q_nope = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / 8
        for shape in ((heads, nope, rank), (heads, v_dim, rank), (queries, heads, nope))
    )
    world.q[0] = torch.cat([world.q[0][: n - queries], absorb_query(q_nope, w_uk)])
    world.scale = (nope + rope) ** -0.5
    out = expand_values(world.attend([(n - queries, n)])[0], w_uv)
    expected = expanded(q_nope, world.q_rope[0][n - queries :], world.c[0], world.k_rope[0], w_uk, w_uv)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


# (rank, rope_dim, block size): each costs some seconds to compile, once
@pytest.mark.parametrize(("rank", "rope", "block"), [(32, 16, 16), (64, 16, 7), (512, 64, 64)])
@pytest.mark.parametrize("heads", [1, 3, 16, 20])
def test_latent_attention_is_the_reference(heads: int, rank: int, rope: int, block: int) -> None:
    """One token, one short of a block, a block, one more, several chunks with an odd rest; every position asked."""
    world = World([1, block - 1, block, block + 1, 70, 5], heads, rank, rope, block)
    expected = world.attend([(0, n) for n in world.lens], latent_attention_reference)
    for i, rows in enumerate(world.whole()):
        assert_close(rows, expected[i], f"sequence {i}")


def test_latent_attention_by_hand() -> None:
    """Two positions whose scores are 0 and ln 3, half from c and half from k_rope; the third is not visible."""
    latent = empty_latent(1, 1, 4, 4, 4)
    c, k_rope = torch.zeros(3, 4), torch.zeros(3, 4)
    c[:, 0] = torch.tensor([4.0, 8.0, 1e6])
    c[1, 1], k_rope[1, 2] = 1.0, 1.0
    store_latent(c, k_rope, latent, 0, torch.tensor([0, 1, 2]), 4)
    q, q_rope = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)
    q[0, 0, 1], q_rope[0, 0, 2] = 2.0, 2.0
    out = latent_attention(q, q_rope, latent, 0, AttentionBatch.build([1], [2], [[0]], 1), 4, 1.0986123 / 4)
    assert out[0, 0].tolist() == pytest.approx([0.25 * 4 + 0.75 * 8, 0.75, 0, 0], rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads", [3, 16, 20])
def test_a_row_depends_neither_on_the_batch_nor_on_chunks_nor_on_threads(
    heads: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: all at once, in pieces, row by row as decode would; with the parallel kernel and without it."""
    world = World([33, 70, 1, 5], heads)
    monkeypatch.setattr(module, "PARALLEL_FROM", 10**9)
    whole = world.whole()
    monkeypatch.setattr(module, "PARALLEL_FROM", 0)
    numba.set_num_threads(min(threads, numba.get_num_threads()))
    for rows, expected in zip(world.whole(), whole, strict=True):
        assert torch.equal(rows, expected)
    for start, stop in ((0, 9), (9, 31), (31, 32), (32, 70)):
        piece = world.attend([(0, 0), (start, stop), (0, 0), (0, 0)])[1]
        assert torch.equal(piece, whole[1][start:stop])
    for t in range(0, 70, 3):
        row = world.attend([(min(t, 32), min(t, 32) + 1), (t, t + 1), (0, 1), (4, 5)])
        assert torch.equal(row[1][0], whole[1][t])
        assert torch.equal(row[0][0], whole[0][min(t, 32)])


def test_the_comparison_of_bits_sees_a_change_of_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chunks that depended on the batch would do."""
    world = World([70], 3, 32, 16)
    before = world.whole()[0]
    monkeypatch.setattr(module, "CHUNK", 24)
    module._kernel.cache_clear()
    after = world.whole()[0]
    module._kernel.cache_clear()
    assert not torch.equal(after, before)
    assert_close(after, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_take_the_reference(dtype: torch.dtype) -> None:
    world = World([20, 3], dtype=dtype)
    exact = World([20, 3])
    for rows, expected in zip(world.whole(), exact.whole(), strict=True):
        assert rows.dtype == dtype
        torch.testing.assert_close(rows.float(), expected, rtol=5e-2, atol=2e-2)  # of rounded inputs


def test_padding_rows_sequences_without_rows_and_an_empty_batch() -> None:
    world = World([20, 9])
    batch = AttentionBatch.build([1, 0], [20, 9], world.tables, 3)
    q = torch.cat([world.q[0][19:], torch.full((2, 3, 32), torch.nan)])
    q_rope = torch.cat([world.q_rope[0][19:], torch.full((2, 3, 16), torch.nan)])
    out = latent_attention(q, q_rope, world.latent, LAYER, batch, 16, world.scale)
    assert torch.equal(out[0], world.whole()[0][19])
    assert not out[1:].any()
    nothing = AttentionBatch.build([], [], [], 3)
    assert latent_attention(q[:0], q_rope[:0], world.latent, LAYER, nothing, 16, 1.0).shape == (0, 3, 32)


@pytest.mark.parametrize("part", [5, 40], ids=["c", "k_rope"])
def test_a_nan_is_not_hidden(part: int) -> None:
    world = World([50])
    world.latent[world.tables[0][1], LAYER, 3, part] = torch.nan  # position 19
    out = world.whole()[0]
    assert out[:19].isfinite().all() or part == 5  # rows of a tile share the latents that are multiplied by zero
    assert out[19:].isnan().flatten(1).any(1).all()
    assert out[:16].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    world = World([40])
    world.q = [q * 1e3 for q in world.q]
    expected = world.attend([(0, 40)], latent_attention_reference)[0]
    torch.testing.assert_close(world.whole()[0], expected, rtol=1e-3, atol=1e-3)


# ---- store_latent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_store_latent_by_hand(dtype: torch.dtype) -> None:
    """Slot 5 of blocks of 4 is block 1, offset 1; -1 is not written."""
    latent = empty_latent(2, 2, 4, 2, 1).to(dtype)
    c, k_rope = torch.tensor([[1.0, 2.0], [7.0, 7.0]]), torch.tensor([[3.0], [7.0]])
    store_latent(c, k_rope, latent, 1, torch.tensor([5, -1]), 4)
    assert latent[1, 1, 1].tolist() == [1, 2, 3]
    assert (latent != 0).sum() == 3
    store_latent(c[:0], k_rope[:0], latent, 1, torch.empty(0, dtype=torch.long), 4)


def test_misuse_is_named() -> None:
    latent, batch = empty_latent(2, 1, 4, 8, 4), AttentionBatch.build([1], [1], [[0]], 1)
    with pytest.raises(ValueError, match="store_latent: shapes do not fit each other for blocks of 4"):
        store_latent(torch.ones(1, 8), torch.ones(1, 5), latent, 0, torch.tensor([0]), 4)
    with pytest.raises(ValueError, match=r"latent is torch.int8, use float32, float16 or bfloat16"):
        store_latent(torch.ones(1, 8), torch.ones(1, 4), latent.to(torch.int8), 0, torch.tensor([0]), 4)
    with pytest.raises(ValueError, match="latent_attention: shapes do not fit each other for blocks of 16"):
        latent_attention(torch.ones(1, 1, 8), torch.ones(1, 1, 4), latent, 0, batch, 16, 1.0)
    with pytest.raises(ValueError, match=r"q_rope is torch.float16, q_latent torch.float32: give them one dtype"):
        latent_attention(torch.ones(1, 1, 8), torch.ones(1, 1, 4).half(), latent, 0, batch, 4, 1.0)
