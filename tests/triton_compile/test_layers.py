"""rope_store_kv, latent attention and the linear layer compile for every target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.triton_compile.gates import DTYPES, check_fit, check_full_width, in_dtypes, on_every_target

from longtail.bench.offline_compile import Compiled
from longtail.kernels.attention import AttentionBatch
from longtail.kernels.latent_triton import latent_attention_triton, store_latent_triton
from longtail.kernels.linear import batch_invariant_linear_triton
from longtail.kernels.rope import rope_store_kv_triton


def rope(dtype: torch.dtype, heads: int = 9, kv_heads: int = 3, dim: int = 64, norm: bool = False) -> None:
    kv = torch.zeros(4, 2, 2, kv_heads, 16, dim, dtype=dtype)
    weight = torch.zeros(dim, dtype=dtype) if norm else None
    qkv, table, index = torch.zeros(3, (heads + 2 * kv_heads) * dim, dtype=dtype), torch.zeros(64, dim // 2), [1, 2, 3]
    at = torch.tensor(index)
    rope_store_kv_triton(qkv, table, table.clone(), at, weight, weight, 1e-6, kv, 1, at, 16, heads, kv_heads)


def latent(dtype: torch.dtype, heads: int = 16, rank: int = 512, rope: int = 64, block_size: int = 64) -> None:
    cache = torch.zeros(40, 2, block_size, rank + rope, dtype=dtype)
    batch = AttentionBatch.build([1, 4], [300, 20], [list(range(300 // block_size + 1)), [39, 38]], heads)
    q, q_rope = torch.zeros(5, heads, rank, dtype=dtype), torch.zeros(5, heads, rope, dtype=dtype)
    latent_attention_triton(q, q_rope, cache, 1, batch, block_size, 0.1)


def store_latent(dtype: torch.dtype) -> None:
    c, k_rope = torch.zeros(5, 512, dtype=dtype), torch.zeros(5, 64, dtype=dtype)
    store_latent_triton(c, k_rope, torch.zeros(4, 2, 16, 576, dtype=dtype), 1, torch.arange(5), 16)


def linear(dtype: torch.dtype, inputs: int = 576, outputs: int = 576) -> None:
    x, weight = torch.zeros(3, inputs, dtype=dtype), torch.zeros(outputs, inputs, dtype=dtype)
    batch_invariant_linear_triton(x, weight, torch.zeros(outputs, dtype=dtype), torch.zeros(3, outputs, dtype=dtype))


CASES: dict[str, Callable[[torch.dtype], None]] = {
    "rope": rope,
    "rope_norm_dim_128": lambda dtype: rope(dtype, 32, 8, 128, norm=True),
    "rope_norm_dim_256": lambda dtype: rope(dtype, 8, 4, 256, norm=True),
    "rope_dim_80": lambda dtype: rope(dtype, 32, 32, 80),
    "rope_dim_96": lambda dtype: rope(dtype, 32, 32, 96),
    "latent": latent,
    "latent_128_heads_blocks_of_1": lambda dtype: latent(dtype, 128, block_size=1),
    "latent_rank_256": lambda dtype: latent(dtype, 40, 256, 32),
    "latent_rank_64": lambda dtype: latent(dtype, 3, 64, 16),
    "store_latent": store_latent,
    "linear": linear,
    "linear_wide": lambda dtype: linear(dtype, 4096, 16384),
    "linear_edges": lambda dtype: linear(dtype, 1544, 1000),
}


@in_dtypes(CASES, {"rope", "latent", "store_latent", "linear", "linear_wide"})
@on_every_target
@pytest.mark.launches(of=lambda case, dtype: CASES[case](DTYPES[dtype]))
def test_fit_for_the_target(launches: list[Compiled], target: str, case: str, dtype: str) -> None:
    check_fit(launches, f"{case} {dtype}")
    check_full_width(launches, dtype)
