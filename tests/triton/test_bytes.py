"""What the kernels move is what their cases say that they move, and close to the least that can be moved.

Their results are compared as tests/gpu compares them, so that its tolerances are known to let the kernels through.
"""

from __future__ import annotations

import pytest
import torch

from longtail.bench.kernel_case_list import CASES
from longtail.bench.kernel_cases import DTYPES, Case, Form
from longtail.kernels import attention_plan, attention_triton

from ..gpu.compare import assert_as_reference, tensors
from .interpreter import TRAFFIC

TOLERANCE = 0.02
"""Index tables and single numbers are counted roughly."""

AIM = 1.1
ABOVE_AIM = {  # at most, and why
    "paged_attention decode, MQA": (
        1.26,
        "partial sums of 2 tiles of heads beside one KV head; too few tiles to skip them",
    ),
    "paged_attention verify, batch 8": (
        1.13,
        "partial sums of too few tiles to skip them, in float32 beside 16-bit KV",
    ),
    "paged_attention chunk of 64": (2.92, "partial sums of 16 tiles beside the one context that they share"),
    "sample top-k, top-p": (2.14, "parts of a row with candidates are read a second time, at worst all of them"),
    "latent_attention decode": (
        1.43,
        "partial sums in float32 of 8 tiles of heads beside latents that all of them share",
    ),
    "paged_attention prefill": (9.5, "float32 only, whose tiles are all split: partial sums of each partition"),
    "verify_drafts rejection": (1.81, "the row that decides is read again, with its draft's probabilities"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_formulas_say_what_moves(case: Case) -> None:
    check_the_formulas(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.op == "paged_attention"], ids=lambda case: case.name)
def test_the_formulas_of_programs_that_take_all_partitions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small sizes are below WHOLE_FROM, so that the test above sees the split alone."""
    form = Form(torch.device("meta"), "triton", torch.bfloat16)
    split = case.make(form, case.small).memory
    monkeypatch.setattr(attention_triton, "WHOLE_FROM", 1)
    assert case.make(form, case.small).memory < split
    check_the_formulas(case)


def check_the_formulas(case: Case) -> None:
    for dtype in ("float32", "bfloat16"):
        if dtype not in case.dtypes:
            continue
        call = case.make(Form(torch.device("cpu"), "triton", DTYPES[dtype]), case.small)
        expected = tensors(call.reference())
        issued, memory = TRAFFIC.issued, TRAFFIC.memory
        result = call.launch()
        issued, memory = TRAFFIC.issued - issued, TRAFFIC.memory - memory
        for name, counted, formula in (("issued", issued, call.issued), ("memory", memory, call.memory)):
            told = f"{dtype}: {name}: counted {counted}, formula {formula}, least {call.least}"
            assert counted <= formula * (1 + TOLERANCE), told
            assert counted >= formula * (1 - TOLERANCE) or call.at_most, told
        assert_as_reference(case.op, case.what, tensors(result), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_traffic_is_close_to_the_least(case: Case) -> None:
    """At the sizes that matter, by the formulas that the tests above tie to the kernels."""
    ratios = {}
    for dtype in case.dtypes:
        traffic = case.traffic(DTYPES[dtype])
        assert traffic.memory >= traffic.least
        ratios[dtype] = traffic.memory / traffic.least
    bound, _ = ABOVE_AIM.get(case.name, (AIM, ""))
    assert max(ratios.values()) <= bound, ratios
    assert case.name not in ABOVE_AIM or max(ratios.values()) > AIM, f"within the aim, not to be listed: {ratios}"


def test_attention_is_counted_on_both_sides_of_the_threshold() -> None:
    """The larger cases have just as many tiles as it takes to do without partial sums; others must have fewer."""
    tiles = {
        case.what: n["batch"] * -(-n["queries"] * n["heads"] // n["kv_heads"] // attention_plan.TILE) * n["kv_heads"]
        for case in CASES
        if case.op == "paged_attention" and (n := case.full)
    }
    below = {what for what, count in tiles.items() if count < attention_triton.WHOLE_FROM}
    assert below == {"decode, batch 8", "decode, MQA", "verify, batch 8", "chunk of 64"}
    assert set(tiles) - below == {"decode", "verify", "prefill"}
