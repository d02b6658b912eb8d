"""Quantities with units, by hand-computed cases."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.units import UnitsGrader


@dataclasses.dataclass
class Ask:
    text: str
    task: Any


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("5 km", "5000 m", 1.0),
        ("5 km", "It is \\boxed{5\\,\\text{km}}.", 1.0),
        ("5 km", "After 2 h it has gone 5 km further.", 1.0),
        ("5 km", "5", 0.0),
        ("5 km", "5000 km", 0.0),
        ("5 km", "5 kg", 0.0),
        ("5 km", "five", 0.0),
        ("1 h", "<answer>3600 seconds</answer>", 1.0),
        ("3 m/s^2", "\\boxed{3\\ \\mathrm{m/s^{2}}}", 1.0),
        ("3 m/s^2", "3 m/s\u00b2", 1.0),
        ("36 km/h", "10 m/s", 1.0),
        ("36 km/h", "ten, that is 10 meters per second, I think", 1.0),
        ("20 degC", "293.15 kelvin", 1.0),
        ("20 \u00b0C", "68 \u00b0F", 1.0),
        ("12", "12", 1.0),
        ("12", "12 m", 0.0),
        ("1.5e3 J", "1.5 kJ", 1.0),
        ("2 mol", "1.2044e24", 0.0),
        ("3e8 m/s", "3 \\cdot 10^{8} m/s", 1.0),
        ("5 km", "5 m^999999999", 0.0),
        ("5 km", "9" * 3000 + " km", 0.0),
    ],
)
def test_units(gold: str, text: str, reward: float) -> None:
    score = UnitsGrader()(Ask(text, {"answer": gold}))
    assert score == reward, score.details


def test_units_by_choice() -> None:
    task = {"answer": "5 km"}
    assert UnitsGrader(same_unit=True)(Ask("5000 m", task)) == 0.0
    assert UnitsGrader(same_unit=True)(Ask("5 kilometers", task)) == 1.0
    assert UnitsGrader(tolerance=0.01)(Ask("5.02 km", task)) == 1.0 and UnitsGrader()(Ask("5.02 km", task)) == 0.0


@pytest.mark.parametrize("gold", ["km", "5 zorks", "about 5 km", "5 km and 3 m"])
def test_a_gold_quantity_that_is_none_is_an_error(gold: str) -> None:
    with pytest.raises(GradeError, match="no quantity"):
        UnitsGrader()(Ask("5 km", {"answer": gold}))
