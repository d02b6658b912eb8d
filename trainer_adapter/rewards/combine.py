"""A weighted sum of graders."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.grader import Grader, Request, Score, label_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    grader: Any
    """A grader of this package, or any callable of a request with `name` and `version`."""
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedGrader(Grader):
    """sum of weight * score over the parts; each part's own value stays in the details, under its name.

    A part that cannot grade (it raises) leaves the sample without a reward, and the error names the part."""

    name: ClassVar[str] = "combine"
    revision: ClassVar[int] = 1

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("parts is empty; give at least one Part(name=..., grader=..., weight=...)")
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"parts need names that differ, not {', '.join(map(repr, names))}")
        for part in self.parts:
            if not math.isfinite(part.weight):
                raise ValueError(f"weight of part {part.name!r} must be finite, not {part.weight!r}")
            if not callable(part.grader):
                raise ValueError(f"grader of part {part.name!r} must be a grader, not {part.grader!r}")
            for attribute in ("name", "version"):
                if not isinstance(getattr(part.grader, attribute, None), str):
                    raise ValueError(
                        f"grader of part {part.name!r} has no {attribute}, by which a changed exam is known"
                    )

    def __call__(self, request: Request) -> Score:
        parts: dict[str, dict[str, Any]] = {}
        for part in self.parts:
            try:
                given = part.grader(request)
                value = float(Score(float(given)))  # finite
            except GradeError as error:
                raise GradeError(f"part {part.name}: {error}") from error
            except ValueError as error:
                raise ValueError(f"part {part.name}: {error}") from error
            parts[part.name] = {"value": value, "weight": part.weight, "grader": label_of(part.grader)}
            if details := getattr(given, "details", None):
                parts[part.name]["details"] = details
        return Score(math.fsum(part["weight"] * part["value"] for part in parts.values()), parts=parts)
