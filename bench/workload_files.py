"""Workloads from files: a table of lengths (Parquet, CSV, JSON lines), or the samples of one of our traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtail.bench.workload import DEFAULT_PROMPT, Workload
from longtail.errors import TraceError

OUTPUT = ("output_tokens", "output_length", "length", "tokens", "response_length", "completion_tokens")
PROMPT = ("prompt_tokens", "input_length", "prompt_length", "input_tokens")
GROUP = ("group", "group_id", "prompt_id", "prompt")
ENDINGS = (".parquet", ".csv", ".jsonl")


def read_workload(
    path: Path, *, run: str | None = None, group_size: int | None = None, cap: int | None = None
) -> Workload:
    """A file of lengths needs a column of OUTPUT; of GROUP and PROMPT it may have one each. Without a group, each
    `group_size` (1) rows that follow each other are one. cap: longer responses are cut there. run: of a trace; None:
    its first. ValueError or TraceError names the file and the fix."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{path}: {what}; give a file of lengths ({', '.join(ENDINGS)}) or a trace, or FAMILY(...)")
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path}: a file of lengths ends with {', '.join(ENDINGS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    if _is_trace(path):
        return _from_trace(path, run, cap)
    if run is not None:
        raise ValueError(f"{path}: run={run} is for traces, and this is a table of lengths")
    return _from_table(path, group_size, cap)


def _from_table(path: Path, group_size: int | None, cap: int | None) -> Workload:
    table = _read_table(path)
    output = _column(path, table, OUTPUT)
    if output is None:
        raise ValueError(
            f"{path}: no column of lengths; name it {OUTPUT[0]} (or {', '.join(OUTPUT[1:])}); it has {', '.join(table)}"
        )
    tokens = _counts(path, *output, least=1)
    prompt = _column(path, table, PROMPT)
    prompts = np.full(len(tokens), DEFAULT_PROMPT, np.int32) if prompt is None else _counts(path, *prompt, least=0)
    group = _column(path, table, GROUP)
    notes: list[str] = []
    if prompt is None:
        notes.append(f"no column of prompt lengths: {DEFAULT_PROMPT} tokens each")
    if group is None:
        size = group_size or 1
        labels: Sequence[Any] = (np.arange(len(tokens)) // size).tolist()
        notes.append(f"no group column: groups of {size} rows that follow each other")
    else:
        labels = [str(value) for value in group[1]]
        if any(value is None or value != value for value in group[1]):
            raise ValueError(f"{path}: column {group[0]} has an empty field; each row needs its group")
    named = group is not None
    return _grouped(str(path), labels, tokens, prompts, np.zeros(len(tokens), bool), cap, notes, named)


def _grouped(
    label: str,
    labels: Sequence[Any],
    tokens: np.ndarray,
    prompts: np.ndarray,
    capped: np.ndarray,
    cap: int | None,
    notes: Sequence[str],
    named: bool,
) -> Workload:
    """Groups in order of appearance, their samples in the order of the rows. A group's prompt is its longest."""
    number: dict[Any, int] = {}
    groups = np.array([number.setdefault(name, len(number)) for name in labels], np.int64)
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=len(number)))]).astype(np.int64)
    if cap is not None:
        if cap < 1:
            raise ValueError(f"cap must be at least 1, not {cap}")
        capped, tokens = capped | (tokens >= cap), np.minimum(tokens, cap)
    longest = np.maximum.reduceat(prompts[order], starts[:-1]) if len(order) else prompts
    return Workload(
        output_tokens=tokens[order].astype(np.int32),
        prompt_tokens=np.repeat(longest, np.diff(starts)).astype(np.int32),
        group_starts=starts,
        capped=capped[order],
        label=label,
        names=tuple(map(str, number)) if named else None,
        notes=tuple(notes),
    )


def _read_table(path: Path) -> dict[str, list[Any]]:
    import pyarrow
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    read = {".parquet": pyarrow.parquet.read_table, ".csv": pyarrow.csv.read_csv, ".jsonl": pyarrow.json.read_json}
    try:
        table = read[path.suffix](path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: truncated, or not {path.suffix[1:]} ({reason})") from error
    if table.num_rows == 0:
        raise ValueError(f"{path}: the table has no rows")
    wanted = [name for name in table.column_names if name in (*OUTPUT, *PROMPT, *GROUP)]
    if not wanted:
        return {name: [] for name in table.column_names}
    return {name: table.column(name).to_pylist() for name in wanted}


def _column(path: Path, table: dict[str, list[Any]], names: tuple[str, ...]) -> tuple[str, list[Any]] | None:
    found = [name for name in names if table.get(name)]
    if len(found) > 1:
        raise ValueError(f"{path}: columns {', '.join(found)} mean the same; keep one")
    return (found[0], table[found[0]]) if found else None


def _counts(path: Path, name: str, values: list[Any], least: int) -> np.ndarray:
    """int32 [n]. ValueError names the first row that is no count."""
    for row, value in enumerate(values):
        good = isinstance(value, int | float) and not isinstance(value, bool) and value == value
        if not (good and value == int(value) and least <= value < 2**31):
            raise ValueError(
                f"{path}: {name} of row {row + 1} is {value!r}; it must be a whole number of at least {least}"
            )
    return np.array(values, np.int64).astype(np.int32)


# --- traces


def _is_trace(path: Path) -> bool:
    import pyarrow
    import pyarrow.parquet

    if path.suffix != ".parquet":
        return False
    try:
        return b"longtail.format" in (pyarrow.parquet.read_schema(path).metadata or {})
    except (pyarrow.ArrowException, OSError):
        return False


def _from_trace(path: Path, run: str | None, cap: int | None) -> Workload:
    """Samples that finished, in order of submission; the prompt's tokens are those at submission."""
    from longtail.bench.trace import read_trace

    df = read_trace(path)
    names = [str(name) for name in df["run"].unique()]
    if run is not None and run not in names:
        raise ValueError(f"{path}: run {run} is not in the trace; it holds {', '.join(names)}")
    taken = run or names[0]
    events = df[df["run"] == taken]
    submitted = events[events["kind"] == "submit"].drop_duplicates("sample")
    finished = events[events["kind"] == "finish"].drop_duplicates("sample", keep="last")
    whole = finished[finished["detail"].isin(["stop", "length", "repetition"]) & (finished["num_tokens"] > 0)]
    joined = submitted[["sample", "group", "num_tokens"]].merge(
        whole[["sample", "num_tokens", "detail"]], on="sample", suffixes=("_prompt", "")
    )
    if len(joined) == 0:
        raise TraceError(f"{path}: no sample of run {taken} was submitted and finished; give a trace of a whole run")
    notes = [f"run {taken} of {len(names)}"] if len(names) > 1 else []
    if left_out := len(submitted) - len(joined):
        notes.append(f"{left_out} of {len(submitted)} samples did not finish by themselves and are left out")
    return _grouped(
        str(path),
        joined["group"].tolist(),
        joined["num_tokens"].to_numpy(np.int64),
        joined["num_tokens_prompt"].to_numpy(np.int64),
        (joined["detail"] == "length").to_numpy(bool),
        cap,
        notes,
        named=True,
    )
