"""A calculator as a tool: the model writes `<calc>12*7</calc>`, the environment answers `= 84` and a newline.

Sample with `stop=("</calc>",)` and `multi_turn=True`. An expression is arithmetic alone: numbers, + - * / // % **,
brackets. It is parsed by `ast` and walked by hand, never passed to `eval`, and what it may cost is bounded.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from longtail.partial_rollout.environment import Observation, TurnRequest

STOP = "</calc>"
_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)

MAX_CHARACTERS = 200
MAX_BITS = 256
"""Of an integer: 77 decimal digits."""

Number = int | float


class Calculator:
    """Answers the last `<calc>...</calc>` of a turn. A turn without one, or with `max_turns` before it, is the last.

    encode: text -> token ids, without special tokens. Holds nothing of a sample, so there is nothing to rebuild.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], *, max_turns: int = 8) -> None:
        if max_turns < 0:
            raise ValueError(f"max_turns must be at least 0, not {max_turns}")
        self._encode = encode
        self.max_turns = max_turns

    @classmethod
    def of(cls, tokenizer: Any, *, max_turns: int = 8) -> Calculator:
        """With a tokenizer of `transformers`."""
        return cls(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], max_turns=max_turns)

    async def reset(self, request: TurnRequest) -> None:
        return None

    async def step(self, request: TurnRequest) -> Observation:
        calls = _CALL.findall(request.text)
        if not calls or request.turn >= self.max_turns:
            return Observation(done=True)
        return Observation(tuple(self._encode(answer(calls[-1]))))


def answer(expression: str) -> str:
    """`= 84\\n`, or `= error: division by zero\\n`: an error is for the policy to read."""
    try:
        return f"= {show(evaluate(expression))}\n"
    except (ValueError, ArithmeticError) as error:
        return f"= error: {error}\n"


def show(value: Number) -> str:
    """A float with 15 digits, so that 0.1 + 0.2 is 0.3 and 6/2 is 3."""
    return str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression. ValueError or ArithmeticError, with a text for the policy, if it has none
    within the bounds."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    # Python's parser also warns (`1if`), and nests without bound: no letters but an exponent's reach it.
    if not re.fullmatch(r"[\d\s.+\-*/%()eE]*", expression, re.ASCII):
        raise ValueError("only numbers, brackets and + - * / // % ** are understood")
    try:
        tree = ast.parse(" ".join(expression.split()), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _value(left), _value(right)
            if b == 0 and not isinstance(op, ast.Add | ast.Sub | ast.Mult):
                raise ZeroDivisionError("division by zero")
            return _bounded(_OPERATORS[type(op)](a, b))
    raise ValueError("only numbers, brackets and + - * / // % ** are understood")


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _power(base: Number, exponent: Number) -> Number:
    """Refused before it is computed if it would be too large."""
    if base == 0 and exponent < 0:
        raise ZeroDivisionError("division by zero")
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("the result is not a real number")
    if abs(base) > 1 and exponent > 0 and exponent * math.log2(abs(base)) > MAX_BITS:
        raise OverflowError("too large")
    if isinstance(base, int) and isinstance(exponent, int) and exponent < 0:
        return float(base) ** exponent
    result: Number = base**exponent
    return result


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError("too large")
    elif not math.isfinite(value):
        raise OverflowError("too large")
    return value
