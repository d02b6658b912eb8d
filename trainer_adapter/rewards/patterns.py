"""Rewards that read the form of a response: a pattern with a group, and required parts."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.answers import behind
from longtail.trainer_adapter.rewards.grader import (
    Grader,
    Request,
    Score,
    check_choice,
    check_tolerance,
    gold_text,
    library_version,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegexGrader(Grader):
    """1.0 where what a pattern finds equals the gold answer, else 0.0.

    compare: "exact" (both stripped), "casefold" (and without regard to case), "numeric": numbers such as -1,234.5, 3/4,
    2e-3 or 50% (which is 0.5) as exact fractions, up to the tolerance."""

    name: ClassVar[str] = "regex"
    revision: ClassVar[int] = 1

    pattern: str
    """Python's; `.` also matches line ends with (?s)."""
    group: int | str | None = None
    """Of the pattern; None: its first group, or all of it if it has none."""
    which: Literal["last", "first"] = "last"
    """Of several matches."""
    compare: Literal["exact", "casefold", "numeric"] = "exact"
    tolerance: float = 0.0
    """numeric: relative to the gold number, and absolute where that is 0."""
    gold: str = "answer"
    after: str | None = None
    """As of `MathGrader`."""

    def __post_init__(self) -> None:
        check_choice("which", self.which, ("last", "first"))
        check_choice("compare", self.compare, ("exact", "casefold", "numeric"))
        check_tolerance("tolerance", self.tolerance)
        if self.tolerance and self.compare != "numeric":
            raise ValueError(f'tolerance is for compare="numeric", not {self.compare!r}')
        try:
            pattern = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error
        known = (*range(pattern.groups + 1), *pattern.groupindex)
        if self.group is not None and self.group not in known:
            raise ValueError(f"group {self.group!r} is not in pattern {self.pattern!r}, which has {known}")

    def __call__(self, request: Request) -> Score:
        gold = gold_text(request.task, self.gold).strip()
        wanted = number_of(gold) if self.compare == "numeric" else None
        if self.compare == "numeric" and wanted is None:
            raise GradeError(f"the gold answer {gold!r} is no number; correct the task's {self.gold!r}")
        pattern = _compiled(self.pattern)
        group = self.group if self.group is not None else min(pattern.groups, 1)
        match = None
        for one in pattern.finditer(behind(request.text, self.after)):
            match = one
            if self.which == "first":
                break
        found = None if match is None else match[group]
        if found is None:
            return Score(0.0, answer="", reason="the pattern finds nothing")
        answer = found.strip()
        shown = answer[:200]
        if wanted is not None:
            number = number_of(answer)
            if number is None:
                return Score(0.0, answer=shown, reason="no number")
            equal = abs(number - wanted) <= Fraction(self.tolerance) * (abs(wanted) or 1)
        elif self.compare == "casefold":
            equal = answer.casefold() == gold.casefold()
        else:
            equal = answer == gold
        return Score(1.0, answer=shown) if equal else Score(0.0, answer=shown, reason="not the gold answer")


_NUMERAL = re.compile(
    r"(?P<sign>[-+\u2212]?)(?P<body>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE](?P<exponent>[-+]?\d{1,3}))?"
    r"(?:\s*/\s*(?P<over>\d+))?\s*(?P<percent>%?)"
)


def number_of(text: str) -> Fraction | None:
    """The number that all of a text is; None if it is none. Nothing is evaluated: 10**9**9 is no number."""
    match = _NUMERAL.fullmatch(text.strip().replace("$", "").strip())
    if match is None or len(text) > 1000:
        return None
    value = Fraction(match["body"].replace(",", "").rstrip(".")) * Fraction(10) ** int(match["exponent"] or 0)
    if match["over"] is not None:
        if not int(match["over"]):
            return None
        value /= int(match["over"])
    if match["percent"]:
        value /= 100
    return -value if match["sign"] in ("-", "\u2212") else value


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatGrader(Grader):
    """Whether a response has a form: 1.0 where every requirement is met, else 0.0; with credit="share", the share of
    requirements that are met. The details have each by name."""

    name: ClassVar[str] = "format"
    revision: ClassVar[int] = 1

    tags: tuple[str, ...] = ()
    """Each stands exactly once, closed, in this order, none inside another: ("think", "answer")."""
    only_tags: bool = False
    """Nothing but white space stands outside of the tags."""
    pattern: str | None = None
    """Is found in the response."""
    min_characters: int = 0
    max_characters: int | None = None
    """Of the response, stripped."""
    json_in: str | None = None
    """JSON stands here: "all" of the response, the last "fence" (```json ... ```), or a tag's name."""
    json_schema: Mapping[str, Any] | None = None
    """JSON Schema that it satisfies, by the distribution `jsonschema`."""
    credit: Literal["all", "share"] = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", tuple(self.tags))
        check_choice("credit", self.credit, ("all", "share"))
        for tag in self.tags:
            if not re.fullmatch(r"[A-Za-z][\w.-]*", tag):
                raise ValueError(f"tags has {tag!r}, which is no tag's name; write think for <think>...</think>")
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags names one twice: {', '.join(self.tags)}")
        if self.only_tags and not self.tags:
            raise ValueError("only_tags needs tags")
        if self.min_characters < 0 or (self.max_characters is not None and self.max_characters < self.min_characters):
            raise ValueError(
                f"min_characters {self.min_characters} and max_characters {self.max_characters} leave no length"
            )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error
        if self.json_schema is not None:
            if self.json_in is None:
                raise ValueError('json_schema needs json_in: "all", "fence" or a tag')
            self._check_schema()
        if not self._requirements():
            raise ValueError("a format without a requirement; give tags, pattern, lengths or json_in")

    def _check_schema(self) -> None:
        library_version("jsonschema")
        import jsonschema

        try:
            jsonschema.validators.validator_for(self.json_schema).check_schema(self.json_schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"json_schema is no JSON Schema: {error.message}") from error

    def surroundings(self) -> dict[str, Any]:
        return {} if self.json_schema is None else {"jsonschema": library_version("jsonschema")}

    def _requirements(self) -> list[str]:
        given = {
            "tags": bool(self.tags),
            "only_tags": self.only_tags,
            "pattern": self.pattern is not None,
            "length": self.min_characters > 0 or self.max_characters is not None,
            "json": self.json_in is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    def __call__(self, request: Request) -> Score:
        text = request.text
        failed = {name: why for name in self._requirements() if (why := getattr(self, f"_{name}_fault")(text))}
        met = {name: name not in failed for name in self._requirements()}
        value = sum(met.values()) / len(met) if self.credit == "share" else float(not failed)
        details: dict[str, Any] = {"met": met}
        if failed:
            details["reason"] = "; ".join(failed.values())
        return Score(value, **details)

    def _tags_fault(self, text: str) -> str | None:
        position = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return f"{opening} and {closing} must stand once each"
            start, end = text.index(opening), text.index(closing)
            if not position <= start < end:
                return f"{opening}...{closing} is out of order"
            position = end + len(closing)
        return None

    def _only_tags_fault(self, text: str) -> str | None:
        if self._tags_fault(text) is not None:
            return "the tags are not right"
        for tag in self.tags:
            before, _, rest = text.partition(f"<{tag}>")
            if before.strip():
                return f"text before <{tag}>"
            text = rest.partition(f"</{tag}>")[2]
        return "text behind the last tag" if text.strip() else None

    def _pattern_fault(self, text: str) -> str | None:
        assert self.pattern is not None
        return None if _compiled(self.pattern).search(text) else "the pattern is not found"

    def _length_fault(self, text: str) -> str | None:
        length = len(text.strip())
        if length < self.min_characters:
            return f"{length} characters of at least {self.min_characters}"
        if self.max_characters is not None and length > self.max_characters:
            return f"{length} characters of at most {self.max_characters}"
        return None

    def _json_fault(self, text: str) -> str | None:
        place = self.json_in
        if place == "fence":
            found = re.findall(r"```(?:json)?[ \t]*\n(.*?)```", text, flags=re.DOTALL)
        elif place == "all":
            found = [text]
        else:
            found = re.findall(rf"<{re.escape(str(place))}>(.*?)</{re.escape(str(place))}>", text, flags=re.DOTALL)
        if not found:
            return f"no JSON in {place}"
        try:
            value = json.loads(found[-1], parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            return f"no JSON: {error}"[:200]
        if self.json_schema is None:
            return None
        import jsonschema

        try:
            jsonschema.validate(value, self.json_schema)
        except jsonschema.ValidationError as error:
            return f"the JSON does not fit its schema: {error.message}"[:200]
        return None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
