"""The Triton kernels on a GPU, at the sizes of a real model: every case of the bench against its reference.

Where there is no CUDA device the tests of one are skipped, with a count. `pytest tests/gpu`
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longtail.bench.kernel_case_list import CASES
from longtail.bench.kernel_cases import DTYPES, Case, Form
from longtail.kernels.process_logits import LogitEdits, row_edits
from longtail.kernels.sample import SampleBatch, sample, sample_reference

from .compare import assert_as_reference, assert_logprobs_close, assert_same_tokens, tensors
from .paged import randn


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case.name} {dtype}") for case in CASES for dtype in case.dtypes],
)
def test_op_equals_its_reference(case: Case, dtype: str, device: torch.device) -> None:
    call = case.make(Form(device, "triton", DTYPES[dtype]), case.cpu if device.type == "cuda" else case.small)
    expected = tensors(call.reference())  # first: in-place ops work on a copy there
    assert_as_reference(case.op, case.what, tensors(call.op()), expected)
    if case.op == "verify_drafts" and device.type == "cuda":
        accepted = expected[0]
        assert (accepted == 0).any() and (accepted > 0).any()  # so that both ways are tested


def batch_of(rows: int, **fields: object) -> SampleBatch:
    temperatures = np.where(np.arange(rows) % 10 == 9, 0, 0.7).astype(np.float32)
    return SampleBatch(temperatures, np.arange(rows, dtype=np.uint64), np.arange(rows, dtype=np.int64), **fields)  # type: ignore[arg-type]


def edits_of(rows: int, vocab: int) -> LogitEdits:
    """Every third row as it is; the others with all penalties and bans."""
    return LogitEdits.stack(
        [
            row_edits()
            if i % 3 == 0
            else row_edits(
                prompt_ids=np.arange(i, i + 200) % vocab,
                output_ids=np.arange(i, i + 300, 3) % vocab,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                repetition_penalty=1.3,
                banned=np.arange(vocab - 50 - i % 7, vocab),
            )
            for i in range(rows)
        ]
    )


@pytest.mark.parametrize("what", ["plain", "top-k", "top-p", "min-p", "edits", "all"])
def test_sampled_tokens_are_those_of_the_cpu(what: str, device: torch.device) -> None:
    """The same noise on both: of 2,000 draws none may differ, but where two scores are within rounding (expected: less
    than one in 10,000) or a token is at the edge of a filter."""
    rows, vocab = (2000, 5000) if device.type == "cuda" else (40, 3000)
    chosen = {
        "top_k": np.full(rows, 50, np.int32),
        "top_p": np.full(rows, 0.9, np.float32),
        "min_p": np.full(rows, 0.05, np.float32),
        "edits": edits_of(rows, vocab),
    }
    fields = {name: value for name, value in chosen.items() if what in ("all", name.replace("_", "-"))}
    batch, logits = batch_of(rows, **fields), 2 * randn(rows, vocab)
    wanted, logprobs = (torch.from_numpy(x) for x in sample_reference(logits.clone(), batch))
    got, got_logprobs = (torch.from_numpy(x) for x in sample(logits.to(device), batch))
    same = assert_same_tokens(got, wanted, near_ties=3)
    assert_logprobs_close(got_logprobs[same], logprobs[same])
    if "edits" in fields:
        plain, _ = sample_reference(logits.clone(), batch_of(rows, **{k: v for k, v in fields.items() if k != "edits"}))
        assert (torch.from_numpy(plain) != wanted).any()  # they matter
