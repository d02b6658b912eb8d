"""Every kernel compiles for every target without spills and within its shared memory, with full-width loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from tests.triton_compile.gates import DTYPES, check_fit, check_full_width, in_dtypes, on_every_target

from longtail.bench import offline_compile
from longtail.bench.offline_compile import TARGETS, Compiled, Target, compile_all, compile_launches
from longtail.kernels.activation import silu_mul_triton
from longtail.kernels.attention import AttentionBatch, paged_attention_triton
from longtail.kernels.kv import (
    copy_blocks_triton,
    empty_kv,
    gather_blocks_triton,
    scatter_blocks_triton,
    store_kv_triton,
)
from longtail.kernels.norm import rms_norm_triton

HEADS, BLOCK_SIZE, DIM = 3, 16, 64  # SmolLM2-135M's KV heads


def store_kv(dtype: torch.dtype, dim: int = DIM) -> None:
    kv = empty_kv(4, 2, HEADS, BLOCK_SIZE, dim, layout="hnd", dtype=dtype)
    k = torch.zeros(32, HEADS, dim, dtype=dtype)
    store_kv_triton(k, k.clone(), kv, 1, torch.arange(32), BLOCK_SIZE)


def blocks(dtype: torch.dtype) -> None:
    kv = empty_kv(4, 2, HEADS, BLOCK_SIZE, DIM, layout="hnd", dtype=dtype)
    copy_blocks_triton(kv, [(0, 1)])
    scatter_blocks_triton(kv, [1], gather_blocks_triton(kv, [0]))


def rms_norm(dtype: torch.dtype, columns: int = 576) -> None:
    rms_norm_triton(torch.zeros(2, columns, dtype=dtype), torch.zeros(columns, dtype=dtype), 1e-5)


def silu_mul(dtype: torch.dtype) -> None:
    silu_mul_triton(torch.zeros(2, 2 * 1536, dtype=dtype))


def attention(dtype: torch.dtype, dim: int = DIM, block_size: int = BLOCK_SIZE, group: int = 3) -> None:
    kv = empty_kv(40, 2, HEADS, block_size, dim, layout="hnd", dtype=dtype)
    batch = AttentionBatch.build([1, 4], [300, 20], [list(range(300 // block_size + 1)), [39, 38]], group)
    paged_attention_triton(torch.zeros(5, HEADS * group, dim, dtype=dtype), kv, 1, batch, block_size, dim**-0.5)


CASES: dict[str, Callable[[torch.dtype], None]] = {
    "store_kv": store_kv,
    "store_kv_dim_128": lambda dtype: store_kv(dtype, 128),
    "store_kv_dim_256": lambda dtype: store_kv(dtype, 256),
    "blocks": blocks,
    "rms_norm": rms_norm,
    "rms_norm_64": lambda dtype: rms_norm(dtype, 64),
    "rms_norm_8192": lambda dtype: rms_norm(dtype, 8192),
    "rms_norm_32768": lambda dtype: rms_norm(dtype, 32768),
    "silu_mul": silu_mul,
    "attention": attention,
    "attention_dim_128": lambda dtype: attention(dtype, 128, group=8),
    "attention_dim_256": lambda dtype: attention(dtype, 256),
    "attention_blocks_of_64": lambda dtype: attention(dtype, block_size=64),
}


@in_dtypes(CASES, {"attention", "store_kv", "blocks", "rms_norm", "silu_mul"})
@on_every_target
@pytest.mark.launches(of=lambda case, dtype: CASES[case](DTYPES[dtype]))
def test_fit_for_the_target(launches: list[Compiled], target: str, case: str, dtype: str) -> None:
    check_fit(launches, f"{case} {dtype}")
    if case != "rms_norm_64":  # a row of 64 is 2 elements for each lane of a warp
        check_full_width(launches, dtype)


# ---- the gates catch what they are for


@triton.jit
def spilling_kernel(x, SIZE: tl.constexpr):
    """Keeps more live than a thread has registers."""
    i = tl.arange(0, SIZE)
    values = tl.load(x + i)
    tl.debug_barrier()
    tl.store(x + i, tl.flip(values, 0) + values)


@triton.jit
def dot_kernel(x, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Both operands whole in shared memory."""
    i, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    a, b = tl.load(x + i[:, None] * DEPTH + k[None, :]), tl.load(x + k[:, None] * ROWS + i[None, :])
    tl.store(x + i[:, None] * ROWS + i[None, :], tl.dot(a, b).to(x.dtype.element_ty))


def compiled(kernel: triton.JITFunction, x: torch.Tensor, target: Target, **options: int) -> Compiled:
    (launch,) = compile_launches(lambda: kernel[(1,)](x, **options), target)
    return launch


def test_a_spill_is_found() -> None:
    launch = compiled(spilling_kernel, torch.zeros(16384), TARGETS["sm_90"], SIZE=16384, num_warps=1)
    assert launch.spills > 0
    assert any("register spills" in problem for problem in launch.problems())


def test_too_much_shared_memory_is_found() -> None:
    launch = compiled(dot_kernel, torch.zeros(32 * 1024), TARGETS["sm_80"], ROWS=32, DEPTH=1024, num_warps=8)
    assert launch.shared > 163 << 10
    assert any("bytes of shared memory" in problem for problem in launch.problems())
    assert launch.occupancy == 0


@on_every_target
def test_tensor_core_instructions_are_counted(target: str) -> None:
    x = torch.zeros(128 * 128, dtype=torch.bfloat16)
    assert compiled(dot_kernel, x, TARGETS[target], ROWS=128, DEPTH=128, num_warps=4).tensor_core > 0


def test_a_misaligned_tensor_loses_its_wide_loads() -> None:
    """So the gate on 128-bit loads sees the specialisation of a real launch."""
    x = torch.zeros(2 * 1536 + 1, dtype=torch.bfloat16)
    target = TARGETS["sm_90"]
    (aligned,) = compile_launches(lambda: silu_mul_triton(x[:-1][None]), target)
    (misaligned,) = compile_launches(lambda: silu_mul_triton(x[1:][None]), target)
    assert aligned.loads.get(128, 0) > 0
    assert misaligned.loads.get(128, 0) == 0


def test_the_driver_is_put_back() -> None:
    from triton.runtime import driver

    before = driver._active
    with pytest.raises(ZeroDivisionError):
        compile_launches(lambda: 1 / 0, TARGETS["sm_90"])
    assert driver._active is before


def test_many_are_read_as_one_alone_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two architectures and AMD in turns, kernels of many and of few instructions, one that fails among them."""
    monkeypatch.setattr(offline_compile, "_FACTS", {})  # what other tests have read
    names = ["sm_90", "gfx942", "sm_80", "sm_90"]
    works: list[Callable[[], None]] = [lambda: attention(torch.bfloat16), lambda: rms_norm(torch.float32)]
    jobs = [(work, TARGETS[name]) for name in names for work in works]
    *together, failed = compile_all([*jobs, (lambda: 1 / 0, TARGETS["sm_90"])])
    assert isinstance(failed, ZeroDivisionError)
    alone = []
    for work, target in jobs:
        offline_compile._FACTS.clear()
        alone.append(compile_launches(work, target))
    assert together == alone
    assert len({launch.registers for launches in alone for launch in launches}) > 4
