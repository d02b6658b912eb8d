"""longtail's entry point `vllm.general_plugins`: vLLM calls it in each of its processes before a model is loaded.

It stands outside the vLLM engine's package, which refuses to be imported beside a vLLM that it does not know.
"""

from __future__ import annotations

import contextlib
import os

WEIGHT_TRANSFER = "longtail"
"""Name of our backend (engines/vllm/weight_transfer.py) in vLLM's `weight_transfer_config`."""
SWITCH = "LONGTAIL_VLLM_CORRECTIONS"
"""Environment variable: 0 leaves vLLM as it is."""


def load() -> None:
    correct()
    register_weight_transfer()


def correct() -> None:
    """Corrects the faults of the installed vLLM (engines/vllm/correction.py), if it is one that longtail knows."""
    if os.environ.get(SWITCH, "1") == "0":
        return
    try:
        from longtail.partial_rollout.engines.vllm import correction
    except ImportError:  # it says what is unsupported when the engine is used
        return
    correction.correct()


def register_weight_transfer() -> None:
    """Tells the vLLM of this process of our backend, which it imports when it is asked for. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is there
        WeightTransferEngineFactory.register_engine(
            WEIGHT_TRANSFER, "longtail.partial_rollout.engines.vllm.weight_transfer", "InProcessTransfer"
        )
