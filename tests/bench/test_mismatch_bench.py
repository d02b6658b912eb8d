"""`longtail bench mismatch` on a tiny model: exact rows are 0.0, the others are not, and replay helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.partial_rollout.conftest import make_model

from longtail.bench.mismatch_bench import MismatchBenchConfig, run, table


def test_rows(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    result = run(MismatchBenchConfig(model=tmp_path, max_tokens=24), progress=lambda text: None)
    rows = {(row["model"], row["rollout"], row["trainer"]): row for row in result["rows"]}
    assert result["must_hold"] == {"holds": True, "exact": [0.0, 0.0]}
    for key, row in rows.items():
        assert row["trained"] == row["tokens"] > 0
        assert (row["max_difference"] == 0.0) == (key[2] == "exact"), key
    assert 0 < rows["dense", "exact", "float32"]["max_difference"] < 1e-4
    assert rows["dense", "exact", "float16"]["kl_k3"] < rows["dense", "exact", "bfloat16"]["kl_k3"]
    free, replayed = (rows["mixture", "exact", name] for name in ("bfloat16", "bfloat16, replay"))
    assert replayed["kl_k3"] < free["kl_k3"]
    assert table(result).row_count == len(rows) == 12


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="temperature must be above 0"):
        MismatchBenchConfig(model="x", temperature=0.0)
    with pytest.raises(ValueError, match="prompts must be at least 1"):
        MismatchBenchConfig(model="x", prompts=0)
