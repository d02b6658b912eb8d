"""`AsyncGRPOTrainer` on a worker that keeps its samples, and what must hold of them. Needs TRL."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer_adapter.plugins.trl_helpers import (
    GROUP,
    additions,
    check_segments,
    low_share,
    reward,
    tiny_tokenizer,
)
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from longtail import Rollout, Sample
from longtail.trainer_adapter.plugins.trl_async import RolloutWorker, TrackedSample, WeightTransfer

EXAMPLES = Path(__file__).parents[3] / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL takes FlashAttention 3, and asks what the GPU can do."""
    attention = load_example("trl_async_grpo").attention
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


def config(directory: Path, **fields: Any) -> AsyncGRPOConfig:
    known: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 2 * GROUP,
        "gradient_accumulation_steps": 1,
        "num_generations": GROUP,
        "max_completion_length": 48,
        "max_steps": 5,
        "max_staleness": 4,
        "token_budget": -1,
        "learning_rate": 5e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return AsyncGRPOConfig(**known | fields)


class Recording(RolloutWorker):
    """Keeps the samples that were queued, and those that TRL took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queued: list[tuple[TrackedSample, Sample]] = []
        self.taken: list[tuple[int, TrackedSample]] = []
        get = self.rollout_buffer.get

        def watched(*args: Any, **kwargs: Any) -> TrackedSample:
            record = get(*args, **kwargs)
            self.taken.append((self.model_version, record))
            return record

        self.rollout_buffer.get = watched  # type: ignore[method-assign]

    def _score(self, group: Any) -> list[TrackedSample]:
        records = super()._score(group)
        by = {sample.id: sample for sample in group.samples}
        self.queued += [(record, by[record.sample_id]) for record in records]
        return records


def train(
    path: str, args: AsyncGRPOConfig, rollout: Rollout, reward_funcs: Any = reward
) -> tuple[AsyncGRPOTrainer, Recording]:
    tokenizer, dataset = tiny_tokenizer(), additions()
    worker = Recording(rollout, args, dataset, tokenizer, reward_funcs)
    trainer = AsyncGRPOTrainer(
        path,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=WeightTransfer(rollout),
    )
    trainer.train()
    return trainer, worker


def check_records(worker: Recording) -> None:
    groups: dict[int, list[TrackedSample]] = {}
    for record, sample in worker.queued:
        check_segments(sample)
        groups.setdefault(record.group_id, []).append(record)
        n = len(sample.prompt_ids)
        assert record.input_ids.tolist() == [*sample.prompt_ids, *sample.output_ids]
        assert record.completion_mask.tolist() == [0] * n + [int(counts) for counts in sample.loss_mask]
        assert record.old_log_probs.dtype == np.float32
        assert torch.equal(torch.from_numpy(record.old_log_probs[n:]), torch.tensor(sample.logprobs))
        assert not record.old_log_probs[:n].any()
        assert record.model_version == min(sample.versions)
        assert record.metrics["reward"] == pytest.approx(low_share(sample.output_ids))
    for records in groups.values():
        assert len(records) == GROUP
        rewards = np.array([record.metrics["reward"] for record in records])
        want = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        assert [record.advantage for record in records] == pytest.approx(want.tolist())


def check_ledger(rollout: Rollout, worker: Recording) -> None:
    """What TRL has taken counts as trained; what it has not is surplus, stale, or pending."""
    ledger = rollout.store.ledger
    taken = {record.sample_id for _, record in worker.taken}
    tokens = {sample.id: len(sample.output_ids) for _, sample in worker.queued}
    assert ledger.lines["trained"] == sum(tokens[name] for name in taken)
    assert ledger.lines["surplus"] + ledger.lines["stale"] == sum(n for name, n in tokens.items() if name not in taken)
    assert ledger.generated == ledger.pending + sum(ledger.lines.values())
    rollout.check_integrity()
