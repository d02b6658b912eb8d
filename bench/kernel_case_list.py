"""All cases, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterable

from longtail.bench import kernel_cases_kv, kernel_cases_rows, kernel_cases_state
from longtail.bench.kernel_cases import DTYPES

CASES = [*kernel_cases_kv.CASES, *kernel_cases_rows.CASES, *kernel_cases_state.CASES]


def check_names(ops: Iterable[str], dtypes: Iterable[str]) -> None:
    """ValueError naming those that are unknown."""
    known = {case.op for case in CASES}
    if wrong := [op for op in ops if op not in known]:
        raise ValueError(f"ops: {', '.join(wrong)} unknown; there are {', '.join(sorted(known))}")
    if wrong := [name for name in dtypes if name not in DTYPES]:
        raise ValueError(f"dtypes: {', '.join(wrong)} unknown; there are {', '.join(DTYPES)}")
