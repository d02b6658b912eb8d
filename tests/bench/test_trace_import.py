"""Other systems' records: hand-computed traces, laws that hold for any records, named errors for other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from longtail.bench import analysis
from longtail.bench.cli import app
from longtail.bench.trace import read_trace
from longtail.bench.trace_import import import_trace
from longtail.errors import TraceError


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path: Path, **options: Any) -> pd.DataFrame:
    writer, _ = import_trace(path, **options)
    return writer.frame()


def response(sample: str, group: str, tokens: int, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"sample_id": sample, "prompt_id": group, "response_length": tokens, "start": start, "end": end, **more}


TRAINER = [
    response("a0", "a", 100, 0.0, 10.0, version=0, reward=1.0),
    response("a1", "a", 50, 0.0, 5.0, version=0, reward=0.0),
    response("b0", "b", 31, 20.0, 27.5, version=1, status="truncated"),
    response("b1", "b", 7, 20.0, 27.5, version=[0, 1]),
]


def test_a_trainer_by_hand(tmp_path: Path) -> None:
    df = load(write(tmp_path / "r.jsonl", TRAINER), run="verl")
    assert df["kind"].tolist() == [
        *("run_start", "iteration_start", "submit", "submit", "admit", "admit", "step", "finish", "grade"),
        *("step", "finish", "grade", "hand_over", "iteration_end"),
        *("iteration_start", "submit", "submit", "admit", "admit", "step", "finish", "finish", "hand_over"),
        *("iteration_end", "run_end"),
    ]
    steps = df[df["kind"] == "step"]
    assert steps["num_output_tokens"].tolist() == [100, 50, 38]  # a0 has made 50 when a1 ends
    assert steps["num_seqs"].tolist() == [2, 1, 2]
    numbers = analysis.summary(df)["verl"]
    assert numbers["wall_seconds"] == 27.5
    assert (numbers["tokens_generated"], numbers["tokens_trained"], numbers["tokens_unaccounted"]) == (188, 188, 0)
    assert (numbers["samples_trained"], numbers["slots"], numbers["capped_share"]) == (4, 2, 0.25)
    assert numbers["tail_seconds"] == 0.0  # of two samples the last is the 90th percentile
    assert numbers["mean_reward"] == 0.5
    assert (numbers["breakdown"]["generate"], numbers["breakdown"]["idle"]) == (17.5, 10.0)
    assert numbers["bubble_slot_seconds"] == pytest.approx(5.0)
    iterations = analysis.iterations(df)
    assert iterations["version"].tolist() == [0, 1]
    assert iterations[["start", "end"]].values.tolist() == [[0.0, 10.0], [20.0, 27.5]]
    assert iterations["generated"].tolist() == [150, 38]


def test_vllm_request_metrics(tmp_path: Path) -> None:
    """Times of the engine's clock; arrival_time is another's. Each request is a group of its own."""
    record = {
        "request_id": "cmpl-1",
        "num_prompt_tokens": 20,
        "finish_reason": "length",
        "metrics": {
            "num_generation_tokens": 40,
            "arrival_time": 1.7e9,
            "queued_ts": 100.0,
            "scheduled_ts": 101.0,
            "first_token_ts": 101.5,
            "last_token_ts": 109.0,
        },
    }
    for form in ("vllm", "auto"):
        df = load(write(tmp_path / "r.jsonl", [record]), form=form)
        times = dict(zip(df["kind"], df["time"], strict=True))
        assert (times["submit"], times["admit"], times["first_token"], times["finish"]) == (100.0, 101.0, 101.5, 109.0)
        numbers = analysis.summary(df)["imported"]
        assert (numbers["tokens_generated"], numbers["samples_trained"], numbers["wall_seconds"]) == (40, 1, 9.0)
        assert numbers["breakdown"]["idle"] == 1.0  # in the queue
    old = {"request_id": "r", "num_generation_tokens": 4, "arrival_time": 5.0, "first_scheduled_time": 6.0}
    df = load(write(tmp_path / "r.jsonl", [old | {"last_token_time": 9.0, "finished_time": 9.5}]))
    assert df.loc[df["kind"] == "finish", "time"].tolist() == [9.5]


def test_units_names_and_iterations(tmp_path: Path) -> None:
    records = [
        {"uid": "q", "id": 1, "n": 10, "t0": 1000, "t1": 3000, "global_step": 5, "policy_version": 4},
        {"uid": "q", "id": 2, "n": 10, "t0": 1000, "t1": 2000, "global_step": 5, "policy_version": 5},
    ]
    names = {"tokens": "n", "start": "t0", "end": "t1"}
    writer, meta = import_trace(write(tmp_path / "r.jsonl", records), unit="ms", names=names)
    df = writer.frame()
    assert df.loc[df["kind"] == "run_end", "time"].tolist() == [3.0]
    assert df.loc[df["kind"] == "iteration_start", "value"].tolist() == [5.0]
    assert meta["fields"]["group"] == "uid" and meta["fields"]["tokens"] == "n" and meta["imported"]


def test_what_was_aborted_is_not_handed_over(tmp_path: Path) -> None:
    records = [response("a0", "a", 10, 0.0, 1.0), response("a1", "a", 5, 0.0, 2.0, status="aborted")]
    numbers = analysis.summary(load(write(tmp_path / "r.jsonl", records)))["imported"]
    assert (numbers["tokens_trained"], numbers["tokens_pending"], numbers["tokens_aborted"]) == (0, 10, 5)
    assert numbers["tokens_unaccounted"] == 0


times = st.integers(0, 60).map(lambda n: n / 4)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(times, times, times, st.integers(0, 50), st.integers(0, 3), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_laws_of_any_records(tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Any, ...]]) -> None:
    """Tokens and samples add up, iterations follow each other, and busy time is the union of the samples' times."""
    records = []
    for i, (a, b, c, tokens, group, version, aborted) in enumerate(drawn):
        queued, start, end = sorted((a, b, c))
        more = {"queued": queued, "version": version, "finish_reason": "abort" if aborted else "stop"}
        records.append(response(f"s{i}", f"g{group}", tokens, start, end, **more))
    df = load(write(tmp_path_factory.mktemp("laws") / "r.jsonl", records))
    assert df["time"].add(df["duration"]).where(df["kind"] == "step", df["time"]).is_monotonic_increasing
    numbers = analysis.summary(df)["imported"]
    total = sum(record["response_length"] for record in records)
    assert numbers["tokens_generated"] == total
    assert numbers["tokens_unaccounted"] == 0
    assert numbers["samples_finished"] == len(records)
    assert numbers["wall_seconds"] == max(r["end"] for r in records) - min(r["queued"] for r in records)
    parts = numbers["breakdown"]
    assert sum(parts[part] for part in analysis.PARTS) == pytest.approx(parts["wall"])
    quarters = {q for r in records for q in range(round(4 * r["start"]), round(4 * r["end"]))}
    assert parts["generate"] == pytest.approx(len(quarters) / 4)
    iterations = analysis.iterations(df)
    assert iterations["generated"].sum() == total
    assert iterations["finished"].sum() == len(records)
    assert (iterations["start"].to_numpy()[1:] >= iterations["end"].to_numpy()[:-1]).all()


# --- files that are none


GOOD = json.dumps(TRAINER[0])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"PAR1\0\0\0", "binary file"),
        (b'{"a": "\xff"}', "not text in UTF-8"),
        ((GOOD + "\n" + GOOD[:30]).encode(), "line 2, the last, is cut off"),
        ((GOOD[:30] + "\n" + GOOD).encode(), "line 1 is not JSON"),
        (b"time,tokens\n1,2\n3,4\n", "line 1 is not JSON"),
        (b"[1, 2]\n", "line 1 is a JSON list"),
        (b'{"loss": 1.0, "lr": 2.0}\n', "no field for tokens, end, start; the records have loss, lr.*tokens=NAME"),
        (json.dumps({"tokens_made": 3, "start": 1, "end": 2}).encode(), "no field for tokens;"),
        (b"{}\n", "have no fields"),
    ],
)
def test_files_that_hold_no_records(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says) as caught:
        import_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"response_length": -1}, "line 2: response_length is -1"),
        ({"response_length": 1.5}, "line 2: response_length must be a whole number, not 1.5"),
        ({"response_length": None}, "line 2: response_length is missing"),
        ({"end": None}, "line 2: end is missing"),
        ({"end": "noon"}, "line 2: end must be a finite number"),
        ({"end": float("nan")}, "line 2: end must be a finite number, not nan"),
        ({"start": True}, "line 2: start must be a finite number"),
        ({"start": 99.0}, r"line 2: times run backwards \(queued 99, started 99, ended 10\)"),
        ({"version": 0.5}, "line 2: version must be a whole number"),
        ({"reward": "high"}, "line 2: reward"),
        ({"sample_id": "a1"}, "sample a1 is on line 1 and on line 2"),
    ],
)
def test_records_that_are_wrong(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "r.jsonl", [TRAINER[1], TRAINER[0] | change])
    with pytest.raises(TraceError, match=says) as caught:
        import_trace(path)
    assert str(path) in str(caught.value)


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", TRAINER)
    for options, says in (
        ({"form": "csv"}, "choose from auto, vllm, trainer"),
        ({"unit": "days"}, "choose from s, ms"),
        ({"names": {"colour": "x"}}, "colour is not a field"),
    ):
        with pytest.raises(ValueError, match=says):
            import_trace(path, **options)
    with pytest.raises(TraceError, match=r"names end=t9: no record has it; they have end, prompt_id"):
        import_trace(path, names={"end": "t9"})
    for missing, says in ((tmp_path / "no.jsonl", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(TraceError, match=says):
            import_trace(missing)


def test_the_command(tmp_path: Path) -> None:
    path, out = write(tmp_path / "r.jsonl", TRAINER), tmp_path / "trace.parquet"
    arguments = ["trace", "import", str(path), "--out", str(out), "--names", "group=prompt_id", "--run", "verl"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, (result.output, result.exception)
    assert "4 responses, 188 tokens in 27.5 s" in result.output
    df = read_trace(out)
    assert df["run"].unique().tolist() == ["verl"] and df.attrs["meta"]["samples"] == 4
    result = CliRunner().invoke(app, ["calibrate", str(out), "--out", str(tmp_path / "c.toml")])
    assert isinstance(result.exception, ValueError) and "imported" in str(result.exception)
    result = CliRunner().invoke(app, ["trace", "import", str(path), "--names", "end"])
    assert isinstance(result.exception, ValueError) and "FIELD=NAME" in str(result.exception)
