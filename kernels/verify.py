"""Verification of drafts by match: the longest prefix that equals what the target samples, and the token after it.

Packed rows of sequences with n_i >= 0 drafts d:

    drafts   [ d0 d1 d2 | (none) | d0 ]                cu_drafts = [0, 3, 3, 4]
    rows     [ r0 r1 r2 r3 | r0 | r0 r1 ]              row j follows draft j - 1 and verifies draft j; the last one
    sampled  [ s0 s1 s2 s3 | s0 | s0 s1 ]              gives the bonus token; row j of sequence i: cu_drafts[i] + i + j

With s_j the token that the target samples at row j with the noise of that output position (a pure function of seed and
position, kernels/sample.py), draft j is *accepted* while d_j = s_j, and s_a is emitted after a accepted drafts: the
target's own token where the drafts went wrong, the *bonus* where none did. Every emitted token is the target's sample
on a prefix of emitted tokens, so the stream does not depend on the drafts: with any drafter, or none, it is the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import jit
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, on_device_of, tl


@dataclasses.dataclass(frozen=True, slots=True)
class Verified:
    """What a verify step emits. A sequence's acceptance length is accepted + 1, the bonus counted."""

    accepted: torch.Tensor
    """int32 [S]: drafts accepted; the others are to be rolled back."""
    tokens: torch.Tensor
    """int64 [S, most drafts + 1]: the accepted drafts and the token after them, then -1."""
    logprobs: torch.Tensor | None
    """float32, as tokens: their log-probability under the target; NaN where there is no token."""


def verify_drafts_reference(
    drafts: torch.Tensor, sampled: torch.Tensor, cu_drafts: torch.Tensor, logprobs: torch.Tensor | None = None
) -> Verified:
    """See `verify_drafts`."""
    most = _check_match(drafts, sampled, cu_drafts, logprobs, None)
    starts = cu_drafts.tolist()
    accepted, tokens, picked = [], [], []
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        row = start + i
        a = 0
        while a < stop - start and drafts[start + a] == sampled[row + a]:
            a += 1
        accepted.append(a)
        tokens.append([*sampled[row : row + a + 1].tolist(), *[-1] * (most - a)])
        if logprobs is not None:
            picked.append([*logprobs[row : row + a + 1].tolist(), *[np.nan] * (most - a)])
    device = drafts.device
    return Verified(
        torch.tensor(accepted, dtype=torch.int32, device=device),
        torch.tensor(tokens, dtype=torch.int64, device=device).reshape(-1, most + 1),
        None if logprobs is None else torch.tensor(picked, device=device).reshape(-1, most + 1),
    )


def verify_drafts(
    drafts: torch.Tensor,
    sampled: torch.Tensor,
    cu_drafts: torch.Tensor,
    logprobs: torch.Tensor | None = None,
    *,
    max_drafts: int | None = None,
) -> Verified:
    """drafts: int64 [D]; sampled: int64 [D + S], `sample` on the target's rows; cu_drafts: int32 [S + 1], where the
    drafts of each sequence start; logprobs: float32 [D + S], of the sampled tokens. -> `Verified`.

    A row that could not be sampled (token -1) matches no draft: its sequence emits what it accepted before, and -1.

    max_drafts: the most drafts that a sequence has, which fixes the width of the result. Without it it is read from
    cu_drafts, for which the host waits for a GPU. Raises ValueError for shapes that do not fit and, on the CPU, for
    cu_drafts that does not run from 0 to D in steps of 0..max_drafts.
    """
    if drafts.is_cuda:
        return verify_drafts_triton(drafts, sampled, cu_drafts, logprobs, max_drafts=max_drafts)
    most = _check_match(drafts, sampled, cu_drafts, logprobs, max_drafts)
    sequences = len(cu_drafts) - 1
    accepted = torch.empty(sequences, dtype=torch.int32)
    tokens = torch.empty(sequences, most + 1, dtype=torch.int64)
    picked = torch.empty(tokens.shape)
    _verify(
        drafts.contiguous().numpy(),
        sampled.contiguous().numpy(),
        cu_drafts.contiguous().numpy(),
        (picked.new_empty(len(sampled)) if logprobs is None else logprobs).contiguous().numpy(),
        accepted.numpy(),
        tokens.numpy(),
        picked.numpy(),
    )
    return Verified(accepted, tokens, None if logprobs is None else picked)


def check_drafts(drafts: torch.Tensor, cu_drafts: torch.Tensor, rows: int, max_drafts: int | None) -> int:
    """-> the most drafts of a sequence. On a GPU what would have to wait for it is not checked."""
    sequences = len(cu_drafts) - 1
    if drafts.dim() != 1 or drafts.dtype != torch.int64 or cu_drafts.dim() != 1 or cu_drafts.dtype != torch.int32:
        raise ValueError(
            f"verify_drafts: drafts {tuple(drafts.shape)} {drafts.dtype}, cu_drafts {tuple(cu_drafts.shape)} "
            f"{cu_drafts.dtype}; pass int64 [D] and int32 [S + 1]"
        )
    if sequences < 0 or rows != len(drafts) + sequences:
        raise ValueError(
            f"verify_drafts: {rows} target rows for {len(drafts)} drafts of {sequences} sequences; pass one row for "
            "each draft and one more for each sequence"
        )
    if cu_drafts.is_cuda and max_drafts is not None:
        return max_drafts
    counts = cu_drafts.diff()
    most = int(counts.max()) if sequences else 0
    if not cu_drafts.is_cuda and (
        int(cu_drafts[0]) != 0
        or int(cu_drafts[-1]) != len(drafts)
        or bool((counts < 0).any())
        or (max_drafts is not None and most > max_drafts)
    ):
        limit = "" if max_drafts is None else f", each step at most max_drafts = {max_drafts}"
        raise ValueError(f"verify_drafts: cu_drafts has to rise from 0 to the {len(drafts)} drafts{limit}")
    return most if max_drafts is None else max_drafts


def _check_match(
    drafts: torch.Tensor,
    sampled: torch.Tensor,
    cu_drafts: torch.Tensor,
    logprobs: torch.Tensor | None,
    max_drafts: int | None,
) -> int:
    if sampled.dim() != 1 or sampled.dtype != torch.int64:
        raise ValueError(f"verify_drafts: sampled {tuple(sampled.shape)} {sampled.dtype}; pass int64 [D + S]")
    if logprobs is not None and (logprobs.shape != sampled.shape or logprobs.dtype != torch.float32):
        raise ValueError(
            f"verify_drafts: logprobs {tuple(logprobs.shape)} {logprobs.dtype}; pass float32 [{len(sampled)}]"
        )
    check_devices("verify_drafts", drafts=drafts, sampled=sampled, cu_drafts=cu_drafts, logprobs=logprobs)
    return check_drafts(drafts, cu_drafts, len(sampled), max_drafts)


@jit()
def _verify(drafts: Any, sampled: Any, cu_drafts: Any, logprobs: Any, accepted: Any, tokens: Any, picked: Any) -> None:
    for i in range(accepted.shape[0]):
        start = cu_drafts[i]
        count = cu_drafts[i + 1] - start
        row = start + i
        a = 0
        while a < count and drafts[start + a] == sampled[row + a]:
            a += 1
        accepted[i] = a
        for j in range(tokens.shape[1]):
            tokens[i, j] = sampled[row + j] if j <= a else -1
            picked[i, j] = logprobs[row + j] if j <= a else np.float32(np.nan)


def verify_drafts_triton(
    drafts: torch.Tensor,
    sampled: torch.Tensor,
    cu_drafts: torch.Tensor,
    logprobs: torch.Tensor | None = None,
    *,
    max_drafts: int | None = None,
) -> Verified:
    """See `verify_drafts`."""
    most = _check_match(drafts, sampled, cu_drafts, logprobs, max_drafts)
    sequences = len(cu_drafts) - 1
    accepted = torch.empty(sequences, dtype=torch.int32, device=drafts.device)
    tokens = torch.empty(sequences, most + 1, dtype=torch.int64, device=drafts.device)
    picked = torch.empty(tokens.shape, dtype=torch.float32, device=drafts.device) if logprobs is not None else None
    if sequences:
        with on_device_of(drafts):
            _match_kernel[(sequences,)](
                drafts.contiguous(),
                sampled.contiguous(),
                cu_drafts.contiguous(),
                (sampled if logprobs is None else logprobs).contiguous(),
                accepted,
                tokens,
                tokens if picked is None else picked,
                most + 1,
                LOGPROBS=logprobs is not None,
                BLOCK=next_power_of_2(most + 1),
                num_warps=1,
            )
    return Verified(accepted, tokens, picked)


@triton_jit
def _match_kernel(
    drafts: tl.tensor,
    sampled: tl.tensor,
    cu_drafts: tl.tensor,
    logprobs: tl.tensor,
    accepted: tl.tensor,
    tokens: tl.tensor,  # [S, width]
    picked: tl.tensor,
    width: tl.tensor,
    LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program verifies one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_drafts + sequence).to(tl.int64)
    count = tl.load(cu_drafts + sequence + 1) - start
    j = tl.arange(0, BLOCK)
    row = start + sequence + j
    own = tl.load(sampled + row, mask=j <= count, other=-1)
    draft = tl.load(drafts + start + j, mask=j < count, other=-1)
    a = tl.min(tl.where((j < count) & (draft == own), BLOCK, j), axis=0)
    tl.store(accepted + sequence, a.to(tl.int32))
    out = sequence * width + j
    tl.store(tokens + out, tl.where(j <= a, own, -1), mask=j < width)
    if LOGPROBS:
        p = tl.load(logprobs + row, mask=j <= a, other=float("nan"))
        tl.store(picked + out, p, mask=j < width)
