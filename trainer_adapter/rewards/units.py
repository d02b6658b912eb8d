"""Quantities with units, compared by `pint` (the extra `rewards`): "5 km" is "5000 m"."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, ClassVar

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.answers import behind, marked_answer
from longtail.trainer_adapter.rewards.grader import Grader, Request, Score, check_tolerance, gold_text
from longtail.trainer_adapter.rewards.patterns import number_of

_QUANTITY = re.compile(
    r"(?<![\w^.])(?P<number>[-+\u2212]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\w)|\s*[x\u00d7]\s*10\^?[-+]?\d{1,3})?)\s*(?=(?P<unit>[^\n,;:!?=<>]*))"
)
"""A number that is no exponent, and what stands behind it: where its unit starts, if it has one."""
_POWER_OF_TEN = re.compile(r"\s*[x\u00d7]\s*10\^?")
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b"
_PLAIN_SCRIPTS = str.maketrans(_SUPERSCRIPTS, "0123456789-")
MAX_EXPONENT = 12
"""Of a unit: m^3 is one, and m^999999999 would take for ever."""
MAX_WORDS = 6
"""Of a unit in words: `meters per second squared`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitsGrader(Grader):
    """1.0 where the answer is the gold quantity in any unit of its dimension, else 0.0.

    The answer is the last quantity of the part of the response that is marked (`answers`), or of all of it. A gold
    answer without a unit is a bare number, and only a bare number equals it."""

    name: ClassVar[str] = "units"
    revision: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("pint",)

    gold: str = "answer"
    after: str | None = None
    """As of `MathGrader`."""
    tolerance: float = 1e-6
    """Relative to the gold quantity, and absolute in its unit where that is 0."""
    same_unit: bool = False
    """The unit must be the gold's too (km for km), whatever its spelling."""

    def __post_init__(self) -> None:
        check_tolerance("tolerance", self.tolerance)

    def __call__(self, request: Request) -> Score:
        gold_answer = gold_text(request.task, self.gold)
        gold = _last_quantity(gold_answer, whole=True)
        if gold is None:
            raise GradeError(f"the gold answer {gold_answer!r} is no quantity that pint knows, such as 5 km or 3 m/s^2")
        text = behind(request.text, self.after)
        marked = marked_answer(text)
        answer = _last_quantity(text if marked is None else marked)
        if answer is None:
            return Score(0.0, answer=(marked or "")[:200], reason="no quantity could be read")
        shown = f"{answer:~P}"[:200]
        if answer.dimensionality != gold.dimensionality:
            reason = f"a quantity of {answer.dimensionality}, not of {gold.dimensionality}"
            return Score(0.0, answer=shown, reason=reason)
        if self.same_unit and answer.units != gold.units:
            return Score(0.0, answer=shown, reason=f"in {answer.units}, not in {gold.units}")
        value, wanted = float(answer.to(gold.units).magnitude), float(gold.magnitude)
        if math.isfinite(value) and abs(value - wanted) <= self.tolerance * (abs(wanted) or 1.0):
            return Score(1.0, answer=shown)
        return Score(0.0, answer=shown, reason="not the gold quantity")


@functools.cache
def _registry() -> Any:
    import pint

    return pint.UnitRegistry(autoconvert_offset_to_baseunit=True)


def _last_quantity(text: str, *, whole: bool = False) -> Any:
    """pint's quantity; None if there is none. whole: it is all of the text."""
    cleaned = _plain(text)
    matches = list(_QUANTITY.finditer(cleaned))
    if whole and (len(matches) != 1 or matches[0].start() or matches[0].end() + len(matches[0]["unit"]) < len(cleaned)):
        return None
    for match in reversed(matches):
        magnitude = number_of(_POWER_OF_TEN.sub("e", match["number"]))
        if magnitude is None:
            continue
        unit = _longest_unit(match["unit"], whole=whole)
        if unit is None:
            if whole:
                return None
            unit = _registry().dimensionless
        return _registry().Quantity(float(magnitude), unit)
    return None


def _plain(text: str) -> str:
    """LaTeX's ways to write a quantity (5\\,\\text{km}, 3\\cdot10^{4}) as plain text."""
    text = re.sub(r"\^\s*\{?\s*\\?circ\s*\}?\s*", "\u00b0", text)
    text = re.sub(r"\^\s*\{([^{}]*)\}", r"^\1", text)
    text = re.sub(r"\\(?:text|mathrm|operatorname|unit|textrm)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(f"[{_SUPERSCRIPTS}]+", lambda found: "^" + found[0].translate(_PLAIN_SCRIPTS), text)
    text = re.sub(r"\\(?:cdot|times)\s*10\s*\^?\s*([-+]?\d+)", r"e\1", text)
    text = re.sub(r"(?<=\d)\s+e(?=[-+]?\d)", "e", text)
    text = re.sub(r"\\(?:cdot|times)", " * ", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"(\1)/(\2)", text)
    text = re.sub(r"\\[,;:! ]|[~$]|\\left|\\right", " ", text)
    return text.strip().rstrip(".").strip()


def _longest_unit(text: str, *, whole: bool) -> Any:
    """The unit with which a text starts, as many words of it as make one; no text is dimensionless. None if no word
    does, or (whole) not all do."""
    words = text.split()
    if not words:
        return _registry().dimensionless
    lengths = [len(words)] if whole else range(min(len(words), MAX_WORDS), 0, -1)
    for length in lengths:
        unit = _unit(" ".join(words[:length]).rstrip(".*/^- "))
        if unit is not None:
            return unit
    return None


@functools.lru_cache(maxsize=4096)
def _unit(text: str) -> Any:
    """None if pint knows no such unit."""
    import pint

    text = text.replace("\u00b0 ", "\u00b0").replace("**", "^")
    if any(int(n) > MAX_EXPONENT for n in re.findall(r"\d+", text)) or len(text) > 100:
        return None
    for name, degree in (("\u00b0C", "degC"), ("\u00b0F", "degF"), ("\u00b0", "degree")):
        text = text.replace(name, degree)
    try:
        return _registry().parse_units(text)
    except (pint.PintError, ValueError, TypeError, AttributeError, KeyError, ArithmeticError, SyntaxError):
        return None
    except Exception as error:  # its tokenizer raises what Python's does on free text
        if type(error).__module__ in ("tokenize", "pint.errors", "flexparser"):
            return None
        raise
