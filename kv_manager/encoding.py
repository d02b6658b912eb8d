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
from longtail.kv_manager.layout import Layout

Encoding = Literal["exact", "int8", "fp8"]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

CODES: dict[Encoding, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def encoding_of(layout: Layout, wanted: Encoding) -> Encoding:
    """Latents are compressed already, experts are numbers, and a state is small and remembers every error: they are
    saved as they are."""
    return wanted if layout.kind == "kv" else "exact"


def encoded_shapes(blocks: int, layout: Layout, dtype: torch.dtype, encoding: Encoding) -> Shapes:
    """The tensors that a run of blocks becomes."""
    shape = (blocks, *layout.block_shape)
    if encoding == "exact":
        return {layout.kind: (dtype, shape)}
    return {"scales": (torch.float32, (*shape[:-1], layout.block_size)), "codes": (CODES[encoding], shape)}


def encode(kv: torch.Tensor, blocks: list[int], layout: Layout, out: Mapping[str, torch.Tensor]) -> None:
    """Copies blocks of a cache [num blocks, *layout.block_shape] into tensors of `encoded_shapes`."""
    exact = out.get(layout.kind)
    if exact is not None and kv.is_cpu:
        source, target = (t.flatten(1).view(torch.uint8).numpy() for t in (kv, exact))
        for i, block in enumerate(blocks):  # numpy moves a block with memcpy, nearly twice as fast as index_select
            target[i] = source[block]
        return
    index = torch.tensor(blocks, dtype=torch.long, device=kv.device)
    if exact is not None:
        exact.copy_(kv.index_select(0, index))
        return
    block_size, dim = layout.block_size, layout.dim
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


def decode(tensors: Mapping[str, torch.Tensor], layout: Layout, low: int, high: int) -> torch.Tensor:
    """Blocks low .. high-1 of a run, as they lie in the cache."""
    if layout.kind in tensors:
        return tensors[layout.kind][low:high]
    block_size, dim = layout.block_size, layout.dim
    codes, scales = tensors["codes"][low:high], tensors["scales"][low:high]
    data = codes.float()
    data[:, :, 0].unflatten(-1, (dim, block_size)).mul_(scales[:, :, 0, :, None, :])
    data[:, :, 1].unflatten(-1, (block_size, dim)).mul_(scales[:, :, 1, :, :, None])
    return data
