"""What a sample store costs: opening, submitting, saving and handing over, by the number of samples that it holds.

For each size a store is filled twice: once with samples that are all open, finished and not handed over, once with
samples that are all handed over. No engine runs: what is timed is the store alone.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from longtail.partial_rollout.store import SampleStore
from longtail.sample import Group
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreBenchConfig:
    sizes: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000)
    """Samples stored."""
    group_size: int = 8
    batch: int = 256
    """Samples submitted, and handed over, at once."""
    prompt_tokens: int = 200
    output_tokens: int = 200
    running: int = 32
    """Samples that one commit of progress saves."""
    commits: int = 20

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for value in self.sizes if field.name == "sizes" else (getattr(self, field.name),):
                if value < 1:
                    raise ValueError(f"{field.name} must be at least 1, not {value}")
        if not self.sizes:
            raise ValueError("sizes is empty; give at least one number of samples")


def run(
    config: StoreBenchConfig, directory: Path | None = None, progress: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """A row for each size. directory: where the stores are made (and removed again); None: the system's."""
    rows = []
    for size in config.sizes:
        progress(f"{size:,} samples")
        root = Path(tempfile.mkdtemp(prefix="store-bench-", dir=directory))
        try:
            rows.append({"samples": size, "output_tokens": config.output_tokens} | _measure(config, size, root))
        finally:
            shutil.rmtree(root)
    return rows


def _measure(config: StoreBenchConfig, size: int, root: Path) -> dict[str, float]:
    spent = dict.fromkeys(("submit", "save", "hand_over"), 0.0)
    for name in ("open", "delivered"):
        with SampleStore(root / name, commit_every=3600) as store:
            for batch in _batches(config, size):
                samples = [s for group in batch for s in group.samples]
                with _timed(spent, "submit"):
                    store.add(batch)
                _finish(batch, config)
                with _timed(spent, "save"):
                    store.watch(samples)
                    store.commit()
                if name == "delivered":
                    with _timed(spent, "hand_over"):
                        store.hand_over(store.complete())
    seconds = {}
    for name in ("open", "delivered"):
        start = time.perf_counter()
        store = SampleStore(root / name, commit_every=3600)
        seconds[name] = time.perf_counter() - start
        if name == "open":
            with _timed(seconds, "complete"):
                store.complete()
        else:
            seconds["commit"] = _commit_seconds(store, config)
        store.close()
        del store  # to free its samples is no part of opening the next one
    return {
        "open_seconds": seconds["open"],
        "open_delivered_seconds": seconds["delivered"],
        "submit_us_per_sample": 1e6 * spent["submit"] / (2 * size),
        "save_us_per_sample": 1e6 * spent["save"] / (2 * size),
        "hand_over_us_per_sample": 1e6 * spent["hand_over"] / size,
        "complete_ms": 1e3 * seconds["complete"],
        "commit_ms": 1e3 * seconds["commit"],
        "bytes_per_sample": sum(f.stat().st_size for f in (root / "open").iterdir()) / size,
    }


def _commit_seconds(store: SampleStore, config: StoreBenchConfig) -> float:
    """Median time of a commit in which each running sample has gained ten tokens."""
    params = SamplingParams(n=config.running)
    group = Group.from_prompt("running", range(config.prompt_tokens), params)
    store.add([group])
    store.watch(group.samples)
    times = []
    for _ in range(config.commits):
        for sample in group.samples:
            sample.status = "running"
            for token in range(10):
                sample.append(token, -0.5, PolicyVersion(0), "bench", "computed")
        start = time.perf_counter()
        store.commit()
        times.append(time.perf_counter() - start)
    return median(times)


def _batches(config: StoreBenchConfig, size: int) -> Iterator[list[Group]]:
    prompt = list(range(config.prompt_tokens))
    for first in range(0, size, config.batch):
        left = min(config.batch, size - first)
        groups = []
        for start in range(0, left, config.group_size):
            params = SamplingParams(n=min(config.group_size, left - start), max_tokens=4096, seed=first + start)
            groups.append(Group.from_prompt(f"g{first + start}", prompt, params, task={"answer": str(first)}))
        yield groups


def _finish(groups: list[Group], config: StoreBenchConfig) -> None:
    for group in groups:
        for sample in group.samples:
            for token in range(config.output_tokens):
                sample.append(1000 + token, -0.5 - token / 977, PolicyVersion(token // 150), "bench", "computed")
            sample.status, sample.finish_reason = "finished", "stop"


@contextmanager
def _timed(spent: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
