"""How saved KV is written: `exact` is the cache's bytes; `int8` is about a quarter of them (of float32), on request.

int8: symmetric, a scale for each token and head (as KIVI does for values, arXiv 2402.02750): the largest magnitude is
127. What comes back differs by at most half a step, so a sample that continues on it may leave the path it would have
taken; its segment says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from longtail.kv_manager.layout import Layout

Encoding = Literal["exact", "int8"]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def encoding_of(layout: Layout, wanted: Encoding) -> Encoding:
    """Latents are compressed already, experts are numbers, and a state is small and remembers every error: they are
    saved as they are."""
    return wanted if layout.kind == "kv" else "exact"


def encoded_shapes(blocks: int, layout: Layout, dtype: torch.dtype, encoding: Encoding) -> Shapes:
    """The tensors that a run of blocks becomes."""
    shape = (blocks, *layout.block_shape)
    if encoding == "exact":
        return {layout.kind: (dtype, shape)}
    return {"scales": (torch.float32, (*shape[:-1], layout.block_size)), "codes": (torch.int8, shape)}


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
    torch.stack([keys.abs().amax(-2), values.abs().amax(-1)], dim=2, out=scales).div_(127.0)
    steps = torch.where(scales > 0, scales, 1.0)
    codes[:, :, 0] = (keys / steps[:, :, 0, :, None, :]).round_().flatten(-2)
    codes[:, :, 1] = (values / steps[:, :, 1, :, :, None]).round_().flatten(-2)


def decode(tensors: Mapping[str, torch.Tensor], layout: Layout, low: int, high: int) -> torch.Tensor:
    """Blocks low .. high-1 of a run, as they lie in the cache."""
    if layout.kind in tensors:
        return tensors[layout.kind][low:high]
    block_size, dim = layout.block_size, layout.dim
    codes, scales = tensors["codes"][low:high], tensors["scales"][low:high]
    data = torch.empty(codes.shape)
    data[:, :, 0] = (codes[:, :, 0].unflatten(-1, (dim, block_size)) * scales[:, :, 0, :, None, :]).flatten(-2)
    data[:, :, 1] = (codes[:, :, 1].unflatten(-1, (block_size, dim)) * scales[:, :, 1, :, :, None]).flatten(-2)
    return data
