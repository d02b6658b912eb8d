"""How saved KV is written: `exact` is the cache's bytes; `int8` is a quarter of them (of float32), on request.

int8: symmetric, a scale for each token and head (as KIVI does for values, arXiv 2402.02750): the largest magnitude is
127. What comes back differs by at most half a step, so a sample that continues on it may leave the path it would have
taken; its segment says so.
"""

from __future__ import annotations

from typing import Literal

import torch

Encoding = Literal["exact", "int8"]


def encode(data: torch.Tensor, layout: tuple[int, ...], encoding: Encoding) -> dict[str, torch.Tensor]:
    """data: [blocks, layers, 2, kv heads, block size * head dim] in the CPU layout (kernels/kv.py)."""
    if encoding == "exact":
        return {"kv": data}
    _, _, block_size, dim = layout
    keys = data[:, :, 0].unflatten(-1, (dim, block_size))
    values = data[:, :, 1].unflatten(-1, (block_size, dim))
    scales = torch.stack([keys.abs().amax(-2), values.abs().amax(-1)], dim=2) / 127.0  # [..., block size]
    steps = torch.where(scales > 0, scales, 1.0)
    codes = torch.empty(data.shape, dtype=torch.int8)
    codes[:, :, 0] = (keys / steps[:, :, 0, :, None, :]).round().flatten(-2).to(torch.int8)
    codes[:, :, 1] = (values / steps[:, :, 1, :, :, None]).round().flatten(-2).to(torch.int8)
    return {"codes": codes, "scales": scales.contiguous()}


def decode(tensors: dict[str, torch.Tensor], layout: tuple[int, ...]) -> torch.Tensor:
    """The inverse, up to rounding for int8."""
    if "kv" in tensors:
        return tensors["kv"]
    _, _, block_size, dim = layout
    codes, scales = tensors["codes"], tensors["scales"]
    data = torch.empty(codes.shape)
    data[:, :, 0] = (codes[:, :, 0].unflatten(-1, (dim, block_size)) * scales[:, :, 0, :, None, :]).flatten(-2)
    data[:, :, 1] = (codes[:, :, 1].unflatten(-1, (block_size, dim)) * scales[:, :, 1, :, :, None]).flatten(-2)
    return data


def encoded_bytes(blocks: int, layout: tuple[int, ...], encoding: Encoding) -> int:
    layers, kv_heads, block_size, dim = layout
    rows = blocks * layers * 2 * kv_heads * block_size
    return rows * dim * 4 if encoding == "exact" else rows * (dim + 4)
