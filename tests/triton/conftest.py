"""Runs the Triton kernels in Triton's interpreter, in a process of their own: `pytest tests/triton`.

What is interpreted is decided when a kernel's module is imported, for good, hence the process; TRITON_INTERPRET has to
be set before that.
"""

from __future__ import annotations

import os
import sys

import pytest

if "triton" in sys.modules:
    raise pytest.UsageError("triton is already imported, compiling: run `pytest tests/triton` in its own process")
os.environ["TRITON_INTERPRET"] = "1"

from .interpreter import install

install()
