"""What simulating costs: seconds, microseconds a sample and an event, and memory, up to a million samples.

python -m longtail.bench.simulate_scale [SAMPLES ...]
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

from longtail.bench.cluster_spec import ClusterSpec, spec_of
from longtail.bench.simulate import run
from longtail.bench.workload import parse_workload

SIZES = (10_000, 100_000, 1_000_000)
GROUP = 8


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
    """Events: of each sample its admission, the pass that computes its prompt, and its finish."""
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
        "us_per_event": 1e6 * cpu / (3 * len(workload)),
        "tokens": made.tokens_trained,
        "virtual_seconds": made.makespan,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    for size in map(int, sys.argv[1:]) if len(sys.argv) > 1 else SIZES:
        print(json.dumps(measure(size)), flush=True)


if __name__ == "__main__":
    main()
