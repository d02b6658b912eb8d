"""Every test here takes a device: on `cuda` it tests the Triton kernels, on `cpu` (small sizes; the dispatching
functions take the CPU paths there) its own body, so that it has no silly errors on the day when there is a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
