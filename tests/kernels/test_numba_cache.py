"""Numba's cache on disk: kernels are compiled again when a function that they take from another file changes."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from longtail.kernels import _numba
from longtail.kernels.norm import _rms_norm

KERNELS = Path(_numba.__file__).parent


def compiled_names(tree: ast.Module) -> set[str]:
    """The functions of a module that numba compiles (`inline` and `jit` of kernels/_numba.py)."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).split("(")[0] in ("inline", "jit")
    }


def test_every_file_that_kernels_take_functions_from_is_listed() -> None:
    trees = {path.stem: ast.parse(path.read_text()) for path in KERNELS.glob("*.py")}
    compiled = {name: compiled_names(tree) for name, tree in trees.items()}
    shared = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longtail.kernels."):
                module = str(node.module).rsplit(".", 1)[1]
                if compiled.get(module, set()) & {alias.name for alias in node.names}:
                    shared.add(f"{module}.py")
    assert shared == set(_numba.HELPERS)


@pytest.mark.parametrize("changed", _numba.HELPERS)
def test_the_digest_follows_each_file(changed: str, tmp_path: Path) -> None:
    for name in _numba.HELPERS:
        shutil.copy(KERNELS / name, tmp_path / name)
    before = _numba.digest_of(tmp_path)
    assert before == _numba.digest_of(KERNELS)
    (tmp_path / changed).write_text((tmp_path / changed).read_text() + "\nMORE = 1\n")
    assert _numba.digest_of(tmp_path) != before


def test_the_digest_is_in_the_names_of_the_cache() -> None:
    cache = _rms_norm._cache._impl.filename_base  # type: ignore[attr-defined]
    assert cache.startswith(f"norm._rms_norm.{_numba.digest_of(KERNELS)}-")
