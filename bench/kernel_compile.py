"""`longtail bench kernels --compile`: every kernel's machine code for GPUs that are not here, as a table.

The kernels are compiled through their launching functions (bench/offline_compile.py), at the shapes of the cases but
for the number of tokens. docs/kernels.md explains the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from longtail.bench.kernel_case_list import CASES, check_names
from longtail.bench.kernel_cases import DTYPES, Case, Form, Sizes
from longtail.bench.offline_compile import TARGETS, Compiled, compile_all

if TYPE_CHECKING:
    from rich.table import Table

FEW = {"tokens": 16, "rows": 16, "blocks": 16, "sequences": 16, "queries": 1024, "context": 1024}
"""Sizes that no kernel is specialised for, but for being multiples of 16. The batch decides if attention splits."""


def compile_sizes(case: Case) -> Sizes:
    return {name: min(size, FEW.get(name, size)) for name, size in case.full.items()}


def run(
    targets: Iterable[str],
    dtypes: Iterable[str],
    ops: Iterable[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """One row for each kernel, case, dtype and target; no ops: all. A case that takes one dtype alone is compiled in
    that one. ValueError for names that are unknown, and where none is given."""
    chosen, kinds, machines = tuple(ops), tuple(dtypes), tuple(targets)
    check_names(chosen, kinds)
    if wrong := [name for name in machines if name not in TARGETS]:
        raise ValueError(f"targets: {', '.join(wrong)} unknown; there are {', '.join(TARGETS)}")
    for name, given, known in (("targets", machines, TARGETS), ("dtypes", kinds, DTYPES)):
        if not given:
            raise ValueError(f"{name}: name at least one of {', '.join(known)}")
    wanted = [
        (case, dtype, target)
        for case in CASES
        if not chosen or case.op in chosen
        for dtype in dict.fromkeys(kind if kind in case.dtypes else case.dtypes[0] for kind in kinds)
        for target in machines
    ]

    def launch(case: Case, dtype: str, target: str) -> None:
        progress(f"{case.name} {dtype} {target}")
        case.make(Form(torch.device("cpu"), "triton", DTYPES[dtype], empty=True), compile_sizes(case)).launch()

    outcomes = compile_all((partial(launch, *job), TARGETS[job[2]]) for job in wanted)
    for (case, dtype, _), outcome in zip(wanted, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise outcome
        traffic = case.traffic(DTYPES[dtype])
        for compiled in {c.kernel: c for c in outcome}.values():
            yield {
                "op": case.op,
                "case": case.what,
                "dtype": dtype,
                **_facts(compiled),
                "bytes_per_token": traffic.memory / traffic.tokens,
                "issued_bytes_per_token": traffic.issued / traffic.tokens,
                "least_bytes_per_token": traffic.least / traffic.tokens,
            }


def _facts(launch: Compiled) -> dict[str, Any]:
    facts = {f.name: getattr(launch, f.name) for f in dataclasses.fields(launch)}
    return facts | {"target": launch.target.name, "occupancy": launch.occupancy, "problems": launch.problems()}


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each kernel: bytes per token, then registers, shared memory and occupancy on each target."""
    from rich.table import Table

    targets = list(dict.fromkeys(row["target"] for row in rows))
    title = "Compiled, not run. For each target: registers a thread / shared KiB a block / occupancy"
    out = Table(title=title, title_justify="left")
    for header in ("op", "kernel"):
        out.add_column(header, no_wrap=True)
    for header in ("bytes per token", "of least", "issued", "128-bit loads", "tensor core", "spills", *targets):
        out.add_column(header, justify="right")
    last = None
    lines: dict[tuple[str, str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["op"], row["case"], row["dtype"], row["kernel"]), {})[row["target"]] = row
    several = len({row["dtype"] for row in rows}) > 1
    for (op, case, dtype, kernel), by_target in lines.items():
        row = next(iter(by_target.values()))
        name = " ".join(part for part in (op, case, dtype if several else "") if part)
        if name != last:
            out.add_section()
            ratio = row["bytes_per_token"] / row["least_bytes_per_token"]
            issued = row["issued_bytes_per_token"] / row["least_bytes_per_token"]
            cells = [name, kernel, _bytes(row["bytes_per_token"]), f"{ratio:.2f}", f"{issued:.2f}"]
        else:
            cells = ["", kernel, "", "", ""]
        last = name
        wide = [r["loads"].get(128, 0) / max(sum(r["loads"].values()), 1) for r in by_target.values()]
        cells.append(f"{min(wide):.0%}")
        cells.append("yes" if all(r["tensor_core"] for r in by_target.values()) else "")
        cells.append(str(sum(r["spills"] for r in by_target.values())))
        for target in targets:
            r = by_target.get(target)
            cells.append("" if r is None else f"{r['registers']} / {r['shared'] / 1024:.0f} / {r['occupancy']:.0%}")
        out.add_row(*cells)
    return out


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
