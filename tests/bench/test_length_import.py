"""ServeGen's and Mooncake's files, made by hand in their formats; broken ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from longtail.bench.cli import app
from longtail.bench.length_import import (
    Histogram,
    import_mooncake,
    import_servegen,
    read_histogram,
    weighted_quantiles,
    write_table,
)
from longtail.bench.workload import parse_workload


def test_weighted_quantiles_by_hand() -> None:
    """10 has a quarter of the weight, 20 a half, 30 a quarter."""
    values, weights = np.array([30.0, 10.0, 20.0]), np.array([1.0, 1.0, 2.0])
    assert weighted_quantiles(values, weights, 9).tolist() == [10, 10, 10, 20, 20, 20, 20, 30, 30]


def client(folder: Path, number: int, windows: dict[str, str], rates: list[tuple[int, float]]) -> None:
    table = {
        start: {"input_tokens": "{}", "output_tokens": text, "reason_ratio": "{}"} for start, text in windows.items()
    }
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(table))
    rows = [f"{time},{rate},1.0,Gamma,1.0,2.0" for time, rate in rates] + ["81000,0,0,,0,0"]
    (folder / f"chunk-{number}-trace.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture
def servegen(tmp_path: Path) -> Path:
    """Client 0: in the first six hours 3 requests a second (in two rows), half of 10 and half of 20 tokens; nothing
    known of the second. Client 1: in the second six hours 1 a second, all of 100; its first has lengths and no
    requests."""
    folder = tmp_path / "reason" / "r1"
    folder.mkdir(parents=True)
    client(folder, 0, {"0": "{10: 0.5, 20: 0.5}", "21600": "{}"}, [(0, 1.0), (600, 2.0), (21600, 5.0)])
    client(folder, 1, {"0": "{7: 1.0}", "21600": "{100: 1.0}"}, [(600, 0.0), (22200, 1.0)])
    return folder


def test_servegen_by_hand(servegen: Path) -> None:
    """Weights: 10 and 20 have 1.5 each, 100 has 1: borders at 3/8 and 3/4."""
    histogram = import_servegen(servegen)
    at = [round(share * 2000) for share in (0, 0.37, 0.38, 0.74, 0.76, 1)]
    assert [histogram.quantiles[i] for i in at] == [10, 10, 20, 20, 100, 100]
    assert histogram.licence == "Apache-2.0" and "reason/r1: 2 clients" in histogram.source


def test_servegen_import_is_a_workload(servegen: Path, tmp_path: Path) -> None:
    out = tmp_path / "r1.json"
    result = CliRunner().invoke(app, ["lengths", "import", str(servegen), "--format", "servegen", "--out", str(out)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert read_histogram(str(out)) == import_servegen(servegen)
    lengths = parse_workload(f"histogram({out}, groups=2000, group_size=2)").output_tokens
    assert (lengths.min(), lengths.max()) == (10, 100)
    assert (lengths <= 10).mean() == pytest.approx(3 / 8, abs=0.035)  # four standard errors of 4,000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("chunk-0-dataset.json", "{", "not a dataset of ServeGen"),
        ("chunk-0-dataset.json", '{"0": {}}', "not a dataset of ServeGen.*output_tokens"),
        ("chunk-0-dataset.json", '{"0": {"output_tokens": "{10: print()}"}}', "not a dataset of ServeGen"),
        ("chunk-0-dataset.json", '{"noon": {"output_tokens": "{}"}}', "not a dataset of ServeGen"),
        ("chunk-0-trace.csv", "0,fast", "not a trace of ServeGen"),
        ("chunk-0-trace.csv", "0", "not a trace of ServeGen"),
    ],
)
def test_servegen_files_that_are_none(servegen: Path, name: str, content: str, says: str) -> None:
    (servegen / name).write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        import_servegen(servegen)
    assert name in str(caught.value)


def test_servegen_folders_that_are_none(servegen: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no chunk-N-dataset\.json.*deepseek-r1"):
        import_servegen(tmp_path)
    (servegen / "chunk-1-trace.csv").unlink()
    with pytest.raises(ValueError, match=r"chunk-1-trace\.csv: is missing"):
        import_servegen(servegen)
    for number in (0, 1):
        client(servegen, number, {"0": "{10: 1.0}"}, [(0, 0.0)])
    with pytest.raises(ValueError, match="no client has both"):
        import_servegen(servegen)


MOONCAKE = '{"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE + MOONCAKE.replace("500", "0") + "\n" + MOONCAKE.replace("500", "7"))
    columns = import_mooncake(path)
    assert columns["output_tokens"].tolist() == [500, 7]
    assert columns["prompt_tokens"].tolist() == [6758, 6758]
    assert columns["seconds"].tolist() == [3.0, 3.0]
    write_table(columns, tmp_path / "lengths.parquet")
    assert list(parse_workload(str(tmp_path / "lengths.parquet")).groups()) == [("p0", 6758, [500]), ("p1", 6758, [7])]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no request"),
        (MOONCAKE + MOONCAKE[:40], "line 2 is not a request"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 1}\n', "line 2.*lacks 'output_length'"),
        ('{"timestamp": 0, "input_length": 1, "output_length": -1}\n', "line 1.*at least 0"),
        ('{"timestamp": "noon", "input_length": 1, "output_length": 1}\n', "line 1"),
        ("[]\n", "line 1"),
    ],
)
def test_mooncake_files_that_are_none(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=says):
        import_mooncake(path)


def test_histogram_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    good = Histogram((1.0, 2.5, 3.0), "hand \u00fc", "none")
    good.write(path)
    assert read_histogram(str(path)) == good
    for content, says in (
        ("{", "not JSON"),
        ("{}", "not a histogram"),
        (path.read_text().replace("2.5", "3.5"), "never fall"),
        (path.read_text().replace("2.5", '"a"'), "list of numbers"),
        (path.read_text().replace("1, 2.5, 3", "1"), "at least 2"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=says):
            read_histogram(str(path))
        good.write(path)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    for arguments, says in (
        (["x", "--format", "csv"], "choose from servegen, mooncake"),
        (["x", "--format", "servegen", "--out", "x.parquet"], "ends with .json"),
        (["x", "--format", "mooncake", "--out", "x.json"], "ends with .parquet"),
    ):
        result = CliRunner().invoke(app, ["lengths", "import", *arguments])
        assert isinstance(result.exception, ValueError) and says in str(result.exception)
