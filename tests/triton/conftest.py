"""Runs the Triton kernels in Triton's interpreter, in a process of their own: `pytest tests/triton`.

What is interpreted is decided when a kernel's module is imported, for good, hence the process; TRITON_INTERPRET has to
be set before that.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

if "triton" in sys.modules:
    raise pytest.UsageError("triton is already imported, compiling: run `pytest tests/triton` in its own process")
os.environ["TRITON_INTERPRET"] = "1"

from .interpreter import install

install()


@pytest.fixture
def outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN, or an integer far outside of every vocabulary and cache; not whatever the
    memory held."""
    import torch

    def poisoned(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        return out.fill_(torch.nan if out.is_floating_point() else torch.iinfo(out.dtype).max // 2)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, functools.partial(poisoned, getattr(torch, name)))
