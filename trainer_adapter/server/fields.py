"""Reads a request's JSON, and says of what is wrong with it which field it is.

A field that would change what is generated and that we do not know is refused, so that nobody trains on tokens that
were sampled otherwise than asked for. What changes nothing is listed by the dialects, and ignored."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from longtail.sampling_params import SamplingParams

PARAMS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class BadRequest(Exception):
    """Answered with `status` (4xx or 503). field: of the body, if one is to blame."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.field, self.status = message, field, status

    def body(self) -> dict[str, Any]:
        kind = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailable"}
        name = kind.get(self.status, "BadRequestError")
        return {"error": {"message": self.message, "type": name, "param": self.field, "code": self.status}}


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object. BadRequest for anything else, NaN and Infinity included; nothing at all is an empty object."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {_kind(value)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """Of one object. A field that is null counts as absent."""

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._where = where
        self._known: set[str] = set()

    def _take(self, name: str) -> Any:
        self._known.add(name)
        return self._left.pop(name, None)

    def any(self, name: str) -> Any:
        return self._take(name)

    def number(self, name: str, default: float) -> float:
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(name, f"must be a finite number, not {_kind(value)}")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int | None:
        value = self._take(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # 512.0 is what some clients make of 512
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, f"must be an integer, not {_kind(value)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, not {_kind(value)}")
        return value

    def string(self, name: str, default: str | None = None) -> str | None:
        value = self._take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(name, f"must be a string, not {_kind(value)}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._take(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.fail(name, "must be a string or a list of strings")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._take(name)
        return () if value is None else check_ids(self.named(name), value)

    def object(self, name: str) -> dict[str, Any]:
        value = self._take(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail(name, f"must be an object, not {_kind(value)}")
        return value

    def ignore(self, *names: str) -> None:
        """These change nothing that is generated."""
        for name in names:
            self._take(name)

    def refuse(self, allowed: Mapping[str, Iterable[Any]], why: str = "is not supported") -> None:
        """These do, and are not supported, but for the values at which they do nothing."""
        for name, values in allowed.items():
            value = self._take(name)
            if value is not None and not any(value == v and type(value) is type(v) for v in values):
                self.fail(name, why)

    def done(self) -> None:
        """BadRequest if something is left."""
        if self._left:
            name = min(self._left)
            self.fail(name, f"is not known; known are {', '.join(sorted(self._known))}")

    def named(self, name: str) -> str:
        return f"{self._where}{name}"

    def fail(self, name: str, what: str) -> NoReturn:
        raise BadRequest(f"{self.named(name)} {what}", self.named(name))


def check_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids. BadRequest if it is none."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list of token ids, with at least one", name)
    if set(map(type, value)) != {int}:
        wrong = next(v for v in value if type(v) is not int)
        raise BadRequest(f"{name} must hold integers only, not {_kind(wrong)}", name)
    if min(value) < 0:
        raise BadRequest(f"{name} must hold token ids of at least 0, not {min(value)}", name)
    return tuple(value)


def sampling_params(values: Mapping[str, Any], names: Mapping[str, str], where: str = "") -> SamplingParams:
    """names: what the dialect calls a field of `SamplingParams`, where that differs. BadRequest as its ValueError."""
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise bad_value(error, names, where) from None


def bad_value(error: ValueError, names: Mapping[str, str], where: str = "", default: str | None = None) -> BadRequest:
    """The ValueError of a part behind us, in the dialect's names. default: the field that it is about if it names none.
    """
    text = re.sub(r"^sample \S+ ", "", str(error).replace(": ", " ", 1)) if str(error)[:7] == "sample " else str(error)
    for ours, theirs in names.items():
        text = re.sub(rf"\b{ours}\b", theirs, text)
    first = re.match(r"\w+", text)
    if first is not None and first[0] in {*names.values(), *SamplingParams.__dataclass_fields__}:
        return BadRequest(text, f"{where}{first[0]}")
    return BadRequest(text if default is None else f"{default}: {text}", default)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value) if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
