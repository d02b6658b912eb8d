"""Rollouts to train a drafter on: from a store, from a file of JSON lines, or made on the spot."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    group: str
    """Samples of one group share a prompt: they are held out together."""
    prompt_ids: list[int]
    output_ids: list[int]
    version: int = 0
    """Newest policy version among its tokens."""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]


def load_rollouts(source: str | Path) -> list[Rollout]:
    """Every sample with output of a store's directory (read beside a run that has it open), or of a file with a JSON
    object a line: prompt_ids, output_ids, and if known group and version. ValueError that names what is wrong."""
    path = Path(source)
    if path.is_dir():
        return _from_store(path)
    if not path.is_file():
        raise ValueError(f"samples: {path} is neither a store's directory nor a file of JSON lines")
    rollouts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            prompt, output = _ids(fields["prompt_ids"]), _ids(fields["output_ids"])
            group, version = str(fields.get("group", tuple(prompt))), int(fields.get("version", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"samples: {path}, line {number}: {error!r}; a line is a JSON object with prompt_ids and output_ids"
            ) from error
        if output:
            rollouts.append(Rollout(group, prompt, output, version))
    return _some(rollouts, path)


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(i, int) and i >= 0 for i in value):
        raise ValueError("token ids must be a list of integers of at least 0")
    return value


def _from_store(directory: Path) -> list[Rollout]:
    from longtail.partial_rollout.database import Database

    database = Database(directory, read_only=True)
    try:
        groups, _ = database.load("true")  # what is damaged is cut off before the damage
    finally:
        database.close()
    rollouts = [
        Rollout(group.id, list(s.prompt_ids), list(s.output_ids), max(s.versions, default=0))
        for group in groups
        for s in group.samples
        if s.output_ids and s.prompt_ids
    ]
    return _some(rollouts, directory)


def _some(rollouts: list[Rollout], source: Path) -> list[Rollout]:
    if not rollouts:
        raise ValueError(f"samples: {source} holds no sample with output tokens")
    return rollouts


def generate(
    target: str | Path,
    prompts: int,
    *,
    tasks: str = "gsm",
    group_size: int = 8,
    max_tokens: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Rollout]:
    """Groups of samples of `bench/tasks.py` prompts, made by the native engine."""
    from longtail import Group, NativeEngine, SamplingParams
    from longtail.bench.models import needed_tokenizer
    from longtail.bench.tasks import load_tasks, prompt_ids

    tokenizer = needed_tokenizer(target)
    engine = NativeEngine(target, max_num_seqs=32, numerics="fast")
    params = SamplingParams(n=group_size, temperature=temperature, max_tokens=max_tokens, seed=seed)
    groups = [Group.from_prompt(t.id, prompt_ids(t, tokenizer), params) for t in load_tasks(tasks, prompts, seed)]
    engine.add([s for g in groups for s in g.samples])
    while engine.has_work:
        engine.step()
        progress(f"generating: {engine.stats().num_output_tokens:,} tokens")
    return [Rollout(g.id, list(s.prompt_ids), list(s.output_ids)) for g in groups for s in g.samples if s.output_ids]


def hold_out(rollouts: Sequence[Rollout], share: float, seed: int) -> tuple[list[Rollout], list[Rollout]]:
    """-> (training, held out): whole groups, shuffled; at least one held out where there are two."""
    names = sorted({r.group for r in rollouts})
    random.Random(seed).shuffle(names)
    count = min(max(round(share * len(names)), 1), len(names) - 1)
    out = set(names[:count])
    train = [r for r in rollouts if r.group not in out]
    random.Random(seed + 1).shuffle(train)
    return train, [r for r in rollouts if r.group in out]
