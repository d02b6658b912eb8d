"""Samples of several turns and a scripted environment: what it answers is a function of the tokens alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.partial_rollout.conftest import VOCAB, EngineMaker, assert_same, group, make_model, prompt
from tests.partial_rollout.test_hybrid import make_model as make_hybrid
from tests.partial_rollout.test_moe import make_model as make_moe
from tests.partial_rollout.test_windows import make_model as make_windowed

from longtail import Group, NativeEngine, Sample
from longtail.sample import OBSERVATION

STOPS = tuple(range(3, 60))
"""One token of nine ends a turn."""
TURNS = 3


def turn_group(name: str, ids: Sequence[int], **params: Any) -> Group:
    made = group(name, ids, **({"stop_token_ids": STOPS, "max_tokens": 120} | params))
    for sample in made.samples:
        sample.multi_turn = True
    return made


def batch() -> list[Sample]:
    """Prompts and turns that end in different places of a block; greedy, penalised and drawn."""
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "min_tokens": 20},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "max_tokens": 60},
    ]
    groups = [turn_group(f"g{i}", prompt(9 + 12 * i, i), n=2, seed=i, **p) for i, p in enumerate(params)]
    return [sample for g in groups for sample in g.samples]


def turns_of(sample: Sample) -> int:
    """Observations so far."""
    return sum(segment.version == OBSERVATION for segment in sample.segments)


def answer(sample: Sample) -> list[int]:
    """1 to 21 tokens, from one to more than a block, stop tokens and EOS among them."""
    draw = np.random.default_rng([len(sample.output_ids), *sample.output_ids[-3:]])
    tokens: list[int] = draw.integers(2, VOCAB, int(draw.integers(1, 22))).tolist()
    if len(tokens) > 2:
        tokens[-2:] = [STOPS[0], 2]
    return tokens


def play(
    engine: NativeEngine,
    samples: Sequence[Sample],
    turns: int = TURNS,
    *,
    between: Callable[[Sample], object] = lambda sample: None,
) -> None:
    """Runs them to their ends, each with so many observations at most. between: what happens to a parked sample."""
    engine.add(samples)
    while engine.has_work:
        out = engine.step()
        engine.check_integrity()
        for sample in out.turns:
            assert (sample.status, sample.turn_ended) == ("paused", True)
            if turns_of(sample) == turns:
                end(sample)
                continue
            between(sample)
            sample.append_observation(answer(sample))
            engine.add([sample])
    for sample in samples:
        assert sample.is_done
        sample.check_integrity()


def end(sample: Sample) -> None:
    """What a rollout does when the environment is done."""
    sample.status, sample.finish_reason, sample.turn_ended, sample.snapshot = "finished", "stop", False, None


HYBRID = ("qwen3_next", "lfm2", "bamba")


@functools.cache
def model_of(kind: str) -> Any:
    if kind in HYBRID:
        return make_hybrid(kind)
    if kind in ("gemma3", "mistral"):
        return make_windowed(kind)
    return make_moe(kind) if kind == "qwen3_moe" else make_model(kind)


@functools.cache
def undisturbed(make_engine: EngineMaker, kind: str) -> list[Sample]:
    """The batch on a kind of model, where the KV was dropped wherever a turn ended and computed again from the first
    token on: one sample at a time, without a prefix cache."""
    engine = make_engine(model_of(kind), enable_prefix_caching=False)
    samples = batch()
    for sample in samples:
        play(engine, [sample], between=lambda sample: setattr(sample, "snapshot", None))
    assert sum(turns_of(s) == TURNS for s in samples) >= len(samples) // 2
    assert engine.stats().num_restored_tokens == engine.stats().num_cached_tokens == 0
    return samples


def all_same(got: list[Sample], want: list[Sample]) -> None:
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
        assert a.versions == b.versions
        assert [(s.start, s.end) for s in a.segments if s.version == OBSERVATION] == [
            (s.start, s.end) for s in b.segments if s.version == OBSERVATION
        ]
