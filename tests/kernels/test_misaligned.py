"""What the launching functions hand to the Triton kernels whose sums are sensitive to it: rows that start on 16 bytes.

The compiler chooses wider or narrower loads by that, and with them the order of a row's sum. Kernels are replaced by a
recorder: no GPU and no interpreter is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from longtail.kernels import logprobs_triton, norm, rope, verify_triton
from longtail.kernels.kv import empty_kv
from longtail.kernels.sample_batch import SampleBatch
from longtail.kernels.sample_triton import _upload

pytest.importorskip("triton")


class Recorder:
    """In place of a kernel: keeps its first argument."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda first, *_args, **_options: self.seen.append(first)


def token_logprobs(x: torch.Tensor) -> None:
    logprobs_triton.token_logprobs_forward_triton(x, torch.zeros(len(x), dtype=torch.int64), torch.ones(len(x)), True)


def verify(x: torch.Tensor) -> None:
    zeros = torch.zeros(len(x), dtype=torch.int64)
    cu = torch.zeros(len(x) + 1, dtype=torch.int32)
    verify_triton.verify_rejection_triton(x, zeros[:0], None, cu, torch.ones(len(x)), zeros, zeros, 0)


def rms_norm(x: torch.Tensor) -> None:
    norm.rms_norm_triton(x, torch.ones(x.shape[1], dtype=x.dtype), 1e-6)


def rope_store(x: torch.Tensor) -> None:
    table, where = torch.ones(8, 8), torch.zeros(len(x), dtype=torch.int64)
    kv = empty_kv(1, 1, 1, 16, 16, layout="hnd", dtype=x.dtype)
    rope.rope_store_kv_triton(x, table, table, where, None, None, 1e-6, kv, 0, where, 16, 1, 1)


KERNELS: dict[Callable[[torch.Tensor], None], tuple[Any, tuple[str, ...]]] = {
    token_logprobs: (logprobs_triton, ("_chunk_kernel", "_combine_kernel")),
    verify: (verify_triton, ("_chunk_kernel", "_judge_kernel", "_race_kernel", "_emit_kernel")),
    rms_norm: (norm, ("_rms_norm_kernel",)),
    rope_store: (rope, ("_rope_store_kv_kernel",)),
}


@pytest.mark.parametrize("run", KERNELS, ids=lambda run: run.__name__)
def test_rows_start_on_16_bytes(run: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, (module, names) = Recorder(), KERNELS[run]
    for name in names:
        monkeypatch.setattr(module, name, recorder)
    memory = torch.arange(3 * 48 + 8, dtype=torch.bfloat16)
    for offset in (0, 1, 4):
        x = memory[offset : offset + 3 * 48].view(3, 48)
        recorder.seen.clear()
        run(x)
        assert len(recorder.seen) == len(names)
        for given in recorder.seen:
            assert given.data_ptr() % 16 == 0
            assert torch.equal(given, x)
        assert (recorder.seen[0].data_ptr() == x.data_ptr()) == (offset == 0)  # no copy where none is needed


def test_a_tiny_top_p_stays_above_0_in_float32() -> None:
    ones = np.ones(3, np.float32)
    batch = SampleBatch(
        ones, np.zeros(3, np.uint64), np.zeros(3, np.int64), top_p=np.array([1e-300, np.float64(1e-40), 0.5])
    )
    top_p = _upload(batch, 8, False, torch.device("cpu"))[0]["top_p"]
    assert (top_p >= torch.finfo(torch.float32).tiny).all()
    assert top_p[2] == 0.5
