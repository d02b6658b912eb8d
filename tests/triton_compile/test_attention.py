"""Attention's variants and 8-bit caches compile for every target without spills, with tensor cores and wide loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.triton_compile.gates import DTYPES, check_fit, on_every_target

from longtail.bench.offline_compile import Compiled
from longtail.kernels import attention_triton
from longtail.kernels.attention import AttentionBatch, AttentionVariant, paged_attention_triton
from longtail.kernels.kv import empty_kv, empty_scales, store_kv_triton

KV_HEADS = 2


def attend(
    dtype: torch.dtype,
    dim: int = 128,
    block: int = 16,
    group: int = 4,
    cache: torch.dtype | None = None,
    tree: bool = False,
    sinks: bool = False,
    **variant: float,
) -> None:
    kv = empty_kv(40, 2, KV_HEADS, block, dim, layout="hnd", dtype=cache or dtype)
    scales = empty_scales(40, 2, KV_HEADS, block) if cache else None
    masks = [None, [1, 3, 5, 9]] if tree else None
    batch = AttentionBatch.build([1, 4], [300, 20], [list(range(300 // block + 1)), [39, 38]], group, masks)
    q = torch.zeros(5, KV_HEADS * group, dim, dtype=dtype)
    of = AttentionVariant(sinks=torch.zeros(KV_HEADS * group) if sinks else None, **variant)  # type: ignore[arg-type]
    paged_attention_triton(q, kv, 1, batch, block, dim**-0.5, of, scales)


CASES: dict[str, dict[str, Any]] = {
    "window": {"window": 128},
    "softcap": {"softcap": 50.0, "dim": 256},
    "sinks_dim_64": {"sinks": True, "window": 128, "dim": 64, "group": 8},
    "tree": {"tree": True},
    "everything": {"window": 128, "softcap": 30.0, "sinks": True, "tree": True},
    "everything_dim_64": {"window": 128, "softcap": 30.0, "sinks": True, "tree": True, "dim": 64},
    "dim_72": {"dim": 72, "group": 3, "block": 32},
    "everything_e4m3": {"window": 128, "softcap": 30.0, "sinks": True, "tree": True, "cache": torch.float8_e4m3fn},
    "e4m3": {"cache": torch.float8_e4m3fn},
    "e4m3_dim_64": {"cache": torch.float8_e4m3fn, "dim": 64},
    "e4m3_dim_256": {"cache": torch.float8_e4m3fn, "dim": 256},
    "int8": {"cache": torch.int8},
    "int8_dim_64": {"cache": torch.int8, "dim": 64, "block": 64},
    "blocks_of_256": {"block": 256},
    "dim_80": {"dim": 80, "group": 1},
    "dim_96": {"dim": 96, "group": 16},
    "dim_192": {"dim": 192},
}
IN_FLOAT16 = {"e4m3", "int8", "everything", "everything_dim_64", "dim_72"}
IN_FLOAT32 = {"e4m3_dim_64", "int8", "everything", "everything_dim_64", "dim_80", "dim_192"}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "bfloat16") for case in CASES]
    + [(case, "float16") for case in CASES if case in IN_FLOAT16]
    + [(case, "float32") for case in CASES if case in IN_FLOAT32],
)
@on_every_target
@pytest.mark.launches(of=lambda case, dtype: attend(DTYPES[dtype], **CASES[case]))
def test_attention_is_fit_for_the_target(launches: list[Compiled], target: str, case: str, dtype: str) -> None:
    check_fit(launches, f"{case} {dtype}")
    partition, combine = launches
    for launch in launches:
        # AMD: 8-bit K and V of 512 threads are 8 bytes a thread.
        assert launch.loads.keys() & ({128} if target != "gfx942" or launch is combine else {64, 128})
        assert launch.stores.get(128, 0) > 0
    if dtype != "float32":
        assert partition.tensor_core > 0
    if case != "dim_72":  # of which the compiler does not see that rows of 144 bytes are aligned
        assert not partition.loads.keys() & {8, 16}  # K and V, of 8 bits too, come in wide loads


WHOLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "dim_64": {"dim": 64},
    "window_and_cap": {"window": 128, "softcap": 30.0},
    "window_cap_and_sinks": {"window": 128, "softcap": 30.0, "sinks": True},
    "sinks_dim_64": CASES["sinks_dim_64"],
    "blocks_of_256": CASES["blocks_of_256"],
}


def attend_whole(case: str, dtype: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_triton, "WHOLE_FROM", 1)
        attend(DTYPES[dtype], **WHOLE[case])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", WHOLE)
@on_every_target
@pytest.mark.launches(of=attend_whole)
def test_one_program_a_tile_is_fit_for_the_target(launches: list[Compiled], target: str, case: str, dtype: str) -> None:
    check_fit(launches, f"{case} {dtype}, whole")
    (launch,) = launches
    assert launch.tensor_core > 0
    assert not launch.loads.keys() & {8, 16}


def store_quantised(dim: int, cache: torch.dtype) -> None:
    kv, scales = empty_kv(4, 2, 3, 16, dim, layout="hnd", dtype=cache), empty_scales(4, 2, 3, 16)
    k = torch.zeros(32, 3, dim, dtype=torch.bfloat16)
    store_kv_triton(k, k.clone(), kv, 1, torch.arange(32), 16, scales)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@on_every_target
@pytest.mark.launches(of=store_quantised)
def test_quantised_stores_are_fit_for_the_target(
    launches: list[Compiled], target: str, dim: int, cache: torch.dtype
) -> None:
    check_fit(launches, f"{cache} {dim}")
    (launch,) = launches
    assert launch.loads.get(128, 0) > 0
    assert launch.stores.keys() & {64, 128}  # 16 codes are 16 bytes, but 8 numbers of 16 bits are loaded at once
