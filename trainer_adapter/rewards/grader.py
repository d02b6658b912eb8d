"""What a grader is: a frozen dataclass that is called with a request and returns a `Score`.

    grader = MathGrader(gold="answer")
    grader.label            # "math@1-5f0c31ab": name, and a version that changes with the code and with every setting
    grader(request)         # Score(1.0), a float with .details

A request has `task` (what the prompt's group carries) and `text` (the decoded response), as a
`partial_rollout.grading.GradeRequest` has; the pool there runs graders in processes with a timeout.

Three things that a grader tells apart: a wrong answer is a score (with a reason in its details); a task that cannot be
graded is a `GradeError` (no reward, for it says nothing of the policy); a grader that is set up wrongly is a
ValueError.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from longtail.errors import GradeError


class Request(Protocol):
    @property
    def task(self) -> Any: ...

    @property
    def text(self) -> str: ...


class Score(float):
    """A finite reward and what the grader says beside it: `details`, which JSON can say. ValueError for NaN and
    infinities."""

    details: dict[str, Any]

    def __new__(cls, value: float, **details: Any) -> Score:
        if not math.isfinite(value):
            raise ValueError(f"a reward of {value} is none: a grader that has no verdict raises GradeError")
        score = super().__new__(cls, value)
        score.details = details
        return score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grader:
    """Its fields are its settings."""

    name: ClassVar[str]
    revision: ClassVar[int]
    """Of the code: raised whenever a change of it can change a score. (A test notices a change of the code.)"""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions can change a score."""

    @property
    def version(self) -> str:
        """Revision and a fingerprint of settings and libraries. ValueError if a library is not installed."""
        settings = {field.name: settings_of(getattr(self, field.name)) for field in dataclasses.fields(self)}
        parts = {"settings": settings, "libraries": {name: library_version(name) for name in self.libraries}}
        text = json.dumps([self.name, self.revision, parts | self.surroundings()], sort_keys=True)
        return f"{self.revision}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    @property
    def label(self) -> str:
        return label_of(self)

    def surroundings(self) -> dict[str, Any]:
        """What else can change a score."""
        return {}

    def __call__(self, request: Request) -> Score:
        raise NotImplementedError


def label_of(grader: Any) -> str:
    """Name and version of any grader, as `GraderPool` records it."""
    return f"{grader.name}@{grader.version}"


def settings_of(value: Any) -> Any:
    """As JSON can say it."""
    if callable(value) and isinstance(getattr(value, "version", None), str):  # a grader in another
        return label_of(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: settings_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): settings_of(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [settings_of(one) for one in value]
    return value


@functools.cache
def library_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{distribution} is not installed; pip install 'longtail[rewards]'") from None


def task_field(task: Any, key: str) -> Any:
    """What a task says under `key`, a path with dots through mappings and attributes. GradeError if it is not there."""
    found = task
    for part in key.split("."):
        try:
            found = found[part] if isinstance(found, Mapping) else getattr(found, part)
        except (KeyError, AttributeError):
            has = ", ".join(sorted(map(str, found))) if isinstance(found, Mapping) else type(found).__name__
            raise GradeError(
                f"the task has no {key!r} (there is: {has or 'nothing'}); name its field in the grader"
            ) from None
    return found


def gold_text(task: Any, key: str) -> str:
    """The right answer that a task states: a text or a number. GradeError for anything else."""
    found = task_field(task, key)
    if isinstance(found, bool) or not isinstance(found, str | int | float) or not str(found).strip():
        raise GradeError(f"the task's {key!r} must be a text or a number, not {found!r}")
    return str(found)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def check_tolerance(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
