"""The trace of a bench: every event of every run in one Parquet file, a column for each field of `Event` and `run`.

Rows stand in the order of emission within a run. The file's key-value metadata names the format, its version and the
caller's `meta` (JSON); a reader meets a foreign or a newer file with an error that says so, never with wrong numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import operator
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from longtail.errors import TraceError
from longtail.events import Event, Listener

if TYPE_CHECKING:
    import pandas
    import pyarrow

FORMAT = "longtail-trace"
VERSION = 3
FIELDS = tuple(field.name for field in dataclasses.fields(Event))
_KEY_FORMAT, _KEY_VERSION, _KEY_META = b"longtail.format", b"longtail.version", b"longtail.meta"
_READ_COLUMNS = ("run", *FIELDS)
_REMEDY = "run `longtail bench --out DIR` again"


class TraceWriter:
    """Collects the events of several runs; an event costs one tuple of its fields, and its object may be reused."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def listener(self, run: str) -> Listener:
        """What to hand to the emitter of one run. The same name again continues that run."""
        append = self._rows.setdefault(run, []).append
        fields = operator.attrgetter(*FIELDS)
        return lambda event: append(fields(event))

    def extend(self, frame: pandas.DataFrame) -> None:
        """Runs of an earlier trace, before or beside one's own."""
        for run, events in frame.groupby("run", sort=False):
            rows = self._rows.setdefault(str(run), [])
            rows += events[list(FIELDS)].itertuples(index=False, name=None)

    def frame(self) -> pandas.DataFrame:
        """What `read_trace` would give, without a file."""
        return self._table({}).to_pandas()

    def write(self, path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Writes the file and renames it into place: a reader sees the old file or the whole new one.

        `meta` is anything JSON can hold; `read_trace` gives it back as `frame.attrs["meta"]`.
        """
        import pyarrow.parquet as parquet

        table = self._table(meta)
        with replacing(path) as file:
            parquet.write_table(table, file, compression="zstd")

    def _table(self, meta: Mapping[str, Any]) -> pyarrow.Table:
        import pyarrow

        columns: list[Any] = list(zip(*(row for rows in self._rows.values() for row in rows), strict=True))
        runs = [run for run, rows in self._rows.items() for _ in rows]
        data = dict(zip(_READ_COLUMNS, [runs, *(columns or [[]] * len(FIELDS))], strict=True))
        metadata = {
            _KEY_FORMAT: FORMAT.encode(),
            _KEY_VERSION: str(VERSION).encode(),
            _KEY_META: json.dumps(dict(meta)).encode(),
        }
        return pyarrow.table(data, schema=_schema(metadata))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, whole and synced, and vanishes if the block raises."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_trace(path: str | os.PathLike[str]) -> pandas.DataFrame:
    """The events of a trace file. Raises TraceError, naming the file and the fix, unless it is a whole trace of this
    version."""
    import pyarrow
    import pyarrow.parquet as parquet

    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TraceError(f"{path}: the trace {what}; pass the trace.parquet of a bench, or {_REMEDY}")
    if path.stat().st_size == 0:
        raise TraceError(f"{path}: the trace is empty (0 bytes); its writer never finished; {_REMEDY}")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: truncated, or not a Parquet file ({reason}); {_REMEDY}") from error
    meta = _check(path, table)
    frame = table.to_pandas()
    frame.attrs["meta"] = meta
    return frame


def _check(path: Path, table: pyarrow.Table) -> dict[str, Any]:
    """The file's meta, after format, version, columns and rows were found right."""
    metadata = table.schema.metadata or {}
    if metadata.get(_KEY_FORMAT) != FORMAT.encode():
        raise TraceError(f"{path}: a Parquet file, but not a longtail trace; pass the trace.parquet of a bench")
    version = metadata.get(_KEY_VERSION, b"").decode(errors="replace")
    if version != str(VERSION):
        raise TraceError(
            f"{path}: trace format version {version or 'unknown'}, and this longtail reads version {VERSION}; "
            f"read it with the longtail that wrote it, or {_REMEDY}"
        )
    missing = [name for name in _READ_COLUMNS if name not in table.column_names]
    if missing:
        raise TraceError(f"{path}: the trace lacks the columns {', '.join(missing)}; {_REMEDY}")
    if table.num_rows == 0:
        raise TraceError(f"{path}: the trace holds no events; {_REMEDY}")
    try:
        return dict(json.loads(metadata.get(_KEY_META, b"{}")))
    except ValueError as error:
        raise TraceError(f"{path}: the trace's settings are damaged ({error}); {_REMEDY}") from error


def _schema(metadata: dict[bytes, bytes]) -> pyarrow.Schema:
    import pyarrow

    types = {"str": pyarrow.string(), "EventKind": pyarrow.string(), "float": pyarrow.float64(), "int": pyarrow.int64()}
    fields = [("run", pyarrow.string())]
    fields += [(field.name, types[str(field.type)]) for field in dataclasses.fields(Event)]
    return pyarrow.schema(fields, metadata=metadata)
