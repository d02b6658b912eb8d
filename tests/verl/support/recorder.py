"""What verl's trainer trains on, written down. Loaded as the file of `trainer.v1.sampler.custom_sampler`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from verl.protocol import DataProto
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils.debug.metrics import calculate_debug_metrics

RAGGED = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "rm_scores", "advantages")
OBJECTS = ("uid", "reward_model", "extra_fields")


class EagerBuffer(ReplayBufferAsync):
    """Takes a batch when it is complete, not up to two seconds later: what is in flight then is not done either."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=0.02)


def padded(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([row.to(dtype) for row in rows], batch_first=True)


def debug_metrics(columns: dict[str, Any], keep: list[list[bool]]) -> dict[str, float]:
    """verl's own metrics of the difference between rollout and actor, over the tokens that `keep` names."""
    mask = padded([torch.tensor(row) for row in keep], torch.int64) * padded(columns["response_mask"], torch.int64)
    tensors = {name: padded(columns[name], torch.float32) for name in ("rollout_log_probs", "old_log_probs")}
    tensors |= {"responses": padded(columns["responses"], torch.int64), "response_mask": mask}
    return calculate_debug_metrics(DataProto.from_dict(tensors))


def record(trainer: Any, batch: Any, metrics: dict[str, Any]) -> None:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*RAGGED, *OBJECTS])
    columns: dict[str, Any] = {name: [row.clone() for row in data[name].unbind()] for name in RAGGED}
    columns |= {name: list(data[name]) for name in OBJECTS}
    step = trainer.global_steps
    fresh = [[version == step - 1 for version in fields["versions"]] for fields in columns["extra_fields"]]
    server = trainer.llm_server_manager.server_handles[0]
    record = {
        "step": step,
        "keys": list(batch.keys),
        "tags": list(batch.tags),
        "metrics": dict(metrics),
        "fresh": debug_metrics(columns, fresh),
        "stale": debug_metrics(columns, [[not token for token in row] for row in fresh]),
        "stats": ray.get(server.stats.remote()),
        **columns,
    }
    torch.save(record, Path(os.environ["LONGTAIL_TEST_RECORDS"]) / f"step-{step}.pt")


_step = PPOTrainerColocateAsync.step


def step(self: Any, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
    batch = _step(self, metrics, timing_raw)
    record(self, batch, metrics)
    return batch


PPOTrainerColocateAsync.step = step
