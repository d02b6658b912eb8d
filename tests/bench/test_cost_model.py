"""What a pass costs, by hand; the sum over a run of passes; the file, and files that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.bench.cost_model import CostModel, StepModel, Transfer, features, read_cost
from longtail.partial_rollout.engines.simulated.cost import total_context

HAND = StepModel(
    base=10.0,
    per_seq=1.0,
    per_row=(2.0, 0.5),
    knots=(8,),
    per_context=0.01,
    per_prefill_context=0.001,
    row_multiple=4,
    scale=2.0,
    between=0.25,
)


@pytest.mark.parametrize(
    ("num_seqs", "rows", "context", "expected"),
    [
        # scale x (base + seqs + g(padded rows) + context / 100 + extra / 1000) + between
        (1, 1, 100, 2 * (10 + 1 + 2 * 4 + 1 + 0) + 0.25),
        (4, 4, 100, 2 * (10 + 4 + 2 * 4 + 1 + 0) + 0.25),
        (5, 5, 100, 2 * (10 + 5 + 2 * 8 + 1 + 0) + 0.25),
        (9, 9, 0, 2 * (10 + 9 + 2 * 8 + 0.5 * 4) + 0.25),  # 12 rows: 8 at 2, 4 at 0.5
        (2, 20, 400, 2 * (10 + 2 + 2 * 8 + 0.5 * 12 + 4 + 0.001 * 18 * 200) + 0.25),
    ],
)
def test_by_hand(num_seqs: int, rows: int, context: int, expected: float) -> None:
    assert HAND.seconds(num_seqs, rows, context) == pytest.approx(expected, rel=1e-15)


def test_features_by_hand() -> None:
    columns = features(np.array([2.0]), np.array([20.0]), np.array([400.0]), (4, 8), 8)
    assert columns.tolist() == [[1, 2, 400, 18 * 200, 4, 4, 16]]  # 20 rows are padded to 24


def test_total_context_by_hand() -> None:
    assert total_context(3, 100, 4) == 100 + 103 + 106 + 109
    assert total_context(3, 100, 0) == 0


@settings(max_examples=200, deadline=None)
@given(
    slopes=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    knots=st.sampled_from([(), (3,), (4, 16)]),
    multiple=st.sampled_from([1, 4, 8]),
    seqs=st.integers(1, 40),
    more=st.integers(0, 500),
    context=st.integers(0, 10**6),
    passes=st.integers(0, 60),
)
def test_a_run_is_the_sum_of_its_passes_and_many_is_each(
    slopes: list[float], knots: tuple[int, ...], multiple: int, seqs: int, more: int, context: int, passes: int
) -> None:
    per_row = tuple(0.01 * (i + 1) * slopes[0] for i in range(len(knots) + 1))
    model = StepModel(
        base=slopes[1],
        per_seq=slopes[2],
        per_row=per_row,
        knots=knots,
        per_context=1e-5 * slopes[3],
        per_prefill_context=1e-7,
        row_multiple=multiple,
        scale=1.5,
        between=1e-3,
    )
    each = [model.seconds(seqs, seqs, context + i * seqs) for i in range(passes)]
    assert model.decode_seconds(seqs, context, passes) == pytest.approx(math.fsum(each), rel=1e-12)
    many = model.many(np.array([seqs]), np.array([seqs + more]), np.array([context]))
    assert many[0] == pytest.approx(model.seconds(seqs, seqs + more, context), rel=1e-12)
    # More rows, more sequences and more context never cost less.
    assert model.seconds(seqs, seqs + more + 1, context) >= model.seconds(seqs, seqs + more, context)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": -1.0}, "step.base"),
        ({"base": math.nan}, "step.base"),
        ({"scale": math.inf}, "step.scale"),
        ({"per_row": (1.0, 2.0)}, "2 slopes for 0 knots"),
        ({"per_row": (1.0, -2.0), "knots": (4,)}, "step.per_row"),
        ({"per_row": (1.0, 2.0, 3.0), "knots": (8, 4)}, "rising"),
        ({"per_row": (1.0, 2.0), "knots": (0,)}, "at least 1"),
        ({"row_multiple": 0}, "row_multiple"),
        ({"between": True}, "step.between"),
    ],
)
def test_a_coefficient_that_is_none(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StepModel(**({"base": 1.0} | change))


def whole() -> CostModel:
    return CostModel(
        step=HAND,
        source="fitted",
        label='a "quoted" \u00fc label \U0001f600 \x7f \\ \n end',
        save=Transfer(0.5, 1e-7),
        restore=Transfer(per_token=3e-6),
        update=1.25,
        grade=0.0,
        report={"by_batch": [{"from": 1, "median": 0.5}], "odd key": {"a.b": 1}, "findings": ["x"], "drift": [1.0, 2]},
    )


@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_round_trip(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"cost{ending}"
    whole().write(path)
    assert read_cost(path) == whole()
    assert read_cost(path).train is None


def written(tmp_path: Path, **change: Any) -> Path:
    plain = whole().as_dict() | change
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({key: value for key, value in plain.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "not a cost model"),
        ({"version": 2}, "version 2"),
        ({"source": "guessed"}, "source must be"),
        ({"step": None}, "step is missing"),
        ({"step": {"per_seq": 1.0}}, "base is missing"),
        ({"step": {"base": 1.0, "bass": 2.0}}, "unknown key bass"),
        ({"step": {"base": "slow"}}, "step.base"),
        ({"save": {"per_token": -1}}, "per_token"),
        ({"update": -2.0}, "update"),
        ({"colour": 1}, "unknown key colour"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = written(tmp_path, **change)
    with pytest.raises(ValueError, match=says) as caught:
        read_cost(path)
    assert str(path) in str(caught.value)


def test_missing_broken_and_misnamed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="longtail calibrate"):
        read_cost(tmp_path / "cost.toml")
    (tmp_path / "cost.toml").write_text("format = ")
    with pytest.raises(ValueError, match="not readable as TOML"):
        read_cost(tmp_path / "cost.toml")
    (tmp_path / "cost.json").write_text("[1]")
    with pytest.raises(ValueError, match="not a cost model"):
        read_cost(tmp_path / "cost.json")
    with pytest.raises(ValueError, match=r"ends with \.toml or \.json"):
        whole().write(tmp_path / "cost.yaml")


def test_a_number_that_is_none_is_not_written(tmp_path: Path) -> None:
    model = CostModel(step=HAND, source="fitted", report={"x": math.nan})
    with pytest.raises(ValueError, match="finite"):
        model.write(tmp_path / "cost.toml")
    assert list(tmp_path.iterdir()) == []
