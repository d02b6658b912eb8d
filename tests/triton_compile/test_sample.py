"""The kernels of sample compile for every target without spills, read the logits in full-width loads, and compute the
noise in the layout of the loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.triton_compile.gates import DTYPES, check_fit, on_every_target

from longtail.bench.offline_compile import TARGETS, Compiled, compile_launches
from longtail.kernels.sample import LogitEdits, SampleBatch, row_edits
from longtail.kernels.sample_triton import launch_sample

KERNELS = ["copy_kernel", "edit_kernel", "scan_kernel", "finish_kernel", "compact_kernel", "truncate_kernel"]


def launch(vocab: int, dtype: torch.dtype) -> None:
    batch = SampleBatch(
        np.ones(2, np.float32),
        np.zeros(2, np.uint64),
        np.zeros(2, np.int64),
        np.array([50, 0], np.int32),
        np.array([0.9, 1.0]),
        np.array([0.0, 0.0]),
        LogitEdits.stack([row_edits(banned=(1,)), row_edits()]),
    )
    launch_sample(torch.zeros(2, vocab, dtype=dtype), batch)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (49_152, "bfloat16"),
        (50_257, "bfloat16"),
        (151_936, "bfloat16"),
        (262_144, "float16"),
        (262_144, "float32"),
    ],
)
@on_every_target
@pytest.mark.launches(of=lambda vocab, dtype: launch(vocab, DTYPES[dtype]))
def test_fit_for_the_target(launches: list[Compiled], target: str, vocab: int, dtype: str) -> None:
    assert [launch.kernel for launch in launches] == KERNELS
    check_fit(launches, f"{vocab} {dtype}")
    for launched in launches:
        if vocab % 8 == 0 and launched.kernel in ("copy_kernel", "scan_kernel", "compact_kernel"):
            assert launched.loads.get(128, 0) > 0
        if vocab % 8 == 0 and launched.kernel == "scan_kernel":
            assert not launched.loads.keys() & {8, 16}  # all of the logits, that is
        if launched.kernel == "scan_kernel":
            assert launched.shared <= 1024  # reductions only: a tile of noise in another layout takes 4 KB


def test_plain_rows_take_two_launches() -> None:
    batch = SampleBatch(np.ones(2, np.float32), np.zeros(2, np.uint64), np.zeros(2, np.int64))
    launches = compile_launches(lambda: launch_sample(torch.zeros(2, 1000), batch), TARGETS["sm_90"])
    assert [(launched.kernel, launched.grid[:2]) for launched in launches] == [
        ("scan_kernel", (2, 1)),
        ("finish_kernel", (2,)),
    ]
