"""What an engine runs: a sample plus where its KV stands.

    |<-------------- num_tokens (known) -------------->|
    |<--- num_computed_tokens --->|<- to be computed ->|
    | KV is in the block tables   | next forward passes|

The scheduler's only rule is to bring computed up to known. A fresh sample (computed 0, known = prompt), a resumed one
(computed from a snapshot), a preempted one (computed fell back) and one with drafts are the same case.
"""

from __future__ import annotations

import dataclasses

from longtail.sample import KVSource, Sample


def limit_after(length: int, limit: int | None) -> int | None:
    """Output length at a limit of so many more tokens. ValueError if it is below 1."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"limit must be at least 1 output token, or None for no limit, not {limit!r}")
    return length + limit


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the engine's scheduler; `block_tables` by the KV manager."""

    sample: Sample
    num_computed_tokens: int = 0
    block_tables: list[list[int]] = dataclasses.field(default_factory=list)
    """One per group of layers; empty while the sequence holds no blocks."""
    kv: KVSource = "computed"
    """Source that the next tokens' segment records."""
    admitted_at: float | None = None
    num_cached_tokens: int = 0
    """At the last admission: KV tokens found in the prefix cache,"""
    num_restored_tokens: int = 0
    """tokens brought by a snapshot,"""
    restore_seconds: float = 0.0
    """how long that took,"""
    refused: str | None = None
    """and why a snapshot was not used."""
    limit: int | None = None
    """Output tokens of the sample at which its caller wants to be told."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    """prompt_ids + output_ids, kept as one list for slicing."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.sample.prompt_ids, *self.sample.output_ids]

    @property
    def is_at_limit(self) -> bool:
        return self.limit is not None and len(self.sample.output_ids) >= self.limit

    def set_limit(self, limit: int | None) -> None:
        """limit: output tokens from now on. ValueError if it is below 1."""
        self.limit = limit_after(len(self.sample.output_ids), limit)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
