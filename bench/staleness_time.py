"""What an update costs an engine that computes its KV again, against one that keeps it.

Two engines of the same settings hold the same live samples. Each gets an update, and from its end the time is taken
until every sample has one token more: with `keep` that is a decode step, with `recompute` also the KV of all known
tokens. Then some steps are timed that only decode. Engines take turns; ratios are taken within a pair. Samples share
no prompt: of a group, `recompute` computes the prompt once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from longtail.bench.engine_bench import BenchFailed, quantiles
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.native.engine import NativeEngine

DECODE_STEPS = 6
"""Timed after each update; the median counts."""
Clocked = dict[str, float]
"""Seconds: wall and cpu (of all threads)."""


def time_rows(
    engines: Mapping[str, NativeEngine],
    weights: Mapping[str, torch.Tensor],
    *,
    live: int,
    lengths: tuple[int, ...],
    iteration: tuple[int, ...],
    repeats: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row a length. engines: "recompute" and "keep"; live: samples; lengths: known tokens of each at the update;
    iteration: tokens that a sample decodes between two updates, to take shares of."""
    rows = []
    for length in lengths:
        progress(f"{length} tokens")
        rows.append(_row(engines, weights, live, length, iteration, repeats))
    return rows


def _row(
    engines: Mapping[str, NativeEngine],
    weights: Mapping[str, torch.Tensor],
    live: int,
    length: int,
    iteration: tuple[int, ...],
    repeats: int,
) -> dict[str, Any]:
    rounds: list[dict[str, dict[str, Clocked]]] = []
    for engine in engines.values():
        engine.add(_samples(engine.decoder.spec.vocab_size, live, length - 1))
        _each_one_more(engine)  # the token that makes it `length`
    for repeat in range(repeats + 1):  # the first round warms up
        order = sorted(engines, reverse=repeat % 2 == 0)
        rounds.append({name: _update(engines[name], weights, name, live) for name in order})
    for engine in engines.values():
        engine.abort([s.id for s in _running(engine)])
        engine.reset_prefix_cache()
    row: dict[str, Any] = {"live": live, "length": length}
    for clock in ("wall", "cpu"):
        recompute, keep, step, extra, decoded, share = [], [], [], [], [], []
        for pair in rounds[1:]:
            recompute.append(pair["recompute"]["update"][clock])
            keep.append(pair["keep"]["update"][clock])
            step.append((pair["recompute"]["step"][clock] + pair["keep"]["step"][clock]) / 2)
            extra.append(recompute[-1] - keep[-1])
            decoded.append(live * extra[-1] / step[-1])
            share.append(extra[-1] / (live * length) / (step[-1] / live))
        named = {"recompute": recompute, "keep": keep, "decode_step": step, "extra": extra}
        row[clock] = {f"{name}_seconds": quantiles(values) for name, values in named.items()}
        row[clock]["decoded_tokens"] = quantiles(decoded)
        row[clock]["recompute_over_decode"] = quantiles(share)
        row[clock]["share_of_iteration"] = {
            str(n): quantiles([e / (e + n * s) for e, s in zip(extra, step, strict=True)]) for n in iteration
        }
    return row


def _update(engine: NativeEngine, weights: Mapping[str, torch.Tensor], name: str, live: int) -> dict[str, Clocked]:
    gc.collect()
    before = engine.stats().num_recomputed_tokens
    known = sum(s.num_tokens for s in _running(engine))
    engine.update_weights(weights, engine.version + 1)
    update = _timed(lambda: _each_one_more(engine))
    computed = engine.stats().num_recomputed_tokens - before
    if computed != (known - live if name == "recompute" else 0):
        raise BenchFailed(f"after an update with {name}, {computed} tokens of {known - live} were computed again")
    steps = [_timed(engine.step) for _ in range(DECODE_STEPS)]
    return {
        "update": update,
        "step": {clock: sorted(s[clock] for s in steps)[len(steps) // 2] for clock in ("wall", "cpu")},
    }


def _timed(work: Callable[[], Any]) -> Clocked:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def _samples(vocabulary: int, live: int, length: int) -> list[Sample]:
    prompts = torch.randint(vocabulary, (live, length), generator=torch.Generator().manual_seed(length)).tolist()
    params = SamplingParams(temperature=1.0, max_tokens=1 << 20, ignore_eos=True)
    return [Group.from_prompt(f"live-{length}-{i}", prompt, params).samples[0] for i, prompt in enumerate(prompts)]


def _each_one_more(engine: NativeEngine) -> None:
    """Until every sample has made at least a token more."""
    wanted = {s.id: len(s.output_ids) for s in _running(engine)}
    while any(len(s.output_ids) == wanted[s.id] for s in _running(engine)):
        engine.step()


def _running(engine: NativeEngine) -> list[Sample]:
    return [seq.sample for seq in (*engine.scheduler.running, *engine.scheduler.waiting)]
