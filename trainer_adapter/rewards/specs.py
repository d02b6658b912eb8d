"""Graders by name and settings, as a command line or a file of settings gives them:

    math
    math:{"gold": "final", "after": "</think>"}
    regex:{"pattern": "= (\\\\d+)", "compare": "numeric"}
    my_package.my_module.grade      a function, or an object like those here
    grader.toml                     grader = "math" and its settings; of a sum

        grader = "combine"
        [parts.answer]
        grader = "math"
        [parts.form]
        grader = "format"
        weight = 0.1
        tags = ["think", "answer"]

Settings behind a colon are JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtail.trainer_adapter.rewards.combine import CombinedGrader, Part
from longtail.trainer_adapter.rewards.grader import Grader
from longtail.trainer_adapter.rewards.gym import ReasoningGymGrader
from longtail.trainer_adapter.rewards.math_answers import MathGrader
from longtail.trainer_adapter.rewards.patterns import FormatGrader, RegexGrader
from longtail.trainer_adapter.rewards.programs import CodeGrader
from longtail.trainer_adapter.rewards.sandbox import Limits, Sandbox
from longtail.trainer_adapter.rewards.units import UnitsGrader

GRADERS: dict[str, type[Grader]] = {
    grader.name: grader
    for grader in (
        MathGrader,
        ReasoningGymGrader,
        RegexGrader,
        UnitsGrader,
        FormatGrader,
        CodeGrader,
        CombinedGrader,
    )
}
_NESTED: dict[str, Any] = {"sandbox": Sandbox, "limits": Limits}


def make_grader(spec: str | Mapping[str, Any]) -> Any:
    """A grader of a text or of settings with `grader` (see the module). ValueError, with what is known, for anything
    else."""
    if isinstance(spec, Mapping):
        return _from_settings(spec)
    text = spec.strip()
    if text.endswith((".toml", ".json")) and ":" not in text:
        return _from_settings(_read(Path(text)))
    name, colon, rest = text.partition(":")
    if not colon and name not in GRADERS and "." in name:
        return _from_module(name)
    settings: Any = {}
    if colon:
        try:
            settings = json.loads(rest)
        except ValueError as error:
            raise ValueError(
                f"grader: the settings in {spec!r} are no JSON ({error}); for example {_EXAMPLE}"
            ) from error
        if not isinstance(settings, dict):
            raise ValueError(f"grader: the settings in {spec!r} must be a JSON object; for example {_EXAMPLE}")
    return _from_settings({"grader": name.strip(), **settings})


_EXAMPLE = """math:{"gold": "answer"}"""


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ValueError(f"grader: {path} is no file")
    try:
        found = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"grader: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"grader: {path} must hold settings, with grader = a name")
    return found


def _from_settings(settings: Mapping[str, Any]) -> Any:
    rest = dict(settings)
    name = rest.pop("grader", None)
    if not isinstance(name, str):
        raise ValueError(f"grader: the settings name none; add grader = one of {', '.join(GRADERS)}")
    if name not in GRADERS:
        if "." in name and not rest:
            return _from_module(name)
        close = difflib.get_close_matches(name, GRADERS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"grader: none is called {name!r}; {hint}there are {', '.join(GRADERS)}, and package.module.attribute"
        )
    if name == CombinedGrader.name:
        rest["parts"] = _parts(rest.get("parts"))
    return _make(f"grader {name}", GRADERS[name], rest)


def _parts(given: Any) -> tuple[Part, ...]:
    if not isinstance(given, Mapping) or not given:
        raise ValueError("grader combine: parts must have at least one, by name: [parts.answer] with grader and weight")
    parts = []
    for name, settings in given.items():
        if not isinstance(settings, Mapping):
            raise ValueError(f"grader combine: part {name!r} must be settings with grader and weight, not {settings!r}")
        rest = dict(settings)
        weight = rest.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"grader combine: weight of part {name!r} must be a number, not {weight!r}")
        parts.append(Part(name=name, grader=_from_settings(rest), weight=float(weight)))
    return tuple(parts)


def _make(what: str, cls: type[Any], settings: Mapping[str, Any]) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in settings:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"{what} has no setting {name!r}; {hint}it has {', '.join(fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in settings
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}")
    values = {}
    for name, value in settings.items():
        if name in _NESTED and isinstance(value, Mapping):
            value = _make(f"{what}.{name}", _NESTED[name], value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _from_module(path: str) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        grader = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"grader: {path} cannot be imported ({error})") from error
    if not callable(grader) or isinstance(grader, type):
        raise ValueError(f"grader: {path} must be a function of a request or a grader made, not {grader!r}")
    return grader
