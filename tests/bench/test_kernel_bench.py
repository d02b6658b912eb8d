"""`longtail bench kernels` on a CPU: rows, table, bad input; and that each case computes what its reference does."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from longtail.bench import kernel_bench, kernel_cases_rows
from longtail.bench.cli import app
from longtail.bench.kernel_bench import CpuBench, KernelBenchConfig, table
from longtail.bench.kernel_case_list import CASES
from longtail.bench.kernel_cases import Case, Form

CPU = Form(torch.device("cpu"), "cpu", torch.float32)


def tensors(result: Any) -> list[torch.Tensor]:
    items = result if isinstance(result, tuple) else (result,)
    return [torch.as_tensor(np.asarray(x)) if isinstance(x, np.ndarray) else x for x in items]


@pytest.mark.parametrize("case", [case for case in CASES if case.on_cpu], ids=lambda case: case.name)
def test_what_is_timed_is_right(case: Case) -> None:
    call = case.make(CPU, case.small)
    expected = tensors(call.reference())  # first: in-place ops work on a copy there
    for got, wanted in zip(tensors(call.op()), expected, strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_byte_counts_are_in_order(case: Case) -> None:
    for sizes in (case.small, case.cpu):
        call = case.make(dataclasses.replace(CPU, path="triton", empty=case.op != "verify_drafts"), sizes)
        assert 0 < call.least <= call.memory <= call.issued
        assert call.tokens > 0


@pytest.mark.parametrize("case", [c for c in CASES if c.op == "verify_drafts"], ids=lambda case: case.name)
def test_drafts_are_accepted_and_refused(case: Case) -> None:
    """At the size of tests/gpu too: whole sequences accepted, refused at once, refused midway, and without drafts."""
    counts = kernel_cases_rows.Drafts.of(CPU, case.cpu).counts
    accepted = case.make(CPU, case.cpu).reference()[0].numpy()
    empty = counts == 0
    assert empty.any() and len(set(counts)) == 3
    assert ((accepted == counts) & ~empty).any()
    assert ((accepted == 0) & ~empty).any()
    assert ((accepted > 0) & (accepted < counts)).any()


def test_a_row_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "READ_BYTES", 1 << 20)
    case = next(case for case in kernel_cases_rows.CASES if case.op == "rms_norm")
    machine = {"cpu": "a CPU", "threads": 1, "torch": "2"}
    (row,) = CpuBench(machine, repeats=3).measure(case, "float32")
    ms = row["milliseconds"]
    assert 0 < ms["p20"] <= ms["p50"] <= ms["p80"]
    assert row["least_bytes"] == (2 * 512 * 576 + 576) * 4
    assert row["gigabytes_per_second"] == pytest.approx(row["least_bytes"] / ms["p50"] / 1e6)
    assert row["contestant"] == "cpu" and row["teraflops"] == 0
    assert json.loads(json.dumps(row)) == row
    assert list(CpuBench(machine, repeats=1).measure(case, "bfloat16")) == []  # the CPU's kernels take float32


def shown(rows: list[dict[str, Any]]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(rows))
    return console.export_text()


def test_the_table_says_where_it_ran() -> None:
    row: dict[str, Any] = {
        "op": "paged_attention",
        "case": "decode",
        "dtype": "float32",
        "contestant": "cpu",
        "milliseconds": {"p20": 1.0, "p50": 2.0, "p80": 3.0},
        "gigabytes_per_second": 10.0,
        "teraflops": 0.5,
        "read_gigabytes_per_second": 20.0,
        "share_of_bandwidth": {"p20": 0.4, "p50": 0.5, "p80": 0.6},
        "machine": {"cpu": "some CPU", "threads": 2, "torch": "2.13"},
    }
    text = shown([row])
    assert "no GPU here" in text and "paged_attention decode" in text and "50%" in text and "20.0 GB/s" in text
    on_gpu = row | {"contestant": "flash-attn", "share_of_roofline": 0.7, "machine": row["machine"] | {"gpu": "H200"}}
    text = shown([on_gpu])
    assert "H200" in text and "(flash-attn)" in text and "70%" in text and "no GPU" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "attention"], "ops: attention unknown; there are batch_invariant_linear, causal_conv, copy_blocks"),
        (["--dtypes", "fp8"], "dtypes: fp8 unknown; there are float32"),
        (["--ops", " , "], "ops: no name in ' , '"),
        (["--dtypes", "bfloat16", "--ops", "rms_norm"], "nothing to measure"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_help_says_the_defaults() -> None:
    text = " ".join(CliRunner().invoke(app, ["bench", "kernels", "--help"], env={"COLUMNS": "200"}).output.split())
    assert text.count("default: (all)") == 2 and "default: (bfloat16" in text


def test_no_two_tensors_of_a_case_are_the_same() -> None:
    """At the full size x and the weight of a linear layer have one shape."""
    assert not torch.equal(CPU.randn(64, 64), CPU.randn(64, 64, scale=0.125) * 8)
    assert torch.equal(CPU.randn(64, 64), CPU.randn(64, 64))


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "READ_BYTES", 1 << 20)
    result = CliRunner().invoke(app, ["bench", "kernels", "--ops", "rms_norm,silu_mul", "--repeats", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [row["op"] for row in rows] == ["rms_norm", "silu_mul"]


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, not 0"):
        KernelBenchConfig(repeats=0)
