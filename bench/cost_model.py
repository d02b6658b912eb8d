"""What a rollout's parts cost in seconds: the numbers a simulator needs, fitted from a trace or analytic, in one file.

    seconds of a pass = scale * (base + per_seq * sequences + g(rows) + per_context * context
                                 + per_prefill_context * prefill_context) + between

- rows: query tokens, padded to a multiple of row_multiple. g is piecewise linear and never falls: per_row[i] is its
  slope from knots[i - 1] (0) to knots[i] (no end).
- context: KV tokens read over all sequences. prefill_context: (rows - sequences) x context / sequences, what the rows
  beyond one a sequence read; 0 in a decode pass.
- between: from the end of a pass to the start of the next while there is work (bookkeeping of scheduler and rollout).
- scale: makes the sum over the calibration's steps that of the trace. The coefficients are robust (`cost_fit`) and so
  those of a quiet machine; a makespan is a sum, and the stalls of a shared machine are part of it.

`StepModel` (fitted) and `accelerators.Roofline` (analytic) both offer `StepSeconds`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longtail.partial_rollout.engines.simulated.cost import total_context

FORMAT = "longtail-cost"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepModel:
    """Fitted `StepSeconds`; coefficients in seconds each (see above). ValueError for one that is no duration."""

    base: float
    per_seq: float = 0.0
    per_row: tuple[float, ...] = (0.0,)
    knots: tuple[int, ...] = ()
    per_context: float = 0.0
    per_prefill_context: float = 0.0
    row_multiple: int = 1
    scale: float = 1.0
    between: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_row", tuple(self.per_row))
        object.__setattr__(self, "knots", tuple(self.knots))
        for name in ("base", "per_seq", "per_context", "per_prefill_context", "between", "scale"):
            _check_seconds(f"step.{name}", getattr(self, name))
        for slope in self.per_row:
            _check_seconds("step.per_row", slope)
        if len(self.per_row) != len(self.knots) + 1:
            raise ValueError(
                f"step.per_row holds {len(self.per_row)} slopes for {len(self.knots)} knots; give one more than knots"
            )
        if list(self.knots) != sorted(set(self.knots)) or (self.knots and self.knots[0] < 1):
            raise ValueError(f"step.knots must be rising row counts of at least 1, not {list(self.knots)}")
        if not isinstance(self.row_multiple, int) or self.row_multiple < 1:
            raise ValueError(f"step.row_multiple must be an integer of at least 1, not {self.row_multiple!r}")

    def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
        extra = (query_tokens - num_seqs) * context_tokens / num_seqs if num_seqs else 0.0
        variable = self.per_context * context_tokens + self.per_prefill_context * extra
        return self.scale * (self._of_rows(num_seqs, query_tokens) + variable) + self.between

    def decode_seconds(self, num_seqs: int, context_tokens: int, num_passes: int) -> float:
        each = self.scale * self._of_rows(num_seqs, num_seqs) + self.between
        context = total_context(num_seqs, context_tokens, num_passes)
        return num_passes * each + self.scale * self.per_context * context

    def _of_rows(self, num_seqs: int, rows: int) -> float:
        padded = -(-rows // self.row_multiple) * self.row_multiple
        total, low = self.base + self.per_seq * num_seqs, 0
        for slope, knot in zip(self.per_row, (*self.knots, padded), strict=True):
            if padded <= low:
                break
            total += slope * (min(padded, knot) - low)
            low = knot
        return total

    def many(self, num_seqs: np.ndarray, query_tokens: np.ndarray, context_tokens: np.ndarray) -> np.ndarray:
        """`seconds` of each pass; float64, the shape of the arguments."""
        columns = features(num_seqs, query_tokens, context_tokens, self.knots, self.row_multiple)
        weights = [self.base, self.per_seq, self.per_context, self.per_prefill_context, *self.per_row]
        return self.scale * (columns @ np.array(weights)) + self.between


def features(
    num_seqs: np.ndarray, rows: np.ndarray, context: np.ndarray, knots: tuple[int, ...], row_multiple: int
) -> np.ndarray:
    """float64 [steps, 5 + knots]: 1, sequences, context, prefill context, and of the padded rows the part between each
    two knots."""
    padded = -(-rows // row_multiple) * row_multiple
    edges = [0, *knots, np.inf]
    ramps = [np.clip(padded - low, 0, high - low) for low, high in itertools.pairwise(edges)]
    extra = (rows - num_seqs) * context / np.maximum(num_seqs, 1)
    return np.column_stack([np.ones(len(rows)), num_seqs, context, extra, *ramps]).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Moving the KV of so many tokens: base + per_token x tokens, in seconds."""

    base: float = 0.0
    per_token: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds("base", self.base)
        _check_seconds("per_token", self.per_token)

    def seconds(self, num_tokens: int) -> float:
        return self.base + self.per_token * num_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Every cost of a run. None: the trace did not tell, or the datasheet cannot."""

    step: Any
    """A `StepSeconds`."""
    source: str
    """"fitted" from a trace, or "analytic": a bound from datasheets, which nobody measured."""
    label: str = ""
    save: Transfer | None = None
    restore: Transfer | None = None
    update: float | None = None
    """A weight update."""
    grade: float | None = None
    """Grading one sample."""
    train: float | None = None
    """A training step."""
    draft_token: float | None = None
    """Making one draft token (its verification is a row of the step)."""
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How it was fitted and how well (`cost_fit.fit`), or what it was computed from."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and text; what is None is left out."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for name, value in fields.items():
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                value = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(value).items()}
            if value is not None:
                plain[name] = value
        return plain

    def write(self, path: str | Path) -> None:
        """TOML or JSON, by the name's ending (.toml, .json). The file appears whole or not at all."""
        from longtail.bench.trace import replacing

        path = Path(path)
        check_ending(path)
        plain = self.as_dict()
        text = json.dumps(plain, indent=1) if path.suffix == ".json" else "\n".join(_toml(plain)) + "\n"
        with replacing(path) as file:
            file.write(text.encode())


def check_ending(path: Path) -> None:
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"{path}: a cost model's file ends with .toml or .json")


def read_cost(path: str | Path) -> CostModel:
    """A file that `CostModel.write` made, or one by hand. ValueError names the file, the field and the fix."""
    path = Path(path)
    check_ending(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; make one with `longtail calibrate TRACE --out {path}`")
    try:
        text = path.read_text(encoding="utf-8")
        plain = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not readable as {path.suffix[1:].upper()} ({error})") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ValueError(f'{path}: not a cost model; it must say format = "{FORMAT}"')
    if plain.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {plain.get('version')!r}, and this longtail reads {VERSION}; calibrate again"
        )
    try:
        return _from_dict(plain)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _from_dict(plain: Mapping[str, Any]) -> CostModel:
    from longtail.bench.accelerators import Roofline

    fields = {key: value for key, value in plain.items() if key not in ("format", "version")}
    known = {field.name for field in dataclasses.fields(CostModel)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if fields.get("source") not in ("fitted", "analytic"):
        raise ValueError(f'source must be "fitted" or "analytic", not {fields.get("source")!r}')
    kind = StepModel if fields["source"] == "fitted" else Roofline
    fields["step"] = _make(kind, "step", fields.get("step"))
    for name in ("save", "restore"):
        if name in fields:
            fields[name] = _make(Transfer, name, fields[name])
    for name in ("update", "grade", "train", "draft_token"):
        if name in fields:
            _check_seconds(name, fields[name])
    return CostModel(**fields)


def _make(kind: Any, name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} is missing, or not a table")
    check_keys(kind, name, values)
    return kind(**values)


def check_keys(kind: Any, name: str, values: Mapping[str, Any]) -> None:
    """ValueError unless these are keys of a dataclass, with all that it has no defaults for. name: of the table."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{name}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    missing = dataclasses.MISSING
    needed = [key for key, field in known.items() if field.default is missing and field.default_factory is missing]
    if lacking := [key for key in needed if key not in values]:
        raise ValueError(f"{name}: {', '.join(lacking)} is missing")


def _check_seconds(name: str, value: Any) -> None:
    """ValueError unless it is a duration."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")


def _toml(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines of a table: its values first, then its tables. JSON's text and lists are TOML's."""
    lines = [f"{_key(k)} = {_toml_value(v)}" for k, v in table.items() if not isinstance(v, Mapping) and v is not None]
    for key, value in table.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{_key(key)}"
            lines += ["", f"[{name}]", *_toml(value, f"{name}.")]
    return lines


def _key(name: str) -> str:
    return name if name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name) else _toml_value(name)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(k)} = {_toml_value(v)}' for k, v in value.items() if v is not None)}}}"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a cost model holds finite numbers only, not {value}")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
