"""Triton where it is installed, and what the Triton kernels share.

The op files import without Triton: kernels are then plain functions that nobody calls, and `on_device_of` says what to
install. Rules for the kernels (CONTRIBUTING.md, "Triton kernels"): addresses in int64, every load and store masked,
bfloat16 cast to float32 before any arithmetic but `tl.dot`, tile sizes that depend on a row's shape and never on the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = None

__all__ = ["compiles_for_amd", "jit", "next_power_of_2", "num_warps_for", "on_device_of", "tl", "warp_size"]


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or nothing where Triton is missing."""
    return function if triton is None else triton.jit(function)


def on_device_of(tensor: torch.Tensor) -> torch.cuda.device_of:
    """The context in which to launch on the tensor's device (Triton launches on the current one)."""
    if triton is None:
        raise ModuleNotFoundError("tensors on a GPU need Triton: pip install 'longtail[gpu]'")
    return torch.cuda.device_of(tensor)  # nothing for tensors on the CPU, which Triton's interpreter takes


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def num_warps_for(elements: int) -> int:
    """Warps for a tile: 16 elements a thread, two 16-byte loads of bfloat16 (one where a warp has 64 lanes)."""
    return min(max(next_power_of_2(elements) // (32 * 16), 1), 16)


def compiles_for_amd() -> bool:
    """Whether launches on the present device are compiled for an AMD GPU, whose compiler pipelines loads through
    registers instead of shared memory, so that other numbers of stages and warps fit."""
    from triton.runtime import driver

    return not triton.knobs.runtime.interpret and driver.active.get_current_target().backend == "hip"


def warp_size() -> int:
    """Lanes of a warp of the GPU that kernels are launched on: 32, AMD's data-centre GPUs have 64."""
    if triton is None or triton.knobs.runtime.interpret:
        return 32
    return int(triton.runtime.driver.active.get_current_target().warp_size)
