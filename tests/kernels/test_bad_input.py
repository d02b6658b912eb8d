"""What the ops refuse on the CPU, each with a ValueError that names it: nothing crashes, nothing foreign is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longtail.kernels.activation import silu_mul, silu_mul_reference
from longtail.kernels.attention import AttentionBatch, paged_attention
from longtail.kernels.kv import (
    copy_blocks,
    copy_blocks_triton,
    empty_kv,
    empty_scales,
    gather_blocks,
    gather_blocks_triton,
    scatter_blocks,
    scatter_blocks_triton,
    store_kv,
    store_kv_reference,
)
from longtail.kernels.latent import empty_latent, latent_attention, store_latent
from longtail.kernels.linear import batch_invariant_linear
from longtail.kernels.norm import rms_norm, rms_norm_reference
from longtail.kernels.rope import rope_store_kv, rope_store_kv_reference

OTHER_8_BITS = [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint8, torch.float64]


# ---- the cache's dtype


@pytest.mark.parametrize("dtype", OTHER_8_BITS, ids=str)
def test_caches_of_unknown_dtypes_are_refused(dtype: torch.dtype) -> None:
    says = f"kv\\) is {dtype}, use one of float32, float16, bfloat16, float8_e4m3fn, int8"
    with pytest.raises(ValueError, match=f"empty_kv: .*{says}"):
        empty_kv(2, 1, 1, 16, 16, dtype=dtype)
    kv, k = torch.zeros(2, 1, 2, 1, 16, 16).to(dtype), torch.ones(1, 1, 16)
    with pytest.raises(ValueError, match=f"store_kv: .*{says}"):
        store_kv(k, k, kv, 0, torch.tensor([0]), 16)
    batch = AttentionBatch.build([1], [5], [[0]], 1)
    for backend in (None, "triton", "reference"):
        with pytest.raises(ValueError, match=f"paged_attention: .*{says}"):
            paged_attention(k, kv, 0, batch, 16, 1.0, backend=backend)


# ---- store_kv


@pytest.mark.parametrize("layout", ["cpu", "hnd"])
@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
def test_store_kv_refuses_what_lies_beyond_the_cache(store: Callable[..., None], layout: str) -> None:
    kv, k = empty_kv(2, 3, 1, 16, 8, layout=layout), torch.ones(3, 1, 8)  # type: ignore[arg-type]
    for slots, layer, says in (
        ([0, 32, 1], 0, r"slots\[1\] is 32, beyond the cache of 32 slots"),
        ([0, 1, 2], 3, "layer 3 does not exist, the cache has 3"),
        ([0, 1, 2], -1, "layer -1 does not exist"),
    ):
        with pytest.raises(ValueError, match=f"store_kv: {says}"):
            store(k, k, kv, layer, torch.tensor(slots), 16)
        assert not kv.any()
    with pytest.raises(ValueError, match="store_kv: shapes do not fit"):
        store(k, k, kv, 0, torch.tensor([0, 1]), 16)
    with pytest.raises(ValueError, match="store_kv: v is on meta, kv on cpu: put them on one device"):
        store(k, k.to("meta"), kv, 0, torch.tensor([0, 1, 2]), 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_store_kv_casts_to_a_float32_cache(dtype: torch.dtype) -> None:
    kv, k = empty_kv(2, 1, 1, 16, 8), torch.linspace(-1, 1, 8, dtype=dtype).view(1, 1, 8)
    store_kv(k, 2 * k, kv, 0, torch.tensor([17]), 16)
    assert torch.equal(kv[1, 0, 0, 0].view(8, 16)[:, 1], k[0, 0].float())
    assert torch.equal(kv[1, 0, 1, 0].view(16, 8)[1], 2 * k[0, 0].float())


# ---- blocks

COPY = [copy_blocks, copy_blocks_triton]  # whose checks come before anything is launched
GATHER = [gather_blocks, gather_blocks_triton]
SCATTER = [scatter_blocks, scatter_blocks_triton]


@pytest.mark.parametrize("copy", COPY)
@pytest.mark.parametrize("pair", [(0, 4), (0, -1), (4, 0), (-1, 0)])
def test_copy_blocks_refuses_blocks_that_do_not_exist(copy: Callable[..., None], pair: tuple[int, int]) -> None:
    kv = torch.arange(8.0).view(4, 2).clone()
    with pytest.raises(ValueError, match=r"copy_blocks: block (4|-1) does not exist, there are 4"):
        copy(kv, [(0, 1), pair])
    assert kv.flatten().tolist() == list(range(8))


@pytest.mark.parametrize("gather", GATHER)
@pytest.mark.parametrize("block", [4, -1])
def test_gather_blocks_refuses_blocks_that_do_not_exist(gather: Callable[..., torch.Tensor], block: int) -> None:
    with pytest.raises(ValueError, match=f"gather_blocks: block {block} does not exist, there are 4"):
        gather(torch.zeros(4, 2), [0, block])


@pytest.mark.parametrize("scatter", SCATTER)
def test_scatter_blocks_refuses_what_does_not_fit(scatter: Callable[..., None]) -> None:
    kv = torch.zeros(4, 2)
    for blocks, data, says in (
        ([1, 4], torch.ones(2, 2), "block 4 does not exist"),
        ([1, -1], torch.ones(2, 2), "block -1 does not exist"),
        ([1, 1], torch.ones(2, 2), "a block is written twice"),
        ([1, 2], torch.ones(1, 2), r"2 blocks of torch.float32 \(2,\) wanted, got torch.float32 \(1, 2\)"),
        ([1], torch.ones(1, 2).half(), ".*wanted, got torch.float16"),
    ):
        with pytest.raises(ValueError, match=f"scatter_blocks: {says}"):
            scatter(kv, blocks, data)
        assert not kv.any()


def test_blocks_of_scales_and_codes_move_on_the_cpu() -> None:
    scales = empty_scales(3, 1, 1, 16)
    scales[1] = 2.0
    scatter_blocks(scales, [0], gather_blocks(scales, [1]))
    assert bool((scales[0] == 2).all())
    codes = empty_kv(3, 1, 1, 16, 8, dtype=torch.float8_e4m3fn)
    codes.view(torch.uint8)[1] = 7
    scatter_blocks(codes, [2], gather_blocks(codes, [1]))
    assert bool((codes.view(torch.uint8)[2] == 7).all())


# ---- attention


def test_build_refuses_more_rows_than_kv() -> None:
    with pytest.raises(ValueError, match="sequence 1 has query_len 3 and context_len 2"):
        AttentionBatch.build([1, 3], [5, 2], [[0], [0]], 1)
    with pytest.raises(ValueError, match="1 query_lens, 1 context_lens, 2 block_tables"):
        AttentionBatch.build([1], [5], [[0], [0]], 1)


@pytest.mark.parametrize("layout", ["cpu", "hnd"])
def test_paged_attention_refuses_a_batch_that_does_not_fit(layout: str) -> None:
    kv = empty_kv(4, 2, 1, 16, 16, layout=layout)  # type: ignore[arg-type]

    def attend(rows: int, table: list[int], heads: int = 3, layer: int = 0, query: int = 1) -> torch.Tensor:
        batch = AttentionBatch.build([0, query], [0, 40], [[], table], 3)
        return paged_attention(torch.zeros(rows, heads, 16), kv, layer, batch, 16, 1.0)

    assert not attend(2, [0, 1, 2]).any()  # a padding row
    for table in ([0, 1], [0, -1, 2], [0, 4, 2], []):
        with pytest.raises(ValueError, match=r"block_tables of sequence 1: 3 blocks of 16 hold what its rows see"):
            attend(1, table)
    with pytest.raises(ValueError, match="q has 2 rows, the batch 3: pass a query for each"):
        attend(2, [0, 1, 2], query=3)
    for heads in (2, 4):
        with pytest.raises(ValueError, match=f"q has {heads} heads for each KV head, .* group = 3"):
            attend(1, [0, 1, 2], heads=heads)
    for layer in (2, -1):
        with pytest.raises(ValueError, match=f"layer {layer} does not exist, the cache has 2"):
            attend(1, [0, 1, 2], layer=layer)
    with pytest.raises(ValueError, match="paged_attention: q is on meta, kv on cpu"):
        paged_attention(torch.zeros(1, 3, 16, device="meta"), kv, 0, AttentionBatch.build([1], [1], [[0]], 3), 16, 1.0)


def test_latent_ops_refuse_what_does_not_fit() -> None:
    latent, q, q_rope = empty_latent(4, 2, 16, 8, 4), torch.zeros(1, 3, 8), torch.zeros(1, 3, 4)

    def attend(table: list[int], layer: int = 0, group: int = 3, query: int = 1) -> torch.Tensor:
        return latent_attention(q, q_rope, latent, layer, AttentionBatch.build([query], [40], [table], group), 16, 1.0)

    for table in ([0, 1], [0, -1, 2], [0, 4, 2]):
        with pytest.raises(ValueError, match="latent_attention: block_tables of sequence 0"):
            attend(table)
    with pytest.raises(ValueError, match="q has 1 rows, the batch 2"):
        attend([0, 1, 2], query=2)
    with pytest.raises(ValueError, match="layer 2 does not exist"):
        attend([0, 1, 2], layer=2)
    for slot, layer, says in ((64, 0, r"slots\[0\] is 64, beyond"), (0, 2, "layer 2 does not exist")):
        with pytest.raises(ValueError, match=f"store_latent: {says}"):
            store_latent(torch.ones(1, 8), torch.ones(1, 4), latent, layer, torch.tensor([slot]), 16)
        assert not latent.any()


# ---- rope_store_kv


@pytest.mark.parametrize("store", [rope_store_kv, rope_store_kv_reference])
def test_rope_store_kv_refuses_what_lies_beyond_tables_and_cache(store: Callable[..., torch.Tensor]) -> None:
    kv, table = empty_kv(2, 2, 1, 16, 8), torch.ones(6, 4)

    def run(positions: list[int], slots: list[int], layer: int = 0) -> torch.Tensor:
        where = torch.tensor(positions), torch.tensor(slots)
        return store(torch.ones(2, 24), table, table, where[0], None, None, 1e-6, kv, layer, where[1], 16, 1, 1)

    for positions, slots, layer, says in (
        ([0, 6], [0, 1], 0, r"positions\[1\] is 6, the tables \(cos, sin\) have 6"),
        ([-1, 0], [0, 1], 0, r"positions\[0\] is -1"),
        ([0, 1], [0, 32], 0, r"slots\[1\] is 32, beyond the cache of 32 slots"),
        ([0, 1], [0, 1], 2, "layer 2 does not exist"),
    ):
        with pytest.raises(ValueError, match=f"rope_store_kv: {says}"):
            run(positions, slots, layer)
        assert not kv.any()
    assert run([5, 0], [31, -1]).shape == (2, 1, 8)


# ---- rows


@pytest.mark.parametrize("norm", [rms_norm, rms_norm_reference])
def test_rms_norm_takes_any_shape_and_refuses_a_weight_of_another(norm: Callable[..., torch.Tensor]) -> None:
    x, weight = torch.randn(2, 3, 20), torch.randn(20)
    expected = torch.stack([norm(row, weight, 1e-6) for row in x])
    assert torch.equal(norm(x, weight, 1e-6), expected)
    assert torch.equal(norm(x[1, 2], weight, 1e-6), expected[1, 2])
    for wrong in (torch.ones(3), torch.ones(1, 20), torch.ones(1)):
        with pytest.raises(ValueError, match=r"rms_norm: weight \((3,|1, 20|1,)\) must be \[20\]"):
            norm(x, wrong, 1e-6)
    with pytest.raises(ValueError, match="rms_norm: weight is on meta, x on cpu"):
        norm(x, weight.to("meta"), 1e-6)


@pytest.mark.parametrize("silu", [silu_mul, silu_mul_reference])
def test_silu_mul_takes_any_shape_and_refuses_odd_widths(silu: Callable[..., torch.Tensor]) -> None:
    x = torch.randn(2, 3, 20)
    expected = torch.stack([silu(row) for row in x])
    assert expected.shape == (2, 3, 10)
    assert torch.equal(silu(x), expected)
    assert torch.equal(silu(x[1, 2]), expected[1, 2])
    with pytest.raises(ValueError, match=r"silu_mul: gate and up have different sizes in \(2, 5\)"):
        silu(torch.ones(2, 5))


def test_linear_refuses_tensors_of_two_devices() -> None:
    with pytest.raises(ValueError, match="batch_invariant_linear: weight is on meta, x on cpu"):
        batch_invariant_linear(torch.ones(2, 4), torch.ones(3, 4, device="meta"))
