"""Each notebook runs from top to bottom on the committed trace, without an error, and shows what it promises."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from tests.bench.test_tail import check_laws

from longtail.bench import analysis
from longtail.bench.trace import read_trace

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "bench" / "notebooks").glob("*.ipynb"))
SMALL = ROOT / "tests" / "bench" / "data" / "small.parquet"


def test_the_committed_trace_is_small_and_adds_up() -> None:
    """Made by `longtail bench` with SmolLM2-135M: five strategies, 12 samples each, a drafter."""
    assert SMALL.stat().st_size < 300_000
    df = read_trace(SMALL)
    check_laws(df)
    for numbers in analysis.summary(df).values():
        assert numbers["complete"] and numbers["tokens_unaccounted"] == 0 and numbers["samples_trained"] == 12


def code(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_logic_of_its_own(path: Path) -> None:
    """It calls what the library has: no functions, classes, loops or conditions, and no results that were committed."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for source in code(notebook):
        for node in ast.walk(ast.parse(source)):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.If | ast.Lambda)
    assert all(not cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert all(output.output_type != "error" for output in shown)
    pictures = sum("image/png" in output.get("data", {}) for output in shown)
    assert pictures == sum(source.startswith("plots.") for source in code(notebook))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["choosing_a_strategy", "rollout_time", "speculation_break_even"]
