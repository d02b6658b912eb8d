"""`longtail bench kernels --compile`: its rows, its table, and that no kernel of any case has a problem."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from longtail.bench import kernel_compile
from longtail.bench.cli import app
from longtail.bench.kernel_case_list import CASES


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_no_kernel_has_a_problem(op: str) -> None:
    rows = list(kernel_compile.run(["sm_90", "gfx942"], ["bfloat16"], [op]))
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
    ops = ["paged_attention", "latent_attention", "batch_invariant_linear"]
    rows = list(kernel_compile.run(["sm_80"], ["bfloat16"], ops))
    assert {row["kernel"] for row in rows if row["tensor_core"]} == {
        "attention_kernel",
        "_partition_kernel",
        "_linear_kernel",
    }


def test_attention_is_compiled_as_it_runs_at_the_full_size() -> None:
    """What is compiled is the path whose bytes stand beside it: whole tiles write no partial sums to combine."""
    kernels: dict[str, set[str]] = {}
    for row in kernel_compile.run(["sm_90"], ["bfloat16"], ["paged_attention"]):
        kernels.setdefault(row["case"], set()).add(row["kernel"])
    for what in ("decode", "verify", "prefill"):
        assert kernels.pop(what) == {"attention_kernel"}
    assert set(kernels) == {"decode, batch 8", "decode, MQA", "verify, batch 8", "chunk of 64"}
    assert all(names == {"attention_kernel", "combine_kernel"} for names in kernels.values())


def test_every_dtype_is_compiled() -> None:
    rows = list(kernel_compile.run(["sm_80"], ["float16", "float32", "float16"], ["silu_mul"]))
    assert [row["dtype"] for row in rows] == ["float16", "float32"]
    assert rows[1]["bytes_per_token"] == 2 * rows[0]["bytes_per_token"]
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(kernel_compile.table(rows))
    text = console.export_text()
    assert "silu_mul float16" in text and "silu_mul float32" in text
    match = kernel_compile.run(["sm_80"], ["bfloat16"], ["verify_drafts"])
    assert {row["dtype"] for row in match if row["case"] == "match"} == {"float32"}  # of token ids: it takes no other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "sm_70"], "targets: sm_70 unknown; there are sm_80"),
        (["--targets", ",,"], "targets: no name in ',,'"),
        (["--targets", ""], "targets: name at least one of sm_80"),
        (["--ops", "bogus"], "ops: bogus unknown; there are batch_invariant_linear"),
        (["--dtypes", "bogus"], "dtypes: bogus unknown; there are float32"),
        (["--dtypes", "bfloat16,fp8"], "dtypes: fp8 unknown"),
    ],
)
def test_bad_names_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--compile", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)
