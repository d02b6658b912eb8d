"""What a compiled kernel must not lack, whatever it computes, and how its figures are printed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from longtail.bench.offline_compile import TARGETS, Compiled

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

ON_TENSOR_CORES = {"attention_kernel", "_partition_kernel", "_linear_kernel"}
"""Kernels of matrix products; float32 is multiplied exactly, without tensor cores."""
CACHE_READERS = {"attention_kernel", "_partition_kernel"}
"""K, V and latents come in wide loads, all of them."""

on_every_target = pytest.mark.parametrize("target", TARGETS)


def in_dtypes(cases: Iterable[str], in_all: Iterable[str]) -> pytest.MarkDecorator:
    """Cases in bfloat16, and some in every dtype: the others differ in shape only."""
    pairs = [(case, dtype) for case in cases for dtype in (DTYPES if case in in_all else ("bfloat16",))]
    return pytest.mark.parametrize(("case", "dtype"), pairs)


def check_fit(launches: list[Compiled], what: str) -> None:
    """No spills, and no more shared memory than a block may have."""
    assert launches
    for launch in launches:
        print(
            f"{launch.kernel} {what} {launch.target}: warps {launch.num_warps}, registers {launch.registers}, spills "
            f"{launch.spills}, shared {launch.shared}, occupancy {launch.occupancy:.0%}, loads {launch.loads}, "
            f"stores {launch.stores}, tensor core {launch.tensor_core}"
        )
        assert launch.problems() == []


def check_full_width(launches: list[Compiled], dtype: str) -> None:
    """Loads and stores of 128 bits; tensor cores; no narrow load where the cache is read."""
    for launch in launches:
        if dtype != "float32":
            assert launch.tensor_core > 0 or launch.kernel not in ON_TENSOR_CORES
            assert not launch.loads.keys() & {8, 16} or launch.kernel not in CACHE_READERS
        assert launch.loads.get(128, 0) > 0
        # gfx942: the linear kernel writes the result as matrix instructions leave it.
        assert launch.stores.get(128, 0) > 0 or (launch.target.name, launch.kernel) == ("gfx942", "_linear_kernel")
