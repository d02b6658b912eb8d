"""The measurement of the store: its shape, not its times."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from longtail.bench.store_bench import StoreBenchConfig, run


def test_a_row_for_each_size(tmp_path: Path) -> None:
    config = StoreBenchConfig(sizes=(10, 25), group_size=4, batch=8, output_tokens=5, running=2, commits=2)
    said: list[str] = []
    rows = run(config, tmp_path, said.append)
    assert [row["samples"] for row in rows] == [10, 25] and said == ["10 samples", "25 samples"]
    assert rows[0].keys() == rows[1].keys()
    for row in rows:
        assert all(value > 0 for value in row.values()), row
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(StoreBenchConfig)])
def test_config_names_the_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
        StoreBenchConfig(**{field: (3, 0) if field == "sizes" else 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes is empty"):
        StoreBenchConfig(sizes=())
