"""What simulating costs: seconds, microseconds a sample and an event, and memory, up to a million samples.

python -m longtail.bench.simulate_scale [--json] [SAMPLES ...]

An event is what a sample brings about: its admission, the pass that computes its prompt, its finish. (A run of passes
alike costs as much as one: the cost does not grow with the tokens.)
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from longtail.bench.cluster_spec import ClusterSpec, spec_of
from longtail.bench.simulate import run
from longtail.bench.workload import parse_workload

SIZES = (10_000, 100_000, 1_000_000)
GROUP = 8
EVENTS = 3
"""Of a sample."""


def spec(instances: int = 1024, slots: int = 64) -> ClusterSpec:
    """Analytic costs; a batch takes half of the slots."""
    model = {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    }
    kind = {"count": instances, "slots": slots, "accelerator": "H100", "model": model}
    batch = {"groups": max(instances * slots // (2 * GROUP), 1), "group_size": GROUP}
    return spec_of({"name": "scale", "batch": batch, "instances": [kind]})


def measure(samples: int, strategy: str = "sync", instances: int = 1024) -> dict[str, Any]:
    text = f"lognormal(median=2000, sigma=1.0, cap=32768, icc=0.4, groups={samples // GROUP}, group_size={GROUP})"
    workload = parse_workload(text)
    start = time.perf_counter()
    cpu = time.process_time()
    made = run(spec(instances), workload, strategy)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "samples": len(workload),
        "instances": instances,
        "strategy": strategy,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "us_per_sample": 1e6 * cpu / len(workload),
        "us_per_event": 1e6 * cpu / (EVENTS * len(workload)),
        "tokens": made.tokens_trained,
        "virtual_seconds": made.makespan,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "load": os.getloadavg()[0],
    }


def curve(
    sizes: Iterable[int] = SIZES,
    *,
    instances: int = 1024,
    progress: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """`measure` of each size, in rising order, in which the peak of memory is that of each."""
    rows = []
    for size in sorted(sizes):
        rows.append(measure(size, instances=instances))
        progress(rows[-1])
    return rows


HEADER = "   samples        tokens   seconds       CPU  us / sample  us / event  peak GB  load"


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['samples']:>10,}{row['tokens']:>14,}{row['seconds']:>10.1f}{row['cpu_seconds']:>10.1f}"
        f"{row['us_per_sample']:>13.1f}{row['us_per_event']:>12.1f}{row['peak_gb']:>9.2f}{row['load']:>6.1f}"
    )


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    as_json = "--json" in sys.argv
    if not as_json:
        print(HEADER)
    curve(
        map(int, arguments) if arguments else SIZES,
        progress=lambda row: print(json.dumps(row) if as_json else line(row), flush=True),
    )


if __name__ == "__main__":
    main()
