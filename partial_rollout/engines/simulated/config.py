"""Settings of the simulated engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from longtail.partial_rollout.engines.simulated.cost import check_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """Checked at construction. Names and meanings are the native engine's where it has them."""

    slots: int = 32
    """Samples that run at once."""
    max_num_batched_tokens: int = 8192
    """Tokens of one forward pass; longer prompts are computed in chunks."""
    max_model_len: int | None = None
    """Prompt and output of one sample; None: any length."""
    kv_tokens: int | None = None
    """Tokens whose KV fits; None: any number."""
    enable_prefix_caching: bool = True
    """A group's prompt is computed once, and held once, while a sample of it runs."""
    preemption: Literal["snapshot", "recompute"] = "snapshot"
    """What becomes of the KV of a sample that loses its slot."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """After a weight update: compute unfinished samples' KV again, or keep what older weights made."""
    update_seconds: float = 0.0
    """Of a weight update."""
    save_seconds: float = 0.0
    """Of saving the KV of a token,"""
    restore_seconds: float = 0.0
    """and of bringing it back. No pass runs meanwhile."""
    transfer_seconds: float = 0.0
    """Of a token that another engine saved, besides."""
    bytes_per_token: int = 0
    """Of saved KV, for what counts the bytes of snapshots."""
    vocab_size: int = 32_000
    materialise: bool = True
    """Write tokens into the samples' lists, as other engines do: a step then costs a little for each running sample.
    False: `output_ids`, `logprobs` and `versions` are sequences that compute what is read of them (`records.Column`);
    a step costs what its events cost, and a sample the same whatever its length."""

    def __post_init__(self) -> None:
        choices = {"preemption": ("snapshot", "recompute"), "kv_on_update": ("recompute", "keep")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("slots", "max_num_batched_tokens", "vocab_size", "max_model_len", "kv_tokens"):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "kv_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        for name in ("update_seconds", "save_seconds", "restore_seconds", "transfer_seconds"):
            check_seconds(name, getattr(self, name))
        size = self.bytes_per_token
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"bytes_per_token must be an integer of at least 0, not {size!r}")
        if self.max_num_batched_tokens < self.slots:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below slots {self.slots}: not every running "
                "sample could decode in a step; raise it or lower slots"
            )
