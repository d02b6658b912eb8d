"""The flash-attn backend's translation of arguments, proven on functions that compute what flash-attn documents.

The package itself needs a GPU. The functions below take the same arguments, check what the package checks, and compute
dense attention from them: the mask is aligned to the bottom right, window_size counts tokens beside the row."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from longtail.kernels.attention import AttentionBatch, AttentionVariant, paged_attention, paged_attention_reference
from longtail.kernels.kv import empty_kv, empty_scales, store_kv

PAGE, HEADS, KV_HEADS, DIM = 256, 6, 2, 16


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: Any, softcap: float) -> torch.Tensor:
    """q: [rows, heads, dim]; k, v: [positions, kv_heads, dim] of one sequence."""
    (rows, heads, _), n = q.shape, len(k)
    k, v = (x.float().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own, position = torch.arange(rows)[:, None] + n - rows, torch.arange(n)[None]
    seen = position <= own
    if window[0] >= 0:
        seen &= position >= own - window[0]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


class FlashAttention(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.calls: list[str] = []

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> None:
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert k.shape == v.shape and k.shape[1:] == (PAGE, KV_HEADS, DIM)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert block_table.dtype == torch.int32 and block_table.is_contiguous() and (block_table >= 0).all()

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        self.calls.append("kvcache")
        self.check(q, k_cache, v_cache, block_table)
        assert causal and q.dim() == 4
        assert cache_seqlens.dtype == torch.int32 and len(cache_seqlens) == len(block_table) == len(q)
        out = []
        for i, n in enumerate(cache_seqlens.tolist()):
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:n] for x in (k_cache, v_cache))
            out.append(dense(q[i], keys, values, softmax_scale, window_size, softcap))
        return torch.stack(out)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        self.calls.append("varlen")
        self.check(q, k, v, block_table)
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        rows, lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert len(rows) == len(lens) == len(block_table) and int(cu_seqlens_q[-1]) == len(q)
        assert max_seqlen_q == rows.max() and max_seqlen_k == lens.max()
        out = []
        for i, (part, n) in enumerate(zip(q.split(rows.tolist()), lens.tolist(), strict=True)):
            keys, values = (x[block_table[i].long()].flatten(0, 1)[:n] for x in (k, v))
            out.append(dense(part, keys, values, softmax_scale, window_size, softcap))
        return torch.cat(out)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    module = FlashAttention()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return module


def make(
    queries: list[int], contexts: list[int], dtype: torch.dtype = torch.float16, window: int = 0
) -> tuple[Any, ...]:
    """-> q, kv, batch: a 6-D cache with NaN where nothing was written; block 0 is nobody's; freed blocks are -1."""
    generator = torch.Generator().manual_seed(0)
    sizes = [-(-n // PAGE) for n in contexts]
    kv = empty_kv(1 + sum(sizes), 2, KV_HEADS, PAGE, DIM, layout="hnd", dtype=dtype).fill_(torch.nan)
    ids = list(range(1, 1 + sum(sizes)))
    tables = [[ids.pop() for _ in range(size)] for size in sizes]
    for table, n in zip(tables, contexts, strict=True):
        k, v = torch.randn(2, n, KV_HEADS, DIM, generator=generator).to(dtype)
        slots = torch.tensor([table[p // PAGE] * PAGE + p % PAGE for p in range(n)], dtype=torch.long)
        store_kv(k, v, kv, 1, slots, PAGE)
    kv[0] = 0.0
    if window:
        for table, q, n in zip(tables, queries, contexts, strict=True):
            for j in range(max(n - q + 1 - window, 0) // PAGE):
                table[j] = -1
    rows = torch.randn(sum(queries), HEADS, DIM, generator=generator).to(dtype)
    return rows, kv, AttentionBatch.build(queries, contexts, tables, HEADS // KV_HEADS)


VARIANTS = {
    "plain": AttentionVariant(),
    "window": AttentionVariant(window=300),
    "window_1": AttentionVariant(window=1),
    "softcap": AttentionVariant(softcap=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("queries", "contexts", "call"),
    [
        ([1, 1, 1], [1, 600, 256], "kvcache"),
        ([5, 5], [5, 700], "kvcache"),
        ([0, 2, 0, 2], [9, 300, 0, 2], "kvcache"),
        ([1, 40, 0, 7], [590, 40, 3, 261], "varlen"),
    ],
)
def test_it_computes_the_reference(
    queries: list[int], contexts: list[int], call: str, variant: str, dtype: torch.dtype, flash: FlashAttention
) -> None:
    of = VARIANTS[variant]
    q, kv, batch = make(queries, contexts, dtype, of.window)
    out = paged_attention(q, kv, 1, batch, PAGE, 0.3, of, backend="flash-attn")
    expected = paged_attention_reference(q, kv, 1, batch, PAGE, 0.3, of)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 2e-3)
    paged_attention(q, kv, 1, batch, PAGE, 0.3, of, backend="flash-attn")
    assert flash.calls == [call, call]


def test_padding_rows_are_zeros_and_no_rows_are_no_call(flash: FlashAttention) -> None:
    q, kv, batch = make([1, 1], [3, 300])
    padded = torch.cat([q, torch.full((3, HEADS, DIM), torch.nan).half()])
    out = paged_attention(padded, kv, 1, batch, PAGE, 0.3, backend="flash-attn")
    assert torch.equal(out[:2], paged_attention(q, kv, 1, batch, PAGE, 0.3, backend="flash-attn"))
    assert not out[2:].any()
    flash.calls.clear()
    nothing = AttentionBatch.build([], [], [], 3)
    assert not paged_attention(padded, kv, 1, nothing, PAGE, 0.3, backend="flash-attn").any()
    assert flash.calls == []


def test_the_comparison_sees_a_window_that_is_off_by_one(flash: FlashAttention) -> None:
    q, kv, batch = make([1, 1], [600, 500])
    out = paged_attention(q, kv, 1, batch, PAGE, 0.3, AttentionVariant(window=21), backend="flash-attn")
    expected = paged_attention_reference(q, kv, 1, batch, PAGE, 0.3, AttentionVariant(window=20))
    assert (out - expected).abs().max() > 2e-2


def test_what_flash_attention_does_not_compute_is_named(flash: FlashAttention) -> None:
    q, kv, batch = make([1], [9])

    def attend(q: torch.Tensor = q, kv: torch.Tensor = kv, batch: Any = batch, block: int = PAGE, **more: Any) -> None:
        paged_attention(q, kv, 1, batch, block, 0.3, backend="flash-attn", **more)

    with pytest.raises(ValueError, match="flash-attn does not take attention sinks; use backend 'triton'"):
        attend(variant=AttentionVariant(sinks=torch.ones(HEADS)))
    with pytest.raises(ValueError, match="tree masks"):
        attend(batch=AttentionBatch.build([1], [9], [[1]], 3, [[1]]))
    with pytest.raises(ValueError, match="a quantised cache"):
        eight = empty_kv(2, 2, KV_HEADS, PAGE, DIM, layout="hnd", dtype=torch.int8)
        attend(kv=eight, scales=empty_scales(2, 2, KV_HEADS, PAGE))
    with pytest.raises(ValueError, match=r"5-D layout .*layout='hnd'"):
        attend(kv=empty_kv(2, 2, KV_HEADS, PAGE, DIM, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"torch.float32 queries"):
        attend(q=q.float(), kv=kv.float())
    with pytest.raises(ValueError, match=r"a cache of torch.bfloat16 with queries of torch.float16"):
        attend(kv=kv.bfloat16())
    with pytest.raises(ValueError, match=r"block size of 16 \(multiples of 256 only\)"):
        attend(kv=empty_kv(2, 2, KV_HEADS, 16, DIM, layout="hnd", dtype=torch.float16), block=16)
    with pytest.raises(ValueError, match=r"head_dim 12"):
        attend(q=q[..., :12], kv=kv[..., :12])
    assert flash.calls == []


def test_without_the_package_or_a_gpu_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, batch = make([1], [9])
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # the import fails
    with pytest.raises(ImportError, match=r"pip install 'longtail\[gpu\]'"):
        paged_attention(q, kv, 1, batch, PAGE, 0.3, backend="flash-attn")
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))  # a broken one
    with pytest.raises(ImportError, match=r"has no flash_attn_with_kvcache: pip install 'longtail\[gpu\]'"):
        paged_attention(q, kv, 1, batch, PAGE, 0.3, backend="flash-attn")
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttention())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match=r"needs a CUDA GPU; with one, pip install 'longtail\[gpu\]'"):
        paged_attention(q, kv, 1, batch, PAGE, 0.3, backend="flash-attn")
