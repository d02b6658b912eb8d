"""TRL's GRPOTrainer on partial rollouts, on a CPU: two-digit additions, samples that may take several steps to finish.

    python examples/trl_grpo.py --steps 10 --out runs/trl                # SmolLM2-135M; pip install 'longtail[trl]'
    python examples/trl_grpo.py --steps 20 --out runs/trl --resume       # goes on, with what was in flight
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from longtail import NativeEngine, Rollout, SampleStore
from longtail.bench.models import resolve_model
from longtail.trainer_adapter.plugins.trl_grpo import PartialRolloutGRPOTrainer

SHOTS = "12+35=47\n40+19=59\n23+23=46\n"


def additions(count: int) -> Dataset:
    numbers = random.Random(0)
    pairs = [(numbers.randrange(10, 50), numbers.randrange(10, 50)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"{SHOTS}{a}+{b}=", "answer": str(a + b)} for a, b in pairs])


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Columns of the dataset belong to the completions, also of prompts that were asked steps ago."""
    return [float(text.split("\n")[0].strip() == right) for text, right in zip(completions, answer, strict=True)]


def main(model_name: str, steps: int, out: Path, resume: bool = False) -> PartialRolloutGRPOTrainer:
    path = resolve_model(model_name)

    def open_rollout(model: Any, version: int) -> Rollout:
        store = SampleStore(out / "store")
        store.rewind_to(version)  # what newer weights than the checkpoint's have made is made again
        engine = NativeEngine(model, version=version, max_num_seqs=32, kv_cache_bytes=512 << 20)
        return Rollout(engine, strategy="over-issue:groups=4,extra=4", store=store)

    args = GRPOConfig(
        output_dir=str(out / "checkpoints"),
        max_steps=steps,
        save_steps=5,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=32,
        learning_rate=1e-5,
        vllm_importance_sampling_mode="token_truncate",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
    )
    trainer = PartialRolloutGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        is_right,
        args,
        train_dataset=additions(1000),
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        rollout=open_rollout,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    print(main(options.model, options.steps, options.out, options.resume).ledger.as_dict())
