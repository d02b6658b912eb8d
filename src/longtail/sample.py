"""The records that flow: `Sample` (one response in the making), its `Segment`s, and the `Group` of one prompt.

The state of a sample is its tokens. Everything a resume needs (penalty counts, min_tokens, partly matched stop
strings, the position of the noise) is a function of (prompt_ids, output_ids, params, seed); a KV snapshot only saves
time and is never the truth.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Literal

from longtail.routing import RoutedExperts
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

Status = Literal["waiting", "running", "paused", "finished", "failed"]
FinishReason = Literal["stop", "length", "repetition", "aborted", "error"]
KVSource = Literal["computed", "restored", "recomputed", "kept", "approximate"]
"""Where the KV came from on which a segment stands: fresh prefill, a snapshot, re-prefill of known tokens, KV of older
weights that the user chose to keep, or a snapshot that was compressed with loss on request."""


@dataclasses.dataclass(slots=True)
class Segment:
    """A maximal run of a sample's tokens made by one engine under one policy version."""

    start: int
    """Output position of the first token."""
    end: int
    """One past the last."""
    version: PolicyVersion
    engine: str
    kv: KVSource = "computed"

    def __len__(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(slots=True)
class Timings:
    """Seconds on the engine's clock; None until it happened."""

    submitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    running: float = 0.0
    """Total time in a slot."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One response being made: the one record from prompt to loss. Compared by identity.

    output_ids, logprobs and versions always have the same length; logprobs[i] is the log-probability of output_ids[i]
    under the policy versions[i] that sampled it.
    """

    id: str
    group_id: str
    index: int
    """Position in the group."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[PolicyVersion] = dataclasses.field(default_factory=list)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    status: Status = "waiting"
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None for EOS."""
    failure: str | None = None
    """What went wrong, and at which boundary, when status is failed."""
    timings: Timings = dataclasses.field(default_factory=Timings)
    reward: float | None = None
    routed_experts: RoutedExperts | None = None
    """Of a mixture-of-experts model that records its routing: the experts that computed each position. Positions that
    are computed again (a resume from tokens, other weights) keep what they have: a row belongs to the pass that made
    the log-probability after it."""
    snapshot: Any = None
    """Saved KV of a paused sample (kv_manager.Snapshot), or None. An accelerator only."""

    def __post_init__(self) -> None:
        self.prompt_ids = tuple(self.prompt_ids)
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty; a sample needs at least one prompt token (for example BOS)")
        for name, ids in (("prompt_ids", self.prompt_ids), ("output_ids", self.output_ids)):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise ValueError(f"{name} must be non-negative integers, not {token!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an integer of 64 bits (0 to 2**64 - 1), not {self.seed!r}")
        if not len(self.output_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"output_ids, logprobs and versions must have one length, not {len(self.output_ids)}, "
                f"{len(self.logprobs)} and {len(self.versions)}"
            )

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_done(self) -> bool:
        return self.status in ("finished", "failed")

    def append(self, token: int, logprob: float, version: PolicyVersion, engine: str, kv: KVSource) -> None:
        """Commits one token; extends the current segment or opens one where engine, version or KV source changed."""
        position = len(self.output_ids)
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.version, last.engine, last.kv) == (version, engine, kv):
            last.end = position + 1
        else:
            self.segments.append(Segment(position, position + 1, version, engine, kv))

    def check_integrity(self) -> None:
        """Raises AssertionError if the per-token records or the segments do not cover the output exactly."""
        assert len(self.output_ids) == len(self.logprobs) == len(self.versions), self.id
        position = 0
        for segment in self.segments:
            assert segment.start == position and segment.end > segment.start, (self.id, segment)
            assert all(v == segment.version for v in self.versions[segment.start : segment.end]), (self.id, segment)
            position = segment.end
        assert position == len(self.output_ids), (self.id, position)
        if self.routed_experts is not None:
            assert len(self.routed_experts) < self.num_tokens, (self.id, len(self.routed_experts))


@dataclasses.dataclass(slots=True)
class Group:
    """The samples of one prompt. Handed over only when every one of them is done."""

    id: str
    samples: list[Sample]
    task: Any = None
    """What a grader needs to know of the prompt (the task's own record); not looked into by the rollout."""

    @classmethod
    def from_prompt(cls, group_id: str, prompt_ids: Sequence[int], params: SamplingParams, task: Any = None) -> Group:
        """n samples with seeds that depend only on (params.seed or group_id, index)."""
        prompt = tuple(prompt_ids)
        samples = [
            Sample(
                id=f"{group_id}/{i}",
                group_id=group_id,
                index=i,
                prompt_ids=prompt,
                params=params,
                seed=sample_seed(params.seed, group_id, i),
            )
            for i in range(params.n)
        ]
        return cls(group_id, samples, task)

    @property
    def is_complete(self) -> bool:
        return all(sample.is_done for sample in self.samples)


def sample_seed(seed: int | None, group_id: str, index: int) -> int:
    """64-bit seed of one sample: a hash, so that neighbouring seeds and indices share nothing."""
    root = f"seed:{seed}" if seed is not None else f"group:{group_id}"
    return int.from_bytes(hashlib.blake2b(f"{root}:{index}".encode(), digest_size=8).digest(), "little")
