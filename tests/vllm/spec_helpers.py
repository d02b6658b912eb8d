"""A tiny model on disk, vLLM's own LLM on it, and requests driven step by step."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longtail.bench.spec_audit_engine import tiny_model
from longtail.bench.spec_audit_vllm import TINY
from longtail.partial_rollout.engines.vllm import correction
from longtail.partial_rollout.engines.vllm.drafters import speculative_config

MAX_DRAFTS = 4
MAX_MODEL_LEN = 128
_numbers = itertools.count()


def save_tiny(directory: Path) -> Path:
    model, tokenizer = tiny_model(**TINY[True])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def vllm_on(model: Path, drafter: str | None, **settings: Any) -> Iterator[Any]:
    """vLLM with its faults corrected; drafter: as in `speculative_config`."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    correction.correct()
    fields = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 8 << 20,
        "block_size": 32,
        "logprobs_mode": "processed_logprobs",
        "per_request_spec_decode_metrics": "summary",
        "speculative_config": speculative_config(drafter, MAX_DRAFTS),
    } | settings
    llm = LLM(model=str(model), **fields)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        vars(llm).clear()  # whoever still holds it, the engine goes now
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclasses.dataclass(slots=True)
class Made:
    """One request's outcome."""

    tokens: list[int]
    request: str
    """Its id inside the engine."""
    metrics: Any
    """vLLM's own account of its drafts."""


def add(llm: Any, prompt: Sequence[int], **fields: Any) -> tuple[str, str]:
    """A request for tokens, greedy unless said otherwise. -> (its name, its id inside the engine)"""
    import vllm

    name = f"request-{next(_numbers)}"
    params = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False} | fields
    return name, llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, vllm.SamplingParams(**params))


def finish(llm: Any, names: Sequence[tuple[str, str]]) -> list[Made]:
    done: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        done |= {out.request_id: out.outputs[0] for out in llm.llm_engine.step() if out.finished}
    return [Made(list(done[name].token_ids), inside, done[name].spec_decode_metrics) for name, inside in names]


def run(llm: Any, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Made]:
    return finish(llm, [add(llm, prompt, **fields) for prompt in prompts])
