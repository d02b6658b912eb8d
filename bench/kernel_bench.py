"""`longtail bench kernels`: times of the kernels against what the machine can do, in one run.

On a GPU every op's Triton kernel is timed (`triton.testing.do_bench`, cold L2) against its roofline: the time that its
least bytes take at the measured copy bandwidth, or its operations at the measured matmul rate, whichever is longer.
On a CPU the CPU paths are timed, and their rate stands beside the read bandwidth that was measured right before each.
Nothing that a CPU run prints says anything about a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from longtail.bench.analysis import nearest_rank
from longtail.bench.kernel_case_list import CASES, check_names
from longtail.bench.kernel_cases import DTYPES, Call, Case, Form, Sizes
from longtail.bench.machine import describe

if TYPE_CHECKING:
    from rich.table import Table

READ_BYTES = 512 << 20
"""Read for the bandwidth: more than any cache holds."""
PERCENTILES = (20, 50, 80)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelBenchConfig:
    """Checked at construction."""

    ops: tuple[str, ...] = ()
    """Names of ops; none: all."""
    dtypes: tuple[str, ...] = ()
    """None: bfloat16 on a GPU, float32 (what the CPU paths take) on a CPU."""
    repeats: int = 15
    """On a CPU; a GPU is measured for a fixed time."""
    threads: int | None = None

    def __post_init__(self) -> None:
        check_names(self.ops, self.dtypes)
        for name in ("repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


def run(config: KernelBenchConfig, progress: Callable[[str], None] = lambda text: None) -> Iterator[dict[str, Any]]:
    """One row of results for each case and dtype, as soon as it is measured."""
    machine = describe()
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
        measure: Callable[[Case, str], Iterator[dict[str, Any]]] = GpuBench(machine).measure
        dtypes = config.dtypes or ("bfloat16",)
    else:
        if config.threads is not None:
            import numba

            # In this order: numba, when it starts its threads, sets torch's number to all cores.
            numba.set_num_threads(min(config.threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            torch.set_num_threads(config.threads)
            machine["threads"] = config.threads
        measure = CpuBench(machine, config.repeats).measure
        dtypes = config.dtypes or ("float32",)
    on_gpu = "gpu" in machine
    chosen = [
        (case, dtype)
        for case in CASES
        for dtype in dtypes
        if (not config.ops or case.op in config.ops)
        and dtype in case.dtypes
        and (on_gpu or (case.on_cpu and dtype == "float32"))
    ]
    if not chosen:
        what = f"{', '.join(config.ops) or 'these ops'} in {', '.join(dtypes)}"
        raise ValueError(f"ops, dtypes: nothing to measure for {what} here; the CPU's own kernels take float32")
    for case, dtype in chosen:
        progress(f"{case.name} {dtype}")
        yield from measure(case, dtype)


def _row(case: Case, dtype: str, sizes: Sizes, contestant: str, call: Call, ms: dict[str, float]) -> dict[str, Any]:
    return {
        "op": case.op,
        "case": case.what,
        "sizes": sizes,
        "dtype": dtype,
        "contestant": contestant,
        "milliseconds": ms,
        "least_bytes": call.least,
        "gigabytes_per_second": call.least / ms["p50"] / 1e6,
        "teraflops": call.flops / ms["p50"] / 1e9,
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": float(nearest_rank(values, q) or 0.0) for q in PERCENTILES}


class CpuBench:
    def __init__(self, machine: dict[str, Any], repeats: int) -> None:
        self.machine, self.repeats = machine, repeats
        self.memory = torch.ones(READ_BYTES // 4)

    def measure(self, case: Case, dtype: str) -> Iterator[dict[str, Any]]:
        if not case.on_cpu or dtype != "float32":
            return
        call = case.make(Form(torch.device("cpu"), "cpu", DTYPES[dtype]), case.cpu)
        call.op()  # compiles
        own, reads = [], []
        for _ in range(self.repeats):
            start = time.perf_counter()
            self.memory.sum()
            middle = time.perf_counter()
            call.op()
            end = time.perf_counter()
            reads.append(READ_BYTES / (middle - start))
            own.append(end - middle)
        ms = {name: 1e3 * seconds for name, seconds in _percentiles(own).items()}
        row = _row(case, dtype, case.cpu, "cpu", call, ms)
        row["read_gigabytes_per_second"] = _percentiles(reads)["p50"] / 1e9
        shares = [call.least / seconds / bandwidth for seconds, bandwidth in zip(own, reads, strict=True)]
        row["share_of_bandwidth"] = _percentiles(shares)
        row["machine"] = self.machine
        yield row


class GpuBench:
    def __init__(self, machine: dict[str, Any]) -> None:
        from triton.testing import do_bench

        self.machine, self.do_bench = machine, do_bench
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        machine["copy_gigabytes_per_second"] = 2 * source.nbytes / self._ms(lambda: target.copy_(source))["p50"] / 1e6
        for name, dtype in DTYPES.items():
            a = torch.randn(8192, 8192, device="cuda").to(dtype)
            ms = self._ms(functools.partial(torch.mm, a, a))["p50"]
            machine[f"matmul_teraflops_{name}"] = 2 * 8192**3 / ms / 1e9

    def _ms(self, function: Callable[[], Any]) -> dict[str, float]:
        times = self.do_bench(function, quantiles=[q / 100 for q in PERCENTILES])
        return {f"p{q}": float(t) for q, t in zip(PERCENTILES, times, strict=True)}

    def measure(self, case: Case, dtype: str) -> Iterator[dict[str, Any]]:
        call = case.make(Form(torch.device("cuda"), "triton", DTYPES[dtype]), case.full)
        contestants = {"triton": call.op, **call.rivals}
        for name, function in contestants.items():
            function()
            row = _row(case, dtype, case.full, name, call, self._ms(function))
            by_memory = call.least / (self.machine["copy_gigabytes_per_second"] * 1e6)
            by_compute = call.flops / (self.machine[f"matmul_teraflops_{dtype}"] * 1e9)
            row["roofline_ms"] = max(by_memory, by_compute)
            row["share_of_roofline"] = row["roofline_ms"] / row["milliseconds"]["p50"]
            row["machine"] = self.machine
            yield row
        del call, contestants
        gc.collect()
        torch.cuda.empty_cache()


def table(rows: list[dict[str, Any]]) -> Table:
    """Medians (spreads are in the JSON)."""
    from rich.table import Table

    about = rows[0]["machine"]
    on_gpu = "gpu" in about
    out = Table(title="Triton kernels" if on_gpu else "CPU paths (no GPU here: nothing below is about one)")
    out.title_justify = "left"
    where = about["gpu"] if on_gpu else f"{about['cpu']}, {about['threads']} threads"
    out.caption = f"{where}; torch {about['torch']}; medians"
    share = "of roofline" if on_gpu else "of read bandwidth"
    out.add_column("op", no_wrap=True)
    for header in ("dtype", "ms", "GB/s", "TFLOP/s", share):
        out.add_column(header, justify="right")
    for row in rows:
        part = row["share_of_roofline"] if on_gpu else row["share_of_bandwidth"]["p50"]
        rival = "" if row["contestant"] in ("cpu", "triton") else f" ({row['contestant']})"
        out.add_row(
            f"{row['op']} {row['case']}".strip() + rival,
            row["dtype"],
            f"{row['milliseconds']['p50']:.3f}",
            f"{row['gigabytes_per_second']:.1f}",
            f"{row['teraflops']:.2f}" if row["teraflops"] else "",
            f"{part:.0%}",
        )
    if not on_gpu:
        read = sorted(row["read_gigabytes_per_second"] for row in rows)[len(rows) // 2]
        out.caption += f"; read bandwidth {read:.1f} GB/s. Shares count the least bytes; small cases stay in the cache"
    return out
