"""How saved KV is written: `exact` is the cache's bytes; `int8` and `fp8` are about a quarter of them (of float32), on
request.

Both are symmetric, with a scale for each token and head (as KIVI has for values, arXiv 2402.02750): the largest
magnitude s becomes the largest code. What comes back of a number x differs from it

    int8    by at most half a step, s / 254
    fp8     (e4m3) by at most |x| / 16, or s / 458752 where that is more: small numbers keep their digits

so a sample that continues on it may leave the path it would have taken; its segment says so. A token and head that
holds a NaN or an infinity comes back without a finite number: what is broken stays visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from longtail.kernels.kv_quant import LIMITS

Encoding = Literal["exact", "int8", "fp8"]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

CODES: dict[Encoding, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def encoded_shapes(blocks: int, layout: tuple[int, ...], dtype: torch.dtype, encoding: Encoding) -> Shapes:
    """The tensors that a run of blocks becomes. layout: (layers, kv heads, block size, head dim)."""
    layers, kv_heads, block_size, dim = layout
    shape = (blocks, layers, 2, kv_heads, block_size * dim)
    if encoding == "exact":
        return {"kv": (dtype, shape)}
    return {"scales": (torch.float32, (*shape[:-1], block_size)), "codes": (CODES[encoding], shape)}


def encode(kv: torch.Tensor, blocks: list[int], layout: tuple[int, ...], out: Mapping[str, torch.Tensor]) -> None:
    """Copies blocks of the cache [num blocks, layers, 2, kv heads, block size * head dim] (CPU layout, kernels/kv.py)
    into tensors of `encoded_shapes`."""
    if "kv" in out and kv.is_cpu:
        source, target = (t.flatten(1).view(torch.uint8).numpy() for t in (kv, out["kv"]))
        for i, block in enumerate(blocks):  # numpy moves a block with memcpy, nearly twice as fast as index_select
            target[i] = source[block]
        return
    index = torch.tensor(blocks, dtype=torch.long, device=kv.device)
    if "kv" in out:
        out["kv"].copy_(kv.index_select(0, index))
        return
    _, _, block_size, dim = layout
    data = kv.index_select(0, index).cpu().float()
    keys = data[:, :, 0].unflatten(-1, (dim, block_size))
    values = data[:, :, 1].unflatten(-1, (block_size, dim))
    scales, codes = out["scales"], out["codes"]
    limit = LIMITS[codes.dtype]
    torch.stack([keys.abs().amax(-2), values.abs().amax(-1)], dim=2, out=scales).div_(limit)
    steps = torch.where(scales > 0, scales, 1.0)
    keys.div_(steps[:, :, 0, :, None, :])  # `data` is a copy, and becomes the codes
    values.div_(steps[:, :, 1, :, :, None])
    data.clamp_(-limit, limit)  # a scale of few bits (a subnormal number) is too small, or too large
    codes.copy_(data.round_() if codes.dtype == torch.int8 else data)


def decode(tensors: Mapping[str, torch.Tensor], layout: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    """Blocks low .. high-1 of a run, in the CPU layout."""
    if "kv" in tensors:
        return tensors["kv"][low:high]
    _, _, block_size, dim = layout
    codes, scales = tensors["codes"][low:high], tensors["scales"][low:high]
    data = codes.float()
    data[:, :, 0].unflatten(-1, (dim, block_size)).mul_(scales[:, :, 0, :, None, :])
    data[:, :, 1].unflatten(-1, (block_size, dim)).mul_(scales[:, :, 1, :, :, None])
    return data
