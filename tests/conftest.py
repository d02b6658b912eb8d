"""Which tests need a process of their own: those are left out of a run unless they are named.

Triton either interprets kernels or compiles them, decided once in a process, and the other tests want neither.
`make test` runs all parts but those with an environment of their own, tests/verl (`make test-verl`) and tests/vllm
(`make test-vllm`), and tests/ray (`make test-ray`), whose actors want the cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

OWN_PROCESS = {Path(__file__).parent / name for name in ("ray", "triton", "triton_compile", "verl", "vllm")}
NO_GPU = "needs a CUDA device"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path not in OWN_PROCESS:
        return None
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(collection_path in (path, *path.parents) for path in named) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """So that "all skipped" is never read as "all passed"."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NO_GPU in str(r.longrepr)]
    if skipped:
        terminalreporter.section("GPU")
        terminalreporter.line(f"{len(skipped)} tests need a CUDA device and did NOT run: they prove nothing here.")
