"""paged_attention: against its reference and torch's own attention, and that a row's bits are its own."""

from __future__ import annotations

import dataclasses
import random

import numba
import pytest
import torch
import torch.nn.functional as F

from longtail.kernels import attention_cpu
from longtail.kernels.attention import AttentionBatch, paged_attention, paged_attention_reference
from longtail.kernels.kv import empty_kv, store_kv

LAYERS, LAYER = 2, 1


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "output") -> None:
    """float32: the kernel's exp is good to 1 ulp, and its sums run in another order than torch's."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6, msg=lambda m: f"{name}: {m}")


class World:
    """Sequences with random q, k, v at every position, and a paged cache filled with them (the rest is NaN)."""

    def __init__(self, lens: list[int], dim: int, block: int, kv_heads: int = 2, group: int = 1, seed: int = 0) -> None:
        self.lens, self.dim, self.block, self.kv_heads, self.group = lens, dim, block, kv_heads, group
        generator = torch.Generator().manual_seed(seed)
        self.q = [torch.randn(n, kv_heads * group, dim, generator=generator) for n in lens]
        self.k = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
        self.v = [torch.randn(n, kv_heads, dim, generator=generator) for n in lens]
        self.scale = dim**-0.5
        self.place(seed)

    def place(self, seed: int, spare: int = 3) -> None:
        """Puts the sequences into randomly chosen blocks of a cache poisoned with NaN."""
        counts = [-(-n // self.block) for n in self.lens]
        ids = list(range(sum(counts) + spare))
        random.Random(seed).shuffle(ids)
        self.kv = empty_kv(len(ids), LAYERS, self.kv_heads, self.block, self.dim).fill_(float("nan"))
        self.tables = []
        for n, count, k, v in zip(self.lens, counts, self.k, self.v, strict=True):
            table, ids = ids[:count], ids[count:]
            self.tables.append(table)
            slots = torch.tensor([table[p // self.block] * self.block + p % self.block for p in range(n)])
            store_kv(k, v, self.kv, LAYER, slots, self.block)

    def batch(self, spans: list[tuple[int, int]]) -> tuple[torch.Tensor, AttentionBatch]:
        """spans: per sequence, the positions start .. stop-1 whose queries are asked."""
        q = torch.cat([q[start:stop] for q, (start, stop) in zip(self.q, spans, strict=True)])
        lens = [stop - start for start, stop in spans]
        return q, AttentionBatch.build(lens, [stop for _, stop in spans], self.tables, self.group)

    def attend(self, spans: list[tuple[int, int]]) -> list[torch.Tensor]:
        """-> per sequence, the output of its rows."""
        q, batch = self.batch(spans)
        out = paged_attention(q, self.kv, LAYER, batch, self.block, self.scale)
        return list(out.split([stop - start for start, stop in spans]))

    def whole(self) -> list[torch.Tensor]:
        return self.attend([(0, n) for n in self.lens])

    def sdpa(self, i: int) -> torch.Tensor:
        q, k, v = (x[i].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out[0].transpose(0, 1)


# (head dim, block size): each costs some seconds to compile, once. 36 is no multiple of the 16 lanes; 128 is the usual.
SIZES = [(16, 16), (36, 16), (64, 32), (128, 64)]


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("dim", "block"), SIZES)
def test_paged_attention_is_the_reference_and_sdpa(dim: int, block: int, group: int) -> None:
    """One token, one short of a block, a block, one more, and several blocks with an odd rest; every position asked."""
    world = World([1, block - 1, block, block + 1, 3 * block + 7, 5, 2], dim, block, group=group)
    q, batch = world.batch([(0, n) for n in world.lens])
    out = paged_attention(q, world.kv, LAYER, batch, block, world.scale)
    assert_close(out, paged_attention_reference(q, world.kv, LAYER, batch, block, world.scale))
    for i, rows in enumerate(out.split(world.lens)):
        assert_close(rows, world.sdpa(i), f"sequence {i}")


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_paged_attention_other_numbers_of_kv_heads(kv_heads: int) -> None:
    world = World([21, 40], 16, 16, kv_heads=kv_heads, group=2)
    for i, rows in enumerate(world.whole()):
        assert_close(rows, world.sdpa(i), f"sequence {i}")


def test_paged_attention_by_hand() -> None:
    """Two positions whose keys give the scores 0 and ln 3: weights 1/4 and 3/4. The third position is not visible."""
    kv = empty_kv(1, 1, 1, 16, 16)
    k, v = torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)
    k[1, 0, 0] = 1.0
    k[2, 0, 0] = 50.0
    v[0, 0, 0], v[1, 0, 0], v[2, 0, 0] = 4.0, 8.0, 1e6
    store_kv(k, v, kv, 0, torch.tensor([0, 1, 2]), 16)
    q = torch.zeros(1, 1, 16)
    q[0, 0, 0] = 2.0
    batch = AttentionBatch.build([1], [2], [[0]], 1)
    out = paged_attention(q, kv, 0, batch, 16, 1.0986123 / 2)  # scale * 2 * 1 = ln 3
    assert out[0, 0, 0].item() == pytest.approx(0.25 * 4 + 0.75 * 8, rel=1e-6)
    assert out[0, 0, 1:].abs().max() == 0


@pytest.mark.parametrize("factor", [0.0, 100.0])
def test_paged_attention_scores_all_equal_or_far_apart(factor: float) -> None:
    """Zero queries average the values; scores of several hundred neither overflow nor lose the others' rows."""
    world = World([1, 18, 40], 16, 16, group=3)
    world.q = [q * factor for q in world.q]
    for i, rows in enumerate(world.whole()):
        torch.testing.assert_close(rows, world.sdpa(i), rtol=1e-3, atol=1e-3)  # scores of 400 are good to 1e-4


@pytest.mark.parametrize(("dim", "block"), [(10, 16), (16, 8)], ids=["head dim", "block size"])
def test_paged_attention_sizes_that_the_kernel_does_not_take(dim: int, block: int) -> None:
    """They are computed all the same, by the reference."""
    world = World([block, 2 * block + 3], dim, block, group=2)
    for i, rows in enumerate(world.whole()):
        assert_close(rows, world.sdpa(i), f"sequence {i}")


def test_paged_attention_padding_rows_are_zero() -> None:
    world = World([9, 4], 16, 16, group=3)
    q, batch = world.batch([(8, 9), (0, 4)])
    padded = torch.cat([q, torch.full((3, *q.shape[1:]), float("nan"))])
    out = paged_attention(padded, world.kv, LAYER, batch, 16, world.scale)
    assert out.shape == padded.shape
    assert torch.equal(out[5:], torch.zeros(3, 6, 16))
    assert torch.equal(out[:5], paged_attention(q, world.kv, LAYER, batch, 16, world.scale))


def test_paged_attention_a_sequence_without_rows_and_an_empty_batch() -> None:
    world = World([20, 9, 33], 16, 16, group=2)
    first, absent, last = world.attend([(19, 20), (9, 9), (30, 33)])
    assert absent.shape[0] == 0
    whole = world.whole()
    assert torch.equal(first, whole[0][19:])
    assert torch.equal(last, whole[2][30:])
    nothing = AttentionBatch.build([], [], [], 2)
    assert paged_attention(torch.empty(0, 4, 16), world.kv, LAYER, nothing, 16, 1.0).shape == (0, 4, 16)


def test_paged_attention_sequences_that_share_blocks() -> None:
    """A sibling reads the prompt's blocks through its own table: same bits as a sequence that owns them."""
    world = World([40], 16, 16, group=3)
    (expected,) = world.whole()
    world.lens, world.q, world.tables = [40, 40], world.q * 2, [world.tables[0], list(world.tables[0])]
    both = world.attend([(0, 40), (7, 35)])
    assert torch.equal(both[0], expected)
    assert torch.equal(both[1], expected[7:35])


def test_paged_attention_reads_its_own_layer() -> None:
    world = World([18], 16, 16)
    q, batch = world.batch([(17, 18)])
    assert paged_attention(q, world.kv, LAYER, batch, 16, 1.0).isfinite().all()
    assert paged_attention(q, world.kv, 0, batch, 16, 1.0).isnan().all()  # that layer was never written


# ---- bit for bit


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("dim", "block"), SIZES)
def test_decode_is_chunked_prefill_is_whole_prefill(dim: int, block: int, group: int) -> None:
    n = 2 * block + 5
    world = World([n], dim, block, group=group)
    (whole,) = world.whole()
    decode = torch.cat([world.attend([(p, p + 1)])[0] for p in range(n)])
    assert torch.equal(decode, whole)
    for chunk in (2, 3, 5, 16, block + 1):
        chunks = [world.attend([(p, min(p + chunk, n))])[0] for p in range(0, n, chunk)]
        assert torch.equal(torch.cat(chunks), whole), f"chunks of {chunk}"


@pytest.mark.parametrize(("dim", "block"), SIZES)
def test_a_batch_of_one_is_a_mixed_batch(dim: int, block: int) -> None:
    """Decodes, verify chunks of five, a prefill chunk and a whole prefill together: each as if it were alone."""
    world = World([2 * block + 9, 7, block, 3 * block, block + 2, 1], dim, block, group=3)
    spans = [(2 * block + 8, 2 * block + 9), (2, 7), (0, block), (block - 3, 2 * block + 1), (block, block + 2), (0, 1)]
    mixed = world.attend(spans)
    nothing = [(n, n) for n in world.lens]
    for i, span in enumerate(spans):
        alone = world.attend([*nothing[:i], span, *nothing[i + 1 :]])[i]
        assert torch.equal(mixed[i], alone), f"sequence {i}"
    q, batch = world.batch(spans)
    batch.tiles = batch.tiles[::-1].copy()  # the order of the tiles is only a matter of load
    assert torch.equal(paged_attention(q, world.kv, LAYER, batch, block, world.scale), torch.cat(mixed))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("dim", "block"), SIZES)
def test_the_serial_and_the_parallel_kernel_give_the_same_bits(
    dim: int, block: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two compilations of one function; which one runs depends on the size of the batch, so they must agree."""
    world = World([1, 2 * block + 9, 7, block, 3 * block - 1], dim, block, group=group)
    spans = [(n - 1, n) for n in world.lens]
    outputs = []
    for threshold in (0, 10**9):
        monkeypatch.setattr(attention_cpu, "PARALLEL_FROM", threshold)
        outputs.append(torch.cat([*world.whole(), *world.attend(spans)]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize(("dim", "block"), SIZES)
def test_threads_do_not_change_a_bit(dim: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if numba.get_num_threads() < 2:
        pytest.skip("one core")
    monkeypatch.setattr(attention_cpu, "PARALLEL_FROM", 0)
    world = World([2 * block + 9, 7, block, 3 * block], dim, block, group=3)
    outputs = []
    for threads in (1, 2, 1, 2):
        numba.set_num_threads(threads)
        outputs.append(torch.cat(world.whole()))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_the_blocks_lie_does_not_change_a_bit(seed: int) -> None:
    world = World([50, 33, 16, 1], 36, 16, group=4)
    before, tables = world.whole(), world.tables
    world.place(seed, spare=seed * 5)
    assert world.tables != tables
    assert all(torch.equal(a, b) for a, b in zip(before, world.whole(), strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -1e38, 7.0])
def test_unused_slots_do_not_leak(poison: float) -> None:
    """Whatever stands behind the context, in the last block or in others, is not seen."""
    world = World([1, 15, 16, 17, 39], 16, 16, group=3)
    clean = world.whole()
    used = torch.zeros(len(world.kv) * 16, dtype=torch.bool)
    for n, table in zip(world.lens, world.tables, strict=True):
        used[[table[p // 16] * 16 + p % 16 for p in range(n)]] = True
    k = world.kv[:, LAYER, 0].view(-1, 2, 16, 16).permute(0, 3, 1, 2)  # [blocks, offset, heads, dim]
    v = world.kv[:, LAYER, 1].view(-1, 2, 16, 16).permute(0, 2, 1, 3)
    for x in (k, v):
        assert x.reshape(-1, 2, 16)[used].isfinite().all()
        x[~used.view(-1, 16)] = poison
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(clean, world.whole(), strict=True))


def test_later_positions_of_a_sequence_do_not_leak_into_earlier_rows() -> None:
    """Rows of one tile see contexts of different lengths."""
    world = World([36], 16, 16, group=1)
    (clean,) = world.whole()
    world.k[0][20:] *= -30.0
    world.v[0][20:] = 1e30
    world.place(0)
    assert torch.equal(world.whole()[0][:20], clean[:20])


# ---- the tests above can fail


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("block", [16, 32])
def test_an_off_by_one_in_the_context_is_seen_by_the_comparison(off: int, block: int) -> None:
    world = World([2 * block + 5], 16 if block == 16 else 64, block, group=3)
    world.kv.nan_to_num_(0.0)  # an unused slot full of zeros is the friendliest case for the bug
    q, batch = world.batch([(0, n) for n in world.lens])
    expected = paged_attention_reference(q, world.kv, LAYER, batch, block, world.scale)
    planted = dataclasses.replace(batch, context_lens=(batch.context_lens + off).clamp(min=1))
    out = paged_attention(q, world.kv, LAYER, planted, block, world.scale)
    far = (out - expected).abs().amax(dim=(1, 2)) > 1e-4
    first = 1 if off == -1 else 0  # the first row sees itself alone and cannot see less
    assert far[first:].all(), "rows that hide the bug: " + str((~far).nonzero().flatten().tolist())


def test_a_wrong_block_is_seen_by_the_comparison() -> None:
    world = World([40], 16, 16)
    q, batch = world.batch([(39, 40)])
    expected = paged_attention_reference(q, world.kv, LAYER, batch, 16, world.scale)
    batch.block_tables = batch.block_tables[:, [1, 0, 2]]
    out = paged_attention(q, world.kv, LAYER, batch, 16, world.scale)
    # Attention does not see the order of whole blocks; a swap with the last, partly filled one it does.
    assert_close(out, expected)
    batch.block_tables = batch.block_tables[:, [2, 1, 0]]
    assert not torch.allclose(paged_attention(q, world.kv, LAYER, batch, 16, world.scale), expected, atol=1e-3)


# ---- AttentionBatch


def test_attention_batch_by_hand() -> None:
    """Sequence 0: two rows ending at 5; sequence 1: no row; sequence 2: one row at 1. Two query heads a KV head."""
    batch = AttentionBatch.build([2, 0, 1], [5, 9, 1], [[4, 2], [7], []], group=2)
    assert batch.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert batch.context_lens.tolist() == [4, 5, 1]
    assert batch.block_tables.tolist() == [[4, 2], [7, -1], [-1, -1]]
    # sequence, then token * group + head: rows 0..3 are tokens 0 and 1; row 4, 5 are token 2, the rest repeats row 5
    assert batch.tiles.tolist() == [[0, 0, 1, 2, 3], [2, 4, 5, 5, 5]]
    assert batch.cu_seqlens.dtype == batch.context_lens.dtype == batch.block_tables.dtype == torch.int32


@pytest.mark.parametrize("group", [1, 3, 4])
def test_attention_batch_tiles_cover_every_row_once(group: int) -> None:
    lens = [1, 5, 0, 3, 8]
    batch = AttentionBatch.build(lens, [9, 5, 4, 30, 8], [[0]] * 5, group)
    rows: list[int] = []
    for sequence, *lanes in batch.tiles.tolist():
        unique = sorted(set(lanes))
        rows += unique
        start, stop = batch.cu_seqlens[sequence : sequence + 2].tolist()
        assert all(start * group <= row < stop * group for row in unique)
    assert sorted(rows) == list(range(sum(lens) * group))
