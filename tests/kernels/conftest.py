"""Shared by the kernels' tests: what makes a comparison readable when it fails."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import pytest
import torch


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    numba_threads, torch_threads = numba.get_num_threads(), torch.get_num_threads()
    yield
    numba.set_num_threads(numba_threads)
    torch.set_num_threads(torch_threads)
