"""All cases, in the order in which they are shown."""

from __future__ import annotations

from longtail.bench import kernel_cases_kv, kernel_cases_rows

CASES = [*kernel_cases_kv.CASES, *kernel_cases_rows.CASES]
