"""`longtail bench kernels --compile`: its rows, its table, and that no kernel of any case has a problem."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from longtail.bench import kernel_compile
from longtail.bench.kernel_case_list import CASES


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_no_kernel_has_a_problem(op: str) -> None:
    rows = list(kernel_compile.run(["sm_90", "gfx942"], "bfloat16", [op]))
    assert {row["target"] for row in rows} == {"sm_90", "gfx942"}
    assert [row["problems"] for row in rows if row["problems"]] == []
    assert {row["case"] for row in rows} == {case.what for case in CASES if case.op == op}
    for row in rows:
        assert row["bytes_per_token"] >= row["least_bytes_per_token"] > 0
    json.dumps(rows)
    console = Console(width=240, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(kernel_compile.table(rows))
    assert rows[0]["kernel"] in console.export_text()


def test_matrix_products_run_on_tensor_cores() -> None:
    rows = list(kernel_compile.run(["sm_80"], "bfloat16", ["paged_attention", "latent_attention"]))
    rows += kernel_compile.run(["sm_80"], "bfloat16", ["batch_invariant_linear"])
    assert {row["kernel"] for row in rows if row["tensor_core"]} == {
        "attention_kernel",
        "_partition_kernel",
        "_linear_kernel",
    }


def test_unknown_targets_are_named() -> None:
    with pytest.raises(ValueError, match="targets: sm_70 unknown; there are sm_80"):
        list(kernel_compile.run(["sm_70"], "bfloat16"))
