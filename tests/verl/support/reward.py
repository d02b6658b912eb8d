"""A reward that depends on the row and on the response, so that one that is given to another row shows."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The share of characters whose code leaves the same rest as the answer, divided by 3."""
    if not solution_str:
        return 0.0
    return sum(ord(c) % 3 == int(ground_truth) % 3 for c in solution_str) / len(solution_str)
