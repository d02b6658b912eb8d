"""What a store on disk costs a rollout: the same rollout over a store in memory and over one on disk, pair by pair.

Every sample is paused once, half-way, so that the store on disk also writes everybody's KV; its time includes what it
has left to write when it is closed. Which of the two comes first changes from pair to pair. Beside the ratio of the
whole times, which holds the noise of the machine: the time spent in the store's own calls, as a share.
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.engine_bench import KV_CACHE_BYTES, TEMPERATURE, BenchFailed, quantiles, ratios
from longtail.sample import Group
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.native.engine import NativeEngine
    from longtail.partial_rollout.store import SampleStore

CALLS = ("add", "commit", "hand_over", "close")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OverheadBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A directory or a hub id."""
    groups: int = 4
    group_size: int = 4
    prompt_tokens: int = 64
    output_tokens: int = 64
    """Of each sample; it is paused at half of them."""
    repeats: int = 3
    """Pairs."""
    threads: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            low = 2 if field.name == "output_tokens" else 1
            if field.name != "model" and getattr(self, field.name) < low:
                raise ValueError(f"{field.name} must be at least {low}, not {getattr(self, field.name)}")


def run(config: OverheadBenchConfig, directory: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """directory: where the stores on disk are made (and removed again); None: the system's."""
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    engine = NativeEngine(
        config.model,
        threads=config.threads,
        max_num_seqs=config.groups * config.group_size,
        max_num_batched_tokens=max(512, config.groups * config.group_size),
        max_model_len=config.prompt_tokens + config.output_tokens,
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    runs: dict[str, list[dict[str, Any]]] = {"memory": [], "disk": []}
    for repeat in range(config.repeats + 1):  # the first pair warms up
        progress(f"rollout over a store in memory and on disk, pair {repeat} of {config.repeats}")
        for where in ("memory", "disk") if repeat % 2 else ("disk", "memory"):
            with tempfile.TemporaryDirectory(prefix="overhead-bench-", dir=directory) as name:
                runs[where].append(_rollout(engine, config, Path(name) / "store" if where == "disk" else None))
    if len({run["outputs"] for done in runs.values() for run in done}) != 1:
        raise BenchFailed("the rollouts made different tokens or log-probabilities")
    seconds = {where: [run["seconds"] for run in done[1:]] for where, done in runs.items()}
    share = [sum(run["calls"].values()) / run["seconds"] for run in runs["disk"][1:]]
    return {
        "measure": "store overhead",
        "tokens": runs["disk"][0]["tokens"],
        "saved_bytes": runs["disk"][0]["saved_bytes"],
        "seconds": seconds,
        "disk_over_memory": ratios(seconds["disk"], seconds["memory"]),
        "share_in_store_calls": quantiles(share),
        "call_seconds": {name: quantiles([run["calls"][name] for run in runs["disk"][1:]]) for name in CALLS},
    }


def _rollout(engine: NativeEngine, config: OverheadBenchConfig, directory: Path | None) -> dict[str, Any]:
    from longtail.partial_rollout.rollout import Rollout
    from longtail.partial_rollout.store import SampleStore
    from longtail.partial_rollout.strategies import TokenBudget

    engine.reset_prefix_cache()
    gc.collect()
    saved = [0]
    engine.listener = lambda event: saved.append(event.num_tokens) if event.kind == "save" else None
    store = SampleStore(directory)
    calls = dict.fromkeys(CALLS, 0.0)
    _time(store, calls)
    groups = [
        Group.from_prompt(
            f"g{i}",
            [7 + (13 * i + 5 * j) % 80 for j in range(config.prompt_tokens)],
            SamplingParams(
                n=config.group_size, temperature=TEMPERATURE, max_tokens=config.output_tokens, ignore_eos=True, seed=i
            ),
        )
        for i in range(config.groups)
    ]
    start = time.perf_counter()
    with Rollout(engine, strategy=TokenBudget(config.output_tokens // 2, per="sample"), store=store) as rollout:
        rollout.submit(groups)
        while len(store):
            rollout.collect()
        tokens = store.ledger.generated
    took = time.perf_counter() - start
    engine.listener = lambda event: None
    outputs = tuple((tuple(s.output_ids), tuple(s.logprobs)) for g in groups for s in g.samples)
    per_token = engine.kv.bytes_per_block // engine.config.block_size
    return {
        "seconds": took,
        "calls": calls,
        "tokens": tokens,
        "outputs": outputs,
        "saved_bytes": sum(saved) * per_token,
    }


def _time(store: SampleStore, calls: dict[str, float]) -> None:
    """Adds up the seconds of its calls; one that is made inside another belongs to that one."""
    running: list[str] = []

    def timed(name: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        running.append(name)
        try:
            return call(*arguments, **keywords)
        finally:
            running.pop()
            if not running:
                calls[name] += time.perf_counter() - start

    for name in CALLS:
        setattr(store, name, partial(timed, name, getattr(store, name)))
