"""`PartialRolloutGRPOTrainer` that keeps what its steps were made of, and what must hold of them. Needs TRL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer_adapter.plugins.trl_helpers import (
    GROUP,
    additions,
    check_segments,
    low_share,
    make_rollout,
    reward,
    spans_versions,
    tiny_model,
    tiny_tokenizer,
)
from trl import GRPOConfig

from longtail import Rollout, Sample
from longtail.trainer_adapter.plugins.trl_grpo import PartialRolloutGRPOTrainer

FRESH = 1e-4


class Recording(PartialRolloutGRPOTrainer):
    """Keeps what each step was made of: the prompts that TRL asked for, the samples, and the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[list[str], list[Sample], dict[str, Any]]] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        outputs = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.steps.append(([row["prompt"] for row in inputs], list(self._samples), outputs))
            assert self.rollout is not None
            self.rollout.check_integrity()  # type: ignore[attr-defined]
        return outputs


def config(directory: Path, **fields: Any) -> GRPOConfig:
    known: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2 * GROUP,
        "num_generations": GROUP,
        "max_completion_length": 48,
        "max_steps": 5,
        "learning_rate": 5e-3,
        "vllm_importance_sampling_mode": "token_truncate",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**known | fields)


def trainer(args: GRPOConfig, open_rollout: Callable[[Any, int], Rollout] = make_rollout, **kwargs: Any) -> Recording:
    known: dict[str, Any] = {"train_dataset": additions(), "processing_class": tiny_tokenizer()} | kwargs
    return Recording(
        known.pop("model", None) or tiny_model(), known.pop("reward_funcs", reward), args, rollout=open_rollout, **known
    )


def group_ids(samples: list[Sample]) -> list[str]:
    return [sample.group_id for sample in samples[::GROUP]]


def check_batch(samples: list[Sample], outputs: dict[str, Any]) -> None:
    """Tokens, log-probabilities, masks and advantages of each row are those of its sample."""
    rewards = torch.tensor([low_share(sample.output_ids) for sample in samples]).view(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    assert torch.allclose(outputs["advantages"], advantages.flatten(), atol=1e-5)
    for i, sample in enumerate(samples):
        check_segments(sample)
        n = len(sample.output_ids)
        assert outputs["prompt_ids"][i][outputs["prompt_mask"][i].bool()].tolist() == list(sample.prompt_ids)
        assert outputs["completion_ids"][i][:n].tolist() == sample.output_ids
        assert outputs["completion_mask"][i].sum() == n
        assert torch.equal(outputs["sampling_per_token_logps"][i][:n], torch.tensor(sample.logprobs))
        assert outputs["tool_mask"][i][:n].bool().tolist() == sample.loss_mask


def check_crossing(run: Recording) -> None:
    """Of five steps: groups finish in a later step than they started, whole, once, and with their rows."""
    assert len(run.steps) == 5
    crossed = stale = 0
    for version, (_, samples, outputs) in enumerate(run.steps):
        check_batch(samples, outputs)
        groups = [samples[i : i + GROUP] for i in range(0, len(samples), GROUP)]
        assert all(len({s.group_id for s in group}) == 1 for group in groups)
        assert max(v for s in samples for v in s.versions) == version  # the newest weights have made some of it
        crossed += sum(spans_versions(sample) for sample in samples)
        # TRL's correction: 1 on what the current weights sampled, something else on what older ones did.
        versions = torch.full(outputs["completion_mask"].shape, -1)
        for i, sample in enumerate(samples):
            versions[i, : len(sample.versions)] = torch.tensor(sample.versions)
        ratio, old = outputs["importance_sampling_ratio"], (versions >= 0) & (versions < version)
        assert (ratio[versions == version] - 1).abs().max() < FRESH
        if old.any():
            stale += int(old.sum())
            assert (ratio[old] - 1).abs().max() > 10 * FRESH
    assert crossed >= 3
    assert stale > 20
    trained = [name for _, samples, _ in run.steps for name in group_ids(samples)]
    assert len(set(trained)) == len(trained)  # once each
    decode = run.processing_class.decode
    assert any(asked != [decode(s.prompt_ids) for s in samples] for asked, samples, _ in run.steps)
    check_log(run, resumed=crossed)
    check_ledger(run)


def check_log(run: Recording, resumed: int) -> None:
    logs = [entry for entry in run.state.log_history if "rollout/in_flight_groups" in entry]
    assert logs[0]["sampling/sampling_logp_difference/max"] < FRESH  # all of it is fresh
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in logs) > 10 * FRESH
    assert all(entry["rollout/fresh_logp_difference_max"] < FRESH for entry in logs)
    assert logs[0]["rollout/staleness_max"] == 0 < max(entry["rollout/staleness_max"] for entry in logs)
    assert all(entry["rollout/in_flight_groups"] == 2 for entry in logs)
    assert sum(entry["rollout/resumed_samples"] for entry in logs) == pytest.approx(resumed / (2 * GROUP))
    assert all(entry["grad_norm"] > 0 for entry in logs)


def check_ledger(run: Recording) -> None:
    """What was trained on, and what is still in flight, is all that was generated."""
    trained = sum(len(sample.output_ids) for _, samples, _ in run.steps for sample in samples)
    assert run.ledger.lines["trained"] == trained
    assert run.ledger.pending > 0
    assert run.ledger.generated == trained + run.ledger.pending + run.ledger.wasted
    assert run.rollout is None  # closed
