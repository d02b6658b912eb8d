"""How good a policy is on prompts that it is not trained on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from longtail.bench.train_tasks import Prompt
from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.grading import Grade, GradeRequest
from longtail.sample import Group
from longtail.sampling_params import SamplingParams

Grading = Callable[[Sequence[GradeRequest]], list[Grade]]


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    grade: Grading,
    decode: Callable[[Sequence[int]], str] | None,
    seed: int = 0,
) -> dict[str, Any]:
    """params: of the sampled responses, params.n to a prompt; one more is greedy. The seeds are the same in every
    evaluation, so that two policies are compared on the same noise. What runs in the engine is paused meanwhile.

    -> sampled and greedy: mean rewards (a response without a grade counts 0); tokens: output tokens; ungraded."""
    kinds = {"sampled": params, "greedy": dataclasses.replace(params, n=1, temperature=0.0)}
    groups = {
        name: [
            Group.from_prompt(f"{name}/{i}", p.token_ids, dataclasses.replace(own, seed=seed + i), task=p.task)
            for i, p in enumerate(prompts)
        ]
        for name, own in kinds.items()
    }
    held = engine.pause()
    engine.add(s for own in groups.values() for group in own for s in group.samples)
    while engine.has_work:
        engine.step()
    if (reset := getattr(engine, "reset_prefix_cache", None)) is not None:
        reset()  # what is generated next must not depend on whether this came before
    engine.add(held)
    found: dict[str, Any] = {}
    tokens = ungraded = 0
    for name, own in groups.items():
        samples = [(s, group.task) for group in own for s in group.samples]
        text = [decode(s.output_ids) if decode is not None else "" for s, _ in samples]
        grades = grade([GradeRequest.of(s, task, t) for (s, task), t in zip(samples, text, strict=True)])
        rewards = [0.0 if one.reward is None else one.reward for one in grades]
        found[name] = math.fsum(rewards) / len(rewards)
        tokens += sum(len(s.output_ids) for s, _ in samples)
        ungraded += sum(one.reward is None for one in grades)
    return found | {"tokens": tokens, "ungraded": ungraded, "prompts": len(prompts)}
