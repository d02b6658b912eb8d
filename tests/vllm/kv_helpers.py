"""Tiny models on disk, vLLM engines on them, samples, and their undisturbed continuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longtail import Group, Sample, SamplingParams
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
