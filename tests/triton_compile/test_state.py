"""causal_conv and the scans of states compile for every target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.triton_compile.gates import DTYPES, check_fit, check_full_width, in_dtypes, on_every_target

from longtail.bench.offline_compile import Compiled
from longtail.kernels.causal_conv_triton import causal_conv_triton
from longtail.kernels.state_scan_triton import state_scan_triton

WHERE = torch.tensor([0, 2, 5]), torch.tensor([0, 1]), torch.tensor([2, 3])
"""cu_seqlens, read, write."""


def causal_conv(dtype: torch.dtype, channels: int = 8192, kernel: int = 4) -> None:
    x, weight = torch.zeros(5, channels, dtype=dtype), torch.zeros(channels, kernel, dtype=dtype)
    state = torch.zeros(4, channels, kernel - 1, dtype=dtype)
    causal_conv_triton(x, weight, torch.zeros(channels, dtype=dtype), state, *WHERE, silu=True)


def scan(
    dtype: torch.dtype,
    k_heads: int = 16,
    heads: int = 32,
    k_dim: int = 128,
    v_dim: int = 128,
    *,
    delta: bool = True,
    by_channel: bool = False,
) -> None:
    q, v = torch.zeros(5, k_heads, k_dim, dtype=dtype), torch.zeros(5, heads, v_dim, dtype=dtype)
    g = torch.zeros(5, heads, *([k_dim] if by_channel else []))
    state = torch.zeros(4, heads, k_dim, v_dim)
    beta = torch.zeros(5, heads, dtype=dtype) if delta else None
    state_scan_triton(q, q.clone(), v, g, beta, state, *WHERE, 0.1, 1e-6 if delta else None)


CASES: dict[str, Callable[[torch.dtype], None]] = {
    "causal_conv": causal_conv,
    "causal_conv_lfm2": lambda dtype: causal_conv(dtype, 2048, 3),
    "gated_delta": scan,  # Qwen3-Next
    "kimi_delta": lambda dtype: scan(dtype, 32, by_channel=True),
    "mamba2": lambda dtype: scan(dtype, 1, 128, 128, 64, delta=False),
    "lightning": lambda dtype: scan(dtype, 64, 64, 128, 128, delta=False),
    "wide_keys": lambda dtype: scan(dtype, 4, 4, 256, 512),
}

ALL_DTYPES = {"causal_conv", "gated_delta"}
"""The cases that run in every dtype; the others differ in shape only."""


@in_dtypes(CASES, ALL_DTYPES)
@on_every_target
@pytest.mark.launches(of=lambda case, dtype: CASES[case](DTYPES[dtype]))
def test_fit_for_the_target(launches: list[Compiled], target: str, case: str, dtype: str) -> None:
    check_fit(launches, f"{case} {dtype}")
    check_full_width(launches, dtype)
