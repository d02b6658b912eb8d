"""8-bit caches in Triton: the codes are torch's, and what is stored equals the reference bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from tests.triton.paged import randn

from longtail.kernels.kv import (
    copy_blocks_triton,
    empty_kv,
    empty_scales,
    gather_blocks_triton,
    scatter_blocks_triton,
    store_kv_reference,
    store_kv_triton,
)
from longtail.kernels.kv_quant import (
    _encode_e4m3,
    code_format,
    decode,
    dequantise_rows_reference,
    quantise_rows,
    quantise_rows_reference,
    unit_of,
)

CODES = [torch.float8_e4m3fn, torch.int8]
IDS = ["e4m3", "int8"]


@triton.jit
def decode_kernel(codes, out, TYPE: tl.constexpr, FORMAT: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, decode(tl.load(codes + i), TYPE, FORMAT).to(tl.float32) * unit_of(FORMAT))


@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16], ids=str)
@pytest.mark.parametrize("code", CODES, ids=IDS)
def test_all_256_codes_are_decoded_exactly(code: torch.dtype, dtype: tl.dtype) -> None:
    codes, out = torch.arange(256).to(torch.uint8), torch.zeros(256)
    decode_kernel[(1,)](codes, out, TYPE=dtype, FORMAT=code_format(code))
    torch.testing.assert_close(out, codes.view(code).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit() & (out == 0), codes.view(code).float().signbit() & (out == 0))


@triton.jit
def encode_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, _encode_e4m3(tl.load(x + i)).to(tl.uint8))


def test_e4m3_is_encoded_as_torch_does() -> None:
    """Every code, every midpoint between neighbours and the floats beside it (ties to even), subnormals, and a million
    floats over all magnitudes up to 448."""
    values = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middles, torch.full_like(middles, to)) for to in (0.0, math.inf)]
    spread = torch.exp2(torch.rand(500_000, generator=torch.Generator().manual_seed(0)) * 24 - 15).clamp(max=448)
    tiny = torch.tensor([1e-45, 1e-38, 2**-10, 2**-10 * 1.0001, 2**-6, 2**-6 * 0.9999])
    x = torch.cat([values, middles, *beside, spread, tiny])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, (1 << 20) - len(x)))
    out = torch.zeros(len(x), dtype=torch.uint8)
    encode_kernel[(1,)](x, out, BLOCK=len(x))
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out, expected), x[out != expected][:10]


@triton.jit
def quantise_kernel(x, codes, scales, ROWS: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr):
    r, i = tl.arange(0, ROWS), tl.arange(0, ROW)
    at = r[:, None] * ROW + i[None, :]
    values, scale = quantise_rows(tl.load(x + at), FORMAT)
    tl.store(codes + at, values)
    tl.store(scales + r, scale)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity * 0, on purpose
@pytest.mark.parametrize("code", CODES, ids=IDS)
def test_rows_are_quantised_as_by_the_reference(code: torch.dtype) -> None:
    """Ordinary rows of many magnitudes, ties, zeros, the smallest and largest floats, NaN and infinities."""
    x = randn(256, 64) * torch.exp2(torch.arange(256.0) - 140)[:, None]
    x[:64] = randn(64, 64, seed=1).bfloat16().float()
    x[64:96] = torch.randint(-127, 127, (32, 64), generator=torch.Generator().manual_seed(2)) + 0.5
    x[64:96, 0] = 127.0  # scale 1 for int8: all the others are ties
    x[100], x[101], x[102] = 0.0, 3.4e38, -0.0
    x[103, 5], x[104, 63], x[105, 0] = math.nan, math.inf, -math.inf
    x[106] = 0.0
    x[106, 3] = 1e-44  # the scale is rounded to 0
    codes, scales = torch.zeros(256, 64, dtype=torch.uint8), torch.zeros(256)
    quantise_kernel[(1,)](x, codes, scales, ROWS=256, ROW=64, FORMAT=code_format(code))
    expected, expected_scales = quantise_rows_reference(x, code)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert scales[103:106].isnan().all()
    assert not scales[100].any() and not codes[100].any()
    back = dequantise_rows_reference(codes.view(code), scales)
    assert back[103:106].isnan().all()
    assert not back[[100, 102, 106]].any()


@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize(("kv_heads", "block_size", "dim"), [(1, 16, 64), (3, 4, 20), (2, 32, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", CODES, ids=IDS)
def test_store_kv_into_8_bits(
    code: torch.dtype, dtype: torch.dtype, kv_heads: int, block_size: int, dim: int, tokens: int
) -> None:
    blocks, layers = 8, 2
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[tokens // 2] = -1 if tokens > 1 else blocks * block_size - 1
    k, v = (randn(tokens, kv_heads, dim, seed=s).to(dtype) for s in (1, 2))
    v[0, 0] = 0.0
    k[-1, -1, -1] = math.nan
    caches = []
    for store in (store_kv_reference, store_kv_triton):
        kv = empty_kv(blocks, layers, kv_heads, block_size, dim, layout="hnd", dtype=code)
        kv.view(torch.uint8).fill_(7)
        scales = empty_scales(blocks, layers, kv_heads, block_size).fill_(-1.0)
        store(k, v, kv, 1, slots, block_size, scales)
        caches.append((kv.view(torch.uint8), scales))
    assert torch.equal(caches[0][0], caches[1][0])
    torch.testing.assert_close(caches[1][1], caches[0][1], rtol=0, atol=0, equal_nan=True)
    written = int((slots >= 0).sum()) * 2 * kv_heads
    assert int((caches[1][1] != -1).sum()) == written


@pytest.mark.parametrize("code", CODES, ids=IDS)
def test_blocks_of_8_bits_and_of_scales_move(code: torch.dtype) -> None:
    kv = empty_kv(5, 2, 3, 4, 20, layout="hnd", dtype=code)
    kv.view(torch.uint8).copy_(torch.randint(0, 256, kv.shape, generator=torch.Generator().manual_seed(0)))
    scales = empty_scales(5, 2, 3, 4).copy_(randn(5, 2, 2, 3, 4))
    for cache in (kv, scales):
        before = cache.clone().view(torch.uint8)
        copy_blocks_triton(cache, [(0, 4), (2, 1)])
        assert torch.equal(cache.view(torch.uint8)[[4, 1]], before[[0, 2]])
        data = gather_blocks_triton(cache, [4, 2])
        assert data.dtype == cache.dtype
        scatter_blocks_triton(cache, [0, 3], data)
        assert torch.equal(cache.view(torch.uint8)[[0, 3]], before[[0, 2]])


def test_misuse_of_scales_is_named() -> None:
    kv, scales = empty_kv(2, 1, 1, 4, 8, layout="hnd", dtype=torch.int8), empty_scales(2, 1, 1, 4)
    k, slots = torch.ones(1, 1, 8), torch.tensor([0])
    with pytest.raises(ValueError, match=r"needs scales.*empty_scales"):
        store_kv_triton(k, k, kv, 0, slots, 4)
    with pytest.raises(ValueError, match="scales must be contiguous, float32"):
        store_kv_triton(k, k, kv, 0, slots, 4, scales[:1])
    with pytest.raises(ValueError, match="has no scales"):
        store_kv_triton(k, k, kv.float(), 0, slots, 4, scales)
    with pytest.raises(ValueError, match=r"6-D cache .*empty_kv\(\.\.\., layout='hnd'\)"):
        store_kv_triton(k, k, empty_kv(2, 1, 1, 4, 8), 0, slots, 4)
