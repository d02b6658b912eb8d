"""TRL's AsyncGRPOTrainer on a rollout of ours, on a CPU: it generates while the trainer trains.

    python examples/trl_async_grpo.py --steps 10              # SmolLM2-135M; pip install 'longtail[trl]'

On a GPU TRL takes FlashAttention 3 (`pip install kernels`); without one, plain torch stands in for it here.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from longtail import NativeEngine, Rollout
from longtail.bench.models import resolve_model
from longtail.trainer_adapter.plugins.trl_async import RolloutWorker, WeightTransfer


def attention(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """flash_attn_varlen_func: sequences laid end to end, [tokens, heads, head_dim], causal from the bottom right."""
    out = []
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for i in range(len(ends_q) - 1):
        part = [x[ends[i] : ends[i + 1]].transpose(0, 1) for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k))]
        n, m = part[0].shape[1], part[1].shape[1]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        answer = torch.nn.functional.scaled_dot_product_attention(*part, attn_mask=seen, scale=softmax_scale)
        out.append(answer.transpose(0, 1))
    return torch.cat(out)


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


def main(model_name: str, steps: int, out: str) -> dict[str, int]:
    if not torch.cuda.is_available():
        packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    path = str(resolve_model(model_name))
    tokenizer = AutoTokenizer.from_pretrained(path)
    sums = [(a, b) for a in range(10, 50) for b in range(10, 50)]
    rows = [{"prompt": f"12+35=47\n40+19=59\n23+23=46\n{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    dataset = Dataset.from_list(rows).shuffle(seed=0)
    settings = {"max_steps": steps, "learning_rate": 1e-5, "per_device_train_batch_size": 16, "num_generations": 4}
    on_cpu = {"use_cpu": not torch.cuda.is_available(), "bf16": False, "gradient_checkpointing": False}
    more = {"max_completion_length": 32, "token_budget": -1, "save_strategy": "no", "report_to": "none"}
    args = AsyncGRPOConfig(output_dir=out, gradient_accumulation_steps=1, **settings, **on_cpu, **more)

    engine = NativeEngine(path, max_num_seqs=32, kv_cache_bytes=512 << 20)
    with Rollout(engine, strategy="bounded-staleness:groups=4,eta=1", background=True) as rollout:
        worker, transfer = RolloutWorker(rollout, args, dataset, tokenizer, is_right), WeightTransfer(rollout)
        given: dict[str, Any] = {"train_dataset": dataset, "processing_class": tokenizer}
        AsyncGRPOTrainer(path, args=args, rollout_worker=worker, weight_transfer=transfer, **given).train()
        return rollout.store.ledger.as_dict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="runs/trl-async")
    options = parser.parse_args()
    print(main(options.model, options.steps, options.out))
