"""From logits to committed tokens: per-sample processing, sampling, and what ends a sample.

Everything here is a function of (prompt_ids, output_ids, params, seed), so that it continues across a resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from longtail.kernels.logprobs import token_logprobs
from longtail.kernels.sample import LogitEdits, SampleBatch, row_edits, sample
from longtail.sample import OBSERVATION, FinishReason, Sample
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

Decode = Callable[[Sequence[int]], str]


class Known(Protocol):
    """Of a sample, what its next token depends on."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> list[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...


class Vocabulary(Protocol):
    """Of a model, what a sample is checked against."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """What a row of logits is to give: the token after these."""

    sample: Known
    ahead: Sequence[int] = ()
    """Drafts after the sample's output that count as committed for this row."""

    @property
    def output_ids(self) -> list[int]:
        return [*self.sample.output_ids, *self.ahead] if self.ahead else self.sample.output_ids

    @property
    def output_len(self) -> int:
        return len(self.sample.output_ids) + len(self.ahead)


class Sampler:
    def __init__(self, eos_token_ids: tuple[int, ...], raw_logprobs: bool) -> None:
        self.eos_token_ids = eos_token_ids
        self.raw_logprobs = raw_logprobs

    def __call__(
        self, logits: torch.Tensor, positions: list[Position]
    ) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
        """logits: [rows >= len(positions), V] -> tokens int64 and log-probabilities float32, one per position, and the
        positions (by index) from whose logits nothing can be drawn, with the reason."""
        logits = logits[: len(positions)]
        batch = self.batch(positions)
        faults: dict[int, str] = {}
        tokens, logprobs = sample(logits, batch, faults, in_place=not self.raw_logprobs)
        if self.raw_logprobs:
            # a row that is a fault has no token
            drawn = torch.from_numpy(np.maximum(tokens, 0)).to(logits.device)
            logprobs = token_logprobs(logits, drawn).cpu().numpy()
        return tokens, logprobs, faults

    def batch(self, positions: Sequence[Position]) -> SampleBatch:
        """Parameters, noise, bans and penalties of each position."""
        params = [p.sample.params for p in positions]
        edits = None
        banned = [self._banned(p) for p in positions]
        if any(banned) or any(p.has_penalties for p in params):
            edits = LogitEdits.stack(
                [
                    row_edits(
                        prompt_ids=p.sample.prompt_ids,
                        output_ids=p.output_ids,
                        presence_penalty=p.sample.params.presence_penalty,
                        frequency_penalty=p.sample.params.frequency_penalty,
                        repetition_penalty=p.sample.params.repetition_penalty,
                        banned=ban,
                    )
                    for p, ban in zip(positions, banned, strict=True)
                ]
            )
        return SampleBatch(
            temperatures=np.array([p.temperature for p in params], np.float64),
            seeds=np.array([p.sample.seed for p in positions], np.uint64),
            positions=np.array([p.output_len for p in positions], np.int64),
            top_k=np.array([p.top_k for p in params], np.int32),
            top_p=np.array([p.top_p for p in params], np.float64),
            min_p=np.array([p.min_p for p in params], np.float64),
            edits=edits,
        )

    def _banned(self, position: Position) -> tuple[int, ...]:
        """Tokens that may not come yet: whatever would end the sample before min_tokens."""
        p = position.sample.params
        if position.output_len >= p.min_tokens:
            return ()
        return p.stop_token_ids if p.ignore_eos else (*self.eos_token_ids, *p.stop_token_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    reason: FinishReason
    stop_reason: str | int | None = None


def check_end(s: Sample, eos_token_ids: tuple[int, ...], max_model_len: int, decode: Decode | None) -> End | None:
    """What ends a sample, or its turn, after its last output token: EOS, a stop id, a stop string, the cap, in this
    order. What an environment wrote stops nothing."""
    p = s.params
    if not s.output_ids:
        return None
    token = s.output_ids[-1]
    if len(s.output_ids) >= p.min_tokens and s.versions[-1] != OBSERVATION:
        if not p.ignore_eos and token in eos_token_ids:
            return End("stop")
        if token in p.stop_token_ids:
            return End("stop", token)
        if p.stop and decode is not None:
            found = _stop_string(s.output_ids, _turn_start(s), p.stop, decode)
            if found is not None:
                return End("stop", found)
    return End("length") if is_full(s, max_model_len) else None


def is_full(s: Sample, max_model_len: int) -> bool:
    """Whether its length caps leave no room for another token."""
    cap = s.params.max_tokens
    return (cap is not None and len(s.output_ids) >= cap) or s.num_tokens >= max_model_len


def _turn_start(s: Sample) -> int:
    """Output position behind the last observation."""
    return next((segment.end for segment in reversed(s.segments) if segment.version == OBSERVATION), 0)


def check_sample(
    s: Sample, spec: Vocabulary, max_model_len: int, version: PolicyVersion, decode: Decode | None
) -> None:
    """Raises a ValueError that names the sample, the field and the fix if the engine cannot (or need not) run it."""
    who = f"sample {s.id}"
    if s.is_done:
        raise ValueError(f"{who} is {s.status}; only unfinished samples can be added")
    if len(s.prompt_ids) >= max_model_len:
        raise ValueError(
            f"{who}: prompt_ids has {len(s.prompt_ids)} tokens, and max_model_len {max_model_len} leaves no room for "
            "output; shorten the prompt or raise max_model_len"
        )
    worst = max((*s.prompt_ids, *s.output_ids, *s.params.stop_token_ids))
    if worst >= spec.vocab_size:
        raise ValueError(
            f"{who}: token id {worst} is outside the vocabulary of {spec.vocab_size}; "
            "was it made with another tokenizer?"
        )
    if s.turn_ended:
        raise ValueError(f"{who}: its turn has ended; append_observation gives it what its environment answers")
    end = check_end(s, spec.eos_token_ids, max_model_len, decode)
    if end is not None and s.versions[-1] != OBSERVATION:
        raise ValueError(f"{who} has already ended ({end.reason}); it is finished, not to be resumed")
    newest = max(s.versions, default=OBSERVATION)
    if newest > version:
        raise ValueError(
            f"{who} has tokens of version {newest}, newer than the engine's {version}; "
            "update the engine's weights first, or give it version= if it has them"
        )


def _stop_string(output_ids: Sequence[int], start: int, stop: tuple[str, ...], decode: Decode) -> str | None:
    """The stop string that the last token completes, in what stands from `start` on. Looks at a window long enough to
    hold the longest one (a character takes at most four byte tokens), so it needs no state and finds strings that
    straddle a resume."""
    window = output_ids[max(start, len(output_ids) - 4 * max(map(len, stop)) - 4) :]
    before = len(decode(window[:-1]).rstrip("\ufffd"))  # a half-decoded character counts when it is complete
    text = decode(window)
    for s in stop:
        if text.find(s, max(before - len(s) + 1, 0)) >= 0:
            return s
    return None
