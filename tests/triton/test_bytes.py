"""What the kernels move is what their cases say that they move, and close to the least that can be moved."""

from __future__ import annotations

import pytest
import torch

from longtail.bench.kernel_case_list import CASES
from longtail.bench.kernel_cases import DTYPES, Case, Form

from .interpreter import TRAFFIC

TOLERANCE = 0.02
"""Index tables are counted roughly."""

AIM = 1.1
ABOVE_AIM = {
    "paged_attention prefill": "each tile of 16 query rows reads the keys and values it sees, mostly from the L2 cache",
}


def counted(case: Case, dtype: str) -> tuple[int, int]:
    """Bytes by the interpreter's count, and by the case's formula."""
    call = case.make(Form(torch.device("cpu"), "triton", DTYPES[dtype]), case.small)
    before = TRAFFIC.total
    call.launch()
    return TRAFFIC.total - before, call.moved


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_moved_are_those_of_the_formula(case: Case) -> None:
    for dtype in ("float32", "bfloat16"):
        if dtype in case.dtypes:
            count, formula = counted(case, dtype)
            assert abs(count - formula) <= TOLERANCE * count, f"{dtype}: counted {count}, formula {formula}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_moved_are_close_to_the_least(case: Case) -> None:
    """At the sizes that matter; the formula is what the test above ties to the kernels."""
    with torch.device("meta"):
        call = case.make(Form(torch.device("meta"), "triton", torch.bfloat16), case.full)
    ratio = call.moved / call.least
    assert ratio <= AIM or case.name in ABOVE_AIM, f"{ratio:.2f} x the least"
