"""verl's trainer itself, by the example's script, four steps with aborts: what it trains on is what was generated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.verl.support import reward, tiny

STEPS, PROMPTS, GROUP, LENGTH = 4, 2, 4, 512
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "verl_grpo.sh"
FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def overrides() -> list[str]:
    """Of the example's settings: a tiny model on a CPU, four short steps, and what is trained on is written down."""
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    ray = "ray_kwargs.ray_init"
    return [
        "trainer.device=cpu",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'support' / 'recorder.py'}",
        "trainer.v1.sampler.custom_sampler.name=EagerBuffer",
        "trainer.v1.colocate_async.num_warmup_batches=2",  # 24 samples for 8 slots: some run when two groups are whole
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        f"{ray}.num_cpus=16",
        f"+{ray}.num_gpus=1",
        f"+{ray}.include_dashboard=False",
        f"+{ray}.object_store_memory=200000000",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=16",
        f"data.max_response_length={LENGTH}",
        "data.dataloader_num_workers=0",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"++{actor}.fsdp_config.mixed_precision={FLOAT32}",
        f"{actor}.ppo_mini_batch_size={PROMPTS}",
        f"{actor}.optim.lr=1e-3",
        f"{rollout}.n={GROUP}",
        f"{rollout}.max_num_seqs=8",
        f"{rollout}.max_num_batched_tokens=64",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.engine_kwargs.longtail.threads=1",
        f"reward.custom_reward_function.path={HERE / 'support' / 'reward.py'}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the trainer trained on in each step."""
    folder = tmp_path_factory.mktemp("verl")
    model = tiny.save(folder / "model")
    train, val = tiny.save_rows(folder / "train.parquet", 32), tiny.save_rows(folder / "val.parquet", 2)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    log = folder / "log"
    with open(log, "w") as out:
        done = subprocess.run(
            ["bash", EXAMPLE, model, train, val, *overrides()],
            env={**os.environ, "LONGTAIL_TEST_RECORDS": str(folder), "PATH": path},
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=800,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-6000:]
    return [torch.load(folder / f"step-{step}.pt", weights_only=False) for step in range(1, STEPS + 1)]


def samples(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A dict for each trained sample, with the columns as lists, its step and its key."""
    columns = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "rm_scores")
    found = []
    for step in steps:
        for i, key in enumerate(step["keys"]):
            sample = {name: step[name][i].tolist() for name in columns}
            sample |= {name: step[name][i] for name in ("uid", "reward_model", "extra_fields")}
            found.append({**sample, "step": step["step"], "key": key})
    return found


def test_each_group_is_whole_and_trained_once(steps: list[dict[str, Any]]) -> None:
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    rows = samples(steps)
    assert len(rows) == STEPS * PROMPTS * GROUP
    assert set(Counter(row["uid"] for row in rows).values()) == {GROUP}
    assert len({row["key"] for row in rows}) == len(rows)
    assert len({(row["uid"], row["step"]) for row in rows}) == STEPS * PROMPTS, "a group is trained in one step"


def test_rows_and_responses_stay_together(steps: list[dict[str, Any]]) -> None:
    tokenizer = tiny.tokenizer()
    for row in samples(steps):
        answer = row["reward_model"]["ground_truth"]
        asked = [{"role": "user", "content": tiny.question(int(answer) // 2)}]
        assert row["prompts"] == tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        text = tokenizer.decode(row["responses"], skip_special_tokens=True)
        assert sum(row["rm_scores"]) == pytest.approx(reward.compute_score("sums", text, answer), abs=1e-6)


def test_responses_are_whole(steps: list[dict[str, Any]]) -> None:
    for row in samples(steps):
        ends = [i for i, token in enumerate(row["responses"]) if token == 1]
        assert ends == [len(row["responses"]) - 1] or (not ends and len(row["responses"]) == LENGTH)
        assert row["response_mask"] == [1] * len(row["responses"])


def test_samples_start_in_one_step_and_finish_in_another(steps: list[dict[str, Any]]) -> None:
    spans: Counter[int] = Counter()
    for row in samples(steps):
        versions, fields = row["extra_fields"]["versions"], row["extra_fields"]
        assert len(versions) == len(row["responses"]) == len(row["rollout_log_probs"])
        assert versions == sorted(versions) and versions[0] >= 0 and versions[-1] < row["step"]
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (versions[0], versions[-1])
        spans[len(set(versions))] += 1
    assert sum(count for span, count in spans.items() if span > 1) >= 2, spans
    stats = steps[-1]["stats"]
    assert stats["num_aborted"] >= 2 and stats["num_resumed"] >= 2 and stats["num_failed"] == 0, stats
    assert stats["global_steps"] == STEPS - 1


def test_logprobs_are_those_of_the_weights_that_made_them(steps: list[dict[str, Any]]) -> None:
    """By verl's own function: the actor agrees on tokens of its own weights, and not on those of older ones."""
    for step in steps:
        assert step["fresh"]["training/rollout_probs_diff_valid"] == 1
        assert step["fresh"]["training/rollout_probs_diff_max"] < 1e-4, step["fresh"]
    first = steps[0]["metrics"]
    assert first["training/rollout_probs_diff_max"] < 1e-4, "all its tokens are fresh"
    stale = [step["stale"] for step in steps if step["stale"]["training/rollout_probs_diff_valid"]]
    assert stale and all(metrics["training/rollout_probs_diff_max"] > 1e-4 for metrics in stale)


def test_verl_corrects_what_is_stale(steps: list[dict[str, Any]]) -> None:
    assert any(name.startswith("rollout_corr/") for step in steps for name in step["metrics"])
