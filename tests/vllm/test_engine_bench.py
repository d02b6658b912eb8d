"""`longtail bench engine --peers vllm`: both do the same work, and ratios are to the other's times."""

from __future__ import annotations

from pathlib import Path

import torch

from longtail.bench import engine_bench
from longtail.bench.engine_bench import EngineBenchConfig


def test_side_by_side(directories: dict[str, Path]) -> None:
    sizes = {"prompt_tokens": 5, "decode_tokens": 12, "prefill_tokens": 40, "snapshot_tokens": 70}
    config = EngineBenchConfig(
        model=directories["llama"],
        batches=(1, 3),
        repeats=2,
        threads=torch.get_num_threads(),
        numerics=("exact",),
        peers=("vllm",),
        **sizes,
    )
    rows = engine_bench.run(config, lambda text: None)["rows"]
    found = [(row["measure"], row["batch"], row["contestant"]) for row in rows[:6]]
    cases = [("decode", 1), ("decode", 3), ("prefill", 1)]
    assert found == [(*case, name) for case in cases for name in ("native exact", "vllm")]
    for ours, theirs in zip(rows[0:6:2], rows[1:6:2], strict=True):
        assert "ratios" not in theirs
        first, second = sorted(a / b for a, b in zip(ours["per_repeat"], theirs["per_repeat"], strict=True))
        assert ours["ratios"] == {"vllm": {"p20": first, "p50": first, "p80": second}}
