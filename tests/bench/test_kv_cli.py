"""`longtail bench kv` at small sizes: its shape, not its times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from longtail.bench.cli import app
from longtail.bench.kv_tables import sizes_up_to
from longtail.bench.overhead_bench import OverheadBenchConfig


def test_one_run(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out" / "kv.json"
    disk.mkdir()
    arguments = ["bench", "kv", "--model", "tiny-llama", "--sequences", "1", "--samples", "40", "--repeats", "2"]
    arguments += ["--resume-tokens", "64", "--directory", str(disk), "--out", str(out), "--json"]
    threads = torch.get_num_threads()
    try:
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == 0, (result.output, result.exception)
    printed = json.loads(result.stdout.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    measures = [row["measure"] for row in printed["rows"]]
    assert measures == [
        *("first save", "memcpy", "save host", "restore host", "dd", "save disk", "restore disk"),
        "resume",
    ]
    assert [row["samples"] for row in printed["store"]] == [40]
    overhead = printed["overhead"]
    assert overhead["tokens"] == 16 * 64
    # every sample is paused at 64 + 32 known tokens, one of which is not computed yet: 8 groups of layers, heads, ...
    assert overhead["saved_bytes"] % (16 * 95) == 0 < overhead["saved_bytes"]
    assert len(overhead["seconds"]["disk"]) == len(overhead["seconds"]["memory"]) == 2
    assert all(0 < v < 1 for v in overhead["share_in_store_calls"].values())
    for text in ("Saved KV, 1 sequences", "x cheaper", "Sample store", "Store on disk against store in memory"):
        assert text in result.stderr
    assert list(disk.iterdir()) == []


def test_sizes() -> None:
    assert sizes_up_to(40) == (40,) and sizes_up_to(10_000) == (1_000, 3_000, 10_000)
    assert sizes_up_to(100_000) == (1_000, 3_000, 10_000, 30_000, 100_000)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "kv", "--directory", str(tmp_path / "none")])
    assert isinstance(result.exception, ValueError) and "directory must be there" in str(result.exception)


@pytest.mark.parametrize("field", ["groups", "group_size", "prompt_tokens", "output_tokens", "repeats", "threads"])
def test_config_names_the_field(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        OverheadBenchConfig(model="m", **{field: 0})
