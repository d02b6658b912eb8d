"""KV in 8 bits: codes of float8 e4m3 or int8, with one float32 scale for each token and head.

Symmetric: scale = largest magnitude of the row / LIMITS[dtype], code = round(value / scale) to nearest, ties to even,
saturating; value = code * scale. An all-zero row has scale 0 and comes back as zeros. A row that holds a NaN or an
infinity has scale NaN and codes 0, and comes back as NaN throughout: what is broken stays visible.

The Triton functions build and read e4m3 with integers, on every target alike (sm_80 has no conversions): an e4m3
number's bits, shifted into those of a float16, are the number times 2^-8, subnormals included.
"""

from __future__ import annotations

import torch

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import tl

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest magnitude of a code."""


NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
"""What a cache without scales may hold."""


def check_cache_dtype(name: str, dtype: torch.dtype) -> None:
    """ValueError unless the kernels can read a cache of this dtype: other 8-bit formats would be taken for codes."""
    if dtype not in NUMBERS and dtype not in LIMITS:
        known = ", ".join(str(d).removeprefix("torch.") for d in (*NUMBERS, *LIMITS))
        raise ValueError(f"{name}: the dtype of the cache (kv) is {dtype}, use one of {known}")


def code_format(dtype: torch.dtype) -> str:
    """What the Triton kernels call the cache's elements: "e4m3", "int8", or "" for numbers without a scale."""
    return {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}.get(dtype, "")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit tensors as uint8, which every operation takes; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def check_scales(name: str, kv: torch.Tensor, scales: torch.Tensor | None, block_size: int) -> None:
    """Quantised caches come with scales, others without; ValueError for dtypes that no cache has."""
    check_cache_dtype(name, kv.dtype)
    if kv.dtype not in LIMITS:
        if scales is not None:
            raise ValueError(f"{name}: a cache of {kv.dtype} has no scales, leave them out")
        return
    wanted = (*kv.shape[:4], block_size)
    if scales is None:
        raise ValueError(f"{name}: a cache of {kv.dtype} needs scales, float32 {wanted} (empty_scales makes them)")
    if scales.shape != wanted or scales.dtype != torch.float32 or not scales.is_contiguous():
        got = f"{scales.dtype} {tuple(scales.shape)}"
        raise ValueError(f"{name}: scales must be contiguous, float32 {wanted}, as empty_scales makes them, got {got}")
    if scales.device != kv.device:
        raise ValueError(f"{name}: scales are on {scales.device}, the cache on {kv.device}: put them on one device")


def quantise_rows_reference(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., row] -> codes [..., row] of dtype (a key of LIMITS), scales float32 [...]."""
    limit = torch.tensor(LIMITS[dtype], device=x.device)  # a tensor: by a number, torch on CUDA multiplies by 1 / it
    x = x.float()
    scales = torch.where(x.isfinite().all(-1), x.abs().amax(-1) / limit, torch.nan)
    codes = torch.where((scales > 0)[..., None], x / scales[..., None], 0.0).clamp(-limit, limit)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def dequantise_rows_reference(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes: [..., row], scales: [...] -> float32 [..., row]."""
    return codes.float() * scales[..., None]


@triton_jit
def quantise_rows(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """x: float32 [rows, row], 0 where masked -> codes as uint8 [rows, row], scales float32 [rows]."""
    limit = tl.full([1], 448.0 if FORMAT == "e4m3" else 127.0, tl.float32)
    # The maximum may drop a NaN: a sum of zeros does not, and turns an infinity into one.
    scales = tl.div_rn(tl.max(tl.abs(x), axis=1), limit) + tl.sum(x * 0.0, axis=1)
    usable = (scales > 0)[:, None]
    y = tl.div_rn(tl.where(usable, x, 0.0), tl.where(usable, scales[:, None], 1.0))
    y = tl.minimum(tl.maximum(y, -limit[None, :]), limit[None, :])
    if FORMAT == "e4m3":
        codes = _encode_e4m3(y)
    else:
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23, whose neighbours are integers
        codes = y.to(tl.int32)
    return (codes & 0xFF).to(tl.uint8), scales


@triton_jit
def _encode_e4m3(y: tl.tensor) -> tl.tensor:
    """float32, magnitude at most 448 -> int32 with the bits of e4m3, rounded to nearest, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 e4m3 has steps of 2^-9, as float32 has at 2^14: the addition rounds.
    subnormal = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton_jit
def decode(codes: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """uint8 -> the codes' values / unit_of(FORMAT), exact in float16, bfloat16 and float32."""
    if FORMAT == "e4m3":
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        half = tl.where((bits & 0x7F) == 0x7F, 0x7E00, half)  # NaN
        values = half.to(tl.uint16).to(tl.float16, bitcast=True).to(dtype)
    else:
        values = codes.to(tl.int8, bitcast=True).to(dtype)
    return values


@triton_jit
def unit_of(FORMAT: tl.constexpr) -> tl.constexpr:
    """By which `decode`'s values have yet to be multiplied, best with the scale."""
    return 256.0 if FORMAT == "e4m3" else 1.0
