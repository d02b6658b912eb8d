"""The kernels of token_logprobs and verify_drafts compile for every target: no spills, full-width loads and stores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.triton_compile.gates import DTYPES, check_fit, on_every_target

from longtail.bench.offline_compile import Compiled
from longtail.kernels.logprobs_triton import token_logprobs_backward_triton, token_logprobs_forward_triton
from longtail.kernels.verify import verify_drafts_triton
from longtail.kernels.verify_triton import verify_rejection_triton

VOCABS = [49_152, 151_936, 262_144]


def forward(dtype: torch.dtype, vocab: int, entropy: bool = False) -> None:
    token_logprobs_forward_triton(
        torch.zeros(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.ones(2), entropy
    )


def backward(dtype: torch.dtype, vocab: int, entropy: bool = False) -> None:
    logits, rows = torch.zeros(2, vocab, dtype=dtype), torch.ones(2)
    tokens = torch.zeros(2, dtype=torch.int64)
    token_logprobs_backward_triton(
        logits, tokens, rows, (rows, rows, rows), rows, rows if entropy else None, torch.empty_like(logits)
    )


def rejection(dtype: torch.dtype, vocab: int, with_probs: bool = True) -> None:
    ids = torch.zeros(16, dtype=torch.int64)
    verify_rejection_triton(
        torch.zeros(20, vocab, dtype=dtype),
        ids,
        torch.zeros(16, vocab) if with_probs else None,
        torch.arange(0, 17, 4, dtype=torch.int32),
        torch.ones(20),
        ids[:4],
        ids[:4],
        4,
    )


CASES: dict[str, Callable[[torch.dtype, int], None]] = {
    "forward": forward,
    "forward_entropy": lambda dtype, vocab: forward(dtype, vocab, True),
    "backward": backward,
    "backward_entropy": lambda dtype, vocab: backward(dtype, vocab, True),
    "rejection": rejection,
    "rejection_without_probs": lambda dtype, vocab: rejection(dtype, vocab, False),
}
WIDE_LOADS = {"_chunk_kernel", "_gradient_kernel", "_race_kernel"}
"""The kernels that read the vocabulary; the others read a few numbers of a row."""
WIDE_STORES = {"_gradient_kernel"}


@pytest.mark.parametrize(
    ("case", "vocab"),
    [(case, vocab) for case in CASES for vocab in (VOCABS[:1] if case == "rejection_without_probs" else VOCABS)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@on_every_target
@pytest.mark.launches(of=lambda case, dtype, vocab: CASES[case](DTYPES[dtype], vocab))
def test_fit_for_the_target(launches: list[Compiled], target: str, case: str, dtype: str, vocab: int) -> None:
    check_fit(launches, f"{case} {dtype} {vocab}")
    for launch in launches:
        if launch.kernel in WIDE_LOADS:
            # 512 bytes for a warp's load; the race has four words of 8 tokens a thread, where a warp has 32
            wide = 64 if launch.kernel == "_race_kernel" and launch.target.gpu.warp_size == 64 else 128
            assert sum(n for bits, n in launch.loads.items() if bits >= wide) > 0
        if launch.kernel in WIDE_STORES:
            assert launch.stores.get(128, 0) > 0


def match(most: int) -> None:
    drafts = torch.zeros(2 * most, dtype=torch.int64)
    sampled, logprobs = torch.zeros(2 * most + 2, dtype=torch.int64), torch.zeros(2 * most + 2)
    verify_drafts_triton(drafts, sampled, torch.tensor([0, most, 2 * most], dtype=torch.int32), logprobs)


@pytest.mark.parametrize("most", [4, 16])
@on_every_target
@pytest.mark.launches(of=match)
def test_match_fits_the_target(launches: list[Compiled], target: str, most: int) -> None:
    """One program a sequence, a few numbers each: no wide loads to ask for."""
    assert len(launches) == 1
    check_fit(launches, str(most))
