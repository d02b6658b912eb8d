"""These tests need verl, whose requirements exclude those of the others: `make test-verl` gives them an environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"

# Before verl is imported, here and in the processes that Ray starts.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the engine for devices; the one for CPUs trains nothing
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,longtail.trainer_adapter.plugins.verl",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH")))),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # what others on the machine use is no reason to end ours,
    "RAY_worker_oom_score_adjustment": "0",  # nor to end it first
    "WANDB_MODE": "disabled",
}
sys.path.insert(0, str(SUPPORT))
