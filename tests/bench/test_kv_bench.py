"""The shape of the KV benchmark's rows; what they say is for a quiet machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longtail.bench import kv_bench
from longtail.bench.kv_bench import KVBenchConfig

SMALL: dict[str, Any] = {"sequences": 3, "shortest": 20, "longest": 90, "layers": 2, "kv_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rows(tmp_path: Path) -> None:
    told: list[str] = []
    config = KVBenchConfig(directory=tmp_path, repeats=2, threads=1, **SMALL)
    assert config.lengths == [20, 55, 90]
    result = json.loads(json.dumps(kv_bench.run(config, told.append)))
    rows = {row["measure"]: row for row in result["rows"]}
    assert list(rows) == ["first save", "memcpy", "save host", "restore host", "dd", "save disk", "restore disk"]
    for name, row in rows.items():
        assert row["bytes"] == (1 + 2 + 3) * 2 * 2 * 32 * 16 * 4
        assert len(row["seconds"]) == (1 if name == "first save" else 2)
        assert all(seconds > 0 for seconds in row["seconds"])
    assert {n: list(r["ratio"]) for n, r in rows.items() if "ratio" in r} == {
        "save host": ["memcpy"],
        "restore host": ["memcpy"],
        "save disk": ["dd"],
        "restore disk": ["memcpy"],
    }
    expected = [a / b for a, b in zip(rows["memcpy"]["seconds"], rows["save host"]["seconds"], strict=True)]
    assert rows["save host"]["ratio"]["memcpy"]["p20"] == min(expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", [{"sequences": 0}, {"repeats": 0}, {"shortest": 2000, "longest": 1000}])
def test_a_wrong_setting_is_named(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="|".join(fields)):
        KVBenchConfig(directory=".", **fields)  # type: ignore[arg-type]
