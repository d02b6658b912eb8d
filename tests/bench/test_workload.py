"""Workloads: lengths as asked for, siblings as alike as asked for, files as they are; errors that name the fix.

The statistical tests have fixed seeds, so that they always say the same; their bounds are four standard errors, which a
right generator passes with another seed 99.99 % of the time.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from longtail.bench.cli import app
from longtail.bench.length_import import DATA, read_histogram
from longtail.bench.trace import TraceWriter
from longtail.bench.workload import intraclass_correlation, parse_workload
from longtail.errors import TraceError
from longtail.events import Event

SIZE = "groups=20000, group_size=2"


@pytest.mark.parametrize(
    ("text", "median", "quantile", "at"),
    [
        # Quantile of each family by its formula, at probability 0.9.
        ("lognormal(median=8000, sigma=1.0", 8000.0, 8000.0 * math.exp(1.2815515655), 0.9),
        ("weibull(scale=1000, shape=2", 1000 * math.log(2) ** 0.5, 1000 * math.log(10) ** 0.5, 0.9),
        ("exponential(mean=5000", 5000 * math.log(2), 5000 * math.log(10), 0.9),
        ("pareto(minimum=100, alpha=1.5", 100 * 2 ** (1 / 1.5), 100 * 10 ** (1 / 1.5), 0.9),
        ("uniform(low=100, high=2100", 1100.0, 1900.0, 0.9),
        ("constant(tokens=77", 77.0, 77.0, 0.9),
    ],
)
def test_families(text: str, median: float, quantile: float, at: float) -> None:
    """The share below the true quantile is it, to four standard errors of a share of 40,000."""
    lengths = parse_workload(f"{text}, {SIZE})").output_tokens
    for true, share in ((median, 0.5), (quantile, at)):
        below = float((lengths < true).mean() + (lengths <= true).mean()) / 2
        if not text.startswith("constant"):
            tie = 1.0 / max(true - 1.0, 1.0)  # lengths are whole: half a token either way
            assert below == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 40_000) + tie)
    if text.startswith("constant"):
        assert set(lengths.tolist()) == {77}


@pytest.mark.parametrize("icc", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("family", ["lognormal(median=500, sigma=1.5", "histogram(servegen-r1"])
def test_siblings_are_as_alike_as_asked_for(family: str, icc: float) -> None:
    workload = parse_workload(f"{family}, icc={icc}, groups=4000, group_size=8)")
    measured = workload.summary()["icc"]
    error = (1 - icc) * (1 + 7 * icc) * math.sqrt(2 / (8 * 7 * 4000))  # Fisher (1925), of the correlation
    assert measured == pytest.approx(icc, abs=4 * error + 0.005)
    # The lengths as a whole are the family's, however alike siblings are (effective number of samples: groups).
    if family.startswith("lognormal"):
        spread = 4 * 1.2533 / math.sqrt(4000)
        assert math.log(np.median(workload.output_tokens) / 500) == pytest.approx(0.0, abs=1.5 * spread)


def test_intraclass_correlation_by_hand() -> None:
    """Two groups of two; lengths 1, 2 and 3, 4 have normal scores -b, -a, a, b at probabilities 1/8, 3/8, 5/8, 7/8."""
    b, a = (statistics.NormalDist().inv_cdf(p) for p in (7 / 8, 5 / 8))
    between = 2 * 2 * ((a + b) / 2) ** 2  # one degree of freedom
    within = 2 * 2 * ((b - a) / 2) ** 2 / 2  # two
    starts = np.array([0, 2, 4])
    expected = (between - within) / (between + within)
    assert intraclass_correlation(np.array([10, 20, 30, 40]), starts) == pytest.approx(expected)
    assert intraclass_correlation(np.array([10, 40, 20, 30]), starts) == pytest.approx(-1.0)
    assert intraclass_correlation(np.array([5, 5, 5, 5]), starts) is None
    assert intraclass_correlation(np.array([1, 2, 3]), np.array([0, 1, 2, 3])) is None


@settings(max_examples=50, deadline=None)
@given(
    groups=st.integers(1, 40),
    size=st.integers(1, 5),
    seed=st.integers(0, 1000),
    icc=st.floats(0, 1),
    cap=st.integers(1, 99),
)
def test_seeded_prefixed_and_capped(groups: int, size: int, seed: int, icc: float, cap: int) -> None:
    def make(number: int) -> list[tuple[str, int, list[int]]]:
        text = f"lognormal(median=50, sigma=1, icc={icc:.6f}, cap={cap}, prompt=9)"
        return list(parse_workload(text, groups=number, group_size=size, seed=seed).groups())

    whole = make(groups)
    assert whole == make(groups)
    assert make(groups + 3)[:groups] == whole
    assert all(prompt == 9 and len(lengths) == size for _, prompt, lengths in whole)
    assert all(1 <= tokens <= cap for *_, lengths in whole for tokens in lengths)


def test_the_cap_marks_what_reached_it() -> None:
    workload = parse_workload("constant(tokens=50, cap=50, groups=2, group_size=1)")
    assert workload.capped.all()
    assert not parse_workload("constant(tokens=49, cap=50, groups=2, group_size=1)").capped.any()


def test_a_million_is_compact() -> None:
    workload = parse_workload("lognormal(median=8000, sigma=1, cap=65536, groups=62500, group_size=16)")
    arrays = (workload.output_tokens, workload.prompt_tokens, workload.group_starts, workload.capped)
    assert len(workload) == 1_000_000
    assert sum(array.nbytes for array in arrays) < 10_000_000
    assert workload.tokens_of("p62499/15") == workload.output_tokens[-1]


@pytest.mark.parametrize("name", ["p2/0", "p1/3", "p1/-1", "p01/0", "x1/0", "p1", "p1/x", ""])
def test_samples_that_are_not_there(name: str) -> None:
    workload = parse_workload("constant(tokens=5, groups=2, group_size=3)")
    assert workload.tokens_of("p1/2") == 5
    with pytest.raises(ValueError, match="is not in the workload"):
        workload.tokens_of(name)


# --- the committed histogram


def test_servegen_r1() -> None:
    """Its quantiles rise from 9 to 32,768 tokens, with source and licence; drawn lengths have its median and 90 %."""
    histogram = read_histogram("servegen-r1")
    assert histogram.licence == "Apache-2.0" and "alibaba/ServeGen" in histogram.source
    middle, high = (histogram.quantiles[round(share * 2000)] for share in (0.5, 0.9))
    assert (len(histogram.quantiles), middle, high) == (2001, 792, 3432)
    lengths = parse_workload(f"histogram(servegen-r1, {SIZE})").output_tokens
    for value, share in ((middle, 0.5), (high, 0.9)):
        assert (lengths <= value).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 40_000) + 1e-3)
    assert (DATA / "servegen-r1.json").stat().st_size < 20_000


# --- text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lognormal(median=8000)", r"lacks sigma; write lognormal\(median=..., sigma=...\)"),
        ("lognormal(median=8000, sigma=1)", "how many samples.*groups=... and group_size=..."),
        ("lognormal(median=8000, sigma=-1, groups=1, group_size=1)", "sigma=-1: must be a finite number above 0"),
        ("lognormal(median=nan, sigma=1, groups=1, group_size=1)", "median=nan"),
        ("lognormal(8000, 1)", "write median=..., sigma=..."),
        (
            "lognormal(median=1, sigma=1, colour=red, groups=1, group_size=1)",
            "colour is not an option; known are median",
        ),
        ("lognormal(median=1, median=2, sigma=1)", "each option once"),
        ("lognormal(median=1, sigma=1, groups=few, group_size=1)", "groups=few: must be a whole number"),
        ("lognormal(median=1, sigma=1, groups=0, group_size=1)", "groups must be a whole number of at least 1"),
        ("lognormal(median=1, sigma=1, icc=1.5, groups=1, group_size=1)", "icc must be from 0"),
        ("lognormal(median=1, sigma=1, seed=-1, groups=1, group_size=1)", "seed must be"),
        ("gamma(mean=1)", "'gamma' is not known; choose from lognormal"),
        ("uniform(low=9, high=3, groups=1, group_size=1)", r"high \(3\) must be at least low \(9\)"),
        ("pareto(minimum=1e9, alpha=0.1, groups=10, group_size=1)", "give cap="),
        ("histogram(nowhere, groups=1, group_size=1)", "servegen-r1"),
        ("histogram()", r"write histogram\(NAME\)"),
        ("file(a.csv, b.csv)", r"write file\(PATH\)"),
        ("nowhere.parquet", "does not exist"),
        ("", "is a folder"),
    ],
)
def test_text_that_is_no_workload(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_workload(text)


# --- files


def test_every_kind_of_table(tmp_path: Path) -> None:
    """Groups in order of appearance; a group's prompt is its longest."""
    table = {"prompt_id": ["b", "a", "b"], "output_tokens": [30, 10, 40], "prompt_tokens": [7, 5, 8]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    rows = list(zip(*table.values(), strict=True))
    (tmp_path / "x.csv").write_text("\n".join(",".join(map(str, row)) for row in [tuple(table), *rows]))
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(dict(zip(table, row, strict=True))) for row in rows))
    for ending in ("parquet", "csv", "jsonl"):
        workload = parse_workload(str(tmp_path / f"x.{ending}"))
        assert list(workload.groups()) == [("b", 8, [30, 40]), ("a", 5, [10])]
        assert workload.tokens_of("b/1") == 40 and workload.notes == ()
    cut = parse_workload(f"file({tmp_path / 'x.csv'}, cap=30)")
    assert cut.output_tokens.tolist() == [30, 30, 10] and cut.capped.tolist() == [True, True, False]


def test_rows_without_groups(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("length\n" + "\n".join(map(str, range(1, 6))))
    workload = parse_workload(str(path), group_size=2)
    assert list(workload.groups()) == [("p0", 256, [1, 2]), ("p1", 256, [3, 4]), ("p2", 256, [5])]
    assert any("groups of 2 rows" in note for note in workload.notes)
    assert any("256 tokens each" in note for note in workload.notes)


def test_resampling_keeps_groups_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("group,length\na,1\na,2\nb,30\n")
    workload = parse_workload(f"file({path}, groups=100, seed=3)")
    made = [lengths for _, _, lengths in workload.groups()]
    assert len(made) == 100 and {tuple(m) for m in made} == {(1, 2), (30,)}
    again = parse_workload(str(path), groups=100, seed=3)
    assert again.output_tokens.tolist() == workload.output_tokens.tolist()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", "", "is empty"),
        ("x.csv", "output_tokens\n", "no rows"),
        ("x.csv", "colour\nred\n", "no column of lengths; name it output_tokens.*it has colour"),
        ("x.csv", "length\n5\n0\n", "length of row 2 is 0; it must be a whole number of at least 1"),
        ("x.csv", "length\n5\n2.5\n", "row 2 is 2.5"),
        ("x.csv", "length\n5\nlong\n", "row 1 is '5'"),
        ("x.csv", "length,tokens\n5,5\n", "length, tokens mean the same"),
        ("x.csv", "group,length\na,5\n,6\n", "x.csv"),
        ("x.jsonl", '{"length": 5}\n{"leng', "truncated, or not jsonl"),
        ("x.jsonl", '{"length": 5}\n{"group": 1}\n', "row 2 is None"),
        ("x.parquet", "PAR1 and no more", "truncated, or not parquet"),
        ("x.txt", "5", "ends with .parquet, .csv, .jsonl"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    if says == "x.csv":  # an empty text is a name like another
        assert parse_workload(str(path)).num_groups == 2
        return
    with pytest.raises(ValueError, match=says) as caught:
        parse_workload(str(path))
    assert str(path) in str(caught.value)


# --- traces


def write_trace(path: Path) -> None:
    writer = TraceWriter()
    for run, longest in (("sync", 30), ("late", 31)):
        emit = writer.listener(run)
        emit(Event("run_start", 0.0))
        for name, group in (("b/0", "b"), ("a/0", "a"), ("b/1", "b"), ("c/0", "c")):
            emit(Event("submit", 0.0, sample=name, group=group, num_tokens=6))
        emit(Event("finish", 1.0, sample="b/1", group="b", num_tokens=longest, detail="length"))
        emit(Event("finish", 2.0, sample="b/0", group="b", num_tokens=10, detail="stop"))
        emit(Event("finish", 3.0, sample="a/0", group="a", num_tokens=20, detail="stop"))
        emit(Event("finish", 3.0, sample="c/0", group="c", num_tokens=5, detail="aborted"))
    writer.write(path, {})


def test_a_trace_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    write_trace(path)
    workload = parse_workload(str(path))
    assert list(workload.groups()) == [("b", 6, [10, 30]), ("a", 6, [20])]
    assert workload.capped.tolist() == [False, True, False]
    assert workload.notes == ("run sync of 2", "1 of 4 samples did not finish by themselves and are left out")
    assert parse_workload(f"file({path}, run=late)").tokens_of("b/1") == 31
    with pytest.raises(ValueError, match="run nope is not in the trace; it holds sync, late"):
        parse_workload(f"file({path}, run=nope)")


def test_broken_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    writer = TraceWriter()
    writer.listener("r")(Event("run_start", 0.0))
    writer.write(path, {})
    with pytest.raises(TraceError, match="no sample of run r"):
        parse_workload(str(path))
    table = pyarrow.parquet.read_table(path)
    table = table.replace_schema_metadata({**table.schema.metadata, b"longtail.version": b"99"})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(TraceError, match="version 99"):
        parse_workload(str(path))


def test_show(tmp_path: Path) -> None:
    text = "constant(tokens=12, groups=3, group_size=2)"
    result = CliRunner().invoke(app, ["lengths", "show", text, "--json"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    assert "6 samples in 3 groups" in result.output
    numbers = json.loads(result.stdout.splitlines()[-1])
    assert (numbers["mean"], numbers["max"], numbers["icc"]) == (12.0, 12, None)
