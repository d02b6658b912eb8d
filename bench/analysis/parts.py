"""Where the seconds of a run went."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from longtail.bench.analysis.base import pieces, split_runs, table

GENERATE = ("prefill", "decode", "verify", "drafting", "sampling", "scheduling")
SWITCH = ("save", "restore", "update")
PARTS = (*GENERATE, *SWITCH, "grade", "wait", "train", "evaluate", "checkpoint", "idle")
"""Columns of `breakdown`, which add up to `wall`."""
TIMED = ("step", *SWITCH, "grade", "wait", "train", "evaluate", "checkpoint")
"""Kinds of events that take time of the run."""


def breakdown(df: pd.DataFrame) -> pd.DataFrame:
    """Where the seconds of each run went: run, wall, the columns of PARTS (they add up to wall), and the sums generate
    (of GENERATE) and switch (of SWITCH).

    - prefill, decode, verify: forward passes. A step's model time is split by the share of its query tokens: those of
      prompts and re-prefilled outputs, those of drafts (verify), and the others. That overstates prefill and verify
      where decode is bound by reading KV and weights.
    - drafting: making drafts. sampling: processing logits and drawing. scheduling: the rest of the steps.
    - save, restore: KV of samples. update: weights. grade, train, evaluate, checkpoint: as emitted. wait: for graders
      and environments with nothing to run; what they do while others decode takes no time of the run.
    - idle: the run's wall time in none of these.

    A second counts once: where events overlap, the one that started last has it (a restore inside a step is restore).
    """
    result = []
    for run in split_runs(df):
        parts = dict.fromkeys(PARTS, 0.0)
        events = list(run.of(*TIMED))
        for event, seconds in zip(events, own_seconds(events, run.start, run.end), strict=True):
            if event.kind != "step":
                parts[event.kind] += seconds
                continue
            for part, share in split_step(event, seconds).items():
                parts[part] += share
        wall = run.end - run.start
        parts["idle"] = max(0.0, wall - math.fsum(parts.values()))
        sums = {"generate": math.fsum(parts[p] for p in GENERATE), "switch": math.fsum(parts[p] for p in SWITCH)}
        result.append({"run": run.name, "wall": wall, **parts, **sums})
    return table(result, ["run", "wall", *PARTS, "generate", "switch"])


def own_seconds(events: list[Any], start: float, end: float) -> list[float]:
    """For each event the seconds of [start, end] in which it is the last started of those going on."""
    seconds = [0.0] * len(events)
    for begin, stop, owner in pieces(events, start, end):
        if owner >= 0:
            seconds[owner] += stop - begin
    return seconds


def split_step(event: Any, seconds: float) -> dict[str, float]:
    """A step's own seconds by GENERATE; what was measured in it shrinks in proportion if other events took part of it.
    """
    measured = event.model_seconds + event.sample_seconds + event.draft_seconds
    scale = min(1.0, seconds / measured) if measured > 0 else 0.0
    tokens = event.num_tokens or 1
    prefill = event.num_prefill_tokens / tokens
    verify = min(event.num_draft_tokens / tokens, 1 - prefill)
    model = event.model_seconds * scale
    return {
        "prefill": model * prefill,
        "decode": model * (1 - prefill - verify),
        "verify": model * verify,
        "drafting": event.draft_seconds * scale,
        "sampling": event.sample_seconds * scale,
        "scheduling": max(0.0, seconds - measured * scale),
    }


