"""What a pool of engines costs: moving a sample against computing its KV again, and the time outside the engines.

Moved: a sample of `tokens` tokens that is paused in one engine goes on in another from its KV, up to its next token.
Recomputed: the same sample, without its KV and with empty prefix caches. Both in each pair, so that what slows the
machine down hits both; the tokens are the same bits.

Overhead: `live` samples decode; the share of the time that no engine was in a step (of one engine alone, and of the
pool of that one, or of one like it on Ray), and the time of a step of the pool over that of the engine alone, pair by
pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.engine_bench import BenchFailed, quantiles, ratios
from longtail.bench.machine import describe
from longtail.events import Event
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.partial_rollout.pool import EnginePool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A directory or a hub id."""
    tokens: int = 2048
    """Of the sample that moves."""
    live: int = 64
    """Samples that decode."""
    steps: int = 12
    """Timed, of the decoding."""
    repeats: int = 3
    """Pairs."""
    threads: int = 2
    ray: str | None = None
    """Also with Ray actors there."""

    def __post_init__(self) -> None:
        for name in ("tokens", "live", "steps", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def run(config: PoolBenchConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows by what was measured, with the machine's description."""
    rows = []
    for where in ("this process", *(["ray"] if config.ray else [])):
        progress(f"moving a sample of {config.tokens} tokens, {where}")
        with _pool(config, 2, where, max_num_seqs=4, max_model_len=config.tokens + 64) as pool:
            rows.append({"where": where, **move_row(pool, config)})
    for where in ("this process", *(["ray"] if config.ray else [])):
        progress(f"{config.live} samples decode, {where}")
        rows.append({"where": where, **overhead_row(config, where)})
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(config).items()}
    return {"settings": settings, "machine": describe(), "rows": rows}


def _factory(config: PoolBenchConfig, **settings: Any) -> Any:
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    return functools.partial(
        NativeEngine, str(config.model), threads=config.threads, kv_cache_bytes=1 << 30, **settings
    )


def _pool(config: PoolBenchConfig, count: int, where: str, **settings: Any) -> EnginePool:
    from longtail.partial_rollout.pool import EnginePool, RayConfig

    ray = RayConfig(address=config.ray or "local", num_cpus=config.threads) if where == "ray" else None
    return EnginePool(_factory(config, **settings), count=count, ray=ray)


def _sample(name: str, length: int, max_tokens: int) -> Sample:
    """With a prompt of its own."""
    salt = zlib.crc32(name.encode())
    prompt = [5 + (salt * 31 + 13 * i + i * i) % 400 for i in range(length)]
    params = SamplingParams(n=1, temperature=0.7, max_tokens=max_tokens, ignore_eos=True, seed=salt)
    return Group.from_prompt(name, prompt, params).samples[0]


def move_row(pool: EnginePool, config: PoolBenchConfig) -> dict[str, Any]:
    """Two engines; the first pair warms up."""
    seconds: dict[str, list[float]] = {"save": [], "move": [], "recompute": []}
    for repeat in range(config.repeats + 1):
        sample = _sample(f"m{repeat}", config.tokens, 16)
        took = {"prefill": _to_next(pool, sample)}
        for what in ("move", "recompute") if repeat % 2 else ("recompute", "move"):
            pool.reset_prefix_cache()
            home = next(segment.engine for segment in reversed(sample.segments))
            start = time.perf_counter()
            pool.pause([sample.id], snapshot=what == "move")
            if what == "move":
                took["save"] = time.perf_counter() - start
            pool.reset_prefix_cache()
            pool.release(home)
            took[what] = _to_next(pool, sample)
            pool.recall(home)
            last = sample.segments[-1]
            if last.engine == home or last.kv != ("restored" if what == "move" else "recomputed"):
                raise BenchFailed(f"{what}: the sample did not go on elsewhere as it should: {last}")
        pool.abort([sample.id])
        if repeat:
            for name, values in seconds.items():
                values.append(took[name])
    both = [a + b for a, b in zip(seconds["save"], seconds["move"], strict=True)]
    return {
        "measure": "move",
        "tokens": config.tokens,
        "seconds": {name: quantiles(values) for name, values in seconds.items()},
        "move_over_recompute": ratios(seconds["move"], seconds["recompute"]),
        "save_and_move_over_recompute": ratios(both, seconds["recompute"]),
    }


def _to_next(pool: EnginePool, sample: Sample) -> float:
    """Seconds until it has a token more."""
    have, start = len(sample.output_ids), time.perf_counter()
    pool.add([sample])
    while len(sample.output_ids) == have:
        pool.step()
    return time.perf_counter() - start


def overhead_row(config: PoolBenchConfig, where: str) -> dict[str, Any]:
    """The engine alone is in this process; the pool is of that one, or of one like it on Ray, which rests meanwhile."""
    from longtail.partial_rollout.pool import EnginePool

    settings = {"max_num_seqs": config.live, "max_num_batched_tokens": max(512, config.live), "max_model_len": 256}
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "pool": []}
    engine = _factory(config, **settings)(name="engine")
    with _pool(config, 1, where, **settings) if where == "ray" else contextlib.nullcontext() as pool:
        for repeat in range(config.repeats + 1):
            for what in ("alone", "pool") if repeat % 2 else ("pool", "alone"):
                driven = engine if what == "alone" else pool or EnginePool([engine])
                took = _decode(driven, config, repeat)
                if repeat:
                    found[what].append(took)
    steps = {what: [wall for wall, _ in runs] for what, runs in found.items()}
    return {
        "measure": "overhead",
        "live": config.live,
        **_shares(found),
        "pool_over_alone": ratios(steps["pool"], steps["alone"]),
    }


def _shares(found: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    return {
        "step_seconds": {what: quantiles([wall for wall, _ in runs]) for what, runs in found.items()},
        "outside_steps": {what: quantiles([1 - own / wall for wall, own in runs]) for what, runs in found.items()},
    }


def _decode(engine: Any, config: PoolBenchConfig, repeat: int) -> tuple[float, float]:
    """-> seconds of a step, and of these in the engine's step."""
    spent: list[float] = []

    def listen(event: Event) -> None:
        if event.kind == "step":
            spent.append(event.duration)

    samples = [_sample(f"d{repeat}-{i}", 16, 200) for i in range(config.live)]
    engine.add(samples)
    while any(not sample.output_ids for sample in samples):
        engine.step()
    engine.listener = listen
    start = time.perf_counter()
    for _ in range(config.steps):
        engine.step()
    took = time.perf_counter() - start
    engine.listener = lambda event: None
    engine.abort([sample.id for sample in samples])
    if len(spent) != config.steps:
        raise BenchFailed(f"{len(spent)} steps were told of, {config.steps} were made")
    return took / config.steps, sum(spent) / config.steps


def table(result: dict[str, Any]) -> Table:
    """Medians over the repeats (spreads are in the JSON)."""
    from rich.table import Table

    out = Table(title="A pool of engines, medians; ratios pair by pair", title_justify="left")
    for header in ("measure", "where", "", "median"):
        out.add_column(header, justify="right" if header == "median" else "left", no_wrap=True)
    for row in result["rows"]:
        out.add_section()
        kind = f"{row['measure']} {row.get('tokens', row.get('live'))}"
        cells = []
        for name, values in (row.get("seconds") or row.get("step_seconds") or {}).items():
            cells.append((f"{name} (ms)", f"{1000 * values['p50']:.1f}"))
        for name, values in row.get("outside_steps", {}).items():
            cells.append((f"{name}: outside steps", f"{values['p50']:.2%}"))
        for name in ("move_over_recompute", "save_and_move_over_recompute", "pool_over_alone"):
            if name in row:
                cells.append((name.replace("_", " "), f"{row[name]['p50']:.3f}"))
        for number, (name, text) in enumerate(cells):
            out.add_row("" if number else kind, "" if number else row["where"], name, text)
    return out
