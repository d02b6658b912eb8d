"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def quiet_threads() -> None:
    """Settings for small shared machines, unless the user has made some: idle OpenMP threads go to sleep after a short
    spin. Without, two busy-waiting pools (torch's and numba's) can slow each other down tenfold; with no spin at all,
    waking the second thread costs 20-40 us an operation. Must run before torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def use_threads(threads: int | None) -> int:
    """For torch and numba, which are process-wide; None: as many as torch takes. -> how many."""
    import numba
    import torch

    threads = threads or torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    return threads


def describe() -> dict[str, Any]:
    """CPU, cores, versions and thread settings."""
    import torch

    from longtail import __version__

    packages = ("transformers", "numba", "numpy")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "longtail": __version__,
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT"),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        pairs = (line.partition(":") for line in info.read_text().splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "model name" in fields:
            return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()
