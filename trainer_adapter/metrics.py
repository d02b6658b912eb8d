"""What a training run writes down: one line of JSON a step, and TensorBoard where it is installed."""

from __future__ import annotations

import importlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longtail.sample import Group


def reward_figures(groups: Iterable[Group]) -> dict[str, Any]:
    """reward: mean over the samples that have one; accuracy: share of them with a reward of at least 1; graded: how
    many there are; mixed: share of the groups whose rewards differ. None where there is nothing."""
    rewards, mixed, total = [], 0, 0
    for group in groups:
        own = [s.reward for s in group.samples if s.reward is not None]
        rewards += own
        total += 1
        mixed += len(set(own)) > 1
    return {
        "reward": math.fsum(rewards) / len(rewards) if rewards else None,
        "accuracy": sum(r >= 1 for r in rewards) / len(rewards) if rewards else None,
        "graded": len(rewards),
        "mixed": mixed / total if total else None,
    }


class MetricsLog:
    """Lines of JSON, each with its "step", in ascending order. A line is on its way to the disk when `write` returns,
    so that a killed process leaves whole lines and at most one torn one."""

    def __init__(self, path: str | Path, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """lines: what the file starts with, in place of what it held; in one go, so that a process killed meanwhile
        leaves the old file."""
        self.path = Path(path)
        _replace(self.path, "".join(_line(values) for values in lines))
        self._file = self.path.open("a")

    def write(self, values: Mapping[str, Any]) -> None:
        self._file.write(_line(values))
        self._file.flush()

    def sync(self) -> None:
        """Everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path, *, before: int | None = None) -> list[dict[str, Any]]:
    """Of a run's metrics.jsonl; a last line that is torn is left out. [] if there is no file. before: of earlier steps
    only. ValueError for anything else that is not such a line."""
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    found = []
    for number, line in enumerate(lines[:-1]):  # whole lines end with a newline
        try:
            values = json.loads(line)
            values["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number + 1} is no line of metrics ({error!r})") from error
        if before is None or values["step"] < before:
            found.append(values)
    return found


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values) + "\n"


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


class TensorBoard:
    """The numbers of each line, under their paths ("diagnostics/kl"). Does nothing where neither `tensorboard` nor
    `tensorboardX` is installed."""

    def __init__(self, directory: str | Path) -> None:
        self._writer: Any = None
        for name in ("torch.utils.tensorboard", "tensorboardX"):
            try:
                self._writer = importlib.import_module(name).SummaryWriter(str(directory))
            except ImportError:
                continue
            break

    @property
    def is_on(self) -> bool:
        return self._writer is not None

    def write(self, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in flat(values).items():
            self._writer.add_scalar(name, value, values["step"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in nested dicts, by path."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{name}"] = float(value)
    return found
