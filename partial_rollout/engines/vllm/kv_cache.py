"""vLLM's KV caches, read and written in kv_manager's layout.

vLLM keeps a tensor per layer, [blocks, heads, tokens of a block, 2 * channels], and each attention kernel places keys
and values in a block as suits it (on a CPU keys are transposed, or packed for AMX). kv_manager has one form:

    [blocks, layers, 2, heads, block_size * dim]    of a head: keys [dim, block_size], values [block_size, dim]

What lies where is not assumed but read off: the layer's own cache update writes keys and values that are numbered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from longtail.kv_manager.encoding import CODES, encode
from longtail.kv_manager.layout import Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_DIGIT = 128
"""Numbers are written digit by digit: bfloat16 holds integers up to 256."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class UnsupportedCache(Exception):
    """These caches cannot be saved, and why."""


class VllmCaches:
    """Of a model whose layers all keep the same.

    layers: the attention modules (`impl.do_kv_cache_update`), in order; caches: of each, [blocks, heads, tokens of a
    block, 2 * dim]; block_size: tokens of a block as vLLM's block tables count them (a kernel may split it).
    UnsupportedCache if it is not so."""

    def __init__(self, layers: Sequence[Any], caches: Sequence[torch.Tensor], dim: int, block_size: int) -> None:
        first = caches[0]
        if any(c.shape != first.shape or c.dtype != first.dtype or c.stride() != first.stride() for c in caches):
            raise UnsupportedCache("the layers of this model keep different things")
        if first.dtype not in _DTYPES or first.ndim != 4 or first.shape[-1] != 2 * dim:
            raise UnsupportedCache(
                f"its KV cache is {first.dtype} {list(first.shape)} for heads of {dim} channels: neither keys and "
                "values in float32, float16 or bfloat16 (quantised and latent caches cannot be saved)"
            )
        _, heads, size, _ = first.shape
        if block_size % size:
            raise UnsupportedCache(f"blocks of {block_size} tokens are not made of kernel blocks of {size}")
        self.layout = Layout("kv", len(caches), heads, size, dim)
        self.dtype = str(first.dtype).removeprefix("torch.")
        self._caches = list(caches)
        self._split = block_size // size
        kernel = layers[0].impl
        if any(type(layer.impl) is not type(kernel) for layer in layers):
            raise UnsupportedCache("the layers of this model use different kernels")
        if not hasattr(kernel, "do_kv_cache_update"):
            raise UnsupportedCache(f"{type(kernel).__name__} writes its cache within the attention")
        places = _places(layers[0], first, self.layout)
        self._to_ours = places
        self._to_vllms = torch.empty_like(places).index_copy_(
            0, places, torch.arange(len(places), device=places.device)
        )

    def blocks_of(self, table: Sequence[int]) -> list[int]:
        """Of a request's block table: the blocks that the layout speaks of."""
        return [block * self._split + i for block in table for i in range(self._split)]

    def read(self, blocks: list[int], out: Mapping[str, torch.Tensor]) -> None:
        exact = out.get("kv")
        if exact is None:
            exact = torch.empty(len(blocks), *self.layout.block_shape, dtype=self._caches[0].dtype)
        index = torch.tensor(blocks, device=self._to_ours.device)
        for i, cache in enumerate(self._caches):
            found = cache.index_select(0, index).flatten(1).index_select(1, self._to_ours)
            exact[:, i].copy_(found.view(exact[:, i].shape))
        if "kv" not in out:
            assert out["codes"].dtype in CODES.values()
            encode(exact, list(range(len(blocks))), self.layout, out)

    def write(self, blocks: list[int], data: torch.Tensor) -> None:
        index = torch.tensor(blocks, device=self._to_vllms.device)
        for i, cache in enumerate(self._caches):
            rows = data[:, i].to(cache.device, cache.dtype).flatten(1).index_select(1, self._to_vllms)
            cache.index_copy_(0, index, rows.view(-1, *cache.shape[1:]))


def open_caches(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> VllmCaches:
    """Of an engine whose worker is in this process. UnsupportedCache says what cannot be saved."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedCache(f"the layers of this model keep {len(groups)} different things")
    spec: Any = groups[0].kv_cache_spec
    dim = getattr(spec, "head_size", None)
    if dim is None or getattr(spec, "head_size_v", None) != dim:
        raise UnsupportedCache(f"its layers keep {type(spec).__name__}, not keys and values of one size")
    modules: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    layers = [modules[name] for name in groups[0].layer_names]
    return VllmCaches(layers, [layer.kv_cache for layer in layers], dim, spec.block_size)


def _places(layer: Any, cache: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Where in a block of vLLM's, read in logical order, each element of ours lies: int64 [elements]."""
    heads, size, dim = layout.heads, layout.block_size, layout.dim
    half = heads * size * dim
    ours = torch.arange(2 * half, device=cache.device)
    keys = ours[:half].view(heads, dim, size).permute(2, 0, 1)  # [tokens, heads, dim]: what they are called in ours
    values = ours[half:].view(heads, size, dim).permute(1, 0, 2)
    block = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    slots = torch.arange(size, device=cache.device)
    written = torch.zeros(2 * half, dtype=torch.long, device=cache.device)
    with torch.inference_mode():
        for power in range(math.ceil(math.log(2 * half, _DIGIT))):
            block.zero_()
            digits = [(x // _DIGIT**power % _DIGIT).to(cache.dtype).contiguous() for x in (keys, values)]
            layer.impl.do_kv_cache_update(layer, digits[0], digits[1], block, slots)
            written += block.flatten().round().long() * _DIGIT**power
    if not torch.equal(written.sort().values, ours):
        raise UnsupportedCache(f"{type(layer.impl).__name__} does not keep keys and values as they are")
    return torch.empty_like(ours).index_copy_(0, written, ours)
