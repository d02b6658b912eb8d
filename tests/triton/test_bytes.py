"""What the kernels move is what their cases say that they move, and close to the least that can be moved."""

from __future__ import annotations

import pytest
import torch

from longtail.bench.kernel_case_list import CASES
from longtail.bench.kernel_cases import DTYPES, Case, Form

from .interpreter import TRAFFIC

TOLERANCE = 0.02
"""Index tables and single numbers are counted roughly."""

AIM = 1.1
ABOVE_AIM = {
    "sample top-k, top-p": "parts of a row with candidates are read a second time, at worst all of them",
    "latent_attention decode": "partial sums in float32 of 8 tiles of heads beside latents that all of them share",
    "verify_drafts rejection": "the row that decides is read again, with its draft's probabilities",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_formulas_say_what_moves(case: Case) -> None:
    for dtype in ("float32", "bfloat16"):
        if dtype not in case.dtypes:
            continue
        call = case.make(Form(torch.device("cpu"), "triton", DTYPES[dtype]), case.small)
        issued, memory = TRAFFIC.issued, TRAFFIC.memory
        call.launch()
        issued, memory = TRAFFIC.issued - issued, TRAFFIC.memory - memory
        for name, counted, formula in (("issued", issued, call.issued), ("memory", memory, call.memory)):
            told = f"{dtype}: {name}: counted {counted}, formula {formula}, least {call.least}"
            assert counted <= formula * (1 + TOLERANCE), told
            assert counted >= formula * (1 - TOLERANCE) or call.at_most, told


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_traffic_is_close_to_the_least(case: Case) -> None:
    """At the sizes that matter, by the formulas that the test above ties to the kernels."""
    for dtype in case.dtypes:
        traffic = case.traffic(DTYPES[dtype])
        assert traffic.memory >= traffic.least
        ratio = traffic.memory / traffic.least
        assert ratio <= AIM or case.name in ABOVE_AIM, f"{dtype}: {ratio:.2f} x the least"
