"""The records that flow: `Sample` (one response in the making), its `Segment`s, and the `Group` of one prompt.

The state of a sample is its tokens. Everything a resume needs (penalty counts, min_tokens, partly matched stop
strings, the position of the noise) is a function of (prompt_ids, output_ids, params, seed); a KV snapshot only saves
time and is never the truth. In a sample of several turns the output also holds what its environment answered:

    output_ids  p p p p stop  o o o   p p stop  o o   p p ...     p: written by the policy, o: an observation
    versions    3 3 3 4 4    -1 -1 -1 4 4 4    -1 -1  5 5
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

OBSERVATION = PolicyVersion(-1)
"""The version of a token that an environment wrote: it was not sampled, its log-probability is 0.0, it is never trained
on, and it never counts as generated."""
ENVIRONMENT = "environment"
"""What the segments of observations name as their engine."""


@dataclasses.dataclass(slots=True)
class Segment:
    """A maximal run of a sample's tokens made by one engine under one policy version, or one observation."""

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
    """The stop string or stop token id that ended it, or its last turn; None for EOS."""
    failure: str | None = None
    """What went wrong, and at which boundary, when status is failed."""
    timings: Timings = dataclasses.field(default_factory=Timings)
    reward: float | None = None
    grade_failure: str | None = None
    """Why it has no reward: the grader timed out, crashed or raised."""
    grader: str | None = None
    """Name and version of what gave the reward or failed to (`math@1-0d9c4e21`; `environment`): rewards of two graders
    are of two exams."""
    grade_details: dict[str, Any] | None = None
    """What the grader said beside the reward (the answer that it read, the parts of a sum): what JSON can say."""
    multi_turn: bool = False
    """Whether a stop (EOS, stop id, stop string) ends a turn of it and not the sample: the engine then takes it out,
    and it goes on when its environment has answered. Length caps, which observations count towards, still finish it."""
    turn_ended: bool = False
    """Its turn has ended, and no observation has come yet."""
    masked: int = 0
    """So many leading output tokens are left out of the loss, because they are too old. (Versions never fall along a
    sample, so that what is too old is a prefix.)"""
    attempts: int = 0
    """Times that it was started again after a failure."""
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
        _check_ids("prompt_ids", self.prompt_ids)
        if self.output_ids:
            _check_ids("output_ids", self.output_ids)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be an integer of 64 bits (0 to 2**64 - 1), not {self.seed!r}")
        if not len(self.output_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"output_ids, logprobs and versions must have one length, not {len(self.output_ids)}, "
                f"{len(self.logprobs)} and {len(self.versions)}"
            )
        if not 0 <= self.masked <= len(self.output_ids):
            raise ValueError(f"masked must be 0 to the {len(self.output_ids)} output tokens, not {self.masked!r}")
        if self.attempts < 0:
            raise ValueError(f"attempts must be at least 0, not {self.attempts!r}")

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_done(self) -> bool:
        return self.status in ("finished", "failed")

    @property
    def num_masked(self) -> int:
        """Tokens that the policy wrote and that are left out of the loss (`masked`)."""
        return sum(
            min(s.end, self.masked) - s.start for s in self.segments if s.version >= 0 and s.start < self.masked
        )

    @property
    def num_generated(self) -> int:
        """Output tokens that the policy wrote: all but the observations."""
        observed = 0
        for segment in self.segments:
            if segment.version == OBSERVATION:
                observed += segment.end - segment.start
        return len(self.output_ids) - observed

    @property
    def num_unread(self) -> int:
        """Tokens of an observation at its end, behind which the policy has written nothing."""
        last = self.segments[-1] if self.segments else None
        return len(last) if last is not None and last.version == OBSERVATION else 0

    @property
    def loss_mask(self) -> list[bool]:
        """Of each output token whether it is trained on: written by the policy, and not `masked`."""
        return [i >= self.masked and version >= 0 for i, version in enumerate(self.versions)]

    def append(self, token: int, logprob: float, version: PolicyVersion, engine: str, kv: KVSource) -> None:
        """Commits one token; extends the current segment or opens one where engine, version or KV source changed."""
        position = len(self.output_ids)
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self._extend_segment(position, version, engine, kv)

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], version: PolicyVersion, engine: str, kv: KVSource
    ) -> None:
        """As `append` for each, at once. ValueError unless there is a log-probability for each token."""
        if len(tokens) != len(logprobs):
            raise ValueError(f"logprobs has {len(logprobs)} entries for {len(tokens)} tokens; give one a token")
        if not tokens:
            return
        position = len(self.output_ids)
        self.output_ids += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)
        self._extend_segment(position, version, engine, kv)

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """What the environment answered to the turn that has ended: one segment of its own. The sample stays paused,
        and goes on behind it when it is added to an engine again; a snapshot of it stays good.

        ValueError unless its turn has ended and it is in no engine, and for an empty observation or no token ids."""
        if self.status != "paused" or not self.turn_ended:
            raise ValueError(
                f"sample {self.id} is {self.status} and waits for no observation; append one when an engine has given "
                "it back with turn_ended, once a turn"
            )
        if len(token_ids) == 0:
            raise ValueError(f"sample {self.id}: token_ids is empty; an observation that adds nothing ends the sample")
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"sample {self.id}: token_ids must be non-negative integers, not {token!r}")
        self.extend(token_ids, [0.0] * len(token_ids), OBSERVATION, ENVIRONMENT, "computed")
        self.turn_ended, self.stop_reason = False, None

    def cut(self, length: int) -> int:
        """Drops the output from position `length` on, with all that is known of it, and with how the sample ended: it
        goes on from there (waiting if nothing is left, else paused), and its saved KV is dropped. A part of an
        observation means nothing: a cut inside one falls back to where it starts; where an observation was, a turn has
        ended. -> tokens dropped that the policy wrote.

        ValueError for a sample that is in an engine, and for a length below 0 or above the output's."""
        if self.status == "running" or (self.status == "waiting" and self.output_ids):
            raise ValueError(f"sample {self.id} is in an engine ({self.status}); pause or abort it before it is cut")
        if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(self.output_ids):
            raise ValueError(f"sample {self.id}: length must be 0 to {len(self.output_ids)}, not {length!r}")
        if length < len(self.output_ids):
            length, self.turn_ended = last_whole(self.segments, length)
            self.stop_reason = None
        generated = self.num_generated
        del self.output_ids[length:], self.logprobs[length:], self.versions[length:]
        while self.segments and self.segments[-1].start >= length:
            self.segments.pop()
        if self.segments:
            self.segments[-1].end = min(self.segments[-1].end, length)
        if self.routed_experts is not None:
            self.routed_experts.truncate(max(self.num_tokens - 1, 0))
        self.masked = min(self.masked, length)
        self.finish_reason = self.failure = self.snapshot = None
        self.reward = self.grade_failure = self.grader = self.grade_details = None
        if not self.turn_ended:
            self.stop_reason = None
        self.timings.finished = None
        if not length:
            self.timings.first_token = None
        self.status = "paused" if length else "waiting"
        return generated - self.num_generated

    def _extend_segment(self, start: int, version: PolicyVersion, engine: str, kv: KVSource) -> None:
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.version, last.engine, last.kv) == (version, engine, kv):
            last.end = len(self.output_ids)
        else:
            self.segments.append(Segment(start, len(self.output_ids), version, engine, kv))

    def check_integrity(self) -> None:
        """Raises AssertionError if the per-token records or the segments do not cover the output exactly."""
        assert len(self.output_ids) == len(self.logprobs) == len(self.versions), self.id
        position = 0
        for segment in self.segments:
            assert segment.start == position and segment.end > segment.start, (self.id, segment)
            assert all(v == segment.version for v in self.versions[segment.start : segment.end]), (self.id, segment)
            position = segment.end
        assert position == len(self.output_ids), (self.id, position)
        written = [s.version for s in self.segments if s.version != OBSERVATION]
        assert written == sorted(written) and all(version >= 0 for version in written), (self.id, written)
        for before, segment in zip([None, *self.segments], self.segments, strict=False):
            if segment.version == OBSERVATION:
                assert before is not None and before.version != OBSERVATION, (self.id, segment)
                assert not any(self.logprobs[segment.start : segment.end]), (self.id, segment)
        assert 0 <= self.masked <= len(self.output_ids), (self.id, self.masked)
        if self.turn_ended:
            assert self.multi_turn and self.versions and self.versions[-1] != OBSERVATION, self.id
        if self.routed_experts is not None:
            assert len(self.routed_experts) < self.num_tokens, (self.id, len(self.routed_experts))


_checked: tuple[int, ...] = ()
"""The prompt that was checked last: siblings share it."""


def _check_ids(name: str, ids: Sequence[int]) -> None:
    global _checked
    if ids is _checked:
        return
    if set(map(type, ids)) != {int} or min(ids) < 0:  # the quick way; a subclass of int is for the slow one
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"{name} must be non-negative integers, not {token!r}")
    if isinstance(ids, tuple):
        _checked = ids


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


def is_zero_variance(rewards: Sequence[float | None]) -> bool:
    """Whether all are the same number: such a group says nothing about which of its samples was better. By equality,
    since a standard deviation of equal numbers need not be 0 in floats, nor that of unequal ones differ from it. Not
    where a reward is missing, is NaN, or where there is none."""
    return len(rewards) > 0 and rewards[0] is not None and all(reward == rewards[0] for reward in rewards)


def sample_seed(seed: int | None, group_id: str, index: int) -> int:
    """64-bit seed of one sample: a hash, so that neighbouring seeds and indices share nothing."""
    root = f"seed:{seed}" if seed is not None else f"group:{group_id}"
    return int.from_bytes(hashlib.blake2b(f"{root}:{index}".encode(), digest_size=8).digest(), "little")


def last_whole(segments: Sequence[Segment], length: int) -> tuple[int, bool]:
    """Where an output can end of which the first `length` tokens are kept (those behind are dropped): there, or at the
    start of the observation that this would cut in two. And whether an observation came next: a turn ended there."""
    for segment in segments:
        if segment.start <= length < segment.end and segment.version == OBSERVATION:
            return segment.start, True
    return length, False
