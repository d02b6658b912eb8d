"""Tiny models on disk, vLLM engines on them, samples, and their undisturbed continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longtail import Group, Sample, SamplingParams
from longtail.events import Event
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.snapshot import Snapshot
from longtail.kv_manager.tier_config import TierConfig
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.engines.vllm import VllmEngine
from longtail.sample import Timings

BLOCK = 32
SETTINGS: dict[str, Any] = {
    "block_size": BLOCK,
    "kv_cache_bytes": 16 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
}
LAYOUT = Layout("kv", 2, 2, BLOCK, 32)
LONG_PROMPT = tuple(range(10, 80))
"""Two full blocks, and a part of a third."""


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # the smallest of vLLM's CPU kernels
            max_position_embeddings=512,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=True,
        )
    ).eval()


def save_model(directory: Path, seed: int = 0) -> Path:
    make_model(seed).save_pretrained(directory)
    return directory


def group(name: str, prompt: Iterable[int] = LONG_PROMPT, **params: Any) -> Group:
    fields = {"n": 1, "max_tokens": 60, "temperature": 1.0, "ignore_eos": True, "seed": 7} | params
    return Group.from_prompt(name, tuple(prompt), SamplingParams(**fields))


def sample(name: str, prompt: Iterable[int] = LONG_PROMPT, **params: Any) -> Sample:
    return group(name, prompt, **params).samples[0]


def _fresh(one: Sample) -> Sample:
    return dataclasses.replace(
        one, output_ids=[], logprobs=[], versions=[], segments=[], status="waiting", timings=Timings(), snapshot=None
    )


def copy_of(one: Sample) -> Sample:
    """As another process would have it: its tokens."""
    return dataclasses.replace(
        one,
        output_ids=list(one.output_ids),
        logprobs=list(one.logprobs),
        versions=list(one.versions),
        segments=[dataclasses.replace(segment) for segment in one.segments],
        snapshot=None,
    )


def run(engine: VllmEngine, steps: int | None = None) -> None:
    while engine.has_work and steps != 0:
        engine.step()
        engine.check_integrity()
        if steps is not None:
            steps -= 1


def plain(engine: VllmEngine, samples: Iterable[Sample]) -> dict[str, Sample]:
    """The same samples, run alone and undisturbed."""
    out = {}
    for one in samples:
        fresh = _fresh(one)
        engine.reset_prefix_cache()
        engine.add([fresh])
        run(engine)
        out[fresh.id] = fresh
    engine.reset_prefix_cache()
    return out


def assert_same(one: Sample, expected: Sample, tolerance: float = 1e-4) -> None:
    assert one.output_ids == expected.output_ids, one.id
    assert one.finish_reason == expected.finish_reason
    worst = max((abs(a - b) for a, b in zip(one.logprobs, expected.logprobs, strict=True)), default=0.0)
    assert worst <= tolerance, (one.id, worst)
    one.check_integrity()


def use_tiers(engine: VllmEngine, config: TierConfig) -> Tiers:
    assert engine.saver is not None
    engine.saver.tiers = tiers = Tiers(config)
    return tiers


def paused(engine: VllmEngine, samples: list[Sample], steps: int) -> list[Snapshot]:
    """Runs them so far, and pauses them; what the prefix cache has of them is forgotten."""
    engine.add(samples)
    run(engine, steps)
    engine.pause()
    engine.reset_prefix_cache()
    return [one.snapshot for one in samples]


class Seen:
    """What an engine did between two looks."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.before, self.events = engine, engine.stats(), list[Event]()
        engine.listener = self.events.append

    @property
    def restores(self) -> list[tuple[int, str]]:
        return [(e.num_tokens, e.detail) for e in self.events if e.kind == "restore"]

    def grew(self, name: str) -> int:
        return int(getattr(self.engine.stats(), name) - getattr(self.before, name))

