"""The calculator environment: what it answers, and that no text of a policy can raise, hang or run anything."""

from __future__ import annotations

import asyncio
import math
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.partial_rollout.environment import EnvironmentRunner, Observation, TurnRequest
from longtail.partial_rollout.environments.calculator import MAX_BITS, STOP, Calculator, answer, evaluate


def encode(text: str) -> list[int]:
    return list(text.encode())


def ask(text: str, turn: int = 0) -> TurnRequest:
    return TurnRequest(
        sample_id=f"s{turn}", group_id="g", task=None, prompt_ids=(1,), output_ids=(2,), text=text, turn=turn
    )


def step(calculator: Calculator, text: str, turn: int = 0) -> Observation:
    return asyncio.run(calculator.step(ask(text, turn)))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        (" 12 * 7 ", "84"),
        ("6/2", "3"),
        ("7/2", "3.5"),
        ("1/3", "0.333333333333333"),
        ("0.1+0.2", "0.3"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("-2**2", "-4"),
        ("(-2)**3", "-8"),
        ("2**0.5", "1.4142135623731"),
        ("+(1+(2+(3)))", "6"),
        ("0*-1.0", "0"),
        ("1e3", "1000"),
        ("10**70 - 1", "9" * 70),
        ("(-1)**(10**60)", "1"),
    ],
)
def test_values(expression: str, result: str) -> None:
    assert answer(expression) == f"= {result}\n"


GRAMMAR = "only numbers, brackets and + - * / // % ** are understood"


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("1.0%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("2**256", "too large"),
        ("2**200*2**200", "too large"),
        ("1e400", "too large"),
        ("1e308*10", "too large"),
        ("1.5**10000", "too large"),
        ("9" * 100, "too large"),
        ("(-8)**(1/3)", "the result is not a real number"),
        ("", "not an expression"),
        ("5 5", "not an expression"),
        ("1 +", "not an expression"),
        ("007", "not an expression"),
        ("(" * 190, "not an expression"),
        ("1,000", GRAMMAR),
        ("(1)(2)", GRAMMAR),
        ("__import__('os')", GRAMMAR),
        ("1if 2else 3", GRAMMAR),
        ("x", GRAMMAR),
        ("e", GRAMMAR),
        ("\u0661+1", GRAMMAR),
        ("1" + "+1" * 100, "longer than 200 characters"),
    ],
)
def test_errors_are_for_the_policy_to_read(expression: str, error: str) -> None:
    assert answer(expression) == f"= error: {error}\n"


@given(st.text(alphabet="0123456789.eE+-*/%() \n", max_size=60))
@settings(max_examples=600, deadline=None)
def test_no_text_raises_warns_or_hangs(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert re.fullmatch(r"= (error: [a-z0-9+\-*/%,. ]+|-?\d[\d.e+\-]*)\n", answer(text))


numbers = st.integers(0, 50).map(str) | st.sampled_from(["0.5", "2.25", "1e2"])
operators = st.sampled_from(["+", "-", "*", "/", "//", "%", "**"])
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, operators, inner).map(lambda t: f"({''.join(t)})") | inner.map(lambda e: f"(-{e})"),
    max_leaves=6,
)


@given(expressions)
@settings(max_examples=500, deadline=None)
def test_values_are_python_s(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            eval(expression)
        return
    except (ValueError, OverflowError):
        return
    assert value == eval(expression) and math.isfinite(value)
    assert isinstance(value, float) or value.bit_length() <= MAX_BITS


def test_the_last_call_of_a_turn_is_answered() -> None:
    calculator = Calculator(encode, max_turns=2)
    assert step(calculator, "so <calc>12*7</calc>") == Observation(tuple(b"= 84\n"))
    assert step(calculator, f"<calc>1</calc> <calc>1\n+1{STOP}\n") == Observation(tuple(b"= 2\n"))
    assert step(calculator, "<calc>1/0</calc>", 1) == Observation(tuple(b"= error: division by zero\n"))
    assert step(calculator, "<calc>1</calc>", 2) == Observation(done=True)  # two were answered
    assert step(calculator, "the answer is 84") == Observation(done=True)
    assert step(calculator, "<calc>12*7") == Observation(done=True)
    with pytest.raises(ValueError, match="max_turns"):
        Calculator(encode, max_turns=-1)


def test_in_a_runner() -> None:
    with EnvironmentRunner(Calculator(encode, max_turns=1000)) as runner:
        for i in range(300):
            runner.submit(ask(f"<calc>{i}*2</calc>", turn=i))
        answers: dict[str, bytes] = {}
        while runner.num_pending:
            for turn in runner.wait():
                assert turn.observation is not None
                answers[turn.sample_id] = bytes(turn.observation.token_ids)
    assert answers == {f"s{i}": b"= %d\n" % (2 * i) for i in range(300)}
