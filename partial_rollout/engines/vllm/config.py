"""Settings of the vLLM engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from longtail.kv_manager.encoding import Encoding
from longtail.partial_rollout.engines.native.config import KVOnUpdate, LogprobsMode
from longtail.partial_rollout.engines.vllm.drafters import speculative_config

SamplingMode = Literal["counter", "vllm"]
CoreKind = Literal["local", "process"]

OWN_ARGS = {
    "model": "give it as the first argument",
    "max_num_seqs": "use max_num_seqs",
    "max_num_batched_tokens": "use max_num_batched_tokens",
    "max_model_len": "use max_model_len",
    "block_size": "use block_size",
    "kv_cache_memory_bytes": "use kv_cache_bytes",
    "enable_prefix_caching": "use enable_prefix_caching",
    "logprobs_mode": "use logprobs_mode",
    "dtype": "use dtype",
    "enforce_eager": "use enforce_eager",
    "speculative_config": "use drafter",
    "async_scheduling": "it is off: the engine needs every token before the next step",
    "worker_extension_cls": "the engine has its own",
    "skip_tokenizer_init": "use tokenizer",
    "tokenizer": "use tokenizer",
    "kv_transfer_config": "use save_kv and tiers",
    "weight_transfer_config": "the engine has its own; use update_weights",
    "scheduler_cls": "the engine has its own where the core has a process",
}
"""EngineArgs that the engine sets, and what to do about them."""

ONE_ONLY = {
    "pipeline_parallel_size": "a step must return the tokens of the pass that it started; use tensor_parallel_size",
    "data_parallel_size": "replicas are engines of their own; put them side by side in a pool",
}
"""EngineArgs that may not be above 1, and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Checked at construction."""

    core: CoreKind = "local"
    """local: vLLM's core is in this process, and makes a pass when `step` asks for one. process: it has a process of
    its own (vLLM's AsyncLLM) and makes passes without being asked; `step` takes what has come."""
    sampling: SamplingMode = "counter"
    """counter: tokens are drawn with noise that is a function of (seed, output position, token id), with the parameters
    and counts of the whole response: a cut, a batch or a draft changes nothing but by the model's rounding. vllm: by
    vLLM's own sampler, whose seeds and output-only counts start again at every resume."""
    max_num_seqs: int = 32
    """Slots: samples that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one forward pass; longer prompts are computed in chunks."""
    max_model_len: int | None = None
    """Prompt and output of one sample; None: what the model was made for."""
    block_size: int | None = None
    """Tokens of a KV block; None: 32 on a CPU (where it must be a multiple of it), else vLLM's own choice."""
    kv_cache_bytes: int | None = None
    """Memory for KV blocks; None: 2 GiB on a CPU, else vLLM's share of the GPU."""
    enable_prefix_caching: bool = True
    """Share computed prefixes: the prompt of a group, and what a paused sample left behind."""
    logprobs_mode: LogprobsMode = "processed"
    """processed: under the distribution that was sampled from (after penalties, temperature, truncation); raw: under
    softmax of the model's logits."""
    kv_on_update: KVOnUpdate = "recompute"
    """After a weight update: compute unfinished samples' KV again, or keep what older weights made."""
    fingerprint_versions: bool = False
    """Count saved KV of every version as made by other weights, equal or not: see the native engine's."""
    save_kv: bool = True
    """Pauses save the KV through a connector of ours, so that samples go on without computing it again, also in another
    process. False: what vLLM's prefix cache still has of it, is used."""
    snapshot_encoding: Encoding = "exact"
    """How saved KV is written; "int8", "fp8": smaller and not exact."""
    dtype: str | None = None
    """None: float32 on a CPU, else the model's own."""
    enforce_eager: bool | None = None
    """None: True on a CPU, where compiling takes minutes, else False."""
    batch_invariant: bool = False
    """Have vLLM use kernels whose rounding does not depend on the batch (its VLLM_BATCH_INVARIANT), on GPUs that have
    them: then a sample is bit-identical whatever runs beside it. A CPU has none; it differs by rounding."""
    drafter: str | None = None
    """What drafts: one of longtail's by name ("group", "ngram", "group>ngram"), which can be changed or turned off at
    any moment (`VllmEngine.use_drafter`), or a method of vLLM ("vllm-ngram", "suffix", "model:DIR", "eagle:DIR",
    "mtp"), which is there for good. None: nothing, for good."""
    max_drafts: int = 8
    """Of a sample and step, at the most; vLLM keeps room for as many."""
    speculative: Mapping[str, Any] | None = None
    """vLLM's own speculative_config, a method and its fields, in place of `drafter`."""
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of vLLM's EngineArgs."""

    def __post_init__(self) -> None:
        choices = {
            "core": ("local", "process"),
            "sampling": ("counter", "vllm"),
            "logprobs_mode": ("processed", "raw"),
            "kv_on_update": ("recompute", "keep"),
            "snapshot_encoding": ("exact", "int8", "fp8"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "block_size",
            "kv_cache_bytes",
            "max_drafts",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "not every running sample could decode in a step; raise it or lower max_num_seqs"
            )
        if self.drafter is not None:
            if self.speculative is not None:
                raise ValueError("speculative: it says what drafts, and drafter does so too; leave one of them out")
            speculative_config(self.drafter, self.max_drafts)  # ValueError for a name that means nothing
        for name in self.engine_args:
            if name in OWN_ARGS:
                raise ValueError(f"engine_args: {name} is not for here: {OWN_ARGS[name]}")
            if name in ONE_ONLY and self.engine_args[name] != 1:
                raise ValueError(f"engine_args: {name} above 1 is not supported: {ONE_ONLY[name]}")
