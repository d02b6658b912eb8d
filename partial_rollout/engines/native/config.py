"""Settings of the native engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from longtail.kernels._numba import LANES

LogprobsMode = Literal["processed", "raw"]
KVOnUpdate = Literal["recompute", "keep"]
SnapshotEncoding = Literal["exact", "int8", "fp8"]
VerificationMode = Literal["match", "rejection"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """Checked at construction."""

    numerics: Literal["exact", "fast"] = "exact"
    """exact: tokens and log-probabilities are bit-identical whatever else is in the batch; fast: up to rounding."""
    threads: int | None = None
    """CPU threads of torch and numba (both are process-wide settings); None leaves them as they are."""
    max_num_seqs: int = 32
    """Slots: samples that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens of one forward pass; longer prompts are computed in chunks."""
    max_model_len: int | None = None
    """Prompt and output of one sample; None: what the model was made for."""
    block_size: int = 32
    """Tokens of a KV block; a multiple of 16."""
    kv_cache_bytes: int = 2 << 30
    """Memory for KV blocks (touched only as it is used)."""
    enable_prefix_caching: bool = True
    """Share computed prefixes, above all the prompt of a group."""
    preemption: Literal["snapshot", "recompute"] = "snapshot"
    """What becomes of the KV of a sample that loses its slot."""
    snapshot_encoding: SnapshotEncoding = "exact"
    """exact: a restored sample goes on with the same bits; int8, fp8: a quarter of the bytes, and it may leave the path
    it would have taken (its segments say "approximate"). int8 is closest where the numbers of a head are of one size,
    fp8 where some are much larger than the others. Latents, states and routing are always exact."""
    logprobs_mode: LogprobsMode = "processed"
    """processed: under the distribution that was sampled from (after penalties, temperature, truncation); raw: under
    softmax of the model's logits."""
    kv_on_update: KVOnUpdate = "recompute"
    """After a weight update: compute unfinished samples' KV again, or keep what older weights made."""
    fingerprint_versions: bool = False
    """Count KV of every version as made by other weights, equal or not: to measure what updates cost while the weights,
    and so the samples, stay the same."""
    record_routing: bool = False
    """Keep the experts that computed each token (mixture-of-experts models), as `Sample.routed_experts`, for a trainer
    that replays them (trainer_adapter/routing.py). They lie in the cache beside the KV: 4 bytes for each."""
    verification: VerificationMode = "match"
    """How drafts are verified. match: a draft is accepted where it equals the token that the target samples there; a
    sample is the same with any drafter or none. rejection: more drafts of a model are accepted (the most that is
    possible), and samples have the same distribution; which one comes depends on the drafts, their number included."""
    fused: bool | None = None
    """None: the fused path where the architecture is known, else transformers' attention interface; False forces the
    latter."""

    def __post_init__(self) -> None:
        choices = {
            "numerics": ("exact", "fast"),
            "preemption": ("snapshot", "recompute"),
            "snapshot_encoding": ("exact", "int8", "fp8"),
            "logprobs_mode": ("processed", "raw"),
            "kv_on_update": ("recompute", "keep"),
            "verification": ("match", "rejection"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("threads", "max_model_len"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 or None, not {getattr(self, name)}")
        if self.block_size % LANES:
            raise ValueError(f"block_size must be a multiple of {LANES}, not {self.block_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "not every running sample could decode in a step; raise it or lower max_num_seqs"
            )
