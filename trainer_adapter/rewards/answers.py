"""How an answer is read out of a free-form response. First match wins (`extract_answer`):

1. the last `<answer>...</answer>`;
2. the last `\\boxed{...}`, braces balanced;
3. the last line that starts with `####` (GSM8K's own mark);
4. if the expected answer is a number: the last number of the text; else the whole text, stripped.

Where the expected answer is a number, the last number of what 1 to 3 found is taken ("20 bananas" -> "20"). A number
loses its thousands commas, and the dot of a full stop is not part of it.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

# The sign belongs to the number unless a digit, a letter or a closing bracket stands before it: 5-9 holds 5 and 9.
NUMBER = re.compile(r"(?:(?<![\w)\]])[-\u2212+])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+")


def extract_answer(text: str, expected: str | None) -> str:
    """The part of a response that is its answer; the module docstring has the rules. Empty if there is none."""
    marked = marked_answer(text)
    if expected is None or as_number(expected) is None:
        return (text if marked is None else marked).strip()
    numbers = NUMBER.findall(text if marked is None else marked)
    if not numbers:
        return "" if marked is None else marked.strip()
    return numbers[-1].replace(",", "").replace("$", "").replace("\u2212", "-").removeprefix("+")


def marked_answer(text: str) -> str | None:
    """Rules 1 to 3; None if the response marks no answer."""
    tagged = tagged_answer(text)
    if tagged is not None:
        return tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    hashed = re.findall(r"^\s*####(.+)$", text, flags=re.MULTILINE)
    return hashed[-1] if hashed else None


def tagged_answer(text: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL | re.IGNORECASE)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    r"""Inside of the last \boxed{...} whose braces close."""
    last: tuple[int, int] | None = None
    opened: list[int | None] = []  # where the inside of a box starts; None for other braces
    for match in re.finditer(r"\\boxed\s*\{|[{}]", text):
        if match[0] == "{":
            opened.append(None)
        elif match[0] != "}":
            opened.append(match.end())
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = start, match.start()
    return None if last is None else text[slice(*last)]


def behind(text: str, mark: str | None) -> str:
    """What stands behind the last `mark` (`</think>`, say): only that is the answer. Nothing if the mark is missing;
    everything without a mark to look for."""
    if mark is None:
        return text
    _, found, rest = text.rpartition(mark)
    return rest if found else ""


def as_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().replace(",", ""))
    except (InvalidOperation, AttributeError):
        return None


def are_different_numbers(answer: str, expected: str) -> bool:
    given, wanted = as_number(answer), as_number(expected)
    return given is not None and wanted is not None and given != wanted
