"""What the simulated engine costs: microseconds an event, flat in the number of samples, and bytes a sample.

python -m longtail.bench.simulated_bench
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from typing import Any

from longtail.partial_rollout.engines.simulated import LinearCost, SimulatedEngine, log_normal
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams


def make_samples(number: int, group_size: int = 8) -> list[Sample]:
    params = SamplingParams(n=group_size)
    groups = [Group.from_prompt(f"g{i}", range(1, 33), params) for i in range(-(-number // group_size))]
    return [sample for group in groups for sample in group.samples][:number]


def measure(number: int, slots: int = 512, *, materialise: bool = False) -> dict[str, Any]:
    """Runs `number` samples of 4 to 2,000 tokens, a new one as soon as a slot is free, as a rollout does.

    events: admissions, finishes and the other passes that are scheduled one by one. -> counts, and microseconds of the
    engine for each event, each output token, and each pass that one-by-one stepping would have made.
    """
    samples = make_samples(number)
    engine = SimulatedEngine(
        slots=slots,
        cost=LinearCost(5e-3, 1e-5, 1e-6, 1e-9),
        lengths=log_normal(200.0, 1.0, shortest=4, longest=2000),
        materialise=materialise,
    )
    waiting = iter(samples)
    steps = 0
    gc.collect()
    start = time.perf_counter()
    while True:
        batch = [sample for sample, _ in zip(waiting, range(engine.num_free_slots), strict=False)]
        engine.add(batch)
        if not engine.has_work:
            break
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    stats = engine.stats()
    events = 2 * number + steps
    return {
        "samples": number,
        "slots": slots,
        "materialise": materialise,
        "seconds": seconds,
        "steps": steps,
        "passes": stats.num_steps,
        "output_tokens": stats.num_output_tokens,
        "virtual_seconds": engine.now(),
        "us_per_event": seconds / events * 1e6,
        "us_per_sample": seconds / number * 1e6,
        "us_per_token": seconds / stats.num_output_tokens * 1e6,
    }


def bytes_per_sample(number: int = 20_000) -> dict[str, float]:
    """Of finished samples, all in: the record that the caller made, and what the engine has left in it."""
    tracemalloc.start()
    samples = make_samples(number)
    made = tracemalloc.get_traced_memory()[0]
    engine = SimulatedEngine(slots=512, lengths=log_normal(200.0, 1.0, shortest=4, longest=2000), materialise=False)
    for first in range(0, number, 512):
        engine.add(samples[first : first + 512])
        while engine.has_work:
            engine.step()
    del engine
    gc.collect()
    done = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"bytes_made": made / number, "bytes_done": done / number}


def main() -> None:
    for number in (1_000, 10_000, 100_000):
        print(json.dumps(measure(number)))
    print(json.dumps(measure(10_000, materialise=True)))
    print(json.dumps(bytes_per_sample()))


if __name__ == "__main__":
    main()
