"""The models of a training run: the engine's, the policy, its reference, and what is left at the end."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longtail.bench import engines
from longtail.bench.train_config import RunConfig
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.partial_rollout.engines.native.loader import load_model
from longtail.trainer_adapter.policy import Policy, Reference, TransformersPolicy, freeze_parameters


def make_engine(config: RunConfig, model: Any, source: str) -> Any:
    """model: loaded from source, from where vLLM loads it once more."""
    native = config.engine == "native"
    return engines.make_engine(
        config.engine,
        model if native else source,
        numerics=config.numerics,
        threads=config.threads if native else None,
        max_num_seqs=config.num_slots,
        max_num_batched_tokens=max(512, config.num_slots),
        kv_cache_bytes=config.kv_cache_bytes,
        drafter=config.drafter,
    )


def make_policy(config: RunConfig, model: Any, engine: NativeEngine) -> tuple[Policy, Reference | None]:
    """And the reference of a KL penalty: the weights that the run starts with. model: taken over; engine: with its
    weights."""
    if config.lora:
        from longtail.trainer_adapter.lora import BaseReference, adapted

        model = adapted(model, rank=config.lora, seed=config.seed)
        policy = _policy(config, model, engine)
        return policy, BaseReference(model, policy) if config.kl_coef else None
    reference = _policy(config, copy.deepcopy(model), engine) if config.kl_coef else None
    if config.freeze is not None:
        freeze_parameters(model, config.freeze)
    return _policy(config, model, engine), reference


def _policy(config: RunConfig, model: Any, engine: NativeEngine) -> Policy:
    if config.policy_kind == "exact":
        from longtail.partial_rollout.engines.native.training import ExactPolicy

        plain = model.get_base_model() if config.lora else model  # with its adapters
        return ExactPolicy(plain, engine, checkpointing=config.gradient_checkpointing)
    if config.lora:
        from longtail.trainer_adapter.lora import LoraPolicy

        return LoraPolicy(model, gradient_checkpointing=config.gradient_checkpointing)
    return TransformersPolicy(model, gradient_checkpointing=config.gradient_checkpointing)


def export(source: str, weights: Mapping[str, torch.Tensor], tokenizer: Any, directory: Path) -> None:
    """Writes the model with these weights as `from_pretrained` reads it, whole or not at all."""
    model, _ = load_model(source)
    missing, unknown = model.load_state_dict(weights, strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    if unknown or set(missing) - tied:
        raise ValueError(f"weights: {[*unknown, *missing][0]} does not fit {source}")
    fresh = directory.with_name(f".new-{directory.name}")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    if tokenizer is not None:
        tokenizer.save_pretrained(fresh)
    if directory.exists():
        shutil.rmtree(directory)
    fresh.rename(directory)
