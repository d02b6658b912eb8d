"""Mathematical answers, compared by `math-verify` (Kydlíček et al., Hugging Face; the extra `rewards`).

Which part of a response is its answer, first match wins: the last `<answer>...</answer>`, the last `\\boxed{...}`, the
last line that starts with `####`; without any of them, what math-verify finds ("the final answer is ...", else the last
formula or number), unless `marked` asks for a mark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.answers import behind, marked_answer
from longtail.trainer_adapter.rewards.grader import Grader, Request, Score, gold_text

MAX_CHARACTERS = 4096
"""Of a marked answer: nothing longer is one, and reading it could take for ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathGrader(Grader):
    """1.0 where the answer equals the gold answer, else 0.0. LaTeX or plain: 1/2, 0.5, \\frac12, $50\\%$.

    A gold answer that cannot be read is a GradeError, and never a wrong answer of the policy."""

    name: ClassVar[str] = "math"
    revision: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("math-verify", "latex2sympy2-extended", "sympy")

    gold: str = "answer"
    """Field of the task."""
    after: str | None = None
    """Only what stands behind the last of these marks is read (`</think>`); a response without it has no answer."""
    marked: bool = False
    """An answer must be marked."""
    digits: int = 6
    """To which numbers are compared, behind the point."""
    strict: bool = True
    """math-verify's: variables are told apart by name, and a set is no interval or tuple."""
    timeout: int | None = 5
    """Seconds to read an answer, and to compare. math-verify keeps it with SIGALRM, which works in the main thread of a
    process alone: there a grader in a `GraderPool` runs. None: whoever calls keeps the time."""

    def __post_init__(self) -> None:
        if isinstance(self.digits, bool) or not isinstance(self.digits, int) or self.digits < 0:
            raise ValueError(f"digits must be an integer of at least 0, not {self.digits!r}")
        whole = isinstance(self.timeout, int) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (whole and self.timeout >= 1):
            raise ValueError(f"timeout must be whole seconds of at least 1, or None, not {self.timeout!r}")
        if self.after == "":
            raise ValueError('after is empty; name a mark such as "</think>", or leave it out')

    def __call__(self, request: Request) -> Score:
        if self.timeout is not None and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "math-verify keeps its timeout with a signal, which only a main thread gets: grade in a GraderPool, or "
                "set timeout=None and keep the time yourself"
            )
        gold_answer = gold_text(request.task, self.gold)
        with _alarm_kept():
            gold = self._read_gold(gold_answer)
            text = behind(request.text, self.after)
            marked = marked_answer(text)
            if marked is None and self.marked:
                return Score(0.0, answer="", reason="no answer is marked")
            if marked is not None and len(marked) > MAX_CHARACTERS:
                return Score(0.0, answer=marked[:80], reason=f"the answer is longer than {MAX_CHARACTERS} characters")
            try:
                answer = self._read(text if marked is None else marked, is_answer=marked is not None)
                if not answer:
                    return Score(0.0, answer=(marked or "").strip(), reason="no answer could be read")
                equal = self._equal(gold, answer)
            except Exception as error:  # sympy on free text: whatever it raises says that this is not the answer
                return Score(0.0, answer=(marked or "").strip(), reason=f"{type(error).__name__}: {error}"[:200])
            except _timed_out() as error:
                return Score(
                    0.0, answer=(marked or "").strip(), reason=f"took longer than {self.timeout} s ({error})"[:200]
                )
        shown = str(answer[0])[:200]
        return Score(1.0, answer=shown) if equal else Score(0.0, answer=shown, reason="not the gold answer")

    def _read_gold(self, text: str) -> list[Any]:
        try:
            gold = self._read(text, is_answer=True)
        except Exception as error:
            raise GradeError(f"the gold answer {text!r} cannot be read ({type(error).__name__}: {error})") from error
        except _timed_out() as error:
            raise GradeError(f"the gold answer {text!r} took longer than {self.timeout} s to read") from error
        if not gold:
            raise GradeError(
                f"the gold answer {text!r} cannot be read as mathematics; correct the task's {self.gold!r}"
            )
        return gold

    def _read(self, text: str, *, is_answer: bool) -> list[Any]:
        """Sympy's expression and its text; empty if nothing can be read. is_answer: all of the text is the answer."""
        import math_verify

        latex, plain = math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()
        tries: list[tuple[str, list[Any]]] = [(text, [latex, plain])]
        if is_answer and "$" not in text and "\\boxed" not in text:
            tries.insert(0, (f"\\boxed{{{text.strip()}}}", [latex]))
        for candidate, configs in tries:
            with _quiet():
                found = math_verify.parse(
                    candidate,
                    extraction_config=configs,
                    fallback_mode="no_fallback",
                    parsing_timeout=self.timeout,
                    raise_on_error=True,
                )
            if found:
                return list(found)
        return []

    def _equal(self, gold: list[Any], answer: list[Any]) -> bool:
        import math_verify

        with _quiet():
            return bool(
                math_verify.verify(
                    gold,
                    answer,
                    float_rounding=self.digits,
                    strict=self.strict,
                    timeout_seconds=self.timeout,
                    raise_on_error=True,
                )
            )


@functools.cache
def _timed_out() -> type[BaseException]:
    from math_verify.errors import TimeoutException

    return TimeoutException


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without math-verify's log lines on answers that cannot be read: the details of the score say it."""
    import logging

    loggers = [logging.getLogger(name) for name in ("math_verify", "latex2sympy2_extended")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextlib.contextmanager
def _alarm_kept() -> Iterator[None]:
    """math-verify sets and clears the process's one alarm; a caller's own goes on afterwards, late by no more than this
    took."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seconds, interval = signal.getitimer(signal.ITIMER_REAL)
    start = time.monotonic()
    try:
        yield
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, max(seconds - (time.monotonic() - start), 1e-3), interval)
