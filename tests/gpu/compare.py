"""When a kernel's result counts as its reference's.

Values are held against the scale of their own row, not against 1: attention over thousands of positions gives values
of some hundredths, in which an absolute tolerance fit for 1 sees nothing. test_compare.py plants faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SHARE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of the root mean square of a row: what its error may have. Rounding weights and outputs once each makes about a
quarter of it in 16 bits, sums in another order about a tenth in float32."""

PEAK = 10
"""Times that: the error of a single element, which may be a large one."""

LOGPROB = 1e-4
"""Nats, whatever the dtype of the logits: they are float32 from exact logits."""

GRADIENT = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative, element by element: most of a softmax's gradient is tiny and would vanish beside the scale of a row."""

SMALLEST = 1.2e-7
"""Two of the smallest numbers of float16."""


def tensors(result: Any) -> list[torch.Tensor]:
    """On the CPU."""
    items = result if isinstance(result, tuple) else (result,)
    return [torch.as_tensor(np.asarray(x)) if isinstance(x, np.ndarray) else x.cpu() for x in items]


def assert_rows_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """By the rows of the last dimension, to SHARE of got's dtype."""
    share = SHARE[got.dtype]
    a, b = got.cpu().double(), wanted.cpu().double()
    assert a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    scale = b.square().mean(-1).sqrt()
    error, peak = (a - b).square().mean(-1).sqrt(), (a - b).abs().amax(-1)
    worst = (error / scale.clamp(min=1e-30)).max().item()
    assert (error <= share * scale).all(), f"error of {worst:.2e} of a row's scale, {share:.0e} allowed"
    assert (peak <= PEAK * share * scale).all(), "a single element is off"


def assert_same_tokens(got: torch.Tensor, wanted: torch.Tensor, near_ties: int = 0) -> torch.Tensor:
    """Integers, equal in all rows but `near_ties`, where two scores may be within rounding -> bool [rows]: equal."""
    got, wanted = got.cpu(), wanted.cpu()
    assert got.shape == wanted.shape and not got.is_floating_point() and not wanted.is_floating_point()
    same = (got == wanted).view(len(got), -1).all(-1)
    differing = int((~same).sum())
    assert differing <= near_ties, f"{differing} of {len(got)} rows differ, {near_ties} may"
    return same


def assert_logprobs_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), wanted.cpu(), rtol=1e-6, atol=LOGPROB, equal_nan=True)


def assert_gradients_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(
        got.cpu().double(), wanted.cpu().double(), rtol=GRADIENT[got.dtype], atol=SMALLEST, equal_nan=True
    )


COPIES = ("store_kv", "copy_blocks", "store_latent")


def assert_as_reference(op: str, what: str, got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """The results of a case of longtail.bench.kernel_case_list."""
    if op in COPIES:
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    elif op == "sample":
        same = assert_same_tokens(got[0], wanted[0], near_ties=1)
        assert_logprobs_close(got[1][same], wanted[1][same])
    elif op == "verify_drafts":
        a, b = (torch.cat([x[0][:, None], x[1]], dim=1) for x in (got, wanted))
        same = assert_same_tokens(a, b, near_ties=int(what == "rejection"))
        if len(got) > 2:
            assert_logprobs_close(got[2][same], wanted[2][same])
    elif op == "token_logprobs":
        (assert_gradients_close if "backward" in what else assert_logprobs_close)(got[0], wanted[0])
    else:
        for a, b in zip(got, wanted, strict=True):
            assert_rows_close(a, b)
