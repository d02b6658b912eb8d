"""Batches and groups for the tests of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longtail.sample import OBSERVATION, Group, Sample, Segment
from longtail.sampling_params import SamplingParams
from longtail.trainer_adapter.batch import TrainBatch
from longtail.version import PolicyVersion


def random_batch(seed: int = 0, lengths: Sequence[int] = (5, 1, 7, 4), **fields: Any) -> TrainBatch:
    """float64; every token field filled; two groups; ratios from about 0.5 to 2; some tokens masked, and no sequence
    wholly; `logprobs` is a leaf with requires_grad."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    mask = torch.rand(n, generator=generator) < 0.75
    mask[torch.tensor([0, *lengths]).cumsum(0)[:-1]] = True
    rollout = -normal(1.0).abs() - 0.1
    known: dict[str, Any] = {
        "lengths": torch.tensor(lengths),
        "mask": mask,
        "advantages": torch.tensor(
            [1.3, -0.7, -1.1, 0.4, 0.9, -0.2][: len(lengths)], dtype=torch.float64
        ).repeat_interleave(torch.tensor(lengths)),
        "rollout_logprobs": rollout,
        "versions": torch.randint(3, 6, (n,), generator=generator),
        "version": 5,
        "groups": torch.arange(len(lengths)) // 2,
        "logprobs": (rollout + normal(0.4)).requires_grad_(),
        "proximal_logprobs": rollout + normal(0.3),
        "ref_logprobs": rollout + normal(0.3),
    }
    return TrainBatch(**(known | fields))


def make_sample(
    group: str,
    index: int,
    versions: Sequence[int],
    reward: float | None,
    *,
    logprobs: Sequence[float] | None = None,
    tokens: Sequence[int] | None = None,
    **fields: Any,
) -> Sample:
    """A finished sample with a token for each of `versions` (-1: an observation)."""
    stamps = [PolicyVersion(v) for v in versions]
    if logprobs is None:
        logprobs = [0.0 if v == OBSERVATION else -0.1 * (i + 1) for i, v in enumerate(versions)]
    segments: list[Segment] = []
    for i, v in enumerate(stamps):
        if segments and segments[-1].version == v:
            segments[-1].end = i + 1
        else:
            segments.append(Segment(i, i + 1, v, "environment" if v == OBSERVATION else "test"))
    known: dict[str, Any] = {
        "id": f"{group}/{index}",
        "group_id": group,
        "index": index,
        "prompt_ids": (7, 8, 9)[: 1 + index % 3],
        "params": SamplingParams(),
        "seed": index,
        "output_ids": list(tokens) if tokens is not None else [20 + i for i in range(len(versions))],
        "logprobs": list(logprobs),
        "versions": stamps,
        "segments": segments,
        "status": "finished",
        "finish_reason": "stop",
        "reward": reward,
    }
    return Sample(**(known | fields))


def make_group(name: str, rewards: Sequence[float | None], versions: Sequence[int] = (5, 5, 5)) -> Group:
    return Group(name, [make_sample(name, i, versions, reward) for i, reward in enumerate(rewards)])


def with_random_logprobs(batch: TrainBatch) -> TrainBatch:
    """From each sample's own seed, so that a sample has the same in any batch. Ratios within every clip."""
    drift = 0.02
    now, ref = [], []
    for name, length in zip(batch.sample_ids, batch.lengths.tolist(), strict=True):
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        now.append(drift * torch.randn(length, generator=generator))
        ref.append(drift * torch.randn(length, generator=generator))
    rollout = batch.rollout_logprobs
    return batch.replace(logprobs=(rollout + torch.cat(now)).requires_grad_(), ref_logprobs=rollout + torch.cat(ref))


def grad(loss: torch.Tensor, batch: Any) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, [batch.logprobs])
    return found
