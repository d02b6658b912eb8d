"""Public traces of what people ask of models, made into lengths for `workload`: ServeGen and Mooncake.

- ServeGen (Xiang et al., NSDI 2026; github.com/alibaba/ServeGen, Apache-2.0): for each client of a production service
  and each window of six hours, the distribution of output tokens, and the request rate by ten minutes. Imported is the
  mix of all of them, each weighted by its requests: a histogram.
- Mooncake (Qin et al., FAST 2025; github.com/kvcache-ai/Mooncake): one request a line with input and output tokens.
  Imported is a table of lengths.

A histogram file (JSON) holds quantiles at equal steps of probability from 0 to 1, with their source and licence.
bench/data/ holds servegen-r1.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longtail.bench.trace import replacing

FORMAT, VERSION = "longtail-lengths", 1
DATA = Path(__file__).parent / "data"
QUANTILES = 2001


@dataclasses.dataclass(frozen=True)
class Histogram:
    """quantiles: output tokens at probabilities 0, 1/(k-1), ..., 1; they never fall."""

    quantiles: tuple[float, ...]
    source: str
    licence: str

    def __post_init__(self) -> None:
        values = self.quantiles
        if len(values) < 2 or not all(math.isfinite(v) and v > 0 for v in values) or list(values) != sorted(values):
            raise ValueError("quantiles must be at least 2 numbers above 0 that never fall")

    def quantile_function(self, survival: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        """Of z: linear between the quantiles, at probability 1 - survival(z)."""
        steps = np.linspace(0.0, 1.0, len(self.quantiles))
        return lambda z: np.interp(1.0 - survival(z), steps, self.quantiles)

    def write(self, path: Path) -> None:
        plain = {"format": FORMAT, "version": VERSION, "source": self.source, "licence": self.licence}
        head = json.dumps(plain, indent=1, ensure_ascii=False)[:-2]
        numbers = [f"{value:g}" for value in self.quantiles]
        lines = [", ".join(numbers[i : i + 20]) for i in range(0, len(numbers), 20)]
        text = f'{head},\n "quantiles": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
        with replacing(path) as file:
            file.write(text.encode())


def read_histogram(name: str) -> Histogram:
    """One of bench/data by its name, or a file. ValueError names the fix."""
    path = DATA / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in DATA.glob("*.json")))
        raise ValueError(f"histogram {name!r}: neither one of ours ({known}) nor a file")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT or plain.get("version") != VERSION:
        raise ValueError(f"{path}: not a histogram of lengths; make one with `longtail lengths import`")
    quantiles = plain.get("quantiles")
    if not isinstance(quantiles, list) or not all(isinstance(v, int | float) for v in quantiles):
        raise ValueError(f"{path}: quantiles must be a list of numbers")
    try:
        return Histogram(tuple(quantiles), str(plain.get("source", "")), str(plain.get("licence", "")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def weighted_quantiles(values: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """The smallest value with at least that share of the weight at or below it, at `count` equal steps from 0 to 1."""
    order = np.argsort(values, kind="stable")
    values, total = values[order], np.cumsum(weights[order])
    steps = np.linspace(0.0, 1.0, count) * total[-1]
    index = np.searchsorted(total, steps * (1.0 - 1e-12), side="left")
    found: np.ndarray = values[np.minimum(index, len(values) - 1)]
    return found


# --- ServeGen


def import_servegen(folder: Path) -> Histogram:
    """folder: one with chunk-N-dataset.json and chunk-N-trace.csv, such as data/reason/deepseek-r1 of a clone.
    ValueError names the file and the fix."""
    datasets = sorted(folder.glob("chunk-*-dataset.json")) if folder.is_dir() else []
    if not datasets:
        raise ValueError(
            f"{folder}: no chunk-N-dataset.json in it; give data/reason/deepseek-r1 of a clone of ServeGen"
        )
    values: list[float] = []
    weights: list[float] = []
    for dataset in datasets:
        for tokens, weight in _servegen_client(dataset):
            values.append(tokens)
            weights.append(weight)
    if not sum(weights) > 0.0:
        raise ValueError(f"{folder}: no client has both requests and lengths in one window")
    quantiles = weighted_quantiles(np.array(values), np.array(weights), QUANTILES)
    source = (
        f"alibaba/ServeGen, {folder.parent.name}/{folder.name}: {len(datasets)} clients, weighted by their requests"
    )
    return Histogram(tuple(quantiles.tolist()), source, "Apache-2.0")


def _servegen_client(dataset: Path) -> Iterator[tuple[float, float]]:
    """(output tokens, requests) of one client."""
    rates = _servegen_rates(dataset.with_name(dataset.name.replace("-dataset.json", "-trace.csv")))
    try:
        windows = json.loads(dataset.read_text(encoding="utf-8"))
        tables = {int(start): ast.literal_eval(window["output_tokens"]) for start, window in windows.items()}
        starts = sorted(tables)
        for start, end in zip(starts, [*starts[1:], math.inf], strict=True):
            requests = sum(rate for time, rate in rates if start <= time < end)
            for tokens, share in tables[start].items():
                if requests > 0.0 and tokens >= 1:
                    yield float(tokens), requests * float(share)
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{dataset}: not a dataset of ServeGen ({type(error).__name__}: {error})") from error


def _servegen_rates(path: Path) -> list[tuple[float, float]]:
    """(second, requests a second)."""
    if not path.is_file():
        raise ValueError(f"{path}: is missing; it holds the request rates of the dataset beside it")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [(float(row[0]), float(row[1])) for row in csv.reader(file) if row]
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: not a trace of ServeGen: {error}") from error


# --- Mooncake


def import_mooncake(path: Path) -> dict[str, np.ndarray]:
    """Columns prompt_tokens, output_tokens (int32) and seconds (float64, arrival) of the requests, [n] each. ValueError
    names the line. Requests without output are left out; how many, the caller sees from n."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; give a trace of Mooncake, such as conversation_trace.jsonl")
    rows: list[tuple[int, int, float]] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record: dict[str, Any] = json.loads(line)
                lengths = record["input_length"], record["output_length"]
                if any(not isinstance(v, int) or not 0 <= v < 2**31 for v in lengths):
                    raise ValueError(f"lengths must be whole numbers of at least 0, not {lengths}")
                rows.append((*lengths, float(record["timestamp"]) / 1000.0))
            except (ValueError, KeyError, TypeError) as error:
                what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}: line {number} is not a request of Mooncake: {what}") from error
    rows = [row for row in rows if row[1] > 0]
    if not rows:
        raise ValueError(f"{path}: the file holds no request with output")
    prompts, outputs, seconds = (np.array(column) for column in zip(*rows, strict=True))
    return {"prompt_tokens": prompts.astype(np.int32), "output_tokens": outputs.astype(np.int32), "seconds": seconds}


def write_table(columns: dict[str, np.ndarray], path: Path) -> None:
    """Parquet."""
    import pyarrow
    import pyarrow.parquet

    with replacing(path) as file:
        pyarrow.parquet.write_table(pyarrow.table(columns), file, compression="zstd")
