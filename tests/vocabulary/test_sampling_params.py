"""SamplingParams: every field is checked, and every message begins with the field that is wrong."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from longtail.sampling_params import SamplingParams

INF, NAN = math.inf, math.nan


WRONG: list[tuple[str, object]] = [
    *[("n", v) for v in (0, -1, 1.0, True, "4", None)],
    *[("temperature", v) for v in (-0.1, INF, NAN, -INF, True, "1", None, 1e-5)],
    *[("top_p", v) for v in (0, 0.0, 1.01, -0.5, NAN, INF, True, None)],
    *[("top_k", v) for v in (-2, 5.0, True, None, "5")],
    *[("min_p", v) for v in (-0.01, 1.01, NAN, False, None)],
    *[("max_tokens", v) for v in (0, -5, 1.5, True, "10")],
    *[("min_tokens", v) for v in (-1, 0.5, False, None)],
    *[("stop", v) for v in (3, ["a", 3], [""], "", {"a": 1}, [None])],
    *[("stop_token_ids", v) for v in ("7", [1, "7"], [-1], -1, [True], True, [1.0], 1.0)],
    *[("seed", v) for v in (-1, 2**63, 1.0, True, "0")],
    *[("presence_penalty", v) for v in (-2.01, 2.01, NAN, INF, True)],
    *[("frequency_penalty", v) for v in (-2.01, 2.01, NAN, INF, True)],
    *[("repetition_penalty", v) for v in (0, 0.0, -1.0, INF, NAN, True)],
    *[("ignore_eos", v) for v in ("false", 0, None)],
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", v) for v in (1, 64)],
        *[("temperature", v) for v in (0, 0.0, 1e-4, 1, 5.0)],
        *[("top_p", v) for v in (1e-6, 0.5, 1, 1.0)],
        *[("top_k", v) for v in (0, 1, 10**6)],
        *[("min_p", v) for v in (0, 0.5, 1)],
        *[("max_tokens", v) for v in (None, 1)],
        *[("min_tokens", v) for v in (0, 10**5)],
        *[("seed", v) for v in (None, 0, 2**63 - 1)],
        *[("presence_penalty", v) for v in (-2, 0, 2.0)],
        *[("frequency_penalty", v) for v in (-2, 0, 2.0)],
        *[("repetition_penalty", v) for v in (1e-3, 1, 2.5)],
    ],
)
def test_a_value_at_the_edge_is_taken_as_it_is(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_every_field_has_a_case_here() -> None:
    """A new field must be added to the list above."""
    covered = {field for field, _ in WRONG}
    assert covered == {field.name for field in dataclasses.fields(SamplingParams)}


def test_defaults_leave_the_distribution_alone() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens, params.min_tokens, params.seed) == (1, 1.0, None, 0, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    assert not params.truncates
    assert not params.has_penalties


@pytest.mark.parametrize(("given", "kept"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",)), (None, ())])
def test_stop_becomes_a_tuple(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize(("given", "kept"), [(7, (7,)), ([7, 0], (7, 0)), (None, ())])
def test_stop_token_ids_become_a_tuple(given: Any, kept: tuple[int, ...]) -> None:
    assert SamplingParams(stop_token_ids=given).stop_token_ids == kept


def test_top_k_minus_one_is_vllms_way_to_write_all() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(top_k=-1) == SamplingParams()


def test_min_tokens_may_reach_but_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=8, max_tokens=8).min_tokens == 8
    with pytest.raises(ValueError, match=r"^min_tokens 9 exceeds max_tokens 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


def test_messages_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"temperature.*use 0 for greedy"):
        SamplingParams(temperature=1e-6)
    with pytest.raises(ValueError, match=r"top_p.*temperature=0"):
        SamplingParams(top_p=0)
    with pytest.raises(ValueError, match=r"repetition_penalty.*1\.0 turns it off"):
        SamplingParams(repetition_penalty=0)
    with pytest.raises(ValueError, match=r"^top_k must be at least 0, not -2$"):
        SamplingParams(top_k=-2)


def test_from_dict_rejects_unknown_names_and_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="has no field max_token, temprature; the fields are: ") as error:
        SamplingParams.from_dict({"temprature": 0.5, "max_token": 4, "n": 2})
    for field in dataclasses.fields(SamplingParams):
        assert field.name in str(error.value)


def test_from_dict_checks_values_too() -> None:
    assert SamplingParams.from_dict({"n": 4, "stop": "x"}) == SamplingParams(n=4, stop=("x",))
    with pytest.raises(ValueError, match=r"^n must be"):
        SamplingParams.from_dict({"n": 0})


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize(("value", "expected"), [(0.0, False), (0.5, True), (-0.5, True)])
def test_has_penalties(field: str, value: Any, expected: bool) -> None:
    assert SamplingParams(**{field: value}).has_penalties is expected


def test_has_penalties_repetition() -> None:
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert not SamplingParams(repetition_penalty=1).has_penalties


@pytest.mark.parametrize(("field", "value"), [("top_k", 1), ("top_p", 0.99), ("min_p", 0.01)])
def test_truncates(field: str, value: Any) -> None:
    assert SamplingParams(**{field: value}).truncates


def test_is_frozen_and_keyword_only() -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[call-arg]
    as_list: Any = ["a"]
    assert hash(SamplingParams(stop=as_list)) == hash(SamplingParams(stop=("a",)))
