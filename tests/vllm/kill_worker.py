"""As tests/partial_rollout/kill_worker.py, with vLLM underneath: kill_worker.py DIRECTORY KILLS SEED.

Each life is a fork of a process that has built the engine (its kernels run in the one thread that survives a fork)."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

from tests.partial_rollout.kill_worker import Kind, main
from tests.vllm.kv_helpers import SETTINGS, save_model

from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engines.vllm import VllmEngine


def make(model: Path) -> VllmEngine:
    return VllmEngine(model, **SETTINGS | {"max_num_seqs": 4})


def give_tiers(engine: VllmEngine, tiers: Tiers) -> None:
    assert engine.saver is not None
    engine.saver.tiers = tiers


def is_same(samples: list, expected: list) -> bool:
    """Tokens are equal; log-probabilities are within 1e-4, as vLLM's arithmetic depends on the batch."""
    return all(
        tokens == others and all(abs(float.fromhex(a) - float.fromhex(b)) < 1e-4 for a, b in zip(x, y, strict=True))
        for (tokens, x), (others, y) in zip(samples, expected, strict=True)
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        kind = Kind(functools.partial(make, save_model(Path(directory))), give_tiers, is_same)
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), kind)
