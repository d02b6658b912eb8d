"""rope_store_kv, latent attention and the linear layer compile for every target, by the gates of test_offline.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longtail.bench.offline_compile import TARGETS, compile_launches
from longtail.kernels.rope import rope_store_kv_triton

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def rope(dtype: torch.dtype, heads: int = 9, kv_heads: int = 3, dim: int = 64, norm: bool = False) -> None:
    kv = torch.zeros(4, 2, 2, kv_heads, 16, dim, dtype=dtype)
    weight = torch.zeros(dim, dtype=dtype) if norm else None
    qkv, table, index = torch.zeros(3, (heads + 2 * kv_heads) * dim, dtype=dtype), torch.zeros(64, dim // 2), [1, 2, 3]
    at = torch.tensor(index)
    rope_store_kv_triton(qkv, table, table.clone(), at, weight, weight, 1e-6, kv, 1, at, 16, heads, kv_heads)


CASES: dict[str, Callable[[torch.dtype], None]] = {
    "rope": rope,
    "rope_norm_dim_128": lambda dtype: rope(dtype, 32, 8, 128, norm=True),
    "rope_norm_dim_256": lambda dtype: rope(dtype, 8, 4, 256, norm=True),
    "rope_dim_80": lambda dtype: rope(dtype, 32, 32, 80),
    "rope_dim_96": lambda dtype: rope(dtype, 32, 32, 96),
}

ALL_DTYPES = {"rope"}
"""The cases that run in every dtype; the others differ in shape only."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in (DTYPES if case in ALL_DTYPES else ("bfloat16",))],
)
@pytest.mark.parametrize("target", TARGETS)
def test_fit_for_the_target(target: str, case: str, dtype: str) -> None:
    launches = compile_launches(lambda: CASES[case](DTYPES[dtype]), TARGETS[target])
    assert launches
    for launch in launches:
        print(
            f"{launch.kernel} {case} {dtype} {target}: warps {launch.num_warps}, registers {launch.registers}, spills "
            f"{launch.spills}, shared {launch.shared}, occupancy {launch.occupancy:.0%}, loads {launch.loads}, "
            f"stores {launch.stores}, tensor core {launch.tensor_core}"
        )
        assert launch.problems() == []
        assert launch.loads.get(128, 0) > 0
        assert launch.stores.get(128, 0) > 0
