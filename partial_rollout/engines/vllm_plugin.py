"""longtail's entry point `vllm.general_plugins`: vLLM calls it in each of its processes before a model is loaded.

It stands outside the vLLM engine's package, which refuses to be imported beside a vLLM that it does not know.
"""

from __future__ import annotations

import os

SWITCH = "LONGTAIL_VLLM_CORRECTIONS"
"""Environment variable: 0 leaves vLLM as it is."""


def correct() -> None:
    """Corrects the faults of the installed vLLM (engines/vllm/correction.py), if it is one that longtail knows."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        from longtail.partial_rollout.engines.vllm import correction
    except ImportError:  # it says what is unsupported when the engine is used
        return
    correction.correct()
