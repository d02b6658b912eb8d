"""Groups of samples -> one packed `TrainBatch`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from longtail.sample import OBSERVATION, Group, Sample, is_zero_variance
from longtail.trainer_adapter.advantages import Advantage, group_advantages
from longtail.trainer_adapter.batch import Inputs, TrainBatch


def pack(
    groups: Iterable[Group],
    *,
    version: int,
    advantage: Advantage = "mean_std",
    max_staleness: int | None = None,
    incomplete: Literal["leave_out", "train"] = "leave_out",
    zero_variance: Literal["train", "leave_out"] = "train",
    last_segment_only: bool = False,
    mask_truncated: bool = False,
    dtype: torch.dtype = torch.float32,
) -> TrainBatch:
    """Samples that are finished and have a reward, group by group, on the CPU.

    version: the trainer's. advantage: of `group_advantages`, over those samples of a group that are taken.
    max_staleness: tokens more versions behind than this are out of the mask, as are those of `Sample.masked` and
    observations. incomplete: a group in which a sample is not done gives nothing ("leave_out"), or its finished ones
    are trained on ("train"). zero_variance: a group with equal rewards stays, with advantages of exactly 0.0 (it counts
    in means, and a KL penalty acts on it), or is left out (dynamic sampling of DAPO, arXiv 2503.14476).
    last_segment_only: `TrainBatch.without_earlier_segments`. mask_truncated: samples that ended at a length limit count
    in the advantages of their siblings, and are not trained on (overlong filtering of DAPO).

    What is not packed is in `left_out`, with the reason. What is left out changes nothing for the others.

    ValueError: a token of a version above `version`, a log-probability or reward that is not finite, or a choice that
    does not exist."""
    for name, value, choices in (
        ("incomplete", incomplete, ("leave_out", "train")),
        ("zero_variance", zero_variance, ("train", "leave_out")),
    ):
        if value not in choices:
            raise ValueError(f"{name} {value!r} is unknown; there are {' and '.join(choices)}")
    rows: list[tuple[Sample, float, int]] = []
    left_out: dict[str, str] = {}
    for number, group in enumerate(groups):
        taken = _usable(group, incomplete, left_out)
        rewards = [_reward(sample) for sample in taken]
        if taken and zero_variance == "leave_out" and is_zero_variance(rewards):
            left_out |= {sample.id: "all rewards of the group are equal" for sample in taken}
            continue
        if taken:
            rows += zip(taken, group_advantages(rewards, advantage), [number] * len(taken), strict=True)
    batch = _pack(rows, version, left_out, mask_truncated, dtype)
    if max_staleness is not None:
        batch = batch.without_stale(max_staleness)
    return batch.without_earlier_segments() if last_segment_only else batch


def _usable(group: Group, incomplete: str, left_out: dict[str, str]) -> list[Sample]:
    if incomplete == "leave_out" and not group.is_complete:
        left_out |= {sample.id: "its group is not complete" for sample in group.samples}
        return []
    taken = []
    for sample in group.samples:
        if sample.status == "failed":
            left_out[sample.id] = f"failed: {sample.failure or 'no cause recorded'}"
        elif sample.status != "finished":
            left_out[sample.id] = f"not done: {sample.status}"
        elif sample.reward is None:
            left_out[sample.id] = f"no reward: {sample.grade_failure or 'not graded'}"
        else:
            taken.append(sample)
    return taken


def _reward(sample: Sample) -> float:
    if sample.reward is None or not math.isfinite(sample.reward):
        raise ValueError(f"sample {sample.id}: reward {sample.reward} is not finite; a grader that failed gives none")
    return sample.reward


def _pack(
    rows: Sequence[tuple[Sample, float, int]],
    version: int,
    left_out: dict[str, str],
    mask_truncated: bool,
    dtype: torch.dtype,
) -> TrainBatch:
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    mask: list[bool] = []
    advantages: list[float] = []
    for sample, advantage, _ in rows:
        newest = max(sample.versions, default=OBSERVATION)
        if newest > version:
            raise ValueError(f"version {version}: sample {sample.id} has newer tokens, of version {newest}")
        if not all(map(math.isfinite, sample.logprobs)):
            raise ValueError(f"sample {sample.id}: logprobs are not all finite")
        ids += [*sample.prompt_ids, *sample.output_ids]
        logprobs += sample.logprobs
        versions += sample.versions
        mask += [m and not (mask_truncated and sample.finish_reason == "length") for m in sample.loss_mask]
        advantages += [advantage] * len(sample.output_ids)
    samples = [sample for sample, _, _ in rows]
    return TrainBatch(
        lengths=torch.tensor([len(s.output_ids) for s in samples], dtype=torch.int64),
        mask=torch.tensor(mask, dtype=torch.bool),
        advantages=torch.tensor(advantages, dtype=dtype),
        rollout_logprobs=torch.tensor(logprobs, dtype=dtype),
        versions=torch.tensor(versions, dtype=torch.int64),
        version=version,
        groups=torch.tensor([number for _, _, number in rows], dtype=torch.int64),
        sample_ids=tuple(s.id for s in samples),
        inputs=Inputs(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            lengths=torch.tensor([s.num_tokens for s in samples], dtype=torch.int64),
            prompt_lengths=torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.int64),
        ),
        left_out=left_out,
    )
