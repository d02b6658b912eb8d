"""What the cases of the bench leave out, on a GPU: variants of attention, 8-bit caches, norms in rope, bias and
residual, snapshots, entropies, the LM head in chunks."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from longtail.bench.kernel_cases import DTYPES
from longtail.kernels import kv, rope
from longtail.kernels.attention import AttentionVariant, Backend, paged_attention, paged_attention_reference
from longtail.kernels.kv_quant import as_bytes
from longtail.kernels.linear import batch_invariant_linear, batch_invariant_linear_reference
from longtail.kernels.linear_logprobs import linear_token_logprobs
from longtail.kernels.logprobs import token_logprobs, token_logprobs_reference

from .compare import assert_gradients_close, assert_logprobs_close, assert_rows_close
from .paged import Paged, randn

VARIANTS = {
    "plain": AttentionVariant(),
    "window": AttentionVariant(window=100),
    "softcap": AttentionVariant(softcap=2.0),
    "sinks": AttentionVariant(sinks=torch.linspace(-1, 6, 8)),
    "all": AttentionVariant(window=300, softcap=2.0, sinks=torch.linspace(-1, 6, 8)),
}
TREE = [0b1, 0b11, 0b101, 0b1011, 0b10101]
CACHES = {"own": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("tree", [False, True], ids=["", "tree"])
@pytest.mark.parametrize("name", VARIANTS)
def test_attention(name: str, tree: bool, cache: str, dtype: str, device: torch.device) -> None:
    contexts = [1000, 1, 40, 2050] if device.type == "cuda" else [150, 1, 40, 70]
    trees = [TREE, None, None, None] if tree else None
    p = Paged(device, DTYPES[dtype], [5, 1, 40, 3], contexts, cache=CACHES[cache], trees=trees)
    v = VARIANTS[name]
    variant = AttentionVariant(v.window, v.softcap, None if v.sinks is None else v.sinks.to(device))
    got = paged_attention(p.q, p.kv, 1, p.batch(), p.block, p.scale, variant, p.scales)
    assert got.isfinite().all()
    assert_rows_close(got, paged_attention_reference(p.q, p.kv, 1, p.batch(), p.block, p.scale, variant, p.scales))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("queries", [[1, 1, 1], [4, 4, 4], [40, 1, 3]], ids=["decode", "verify", "mixed"])
def test_flash_attn(queries: list[int], dtype: str, device: torch.device) -> None:
    if device.type == "cuda" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    p = Paged(device, DTYPES[dtype], queries, [1000, 300, 40 if device.type == "cpu" else 2050], block=256)
    p.kv.nan_to_num_(nan=0.0)  # it multiplies what it masks
    backend: Backend = "flash-attn" if device.type == "cuda" else "reference"
    for variant in (AttentionVariant(), AttentionVariant(window=100), AttentionVariant(softcap=2.0)):
        got = paged_attention(p.q, p.kv, 1, p.batch(), p.block, p.scale, variant, backend=backend)
        assert_rows_close(got, paged_attention_reference(p.q, p.kv, 1, p.batch(), p.block, p.scale, variant))


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_store(dtype: str, cache: torch.dtype, device: torch.device) -> None:
    """Codes may differ by one where a value lies half-way between two, within rounding: fewer than one in 1,000."""
    k, v = randn(2, 300, 4, 128).to(device, DTYPES[dtype])
    slots = torch.arange(300, device=device) + 5
    slots[7] = -1
    results = []
    for store in (kv.store_kv, kv.store_kv_reference):
        target = kv.empty_kv(20, 2, 4, 16, 128, layout="hnd", dtype=cache, device=device)
        scales = kv.empty_scales(20, 2, 4, 16, device=device)
        store(k, v, target, 1, slots, 16, scales)
        results.append((target, scales))
    (got, got_scales), (wanted, wanted_scales) = results
    torch.testing.assert_close(got_scales, wanted_scales, rtol=1e-6, atol=0)
    assert wanted_scales[:, 1].count_nonzero() == 2 * 4 * 299
    assert (as_bytes(got) != as_bytes(wanted)).float().mean() < 1e-3
    assert ((got.float() - wanted.float()).abs() <= wanted.float().abs().clamp(min=8) / 8).all()  # a code at most


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int8, torch.float8_e4m3fn], ids=str)
def test_snapshots(dtype: torch.dtype, device: torch.device) -> None:
    source = (10 * randn(30, 2, 2, 4, 16, 64)).to(dtype).to(device)
    blocks = [7, 0, 29, 13]
    data = kv.gather_blocks(source, blocks)
    assert data.device.type == "cpu" and torch.equal(as_bytes(data), as_bytes(source.cpu())[blocks])
    target = torch.zeros_like(source)
    kv.scatter_blocks(target, [3, 4, 1, 28], data)
    wanted = torch.zeros_like(as_bytes(source.cpu()))
    wanted[[3, 4, 1, 28]] = as_bytes(data)
    assert torch.equal(as_bytes(target.cpu()), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_with_norms(dtype: str, device: torch.device) -> None:
    """Of Qwen3, and a rotation of half of the head."""
    tokens, heads, kv_heads, dim, block = 200, 8, 2, 128, 16
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim).to(device, DTYPES[dtype])
    q_norm, k_norm = ((1 + randn(dim, seed=seed) / 4).to(device, DTYPES[dtype]) for seed in (1, 2))
    positions, slots = torch.arange(tokens, device=device) * 3, torch.arange(tokens, device=device) + 3
    slots[11] = -1
    for rotary in (dim, dim // 2):
        angles = randn(tokens * 3, rotary // 2, seed=3).to(device)
        results = []
        for op in (rope.rope_store_kv, rope.rope_store_kv_reference):
            cache = kv.empty_kv(20, 2, kv_heads, block, dim, layout="hnd", dtype=DTYPES[dtype], device=device)
            q = op(
                qkv,
                angles.cos(),
                angles.sin(),
                positions,
                q_norm,
                k_norm,
                1e-6,
                cache,
                1,
                slots,
                block,
                heads,
                kv_heads,
            )
            results.append((q, cache))
        for got, wanted in zip(*results, strict=True):
            assert_rows_close(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [130, 9000], ids=["narrow", "wide"])
def test_linear_with_bias_and_residual(outputs: int, dtype: str, device: torch.device) -> None:
    x, weight = randn(70, 576).to(device, DTYPES[dtype]), randn(outputs, 576, seed=1).to(device, DTYPES[dtype])
    bias, residual = (
        randn(outputs, seed=2).to(device, DTYPES[dtype]),
        randn(70, outputs, seed=3).to(device, DTYPES[dtype]),
    )
    for more in ((None, None), (bias, None), (None, residual), (bias, residual)):
        got = batch_invariant_linear(x, weight, *more)
        assert_rows_close(got, batch_invariant_linear_reference(x, weight, *more))


@pytest.mark.parametrize("dtype", DTYPES)
def test_entropies_and_their_gradients(dtype: str, device: torch.device) -> None:
    rows, vocab = (64, 49152) if device.type == "cuda" else (5, 3000)
    logits = (2 * randn(rows, vocab)).to(device, DTYPES[dtype])
    logits[0, 5:50] = -torch.inf
    tokens = torch.arange(rows, device=device) + 60
    temperatures = torch.linspace(0.5, 1.5, rows).to(device)
    results = []
    for op in (token_logprobs, token_logprobs_reference):
        leaf = logits.clone().requires_grad_()
        logprobs, entropies = op(leaf, tokens, temperatures, return_entropy=True)
        (logprobs.sum() + 0.3 * entropies.sum()).backward()
        assert leaf.grad is not None
        results.append((logprobs.detach(), entropies.detach(), leaf.grad))
    (logprobs, entropies, grad), wanted = results
    assert_logprobs_close(logprobs, wanted[0])
    assert_logprobs_close(entropies, wanted[1])
    assert_gradients_close(grad, wanted[2])


def test_the_lm_head_in_chunks(device: torch.device) -> None:
    """float32 (without TF32), against logits in one piece; 16-bit logits are rounded by the matmul that makes them."""
    rows, width, vocab = (300, 576, 20_000) if device.type == "cuda" else (12, 32, 500)
    tokens = torch.arange(rows, device=device) % vocab
    results = []
    for chunked in (True, False):
        made = (randn(rows, width), randn(vocab, width, seed=1) * width**-0.5, randn(vocab, seed=2))
        hidden, weight, bias = (x.to(device).requires_grad_() for x in made)
        if chunked:
            out = linear_token_logprobs(hidden, weight, tokens, 0.8, bias=bias, rows_per_chunk=7, return_entropy=True)
        else:
            out = token_logprobs_reference(F.linear(hidden, weight, bias), tokens, 0.8, return_entropy=True)
        (out[0].sum() + 0.3 * out[1].sum()).backward()
        results.append((*(x.detach() for x in out), *(x.grad for x in (hidden, weight, bias))))
    got, wanted = results
    for a, b in zip(got[:2], wanted[:2], strict=True):
        assert_logprobs_close(a, b)
    for a, b in zip(got[2:], wanted[2:], strict=True):
        assert a is not None and b is not None
        assert ((a - b).norm() <= 1e-4 * b.norm()).item()
