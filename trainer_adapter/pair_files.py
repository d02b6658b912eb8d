"""Files of preference pairs, JSON Lines or Parquet, one pair a row. Read strictly: a row is taken as it is, or named.

    prompt, chosen, rejected    token ids; text; or chat messages ({"role", "content"}), of which `chosen` and
                                `rejected` hold what follows the prompt. Text and messages need a tokenizer
    prompt_ids, chosen_ids, rejected_ids    the same as token ids (TRL's names)
    reason                      why the chosen response is the better one
    verdict_ab, verdict_ba      "A", "B" or "tie": a judge's with the chosen response as A, and with it as B
    chosen_mask, rejected_mask  1 for each token that is trained on, 0 for what a tool wrote; absent: all are
    group, chosen_sample, chosen_reward, chosen_grader, chosen_versions, chosen_finish_reason, rejected_...
                                where it comes from
    prompt_text, chosen_text, rejected_text    for people; not read
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from longtail.trainer_adapter.pair_text import Content, encode
from longtail.trainer_adapter.preferences import Origin, Pair, Verdict

RESPONSES = ("chosen", "rejected")
FOR_PEOPLE = ("prompt_text", "chosen_text", "rejected_text")
_ORIGIN = ("sample", "reward", "grader", "versions", "finish_reason")
FIELDS = (
    *("prompt", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids", "reason"),
    *("chosen_mask", "rejected_mask", "group", "verdict_ab", "verdict_ba"),
    *(f"{side}_{name}" for side in RESPONSES for name in _ORIGIN),
)
"""All that are read."""
SHOWN = 10
"""Problems of a file that an error names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one row, and the fix."""

    file: Path
    line: int
    """From 1. Of a Parquet file, the row."""
    text: str
    """`field: what is wrong`."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairFile:
    pairs: tuple[Pair, ...]
    """Of the rows in order, without those that have a problem."""
    rows: int
    problems: tuple[Problem, ...]
    """One a row at most: what is found first."""


def read_pairs(
    path: str | Path,
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    reason: str | None = None,
    ignore: Collection[str] = (),
) -> tuple[Pair, ...]:
    """All pairs of a file, or ValueError that names file, line, field and fix of the first rows that have a problem;
    arguments as for `check_pairs`."""
    found = check_pairs(path, tokenizer=tokenizer, vocab_size=vocab_size, reason=reason, ignore=ignore)
    if found.problems:
        more = len(found.problems) - SHOWN
        lines = [str(problem) for problem in found.problems[:SHOWN]]
        raise ValueError("\n".join([*lines, *([f"... and {more} more: longtail pairs check {path}"] * (more > 0))]))
    return found.pairs


def check_pairs(
    path: str | Path,
    *,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    reason: str | None = None,
    ignore: Collection[str] = (),
) -> PairFile:
    """What a file holds and what is wrong with it.

    tokenizer: of transformers, for text and messages. vocab_size: token ids are below it (default: the tokenizer's).
    reason: for rows that give none. ignore: names of further fields, which are not read.

    A problem is also a pair that was in an earlier row, in this order or swapped, unless it is of other samples.

    ValueError: a file that is not there,
    has another ending than .jsonl or .parquet, or holds no row."""
    path = Path(path)
    if vocab_size is None and tokenizer is not None:
        vocab_size = len(tokenizer)
    ignored = {*FOR_PEOPLE, *ignore}
    pairs: list[Pair] = []
    problems: list[Problem] = []
    earlier: dict[Any, int] = {}
    rows = 0
    for line, row in _rows(path):
        rows += 1
        if isinstance(row, str):
            problems.append(Problem(path, line, row))
            continue
        try:
            pair = _pair(row, tokenizer, vocab_size, reason, ignored)
            _check_new(pair, earlier, line)
        except ValueError as error:
            problems.append(Problem(path, line, str(error)))
        else:
            pairs.append(pair)
    if not rows:
        raise ValueError(f"{path}: holds no pair; write one JSON object a line (prompt, chosen, rejected, reason)")
    return PairFile(pairs=tuple(pairs), rows=rows, problems=tuple(problems))


def _check_new(pair: Pair, earlier: dict[Any, int], line: int) -> None:
    """The same tokens of other samples are another observation."""
    chosen = pair.chosen_ids, None if pair.chosen is None else pair.chosen.sample
    rejected = pair.rejected_ids, None if pair.rejected is None else pair.rejected.sample
    key, swapped = (pair.prompt_ids, chosen, rejected), (pair.prompt_ids, rejected, chosen)
    if key in earlier:
        raise ValueError(f"chosen: the same pair as in line {earlier[key]}; remove one of them")
    if swapped in earlier:
        raise ValueError(f"chosen: contradicts line {earlier[swapped]}, which prefers the other response; remove one")
    earlier[key] = line


# ---- rows


def check_pair_file(path: str | Path) -> None:
    """ValueError: no file, or of a kind that pairs are not read from. Rows are not looked at."""
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: pairs are read from .jsonl and .parquet; rename or convert the file")
    if not path.is_file():
        raise ValueError(f"{path} is no file; `longtail pairs from STORE --out {path}` makes one")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Number and fields of each row; a text where it has none."""
    check_pair_file(path)
    yield from (_json_rows if path.suffix == ".jsonl" else _parquet_rows)(path)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with path.open("rb") as file:
        for line, data in enumerate(file, 1):
            if not data.strip():
                yield line, "the line is empty; remove it"
                continue
            try:
                row = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
            except UnicodeDecodeError as error:
                yield line, f"is not UTF-8 (byte {error.start + 1}); save the file as UTF-8"
            except json.JSONDecodeError as error:
                yield line, f"is not JSON: {error.msg} at column {error.colno}; write one object a line"
            except (ValueError, RecursionError) as error:
                yield line, str(error)
            else:
                other = f"is {_kind(row)}; write an object with prompt, chosen, rejected and reason"
                yield line, row if isinstance(row, dict) else other


def _once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in fields]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice}: is given twice; keep one")
    return dict(fields)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON; leave the field out where there is no number")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        line = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    line += 1
                    yield line, _without_none(row)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}; write the file again") from error


def _without_none(value: Any) -> Any:
    """A column that a row lacks, also in a message, is null in Parquet."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


# ---- fields


def _pair(
    row: Mapping[str, Any], tokenizer: Any, vocab_size: int | None, reason: str | None, ignored: Collection[str]
) -> Pair:
    """ValueError `field: what is wrong; the fix`."""
    row = {name: value for name, value in row.items() if value is not None and name not in ignored}
    for name in row:
        if name not in FIELDS:
            raise ValueError(f"{name}: no such field; there are {', '.join(FIELDS)}; or name it in ignore (--ignore)")
    contents = {name: _content(row, name) for name in ("prompt", *RESPONSES)}
    encoded = encode(contents, tokenizer)
    for name, ids in encoded.ids.items():
        if vocab_size is not None and ids and max(ids) >= vocab_size:
            raise ValueError(f"{name}: token {max(ids)} is not below {vocab_size}, the size of the model's vocabulary")
    masks = dict(encoded.masks)
    for side in RESPONSES:
        if (given := row.get(f"{side}_mask")) is not None:
            if masks[side] is not None or not _is_ids(contents[side]):
                raise ValueError(f"{side}_mask: goes with token ids only; messages say themselves who wrote what")
            masks[side] = _mask(f"{side}_mask", given)
    verdicts = _verdicts(row)
    return Pair(
        prompt_ids=encoded.ids["prompt"],
        chosen_ids=encoded.ids["chosen"],
        rejected_ids=encoded.ids["rejected"],
        reason=_reason(row, reason),
        chosen_mask=masks["chosen"],
        rejected_mask=masks["rejected"],
        group=_text(row, "group"),
        chosen=_origin(row, "chosen"),
        rejected=_origin(row, "rejected"),
        verdicts=verdicts,
    )


def _content(row: Mapping[str, Any], name: str) -> Content:
    """Token ids as a tuple, text, or messages as a list."""
    given = [field for field in (name, f"{name}_ids") if field in row]
    if not given:
        raise ValueError(f"{name}: is missing; give {name} (text or messages) or {name}_ids")
    if len(given) == 2:
        raise ValueError(f"{name}: is given twice, as {name} and {name}_ids; keep one")
    value, field = row[given[0]], given[0]
    if isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value):
        return tuple(value)
    if field.endswith("_ids"):
        raise ValueError(f"{field}: must be a list of token ids, at least one, not {_kind(value)}")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return value
    raise ValueError(f"{field}: must be text, a list of messages or a list of token ids, not {_kind(value)}")


def _is_ids(content: Content) -> bool:
    return isinstance(content, tuple)


def _reason(row: Mapping[str, Any], default: str | None) -> str:
    found = _text(row, "reason") or default
    if found is None:
        raise ValueError(
            "reason: is missing; say why the chosen response is the better one, or give all rows one (--reason)"
        )
    return found


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name}: must be text, not {_kind(value)}")
    return value


def _mask(name: str, value: Any) -> tuple[bool, ...]:
    if not isinstance(value, list) or any(v not in (0, 1) for v in value):
        raise ValueError(f"{name}: must be a list of 0 and 1, one a token")
    return tuple(bool(v) for v in value)


def _verdicts(row: Mapping[str, Any]) -> tuple[Verdict, Verdict] | None:
    names = ("verdict_ab", "verdict_ba")
    missing = [name for name in names if name not in row]
    if len(missing) == 2:
        return None
    if missing:
        raise ValueError(f"{missing[0]}: is missing; a judge is asked in both orders, or leave {names} out")
    for name in names:
        if row[name] not in get_args(Verdict):
            raise ValueError(f"{name}: must be {', '.join(get_args(Verdict))}, not {row[name]!r}")
    return row["verdict_ab"], row["verdict_ba"]


def _origin(row: Mapping[str, Any], side: str) -> Origin | None:
    found = {name: row[f"{side}_{name}"] for name in _ORIGIN if f"{side}_{name}" in row}
    if not found:
        return None
    for name in ("sample", "grader", "finish_reason"):
        _text(row, f"{side}_{name}")
    if "sample" not in found:
        raise ValueError(f"{side}_sample: is missing; {side}_{next(iter(found))} is of a sample")
    reward = found.get("reward")
    if reward is not None and (
        isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward)
    ):
        raise ValueError(f"{side}_reward: must be a number, not {reward!r}")
    versions = found.get("versions", [])
    if not isinstance(versions, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in versions):
        raise ValueError(f"{side}_versions: must be a list of integers of at least 0")
    return Origin(**found | {"versions": tuple(versions)})


def _kind(value: Any) -> str:
    if isinstance(value, str | list | dict) and not value:
        return f"an empty {'text' if isinstance(value, str) else type(value).__name__}"
    return {"str": "text", "list": "a list", "dict": "an object"}.get(type(value).__name__, repr(value))


# ---- writing


def write_pairs(path: str | Path, pairs: Sequence[Pair], tokenizer: Any = None) -> None:
    """As token ids, with all that is known of each pair; with a tokenizer also as text, for people. The file is there
    whole or not at all. ValueError: another ending than .jsonl or .parquet."""
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: pairs are written to .jsonl or .parquet")
    rows = [as_row(pair, tokenizer) for pair in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    if path.suffix == ".jsonl":
        part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = [name for name in (*FIELDS, *FOR_PEOPLE) if any(name in row for row in rows)]
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), part)
    os.replace(part, path)


def as_row(pair: Pair, tokenizer: Any = None) -> dict[str, Any]:
    """Fields of a file, those that are known."""
    row: dict[str, Any] = {"prompt_ids": list(pair.prompt_ids)}
    row |= {"chosen_ids": list(pair.chosen_ids), "rejected_ids": list(pair.rejected_ids), "reason": pair.reason}
    for side, mask in (("chosen", pair.chosen_mask), ("rejected", pair.rejected_mask)):
        if mask is not None:
            row[f"{side}_mask"] = [int(m) for m in mask]
    if pair.group is not None:
        row["group"] = pair.group
    for side, origin in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        if origin is not None:
            known = {name: getattr(origin, name) for name in _ORIGIN}
            row |= {f"{side}_{name}": v for name, v in known.items() if v is not None and name != "versions"}
            if origin.versions:
                row[f"{side}_versions"] = list(origin.versions)
    if pair.verdicts is not None:
        row["verdict_ab"], row["verdict_ba"] = pair.verdicts
    if tokenizer is not None:
        for name in ("prompt", *RESPONSES):
            row[f"{name}_text"] = tokenizer.decode(row[f"{name}_ids"])
    return row
