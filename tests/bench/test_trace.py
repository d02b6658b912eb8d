"""The trace file: what goes in comes out; any other file is a TraceError that names it and the fix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from longtail import Event, TraceError
from longtail.bench import trace
from longtail.bench.trace import FIELDS, TraceWriter, read_trace


@pytest.fixture
def written(tmp_path: Path) -> Path:
    writer = TraceWriter()
    sync, partial = writer.listener("sync"), writer.listener("token-budget")
    sync(Event("run_start", 1.5, detail='{"slots": 2}'))
    partial(Event("run_start", 9.0))
    sync(Event("step", 2.0, 0.5, "e0", "s", "g", 3, 4, 5, 6, 7, 8, 0.25, 0.125, -1.0, "caf\u00e9"))
    writer.write(tmp_path / "trace.parquet", {"cpu": "two cores", "threads": 2})
    return tmp_path / "trace.parquet"


def test_round_trip(written: Path) -> None:
    frame = read_trace(written)
    assert list(frame.columns) == ["run", *FIELDS]
    assert list(frame["run"]) == ["sync", "sync", "token-budget"]
    row = frame.iloc[1].to_dict()
    assert row.pop("run") == "sync"
    expected = Event("step", 2.0, 0.5, "e0", "s", "g", 3, 4, 5, 6, 7, 8, 0.25, 0.125, -1.0, "caf\u00e9")
    assert row == dataclasses.asdict(expected)
    assert frame.attrs["meta"] == {"cpu": "two cores", "threads": 2}


def test_frame_equals_the_file(written: Path, synthetic_writer: TraceWriter) -> None:
    synthetic_writer.write(written, {})
    assert len(synthetic_writer) == len(read_trace(written)) > 1000
    assert read_trace(written).equals(synthetic_writer.frame())


def test_an_event_may_be_reused_by_its_emitter() -> None:
    writer, event = TraceWriter(), Event("admit", 1.0)
    listen = writer.listener("sync")
    listen(event)
    event.time = 2.0
    writer.listener("sync")(event)  # the same name continues the run
    assert list(writer.frame()["time"]) == [1.0, 2.0]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_bytes()

    def disk_full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", disk_full)
    with pytest.raises(OSError, match="No space left"):
        TraceWriter().write(written, {})
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == ["trace.parquet"]


def expect(path: Path, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "longtail bench" in str(caught.value) or "trace.parquet of a bench" in str(caught.value)


def test_missing_and_folder(tmp_path: Path) -> None:
    expect(tmp_path / "none.parquet", "does not exist")
    expect(tmp_path, "is a folder")


def test_empty(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.touch()
    expect(path, "empty")


@pytest.mark.parametrize("keep", [1, 4, 8, 100, -1, -8, -300])
def test_truncated(written: Path, keep: int) -> None:
    written.write_bytes(written.read_bytes()[:keep])
    expect(written, "truncated")


def test_a_hole_in_the_footer(written: Path) -> None:
    data = bytearray(written.read_bytes())
    data[-200:-100] = bytes(100)
    written.write_bytes(data)
    with pytest.raises(TraceError, match=r"trace\.parquet"):
        read_trace(written)


def test_another_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    path.write_text("run,kind\nsync,step\n" * 20)
    expect(path, "not a Parquet file")


def test_somebody_elses_parquet(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    parquet.write_table(pyarrow.table({"run": ["a"]}), path)
    expect(path, "not a longtail trace")


@pytest.mark.parametrize("version", ["2", "4", "0", ""])
def test_another_version(written: Path, version: str) -> None:
    table = parquet.read_table(written)
    changed = {**table.schema.metadata, b"longtail.version": version.encode()}
    parquet.write_table(table.replace_schema_metadata(changed), written)
    expect(written, f"version {version or 'unknown'}, and this longtail reads version 3")


def test_a_column_is_gone(written: Path) -> None:
    table = parquet.read_table(written)
    parquet.write_table(table.drop_columns(["model_seconds"]), written)
    expect(written, "lacks the columns model_seconds")


def test_settings_damaged(written: Path) -> None:
    table = parquet.read_table(written)
    parquet.write_table(table.replace_schema_metadata({**table.schema.metadata, b"longtail.meta": b"{"}), written)
    expect(written, "settings are damaged")


def test_no_events(tmp_path: Path) -> None:
    path = tmp_path / "trace.parquet"
    TraceWriter().write(path, {})
    expect(path, "no events")


def test_every_field_has_a_column_type() -> None:
    assert trace._schema({}).names == ["run", *(field.name for field in dataclasses.fields(Event))]
