"""From a pass's logits to what each sequence emits: by match, or by rejection sampling.

Rows of a sequence with n drafts: the last known token and the drafts; row j verifies draft j, the last one gives the
bonus. A row is processed as if the drafts before it were committed: its noise, penalties and bans are those of its
output position.

match (kernels/verify.py): the stream is the target's own, with any drafter or none.
rejection (kernels/verify_rejection.py): each token has the target's distribution, given those before it. The stream
depends on the drafts: on their tokens, what they were drawn from, and how many there were. With the same drafts it is
the same: acceptance, residual and bonus are functions of (seed, output position), on Philox streams of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from longtail.kernels.logprobs import token_logprobs
from longtail.kernels.sample import processed_logits
from longtail.kernels.verify import verify_drafts
from longtail.kernels.verify_rejection import DraftBatch, verify_rejection
from longtail.partial_rollout.engines.native.config import VerificationMode
from longtail.partial_rollout.engines.native.sampler import Known, Position, Sampler
from longtail.partial_rollout.engines.native.scheduler import Scheduled


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Of one sequence, before the events in its tokens are looked for."""

    tokens: list[int]
    """The accepted drafts and the target's own token after them."""
    logprobs: list[float]
    fault: str | None
    """Why the last of them could not be drawn (it is -1 then)."""

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


class Verification(Protocol):
    def __call__(self, logits: torch.Tensor, sampled: list[Scheduled]) -> list[Verdict]:
        """logits: float32 [rows of all these and of padding, vocabulary], ours to change. -> one verdict each."""
        ...


def verification(mode: VerificationMode, sampler: Sampler) -> Verification:
    return Match(sampler) if mode == "match" else Rejection(sampler)


class Match:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, logits: torch.Tensor, sampled: list[Scheduled]) -> list[Verdict]:
        return match(self.sampler, logits, [item.seq.sample for item in sampled], [item.drafts for item in sampled])


def match(
    sampler: Sampler, logits: torch.Tensor, samples: Sequence[Known], drafts: Sequence[list[int]]
) -> list[Verdict]:
    """logits: [rows >= of all samples, V]; drafts: of each sample, which may be none. -> one verdict each."""
    tokens, logprobs, faults = sampler(logits, _positions(samples, drafts))
    accepted = [0] * len(samples)
    if any(drafts):
        packed, cu_drafts = _packed(drafts)
        accepted = verify_drafts(packed, torch.from_numpy(tokens), cu_drafts).accepted.tolist()
    verdicts, row = [], 0
    for own, count in zip(drafts, accepted, strict=True):
        made = slice(row, row + count + 1)
        verdicts.append(Verdict(tokens[made].tolist(), logprobs[made].tolist(), faults.get(row + count)))
        row += len(own) + 1
    return verdicts


class Rejection:
    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def __call__(self, logits: torch.Tensor, sampled: list[Scheduled]) -> list[Verdict]:
        offered = [item.drafts for item in sampled]
        positions = _positions([item.seq.sample for item in sampled], offered)
        logits = logits[: len(positions)]
        rows = self.sampler.batch(positions)
        processed = processed_logits(logits, rows, in_place=not self.sampler.raw_logprobs)
        drafts, cu_drafts = _packed(offered)
        firsts = (cu_drafts[:-1] + torch.arange(len(sampled))).numpy()
        batch = DraftBatch(
            cu_drafts,
            torch.from_numpy(rows.temperatures.astype(np.float32)),
            torch.from_numpy(rows.seeds[firsts]),
            torch.from_numpy(rows.positions[firsts]),
        )
        faults: dict[int, str] = {}
        done = verify_rejection(processed, drafts, _distributions(sampled, logits.shape[1]), batch, faults)
        verdicts = []
        for i, (first, count) in enumerate(zip(firsts.tolist(), done.accepted.tolist(), strict=True)):
            tokens = done.tokens[i, : count + 1]
            assert done.logprobs is not None
            logprobs = done.logprobs[i, : count + 1]
            if self.sampler.raw_logprobs:  # a row that is a fault has no token
                logprobs = token_logprobs(logits[first : first + count + 1], tokens.clamp(min=0))
            verdicts.append(Verdict(tokens.tolist(), logprobs.tolist(), faults.get(first + count)))
        return verdicts


def _positions(samples: Sequence[Known], drafts: Sequence[list[int]]) -> list[Position]:
    return [Position(s, own[:j]) for s, own in zip(samples, drafts, strict=True) for j in range(len(own) + 1)]


def _packed(drafts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """-> drafts int64 [D], and int32 [S + 1] where those of each sequence start."""
    flat = torch.tensor([token for own in drafts for token in own], dtype=torch.int64)
    return flat, torch.tensor([0, *map(len, drafts)]).cumsum(0).to(torch.int32)


def _distributions(sampled: list[Scheduled], vocab: int) -> torch.Tensor | None:
    """float32 [D, vocab]; None if nothing was drawn. A draft that was not drawn had its token for certain."""
    drafted = [item for item in sampled if item.drafts]
    if all(item.distributions is None for item in drafted):
        return None
    return torch.cat(
        [
            F.one_hot(torch.tensor(item.drafts), vocab).float() if item.distributions is None else item.distributions
            for item in drafted
        ]
    )
