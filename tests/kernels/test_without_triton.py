"""The kernels' modules import, and the CPU path runs, where Triton is not installed."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["triton"] = None  # the import fails as if it were not installed
import torch
from longtail.kernels import activation, attention, kv, linear, norm, sample
cache = kv.empty_kv(2, 1, 1, 16, 4)
ones = torch.ones(1, 1, 4)
kv.store_kv(ones, ones, cache, 0, torch.tensor([5]), 16)
assert cache.sum() == 8
norm.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
activation.silu_mul(torch.ones(1, 4))
from longtail.kernels import latent, rope
latent.store_latent(torch.ones(1, 4), torch.ones(1, 4), latent.empty_latent(1, 1, 16, 4, 4), 0, torch.tensor([5]), 16)
linear.batch_invariant_linear(torch.ones(1, 4), torch.ones(2, 4))
try:
    kv.store_kv_triton(ones, ones, kv.empty_kv(2, 1, 1, 16, 4, layout="hnd"), 0, torch.tensor([5]), 16)
except ModuleNotFoundError as error:
    print(error)
"""


def test_everything_but_triton_works_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "pip install 'longtail[gpu]'" in result.stdout
